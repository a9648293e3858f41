# %% [markdown]
# # Lesson 7: Automatic parallelism
#
# In lesson 4 we chose the strategy of each op by hand. Here a search chooses them all, on described hardware (lesson
# 6): it knows the strategies of each op, prices them, and takes those with which a step is fastest.
#
# Run it: `python tutorials/07_auto_parallel.py`, or open it as a notebook. Pictures also go into the folder
# `pictures`.
#
# First the result: a training step for one device, and the plan for four H100.

# %%
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import PlanError, RunFailedError, SearchError, UnknownValueError
from simparallel.layout.redistribution import plan_redistribution
from simparallel.view.plan import plot_plan

samples = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
classes = np.arange(128) * 2

# %% [markdown]
# The step is written for one device. In the mode `"auto"`, `AutoParallel` searches for its strategies.


# %%
def train(mode="auto", plan=None, steps=8):
    sp.set_seed(1)
    network = sp.nn.Sequential(sp.nn.Linear(512, 4096), sp.nn.ReLU(), sp.nn.Linear(4096, 512, bias=False))
    optimizer = sp.optim.SGD(network.parameters(), lr=1.0)

    def step(x, y):
        loss = sp.functions.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    if mode == "one device":
        return [step(samples, sp.Tensor(classes)).item() for _ in range(steps)]
    parallel = sp.AutoParallel(step, mode, plan=plan)
    losses = [parallel(samples, classes).item() for _ in range(steps)]
    return losses, parallel.plan


# %% [markdown]
# `dry_run` needs no data and no H100, and returns the plan with which the step would run.


# %%
def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "07_auto_parallel", f"{name}.png"), dpi=100)


def h100(count, **links):
    """Describe DGX H100 without the interpreter, for which operations as small as those of this lesson would wait."""
    cluster = sp.cluster.describe(count, "dgx-h100", **links)
    return replace(cluster, device=replace(cluster.device, op_start_s=0.0))


prediction = sp.dry_run(train, world_size=4, cluster=h100(4))
plan = prediction.values[0][1]
print(plan)
one_device_s = sp.dry_run(train, world_size=1, cluster=h100(1)).step_time_s
print(f"one device: {one_device_s * 1e6:.0f} µs a step")
show(plot_plan([(op.name, op.in_strategy) for op in plan.ops], title="Cuts of the data and of the weights"), "plan")

# %% [markdown]
# A weight of `Linear` has its output features in dim 0. So the first layer is column-parallel, and the second one
# row-parallel: the search has found the pair of lesson 4 by itself. For a step as short as this one, data parallelism
# on four devices takes longer than one device.
#
# ## The same on one device
#
# The hardware of the plan is not here, but its strategies run anywhere. Four processes execute it now. Predict first:
# are the losses those of one device?

# %%
losses, executed = sp.launch(train, ("auto", plan), world_size=4)[0]
alone = train("one device")
apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, apart from one device by at most {apart:.0e}")
assert apart < 1e-4
assert executed.diff(plan) == []
assert round(prediction.step_time_s * 1e12) == plan.step_time_ps
assert plan.step_time_s < one_device_s < plan.data_parallel_ps / 1e12
show(sp.view.plot_loss({"four ranks, by plan": losses, "one device": alone}, title="A plan executed"), "losses")

# %% [markdown]
# They are. A strategy changes the time of a step, not its result. Now build the search up.
#
# ## The choices
#
# The program is run once without data, up to its backward. The calls of its ops are a *graph*. Each op knows its dims
# (lesson 4), so its legal strategies can be listed: all ways to cut its dims such that the number of slices divides
# the number of devices.
#
# Predict first: a matrix product has three dims. How many strategies does it have on 4, 8 and 64 devices? How many
# plans does a network of 50 such products have on 64 devices?


# %%
def strategies(devices):
    powers = [2**i for i in range(devices.bit_length())]
    return [((m, k), (k, n)) for m, k, n in product(powers, repeat=3) if m * k * n <= devices]


