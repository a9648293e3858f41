"""Mistakes with samples, batches and metrics."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import LABELS, X, Y
from simparallel.errors import CommError


@wrong(lesson=3, raises=UserWarning, says="set_epoch")
def no_set_epoch():
    """set_epoch is left out.

    Every epoch has the same order of samples. Training works, a little worse.

    Elsewhere: PyTorch's DistributedSampler repeats the order, too, and does not warn. Lightning calls set_epoch
    itself.
    """
    data = sp.data.TensorDataset(X, Y)
    sampler = sp.data.DistributedSampler(data)
    losses = []
    for epoch in range(3):
        sp.log(epoch=epoch)
        # + sampler.set_epoch(epoch)
        for x, y in sp.data.DataLoader(data, 4, sampler=sampler):
            losses.append(float(np.square(x - y).mean()))
    return sp.all_reduce(np.array(losses), "mean")


@wrong(lesson=3, says="result of weight")
def no_sampler():
    """Every rank loads all samples.

    An epoch takes as long as on one device: n ranks do the same work n times.

    Elsewhere: PyTorch and Horovod leave it to the program to give each rank a part. Lightning and Accelerate cut the
    loader themselves.
    """
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    data = sp.data.TensorDataset(X, Y)
    sampler = None  # -
    # + sampler = sp.data.DistributedSampler(data, shuffle=False)
    for x, y in sp.data.DataLoader(data, 8 // sp.get_world_size(), sampler=sampler):
        optimizer.zero_grad()
        sp.functions.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.module.state_dict()


@wrong(lesson=3, says="result")
def sampler_seed_of_each_rank():
    """The seed of the sampler is different on each rank.

    In an epoch some samples are seen twice and others never.

    Elsewhere: PyTorch's DistributedSampler asks for the same seed on all ranks and does not compare them.
    """
    sampler = sp.data.DistributedSampler(X, seed=sp.get_rank())  # -
    # + sampler = sp.data.DistributedSampler(X, seed=0)
    seen = sp.all_gather(np.array(list(sampler)))
    return np.sort(seen)


@wrong(lesson=3, says="result of weight")
def batch_size_of_one_device():
    """Each rank takes the batch size of one device.

    An epoch has fewer steps than on one device, each with a larger batch.

    Elsewhere: PyTorch's batch_size counts one rank's samples, too. Accelerate has split_batches to choose.
    """
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    data = sp.data.TensorDataset(X, Y)
    sampler = sp.data.DistributedSampler(data, shuffle=False)
    batch_size = 8  # -
    # + batch_size = 8 // sp.get_world_size()
    for x, y in sp.data.DataLoader(data, batch_size, sampler=sampler):
        optimizer.zero_grad()
        sp.functions.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.module.state_dict()


@wrong(lesson=3, says="result")
def mean_of_means():
    """Means over unequal parts are averaged.

    Samples on ranks with few samples count more. The error is small and never goes away.

    Elsewhere: PyTorch's DistributedDataParallel averages over ranks, not over samples.
    """
    part = np.array_split(np.arange(23), sp.get_world_size())[sp.get_rank()]
    model = sp.nn.Linear(4, 1)
    loss = sp.functions.mse_loss(model(X[part]), Y[part])
    # + loss = loss * len(part) * sp.get_world_size() / 23
    loss.backward()
    return sp.all_reduce(model.weight.grad, "mean")


@wrong(lesson=3, says="result, rank 0", world_size=4)
def padded_evaluation():
    """An evaluation counts the samples that the sampler repeats.

    The accuracy depends a little on the number of ranks.

    Elsewhere: PyTorch's DistributedSampler repeats samples, too. Lightning warns of it in test(), and Accelerate's
    gather_for_metrics drops them.
    """
    data = sp.data.TensorDataset(X[:21], LABELS[:21])
    sampler = sp.data.DistributedSampler(data, shuffle=False)
    part = np.array(list(sampler))  # -
    # + part = np.arange(21)[sp.get_rank() :: sp.get_world_size()]
    hits = X[part].argmax(1) == LABELS[part]
    right, count = sp.all_reduce(np.array([hits.sum(), len(part)]))
    return right / count


@wrong(lesson=3, raises=CommError, says="returned from its function and will never join")
def uneven_number_of_batches():
    """A rank has fewer batches than the others.

    The last step hangs.

    Elsewhere: PyTorch's DistributedDataParallel waits until the timeout of the process group; its Join context and
    Horovod's join() are made for such data.
    """
    part = np.array_split(np.arange(5), sp.get_world_size())[sp.get_rank()]  # -
    # + part = np.array_split(np.arange(4), sp.get_world_size())[sp.get_rank()]
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    for i in part:
        sp.functions.mse_loss(model(X[i : i + 1]), Y[i : i + 1]).backward()
    return model.module.weight.grad


@wrong(lesson=8, raises=CommError, says="returned from its function and will never join")
def early_stopping_by_rank():
    """Each rank decides by itself when to stop.

    The ranks that go on hang in their next step.

    Elsewhere: The same hang in PyTorch, MPI and Horovod. Lightning's EarlyStopping stops all ranks if one decides to.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(100):
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stop = loss.item() < 3  # -
        # + stop = sp.all_reduce(np.array([loss.item()]), "mean")[0] < 3
        if stop:
            break
    return model.module.state_dict()
