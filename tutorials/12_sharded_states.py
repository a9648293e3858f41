# %% [markdown]
# # Lesson 12: Sharded states
#
# In data parallelism every rank stores the same parameters, gradients and optimizer state. *Sharding* stores each of
# them once, in slices over the ranks, and the result is the same. The method is known as ZeRO and FSDP. You need data
# parallelism (lesson 3) and the collectives `reduce_scatter` and `all_gather` (lesson 2).
#
# Run it: `python tutorials/12_sharded_states.py`, or open it as a notebook. Pictures also go into the folder
# `pictures`.
#
# First the result: four devices with 3 MB of memory each train a network whose states need more than 4 MB.

# %%
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import InputError, RunFailedError

images, labels = sp.data.digits("train")[:960]
loss_fn = sp.nn.CrossEntropyLoss()
P, BATCH, WIDTH = 4, 120, 192
link = sp.LinkSpec(latency_s=1e-6, bandwidth_bytes_per_s=100e9)  # between any two devices


def make_network():
    sp.set_seed(1)
    with sp.parallel.no_init_parameters():  # each rank draws its slices alone
        first, *others = (sp.nn.Linear(size, WIDTH, weight_init="he_normal") for size in (64, *[WIDTH] * 7))
        pairs = [layer for linear in others for layer in (sp.nn.ReLU(), linear)]
        return sp.nn.Sequential(first, *pairs, sp.nn.ReLU(), sp.nn.Linear(WIDTH, 10))


def shard(network, letters, **settings):
    """Make each linear layer a group, and the last one with the network itself."""
    where = dict(zip(("parameter", "gradient", "state"), letters, strict=True))
    for layer in network:
        if isinstance(layer, sp.nn.Linear) and layer is not network[-1]:
            sp.parallel.fully_shard(layer, **where, **settings)
    return sp.parallel.fully_shard(network, **where, **settings)


def train(letters, steps=8, **settings):
    network = shard(make_network(), letters, **settings)
    optimizer = sp.optim.Adam(network.parameters(), lr=0.002)  # after fully_shard
    losses = []
    for first in range(0, BATCH * steps, BATCH):
        mine = range(first, first + BATCH)[sp.get_rank() :: sp.get_world_size()]
        optimizer.zero_grad()
        loss = loss_fn(network(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses  # of this rank's part


sharded = sp.launch(train, ("SSS",), world_size=P, device_memory="3MB")
sharded_losses, peak_mb = np.mean(list(sharded), axis=0), sharded.memory[0]["peak_bytes"] / 1e6
count = sum(p.size for p in make_network().parameters())
print(f"{count:,} parameters, 16 bytes for each: {16 * count / 1e6:.2f} MB; a rank used {peak_mb:.2f} MB")
print(f"{len(sharded_losses)} steps: loss {sharded_losses[0]:.4f} -> {sharded_losses[-1]:.4f}")
assert 16 * count > 4e6 > 3e6 > peak_mb * 1e6

# %% [markdown]
# `"SSS"` are three letters, which this lesson explains. `"RPR"` is plain data parallelism, that of
# `DistributedDataParallel`.
#
# Predict first: what happens with `"RPR"` on the same devices? And on larger ones, how far are its losses from the
# ones above?

# %%
try:
    sp.launch(train, ("RPR",), world_size=P, device_memory="3MB", transport="inline")
except RunFailedError as error:
    refusal = str(error.__cause__)
    print(refusal)
whole = sp.launch(train, ("RPR",), world_size=P, transport="inline")
losses = np.mean(list(whole), axis=0)
print(f"the losses differ by {np.abs(losses - sharded_losses).max():g}")
assert list(whole) == list(sharded)

# %% [markdown]
# The first run stops, and says what fills the memory. With more memory, the losses are equal bit for bit: the ranks
# compute the same sums in the same order. Only the place of the numbers differs.
#
# ## What fills the memory?
#
# In float32 a parameter takes 4 bytes, its gradient 4, and Adam's two moments 8: together 16 bytes. These are the
# *states* of a model. Activations come on top; they depend on the batch.
#
# Predict first: in the picture of a step, which area grows during forward, which one during backward, and which ones
# never change?


# %%
def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "12_sharded_states", f"{name}.png"), dpi=100)


