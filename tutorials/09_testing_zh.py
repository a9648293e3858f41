# %% [markdown]
# # 第 9 课：测试自己的并行代码
#
# 并行层必须算出与单个设备相同的结果：对任意 rank 数、任意形状，前向和反向都要如此。本课写一些测试，
# 它们能找到结果不同的最小情况。学习本课需要了解集合通信，以及怎样把矩阵切片。
#
# 运行方式：`python tutorials/09_testing_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 性质测试 | property test |
# | 示例测试 | example test |
# | 用例 | case |
# | 缩小（用例） | shrink |
# | 构造即合法 | valid by construction |
# | 等价 | equivalent |
# | 有限差分 | finite differences |
# | 重分布 | redistribution |
# | 故障注入 | fault injection |
#
# 先看结果：一个 MLP，它的隐藏特征由各个 rank 分担；调用一次测试工具 `sp.testing` 就能测试它。

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
    """前向求和；反向时每个 rank 已经有和的梯度。"""

    @staticmethod
    def forward(ctx, x):
        return sp.all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class SumGradients(sp.Function):
    """前向不做任何事；反向时每个 rank 只有梯度的一部分。"""

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
    """用生成的大小，在 1 到 4 个 rank 上，把并行 MLP 与上面的 MLP 比较。"""
    assert_equivalent(MLP, shape_of_inputs, parallel=parallel, sizes=SIZES, world_size=4, max_examples=25)


check(ParallelMLP)
print("equivalent")

# %% [markdown]
# ## 手工做一遍
#
# 比较的是什么？下面不用测试工具，检查一个用例：三个 rank，七个隐藏特征，把单个设备的权重切成片。
#
# 先猜一猜：哪些梯度应当与单个设备的相等？哪些是它的切片？


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
# 输出、输入的梯度和偏置的梯度在每个 rank 上都是完整的，`up` 和 `down` 的梯度是切片。
# `assert_equivalent` 比较所有这些，做两个训练步，还比较优化器的状态。
#
# 下面从基础开始。
#
# ## 示例与性质
#
# *示例测试*只有一个输入。*性质*对所有输入都成立，输入由程序库 Hypothesis 来生成。
# `st.integers(1, 4)` 说明要生成什么，Hypothesis 称之为*策略*（strategy）。下面的函数应当计算所有 rank 上
# 全部数的均值，但是它有一个错误。
#
# 先猜一猜：有一个示例测试，用四个 rank 和八个数。它能发现错误吗？能发现错误的最小输入是什么？


# %%
def mean_over_ranks(rows):
    own = np.array_split(rows, sp.get_world_size())[sp.get_rank()]
    return sp.all_reduce(np.array(own.mean() if len(own) else 0.0), "mean").item()


def means(rows, ranks):
    return sp.launch(mean_over_ranks, (rows,), world_size=ranks, transport="inline")


assert set(means(np.arange(8.0), 4)) == {3.5}  # 示例测试通过
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
# 不能：示例测试通过了，因为每个 rank 的数一样多。只要不一样多，均值的均值就是错的。
# Hypothesis 先找到任意一个失败的用例，
# 然后把它*缩小*：只要仍然失败，就继续尝试更小的。结果是两个 rank 和一个数：第二个 rank 什么也没有，
# 它的 0 却被算了进去。

# %%
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for is_right, marker, label in ((True, "o", "passes"), (False, "X", "fails")):
    points = [(i, ranks * length) for i, (ranks, length, right) in enumerate(tried, 1) if right is is_right]
    ax.scatter(*zip(*points, strict=True), marker=marker, s=60, label=label)
ax.set(xlabel="case", ylabel="ranks x numbers", title="Search for a failing case, then for a smaller one")
ax.legend()


def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "09_testing", f"{name}.png"), dpi=100)


show(ax, "shrinking")

# %% [markdown]
# ## 构造即合法
#
# 假设某一层要求特征数能被 rank 数整除。一种生成方法：两个数都随机抽取，不合要求的扔掉。
# 另一种：抽取 rank 数和*每个 rank* 的特征数，再相乘。
#
# 先猜一猜：最多八个 rank、64 个特征时，抽到的用例有多大比例要扔掉？

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
# 超过一半；如果有几条这样的规则，几乎全部都要扔掉。更糟的是，剩下的用例里一个 rank 的最多，而它们能检验的最少。
# 按构造生成则不浪费用例，失败的用例也只经过合法的用例缩小。测试工具里的 Hypothesis 策略都是这样做的：
# `layouts`、`strategies_for`、`device_matrices`、`programs`。
#
# ## 精确的整数
#
# 并行代码的加法顺序不同，而浮点数的和与顺序有关。所以比较要有容差，小错误就会藏在里面。
#
# 先猜一猜：把小整数存为 float32，它们的和与相加的顺序有关吗？

# %%
generator = np.random.default_rng(1)
reals, integers = generator.normal(size=4096).astype(np.float32), generator.integers(-9, 10, 4096).astype(np.float32)