counts = {devices: len(strategies(devices)) for devices in (2, 4, 8, 16, 32, 64)}
for devices in (4, 8, 64):
    print(f"{devices:2} devices: {counts[devices]} strategies")
print(f"50 products on 64 devices: 10^{50 * np.log10(counts[64]):.0f} plans")
assert (counts[4], counts[8], counts[64]) == (10, 20, 84)
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
ops = np.arange(1, 51)
for devices in (4, 8, 64):
    ax.semilogy(ops, float(counts[devices]) ** ops, label=f"{devices} devices")
ax.set(xlabel="matrix products in the network", ylabel="plans")
ax.legend()
show(ax, "plans")

# %% [markdown]
# 10, 20 and 84 strategies, and 10^96 plans. So many cannot be tried one by one. Two things are needed: a price that is
# computed without a run, and a search that does not look at every plan.
#
# ## The price of a strategy
#
# An op costs its work on a slice, the collectives it waits for, and the sum of its weights' gradients as far as that
# is not hidden behind backward. `explain` compares the strategy of an op with the next best ones. All other ops keep
# theirs.
#
# Predict first: the second layer is cut in 4. What would be cheaper if it were cut in 2, so that devices do the same
# work in pairs? What would be more expensive?

# %%
explanation = plan.explain("2.Linear")
print(explanation)
parts = {"compute": "compute_ps", "exchanges": "exchange_ps", "sums": "sums_ps", "redistributions": "redistribution_ps"}
labels = [f"{option.in_strategy} {option.out_strategy or ''}" for option in explanation.options]
_, ax = plt.subplots(figsize=(9, 3.5), layout="constrained")
left = np.zeros(len(labels))
for part, field in parts.items():
    width = np.array([getattr(option, field) for option in explanation.options]) / 1e6
    ax.barh(labels, width, left=left, label=part)
    left += width
ax.invert_yaxis()
ax.set_xlabel("cost of 2.Linear [µs]")
ax.legend()
show(ax, "price")
half = explanation.second
assert half.in_strategy == ((1, 2), (1, 2))
assert half.exchange_ps < explanation.chosen.exchange_ps
assert half.compute_ps > explanation.chosen.compute_ps
assert half.redistribution_ps > 0

# %% [markdown]
# The all-reduce of two devices is cheaper than that of four. But each device has more work, and the slices of the
# layer before do not fit. The third strategy has an arrow: its sum ends in a reduce-scatter, which leaves the rows cut
# in 4.
#
# ## Neighbours
#
# The last column shows that strategies have a price in pairs, too: where two neighbours do not fit together, the
# tensor between them is redistributed, forward and backward.
#
# Here is a chain of three matrix products on four devices. Each one has three strategies that use all devices, so the
# work is equal, and the price is the number of bytes. Below are the prices of the strategies, and of the pairs.

# %%
WIDTHS, ROWS = (256, 512, 1024, 2048), 256
THREE = {"data": ((4, 1), (1, 1)), "columns": ((1, 1), (1, 4)), "rows": ((1, 4), (4, 1))}
chain = [
    [sp.ops.MatMul().shard(strategy).plan((ROWS, a), (a, b), device_num=4) for strategy in THREE.values()]
    for a, b in pairwise(WIDTHS)
]


def pair_price(before, after):
    """Return the KiB that a rank receives between two products, forward and backward."""
    move = plan_redistribution(before.layouts["output"], after.layouts["inputs"][0], before.output_shape)
    return 2 * max(move.received_bytes(4)) // 1024


