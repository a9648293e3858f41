# %% [markdown]
# # Lesson 8: Debugging
#
# Parallel programs fail in ways of their own: they hang, one rank dies and the others wait for it, or all goes well
# and the numbers are wrong. This lesson breaks programs on purpose, and reads the errors. You need to know
# collectives, messages and data parallelism.
#
# Run it: `python tutorials/08_debugging.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: two ranks call the same two collectives, in different orders.

# %%
import os
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import NotEquivalentError, RunFailedError
from simparallel.testing import assert_equivalent

rows = np.arange(8.0).reshape(4, 2)


def totals(swaps):
    own = rows[sp.get_rank() :: sp.get_world_size()]
    if swaps and sp.get_rank() == 1:
        largest, total = sp.all_reduce(own.max(0), "max"), sp.all_reduce(own.sum(0))
    else:
        total, largest = sp.all_reduce(own.sum(0)), sp.all_reduce(own.max(0), "max")
    return total.tolist(), largest.tolist()


def failure_of(program, *arguments, **settings):
    """Run a program that fails, on real processes, and return the error."""
    try:
        sp.launch(program, arguments, echo=False, **settings)
    except RunFailedError as error:
        return error
    raise AssertionError("the program did not fail")


error = failure_of(totals, True, world_size=2)
print(str(error).partition("\n\n")[0])

# %% [markdown]
# ## On one device
#
# Predict first: what does this program do on one rank? And what does the mended one return on two?

# %%
alone = sp.launch(totals, (True,), world_size=1)[0]
right = sp.launch(totals, (False,), world_size=2)
print("one rank, with the mistake:", alone)
print("two ranks, mended:         ", right[0])
assert alone == right[0] == right[1] == (rows.sum(0).tolist(), rows.max(0).tolist())

# %% [markdown]
# On one rank the mistake does nothing: the result is that of the mended program on two. So a program that works on one
# device may still fail on a cluster. Run it on two ranks, and on three.
#
# ## Read an error
#
# The error above has four parts: the *group* and the number of the call (`world, collective #1`); the call of
# *every rank*, with its line; how the calls *differ*; and the *rule*. Before a collective starts, all ranks compare
# their calls. So no data was changed, and every rank has the error, not only one.
#
# Predict first: without the comparison, what would the two ranks have computed?

# %%
unchecked = sp.launch(totals, (True,), world_size=2, check="off", transport="inline")
for rank, (total, largest) in enumerate(unchecked):
    print(f"rank {rank}: sum {total}, maximum {largest}")
assert unchecked[0] != right[0]


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "08_debugging", f"{name}.png"), dpi=100)


calls = {
    "rank 0": [("call 1 and 2", ["all_reduce(sum)", "all_reduce(max)"])],
    "rank 1": [("call 1 and 2", ["all_reduce(max)", "all_reduce(sum)"])],
}
show(sp.view.plot_cells(calls, title="The calls of rank 1 that differ from those of rank 0"), "calls")

# %% [markdown]
# Wrong numbers, without a word: the sum of one rank met the maximum of the other. Where nothing is compared, such a
# program gives wrong numbers if shapes fit by chance, and may hang or crash if they do not.
#
# An error is also data. `error.facts` has the report of each rank:

# %%
for rank, report in error.facts["reports"].items():
    print(f"rank {rank} failed in {report['at'].rpartition(' in ')[2]}: {report['summary'].partition(':')[0]}")

# %% [markdown]
# ## A deadlock
#
# Four ranks pass a number around a ring. Each one sends to the next rank. It receives from the next one, too, which is
# the mistake.
#
# Predict first: every rank sends once and receives once. Which rank does each one wait for?


# %%
def ring():
    rank, size = sp.get_rank(), sp.get_world_size()
    received = np.empty(1)
    sp.send(np.array([float(rank)]), (rank + 1) % size)
    sp.recv(received, (rank + 1) % size)


deadlock = str(failure_of(ring, world_size=4)).partition("\n\n")[0]
print(deadlock)
waits = [(int(a), int(b)) for a, b in re.findall(r"rank (\d) waits in recv\(.*?src=(\d)", deadlock)]
assert waits == [(0, 1), (1, 2), (2, 3), (3, 0)]

_, ax = plt.subplots(figsize=(4.5, 4), layout="constrained")
places = {rank: np.array([np.sin(rank * np.pi / 2), np.cos(rank * np.pi / 2)]) for rank in range(4)}
for a, b in waits:
    style = {"arrowstyle": "-|>", "shrinkA": 22, "shrinkB": 22, "connectionstyle": "arc3,rad=-0.2", "lw": 2}
    ax.annotate("", places[b], places[a], arrowprops=style)
    ax.text(*places[a], f"rank {a}", ha="center", va="center", bbox={"boxstyle": "circle", "fc": "#56B4E9"})
ax.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), title="Who waits for whom")
ax.axis("off")
show(ax, "waits")

