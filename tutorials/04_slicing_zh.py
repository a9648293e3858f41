# %% [markdown]
# # 第 4 课：切分张量
#
# 数据并行切分批次，每个 rank 都持有整个模型。本课连模型里面的张量也切分：每个 rank 只持有矩阵的一个*切片*，
# 由所有 rank 共同完成一次矩阵乘法。学习本课需要了解集合通信（第 2 课）和数据并行（第 3 课）。
#
# 运行方式：`python tutorials/04_slicing_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 切分、切片 | cut, slice |
# | 切分策略 | strategy |
# | 设备矩阵 | device matrix |
# | 张量映射 | tensor map |
# | 布局 | layout |
# | 部分和 | partial sum |
# | 重分布 | redistribution |
# | 列并行、行并行 | column-parallel, row-parallel |
# | 张量并行 | tensor parallelism |
# | 词表并行 | vocabulary-parallel |
# | 偏置 | bias |
#
# 先看结果：一个有两个矩阵的网络，由四个 rank 训练，每个 rank 持有两个矩阵各四分之一。

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
        self.matmul1 = sp.ops.MatMul().shard(((1, 1), (1, 4)))  # `up` 的列切成 4 份
        self.relu = sp.ops.ReLU()
        self.matmul2 = sp.ops.MatMul().shard(((1, 4), (4, 1)))  # `down` 的行切成 4 份

    def forward(self, x):
        return self.matmul2(self.relu(self.matmul1(x, self.up)), self.down)


# %% [markdown]
# 训练步就是一个单设备程序，`AutoParallel` 用切片来执行它。


# %%
def train(parallel, steps=20):
    sp.set_seed(1)
    with sp.no_init_parameters():  # 之后每个 rank 只生成自己的切片
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
# ## 与单个设备对比
#
# 不使用 `AutoParallel` 时，切分策略不起作用。
#
# 先猜一猜：没有任何 rank 见过完整的矩阵，损失还相等吗？


# %%
def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "04_slicing", f"{name}.png"), dpi=100)


alone, whole = train(parallel=False)
apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
print(f"one device holds {whole}; the losses differ by at most {apart:.0e}")
assert apart < 1e-5
assert [np.prod(slices[name]) * 4 == np.prod(whole[name]) for name in whole] == [True, True]
picture = sp.view.plot_loss({"four ranks": losses, "one device": alone}, title="A quarter of the matrices on each rank")
show(picture, "losses")

# %% [markdown]
# 相等，差别只来自加法的顺序。初始权重也相等：使用 `no_init_parameters` 时，每个 rank 从同一组随机数中只生成自己的切片，
# 所以模型可以比单个设备的内存更大。下面从头搭建。
#
# ## 切分矩阵乘法的三种方法
#
# 乘法 `x @ w` 有三个维度：`x` 的行（称为 `m`），`w` 的列（称为 `n`），以及求和的维度，
# 也就是 `x` 的列和 `w` 的行（称为 `k`）。每个维度都可以切成两半。
#
# 先猜一猜：切哪个维度时，得到的两部分还不是最终结果？

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
# 切 `k` 的时候。切 `m` 或 `n` 时，每个 rank 算出结果的一个完整切片，不需要通信。切 `k` 时，
# 每个 rank 得到一个同样大小的矩阵，但其中每个数只是一个加数：这就是*部分和*，要用一次 all-reduce 来完成求和。
#
# ## 切分策略
#
# *切分策略*给出每个输入的每个维度切成几份。`((2, 4), (4, 1))` 把第一个输入的行切成 2 份、列切成 4 份，
# 把第二个输入的行切成 4 份。这种写法和这些术语来自 MindSpore。
# `plan` 列出切片和通信，并不执行计算。
#
# 先猜一猜：现在有八个设备，哪些设备持有第二个输入的同一个切片？

# %%
plan = sp.ops.MatMul().shard(((2, 4), (4, 1))).plan((8, 8), (8, 4), device_num=8)
print(plan)
assert plan.device_matrix == (2, 4, 1)
show(plan.draw(), "strategy")

# %% [markdown]
# 设备 0 和 4，1 和 5，2 和 6，3 和 7。
#
# *设备矩阵* `(2, 4, 1)` 排列这些设备，乘法的每个维度对应一个轴：`m` 为 2，`k` 为 4，`n` 为 1。
# rank 按行编号，最后一个轴变化最快。因此 rank 6 的坐标是 `(1, 2, 0)`：行的后一半，`k` 的第三个四分之一。
#
# *张量映射*给出张量的每个维度由哪个轴切分。MindSpore 从右边开始给轴编号：`(2, 1)` 就是 `m` 和 `k` 的轴，-1 表示不切分。
# 第一个练习就是关于这些编号的：