def recorded(letters):
    return sp.launch(train, (letters, 2), world_size=P, transport="inline", record="full", link=link)


def last_step(run):
    return [event for event in run.trace.events if (event.rank, event.step) == (0, 1)]


runs = {letters: recorded(letters) for letters in ("RPR", "SSS")}
titles = {"RPR": "R P R: data parallelism", "SSS": "S S S: all sharded"}
figure, axes = plt.subplots(2, figsize=(12, 6.5), layout="constrained")
for ax, (letters, run) in zip(axes, runs.items(), strict=True):
    sp.view.plot_memory(last_step(run), ax=ax, title=titles[letters])
    ax.set_ylim(0, 5.5)
show(figure, "memory")
held = {letters: run.memory[0]["at_peak"] for letters, run in runs.items()}
for kind in ("parameters", "gradients", "optimizer state", "activations"):
    print(f"{kind:<16}", "  ".join(f"{letters} {each[kind] / 1e6:.2f} MB" for letters, each in held.items()))
assert 3.9 < held["RPR"]["parameters"] / held["SSS"]["parameters"] < 4.1

# %% [markdown]
# Activations grow during forward, gradients during backward. Parameters and optimizer state never change. In the lower
# picture all three kinds of states are about a quarter. There is a new kind, too: *gathered* parameters. A layer needs
# its whole weight while it computes; then it is freed. The next layer, which is on its way already, counts, too. (The
# pictures show the memory at the end of each operation. Printed peaks are a little higher, because they include the
# time in between.)
#
# ## Three letters
#
# Take one vector of four chunks on four ranks. It can be in one of three states:
#
# - `P`, *partial*: each rank has an addend of the whole vector. A gradient is born like this.
# - `S`, *sharded*: rank `r` has chunk `r`, and its sum is finished.
# - `R`, *replicated*: each rank has the whole sum.
#
# `reduce_scatter` leads from `P` to `S`, `all_gather` from `S` to `R`, and `all_reduce` from `P` to `R`.
#
# Predict first: how many more bytes do the two steps send than the `all_reduce`?


# %%
def one_vector():
    partial = np.arange(4 * 1000, dtype=np.float32) + sp.get_rank()
    sharded = sp.reduce_scatter(partial, algorithm="ring")
    replicated = sp.all_gather(sharded, algorithm="ring")
    return np.array_equal(replicated, sp.all_reduce(partial.copy(), algorithm="ring"))


run = sp.launch(one_vector, world_size=P, transport="inline")
sent = {event.name: event.sent_bytes for event in run.trace.events if event.rank == 0}
print("bytes that rank 0 sends:", sent)
assert all(run)
assert sent["reduce_scatter"] + sent["all_gather"] == sent["all_reduce"]
everyone = range(P)
panels = {
    "P: partial": [[[(rank, i)] for i in range(P)] for rank in everyone],
    "S: sharded": [[[(each, i) for each in everyone] if i == rank else [] for i in range(P)] for rank in everyone],
    "R: replicated": [[[(each, i) for each in everyone] for i in range(P)] for _ in everyone],
}
show(sp.view.plot_chunks(panels, title="One vector in three states: reduce-scatter, then all-gather"), "letters")

# %% [markdown]
# None: an all-reduce *is* a reduce-scatter and an all-gather. (`ABCD2` is chunk 2 of the sum of ranks A, B, C and D.)
#
# Between the two, rank `r` has chunk `r` of the gradient and nothing else. That is all it needs to update chunk `r` of
# the parameters, so it needs only chunk `r` of the optimizer's state. This is the idea of ZeRO (Rajbhandari et al.
# 2020): put the update between the two halves of the all-reduce.
#
# ## From DDP to ZeRO-3
#
# `fully_shard` takes a letter for the parameters, for their gradients, and for the optimizer's state:
#
# | letters | name | bytes of states for each parameter |
# |---|---|---|
# | `R P R` | DDP | 16 |
# | `R P S` | ZeRO-1 | 8 + 8 / P |
# | `R S S` | ZeRO-2 | 4 + 12 / P |
# | `S S S` | ZeRO-3, FSDP | 16 / P |
#
# With `S` parameters a layer is gathered before its forward, freed after it, and gathered again before its backward.
#
# Predict first: which rows send more bytes than DDP, and by which factor? How many all-gathers and reduce-scatters
# does a step of ZeRO-3 have, for the nine linear layers?

