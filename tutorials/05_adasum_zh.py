# %% [markdown]
# # 第 5 课：Adasum
#
# 数据并行时，各个 rank 对梯度取平均。rank 越多，批次越大，一遍数据的步数就越少，模型学到的也越少。
# Adasum（Maleki 等 2020，MindSpore 称为自适应梯度求和）根据梯度的方向把它们合并，使大批次的训练仍然有足够的进展。
# 学习本课需要了解集合通信和数据并行。
#
# 运行方式：`python tutorials/05_adasum_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 自适应梯度求和 | Adasum (adaptive summation) |
# | 正交、平行 | orthogonal, parallel |
# | 投影 | projection |
# | 点积 | dot product |
# | 正交性 | orthogonality |
# | 预热 | warm-up |
# | 结合律 | associativity |
# | 权重的变化量 | change of the weights (delta) |
# | 节点 | node |
#
# 先看结果：十六个 worker，使用单个 worker 的学习率，用三种方法合并梯度。

# %%
import warnings
from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import InputError

images, labels = (array[:1024] for array in sp.data.digits("train")[:])
BATCH, RATE = 8, 0.3  # 每个 worker


def make_network():
    sp.set_seed(1)
    return sp.nn.Sequential(sp.nn.Linear(64, 64, weight_init="he_normal"), sp.nn.ReLU(), sp.nn.Linear(64, 10))


def schedule(steps, rate=RATE):
    """返回每一步的学习率：在前五分之一上升，然后下降到 0。"""
    return sp.Tensor(np.interp(np.arange(1, steps + 1), [0, steps / 5, steps], [0, rate, 0]).astype(np.float32))


def gradients(network, step, worker, workers, batch=BATCH):
    """返回一个 worker 的损失和梯度。"""
    first = (step * workers + worker) * batch % len(images)
    logits = network(images[first : first + batch])
    loss = sp.functions.cross_entropy(logits, sp.Tensor(labels[first : first + batch]))
    network.zero_grad()
    loss.backward()
    return loss.item(), [parameter.grad.numpy() for parameter in network.parameters()]


# %% [markdown]
# 在每一步，`all_reduce` 把各个 rank 的梯度换成它们的和、平均值，或者 Adasum。


# %%
def train(how, steps=24, rate=RATE):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=schedule(steps, rate))
    losses = []
    for step in range(steps):
        loss, grads = gradients(network, step, sp.get_rank(), sp.get_world_size())
        optimizer(sp.all_reduce(grads, how))
        losses.append(sp.all_reduce(np.array(loss), "mean").item())
    return losses, network


def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "05_adasum", f"{name}.png"), dpi=100)


curves = {}
for how in ("sum", "mean", "adasum"):
    curves[how], _ = sp.launch(train, (how,), world_size=16, transport="inline")[0]
    print(f"{how:<6} loss {curves[how][0]:.3f} -> {curves[how][-1]:.3f}, at most {max(curves[how]):.3f}")
picture = sp.view.plot_loss(curves, title="Sixteen workers, the learning rate of one")
picture.set_ylim(0, 5)
show(picture, "losses")
assert min(curves, key=lambda how: curves[how][-1]) == "adasum"
assert max(curves["sum"]) > 2 * curves["sum"][0]

# %% [markdown]
# 求和的步子太大，损失反而上升；取平均的步子太小。Adasum 不需要重新选择学习率。
#
# ## 与单个设备对比
#
# `sp.adasum` 直接接收所有 worker 的梯度，不需要多个 rank。因此一个设备可以依次完成十六个 worker 的工作。
#
# 先猜一猜：损失相等吗？

# %%
network = make_network()
optimizer = sp.optim.SGD(network.parameters(), lr=schedule(24))
alone = []
for step in range(24):
    losses, grads = zip(*(gradients(network, step, worker, 16) for worker in range(16)), strict=True)
    optimizer(sp.adasum(grads))
    alone.append(np.mean(losses))
apart = max(abs(a - b) for a, b in zip(alone, curves["adasum"], strict=True))
print(f"the losses differ by at most {apart:.0e}")
assert apart < 1e-5