# %%
assert plan.tensor_maps["inputs"] == [(2, 1), (1, 0)]
assert plan.layouts["inputs"][1].replica_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
assert plan.slices(6)["inputs"] == [(slice(4, 8), slice(4, 6)), (slice(4, 6), slice(0, 4))]

# %% [markdown]
# ## 前向和反向用同一条规则
#
# 矩阵乘法的梯度也是矩阵乘法：`x` 的梯度是 `dy @ w.T`，对 `n` 求和；`w` 的梯度是 `x.T @ dy`，对 `m` 求和。
# 如果求和的维度被切分，每个 rank 就只有部分和。
#
# 先猜一猜：每次只切一个维度，切成 4 份。all-reduce 出现在哪里：输出、`x` 的梯度，还是 `w` 的梯度？
# 三种切法中哪一种是数据并行？

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
# 每种切法都要付出一次求和，只是位置不同。切 `m` 时，求和的是权重的梯度：这就是数据并行，
# 它对梯度做的 all-reduce 是同一条规则的特例。

# %%
assert sums == {"m": ["gradient of w"], "n": ["gradient of x"], "k": ["output"]}

# %% [markdown]
# ## 有名字的轴
#
# 从右边数的编号不容易读。`Layout` 给设备矩阵的轴起名字。对张量的每个维度给出一个名字，就说明了这个张量怎样切分。
# 一个维度可以由两个轴切分，先写的轴在外层。
#
# 先猜一猜：rank 2 的坐标是 (dp, sp, mp) = (0, 1, 0)。列切成四份，写成 `("sp", "dp")` 时它持有第几份？
# 写成 `("dp", "sp")` 时呢？

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
# 第三份和第二份。把各轴的坐标当作一个数的各位：对 `("sp", "dp")` 来说是 1 和 0，2 * 1 + 0 就是切片 2（从 0 数起）。
#
# ## 部分和与重分布
#
# `distribute_tensor` 把切片分给每个 rank，`redistribute` 把张量变成另一种布局。如果张量的求和还没有完成，
# `layout.partial` 中就有求和的轴。
#
# 先猜一猜：下面是四个 rank 上的六种布局变化，各需要哪一种集合通信？

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
        tensor = sp.from_local(numbers * sp.get_rank(), SUM)  # 每个 rank 有一个加数：这些数的 0、1、2、3 倍
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
# 依次是 all-gather、all-to-all、不需要（每个 rank 只留下已有数据的一部分）、all-reduce、reduce-scatter，
# 最后一个也不需要。reduce-scatter 发送的数据是 all-reduce 的一半，因为每个 rank 只得到总和的一个切片。

# %%
names = [[name for name, _ in collectives[change]] for change in CHANGES]
assert names == [["all_gather"], ["all_to_all"], [], ["all_reduce"], ["reduce_scatter"], []]
assert collectives["partial sum", "whole"][0][1] == 2 * collectives["partial sum", "rows"][0][1]

# %% [markdown]
# ## 先按列切，再按行切
#
# 相邻的两层可以切成中间不需要通信的形式。*列并行*线性层切分输出特征（`n`），结果保持切分状态，
# ReLU 在每个切片上单独计算。*行并行*线性层切分输入特征（`k`），直接使用这些切片。
# 这样的一对（Shoeybi 等 2019）是张量并行的核心，本课开头的网络就是这样的一对。
#
# 先猜一猜：下面的两层在前向有 2 次矩阵乘法，在反向有 4 次。一步需要几次 all-reduce？

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
# 两次：前向一次（第二层的 `k` 被切分），反向一次，用于 `x` 的梯度（第一层的 `n` 被切分）。权重的梯度不需要通信。
# Transformer 的注意力部分和前馈部分各有这样的一对，所以一个 Transformer 层在一步中需要四次 all-reduce。
#
# 单个设备上的同样两层得到同样的梯度：


# %%
def plain_block():
    sp.set_seed(2)
    up, down = sp.nn.Linear(16, 64), sp.nn.Linear(64, 16)
    x = sp.Tensor(numbers, requires_grad=True)
    down(up(x).relu()).square().sum().backward()
    return x.grad.numpy()