# %%
runs |= {letters: recorded(letters) for letters in ("RPS", "RSS")}
sent_mb, collectives = {}, {}
for letters in ("RPR", "RPS", "RSS", "SSS"):
    of_step = [event for event in last_step(runs[letters]) if event.kind == "collective"]
    sent_mb[letters] = sum(event.sent_bytes for event in of_step) / 1e6
    collectives[letters] = Counter(event.name for event in of_step)
    peak_mb = runs[letters].memory[0]["peak_bytes"] / 1e6
    print(
        f"{letters}: loss {runs[letters][0][-1]:.6f}, peak {peak_mb:.2f} MB, sent {sent_mb[letters]:.2f} MB:", end=" "
    )
    print(*(f"{count} {name}" for name, count in collectives[letters].items()))
assert all(list(run) == list(runs["RPR"]) for run in runs.values())
assert collectives["SSS"] == {"all_gather": 2 * 8 + 1, "reduce_scatter": 9}
assert 1.45 < sent_mb["SSS"] / sent_mb["RPR"] < 1.51

# %% [markdown]
# ZeRO-1 and ZeRO-2 send nothing more, but for padding: the last layer has 10 rows for 4 ranks, and on the wire all
# slices have one size. ZeRO-3 sends half as much again, because a layer is gathered twice. The last layer is not: its
# backward follows its forward at once, so it stays. That makes 2 x 8 + 1 = 17 all-gathers.
#
# ## Partial gradients that wait
#
# ZeRO-1 and ZeRO-2 have the same peak. Why two names, then? With one batch in each step there is no difference: each
# gradient is reduced as soon as it is there. With several micro-batches, `no_sync()` leaves a `P` gradient where it is
# until the last one. An `S` gradient is reduced in each micro-batch, and added to the slice.
#
# Predict first: four micro-batches. Which of the two sends fewer bytes, and which one needs less memory?


# %%
def accumulate(letters, parts=4):
    network = shard(make_network(), letters)
    optimizer = sp.optim.Adam(network.parameters(), lr=0.002)
    x, y = images[sp.get_rank() :: P], labels[sp.get_rank() :: P]
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(parts):
            with network.no_sync() if part < parts - 1 else nullcontext():
                (loss_fn(network(x[part::parts]), y[part::parts]) / parts).backward()
        optimizer.step()
    return network.full_state_dict()


weights, sent_mb, held_mb = {}, {}, {}
for letters in ("RPS", "RSS"):
    run = sp.launch(accumulate, (letters,), world_size=P, transport="inline")
    of_step = [e for e in run.trace.events if e.name == "reduce_scatter" and (e.rank, e.step) == (0, 1)]
    sent_mb[letters] = sum(event.sent_bytes for event in of_step) / 1e6
    held_mb[letters] = run.memory[0]["at_peak"]["gradients"] / 1e6
    weights[letters] = run[0]
    print(
        f"{letters}: {len(of_step)} reduce-scatters send {sent_mb[letters]:.2f} MB, "
        f"gradients at the peak {held_mb[letters]:.2f} MB"
    )
apart = max(np.abs(weights["RPS"][name] - weights["RSS"][name]).max() for name in weights["RPS"])
print(f"the weights differ by at most {apart:.0e}")
assert np.isclose(sent_mb["RSS"], 4 * sent_mb["RPS"])
assert held_mb["RSS"] < 0.75 * held_mb["RPS"]
assert apart < 1e-4

# %% [markdown]
# `P` sends once, `S` four times. `S` needs about half of the memory: a quarter of the gradients stays, and the layers
# that backward is at have theirs. The weights differ by rounding only: the sums have another order.
#
# ## Memory over the number of ranks
#
# A dry run executes a program without data, so 64 ranks take little longer than four. Here is a small GPT with
# two micro-batches in each step. The dots are the states by the formula.
#
# Predict first: with 64 ranks, which kinds of memory are left in each of the four pictures?


# %%
def make_gpt():
    with sp.parallel.no_init_parameters():
        return sp.models.gpt(num_layers=3)


