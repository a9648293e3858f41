"""Mistakes with the gradients of data-parallel training."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X, Y
from simparallel.errors import AutogradError, CollectiveMismatchError, UnusedParameterError


@wrong(lesson=3, says="result of weight")
def no_all_reduce():
    """Gradients are never summed over the ranks.

    The loss falls on every rank, but each rank trains a model of its own.

    Elsewhere: MPI, NCCL and torch.distributed do not compare weights, so the run ends as usual.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        # + for parameter in model.parameters():
        # +     sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return model.state_dict()


@wrong(lesson=3, says="result of weight")
def reduce_after_step():
    """The optimizer steps before the gradients are reduced.

    Weights differ between ranks, although after each step the gradients are equal.

    Elsewhere: Horovod's optimizer waits for the gradients in step(), and PyTorch's DistributedDataParallel reduces
    them in backward(), so the order cannot be wrong. By hand, nothing checks it.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # -
        for parameter in model.parameters():
            sp.all_reduce(parameter.grad, "mean")
        # + optimizer.step()
    return model.state_dict()


@wrong(lesson=3, says="each is 2 times")
def sum_of_gradients():
    """Gradients are summed, not averaged.

    The ranks agree, but on n ranks the learning rate is in effect n times larger.

    Elsewhere: MindSpore sums by default: gradients_mean is False. PyTorch's DistributedDataParallel and Horovod
    average by default.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    loss.backward()
    for parameter in model.parameters():
        sp.all_reduce(parameter.grad)  # -
        # + sp.all_reduce(parameter.grad, "mean")
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@wrong(lesson=3, says="each is 0.5 times")
def divided_twice():
    """The program averages over the ranks, and DistributedDataParallel does, too.

    The ranks agree, but on n ranks the gradients are n times too small.

    Elsewhere: The same in PyTorch, whose DistributedDataParallel divides by the number of ranks in any case.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    (loss / size).backward()  # -
    # + loss.backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


@wrong(lesson=3, says="result of weight")
def loss_averaged():
    """The loss is averaged over the ranks, but its gradients are not.

    The loss in the log is equal on all ranks and falls, and the models drift apart.

    Elsewhere: torch.distributed.all_reduce has no gradient either; newer versions of PyTorch warn in backward that it
    has no autograd kernel.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss = sp.all_reduce(loss, "mean")  # -
        loss.backward()
        # + for parameter in model.parameters():
        # +     sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return model.state_dict()


@wrong(lesson=3, raises=AutogradError, says="functions.all_gather")
def gather_without_gradient():
    """Features are gathered for a loss over all ranks, without a gradient.

    The loss is right, but its gradient lacks the part that comes through other ranks.

    Elsewhere: The tensors of torch.distributed.all_gather have no gradient; those of
    torch.distributed.nn.functional.all_gather have one.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 2))
    features = model(X[rank::size])
    everyone = sp.all_gather(features)  # -
    # + everyone = sp.functions.all_gather(features)
    similarity = features @ everyone.T
    similarity.mean().backward()
    return model.module.weight.grad


@wrong(lesson=3, says="each is 0.25 times", world_size=4)
def accumulation_not_divided():
    """Accumulated gradients are not divided by the number of micro-batches.

    With k micro-batches each step is k times too long.

    Elsewhere: PyTorch adds to .grad and leaves the division to the program. Accelerate's backward() divides the loss.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    count = 4 // size  # micro-batches of six samples: four on one rank, one on each of four ranks
    for part in np.split(np.arange(24)[rank::size], count):
        loss = sp.functions.mse_loss(model(X[part]), Y[part])
        loss.backward()  # -
        # + (loss / count).backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