# %% [markdown]
# 相等。下面从头搭建。
#
# ## 两个梯度
#
# 两个 worker 的梯度是 `g1` 和 `g2`。如果它们*正交*，说明两个 worker 学到的是不同的东西，求和就等于把两步都走了。
# 如果它们*平行*，两个 worker 说的是同一件事，求和会把同一步走两遍，取平均则只走一遍。
#
# 先猜一猜：在下面的每种情况中，Adasum 等于求和的结果，等于平均值，还是都不等于？

# %%
CASES = {"orthogonal": ([2, 0], [0, 1]), "45 degrees": ([2, 0], [1, 1]), "parallel": ([2, 0], [1, 0])}
combined = {}
for title, pair in CASES.items():
    g1, g2 = np.array(pair, float)
    combined[title] = {"g1": g1, "g2": g2, "sum": g1 + g2, "mean": (g1 + g2) / 2, "Adasum": sp.adasum([g1, g2])}
    print(f"{title:<10}", *(f"{name} {vector}" for name, vector in list(combined[title].items())[2:]))
assert np.array_equal(combined["orthogonal"]["Adasum"], combined["orthogonal"]["sum"])
assert np.array_equal(combined["parallel"]["Adasum"], combined["parallel"]["mean"])
show(sp.view.plot_vectors(combined), "vectors")

# %% [markdown]
# 正交的梯度相加，平行的梯度取平均。在这两者之间，Adasum 平滑地过渡。公式从总和中减去每个梯度在另一个梯度上的
# *投影*的一半：

# %%
angles = np.radians(np.arange(0, 181, 5))
lengths = {"sum": [], "Adasum": [], "mean": []}
for angle in angles:
    g1, g2 = np.array([1.0, 0.0]), np.array([np.cos(angle), np.sin(angle)])
    dot = g1 @ g2
    by_hand = (1 - dot / (2 * g1 @ g1)) * g1 + (1 - dot / (2 * g2 @ g2)) * g2
    assert np.allclose(by_hand, sp.adasum([g1, g2]))
    for name, vector in (("sum", g1 + g2), ("Adasum", by_hand), ("mean", (g1 + g2) / 2)):
        lengths[name].append(np.linalg.norm(vector))
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for name, line in (("sum", "-"), ("Adasum", "o-"), ("mean", "--")):
    ax.plot(np.degrees(angles), lengths[name], line, label=name)
ax.set(xlabel="angle between two gradients of length 1 [degrees]", ylabel="length of the result")
ax.legend()
show(ax, "angles")

# %% [markdown]
# 超过 90 度时，两个梯度意见相左，结果比总和更长。方向相反的梯度互相抵消。
#
# ## 公式从何而来
#
# 如果只有一个 worker，它会先后走两步，第二步的梯度用第一步之后的权重计算。并行的 worker 得不到这样的权重。
#
# 下面是线性模型的两个样本，损失为 `(x @ w - y)^2 / 2`。学习率取这种样本允许的最大值：走一步就使该样本的损失变为零。
#
# 先猜一猜：先后走两步的结果与样本的顺序有关。两个*最初的*梯度怎样合并，才能到达两种顺序终点的平均？

# %%
samples = [(np.array([2.0, 0.0]), 1.0), (np.array([1.2, 1.6]), 2.0)]
rate = 1 / 4  # 1 除以 x 长度的平方，两个 x 的长度都是 2


def gradient(w, sample):
    x, y = sample
    return (x @ w - y) * x


start = np.array([2.0, 1.5])
ends = []
for first, second in (samples, samples[::-1]):
    middle = start - rate * gradient(start, first)
    ends.append(middle - rate * gradient(middle, second))
