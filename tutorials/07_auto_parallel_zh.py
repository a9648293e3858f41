# %% [markdown]
# # 第 7 课：自动并行
#
# 在第 4 课里，每个算子的切分策略由我们手工选择。本课在所描述的硬件（第 6 课）上用搜索来选择：
# 搜索知道每个算子有哪些策略，给它们标价，并选出使一步最快的组合。
#
# 运行方式：`python tutorials/07_auto_parallel_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 自动并行 | automatic parallelism |
# | 切分策略 | strategy |
# | 计划 | plan |
# | 计算图 | graph |
# | 代价模型 | cost model |
# | 代价 | price, cost |
# | 重分布 | redistribution |
# | 动态规划 | dynamic programming |
# | 消元 | elimination |
# | 数据并行、张量并行、混合并行 | data, tensor, mixed parallelism |
# | 重计算 | recomputation |
# | 帕累托前沿 | Pareto front |
#
# 先看结果：一个单设备的训练步，以及它在四个 H100 上的计划。

# %%
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import PlanError, RunFailedError, SearchError, UnknownValueError
from simparallel.layout.redistribution import plan_redistribution
from simparallel.view.plan import plot_plan

samples = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
classes = np.arange(256) * 2

# %% [markdown]
# 训练步是为单个设备写的。在 `"auto"` 模式下，`AutoParallel` 为它搜索切分策略。


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
# `dry_run` 不需要数据，也不需要 H100，它返回这一步将要采用的计划。


# %%
def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "07_auto_parallel", f"{name}.png"), dpi=100)


prediction = sp.dry_run(train, world_size=4, cluster="dgx-h100")
plan = prediction.values[0][1]
print(plan)
one_device_s = sp.dry_run(train, world_size=1, cluster="dgx-h100").step_time_s
print(f"one device: {one_device_s * 1e6:.0f} µs a step")
show(plot_plan([(op.name, op.in_strategy) for op in plan.ops], title="Cuts of the data and of the weights"), "plan")

# %% [markdown]
# `Linear` 的权重把输出特征放在第 0 维。所以第一层是列并行，第二层是行并行：搜索自己找到了第 4 课里的那一对。
# 对于这么短的一步，四个设备上的数据并行比单个设备还慢。
#
# ## 与单个设备对比
#
# 这里没有计划所描述的硬件，但是它的策略可以在任何地方执行。下面由四个进程来执行。先猜一猜：损失与单个设备相同吗？

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
# 相同。策略改变一步的时间，不改变结果。下面从头搭建搜索。
#
# ## 有哪些选择
#
# 程序先在没有数据的情况下运行一遍，直到反向。它所调用的算子构成*计算图*。每个算子知道自己的维度（第 4 课），
# 因此可以列出它的所有合法策略：切分各个维度，使切片的总数整除设备数。
#
# 先猜一猜：矩阵乘法有三个维度。在 4、8 和 64 个设备上，它各有多少种策略？有 50 个这样的乘法的网络，
# 在 64 个设备上有多少种计划？


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
# 分别有 10、20 和 84 种策略，以及 10^96 种计划，不可能逐一尝试。所以需要两样东西：不用运行就能算出的代价，
# 以及不必查看所有计划的搜索。
#
# ## 策略的代价
#
# 一个算子的代价包括：它在切片上的计算，它要等待的集合通信，以及权重梯度的求和中没有被反向掩盖的部分。
# `explain` 把一个算子的策略与其次好的策略进行比较，其他算子保持各自的策略不变。
#
# 先猜一猜：第二层切成 4 份。如果切成 2 份，让设备两两做同样的计算，哪些部分会更便宜，哪些会更贵？

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
# 两个设备的 all-reduce 比四个设备的便宜。但是每个设备的计算更多，而且前一层的切片不再合适。第三种策略带有箭头：
# 它的求和以 reduce-scatter 结束，结果的行仍然切成 4 份。
#
# ## 相邻的算子
#
# 最后一列说明，代价也取决于成对的策略：如果相邻的两个算子衔接不上，它们之间的张量在前向和反向都要重分布。
#
# 下面是四个设备上连续的三次矩阵乘法。每次乘法有三种策略，都用上全部设备，计算量相同，所以用字节数作为代价。
# 下面列出各个策略的代价，以及各对策略的代价。

