# %% [markdown]
# # Lesson 3: Data parallelism
#
# All ranks have the same model. Each one computes the gradients of its own part of the batch. The gradients are
# averaged, and all ranks make the same step. You need the collective `all_reduce` (lesson 2) and the training of one
# device (lesson 1).
#
# Run it: `python tutorials/03_data_parallel.py`, or open it as a notebook. Pictures also go into the folder
# `pictures`.
#
# First the result: four ranks train a network on handwritten digits. Each has a quarter of every batch.

# %%
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import RunFailedError

images, labels = sp.data.digits("train")[:]
loss_fn = sp.nn.CrossEntropyLoss()
P, BATCH = 4, 120


def make_network():
    sp.set_seed(1)
    first, second = (sp.nn.Linear(size, 256, weight_init="he_normal") for size in (64, 256))
    return sp.nn.Sequential(first, sp.nn.ReLU(), second, sp.nn.ReLU(), sp.nn.Linear(256, 10))


def train():
    model = sp.parallel.DistributedDataParallel(make_network())  # averages gradients during backward
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for first in range(0, len(images), BATCH):
        mine = range(first, first + BATCH)[sp.get_rank() :: P]
        loss = loss_fn(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.module.state_dict()


results = sp.launch(train, world_size=P)
parallel_losses = np.mean([losses for losses, _ in results], axis=0)
print(f"{len(parallel_losses)} steps: loss {parallel_losses[0]:.4f} -> {parallel_losses[-1]:.4f}")

# %% [markdown]
# ## The same on one device
#
# Predict first: one device trains with the whole batches. How far are its losses, and its weights, from those of the
# four ranks?


# %%
def train_alone():
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.3)
    losses = []
    for first in range(0, len(images), BATCH):
        loss = loss_fn(network(images[first : first + BATCH]), labels[first : first + BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network.state_dict()


def difference(a, b):
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "03_data_parallel", f"{name}.png"), dpi=100)


losses_alone, weights_alone = train_alone()
between_ranks = max(difference(results[0][1], weights) for _, weights in results)
to_one_device = difference(results[0][1], weights_alone)
print(f"weights: largest difference between ranks {between_ranks:g}, to one device {to_one_device:.0e}")
assert between_ranks == 0
assert to_one_device < 1e-5
assert np.abs(parallel_losses - losses_alone).max() < 1e-5
show(sp.view.plot_loss({"four ranks": parallel_losses.tolist(), "one device": losses_alone}), "losses")

# %% [markdown]
# Between ranks there is no difference at all: they get the same bits from `all_reduce`. To one device the last bits
# differ, because the sums have another order.
#
# The reason is one line of algebra. The loss is a mean over the batch, and so is its gradient. A mean over 120 samples
# is the mean of four means over 30 samples. Remember the condition: the parts have *equal* sizes.
#
# ## First without ranks: accumulation
#
# A single device can use the same algebra, one part after the other. `backward` *adds* to the gradients, so call it
# for each part, and make one step at the end. Then only one part's activations are in memory at a time.
#
# Predict first: 960 samples at once, or in eight parts. How much of the memory is still needed?


# %%
def accumulated(parts):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.3)
    for x, y in zip(np.split(images[:960], parts), np.split(labels[:960], parts), strict=True):
        loss = loss_fn(network(x), y) / parts  # a mean of means
        loss.backward()
    optimizer.step()
    return network.state_dict()


whole, in_parts = (sp.launch(accumulated, (parts,), record="full", transport="inline") for parts in (1, 8))
assert difference(whole[0], in_parts[0]) < 1e-6
peaks = [run.memory[0]["peak_bytes"] / 1e6 for run in (whole, in_parts)]
print(f"peak of memory: {peaks[0]:.2f} MB at once, {peaks[1]:.2f} MB in eight parts")
assert peaks[1] < peaks[0] / 2
figure, axes = plt.subplots(2, figsize=(11, 6), layout="constrained")
for run, ax, title in zip((whole, in_parts), axes, ("960 samples at once", "eight parts of 120"), strict=True):
    sp.view.plot_memory(run.trace.events, ax=ax, title=title)
    ax.set_ylim(0, 1.15 * peaks[0])
show(figure, "accumulation")

# %% [markdown]
# Less than half. The parameters and their gradients stay, the activations shrink to an eighth. The price is time: eight
# small batches take longer than a large one. (The picture shows the memory at the end of each operation. The printed
# peaks are a little higher, because they include the time in between.)
#
# ## DataParallel: many devices, one process
#
# The oldest way to use several devices: one process drives them all. In each step it copies the model from the first
# device to the others, cuts the batch, runs the copies in threads, and adds the gradients on the first device. Only
# one line of the program changes.
#
# Predict first: the picture shows one step. What is the first device busy with, while the others wait?


