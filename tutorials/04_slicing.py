# %% [markdown]
# # Lesson 4: Slicing tensors
#
# Data parallelism cuts the batch, and every rank has the whole model. Here the tensors inside the model are cut, too:
# each rank holds a *slice* of a matrix, and the ranks compute one matrix product together. You need to know
# collectives (lesson 2) and data parallelism (lesson 3).
#
# Run it: `python tutorials/04_slicing.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: a network of two matrices, trained by four ranks. Each rank has a quarter of both matrices.

# %%
from collections import Counter
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import LayoutError, RunFailedError, StrategyError

images, labels = sp.data.digits("train")[:64]


class Network(sp.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = sp.nn.initializer("he_normal", [64, 128], np.float32)
        self.down = sp.nn.initializer("he_normal", [128, 10], np.float32)
        self.matmul1 = sp.ops.MatMul().shard(((1, 1), (1, 4)))  # the columns of `up` in 4 slices
        self.relu = sp.ops.ReLU()
        self.matmul2 = sp.ops.MatMul().shard(((1, 4), (4, 1)))  # the rows of `down` in 4 slices

    def forward(self, x):
        return self.matmul2(self.relu(self.matmul1(x, self.up)), self.down)


# %% [markdown]
# The training step is a program for one device. `AutoParallel` runs it with slices.


# %%
def train(parallel, steps=20):
    sp.set_seed(1)
    with sp.no_init_parameters():  # each rank draws only its slices, later
        network = Network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = sp.functions.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = sp.AutoParallel(step) if parallel else step
    losses = [run(images, labels).item() for _ in range(steps)]
    return losses, {name: parameter.to_local().shape for name, parameter in network.named_parameters()}


losses, slices = sp.launch(train, (True,), world_size=4)[0]
print(f"rank 0 holds {slices}")
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# ## The same on one device
#
# Without `AutoParallel`, the strategies have no effect.
#
# Predict first: no rank ever sees a whole matrix. Are the losses equal?


# %%
def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "04_slicing", f"{name}.png"), dpi=100)


alone, whole = train(parallel=False)
apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
print(f"one device holds {whole}; the losses differ by at most {apart:.0e}")
assert apart < 1e-5
assert [np.prod(slices[name]) * 4 == np.prod(whole[name]) for name in whole] == [True, True]
picture = sp.view.plot_loss({"four ranks": losses, "one device": alone}, title="A quarter of the matrices on each rank")
show(picture, "losses")

# %% [markdown]
# They are, up to the order of additions. The initial weights are equal, too: with `no_init_parameters` each rank draws
# its slices of the same random numbers, so a model may be larger than a device. Now build it up.
#
# ## Three ways to cut a matrix product
#
# A product `x @ w` has three dims: the rows of `x` (called `m`), the columns of `w` (called `n`), and the dim over
# which it sums, the columns of `x` and rows of `w` (called `k`). Each one can be cut in two halves.
#
# Predict first: for which cut are the halves of the result not ready?

# %%
x, w = np.arange(8).reshape(2, 4), np.arange(12).reshape(4, 3)
y = x @ w
by_m = [half @ w for half in np.split(x, 2, axis=0)]
by_n = [x @ half for half in np.array_split(w, 2, axis=1)]
by_k = [a @ b for a, b in zip(np.split(x, 2, axis=1), np.split(w, 2, axis=0), strict=True)]
print("by m:", *(half.tolist() for half in by_m))
print("by n:", *(half.tolist() for half in by_n))
print("by k:", *(half.tolist() for half in by_k))
assert np.array_equal(np.concatenate(by_m, axis=0), y)
assert np.array_equal(np.concatenate(by_n, axis=1), y)
assert np.array_equal(by_k[0] + by_k[1], y)

# %% [markdown]
# For the cut of `k`. With `m` or `n` cut, each rank computes a finished slice of the result, without communication.
# With `k` cut, each rank has a matrix of full size, but only an addend of each number: a *partial sum*. An all-reduce
# finishes it.
#
# ## Strategies
#
# A *strategy* says in how many slices each dim of each input is cut. `((2, 4), (4, 1))` cuts the rows of the first
# input in 2, its columns in 4, and the rows of the second input in 4. The form and the words are MindSpore's. `plan`
# lists the slices and the communication. It computes nothing.
#
# Predict first: there are eight devices. Which ones hold the same slice of the second input?