def train_gpt(letters):
    model, where = make_gpt(), dict(zip(("parameter", "gradient", "state"), letters, strict=True))
    for block in model.blocks:
        sp.parallel.fully_shard(block, **where)
    model = sp.parallel.fully_shard(model, **where)
    optimizer = sp.optim.Adam(model.parameters())
    tokens = np.zeros((1, 64), int)
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(2):
            with nullcontext() if part else model.no_sync():
                (loss_fn(model(tokens).reshape(64, -1), tokens[0]) / 2).backward()
        optimizer.step()


BYTES = {
    "RPR": lambda ranks: 16,
    "RPS": lambda ranks: 8 + 8 / ranks,
    "RSS": lambda ranks: 4 + 12 / ranks,
    "SSS": lambda ranks: 16 / ranks,
}
COLORS = {
    "parameters": "#0072B2",
    "optimizer state": "#009E73",
    "gradients": "#E69F00",
    "gathered": "#F0E442",
    "buffers": "#999999",
    "activations": "#56B4E9",
}
RANKS = (1, 4, 64)
count = sum(p.size for p in make_gpt().parameters())
figure, axes = plt.subplots(1, 4, figsize=(13, 4.6), sharey=True, layout="constrained")
peaks = {}
for ax, (letters, formula) in zip(axes, BYTES.items(), strict=True):
    at_peak = [sp.dry_run(train_gpt, (letters,), world_size=ranks).memory[0]["at_peak"] for ranks in RANKS]
    below = np.zeros(len(RANKS))
    for kind, color in COLORS.items():
        heights = [each[kind] / 1e6 for each in at_peak]
        ax.bar(range(len(RANKS)), heights, bottom=below, color=color, label=kind)
        below += heights
    ax.plot([formula(ranks) * count / 1e6 for ranks in RANKS], "o--", color="black", label="states by the formula")
    ax.set(title=" ".join(letters), xlabel="ranks", xticks=range(len(RANKS)), xticklabels=RANKS)
    peaks[letters] = below
    print(f"{letters}:", ", ".join(f"{peak:5.2f} MB on {n}" for n, peak in zip(RANKS, below, strict=True)))
axes[0].set_ylabel("alive at the peak of a step [MB]")
figure.legend(*[found[::-1] for found in axes[0].get_legend_handles_labels()], loc="outside right center")
show(figure, "ranks")
assert peaks["RPR"][0] == peaks["RPR"][-1] > peaks["RPS"][-1] > peaks["RSS"][-1] > peaks["SSS"][-1]

# %% [markdown]
# Of `R P R` all is left. `R P S` has its parameters and gradients, `R S S` its parameters and the gradients of the
# blocks in use. `S S S` has no states to speak of. What is left are activations, and what the blocks in use need: their
# gradients, and gathered parameters, also those of the next block, which are on their way. More ranks do not help
# there. Smaller parts of the batch and recomputation (`sp.nn.checkpoint`) do.
#
# ## Communication behind computation
#
# Does ZeRO-3 wait for every layer? The next layer is gathered while the one before it computes, and gradients are
# reduced while backward continues.
#
# Predict first: which all-gather of a step has nothing to hide behind?

# %%
for letters, run in sorted(runs.items()):
    events = last_step(run)
    step_us = (max(e.sim_end_ps for e in events) - min(e.sim_start_ps for e in events)) / 1e6
    print(f"{letters}: a step takes {step_us:.0f} µs")
picture = sp.view.plot_timeline(last_step(runs["SSS"]), title="A step of ZeRO-3")
show(picture, "timeline")

# %% [markdown]
# The first two: that of the network's own group, which is its last layer, and that of the first layer. At the end,
# Adam waits for the last reduce-scatter. In between, nothing waits. The step still takes longer than that of `R P R`:
# each gathered layer is unpacked (`gather_parameters`), and for layers as small as these, starting an operation takes
# longer than its work.
#
# ## Slices in a node, replicas between nodes
#
# Links between nodes are slower than links inside of one. *Hybrid* sharding cuts the states over the ranks of a node,
# and each node has all of them: ZeRO-3 along one axis of the mesh, data parallelism along the other.
#
# Predict first: eight ranks in two nodes. Which part of the bytes of ZeRO-3 still crosses between the nodes?