# %%
def step_of(model, x, y, steps=2):
    """Train, and return the last loss."""
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def with_threads():
    return step_of(sp.parallel.DataParallel(make_network()), images[:BATCH], labels[:BATCH])


def last_step(run):
    """Return the events of the last step, and its simulated time [µs]."""
    last = max(event.step for event in run.trace.events if event.kind == "forward")
    events = [event for event in run.trace.events if event.step == last]
    return events, (max(e.sim_end_ps for e in events) - min(e.sim_start_ps for e in events)) / 1e6


link = sp.LinkSpec(latency_s=1e-6, bandwidth_bytes_per_s=200e9)  # between any two devices
run = sp.launch(with_threads, devices_per_rank=P, link=link, transport="inline")
events, threads_us = last_step(run)
print(f"a step of DataParallel on four devices: {threads_us:.0f} µs simulated")
show(sp.view.plot_timeline(events, title="DataParallel: one process, four devices"), "threads")

# %% [markdown]
# It is busy with copies: the model and the batch go out, the outputs come in, and so do the gradients. All of them pass
# through the first device. One Python interpreter also starts the operations of all devices. So one process for each
# device is better.
#
# ## By hand
#
# With a process for each device no model has to be copied: all ranks begin with the same weights, add the same
# gradients, and so make the same steps. `all_reduce` with `"mean"` after `backward` is all it takes.


# %%
def quarter(count=BATCH):
    mine = slice(sp.get_rank(), count, sp.get_world_size())
    return images[mine], labels[mine]


def by_hand(steps=2):
    network = make_network()
    parameters = list(network.parameters())
    optimizer = sp.optim.SGD(parameters, lr=0.3)
    x, y = quarter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(network(x), y).backward()
        for parameter in parameters:
            sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return network.state_dict()


run = sp.launch(by_hand, world_size=P, link=link, transport="inline")
reference = make_network()
step_of(reference, images[:BATCH], labels[:BATCH])
assert difference(run[0], reference.state_dict()) < 1e-6
events, hand_us = last_step(run)
print(f"a step by hand: {hand_us:.0f} µs simulated, of DataParallel {threads_us:.0f} µs")
assert hand_us < threads_us
show(sp.view.plot_timeline([e for e in events if e.rank < 2], title="By hand: all-reduce after backward"), "by_hand")

# %% [markdown]
# It is right, and faster. But look at the lane `compute`: during the all-reduces the device does nothing. And there
# are six of them, one for each weight and bias, each with its latency.
#
# ## Buckets and overlap
#
# `DistributedDataParallel` does two things about that (Li et al. 2020):
#
# - Gradients are copied into *buckets*, and each bucket is one all-reduce. That saves latency.
# - Backward computes the gradients of the last layer first. As soon as a bucket is full, its all-reduce begins, while
#   backward continues with the layers before. Communication *overlaps* with computation.
#
# Predict first: is one large bucket best, or a bucket for each layer, or something in between?


# %%
def make_deep():
    sp.set_seed(1)
    return sp.nn.Sequential(sp.nn.Linear(64, 512), *(sp.nn.Linear(512, 512) for _ in range(8)), sp.nn.Linear(512, 10))


def overlapped(bucket_mb):
    model = sp.parallel.DistributedDataParallel(make_deep(), bucket_cap_mb=bucket_mb)
    return step_of(model, *quarter(64))


step_us, runs = {}, {}
for bucket_mb in (0.001, 1.1, 2.2, 4.4, 25):
    runs[bucket_mb] = sp.launch(overlapped, (bucket_mb,), world_size=P, link=link, transport="inline")
    events, step_us[bucket_mb] = last_step(runs[bucket_mb])
    count = sum(event.kind == "collective" and event.rank == 0 for event in events)
    print(f"buckets of at most {bucket_mb:6.3f} MiB: {count:2d} all-reduces, {step_us[bucket_mb]:.0f} µs simulated")
best = min(step_us, key=step_us.get)
figure, axes = plt.subplots(3, figsize=(13, 7), layout="constrained")
for ax, bucket_mb in zip(axes, (0.001, best, 25), strict=True):
    shown = [event for event in last_step(runs[bucket_mb])[0] if event.rank == 0]
    ax.set_xlim(0, max(step_us.values()))
    sp.view.plot_timeline(shown, ax=ax, title=f"at most {bucket_mb} MiB in a bucket: {step_us[bucket_mb]:.0f} µs")
show(figure, "buckets")