g1, g2 = (gradient(start, sample) for sample in samples)
steps = {"sum": g1 + g2, "mean": (g1 + g2) / 2, "Adasum": sp.adasum([g1, g2])}
_, ax = plt.subplots(figsize=(7, 5), layout="constrained")
ax.plot(*zip(start, ends[0], strict=True), "k:", *zip(start, ends[1], strict=True), "k:")
ax.plot(*zip(*ends, strict=True), "ks-", label="two steps in sequence, both orders")
ax.plot(*start, "k*", markersize=14, label="start")
for (name, step), marker in zip(steps.items(), "ovD", strict=True):
    ax.plot(*(start - rate * step), marker, markersize=11, label=f"one step: {name}")
    print(f"{name:<6} ends at {start - rate * step}")
print("mean of both orders:", np.mean(ends, axis=0))
ax.set(xlabel="weight 0", ylabel="weight 1")
ax.legend()
show(ax, "sequence")

# %% [markdown]
# 用 Adasum。对这样的样本，它是精确的。对神经网络则是近似：用梯度与自身的外积来代替损失的曲率。

# %%
assert np.allclose(start - rate * steps["Adasum"], np.mean(ends, axis=0))

# %% [markdown]
# ## 更多的 worker：一棵树
#
# 上面的公式只适用于两个梯度。四个 rank 时，先合并 0 和 1、2 和 3，再合并这两个结果。有 `2^k` 个 rank 时，树有 `k` 层。
#
# 先猜一猜：四个梯度分给四个 rank 有 24 种顺序。结果总是相同吗？

# %%
four = np.random.default_rng(4).normal(size=(4, 2))
tree = sp.adasum([sp.adasum(four[:2]), sp.adasum(four[2:])])
assert np.allclose(tree, sp.adasum(four))
results = {tuple(sp.adasum([four[i] for i in order]).round(9)) for order in permutations(range(4))}
print(f"{len(results)} different results:", *(f"({x:.3f}, {y:.3f})" for x, y in sorted(results)))
_, ax = plt.subplots(figsize=(7, 5), layout="constrained")
ax.plot(*four.T, ".", color="0.6")
ax.quiver(*np.zeros((2, 4)), *four.T, angles="xy", scale_units="xy", scale=1, color="0.7")
ax.plot(*zip(*results, strict=True), "D", markersize=9, label="Adasum in all orders")
ax.plot(*four.sum(axis=0), "o", markersize=9, label="sum")
ax.plot(*four.mean(axis=0), "v", markersize=9, label="mean")
ax.set_aspect("equal")
ax.set_title("four gradients (grey)")
ax.legend()
show(ax, "orders")
assert len(results) == 3

# %% [markdown]
# 不相同。两个梯度的 Adasum 是对称的，但不满足结合律：只有分成两对的三种方法有区别。所以这棵树是定义的一部分，
# 所有算法都必须遵守。
#
# ## 逐层合并
#
# 模型有许多参数，每个参数单独合并。先猜一猜：有两层，第一层的梯度平行，第二层的梯度正交。如果把整个模型当作一个长向量，
# 结果会怎样？

# %%
worker_0 = [np.array([3.0, 0.0]), np.array([1.0, 0.0])]
worker_1 = [np.array([3.0, 0.0]), np.array([0.0, 1.0])]
by_layer = sp.adasum([worker_0, worker_1])
flat = sp.adasum([np.concatenate(worker_0), np.concatenate(worker_1)])
print("layer by layer:", *by_layer, "\none vector:    ", flat)
assert np.array_equal(np.concatenate(by_layer), [3, 0, 1, 1])
assert np.allclose(flat, [3.3, 0, 0.55, 0.55])

# %% [markdown]
# 数值大的第一层决定了两层的结果，第二层得到的比平均值多不了多少。所以 `all_reduce(grads, "adasum")` 接收列表，
# 列表中的每个数组单独合并。
#
# ## 真实的梯度有多正交？
#
# 用结果长度的平方除以各个梯度长度的平方和：所有梯度互相正交时，这个比值是 1；`n` 个梯度全部相等时，它是 `1 / n`。
#
# 先猜一猜：每个 worker 先用 8 个样本计算梯度，再用 128 个样本。哪一种情况下梯度更接近正交？训练过程中，
# 这个比值上升还是下降？


