"""Mistakes with samples, batches and metrics."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import LABELS, X, Y
from simparallel.errors import CommError


@wrong(
    "set_epoch is left out",
    lesson=3,
    seen="Every epoch has the same order of samples. Training works, a little worse.",
    raises=UserWarning,
    says="set_epoch",
    elsewhere="PyTorch's DistributedSampler repeats the order, too, and does not warn. Lightning calls set_epoch "
    "itself.",
)
def no_set_epoch():
    data = sp.data.TensorDataset(X, Y)
    sampler = sp.data.DistributedSampler(data)
    losses = []
    for epoch in range(3):
        sp.log(epoch=epoch)
        # + sampler.set_epoch(epoch)
        for x, y in sp.data.DataLoader(data, 4, sampler=sampler):
            losses.append(float(np.square(x - y).mean()))
    return sp.all_reduce(np.array(losses), "mean")


@wrong(
    "Every rank loads all samples",
    lesson=3,
    seen="An epoch takes as long as on one device: n ranks do the same work n times.",
    says="result of weight",
    elsewhere="PyTorch and Horovod leave it to the program to give each rank a part. Lightning and Accelerate cut "
    "the loader themselves.",
)
def no_sampler():
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


@wrong(
    "The seed of the sampler is different on each rank",
    lesson=3,
    seen="In an epoch some samples are seen twice and others never.",
    says="result",
    elsewhere="PyTorch's DistributedSampler asks for the same seed on all ranks and does not compare them.",
)
def sampler_seed_of_each_rank():
    sampler = sp.data.DistributedSampler(X, seed=sp.get_rank())  # -
    # + sampler = sp.data.DistributedSampler(X, seed=0)
    seen = sp.all_gather(np.array(list(sampler)))
    return np.sort(seen)


@wrong(
    "Each rank takes the batch size of one device",
    lesson=3,
    seen="An epoch has fewer steps than on one device, each with a larger batch.",
    says="result of weight",
    elsewhere="PyTorch's batch_size counts one rank's samples, too. Accelerate has split_batches to choose.",
)
def batch_size_of_one_device():
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


@wrong(
    "Means over unequal parts are averaged",
    lesson=3,
    seen="Samples on ranks with few samples count more. The error is small and never goes away.",
    says="result",
    elsewhere="PyTorch's DistributedDataParallel averages over ranks, not over samples.",
)
def mean_of_means():
    part = np.array_split(np.arange(23), sp.get_world_size())[sp.get_rank()]
    model = sp.nn.Linear(4, 1)
    loss = sp.functions.mse_loss(model(X[part]), Y[part])
    # + loss = loss * len(part) * sp.get_world_size() / 23
    loss.backward()
    return sp.all_reduce(model.weight.grad, "mean")


@wrong(
    "An evaluation counts the samples that the sampler repeats",
    lesson=3,
    seen="The accuracy depends a little on the number of ranks.",
    says="result, rank 0",
    elsewhere="PyTorch's DistributedSampler repeats samples, too. Lightning warns of it in test(), and "
    "Accelerate's gather_for_metrics drops them.",
    world_size=4,
)
def padded_evaluation():
    data = sp.data.TensorDataset(X[:21], LABELS[:21])
    sampler = sp.data.DistributedSampler(data, shuffle=False)
    part = np.array(list(sampler))  # -
    # + part = np.arange(21)[sp.get_rank() :: sp.get_world_size()]
    hits = X[part].argmax(1) == LABELS[part]
    right, count = sp.all_reduce(np.array([hits.sum(), len(part)]))
    return right / count


@wrong(
    "A rank has fewer batches than the others",
    lesson=3,
    seen="The last step hangs.",
    raises=CommError,
    says="returned from its function and will never join",
    elsewhere="PyTorch's DistributedDataParallel waits until the timeout of the process group; its Join context "
    "and Horovod's join() are made for such data.",
)
def uneven_number_of_batches():
    part = np.array_split(np.arange(5), sp.get_world_size())[sp.get_rank()]  # -
    # + part = np.array_split(np.arange(4), sp.get_world_size())[sp.get_rank()]
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    for i in part:
        sp.functions.mse_loss(model(X[i : i + 1]), Y[i : i + 1]).backward()
    return model.module.weight.grad


@wrong(
    "Each rank decides by itself when to stop",
    lesson=8,
    seen="The ranks that go on hang in their next step.",
    raises=CommError,
    says="returned from its function and will never join",
    elsewhere="The same hang in PyTorch, MPI and Horovod. Lightning's EarlyStopping stops all ranks if one decides to.",
)
def early_stopping_by_rank():
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