# %%
plan = sp.ops.MatMul().shard(((2, 4), (4, 1))).plan((8, 8), (8, 4), device_num=8)
print(plan)
assert plan.device_matrix == (2, 4, 1)
show(plan.draw(), "strategy")

# %% [markdown]
# Devices 0 and 4 do, 1 and 5, 2 and 6, 3 and 7.
#
# The *device matrix* `(2, 4, 1)` arranges the devices with one axis for each dim of the product: 2 for `m`, 4 for `k`
# and 1 for `n`. Ranks are numbered row by row: the last axis changes fastest. So rank 6 has the coordinates
# `(1, 2, 0)`: the second half of the rows, and the third quarter of `k`.
#
# The *tensor map* says for each dim of a tensor which axis cuts it. MindSpore counts the axes from the right: `(2, 1)`
# are the axes of `m` and `k`; -1 would be no axis. The first exercise is about these numbers:

# %%
assert plan.tensor_maps["inputs"] == [(2, 1), (1, 0)]
assert plan.layouts["inputs"][1].replica_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
assert plan.slices(6)["inputs"] == [(slice(4, 8), slice(4, 6)), (slice(4, 6), slice(0, 4))]

# %% [markdown]
# ## One rule for forward and backward
#
# The gradients of a matrix product are matrix products, too: that of `x` is `dy @ w.T`, which sums over `n`. That of
# `w` is `x.T @ dy`, which sums over `m`. If the summed dim is cut, each rank has a partial sum.
#
# Predict first: cut each dim alone in 4. Where is an all-reduce, in the output, the gradient of `x`, or that of `w`?
# Which of the three cuts is data parallelism?

# %%
sums = {}
figure, axes = plt.subplots(3, figsize=(9, 9.5), layout="constrained")
for ax, (dim, strategy) in zip(
    axes, {"m": ((4, 1), (1, 1)), "n": ((1, 1), (1, 4)), "k": ((1, 4), (4, 1))}.items(), strict=True
):
    plan = sp.ops.MatMul().shard(strategy).plan((8, 8), (8, 8), device_num=4)
    steps = {"output": plan.forward, "gradient of x": plan.backward[0], "gradient of w": plan.backward[1]}
    sums[dim] = [where for where, exchanges in steps.items() if exchanges]
    print(f"{dim} cut, strategy {strategy}: all-reduce of the {', '.join(sums[dim])}")
    tensors = zip("xwy", (*plan.layouts["inputs"], plan.layouts["output"]), strict=True)
    sp.view.plot_slices([(name, placed, (8, 8)) for name, placed in tensors], ax=ax)
    ax.set_title(f"{dim} cut: all-reduce of the {', '.join(sums[dim])}")
show(figure, "three_cuts")

# %% [markdown]
# Every cut costs one sum, in another place. With `m` cut, it is the gradient of the weights: this is data parallelism,
# and its all-reduce of gradients is a case of the same rule.

# %%
assert sums == {"m": ["gradient of w"], "n": ["gradient of x"], "k": ["output"]}

# %% [markdown]
# ## Axes with names
#
# Numbers from the right are hard to read. A `Layout` gives the axes of the device matrix names. Called with a name for
# each dim of a tensor, it says how the tensor is cut. A dim may be cut by two axes; the first one is the outer one.
#
# Predict first: rank 2 has the coordinates (dp, sp, mp) = (0, 1, 0). Which of the four slices of columns does it hold
# for `("sp", "dp")`, and which for `("dp", "sp")`?

# %%
layout = sp.Layout((2, 2, 2), ("dp", "sp", "mp"))
first, second = layout("mp", ("sp", "dp")), layout("mp", ("dp", "sp"))
print(first.table((8, 8), "x"))
print("rank 2:", first.slices(2, (8, 8)), second.slices(2, (8, 8)))
assert (first.chunk(2, dim=1), second.chunk(2, dim=1)) == (2, 1)
picture = sp.view.plot_slices([('("sp", "dp")', first, (8, 8)), ('("dp", "sp")', second, (8, 8))])
picture.set_title('columns cut by two axes, rows by "mp"')
show(picture, "layouts")