# %%
WIDTHS, ROWS = (256, 512, 1024, 2048), 256
THREE = {"data": ((4, 1), (1, 1)), "columns": ((1, 1), (1, 4)), "rows": ((1, 4), (4, 1))}
chain = [
    [sp.ops.MatMul().shard(strategy).plan((ROWS, a), (a, b), device_num=4) for strategy in THREE.values()]
    for a, b in pairwise(WIDTHS)
]


def pair_price(before, after):
    """返回一个 rank 在两次乘法之间收到的 KiB，包括前向和反向。"""
    move = plan_redistribution(before.layouts["output"], after.layouts["inputs"][0], before.output_shape)
    return 2 * max(move.received_bytes(4)) // 1024


nodes = [[product_plan.total_bytes // 1024 for product_plan in plans] for plans in chain]
edges = [[[pair_price(a, b) for b in later] for a in earlier] for earlier, later in pairwise(chain)]
for number, prices in enumerate(nodes):
    print(f"product {number}:", *(f"{name} {price}" for name, price in zip(THREE, prices, strict=True)))
for number, table in enumerate(edges):
    print(f"between {number} and {number + 1}, from data, columns, rows:", *table)

# %% [markdown]
# 先猜一猜：对每次乘法来说，`columns` 都是最便宜的策略。三次乘法合在一起，它还是最好的吗？


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
# 不是：`columns` 的输出是切分的，而下一次乘法需要完整的输入。`rows` 可以直接使用切分的输入。
#
# ## 动态规划
#
# 三次乘法有 27 种计划，上面全部试过了。链条更长时，从左向右处理：对当前乘法的每个策略，只记住到达它的最便宜的走法，
# 即它自己的代价，加上前一次乘法的各个策略（含这一对的代价）中最小的。到达同一策略的其他走法都可以忘掉，
# 因为后面的代价与它们无关。
#
# 先猜一猜：50 次乘法，每次有 84 种策略，需要做多少次加法？

# %%
sums = 49 * 84 * 84
print(f"{sums} sums, in place of 84^50")
assert sums == 345_744
assert plan.method == "elimination"
assert plan.gap == 0.0

# %% [markdown]
# 345744 次。有分支的图用类似的方法处理：搜索逐个消去算子，结果仍然是精确的。上面的计划写着 "optimal in the model"
# （在模型中最优）。用 MindSpore 的说法，这是并行模式 `AUTO_PARALLEL` 和搜索模式 `dynamic_programming`。
#
# MindSpore 还有两种搜索模式。`recursive_programming` 逐步切分：每一轮依次处理各个算子，如果再切一次对这个算子和
# 它的相邻算子来说更便宜，就切。`sharding_propagation` 从一个算子开始，让相邻的算子跟随它。
#
# 先猜一猜：其中哪一种能找到那一对层？

# %%
by_mode = {}
for mode in ("auto", "recursive_programming", "sharding_propagation"):
    by_mode[mode] = found = sp.dry_run(train, (mode,), world_size=4, cluster="dgx-h100").values[0][1]
    print(f"{mode:<21} {found.step_time_s * 1e6:.0f} µs, at most {found.gap:.0%} above the optimum")
assert by_mode["sharding_propagation"].diff(plan) == []
assert 0.3 < by_mode["recursive_programming"].gap < 0.4

# %% [markdown]
# 传播可以，逐步切分不行：只切一层要付出一次重分布，节省的却没有这么多；只有两层一起切才划算。`gap` 把计划的代价
# 与所有计划的一个经过证明的下界相比较。
#
# ## 数据并行、张量并行，还是混合
#
# 这是 Transformer 中的一对线性层，使用八个设备：数据并行把批次切成 8 份，张量并行把矩阵切成 8 份，
# `4 x 2` 把批次切成 4 份、矩阵切成 2 份。计划就是数据，所以这三种做法都可以通过修改搜索得到的计划来实现。
#
# 先猜一猜：批次为 64 行时哪一种最好？65536 行时呢？

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
    """返回把批次切成 d 份、矩阵切成 t 份的计划。"""
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
    found = sp.dry_run(two_steps, (batch,), world_size=8, cluster="dgx-h100").values[0]
    times["searched"].append(found.step_time_s)
    for name, (d, t) in MIXES.items():
        mixed = sp.dry_run(two_steps, (batch, by_hand(found, d, t)), world_size=8, cluster="dgx-h100")
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
# 64 行时是张量并行，65536 行时是数据并行。数据并行的消息与矩阵一样大，张量并行的消息与批次的行一样大。
# 4096 行和 16384 行时，混合并行最好。
#
# 搜索得到的计划几乎总是最快的，只有一次例外：4096 行时，`2 x 4` 快不到 1%。搜索把各项代价相加，
# 并估计梯度求和有多少被反向掩盖，而 `dry_run` 知道准确的值。“在模型中最优”说的是这些代价之和。

# %%
fastest = [min(MIXES, key=lambda name: times[name][i]) for i in range(len(BATCHES))]
assert fastest == ["tensor parallel", "tensor parallel", "2 x 4", "4 x 2", "data parallel"]
ratios = [times["searched"][i] / min(times[name][i] for name in MIXES) for i in range(len(BATCHES))]
assert max(ratios[:2] + ratios[3:]) < 1 + 1e-9
assert 1 < ratios[2] < 1.01

# %% [markdown]
# ## 内存不足时
#
# 按照模型的计算，计划使用的内存不会超过 `memory_limit`。程序可以提供用时间换内存的办法：
# `checkpoint(..., optional=True)` 标出激活可以在反向时重新计算的部分，`micro_batches` 允许把批次再切小（第 11 课）。
# 由搜索来决定是否采用。
#
# 先猜一猜：最快的计划需要 18 MB。如果上限是 16、12 和 8 MB，各要多花多少时间？


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
for limit in ("24MB", "16MB", "12MB", "8MB", "6MB"):
    try:
        found = sp.dry_run(train_deep, (limit,), world_size=4, cluster="dgx-h100").values[0]
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
# 上限为 16 MB 时，一步的时间增加到两倍多；12 MB 时四倍多；8 MB 时十二倍多。
# 想比其中任何一个计划更快，就必须用更多内存：这样的一组计划称为*帕累托前沿*，第三个练习就是求出它。
# 如果内存放不下参数、它们的梯度和一个小的微批次，就没有可行的计划，搜索会说明这一点。

# %%
prices = [time for time, _ in front.values()]
assert len(prices) == 4
assert prices[1] - prices[0] < prices[2] - prices[1] < prices[3] - prices[2]

# %% [markdown]
# ## 计划就是数据
#
# 计划可以保存、修改、比较和执行。先猜一猜：修改第一个计划，使最后两个算子成为数据并行。改变的是损失，还是时间？

# %%
path = Path("pictures", "07_auto_parallel", "plan.json")
plan.save(path)
loaded = sp.Plan.load(path)
edited = loaded.with_("2.Linear", ((4, 1), (1, 1))).with_("CrossEntropy", ((4, 1), (4,)))
for name, here, there in edited.diff(loaded):
    print(f"{name:<12} {there[0]} -> {here[0]}")
edited_losses, _ = sp.launch(train, ("auto", edited), world_size=4, transport="inline")[0]
slower = sp.dry_run(train, ("auto", edited), world_size=4, cluster="dgx-h100")
print(f"{plan.step_time_s * 1e6:.0f} µs -> {slower.step_time_s * 1e6:.0f} µs")
assert np.allclose(edited_losses, alone, atol=1e-4)
assert slower.step_time_s > 1.5 * plan.step_time_s
events = [event for event in slower.trace.events if event.rank == 0 and event.step == 4]
show(sp.view.plot_timeline(events, title="A step of the edited plan on rank 0, simulated time"), "edited")
counts = Counter(event.name for event in events if event.kind == "collective")
print(dict(counts))

# %% [markdown]
# 是时间，损失不变。现在隐藏层需要重分布，第二个权重的梯度还要求和。
#
# ## 常见错误
#
# **把计划用于另一个程序。** 上面的计划有四个算子，下面的程序有另外两个算子。**由数值决定的分支。**
# 搜索在没有数据的情况下运行程序。先猜一猜：遇到 `if loss.item() > 1`，它会怎样？


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
# 搜索会拒绝，并指出是哪一行。应当在训练步之外做这样的判断，或者用算子来表达。
#
# **把计划用于另一种硬件。** 先猜一猜：同样的训练步，四个设备在同一个节点上，或者在用 InfiniBand 连接的四个节点上，
# 或者在用慢速以太网连接的四个节点上，计划相同吗？

# %%
ETHERNET = sp.LinkSpec(latency_s=20e-6, bandwidth_bytes_per_s=3e9)
HARDWARE = {"one node": {}, "InfiniBand": {"nodes": 4}, "Ethernet": {"nodes": 4, "node_link": ETHERNET}}
plans = {
    name: sp.dry_run(train, world_size=4, cluster="dgx-h100", **links).values[0][1] for name, links in HARDWARE.items()
}
figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for (name, found), ax in zip(plans.items(), axes, strict=True):
    print(f"{name:<10} {found.step_time_s * 1e6:.0f} µs:", *(op.in_strategy for op in found.ops))
    plot_plan([(op.name, op.in_strategy) for op in found.ops], title=name, ax=ax)
show(figure, "hardware")
assert [found["2.Linear"].in_strategy[0] for found in plans.values()] == [(1, 4), (1, 2), (1, 1)]
assert np.isclose(plans["Ethernet"].step_time_s, one_device_s)

# %% [markdown]
# 不相同。用 InfiniBand 时，两个设备合作，另外两个重复它们的计算。用慢速以太网时，每个设备都完成全部的计算，
# 一步与单个设备一样长：通信的时间会比计算还长。计划只对这些算子、这些形状和所描述的硬件来说是最好的，
# 所以描述必须真实。
#
# ## 练习
#
# 请写出下面的函数。检查从最小的情况开始，并画出第一个失败的情况。答案在 `tutorials/solutions/07_auto_parallel.py`。


# %%
def legal_cuts(sizes, devices):
    """练习 1：返回切分一个算子各个维度的所有方法，即由元组组成的列表，元组给出每个维度的切分数。

    元组 `sizes` 是各个维度的大小，`devices` 是设备数。每个切分数整除该维度的大小，所有切分数的乘积整除设备数。
    列表的顺序任意。
    """
    raise NotImplementedError


sp.exercises.check("legal_cuts", legal_cuts)


# %%
def chain_dp(nodes, edges):
    """练习 2：返回一串算子的最便宜的选择，即由每个算子的策略编号组成的列表。

    `nodes[i][s]` 是算子 i 的策略 s 的代价。`edges[i][s][t]` 是算子 i 的策略 s 与算子 i + 1 的策略 t 之间的代价。
    链条最长有 30 个算子，所以不要尝试所有的选择。
    """
    raise NotImplementedError


sp.exercises.check("chain_dp", chain_dp)


# %%
def pareto(plans):
    """练习 3：返回没有被其他计划支配的计划，最快的在前。

    `plans` 是由 (时间, 内存) 组成的列表。如果一个计划在两方面都不差于另一个，并且至少有一方面更好，它就支配另一个。
    相同的计划只返回一次。
    """
    raise NotImplementedError


sp.exercises.check("pareto", pareto)