# %%
HYBRID = {"mesh": sp.Mesh((2, 4), ("replicate", "shard")), "axis": ("replicate", "shard")}
NODES = [range(4), range(4, 8)]
figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
crossing_mb, losses_of = {}, {}
for ax, name, settings in zip(axes, ("ZeRO-3 on 8 ranks", "hybrid, 2 x 4"), ({}, HYBRID), strict=True):
    run = sp.launch(train, ("SSS", 2), settings, world_size=8, transport="inline")
    losses_of[name] = list(run)
    matrix = run.trace.select(steps=1).communication_matrix()
    crossing_mb[name] = (matrix[:4, 4:].sum() + matrix[4:, :4].sum()) / 1e6
    stored_mb = run.memory[0]["at_peak"]["parameters"] / 1e6
    print(f"{name}: {crossing_mb[name]:.2f} MB between the nodes, a rank stores {stored_mb:.2f} MB of parameters")
    sp.view.plot_communication_matrix(matrix, NODES, ax=ax, title=name)
show(figure, "hybrid")
zero_3, hybrid = losses_of.values()
assert np.allclose(zero_3, hybrid, rtol=1e-5)
assert crossing_mb["hybrid, 2 x 4"] < crossing_mb["ZeRO-3 on 8 ranks"] / 2

# %% [markdown]
# Less than half, and only slices of gradients: all layers are gathered inside of the nodes. The price is memory: each
# rank stores a quarter of the states, and not an eighth. The losses are equal up to rounding, because the sums are
# nested in another way.
#
# ## What goes wrong
#
# **A part of the model is in no group.** Here only the first layer is sharded. Predict first: do the other layers
# train?


# %%
def only_the_first():
    network = make_network()
    sp.parallel.fully_shard(network[0])
    optimizer = sp.optim.Adam(network.parameters())
    loss_fn(network(images[:8]), labels[:8]).backward()
    optimizer.step()


try:
    sp.launch(only_the_first, world_size=P, transport="inline")
except RunFailedError as error:
    forgotten = str(error.__cause__)
    print(forgotten)
assert "no group has" in forgotten

# %% [markdown]
# Nobody would sum their gradients, so each rank would train layers of its own. `fully_shard` for the whole network, at
# the end, makes a group of all that is left.
#
# **Letters that cannot be.** There are 27 words of three letters, and only four of them are training steps. Predict
# first: what is wrong with `S P S`, with `R R S`, and with `S S R`?

# %%
for letters in ("SPS", "RRS", "SSR"):
    try:
        shard(make_network(), letters)
    except InputError as error:
        print(error)

# %% [markdown]
# ## Exercises
#
# Write the functions. Each check begins with the smallest cases, and draws the first one that fails. Solutions are in
# `tutorials/solutions/12_sharded_states.py`.


# %%
def rows_of_rank(rows, ranks, rank):
    """Exercise 1: return the rows (start, stop) of a tensor that a rank stores.

    All slices have the same number of rows, the least with which the ranks have room for all of them. Rows are given
    out from rank 0 on: the last slices may be shorter, or empty.
    """
    raise NotImplementedError


sp.exercises.check("rows_of_rank", rows_of_rank)


# %%
def sharded_step(weights, gradient, momentum, lr, beta):
    """Exercise 2: return the whole weights after a step of SGD with momentum, with a sharded state (ZeRO-1).

    `weights` are equal on all ranks. `gradient` is the one of this rank's part of the batch, and the step uses the mean
    of all ranks. `momentum` is this rank's slice. The new one is `beta * momentum + gradient`, and `lr` times the new
    one is taken from the weights. The ranks may send no more bytes than for an all-reduce of the gradient.
    """
    raise NotImplementedError


sp.exercises.check("sharded_step", sharded_step)


# %%
def bytes_of_states(letters, count, ranks):
    """Exercise 3: return the bytes of the parameters, of the gradients and of Adam's state on one rank, as a list.

    `letters` is a text such as "RPS", and `count` the number of parameters, a multiple of `ranks`. All are float32.
    Count the gradients while they wait between micro-batches.
    """
    raise NotImplementedError


sp.exercises.check("bytes_of_states", bytes_of_states)