# %%
def watch(batch, steps=36):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1)
    ratios = {name: [] for name, _ in network.named_parameters()}
    for step in range(steps):
        _, grads = gradients(network, step, sp.get_rank(), sp.get_world_size(), batch)
        squares = sp.all_reduce(np.array([np.sum(grad**2) for grad in grads]))
        results = sp.all_reduce(grads, "adasum")  # 原地操作：`grads` 现在是合并的结果
        for name, result, square in zip(ratios, results, squares, strict=True):
            ratios[name].append(float(np.sum(result**2) / square))
        optimizer(results)
    return ratios


early, late = {}, {}
for batch in (8, 128):
    ratios = sp.launch(watch, (batch,), world_size=8, transport="inline")[0]
    mean = np.mean(list(ratios.values()), axis=0)
    early[batch], late[batch] = mean[:3].mean(), mean[18:].mean()
    print(f"{batch:3} samples: {early[batch]:.2f} in the first 3 steps, {late[batch]:.2f} in the second half")
show(sp.view.plot_orthogonality(ratios, workers=8, smooth=3), "orthogonality")

# %% [markdown]
# 梯度由两部分组成：所有样本共有的部分，以及噪声。两个 worker 的噪声几乎正交，而小批次的噪声大。批次大时，
# 留下的是共有的部分，所以梯度更接近平行。
#
# 图中是 128 个样本的情况，大多数层的比值在上升。一开始，所有样本都把权重从随机的初始值拉向同一个方向，
# 后来它们的方向不再一致。用 8 个样本时，比值一开始就很高，之后略有下降。所以在求和与取平均之间，
# 没有一个固定的系数适合所有的批次、层和步数。

# %%
assert early[8] > 2 * early[128]
assert late[128] > 1.3 * early[128]
assert late[8] < early[8]

# %% [markdown]
# ## 大批次
#
# 现在用 1、4 和 16 个 worker，以同样的学习率训练三遍数据。一个 worker 时是 384 步，每步 8 个样本；
# 16 个 worker 时是 24 步，每步 128 个样本。
#
# 先猜一猜：哪一种方法能保持准确率？

# %%
test_images, test_labels = sp.data.digits("test")[:]


def accuracy(how, workers):
    steps = 3 * len(images) // (BATCH * workers)
    _, network = sp.launch(train, (how, steps), world_size=workers, transport="inline")[0]
    return float(np.mean(network(test_images).numpy().argmax(axis=1) == test_labels))


one = [accuracy("sum", 1)]
accuracies = {how: [(1, one)] for how in ("sum", "mean", "adasum")}
for how, points in accuracies.items():
    points += [(workers, [accuracy(how, workers)]) for workers in (4, 16)]
    print(f"{how:<6}", *(f"{workers:2} workers {found[0]:4.0%}  " for workers, found in points))
show(sp.view.plot_accuracies(accuracies), "accuracies")

# %% [markdown]
# Adasum。4 个 worker 时，求和与取平均也几乎同样好。16 个 worker 时，求和完全失效，取平均则学得太慢：
# 提高学习率会好一些，但是对每个 worker 数都要重新寻找学习率。

# %%
at_16 = {how: points[-1][1][0] for how, points in accuracies.items()}
assert at_16["sum"] < 0.4 < at_16["mean"] < 0.85 < at_16["adasum"]

# %% [markdown]
# ## 代价
#
# 公式需要点积 `g1 @ g2`、`g1 @ g1` 和 `g2 @ g2`，但是没有哪个 rank 需要看到两个完整的梯度：点积是各个切片的点积之和。
# 在已发表的算法中，两个 rank 交换各自向量的一半，于是一个 rank 有两个向量的前一半，另一个有后一半。
# 它们各自计算三个点积，与持有其余部分的 rank 相加，然后合并自己的一半，再对四分之一重复这个过程，最后原路返回。
#
# `dry_run` 不带数据地运行程序，预测它在所描述的硬件上的时间，这里是四个 H100。先猜一猜：四个 rank，一个向量。
# 与求和相比，一个 rank 多发送多少字节？