def apart(numbers):
    """返回按随机顺序求的和与精确的和之差。"""
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
# 无关：float32 能精确表示绝对值不超过 2^24 的整数，因此这个范围内的和都是精确的。权重和输入都用整数时，
# “并行等于串行”就是 `==`。函数的结果不是整数时（softmax、归一化），再用容差比较。
#
# 要跑很多用例，每个用例就必须便宜。`transport="inline"` 用轮流执行的线程作为 rank：同样的程序，同样的比特，
# 每次运行顺序相同，也不用启动进程。性质测试用它，另有少量测试用进程。
#
# ## 有错的层，以及最小的失败形状
#
# 回到 MLP。下面每一个都有一种典型的错误。先猜一猜：每个错误是在前向还是在反向被发现？最小的失败用例是什么？


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
# 四个都被拒绝，而且用例小到可以心算：
#
# * `BiasOnEveryRank`：在前向中发现，两个 rank，一个特征。偏置加了两次。
# * `NoSumOfGradients`：在反向中发现，两个 rank，一个特征。输出是对的，但是每个 rank 只有输入梯度的一部分。
#   在网络里，它前面的所有层都会训练出错。
# * `ReluOfTheSum`：在前向中发现。一个 rank、两个隐藏特征就够了，所以这不是通信的错误。
# * `RestLost`：在前向之前，由权重的形状发现。一个隐藏特征，两个 rank 分到 0 + 0 个。
#   如果特征数都能被 rank 数整除，测试就会通过。

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
# ## 自己的函数的梯度
#
# `assert_equivalent` 需要一个串行模型。如果没有，可以把函数的梯度与它自己的有限差分比较：`check_gradients`。
# 它在多个 rank 上也能用。
#
# 先猜一猜：`SumOverRanks` 在反向中返回 `dy`。有人写成 `all_reduce(dy)`，“因为前向里也有一个”。
# 用几个 rank 时测试会通过？


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
# 用一个 rank 时通过：这时 `all_reduce` 什么也不做。用两个 rank 时失败。所以并行代码的测试至少要用两个 rank，
# 最好三个：只有两个时，下一个 rank 也就是上一个。

# %%
assert outcomes["SumTwice", 1] == outcomes["SumOverRanks", 2] == "passes"
assert outcomes["SumTwice", 2].startswith("fails")

# %% [markdown]
# ## 结果正确，但是通信太多
#
# 一个层可能结果正确，却通信太多。`CommCounter` 统计集合通信的次数和字节数。ParallelMLP 的前向需要一次 all-reduce，
# 反向也需要一次。下面的前向则把所有隐藏特征和 `down` 的各行汇集起来。
#
# 先猜一猜：四个 rank，四个样本，宽度 8，32 个隐藏特征。两种前向各要交换多少字节？


# %%
class Gathers(ParallelMLP):
    def forward(self, x):
        hidden = (x @ self.up).relu()
        whole = sp.all_gather(hidden.T).T  # 所有 rank 的行
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
# 求和的数组有 4 x 8 个数，每个 4 字节，共 128 字节。隐藏特征和 `down` 各有 4 x 32 和 32 x 8 个数，共 1536 字节，
# 是十二倍。
#
# 在测试里把这个数写下来：`assert comm.counts == {"all_reduce": 1}`。以后的改动如果增加了通信，就会被发现。
# 对于有 `Layout` 的张量，`expect_no_redistribution()` 在第一次出现程序没有要求的重分布时报错：


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
# ## pytest 中的测试
#
# 测试工具带有 pytest 插件：`@pytest.mark.world(4)` 让测试的函数体在四个进程上运行，这些进程在测试之间保持运行。
# 测试失败时，每个失败的 rank 都有一段报告。
#
# 先猜一猜：第二个测试的报告里有哪些 rank？

# %%
Path("conftest.py").write_text('pytest_plugins = ["pytest_simparallel"]\n')  # 仅在没有安装 simparallel 时需要
Path("test_mine.py").write_text("""
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
report = subprocess.run(command, capture_output=True, text=True).stdout
print(report.replace(f"{Path.cwd()}/", ""))
assert "1 failed, 2 passed" in report

# %% [markdown]
# rank 2 和 rank 3：它们的切片只有一个元素。写这个测试的人没有想到六个元素分给四个 rank 的情况。
#
# ## 测试会出什么问题
#
# 测试本身也可能有错。三种情况：所有大小都能被 rank 数整除；容差与错误一样大；用被测的代码来计算预期结果。
# 所以每个测试也要接受检验：放进一个错误，看测试是否失败。`faults.inject` 可以注入 rank 的故障。
#
# 先猜一猜：rank 1 在第二次 all-reduce 中失败，刚好在复制结果和返回之间。rank 0 会一直挂起吗？


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
# 不会：所有 rank 都结束，错误信息指出最先的失败。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。答案在 `tutorials/solutions/09_testing.py`。


# %%
def shrink_sizes(fails, sizes):
    """练习 1：从失败的列表中去掉一些数，只要它仍然失败，最后返回剩下的。

    `sizes` 是整数的列表，`fails(list)` 返回这样的列表是否失败，`fails(sizes)` 为真。
    从结果中再去掉任何一个数，列表就会通过。顺序不变。
    """
    raise NotImplementedError


sp.exercises.check("shrink_sizes", shrink_sizes)


# %%
def sizes_from_cuts(cuts, total):
    """练习 2：由任意整数 `cuts`，返回 `total` 个元素分成 `len(cuts) + 1` 片时各片的大小。

    返回列表。构造即合法：大小不为负，总和是 `total`，并且每一种这样的列表都能由 0 到 `total` 之间的某些 cuts 得到。
    """
    raise NotImplementedError


sp.exercises.check("sizes_from_cuts", sizes_from_cuts)


# %%
def accepts_mean(program):
    """练习 3：返回一个程序是否正确计算了所有 rank 上的均值（True 或 False）。这就是一个测试，请自己写。

    `program(parts)` 得到各个 rank 的数（列表的列表，可以有空的，但不能全空），返回各个 rank 的结果，
    应当是所有数的均值。接受正确的程序，拒绝错误的程序。
    """
    raise NotImplementedError


sp.exercises.check("accepts_mean", accepts_mean)