# %% [markdown]
# In between. With one bucket the all-reduce cannot begin before the end of backward. With a bucket for each array, the
# latencies add up. The losses are equal to the last bit in all cases.

# %%
assert best not in (0.001, 25)
assert len({tuple(run) for run in runs.values()}) == 1

# %% [markdown]
# ## Accumulation on ranks: `no_sync`
#
# With accumulation *and* ranks, only the last backward has to average. `no_sync()` leaves the gradients on their
# ranks until then.
#
# Predict first: three micro-batches in each step. How many bytes does `no_sync` save, and do the weights change?


# %%
def accumulate_on_ranks(saves):
    model = sp.parallel.DistributedDataParallel(make_network())
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    x, y = quarter()
    parts = list(zip(np.split(x, 3), np.split(y, 3), strict=True))
    for number, (x_part, y_part) in enumerate(parts):
        is_last = number == len(parts) - 1
        with model.no_sync() if saves and not is_last else nullcontext():
            (loss_fn(model(x_part), y_part) / len(parts)).backward()
    optimizer.step()
    return model.module.state_dict()


often, once = (sp.launch(accumulate_on_ranks, (saves,), world_size=P, transport="inline") for saves in (False, True))
sent = [sum(e.sent_bytes for e in run.trace.events if e.name == "all_reduce" and e.rank == 0) for run in (often, once)]
print(f"sent by rank 0: {sent[0] / 1e6:.2f} MB in every backward, {sent[1] / 1e6:.2f} MB in the last one")
assert sent[0] == 3 * sent[1]
assert difference(often[0], once[0]) < 1e-6

# %% [markdown]
# It saves two thirds of the bytes, because only the last of three backwards sends. The weights are the same but for
# rounding.
#
# ## Which samples does a rank get?
#
# So far every program cut its batches itself. `DistributedSampler` does it for a `DataLoader`: it shuffles all
# samples, in the same order on all ranks, and gives rank `r` the samples `r`, `r + P`, `r + 2 P`, and so on.
#
# Predict first: ten samples for four ranks. How many does each rank get?


# %%
numbers = sp.data.TensorDataset(np.arange(10))


def samples_of(epoch, drop_last=False):
    rows = []
    for rank in range(P):
        sampler = sp.data.DistributedSampler(numbers, P, rank, drop_last=drop_last)
        sampler.set_epoch(epoch)
        rows.append(sampler.indices().tolist())
    return rows


orders = {"epoch 0": samples_of(0), "epoch 1": samples_of(1), "epoch 1, drop_last": samples_of(1, drop_last=True)}
panels = {name: [[[(rank, i)] for i in row] for rank, row in enumerate(rows)] for name, rows in orders.items()}
show(sp.view.plot_chunks(panels, title="Ten samples for four ranks"), "sampler")
together = [i for row in orders["epoch 0"] for i in row]
print(f"epoch 0: {len(together)} samples, twice: {sorted(i for i in set(together) if together.count(i) > 1)}")
assert set(together) == set(range(10))
assert len(together) == 12
assert len({i for row in orders["epoch 1, drop_last"] for i in row}) == 8

# %% [markdown]
# Three each (`A9` in the picture is sample 9 on rank 0): the order is *padded* with its own beginning, so two samples
# count twice. All ranks must make equally many steps, or one would wait for a partner that has finished. With
# `drop_last=True` two samples are left out instead.
#
# The order depends on the epoch, and the sampler must be told. Predict first: what happens without `set_epoch`?


# %%
def two_epochs(tells_epoch):
    sampler = sp.data.DistributedSampler(numbers, seed=3)
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            if tells_epoch:
                sampler.set_epoch(epoch)
            loader = sp.data.DataLoader(numbers, 2, sampler=sampler)
            seen.append([int(i) for (batch,) in loader for i in batch])
    return seen, [str(warning.message) for warning in caught]


(same, said_once), (other, said_nothing) = (
    sp.launch(two_epochs, (tells,), world_size=P, transport="inline")[0] for tells in (False, True)
)
print("rank 0, without set_epoch:", *same)
print("rank 0, with set_epoch:   ", *other)
print(*said_once)
assert same[0] == same[1]
assert other[0] != other[1]
assert not said_nothing

# %% [markdown]
# Every epoch has the same order, and the same samples stay together on a rank. Training still works, only worse, so
# the mistake is easy to miss. That is why there is a warning here.
#
# ## Batch norm
#
# Batch norm normalises with the mean and the variance of the batch. A rank sees only its part.
#
# Predict first: 32 samples on 4 ranks. Are the losses those of one device?