np.testing.assert_allclose(gradient, plain_block(), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## 在切分的 logits 上计算损失
#
# 语言模型的最后一层，词表中的每个词对应一列，所以按列切分，logits 也就按列切分。交叉熵需要每一行的最大值、
# 指数之和，以及正确的词的 logit，它们都是归约。所以对每一行，rank 之间只交换三个数，而不是整行。
#
# 先猜一猜：32 行，词表有 4096 个词，四个 rank。与对 logits 做 all-gather 相比，一个 rank 发送的字节数少多少倍？

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
# 683 倍。通信量不再随词表增大，损失不变。

# %%
assert round(sent[False][-1] / sent[True][-1]) == 683
assert len(set(sent[True])) == 1

# %% [markdown]
# ## 所有策略，同一个结果
#
# 浮点数之和依赖于加法的顺序，小整数之和则不依赖。所以用整数时，结果必须完全相等。
#
# 先猜一猜：在四个设备上，一次矩阵乘法有多少种切分策略？允许一些设备重复另一些设备的计算。

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
# 十种：都不切；一个维度切成 2 份（三种）或 4 份（三种）；两个维度各切成 2 份（三种）。切片少于四个时，
# 一些设备会重复另一些设备的计算。
#
# ## 程序没有要求的重分布
#
# 相邻算子的策略不一定衔接得上。这时 `AutoParallel` 会在它们之间对张量做重分布。`explain` 列出一步中的所有通信，
# 包括程序没有要求的那些。
#
# 先猜一猜：只改变第二次乘法的策略，现在一步要发送多少字节？


# %%
class Mixed(Network):
    def __init__(self):
        super().__init__()
        self.matmul2 = sp.ops.MatMul().shard(((4, 1), (1, 1)))  # 批次切成 4 份


good, mixed = (network.explain((64, 64), device_num=4) for network in (Network(), Mixed()))
print(good)
print(mixed)
assert 5 * good.total_bytes < mixed.total_bytes < 6 * good.total_bytes
picture = sp.view.plot_slices([("after matmul1", COLUMNS, (64, 128)), ("for matmul2", ROWS, (64, 128))])
show(picture, "implicit")

# %% [markdown]
# 字节数是原来的五倍多：隐藏层要经过一次 all-to-all，它的梯度返回时又是一次，`down` 的梯度还要求和。
# 损失仍然是正确的。使用 `strict=True` 时，程序没有要求的重分布是错误：


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
# ## 常见错误
#
# **不能切分的维度。** 先猜一猜：在八个设备上计算 `(6, 8) @ (8, 4)`，下面哪些策略是合法的？

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
# 只有最后一个。6 行不能切成 4 份，`k` 的两个切分数必须相等，2 x 4 x 2 个设备又太多了。每个错误都给出相近的合法策略。
# 在布局中，一个轴只能切分张量的一个维度。
#
# **行并行层的偏置。** 每个 rank 算出结果的一个加数。一个常见的错误是在每个 rank 上都加偏置。先猜一猜：
# 在四个 rank 上，结果差多少？


# %%
def bias_on_every_rank():
    own = slice(2 * sp.get_rank(), 2 * sp.get_rank() + 2)
    return sp.all_reduce(left[:, own] @ right[own] + 100)


wrong = sp.launch(bias_on_every_rank, world_size=4, transport="inline")[0] - (left @ right + 100)
print(f"each element of the result is too large by {wrong.max():g}")
assert np.all(wrong == 300)

# %% [markdown]
# 多出偏置的三倍：总和里有四个偏置。应当在 all-reduce 之后再加，或者只在一个 rank 上加。
#
# ## 练习
#
# 请写出下面的函数。检查从最小的情况开始，并画出第一个失败的情况。答案在 `tutorials/solutions/04_slicing.py`。


# %%
def slice_of(rank, device_matrix, tensor_map, shape):
    """练习 1：返回一个 rank 持有的张量切片，即由每个维度的 (start, stop) 组成的列表。

    `device_matrix` 是各轴的大小，rank 编号时最后一个轴变化最快。`tensor_map` 对每个维度有一项：-1 表示不切分，
    或者是切分它的轴的编号（从右边数），或者是由这样的编号组成的元组，外层的轴在前。
    一个维度的所有切片大小相同。
    """
    raise NotImplementedError


sp.exercises.check("slice_of", slice_of)


# %%
def row_parallel_linear(x, w, b):
    """练习 2：在每个 rank 上返回所有 rank 的 `x @ w` 之和，再加一次 `b`。

    `x` 是这个 rank 的输入的列，`w` 是这个 rank 的权重的行。`b` 是完整的偏置，在所有 rank 上相同。
    通信量不能超过对结果做一次 all-reduce。
    """
    raise NotImplementedError


sp.exercises.check("row_parallel_linear", row_parallel_linear)


# %%
def vocabulary_parallel_cross_entropy(logits, labels, first):
    """练习 3：在每个 rank 上返回所有行的平均交叉熵。

    `logits` 是这个 rank 的列，从整体的第 `first` 列开始。`labels` 是每一行的正确列在整体中的编号。logits 可以大到
    1000。通信量不能超过三次 all-reduce，每次每行一个数。
    """
    raise NotImplementedError


sp.exercises.check("vocabulary_parallel_cross_entropy", vocabulary_parallel_cross_entropy)