# %% [markdown]
# Each rank waits for the next one: a circle. When *all* ranks wait, none can ever continue, so this is an error at
# once, after a fraction of a second and not after a timeout. The text has the line of every rank, because the mistake
# is often on the rank that you do not look at.
#
# ## A rank that does not come
#
# Now only some ranks wait. Rank 1 is busy with something else for a long time.
#
# Predict first: can the others know that rank 1 will never come?


# %%
def busy():
    if sp.get_rank() == 1:
        time.sleep(60)
    sp.all_reduce(np.ones(2))


late = str(failure_of(busy, world_size=4, timeout_s=1.0)).partition("\n\n")[0]
print(late)
assert "rank 1" in late

# %% [markdown]
# They cannot: it may be loading data. So every wait has a *deadline*, `timeout_s` (60 s by default). The error names
# the rank that holds up the others. If loading really takes minutes, raise the deadline.
#
# ## A rank that dies
#
# Rank 2 is killed, as by the system when memory runs out.
#
# Predict first: rank 2 cannot say anything any more. How long do the others wait, and what do they know?


# %%
def killed():
    for step in range(5):
        if step == 3 and sp.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sp.all_reduce(np.ones(4))


death = failure_of(killed, world_size=4)
print(str(death).partition("\n\n")[0])
for rank in (0, 1, 3):
    print(f"rank {rank}:", death.facts["reports"][rank]["summary"].partition(": ")[2])
assert death.facts["rank"] == 2

# %% [markdown]
# They stop at once. Each one reports the call in which it waited, and that rank 2 was killed. The *first* failure is
# the one to read: the reports of the other ranks are consequences.
#
# ## Wrong numbers: compare the ranks
#
# The worst mistake raises no error. Here is a training without the all-reduce of the gradients. `X` and `Y` are 24
# small samples and their targets; they belong to the collection of wrong programs that comes below.
#
# Predict first: does the loss fall? After how many steps do the ranks have different weights?


# %%
X, Y = sp.zoo.given.X, sp.zoo.given.Y


def train(averages):
    rank, size = sp.get_rank(), sp.get_world_size()
    sp.set_seed(0)
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.05)
    losses, weights = [], []
    for _ in range(8):
        weights.append(model.weight.numpy().copy())
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        if averages:
            for parameter in model.parameters():
                sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights}


runs = {name: sp.launch(train, (name == "mended",), world_size=4, transport="inline") for name in ("wrong", "mended")}
apart = {}
for name, results in runs.items():
    weights = np.array([result["weights"] for result in results])
    apart[name] = np.abs(weights - weights[0]).max(axis=(0, 2, 3))
    first = results[0]["losses"]
    print(f"{name:<6} loss of rank 0: {first[0]:.2f} -> {first[-1]:.2f}, weights apart at step 1: {apart[name][1]:.3f}")
assert runs["wrong"][0]["losses"][-1] < runs["wrong"][0]["losses"][0]
assert apart["wrong"][0] == 0 < apart["wrong"][1]
assert not apart["mended"].any()
with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for name, line in apart.items():
        ax.plot(line, "o-", label=name)
    ax.set(xlabel="step", ylabel="largest difference of weights")
    ax.legend()
show(ax, "apart")

# %% [markdown]
# The loss falls on every rank: each one trains a model of its own on a quarter of the data. But after the first step
# the weights differ. In data parallelism all ranks have equal weights, always, so *compare the ranks* when numbers look
# wrong: parameters first, then gradients, then inputs. The first difference is near the mistake.
#
# `assert_equivalent` does it for a whole program, and compares with one device, too:

# %%
assert_equivalent(train, (True,), per_rank=["losses"])
try:
    assert_equivalent(train, (False,), per_rank=["losses"])
except NotEquivalentError as different:
    print(different)

# %% [markdown]
# ## A slow rank
#
# All is right, but slow. Predict first: rank 2 takes three times as long as the others. Which rank waits the *least*?


# %%
def train_digits():
    images, labels = sp.data.digits("train")[:64]
    own = slice(sp.get_rank(), None, sp.get_world_size())
    model = sp.parallel.DistributedDataParallel(sp.models.mlp((64, 128, 10)))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sp.functions.cross_entropy(model(sp.Tensor(images[own])), sp.Tensor(labels[own])).backward()
        optimizer.step()


slow = replace(sp.cluster.load_cluster("a100", 4), stragglers={2: 3.0})
trace = sp.launch(train_digits, world_size=4, transport="inline", device=slow, record="full").trace
waiting = {}
for row in trace.summary():
    waiting[row["rank"]] = row["idle_time_s"] * 1e6
    print(f"rank {row['rank']}: computes {row['compute_time_s'] * 1e6:4.0f} µs, idle {waiting[row['rank']]:4.0f} µs")
assert min(waiting, key=waiting.get) == 2
show(trace.timeline(steps=1), "straggler")

# %% [markdown]
# The slow one: it comes last, and never waits. The ranks with much idle time are fine; look for the one without.
#
# ## The zoo
#
# `sp.zoo` is a collection of wrong programs, each with one mistake that people really make. `simparallel zoo` lists
# them. Let us visit six. `X` and `Y` are the samples and targets from above. `ssend`, in the third, is a `send` that
# returns only when its message has been received.