# %%
def with_batch_norm(synchronized, steps=12):
    sp.set_seed(2)
    layers = [sp.nn.Linear(64, 32), sp.nn.BatchNorm1d(32), sp.nn.ReLU(), sp.nn.Linear(32, 10)]
    network = sp.nn.Sequential(*layers)
    if synchronized:
        network = sp.nn.SyncBatchNorm.convert_sync_batchnorm(network)
    model = sp.parallel.DistributedDataParallel(network)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        loss = loss_fn(model(quarter(32)[0]), quarter(32)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(sp.all_reduce(loss.detach().numpy().copy(), "mean")))  # the loss of all ranks together
    return losses


runs = {
    "four ranks, BatchNorm1d": sp.launch(with_batch_norm, (False,), world_size=P, transport="inline")[0],
    "four ranks, SyncBatchNorm": sp.launch(with_batch_norm, (True,), world_size=P, transport="inline")[0],
    "one device": sp.launch(with_batch_norm, (False,), world_size=1, transport="inline")[0],
}
for name, losses in runs.items():
    print(f"{name:<26} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
separate, synchronized, one = runs.values()
assert np.allclose(synchronized, one, rtol=1e-4)
assert abs(separate[0] - one[0]) > 1e-2
show(sp.view.plot_loss(runs, title="Batch norm over a part, and over the batch"), "batch_norm")

# %% [markdown]
# They are not: each rank normalises with the statistics of eight samples. `SyncBatchNorm` adds up the sums and the
# counts of all ranks, and gives the statistics of the whole batch. Its price is an all-reduce in each forward and each
# backward. With large parts it is rarely needed.
#
# ## What goes wrong
#
# The first four programs run to their end, with plausible losses. That makes their mistakes dangerous.
#
# **Parts of unequal size.** Ten samples on four ranks: 3, 3, 2 and 2. Every rank takes its mean loss, and the
# gradients are averaged. Predict first: how much does each sample count?


# %%
def gradient_of_ten(weighs):
    network = make_network()
    x, y = quarter(10)
    # The mean over ranks divides by P; a rank with more samples must count more.
    weight = len(x) * sp.get_world_size() / 10 if weighs else 1.0
    model = sp.parallel.DistributedDataParallel(network)
    (loss_fn(model(x), y) * weight).backward()
    return network[4].bias.grad.numpy()


exact = sp.launch(gradient_of_ten, (False,), world_size=1, transport="inline")[0]
plain, weighted = (sp.launch(gradient_of_ten, (weighs,), world_size=P, transport="inline")[0] for weighs in (0, 1))
wrong_by, right_by = (np.abs(found - exact).max() / np.abs(exact).max() for found in (plain, weighted))
print(f"largest error of the gradient: {wrong_by:.1%} plain, {right_by:.0e} weighted")
assert wrong_by > 0.01
assert right_by < 1e-5
counts = np.array([3, 3, 2, 2])
_, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
ax.bar(range(10), np.repeat(1 / (P * counts), counts), color=plt.get_cmap("tab10")(np.repeat(range(P), counts)))
ax.axhline(1 / 10, color="black", linestyle="--", label="mean over the batch")
ax.set(xlabel="sample, coloured by rank", ylabel="weight in the gradient", xticks=range(10))
ax.legend()
show(ax, "weights")

# %% [markdown]
# A sample on a rank with three counts 1/12, on a rank with two 1/8. The cure is a weight for each rank: its samples,
# divided by the mean number of samples.
#
# **A sum in place of a mean.** Predict first: `all_reduce(gradient)` without `"mean"`. What changes?


# %%
def first_weights(op, lr):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=lr)
    x, y = quarter()
    loss_fn(network(x), y).backward()
    for parameter in network.parameters():
        sp.all_reduce(parameter.grad, op)
    optimizer.step()
    return network.state_dict()


settings = (("mean", 0.3), ("sum", 0.3), ("sum", 0.3 / P))
mean, total, slow_total = (sp.launch(first_weights, each, world_size=P, transport="inline")[0] for each in settings)
print(
    f"sum for mean: weights differ by {difference(mean, total):.0e}, with lr / 4 by {difference(mean, slow_total):.0e}"
)
assert difference(mean, total) > 1e-3
assert difference(mean, slow_total) < 1e-6

# %% [markdown]
# The gradient is four times as large. This acts like a learning rate that is four times as large, and that grows with
# the number of ranks. (Adam divides by the size of the gradient, and hides the mistake.)
#
# **Different weights at the start.** A program by hand, in which each rank has a seed of its own. The gradients are
# averaged correctly. Predict first: do the models become equal over time?