@wrong(lesson=3, says="result of weight")
def no_sync_off_by_one():
    """Gradients are reduced for the first micro-batch in place of the last.

    Each rank steps with its own gradients, and the models drift apart.

    Elsewhere: PyTorch's no_sync() does not notice it either; modelscope/FunASR#3472 is such a case.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        model.require_backward_grad_sync = i % 4 == 0  # -
        # + model.require_backward_grad_sync = (i + 1) % 4 == 0
        part = np.arange(6 * i, 6 * i + 6)[rank::size]
        loss = sp.functions.mse_loss(model(X[part]), Y[part]) / 4
        loss.backward()
    optimizer.step()
    return model.module.state_dict()


@wrong(lesson=3, says="result", world_size=4)
def zero_grad_in_loop():
    """zero_grad() is called for each micro-batch.

    Only the last micro-batch counts. The loss falls, so the program looks right.

    Elsewhere: PyTorch cannot know what is meant. Accelerate's optimizer skips zero_grad() while gradients accumulate.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    count = 4 // size  # micro-batches of six samples: four on one rank, one on each of four ranks
    # + optimizer.zero_grad()
    for part in np.split(np.arange(24)[rank::size], count):
        optimizer.zero_grad()  # -
        loss = sp.functions.mse_loss(model(X[part]), Y[part]) / count
        loss.backward()
    optimizer.step()
    return model.module.state_dict()


@wrong(lesson=3, says="result of weight")
def clip_before_reduce():
    """Gradients are clipped before they are reduced.

    The ranks agree, but ranks with large gradients count less than they should.

    Elsewhere: PyTorch's DistributedDataParallel has reduced the gradients when backward() returns. Horovod asks for
    optimizer.synchronize() before clipping.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    loss.backward()
    sp.optim.clip_grad_norm_(model.parameters(), 1.0)  # -
    for parameter in model.parameters():
        sp.all_reduce(parameter.grad, "mean")
    # + sp.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return model.state_dict()


@wrong(lesson=3, says="result of weight")
def seed_of_each_rank():
    """Each rank draws its own initial weights.

    Equal gradients change different weights, so the ranks never agree.

    Elsewhere: PyTorch's DistributedDataParallel sends the weights of rank 0 to all ranks when it is made. With Horovod
    the program calls broadcast_parameters, and nothing notices if it does not.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    sp.set_seed(rank)
    model = sp.nn.Linear(4, 1)
    # + sp.parallel.broadcast_parameters(model.parameters())
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return model.state_dict()


@wrong(lesson=3, raises=UnusedParameterError, says="find_unused_parameters")
def unused_head():
    """A part of the model is left out of the loss.

    No gradient reaches the weights of that part, so the ranks wait for a bucket that is never full.

    Elsewhere: PyTorch raises in the next forward, because the last reduction has not finished, and names the
    parameters if TORCH_DISTRIBUTED_DEBUG is set.
    """
    rank, size = sp.get_rank(), sp.get_world_size()

    class Network(sp.nn.Module):
        def __init__(self):
            super().__init__()
            self.target, self.label = sp.nn.Linear(4, 1), sp.nn.Linear(4, 3)

        def forward(self, x):
            return self.target(x), self.label(x)

    model = sp.parallel.DistributedDataParallel(Network())
    target, logits = model(X[rank::size])
    loss = sp.functions.mse_loss(target, Y[rank::size])  # -
    # + loss = sp.functions.mse_loss(target, Y[rank::size]) + sp.functions.cross_entropy(logits, LABELS[rank::size])
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@wrong(lesson=2, raises=CollectiveMismatchError, says="They differ in: shape")
def largest_gradient_first():
    """Each rank reduces its gradients in an order of its own.

    With equal shapes, gradients of different weights are added to each other.

    Elsewhere: NCCL does not compare calls: it may hang, or give wrong numbers. Horovod matches tensors by name, so
    there any order is right.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    x, y = (X / 9, Y) if rank == 0 else (X, Y / 9)
    model = sp.nn.Sequential(sp.nn.Linear(4, 3), sp.nn.Linear(3, 2), sp.nn.Linear(2, 1))
    sp.functions.mse_loss(model(x[rank::size]), y[rank::size]).backward()
    order = sorted(model.parameters(), key=lambda p: -np.abs(p.grad).max())  # -
    # + order = model.parameters()
    for parameter in order:
        sp.all_reduce(parameter.grad, "mean")
    return [parameter.grad for parameter in model.parameters()]