# %% [markdown]
# The third and the second. Read the coordinates of the axes as digits: for `("sp", "dp")` they are 1 and 0, and
# 2 * 1 + 0 is slice 2, counted from 0.
#
# ## Partial sums and redistribution
#
# `distribute_tensor` gives each rank its slice, and `redistribute` takes a tensor to another layout. A tensor with an
# unfinished sum has the axis of that sum in `layout.partial`.
#
# Predict first: six changes of layout, on four ranks. Which collective does each of them need?

# %%
tp = sp.Layout((4,), ("tp",))
WHOLE, ROWS, COLUMNS = tp("None", "None"), tp("tp", "None"), tp("None", "tp")
SUM = WHOLE.with_partial("tp")
KINDS = {"whole": WHOLE, "rows": ROWS, "columns": COLUMNS, "partial sum": SUM}
CHANGES = [
    ("rows", "whole"),
    ("rows", "columns"),
    ("whole", "rows"),
    ("partial sum", "whole"),
    ("partial sum", "rows"),
    ("rows", "rows"),
]


def change(source, target):
    numbers = np.arange(64.0).reshape(8, 8)
    if source == "partial sum":
        tensor = sp.from_local(numbers * sp.get_rank(), SUM)  # each rank has an addend: 0, 1, 2 and 3 times the numbers
        numbers = numbers * 6
    else:
        tensor = sp.distribute_tensor(numbers, KINDS[source])
    moved = tensor.redistribute(KINDS[target])
    return np.array_equal(moved.to_local().numpy(), numbers[KINDS[target].slices(sp.get_rank(), (8, 8))])


# %%
collectives = {}
for source, target in CHANGES:
    results = sp.launch(change, (source, target), world_size=4, transport="inline")
    assert all(results)
    events = [event for event in results.trace.events if event.kind == "collective" and event.rank == 0]
    collectives[source, target] = [(event.name, event.sent_bytes) for event in events]
    told = ", ".join(f"{name}, {size} bytes sent" for name, size in collectives[source, target])
    print(f"{source:>11} -> {target:<7} {told or 'nothing to send'}")
picture = sp.view.plot_slices([("rows", ROWS, (8, 8)), ("columns", COLUMNS, (8, 8)), ("whole", WHOLE, (8, 8))])
show(picture, "redistribution")

# %% [markdown]
# An all-gather, an all-to-all, nothing (each rank keeps a part of what it has), an all-reduce, a reduce-scatter, and
# nothing again. A reduce-scatter sends half of what an all-reduce sends, because every rank gets only a slice of the
# sum.

# %%
names = [[name for name, _ in collectives[change]] for change in CHANGES]
assert names == [["all_gather"], ["all_to_all"], [], ["all_reduce"], ["reduce_scatter"], []]
assert collectives["partial sum", "whole"][0][1] == 2 * collectives["partial sum", "rows"][0][1]

# %% [markdown]
# ## Columns, then rows
#
# Two layers can be cut so that nothing travels between them. A *column-parallel* linear layer cuts its output features
# (`n`). Its result stays cut, and a ReLU works on each slice alone. A *row-parallel* linear layer cuts its input
# features (`k`), and takes these slices as they are. The pair (Shoeybi et al. 2019) is the core of tensor parallelism.
# The network at the top of this lesson is one.
#
# Predict first: the layers below have 2 matrix products in forward and 4 in backward. How many all-reduces does a
# step need?

# %%
numbers = np.random.default_rng(0).integers(-2, 3, (32, 16)).astype(np.float32)


def mlp_block():
    sp.set_seed(2)
    up = sp.parallel.ColumnParallelLinear(16, 64, tp)
    down = sp.parallel.RowParallelLinear(64, 16, tp)
    x = sp.distribute_tensor(numbers, WHOLE, requires_grad=True)
    hidden = up(x).relu()
    y = down(hidden)
    layouts = hidden.layout, y.layout
    y.redistribute(WHOLE).square().sum().backward()
    return layouts, x.grad.full_tensor().numpy()


results = sp.launch(mlp_block, world_size=4, transport="inline", record="full")
(hidden_layout, sum_layout), gradient = results[0]
print("after the first layer:", hidden_layout, "\nafter the second:     ", sum_layout)
events = [event for event in results.trace.events if event.rank == 0]
counts = Counter(event.name for event in events if event.kind == "collective")
print(dict(counts))
assert counts == {"all_reduce": 2}
show(sp.view.plot_timeline(events, title="One block on rank 0, simulated time"), "block")