# %%
def own_seeds(steps=10):
    sp.set_seed(sp.get_rank())
    network = sp.nn.Linear(64, 10)
    optimizer = sp.optim.SGD(network.parameters(), lr=0.3)
    x, y = quarter()
    apart = []
    for _ in range(steps):
        apart.append(sp.parallel.max_difference_between_ranks(network))
        optimizer.zero_grad()
        loss_fn(network(x), y).backward()
        for parameter in network.parameters():
            sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return apart


apart = sp.launch(own_seeds, world_size=P, transport="inline")[0]
print(f"largest difference between ranks: {apart[0]:.3f} at the start, {apart[-1]:.3f} after {len(apart) - 1} steps")
assert np.isclose(apart[0], apart[-1], rtol=1e-3)

# %% [markdown]
# Never: all ranks add the same step to different weights. `DistributedDataParallel` copies the weights of rank 0 to
# all ranks when it is made.
#
# **The same noise everywhere.** The reverse mistake: noise on the images should differ between ranks, but all of them
# have the same seed. Predict first: eight samples on four ranks; how many different rows of noise are there?


# %%
def noise(with_rank):
    random = np.random.default_rng([7, sp.get_rank()] if with_rank else 7)
    return random.normal(size=(2, 64))


for with_rank in (False, True):
    rows = np.concatenate(sp.launch(noise, (with_rank,), world_size=P, transport="inline"))
    print(f"rank in the seed: {with_rank}; {len(np.unique(rows, axis=0))} different rows of {len(rows)}")
    assert len(np.unique(rows, axis=0)) == (8 if with_rank else 2)

# %% [markdown]
# Two: a batch four times as large, with no more variety. Weights need one seed for all ranks, noise needs one for each
# rank.
#
# **One rank has fewer batches.** This one does not run to its end. Predict first: rank 0 makes three steps, rank 1 two.
# Which rank fails, and what does it report?


# %%
def three_and_two(joins):
    model = sp.parallel.DistributedDataParallel(make_network())
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    x, y = quarter(8)
    with model.join() if joins else nullcontext():
        for _ in range(3 - sp.get_rank()):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    return sp.parallel.max_difference_between_ranks(model.module) if joins else None


try:
    sp.launch(three_and_two, (False,), world_size=2, echo=False)
except RunFailedError as error:
    refusal = str(error).split("\n\n")[0]
    print(re.sub(r" at \S+:(\d+)", r", line \1", refusal))
assert "rank 1 returned" in refusal
assert sp.launch(three_and_two, (True,), world_size=2) == [0, 0]

# %% [markdown]
# Rank 0 reports that rank 1 has returned, and names the bucket that waits. `DistributedSampler` pads, so that this
# cannot happen. For uneven data there is `join()`: a rank that has finished takes part in the all-reduces of the
# others, with zeros.
#
# ## Exercises
#
# Write the functions below. Each check begins with the smallest case, and draws the first that fails. Solutions are in
# `tutorials/solutions/03_data_parallel.py`.


# %%
def accumulate(model, loss_fn, x, y, size):
    """Exercise 1: leave in `.grad` of the parameters the gradient of `loss_fn(model(x), y)`, a mean over samples.

    `x` and `y` are arrays with a row for each sample; `.grad` is empty at first. Use at most `size` samples at a time.
    The last micro-batch may be smaller, and all samples count the same. Return nothing.
    """
    raise NotImplementedError


sp.exercises.check("accumulate", accumulate)


# %%
def average_gradients(gradients, samples):
    """Exercise 2: return the list of the gradients of the whole batch, on every rank.

    `gradients` is a list of arrays: this rank's gradients of its mean loss over its `samples` samples. Their number
    differs by rank.
    """
    raise NotImplementedError


sp.exercises.check("average_gradients", average_gradients)


# %%
def sampler_indices(size, ranks, rank, epoch):
    """Exercise 3: return the list of the numbers of the samples that a rank gets in an epoch.

    The order of all samples is `np.random.default_rng(epoch).permutation(size)`. It is padded with its own beginning,
    as often as needed, so that all ranks get equally many. Rank r gets the places r, r + ranks, r + 2 ranks, …
    """
    raise NotImplementedError


sp.exercises.check("sampler_indices", sampler_indices)


# %%
def sync_batch_norm(x):
    """Exercise 4: return `(x - mean) / sqrt(variance + 1e-5)` with the statistics of each column over all ranks.

    `x` is this rank's part of the batch, of shape (n, c), like the result; n differs by rank. The variance is the mean
    of the squared deviations.
    """
    raise NotImplementedError


sp.exercises.check("sync_batch_norm", sync_batch_norm)