nodes = [[product_plan.total_bytes // 1024 for product_plan in plans] for plans in chain]
edges = [[[pair_price(a, b) for b in later] for a in earlier] for earlier, later in pairwise(chain)]
for number, prices in enumerate(nodes):
    print(f"product {number}:", *(f"{name} {price}" for name, price in zip(THREE, prices, strict=True)))
for number, table in enumerate(edges):
    print(f"between {number} and {number + 1}, from data, columns, rows:", *table)

# %% [markdown]
# Predict first: `columns` is the cheapest strategy of every product. Is it the best for all three together?


# %%
def price(choice):
    own = sum(prices[i] for prices, i in zip(nodes, choice, strict=True))
    return own + sum(table[i][j] for table, (i, j) in zip(edges, pairwise(choice), strict=True))


greedy = tuple(int(np.argmin(prices)) for prices in nodes)
best = min(product(range(3), repeat=3), key=price)
names = list(THREE)
for title, choice in (("cheapest each", greedy), ("cheapest together", best)):
    print(f"{title:<17}", *(names[i] for i in choice), f"{price(choice)} KiB")
assert (greedy, best) == ((1, 1, 1), (1, 2, 1))
assert (price(greedy), price(best)) == (4992, 3456)

# %%
_, ax = plt.subplots(figsize=(9, 5), layout="constrained")
for number, i, j in product(range(2), range(3), range(3)):
    ax.plot([number, number + 1], [i, j], color="0.85", zorder=0)
for choice, line, title in ((greedy, "--", "cheapest each"), (best, "-", "cheapest together")):
    ax.plot(range(3), choice, line, linewidth=4, label=f"{title}: {price(choice)} KiB", zorder=1)
    for number, (i, j) in enumerate(pairwise(choice)):
        ax.text(number + 0.5, (i + j) / 2 - 0.1, edges[number][i][j], ha="center")
for number, prices in enumerate(nodes):
    for i, own in enumerate(prices):
        ax.text(number, i, own, ha="center", va="center", bbox={"boxstyle": "round", "facecolor": "white"})
ax.set_xticks(range(3), [f"product {number}" for number in range(3)])
ax.set_yticks(range(3), names)
ax.set(title="prices of strategies, and of pairs on the two ways [KiB]", xlim=(-0.5, 2.5), ylim=(2.5, -0.5))
ax.legend(loc="upper right")
show(ax, "chain")

# %% [markdown]
# No: `columns` leaves its output cut, and the next product would need the whole of it. `rows` takes it as it is.
#
# ## Dynamic programming
#
# Three products have 27 plans, which were all tried above. For a longer chain, go through it from the left. For each
# strategy of the product, remember only the cheapest way to get there: its own price, plus the best of the strategies
# before it, with the price of the pair. All other ways to the same strategy can be forgotten, because what follows
# does not depend on them.
#
# Predict first: 50 products with 84 strategies each. How many sums does this need?

# %%
sums = 49 * 84 * 84
print(f"{sums} sums, in place of 84^50")
assert sums == 345_744
assert plan.method == "elimination"
assert plan.gap == 0.0

# %% [markdown]
# 345744. Graphs with branches are handled alike: the search eliminates one op after the other, and stays exact. The
# plan above says "optimal in the model". In MindSpore's words this is the mode `AUTO_PARALLEL` with the search mode
# `dynamic_programming`.
#
# MindSpore has two more search modes. `recursive_programming` cuts step by step: each round cuts one op after the other
# once more, where that is cheaper for the op and its pairs. `sharding_propagation` begins at one op, and lets its
# neighbours follow.
#
# Predict first: which of them finds the pair of layers?

# %%
by_mode = {}
for mode in ("auto", "recursive_programming", "sharding_propagation"):
    by_mode[mode] = found = sp.dry_run(train, (mode,), world_size=4, cluster=h100(4)).values[0][1]
    print(f"{mode:<21} {found.step_time_s * 1e6:.0f} µs, at most {found.gap:.0%} above the optimum")
assert by_mode["sharding_propagation"].diff(plan) == []
assert 0.2 < by_mode["recursive_programming"].gap < 0.3

# %% [markdown]
# Propagation does. Cutting step by step does not: to cut one layer alone costs a redistribution, and saves less than
# that. Only both cuts together pay. The gap compares the price of a plan with a proven lower bound for all plans.
#
# ## Data, tensor, or both
#
# The pair of layers of a transformer, on eight devices: data parallelism cuts the batch in 8, tensor parallelism the
# matrices in 8, and `4 x 2` cuts the batch in 4 and the matrices in 2. A plan is data, so the three are made by
# editing the plan of the search.
#
# Predict first: which one is best for a batch of 64 rows, and which one for 65536?

# %%
WIDTH = 2048


def two_steps(batch, plan=None):
    with sp.no_init_parameters():
        network = sp.nn.Sequential(sp.nn.Linear(WIDTH, 4 * WIDTH), sp.nn.ReLU(), sp.nn.Linear(4 * WIDTH, WIDTH))
        optimizer = sp.optim.SGD(network.parameters(), lr=0.1)

    def step(x):
        loss = network(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    parallel = sp.AutoParallel(step, "auto", plan=plan)
    for _ in range(2):
        parallel(np.zeros((batch, WIDTH), np.float32))
    return parallel.plan


def by_hand(plan, d, t):
    """Return the plan with the batch cut in d and the matrices in t."""
    plan = plan.with_("0.Linear", ((d, 1), (t, 1), (t,))).with_("ReLU", ((d, t),))
    plan = plan.with_("2.Linear", ((d, t), (1, t), (1,)))
    for op in plan.ops[3:]:
        plan = plan.with_(op.name, ((d, 1),) * len(op.shapes))
    return plan


# %%
BATCHES = (64, 1024, 4096, 16384, 65536)
MIXES = {"data parallel": (8, 1), "4 x 2": (4, 2), "2 x 4": (2, 4), "tensor parallel": (1, 8)}
times = {name: [] for name in ("searched", *MIXES)}
for batch in BATCHES:
    found = sp.dry_run(two_steps, (batch,), world_size=8, cluster=h100(8)).values[0]
    times["searched"].append(found.step_time_s)
    for name, (d, t) in MIXES.items():
        mixed = sp.dry_run(two_steps, (batch, by_hand(found, d, t)), world_size=8, cluster=h100(8))
        times[name].append(mixed.step_time_s)
    print(f"batch {batch:5}:", ", ".join(f"{name} {row[-1] * 1e6:.0f} µs" for name, row in times.items()))
_, ax = plt.subplots(figsize=(9, 5), layout="constrained")
for name, row in times.items():
    ax.plot(BATCHES, np.array(row) / times["searched"], "k--" if name == "searched" else "o-", label=name)
ax.set_xscale("log", base=2)
ax.set_yscale("log", base=2)
ax.set_xticks(BATCHES, BATCHES)
ax.set_yticks([1, 2, 4], [1, 2, 4])
ax.set(xlabel="batch [rows]", ylabel="time of a step / that of the searched plan")
ax.legend()
show(ax, "mixes")

# %% [markdown]
# Tensor parallelism for 64 rows, data parallelism for 65536. The messages of data parallelism are as large as the
# matrices, those of tensor parallelism as large as the rows of the batch. For 16384 rows, a mix is best, by a hair.
#
# No plan is faster than the searched one. That is not certain: the search adds prices, and estimates how much of the
# sums of gradients backward hides. The dry run knows it. "Optimal in the model" is a statement about the sum of these
# prices.

# %%
fastest = [min(MIXES, key=lambda name: times[name][i]) for i in range(len(BATCHES))]
assert fastest == ["tensor parallel", "tensor parallel", "tensor parallel", "4 x 2", "data parallel"]
ratios = [times["searched"][i] / min(times[name][i] for name in MIXES) for i in range(len(BATCHES))]
assert max(ratios) < 1 + 1e-9

# %% [markdown]
# ## Where memory is short
#
# A plan never needs more than `memory_limit`, as the model counts it. A program can offer to save memory for time:
# `checkpoint(..., optional=True)` marks parts whose activations backward may compute again, and `micro_batches` allows
# to split a batch (lesson 11). The search decides.
#
# Predict first: the fastest plan needs 15.2 MB. What do limits of 12, 10 and 8 MB cost?


# %%
def train_deep(memory_limit):
    network = sp.nn.Sequential(*[sp.nn.Linear(512, 512) for _ in range(4)])
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        parts = sp.parallel.micro_batches(x, y)
        for inputs, labels in parts:
            for layer in network:
                inputs = sp.nn.checkpoint(lambda z, layer=layer: layer(z).relu(), inputs, optional=True)
            (sp.functions.cross_entropy(inputs, labels) / len(parts)).backward()
        optimizer.step()

    parallel = sp.AutoParallel(step, "auto", memory_limit=memory_limit)
    parallel(np.ones((2048, 512), np.float32), np.zeros(2048, np.int64))
    return parallel.plan


# %%
front = {}
for limit in ("24MB", "12MB", "10MB", "8MB", "6MB"):
    try:
        found = sp.dry_run(train_deep, (limit,), world_size=4, cluster=h100(4)).values[0]
        front[limit] = (found.step_time_s * 1e6, found.memory_bytes / 1e6)
        saved = f"{len(found.recomputed)} parts recomputed, {found.num_micro_batches} micro-batches"
        print(f"{limit:>4}: {front[limit][0]:4.0f} µs, {front[limit][1]:4.1f} MB, {saved}")
    except RunFailedError as error:
        refusal = error.__cause__
        print(f"{limit:>4}: {refusal}")
assert isinstance(refusal, SearchError)
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
ax.step(*zip(*((memory, time) for time, memory in front.values()), strict=True), "o-", where="pre")
ax.set(xlabel="memory of a device [MB]", ylabel="time of a step [µs]", ylim=(0, None))
show(ax, "memory")

# %% [markdown]
# With 12 MB, a step takes more than twice as long; with 10 MB, more than four times; with 8 MB, almost eight times as
# long. Plans of which no other is as good in both, time and memory, form the *Pareto front*, and the third exercise is
# to find it. When the memory is too small for the parameters, their gradients and one small micro-batch, no plan fits,
# and the search says so.

# %%
prices = [time for time, _ in front.values()]
assert len(prices) == 4
assert prices[1] - prices[0] < prices[2] - prices[1] < prices[3] - prices[2]
assert np.allclose(np.array(prices[1:]) / prices[0], (2.4, 4.24, 7.92), rtol=0.01)
assert round(front["24MB"][1], 1) == 15.2

# %% [markdown]
# ## A plan is data
#
# It can be saved, edited, compared, and executed. Predict first: the first plan is edited, so that its last two ops
# are data parallel. What changes, the losses or the time?

# %%
path = Path("pictures", "07_auto_parallel", "plan.json")
plan.save(path)
loaded = sp.Plan.load(path)
edited = loaded.with_("2.Linear", ((4, 1), (1, 1))).with_("CrossEntropy", ((4, 1), (4,)))
for name, here, there in edited.diff(loaded):
    print(f"{name:<12} {there[0]} -> {here[0]}")
edited_losses, _ = sp.launch(train, ("auto", edited), world_size=4, transport="inline")[0]
slower = sp.dry_run(train, ("auto", edited), world_size=4, cluster=h100(4))
print(f"{plan.step_time_s * 1e6:.0f} µs -> {slower.step_time_s * 1e6:.0f} µs")
assert np.allclose(edited_losses, alone, atol=1e-4)
assert slower.step_time_s > 1.5 * plan.step_time_s
events = [event for event in slower.trace.events if event.rank == 0 and event.step == 4]
show(sp.view.plot_timeline(events, title="A step of the edited plan on rank 0, simulated time"), "edited")
counts = Counter(event.name for event in events if event.kind == "collective")
print(dict(counts))

# %% [markdown]
# The time: the losses stay the same. The hidden layer is redistributed now, and the gradient of the second weight has
# to be summed.
#
# ## What goes wrong
#
# **A plan for another program.** The plan above has four ops, and the program below has two others. **Decisions by
# values.** The search runs the program without data. Predict first: what can it do with `if loss.item() > 1`?


# %%
def another_program():
    network = sp.nn.Linear(512, 8)
    return sp.AutoParallel(lambda x: network(x).sum(), "auto", plan=plan)(samples)


def by_value():
    network = sp.nn.Linear(512, 8)

    def step(x):
        loss = network(x).square().mean()
        return loss * 2 if loss.item() > 1 else loss

    return sp.AutoParallel(step, "auto")(samples)


refusals = []
for program, kind in ((another_program, PlanError), (by_value, UnknownValueError)):
    try:
        sp.launch(program, world_size=4, transport="inline", echo=False)
    except RunFailedError as error:
        refusals.append(error.__cause__)
        print(f"{kind.__name__}: {error.__cause__}\n")
    assert isinstance(refusals[-1], kind)

# %% [markdown]
# The search refuses, and names the line. Compute such a decision outside of the step, or write it with ops.
#
# **A plan of other hardware.** Predict first: the same step on four devices of one node, of four nodes with InfiniBand,
# and of four nodes with slow Ethernet. Are the plans the same?

# %%
ETHERNET = sp.LinkSpec(latency_s=20e-6, bandwidth_bytes_per_s=3e9)
HARDWARE = {"one node": {}, "InfiniBand": {"nodes": 4}, "Ethernet": {"nodes": 4, "node_link": ETHERNET}}
plans = {
    name: sp.dry_run(train, world_size=4, cluster=h100(4, **links)).values[0][1] for name, links in HARDWARE.items()
}
figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for (name, found), ax in zip(plans.items(), axes, strict=True):
    print(f"{name:<10} {found.step_time_s * 1e6:.0f} µs:", *(op.in_strategy for op in found.ops))
    plot_plan([(op.name, op.in_strategy) for op in found.ops], title=name, ax=ax)
show(figure, "hardware")
assert [found["2.Linear"].in_strategy[0] for found in plans.values()] == [(1, 4), (1, 2), (1, 1)]
assert np.isclose(plans["Ethernet"].step_time_s, one_device_s)

# %% [markdown]
# No. With InfiniBand, two devices work together, and the other two repeat their work. With slow Ethernet, each device
# does everything, and a step takes as long as on one device: the messages would take longer than the work. A plan is
# the best one for these ops, these shapes and the described hardware, and the description must be true.
#
# ## Exercises
#
# Write the functions. Each check begins with the smallest cases, and draws the first one that fails. Solutions are in
# `tutorials/solutions/07_auto_parallel.py`.


# %%
def legal_cuts(sizes, devices):
    """Exercise 1: return all ways to cut the dims of an op, as a list of tuples with the cut of each dim.

    `sizes` is a tuple with the size of each dim, `devices` the number of devices. Each cut divides the size of its dim,
    and the product of the cuts divides the number of devices. Any order will do.
    """
    raise NotImplementedError


sp.exercises.check("legal_cuts", legal_cuts)


# %%
def chain_dp(nodes, edges):
    """Exercise 2: return the cheapest choice for a chain of ops, as a list with the number of each op's strategy.

    `nodes[i][s]` is the price of strategy s of op i. `edges[i][s][t]` is the price between strategy s of op i and
    strategy t of op i + 1. Chains have up to 30 ops, so do not try all choices.
    """
    raise NotImplementedError


sp.exercises.check("chain_dp", chain_dp)


# %%
def pareto(plans):
    """Exercise 3: return the plans that no other one dominates, the fastest first.

    `plans` is a list of (time, memory). A plan dominates another one if it is at least as good in both, and better in
    one of them. Return equal plans once.
    """
    raise NotImplementedError


sp.exercises.check("pareto", pareto)