# %% [markdown]
# Two: one in forward (`k` of the second layer is cut), and one in backward, for the gradient of `x` (`n` of the first
# layer is cut). The gradients of the weights need none. A transformer has such a pair in its attention and in its
# feed-forward part, so a block needs four all-reduces in a step.
#
# The same block on one device has the same gradient:


# %%
def plain_block():
    sp.set_seed(2)
    up, down = sp.nn.Linear(16, 64), sp.nn.Linear(64, 16)
    x = sp.Tensor(numbers, requires_grad=True)
    down(up(x).relu()).square().sum().backward()
    return x.grad.numpy()


np.testing.assert_allclose(gradient, plain_block(), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## A loss on cut logits
#
# The last layer of a language model has a column for each word of the vocabulary, so it is cut by columns, and so are
# the logits. Cross-entropy needs the maximum of each row, the sum of its exponentials, and the logit of the correct
# word. Each of these is a reduction. So the ranks exchange three numbers for a row, not the row.
#
# Predict first: 32 rows, a vocabulary of 4096 words, four ranks. How many times fewer bytes does a rank send than with
# an all-gather of the logits?

# %%
rng = np.random.default_rng(1)
LOGITS = {size: rng.standard_normal((32, size)).astype(np.float32) for size in (64, 256, 1024, 4096)}
words = rng.integers(0, 64, 32)


def loss_of(size, cut):
    x = sp.distribute_tensor(LOGITS[size], COLUMNS)
    y = sp.distribute_tensor(words, tp("None"))
    loss_fn = sp.parallel.VocabParallelCrossEntropy() if cut else sp.nn.CrossEntropyLoss()
    return loss_fn(x if cut else x.redistribute(WHOLE), y).item()


sent = {True: [], False: []}
for size in LOGITS:
    results = {cut: sp.launch(loss_of, (size, cut), world_size=4, transport="inline") for cut in sent}
    assert np.isclose(results[True][0], results[False][0], rtol=1e-5)
    for cut in sent:
        events = [event for event in results[cut].trace.events if event.kind == "collective" and event.rank == 0]
        sent[cut].append(sum(event.sent_bytes for event in events))
    print(f"{size:4} words: {sent[False][-1]:6} bytes for whole logits, {sent[True][-1]} for cut ones")
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for cut, label in ((False, "all-gather of the logits"), (True, "vocabulary-parallel")):
    ax.loglog(list(LOGITS), sent[cut], marker="o", label=label)
ax.set(xlabel="words of the vocabulary", ylabel="bytes that a rank sends for 32 rows")
ax.legend()
show(ax, "vocabulary")

# %% [markdown]
# 683 times fewer. The number of bytes no longer depends on the vocabulary. The loss is the same.

# %%
assert round(sent[False][-1] / sent[True][-1]) == 683
assert len(set(sent[True])) == 1

# %% [markdown]
# ## Every strategy, one result
#
# Sums of floats depend on the order of additions, sums of small integers do not. So with integers there must be no
# difference at all.
#
# Predict first: how many strategies are there for a matrix product on four devices? Some devices may repeat others.

# %%
left, right = np.arange(64.0).reshape(8, 8) % 7 - 3, np.arange(64.0).reshape(8, 8) % 5 - 2
STRATEGIES = [((m, k), (k, n)) for m, k, n in product((1, 2, 4), repeat=3) if m * k * n <= 4]


def all_strategies():
    return [sp.AutoParallel(sp.ops.MatMul().shard(strategy))(left, right).numpy() for strategy in STRATEGIES]


results = sp.launch(all_strategies, world_size=4, transport="inline")
for products in results:
    assert all(np.array_equal(found, left @ right) for found in products)
print(f"{len(STRATEGIES)} strategies, {len(results)} ranks: all results are equal")
assert len(STRATEGIES) == 10

# %% [markdown]
# Ten: nothing is cut, one dim is cut in 2 (three ways) or in 4 (three ways), or two dims are cut in 2 (three ways). If
# fewer than four slices are needed, some devices repeat the work of others.
#
# ## Redistributions without a request
#
# Strategies of neighbours need not fit together. `AutoParallel` then redistributes the tensor between them. `explain`
# lists all communication of a step, also that without a request in the program.
#
# Predict first: only the strategy of the second product changes. How many bytes does a step send now?


# %%
class Mixed(Network):
    def __init__(self):
        super().__init__()
        self.matmul2 = sp.ops.MatMul().shard(((4, 1), (1, 1)))  # the batch in 4 slices


good, mixed = (network.explain((64, 64), device_num=4) for network in (Network(), Mixed()))
print(good)
print(mixed)
assert 5 * good.total_bytes < mixed.total_bytes < 6 * good.total_bytes
picture = sp.view.plot_slices([("after matmul1", COLUMNS, (64, 128)), ("for matmul2", ROWS, (64, 128))])
show(picture, "implicit")

# %% [markdown]
# More than five times as many bytes: the hidden layer goes through an all-to-all, its gradient comes back through
# another, and the gradient of `down` is summed. The losses would be right all the same. With `strict=True`, a
# redistribution without a request is an error:


# %%
def refused(network):
    sp.AutoParallel(network(), strict=True)(images)


try:
    sp.launch(refused, (Mixed,), world_size=4, transport="inline", echo=False)
except RunFailedError as error:
    told = str(error.__cause__)
    print(told)
assert "all_to_all" in told
accepted = sp.launch(refused, (Network,), world_size=4, transport="inline")

# %% [markdown]
# ## What goes wrong
#
# **A dim that cannot be cut.** Predict first: which of these strategies are legal for `(6, 8) @ (8, 4)` on eight
# devices?

# %%
refusals = []
for strategy in (((4, 1), (1, 2)), ((1, 4), (2, 1)), ((2, 4), (4, 2)), ((2, 2), (2, 2))):
    try:
        sp.ops.MatMul().shard(strategy).plan((6, 8), (8, 4), device_num=8)
        print(strategy, "is legal\n")
    except StrategyError as error:
        refusals.append(str(error).split(": ", 1)[1])
        print(strategy, "-", refusals[-1], "\n")
try:
    layout("dp", ("sp", "dp"))
except LayoutError as error:
    print(error)
assert len(refusals) == 3

# %% [markdown]
# Only the last one. Six rows cannot be cut in 4, the two cuts of `k` must be equal, and 2 x 4 x 2 devices are too
# many. Each error proposes legal strategies. In a layout, an axis can cut only one dim of a tensor.
#
# **The bias of a row-parallel layer.** Each rank computes an addend of the result. It is an easy mistake to add the
# bias on every rank. Predict first: by how much is the result wrong on four ranks?


# %%
def bias_on_every_rank():
    own = slice(2 * sp.get_rank(), 2 * sp.get_rank() + 2)
    return sp.all_reduce(left[:, own] @ right[own] + 100)


wrong = sp.launch(bias_on_every_rank, world_size=4, transport="inline")[0] - (left @ right + 100)
print(f"each element of the result is too large by {wrong.max():g}")
assert np.all(wrong == 300)

# %% [markdown]
# By three times the bias: the sum contains it four times. Add it after the all-reduce, or on one rank only.
#
# ## Exercises
#
# Write the functions. Each check begins with the smallest cases, and draws the first one that fails. Solutions are in
# `tutorials/solutions/04_slicing.py`.


# %%
def slice_of(rank, device_matrix, tensor_map, shape):
    """Exercise 1: return the slice of a tensor that a rank holds, as a list with (start, stop) of each dim.

    `device_matrix` has the sizes of the axes; ranks are counted with the last axis fastest. `tensor_map` has an entry
    for each dim: -1 for no cut, the number of the axis that cuts it, counted from the right, or a tuple of such
    numbers, the outermost first. All slices of a dim have the same size.
    """
    raise NotImplementedError


sp.exercises.check("slice_of", slice_of)


# %%
def row_parallel_linear(x, w, b):
    """Exercise 2: return the sum over all ranks of `x @ w`, plus `b` once, on every rank.

    `x` has this rank's columns of the input, and `w` its rows of the weights. `b` is the whole bias, the same on every
    rank. Send no more than an all-reduce of the result.
    """
    raise NotImplementedError


sp.exercises.check("row_parallel_linear", row_parallel_linear)


# %%
def vocabulary_parallel_cross_entropy(logits, labels, first):
    """Exercise 3: return the mean cross-entropy of all rows, on every rank.

    `logits` has this rank's columns, beginning with column `first` of the whole. `labels` has the correct column of
    each row, counted in the whole. Logits may be as large as 1000. Send no more than three all-reduces of a number per
    row.
    """
    raise NotImplementedError


sp.exercises.check("vocabulary_parallel_cross_entropy", vocabulary_parallel_cross_entropy)