# %%
def reduce_once(size, op):
    x = sp.nn.initializer("zeros", [size // 4], np.float32).detach()
    sp.all_reduce(x, op, algorithm="halving_doubling")


rows = []
for size in (1 << 18, 1 << 21, 1 << 24):
    row = {"size_bytes": size}
    for op in ("sum", "adasum"):
        prediction = sp.dry_run(reduce_once, (size, op), world_size=4, cluster="dgx-h100")
        (event,) = (event for event in prediction.trace.events if event.rank == 0)
        row |= {f"{op}_s": prediction.step_time_s, f"{op}_bytes": event.sent_bytes}
    row["ratio"] = row["adasum_s"] / row["sum_s"]
    rows.append(row)
    print(f"{size:8} bytes: {row['adasum_bytes'] - row['sum_bytes']} more sent, {row['ratio']:.2f} times the time")
show(sp.view.plot_costs(rows), "costs")

# %% [markdown]
# 72 字节：第一层是三个数，每个 8 字节；第二层是两次三个数。这些小消息的延迟与向量的长度无关：262 kB 时，
# 它们使调用的时间变成 1.6 倍；16.8 MB 时只有 1.1 倍。

# %%
assert all(row["adasum_bytes"] - row["sum_bytes"] == 72 for row in rows)
assert rows[0]["ratio"] > 1.5
assert rows[-1]["ratio"] < 1.15

# %% [markdown]
# ## 合并权重，而不是梯度
#
# Adam 这样的优化器并不是简单地把梯度加到权重上。因此每个 worker 先走自己的一步，再用 Adasum 合并权重的*变化量*。
# `AdasumOptimizer` 可以这样包装任何优化器。在集群上，使用参数 `nodes` 时，节点内部对梯度取平均，节点之间使用 Adasum。
#
# 先猜一猜：对 SGD 和 Adam 中的哪一个，这与合并梯度的 Adasum 相同？


# %%
def one_step(make_optimizer, of_weights, nodes=None):
    network = make_network()
    optimizer = make_optimizer(network.parameters())
    if of_weights:
        optimizer = sp.parallel.AdasumOptimizer(optimizer, nodes=nodes)
    _, grads = gradients(network, 0, sp.get_rank(), sp.get_world_size())
    if of_weights:
        optimizer.step()
    else:
        optimizer(sp.all_reduce(grads, "adasum"))
    return network[0].weight.numpy()


OPTIMIZERS = {"SGD": lambda p: sp.optim.SGD(p, lr=0.2), "Adam": lambda p: sp.optim.Adam(p, lr=0.01)}
apart = {}
for name, make_optimizer in OPTIMIZERS.items():
    of_gradients, of_weights = (
        sp.launch(one_step, (make_optimizer, choice), world_size=4, transport="inline")[0] for choice in (False, True)
    )
    apart[name] = np.abs(of_gradients - of_weights).max()
    print(f"{name:<4} the weights differ by at most {apart[name]:.0e}")
assert apart["SGD"] < 1e-6 < 1e-3 < apart["Adam"]

# %% [markdown]
# SGD，因为它的一步与梯度成正比。下面是两个节点，每个节点两个 rank，这次使用真正的进程：

# %%
across = sp.launch(one_step, (OPTIMIZERS["SGD"], True, [[0, 1], [2, 3]]), world_size=4)[0]
network = make_network()
grads = [gradients(network, 0, worker, 4)[1][0] for worker in range(4)]
of_nodes = sp.adasum([(grads[0] + grads[1]) / 2, (grads[2] + grads[3]) / 2])
expected = network[0].weight.numpy() - 0.2 * of_nodes
np.testing.assert_allclose(across, expected, atol=1e-6)
_, ax = plt.subplots(figsize=(9, 3.5), layout="constrained")
norms = {"mean of all": np.mean(grads, axis=0), "nodes, then Adasum": of_nodes, "Adasum of all": sp.adasum(grads)}
norms = {name: float(np.linalg.norm(vector)) for name, vector in norms.items()}
ax.barh(list(norms), list(norms.values()))
ax.set_xlabel("length of the combined gradient of the first layer")
show(ax, "nodes")
assert norms["mean of all"] < norms["nodes, then Adasum"] < norms["Adasum of all"]

# %% [markdown]
# ## 常见错误
#
# **三个 rank。** 论文只对 2 的幂定义了这棵树。**一个节点。** 如果所有 rank 都在一个节点上，就没有可以做 Adasum 的对象。
# 先猜一猜：这两种情况下，库会怎样处理？


# %%
def on_one_node():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = one_step(OPTIMIZERS["SGD"], True, nodes=[[0, 1, 2, 3]])
    return weights, [str(warning.message) for warning in caught]


three = sp.adasum(four[:3])
assert np.allclose(three, sp.adasum([sp.adasum(four[:2]), four[2]]))
try:
    sp.adasum(four[:3], strict=True)
except InputError as error:
    refusal = str(error)
    print("three vectors:", refusal)
weights, told = sp.launch(on_one_node, world_size=4)[0]
print("one node:", told[0])
np.testing.assert_allclose(weights, network[0].weight.numpy() - 0.2 * np.mean(grads, axis=0), atol=1e-6)

# %% [markdown]
# 第三个向量等到下一层再合并，除非用 `strict=True` 拒绝。这样它的分量比另外两个更重。只有一个节点时，结果就是平均值，
# 库会给出警告。
#
# **按 worker 数放大学习率。** 取平均时，人们常把学习率乘以 worker 数。先猜一猜：用 Adasum 时也这样做，会怎样？

# %%
scaled = {}
for how in ("mean", "adasum"):
    scaled[how], _ = sp.launch(train, (how, 24, 16 * RATE), world_size=16, transport="inline")[0]
    print(f"{how:<6} at the rate of one worker {curves[how][-1]:.2f}, at sixteen times that rate {scaled[how][-1]:.2f}")
assert scaled["adasum"][-1] > 5 * curves["adasum"][-1]

# %% [markdown]
# 几乎学不到东西。该相加的部分，Adasum 已经加过了。应当从单个 worker 的学习率开始。
#
# **全零的梯度。** 先猜一猜：一个 worker 的批次是空的，梯度为 0；另一个 worker 的梯度非常小。两者的影响差不多吗？

# %%
g = np.array([1.0, 2.0])
print("with 0:", sp.adasum([g, 0 * g]), " with 1e-9 g:", sp.adasum([g, 1e-9 * g]))
assert np.array_equal(sp.adasum([g, 0 * g]), g)
assert np.allclose(sp.adasum([g, 1e-9 * g]), g / 2)

# %% [markdown]
# 不是。平行的梯度再短，也会使另一个梯度减半。零没有方向，什么也不改变。公式要除以长度的平方，所以程序必须单独处理 0。
#
# ## 练习
#
# 请写出下面的函数。检查从最小的情况开始，并画出第一个失败的情况。答案在 `tutorials/solutions/05_adasum.py`。


# %%
def adasum_pair(a, b):
    """练习 1：返回两个向量的 Adasum。如果其中一个为零，返回另一个。"""
    raise NotImplementedError


sp.exercises.check("adasum_pair", adasum_pair)


# %%
def adasum_tree(vectors):
    """练习 2：返回 1、2、4、8……个向量的 Adasum：先合并相邻的向量，再合并它们的结果，依此类推。

    可以使用你的 `adasum_pair`，或者对两个向量使用 `sp.adasum`。
    """
    raise NotImplementedError


sp.exercises.check("adasum_tree", adasum_tree)


# %%
def adasum_of_slices(a, b):
    """练习 3：返回两个向量的 Adasum 在这个 rank 上的切片。

    `a` 和 `b` 是两个向量在这个 rank 上的切片，切片可以为空。通信量不能超过对三个数做一次 all-reduce。
    """
    raise NotImplementedError


sp.exercises.check("adasum_of_slices", adasum_of_slices)