# %%
found_by = Counter((entry.category, entry.found_by) for entry in map(sp.zoo.get, sp.zoo.names()))
categories = sorted({category for category, _ in found_by})
print(f"{len(sp.zoo.names())} programs")
with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    left = np.zeros(len(categories), int)
    for how in ("the run", "assert_equivalent"):
        counts = np.array([found_by[category, how] for category in categories])
        ax.barh(categories, counts, left=left, label=f"found by {how}")
        left += counts
    ax.set(xlabel="wrong programs", xlim=(0, 20))
    ax.legend()
show(ax, "zoo")


def visit(*names):
    """Print programs of the zoo."""
    for name in names:
        print("def " + sp.zoo.get(name).source.partition("\ndef ")[2])


def told(*names):
    """Run programs of the zoo, and print their errors."""
    for name in names:
        entry = sp.zoo.get(name)
        print(f"{name}: {entry.title}.\n{entry.told}\n")


visit("collective_on_rank_0", "uneven_number_of_batches", "swapped_tags")

# %% [markdown]
# Predict first, for each of the three: what is the mistake, which ranks wait, and for what?

# %%
told("collective_on_rank_0", "uneven_number_of_batches", "swapped_tags")

# %% [markdown]
# 1. Only rank 0 calls `all_reduce`. Without the comparison of calls it would wait there for rank 1, which is already in
#    `broadcast`.
# 2. Rank 0 has three samples and rank 1 two, so rank 0 waits in its third backward, and rank 1 has returned.
# 3. Rank 0 waits until the message with tag 0 is received, rank 1 until one with tag 1 comes.
#
# The next three do not hang.

# %%
visit("no_set_epoch", "clip_before_reduce", "draw_on_rank_0_only")

# %% [markdown]
# Predict first: what is wrong with the numbers? Which one would you not see in a loss curve?

# %%
told("no_set_epoch", "clip_before_reduce", "draw_on_rank_0_only")
assert {sp.zoo.get(name).found_by for name in ("clip_before_reduce", "draw_on_rank_0_only")} == {"assert_equivalent"}

# %% [markdown]
# The first takes the samples in the same order in each epoch. In the second, each rank clips its own gradient, and the
# mean of clipped gradients is not the clipped mean. In the third, rank 0 draws one number more than the others, so from
# then on its random numbers are different.
#
# You would see none of the three in a loss curve: training goes on, a little worse. In the second all ranks even agree
# with each other; only the comparison with one device shows it.
#
# To mend a program of the zoo, copy it, change it, and let the zoo check it. Here the second one: reduce first, then
# clip.


# %%
def clip_before_reduce():
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    loss.backward()
    for parameter in model.parameters():
        sp.all_reduce(parameter.grad, "mean")
    sp.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return model.state_dict()


sp.zoo.check("clip_before_reduce", clip_before_reduce)
print("mended")

# %% [markdown]
# ## What goes wrong with debugging
#
# **Prints.** They come from all ranks at once; print the rank, too, or look into `runs/.../worker_N.log`. **Barriers.**
# "Put a barrier before it" only moves the place where a program hangs. **Catching errors.** A rank that catches its
# error and goes on meets the others in a different call.
#
# Predict first: rank 1 has an error, catches it, and calls a barrier "to be safe". What do you read: the error of
# rank 1?

# %%
print(sp.zoo.get("barrier_in_except").told)

# %% [markdown]
# You read a mismatch, and the `IndexError` is hidden. Let errors end the rank: all others stop by themselves.
#
# ## Exercises
#
# Mend three programs of the zoo: `both_receive_first`, `early_stopping_by_rank` and `mean_of_means`. Here they take
# arguments, and run on several numbers of ranks. Look at the wrong ones first:

# %%
visit("both_receive_first", "early_stopping_by_rank", "mean_of_means")

# %% [markdown]
# Write these functions. Each check starts with the smallest case, and draws the first one that fails. Solutions:
# `tutorials/solutions/08_debugging.py`.


# %%
def pass_around(x):
    """Exercise 1: send x to the next rank, and return the x of the rank before.

    As `both_receive_first`, on a ring of any number of ranks. `x` is an array, with the same shape and dtype on all
    ranks; do not change it. A rank alone passes x to itself.
    """
    raise NotImplementedError


sp.exercises.check("pass_around", pass_around)


# %%
def stop_together(losses, limit):
    """Exercise 2: return the number of the first step, from 1, in which the mean loss of all ranks is below `limit`.

    As `early_stopping_by_rank`: `losses` is a list with this rank's loss of each step, equally many on all ranks. In
    each step, the ranks decide together. Return the number of all steps if the mean is never below the limit.
    """
    raise NotImplementedError


sp.exercises.check("stop_together", stop_together)


# %%
def mean_of_samples(rows):
    """Exercise 3: return the mean over the samples of all ranks; `rows` are those of this rank, shape (number, 2).

    As `mean_of_means`: ranks may have different numbers of samples, or none, but not all of them none. The result is an
    array of shape (2,), on every rank.
    """
    raise NotImplementedError


sp.exercises.check("mean_of_samples", mean_of_samples)
