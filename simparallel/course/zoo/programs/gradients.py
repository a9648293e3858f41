"""Mistakes with the gradients of data-parallel training."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X, Y
from simparallel.errors import AutogradError, CollectiveMismatchError, UnusedParameterError


@wrong(
    "Gradients are never summed over the ranks",
    lesson=3,
    seen="The loss falls on every rank, but each rank trains a model of its own.",
    says="result of weight",
    elsewhere="MPI, NCCL and torch.distributed do not compare weights, so the run ends as usual.",
)
def no_all_reduce():
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


@wrong(
    "The optimizer steps before the gradients are reduced",
    lesson=3,
    seen="Weights differ between ranks, although after each step the gradients are equal.",
    says="result of weight",
    elsewhere="Horovod's optimizer waits for the gradients in step(), and PyTorch's DistributedDataParallel "
    "reduces them in backward(), so the order cannot be wrong. By hand, nothing checks it.",
)
def reduce_after_step():
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


@wrong(
    "Gradients are summed, not averaged",
    lesson=3,
    seen="The ranks agree, but on n ranks the learning rate is in effect n times larger.",
    says="each is 2 times",
    elsewhere="MindSpore sums by default: gradients_mean is False. PyTorch's DistributedDataParallel and Horovod "
    "average by default.",
)
def sum_of_gradients():
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    loss.backward()
    for parameter in model.parameters():
        sp.all_reduce(parameter.grad)  # -
        # + sp.all_reduce(parameter.grad, "mean")
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@wrong(
    "The program averages over the ranks, and DistributedDataParallel does, too",
    lesson=3,
    seen="The ranks agree, but on n ranks the gradients are n times too small.",
    says="each is 0.5 times",
    elsewhere="The same in PyTorch, whose DistributedDataParallel divides by the number of ranks in any case.",
)
def divided_twice():
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    (loss / size).backward()  # -
    # + loss.backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


@wrong(
    "The loss is averaged over the ranks, but its gradients are not",
    lesson=3,
    seen="The loss in the log is equal on all ranks and falls, and the models drift apart.",
    says="result of weight",
    elsewhere="torch.distributed.all_reduce has no gradient either; newer versions of PyTorch warn in backward "
    "that it has no autograd kernel.",
)
def loss_averaged():
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


@wrong(
    "Features are gathered for a loss over all ranks, without a gradient",
    lesson=3,
    seen="The loss is right, but its gradient lacks the part that comes through other ranks.",
    raises=AutogradError,
    says="functions.all_gather",
    elsewhere="The tensors of torch.distributed.all_gather have no gradient; those of "
    "torch.distributed.nn.functional.all_gather have one.",
)
def gather_without_gradient():
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 2))
    features = model(X[rank::size])
    everyone = sp.all_gather(features)  # -
    # + everyone = sp.functions.all_gather(features)
    similarity = features @ everyone.T
    similarity.mean().backward()
    return model.module.weight.grad


@wrong(
    "Accumulated gradients are not divided by the number of micro-batches",
    lesson=3,
    seen="With k micro-batches each step is k times too long.",
    says="each is 0.25 times",
    elsewhere="PyTorch adds to .grad and leaves the division to the program. Accelerate's backward() divides the loss.",
    world_size=4,
)
def accumulation_not_divided():
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    count = 4 // size  # micro-batches of six samples: four on one rank, one on each of four ranks
    for part in np.split(np.arange(24)[rank::size], count):
        loss = sp.functions.mse_loss(model(X[part]), Y[part])
        loss.backward()  # -
        # + (loss / count).backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


@wrong(
    "Gradients are reduced for the first micro-batch in place of the last",
    lesson=3,
    seen="Each rank steps with its own gradients, and the models drift apart.",
    says="result of weight",
    elsewhere="PyTorch's no_sync() does not notice it either; modelscope/FunASR#3472 is such a case.",
)
def no_sync_off_by_one():
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


@wrong(
    "zero_grad() is called for each micro-batch",
    lesson=3,
    seen="Only the last micro-batch counts. The loss falls, so the program looks right.",
    says="result",
    elsewhere="PyTorch cannot know what is meant. Accelerate's optimizer skips zero_grad() while gradients accumulate.",
    world_size=4,
)
def zero_grad_in_loop():
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


@wrong(
    "Gradients are clipped before they are reduced",
    lesson=3,
    seen="The ranks agree, but ranks with large gradients count less than they should.",
    says="result of weight",
    elsewhere="PyTorch's DistributedDataParallel has reduced the gradients when backward() returns. Horovod asks "
    "for optimizer.synchronize() before clipping.",
)
def clip_before_reduce():
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


@wrong(
    "Each rank draws its own initial weights",
    lesson=3,
    seen="Equal gradients change different weights, so the ranks never agree.",
    says="result of weight",
    elsewhere="PyTorch's DistributedDataParallel sends the weights of rank 0 to all ranks when it is made. With "
    "Horovod the program calls broadcast_parameters, and nothing notices if it does not.",
)
def seed_of_each_rank():
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


@wrong(
    "A part of the model is left out of the loss",
    lesson=3,
    seen="No gradient reaches the weights of that part, so the ranks wait for a bucket that is never full.",
    raises=UnusedParameterError,
    says="find_unused_parameters",
    elsewhere="PyTorch raises in the next forward, because the last reduction has not finished, and names the "
    "parameters if TORCH_DISTRIBUTED_DEBUG is set.",
)
def unused_head():
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


@wrong(
    "Each rank reduces its gradients in an order of its own",
    lesson=2,
    seen="With equal shapes, gradients of different weights are added to each other.",
    raises=CollectiveMismatchError,
    says="They differ in: shape",
    elsewhere="NCCL does not compare calls: it may hang, or give wrong numbers. Horovod matches tensors by name, "
    "so there any order is right.",
)
def largest_gradient_first():
    rank, size = sp.get_rank(), sp.get_world_size()
    x, y = (X / 9, Y) if rank == 0 else (X, Y / 9)
    model = sp.nn.Sequential(sp.nn.Linear(4, 3), sp.nn.Linear(3, 2), sp.nn.Linear(2, 1))
    sp.functions.mse_loss(model(x[rank::size]), y[rank::size]).backward()
    order = sorted(model.parameters(), key=lambda p: -np.abs(p.grad).max())  # -
    # + order = model.parameters()
    for parameter in order:
        sp.all_reduce(parameter.grad, "mean")
    return [parameter.grad for parameter in model.parameters()]
