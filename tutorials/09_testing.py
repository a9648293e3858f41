# %% [markdown]
# # Lesson 9: Testing your own parallel code
#
# A parallel layer has to compute the result of one device: for every number of ranks, for every shape, and backward as
# well as forward. This lesson writes tests that find the smallest case in which it does not. You need to know
# collectives and how a matrix is sliced.
#
# Run it: `python tutorials/09_testing.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: an MLP whose hidden features are divided among the ranks, and one call of the test kit,
# `sp.testing`, that tests it.

# %%
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from hypothesis import given, settings, strategies as st

import simparallel as sp
from simparallel.errors import NotEquivalentError, RunFailedError
from simparallel.testing import CommCounter, assert_equivalent, check_gradients, expect_no_redistribution, faults

plt.style.use("tableau-colorblind10")


def weights(*shape):
    return sp.nn.Parameter(np.random.default_rng(0).normal(size=shape).astype(np.float32))


class MLP(sp.nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down, self.bias = weights(width, hidden), weights(hidden, width), weights(width)

    def forward(self, x):
        return (x @ self.up).relu() @ self.down + self.bias


class SumOverRanks(sp.Function):
    """Sum in forward; in backward every rank has the gradient of the sum already."""

    @staticmethod
    def forward(ctx, x):
        return sp.all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class SumGradients(sp.Function):
    """Nothing in forward; in backward each rank has a part of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return sp.all_reduce(dy)


class ParallelMLP(MLP):
    def __init__(self, width, hidden):
        super().__init__(width, len(np.array_split(range(hidden), sp.get_world_size())[sp.get_rank()]))

    def forward(self, x):
        return SumOverRanks.apply((SumGradients.apply(x) @ self.up).relu() @ self.down) + self.bias


SIZES = {"width": st.integers(1, 4), "hidden": st.integers(1, 6), "batch": st.integers(1, 3)}


def shape_of_inputs(batch, width):
    return batch, width


def check(parallel):
    """Compare a parallel MLP with the one above, for drawn sizes, on 1 to 4 ranks."""
    assert_equivalent(MLP, shape_of_inputs, parallel=parallel, sizes=SIZES, world_size=4, max_examples=25)


check(ParallelMLP)
print("equivalent")

# %% [markdown]
# ## The same by hand
#
# What has been compared? Here is one case without the kit: three ranks, seven hidden features, the weights of one
# device cut into slices.
#
# Predict first: which gradients have to be equal to those of one device, and which are slices of them?


# %%
def one_case(whole_up, whole_down, bias, x):
    model = ParallelMLP(4, 7)
    own = np.array_split(np.arange(7), sp.get_world_size())[sp.get_rank()]
    model.up.data, model.down.data, model.bias.data = whole_up[:, own], whole_down[own], bias.copy()
    x = sp.Tensor(x, requires_grad=True)
    y = model(x)
    (y * y).sum().backward()
    return y.numpy(), x.grad.numpy(), model.up.grad.numpy()


serial = MLP(4, 7)
x = sp.Tensor(np.ones((2, 4), np.float32), requires_grad=True)
y = serial(x)
(y * y).sum().backward()
whole = serial.up.numpy(), serial.down.numpy(), serial.bias.numpy()
results = sp.launch(one_case, (*whole, x.numpy()), world_size=3, transport="inline")
for output, of_input, _ in results:
    np.testing.assert_allclose(output, y.numpy(), rtol=1e-5)
    np.testing.assert_allclose(of_input, x.grad.numpy(), rtol=1e-4)
slices = [of_up for *_, of_up in results]
np.testing.assert_allclose(np.concatenate(slices, axis=1), serial.up.grad.numpy(), rtol=1e-4)
print("slices of the gradient of `up`:", [each.shape for each in slices], "of one device:", serial.up.grad.shape)

# %% [markdown]
# The output and the gradients of the input and of the bias are whole on every rank, those of `up` and `down` are
# slices. `assert_equivalent` compares all of them, for two training steps, and the state of the optimizer.
#
# Now back to the basics.
#
# ## Examples and properties
#
# An *example test* has one input. A *property* holds for all inputs, and a library draws them: Hypothesis.
# `st.integers(1, 4)` tells it what to draw; Hypothesis calls this a *strategy*. Here is a function that should compute
# the mean of all numbers on all ranks, and has a mistake.
#
# Predict first: an example test has four ranks and eight numbers. Does it find the mistake? What is the smallest
# input that does?


# %%
def mean_over_ranks(rows):
    own = np.array_split(rows, sp.get_world_size())[sp.get_rank()]
    return sp.all_reduce(np.array(own.mean() if len(own) else 0.0), "mean").item()


def means(rows, ranks):
    return sp.launch(mean_over_ranks, (rows,), world_size=ranks, transport="inline")


assert set(means(np.arange(8.0), 4)) == {3.5}  # the example test passes
tried = []


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 12))
def test_mean(ranks, length):
    rows = np.arange(1.0, length + 1)
    is_right = np.allclose(means(rows, ranks), rows.mean())
    tried.append((ranks, length, is_right))
    assert is_right


try:
    test_mean()
except AssertionError:
    smallest = tried[-1][:2]
    print(f"{len(tried)} cases, the smallest that fails: {smallest[0]} ranks, {smallest[1]} numbers")
assert smallest == (2, 1)

# %% [markdown]
# No: the example test passes, because all ranks have equally many numbers. The mean of means is wrong as soon as they
# do not. Hypothesis first finds any failing case, and then *shrinks* it: it tries smaller ones as long as they fail.
# Two ranks and one number: the second rank has nothing, and its 0 counts.

# %%
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for is_right, marker, label in ((True, "o", "passes"), (False, "X", "fails")):
    points = [(i, ranks * length) for i, (ranks, length, right) in enumerate(tried, 1) if right is is_right]
    ax.scatter(*zip(*points, strict=True), marker=marker, s=60, label=label)
ax.set(xlabel="case", ylabel="ranks x numbers", title="Search for a failing case, then for a smaller one")
ax.legend()


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "09_testing", f"{name}.png"), dpi=100)


show(ax, "shrinking")

# %% [markdown]
# ## Valid by construction
#
# Suppose that a layer needs a number of features that the ranks divide. One way to draw cases: draw both, and throw
# away what does not fit. Another way: draw the ranks and the features *of a rank*, and multiply.
#
# Predict first: up to eight ranks and up to 64 features. What share of the drawn cases is thrown away?

# %%
counts = {"thrown away": [], "by construction": []}


@settings(derandomize=True, database=None, max_examples=200)
@given(st.integers(1, 8), st.integers(1, 64))
def draw_both(ranks, features):
    counts["thrown away"].append((ranks, features))


@settings(derandomize=True, database=None, max_examples=200)
@given(st.integers(1, 8), st.data())
def draw_parts(ranks, data):
    counts["by construction"].append((ranks, ranks * data.draw(st.integers(1, 64 // ranks))))


draw_both()
draw_parts()
valid = {name: np.mean([features % ranks == 0 for ranks, features in drawn]) for name, drawn in counts.items()}
print({name: f"{share:.0%} valid" for name, share in valid.items()})
assert valid["thrown away"] < 0.7
assert valid["by construction"] == 1
left = Counter(ranks for ranks, features in counts["thrown away"] if features % ranks == 0)
print("ranks of the valid cases that are left:", dict(sorted(left.items())))
assert left.most_common(1)[0][0] == 1
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for ax, (name, drawn) in zip(axes, counts.items(), strict=True):
    for fits, marker in ((True, "o"), (False, "x")):
        points = np.array([case for case in drawn if (case[1] % case[0] == 0) is fits]).reshape(-1, 2)
        ax.plot(points[:, 1], points[:, 0], marker, label="valid" if fits else "not valid", alpha=0.6)
    ax.set(title=name, xlabel="features")
axes[0].set_ylabel("ranks")
axes[0].legend()
show(figure, "valid")

# %% [markdown]
# More than half, and with several such rules nearly all. Worse: of what is left, cases of one rank are the most
# frequent, and these test the least. By construction no case is lost, and a failing case shrinks through valid ones.
# The test kit has such strategies of Hypothesis: `layouts`, `strategies_for`, `device_matrices`, `programs`.
#
# ## Exact integers
#
# Parallel code adds in another order, and sums of floats depend on the order. So tests compare with a tolerance, and
# small mistakes hide in it.
#
# Predict first: are sums of small integers, stored as float32, equal in any order?

# %%
generator = np.random.default_rng(1)
reals, integers = generator.normal(size=4096).astype(np.float32), generator.integers(-9, 10, 4096).astype(np.float32)


def apart(numbers):
    """Return the differences between sums in random order and the exact sum."""
    exact = sum(map(Fraction, numbers.tolist()))
    orders = [generator.permutation(numbers) for _ in range(200)]
    return [float(Fraction(float(np.add.accumulate(order)[-1])) - exact) for order in orders]


differences = {"real numbers": apart(reals), "small integers": apart(integers)}
print({name: f"up to {max(map(abs, found)):.1e}" for name, found in differences.items()})
assert not any(differences["small integers"])
assert any(differences["real numbers"])
_, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, found in differences.items():
    ax.hist(np.array(found) * 1e6, bins=np.linspace(-205, 205, 42), label=name, alpha=0.8)
ax.set(xlabel="sum - exact sum [1e-6]", ylabel="orders of addition", title="4,096 float32 numbers in 200 orders")
ax.legend()
show(ax, "integers")

# %% [markdown]
# They are: a float32 holds all integers up to 2^24 exactly, so sums that stay below are exact. With integer weights and
# inputs, parallel and serial results can be compared by `==`. Where the result is no integer (softmax, norms), use a
# tolerance.
#
# Many cases also need a cheap way to run them. `transport="inline"` runs ranks as threads that take turns: the same
# program, the same bits, the same order on every run, and no process to start. Property tests use it; a few tests use
# processes.
#
# ## Wrong layers, and their smallest failing shapes
#
# Back to the MLP. Each of these has one typical mistake. Predict first, for each: is it found in forward or in
# backward, and what is the smallest failing case?


# %%
class BiasOnEveryRank(ParallelMLP):
    def forward(self, x):
        return SumOverRanks.apply((SumGradients.apply(x) @ self.up).relu() @ self.down + self.bias)


class NoSumOfGradients(ParallelMLP):
    def forward(self, x):
        return SumOverRanks.apply((x @ self.up).relu() @ self.down) + self.bias


class ReluOfTheSum(ParallelMLP):
    def forward(self, x):
        return SumOverRanks.apply(SumGradients.apply(x) @ self.up @ self.down).relu() + self.bias


class RestLost(ParallelMLP):
    def __init__(self, width, hidden):
        MLP.__init__(self, width, hidden // sp.get_world_size())


found = {}
for layer in (BiasOnEveryRank, NoSumOfGradients, ReluOfTheSum, RestLost):
    try:
        check(layer)
    except NotEquivalentError as error:
        found[layer.__name__] = error.phase, error.world_size, error.case
        print(f"{layer.__name__}:", str(error).partition("Smallest failing case: ")[2], "\n")

# %% [markdown]
# All four are refused, with a case that is small enough to follow by hand:
#
# * `BiasOnEveryRank`: in forward, on two ranks with one feature. The bias is added twice.
# * `NoSumOfGradients`: in backward, on two ranks with one feature. The output is right, but each rank has only its part
#   of the gradient of the input. In a network, all layers before this one would be trained wrongly.
# * `ReluOfTheSum`: in forward. One rank with two hidden features is enough, so it is not a mistake of communication.
# * `RestLost`: before forward, by the shapes of the weights. Of one hidden feature, two ranks have 0 + 0. Tests in
#   which the number of ranks divides the features pass.

# %%
assert found["BiasOnEveryRank"] == ("output", 2, {"width": 1, "hidden": 1, "batch": 1})
assert "gradient" in found["NoSumOfGradients"][0]
assert found["ReluOfTheSum"][1] == 1
assert found["RestLost"][2]["hidden"] == 1
_, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
names = ["ranks", *SIZES]
grid = np.array([[ranks, *case.values()] for _, ranks, case in found.values()])
ax.imshow(grid, cmap="Blues", vmin=0, vmax=6, aspect="auto")
for (row, column), value in np.ndenumerate(grid):
    ax.text(column, row, value, ha="center", va="center")
ax.set(xticks=range(len(names)), xticklabels=names, yticks=range(len(found)), yticklabels=found)
ax.set_title("The smallest failing case of each wrong layer")
show(ax, "layers")

# %% [markdown]
# ## Gradients of your own functions
#
# `assert_equivalent` needs a serial model. Without one, check a function against its own finite differences:
# `check_gradients`. It works on ranks, too.
#
# Predict first: `SumOverRanks` returns `dy` in backward. Someone writes `all_reduce(dy)` there, "because forward has
# one". On how many ranks does the test pass?


# %%
class SumTwice(SumOverRanks):
    @staticmethod
    def backward(ctx, dy):
        return sp.all_reduce(dy)


def check_on_ranks(function):
    own = np.linspace(-1.0, 1.0, 3) + sp.get_rank()
    check_gradients(lambda x: function.apply(x) ** 2, [own])


outcomes = {}
for function in (SumOverRanks, SumTwice):
    for ranks in (1, 2):
        try:
            sp.launch(check_on_ranks, (function,), world_size=ranks, transport="inline")
            outcomes[function.__name__, ranks] = "passes"
        except RunFailedError as error:
            outcomes[function.__name__, ranks] = "fails: " + str(error.__cause__).partition("\n")[0]
print(*(f"{name} on {ranks}: {outcome}" for (name, ranks), outcome in outcomes.items()), sep="\n")

# %% [markdown]
# On one rank it passes: there `all_reduce` does nothing. On two ranks it fails. This is why a test of parallel code
# needs at least two ranks, and better three: with two, the next rank is also the one before.

# %%
assert outcomes["SumTwice", 1] == outcomes["SumOverRanks", 2] == "passes"
assert outcomes["SumTwice", 2].startswith("fails")

# %% [markdown]
# ## Right, but too much communication
#
# A layer may compute the right result, and communicate too much. `CommCounter` counts collectives and bytes. The
# ParallelMLP needs one all-reduce in forward and one in backward. Here is a forward that gathers all hidden features
# and the rows of `down` instead.
#
# Predict first: four ranks, four samples, width 8, 32 hidden features. How many bytes does each forward pass exchange?


# %%
class Gathers(ParallelMLP):
    def forward(self, x):
        hidden = (x @ self.up).relu()
        whole = sp.all_gather(hidden.T).T  # the rows of all ranks
        down = sp.all_gather(self.down)
        return whole @ down + self.bias


def forward_of(layer):
    model = layer(8, 32)
    with sp.no_grad(), CommCounter() as comm:
        model(sp.Tensor(np.ones((4, 8), np.float32)))
    return comm.counts, comm.bytes


moved = {}
for layer in (ParallelMLP, Gathers):
    calls, size = sp.launch(forward_of, (layer,), world_size=4, transport="inline")[0]
    moved[layer.__name__] = size
    print(f"{layer.__name__:<12} calls {calls}, bytes {size}")
assert sum(moved["Gathers"].values()) > 5 * sum(moved["ParallelMLP"].values())
_, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
for row, (name, size) in enumerate(moved.items()):
    left = 0
    for op, count in size.items():
        ax.barh(name, count, left=left, color="C0" if op == "all_reduce" else "C1")
        left += count
    ax.text(left, row, " " + ", ".join(size), va="center")
ax.set(xlim=(0, 1900), xlabel="bytes of arrays in collectives, a forward pass on one rank")
show(ax, "bytes")

# %% [markdown]
# The sum has 4 x 8 numbers of 4 bytes: 128 bytes. The hidden features and `down` have 4 x 32 and 32 x 8: 1536 bytes,
# twelve times as many.
#
# In a test, write the number down: `assert comm.counts == {"all_reduce": 1}`. The test then fails when a later change
# adds communication. For tensors with a `Layout`, `expect_no_redistribution()` raises an error at the first
# redistribution that the program does not request:


# %%
def product():
    ranks = sp.Layout((2,), ("tp",))
    a = sp.distribute_tensor(np.ones((4, 4), np.float32), ranks("tp", "None"))
    b = sp.distribute_tensor(np.ones((4, 4), np.float32), ranks("None", "tp"))
    with expect_no_redistribution():
        return a + b


try:
    sp.launch(product, world_size=2, transport="inline")
except RunFailedError as error:
    unasked = str(error.__cause__)
    print(unasked)

# %% [markdown]
# ## Tests in pytest
#
# The kit has a plugin for pytest: `@pytest.mark.world(4)` runs the body of a test on four processes, which stay warm
# from one test to the next. A failed test has a section for each rank.
#
# Predict first: which ranks of the second test have a section?

# %%
folder = Path("runs", "09_testing")
folder.mkdir(parents=True, exist_ok=True)
Path(folder, "conftest.py").write_text('pytest_plugins = ["pytest_simparallel"]\n')  # only if it is not installed
Path(folder, "test_mine.py").write_text("""
import numpy as np
import pytest

import simparallel as sp


@pytest.mark.world(4)
@pytest.mark.parametrize("op, expected", [("sum", 6.0), ("max", 3.0)])
def test_reduction(op, expected):
    assert sp.all_reduce(np.array([float(sp.get_rank())]), op).tolist() == [expected]


@pytest.mark.world(4)
def test_slices():
    own = np.array_split(np.arange(6), 4)[sp.get_rank()]
    assert len(own) == 2, f"a slice of {len(own)}"
""")
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "test_mine.py"]
report = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
print(report.replace(f"{folder.absolute()}/", ""))
assert "1 failed, 2 passed" in report

# %% [markdown]
# Ranks 2 and 3: their slices have one element. The author of this test did not consider six elements on four ranks.
#
# ## What goes wrong with tests
#
# A test can be wrong, too. Three ways: the ranks divide all of its sizes; its tolerance is as large as the mistake; it
# computes the expected result with the code under test. So test every test: put in a mistake, and see that the test
# fails. `faults.inject` puts in the failure of a rank.
#
# Predict first: rank 1 fails in its second all-reduce, between copying the result and returning. Can rank 0 hang?


# %%
def program():
    for _ in range(3):
        sp.all_reduce(np.ones(4))


try:
    with faults.inject(rank=1, action="raise", op="all_reduce", seq=2, phase="copy_out"):
        sp.launch(program, world_size=2, transport="inline")
    raise AssertionError("the fault was not reported")
except RunFailedError as error:
    control = str(error).partition("\n")[0]
    print(control)

# %% [markdown]
# It cannot: all ranks end, and the error names the first failure.
#
# ## Exercises
#
# Write these functions. Each check starts with the smallest case, and draws the first one that fails. Solutions:
# `tutorials/solutions/09_testing.py`.


# %%
def shrink_sizes(fails, sizes):
    """Exercise 1: leave numbers out of a failing list, as long as it fails, and return what is left.

    `sizes` is a list of integers, and `fails(list)` tells whether such a list fails; `fails(sizes)` is true. In the
    result, leaving out any one number more gives a list that passes. The order stays.
    """
    raise NotImplementedError


sp.exercises.check("shrink_sizes", shrink_sizes)


# %%
def sizes_from_cuts(cuts, total):
    """Exercise 2: return the sizes of `len(cuts) + 1` slices of `total` elements, from any integers `cuts`.

    Return a list. Valid by construction: the sizes are not negative, their sum is `total`, and every such list of sizes
    comes from some cuts between 0 and `total`.
    """
    raise NotImplementedError


sp.exercises.check("sizes_from_cuts", sizes_from_cuts)


# %%
def accepts_mean(program):
    """Exercise 3: return True if a program computes the mean over all ranks, else False. Write a test of your own.

    `program(parts)` gets a list with the numbers of each rank (lists, some may be empty, not all), and returns a list
    with the result of each rank, which should be the mean of all numbers. Accept right programs, refuse wrong ones.
    """
    raise NotImplementedError


sp.exercises.check("accepts_mean", accepts_mean)
