# %% [markdown]
# # 第 6 课：硬件描述：先预测，再租用
#
# 在 64 块 GPU 上，一个训练步要多久？内存够不够？回答这些问题并不需要真的有 GPU。本课用一组数字描述硬件，
# 并预测程序在它上面的时间和内存。学习本课需要了解数据并行。
#
# 运行方式：`python tutorials/06_hardware_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 试运行 | dry run |
# | 屋顶线模型 | roofline |
# | 计算强度 | arithmetic intensity |
# | 峰值 | peak |
# | 延迟、带宽 | latency, bandwidth |
# | 模拟时钟 | simulated clock |
# | 弱扩展、强扩展 | weak scaling, strong scaling |
# | 暴露的通信 | exposed communication |
# | 慢节点（掉队者） | straggler |
# | 模型算力利用率 | model flops utilisation (MFU) |
# | 硬件算力利用率 | hardware flops utilisation (HFU) |
# | 重计算 | recomputation |
#
# 先看结果：ResNet-18 在 64 块 A100 上训练两步，每块 GPU 处理 32 张图片。

# %%
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import ClusterError, RunFailedError
from simparallel.simulate.transformer import GPTShape, TrainingPlan
from simparallel.simulate.transformer_time import step_time as gpt_step_time


def train_resnet(samples=32):
    model = sp.parallel.DistributedDataParallel(sp.models.resnet18(num_classes=1000))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = np.broadcast_to(np.float32(0), (samples, 3, 224, 224))  # 不占内存的零
    labels = np.zeros(samples, np.int64)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sp.functions.cross_entropy(model(sp.Tensor(images)), sp.Tensor(labels))
        loss.backward()
        optimizer.step()


prediction = sp.dry_run(train_resnet, world_size=64, cluster="dgx-a100")
print(prediction.table())
print(f"{prediction.throughput(64 * 32):,.0f} images a second")

# %% [markdown]
# *试运行*执行同一个程序，但是没有数据：张量只有形状和数据类型，没有元素。因此不做任何计算，
# 64 块 GPU 只需要一秒。64 个 rank 做的事都一样，所以实际只执行了其中两个。
#
# ## 与单个设备、与真实运行对比
#
# 先猜一猜：试运行不做一次乘法。下面哪些量它能准确知道：浮点运算次数、发送的字节数、操作的顺序、损失？


# %%
def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "06_hardware", f"{name}.png"), dpi=100)


def train_lenet():
    sp.set_seed(1)
    model = sp.parallel.DistributedDataParallel(sp.models.lenet5())
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    images, labels = np.ones((8, 1, 28, 28), np.float32), np.zeros(8, np.int64)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sp.functions.cross_entropy(model(sp.Tensor(images)), sp.Tensor(labels))
        loss.backward()
        optimizer.step()
    return loss.item()


def facts(trace):
    """返回每个 rank 在什么模拟时刻做了什么。"""
    return Counter(
        (event.rank, event.name, event.flops, event.sent_bytes, event.sim_start_ps, event.sim_end_ps)
        for event in trace.events
    )


real = sp.launch(train_lenet, world_size=4, device="dgx-a100", record="full")
dry = sp.dry_run(train_lenet, world_size=4, cluster="dgx-a100", fold=False)
assert facts(real.trace) == facts(dry.trace)
print(f"{len(real.trace.events)} events of four real processes, and the same {len(dry.trace.events)} of the dry run")
print(f"loss of the real run {real[0]:.4f}, of the dry run: {dry.values[0]}")
show(dry.trace.select(ranks=[0, 1]).timeline(steps=1), "lenet")


def work_flops(each):
    return sum(event.flops for event in each.trace.events if event.rank == 0 and event.kind in ("forward", "backward"))


alone = sp.dry_run(train_resnet, (4 * 32,), cluster="dgx-a100")  # 四个设备的图片
assert work_flops(alone) == 4 * work_flops(prediction)

# %% [markdown]
# 除了损失，其他都能。试运行的事件与真实运行完全相同：同样的操作、同样的运算次数和字节数，
# 发生在同样的模拟时刻。数值则需要数据。一个设备处理四个设备的图片，运算次数正好是四倍。
#
# 下面从基础开始：这些时间是怎么来的？
#
# ## 设备
#
# 描述一个设备只需要几个数：峰值（每秒浮点运算次数）、内存带宽（每秒字节数）、内存容量（字节），
# 以及启动一个操作的时间。*链路*有延迟和带宽。每个数都有来源：产品规格书、实测，或者假设。

# %%
small, large = (sp.cluster.load_cluster(name, 64) for name in ("a100", "dgx-a100"))
print(small.table())
kinds = Counter(source.partition(":")[0] for source in (large.device.sources | large.node_link.sources).values())
print("dgx-a100, device and links between nodes:", dict(kinds))

# %% [markdown]
# `a100` 是简单的预设：峰值和带宽取自规格书。`dgx-a100` 还知道小操作达不到峰值，知道八块 GPU 组成一个节点、
# 节点内链路很快、节点之间用 InfiniBand 连接。它的效率是假设的：最后一行统计了每种来源的数字各有几个。
#
# ## 屋顶线模型
#
# 一个操作既要计算，也要从内存读写数据。两者同时进行，所以较长的那个决定时间：
# `启动时间 + max(运算次数 / 峰值, 字节数 / 带宽)`。运算次数与字节数之比叫做*计算强度*。强度低于某个值（*转折点*）时，
# 操作受内存限制；高于它时，受峰值限制。
#
# 先猜一猜：两个长向量相加受什么限制？两个 64 x 64 矩阵相乘呢？

# %%
chip = small.device
ridge = chip.peak(4) / chip.memory_bandwidth_bytes_per_s
operations = {f"matmul {n}": (2 * n**3, 3 * 4 * n**2) for n in (16, 64, 256, 1024, 4096)}
operations["add"] = (10**7, 3 * 4 * 10**7)
rows = {}
for name, (work, size_bytes) in operations.items():
    seconds = chip.time_ps(work, size_bytes, 4, is_product=name != "add") / 1e12
    limit = "memory" if work / size_bytes < ridge else "peak"
    rows[name] = work / size_bytes, work / seconds, limit
    print(f"{name:<11} {work / size_bytes:7.2f} flop/B, {seconds * 1e6:9.1f} µs, limited by its {limit}")

with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    line = np.logspace(-2, 4, 200)
    ax.loglog(line, np.minimum(chip.peak(4), line * chip.memory_bandwidth_bytes_per_s), color="0.4", label="roofline")
    for name, (intensity, rate, _) in rows.items():
        ax.loglog(intensity, rate, "o")
        below = -14 if intensity < 500 else 6
        ax.annotate(name, (intensity, rate), (4, below), textcoords="offset points")
    ax.set(xlabel="arithmetic intensity [flop/B]", ylabel="reached [flop/s]", ylim=(1e8, 1e14), xlim=(0.01, 1e4))
    ax.legend(loc="upper left")
show(ax, "roofline")

# %% [markdown]
# 加法每搬运 12 个字节才做一次运算，所以无论多长都受内存限制。64 x 64 的乘法每个字节的运算更多，
# 刚好超过转折点，但是离屋顶还很远：几乎所有时间都花在启动上。只有大的矩阵乘法才接近峰值。
# 这就是大批次比小批次更能发挥设备性能的原因。

# %%
assert rows["add"][2] == "memory"
assert rows["matmul 64"][2] == "peak"
assert rows["matmul 64"][1] < 0.01 * chip.peak(4)
assert rows["matmul 4096"][1] > 0.95 * chip.peak(4)

# %% [markdown]
# ## 模拟时钟
#
# 每个设备有一个时钟。一个操作使时钟前进模型给出的时间。集合通信在最后一个 rank 到达时才开始，
# 因此它把组内的时钟对齐。模拟时间是整数，每次运行都相同。
#
# 先猜一猜：rank 1 的工作量是 rank 0 的三倍，然后两者都调用 `all_reduce`。谁在等待？调用之后 rank 0 的时钟是多少？


# %%
def unequal_work():
    x = sp.Tensor(np.ones((512, 512), np.float32))
    for _ in range(1 + 2 * sp.get_rank()):
        x = x @ x * 0.001
    sp.all_reduce(x)


run = sp.launch(unequal_work, world_size=2, transport="inline", device="a100", record="full")
ends = [max(event.sim_end_ps for event in run.trace.events if event.rank == rank) for rank in (0, 1)]
print(f"the clocks stand at {ends[0] / 1e6:.1f} µs and {ends[1] / 1e6:.1f} µs")
assert ends[0] == ends[1]
again = sp.launch(unequal_work, world_size=2, transport="inline", device="a100", record="full")
assert facts(run.trace) == facts(again.trace)
show(run.trace.timeline(), "clocks")

# %% [markdown]
# rank 0 在等待，之后两个时钟相同，都是 rank 1 的时间。在你的电脑上测得的时间（*实际时间*）也记录在事件里。
# 它每次运行都不同，与 GPU 没有关系。
#
# ## all-reduce 的时间
#
# 一条 `s` 字节的消息用时 `α + s / B`：一次延迟，加上字节数除以带宽。（这就是 Hockney 的 alpha-beta 模型，
# β = 1 / B。）一个算法就是若干条先后相接的消息：
#
# * `p` 个 rank 的*环*：`2 (p - 1)` 条消息，每条 `s / p` 字节；
# * *树*：`2 log2(p)` 条消息，每条 `s` 字节，先到根，再返回。
#
# 先猜一猜：1 kB 时哪个更快？100 MB 时呢？rank 增多时有什么变化？

# %%
ALPHA_S, BANDWIDTH = small.link.latency_s, small.link.bandwidth_bytes_per_s


def ring_s(p, size):
    return 2 * (p - 1) * (ALPHA_S + size / p / BANDWIDTH)


def tree_s(p, size):
    return 2 * np.ceil(np.log2(p)) * (ALPHA_S + size / BANDWIDTH)


def priced_s(p, size, algorithm):
    return small.collective("all_reduce", size, tuple(range(p)), algorithm=algorithm).time_ps / 1e12


sizes, cross = np.logspace(3, 9, 61).astype(int).tolist(), {}
with plt.style.context("tableau-colorblind10"):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for p, ax in zip((8, 64), axes, strict=True):
        for name, formula in (("ring", ring_s), ("tree", tree_s)):
            times = [priced_s(p, size, name) for size in sizes]
            np.testing.assert_allclose(times, [formula(p, size) for size in sizes], rtol=1e-5)
            ax.loglog(sizes, np.array(times) * 1e6, label=name, linewidth=2.5)
        cross[p] = next(size for size in sizes if ring_s(p, size) < tree_s(p, size))
        ax.set(title=f"all-reduce of {p} ranks", xlabel="size [B]")
        ax.legend()
    axes[0].set_ylabel("time [µs]")
show(figure, "ring_and_tree")
print({p: f"the ring is faster from about {size / 1e6:.1f} MB" for p, size in cross.items()})

# %% [markdown]
# 数组小的时候树更快：它的消息少，延迟也少。数组大的时候环更快：每个字节大约只发送两次。rank 越多，树占优势的范围越大，
# 因为环对每个 rank 都要付出两次延迟。
#
# NCCL 这样的通信库按大小选择算法，并且了解节点的结构：`dgx-a100` 的每块 GPU 都有自己的端口通向其他节点，
# 所以节点之间较慢的链路是八条同时使用的。这里的模型也是如此。它的树比上面的树更好：数组分成小段，
# 同时经过两棵树（Sanders 等 2009），所以对大数组也可能更快：

# %%
assert cross[8] < 2.5e6 < cross[64]
for size in (10**4, 10**8):
    for count in (8, 64):
        cost = large.collective("all_reduce", size, tuple(range(count)))
        print(f"{size / 1e6:6.2f} MB on {count:2} GPUs of dgx-a100: {cost.time_ps / 1e6:7.1f} µs, {cost.algorithm}")

# %% [markdown]
# ## 扩展
#
# 现在使用很多设备：8、64 和 1,024 个。有两个不同的问题。*弱扩展*：每个设备仍处理 32 张图片，总批次变大。
# *强扩展*：总批次保持 1,024 张图片，每个设备分到的越来越少。节点之间的网络也有两种：InfiniBand，
# 以及每块 GPU 10 Gb/s 的以太网。
#
# 先猜一猜：设备增加到 128 倍，每秒处理的图片是多少倍？三种情况中哪一种提高得最少？

# %%
ethernet = sp.LinkSpec(30e-6, 1.25e9)  # 30 µs，10 Gb/s
COUNTS, GLOBAL = (8, 64, 1024), 1024
weak = {count: sp.dry_run(train_resnet, world_size=count, cluster="dgx-a100") for count in (8, 1024)}
weak[64] = prediction
slow = {count: weak[count].with_(node_link=ethernet) for count in COUNTS[1:]}
strong = {
    count: sp.dry_run(train_resnet, (GLOBAL // count,), world_size=count, cluster="dgx-a100") for count in (8, 1024)
}
cases = {
    "32 images a device, InfiniBand": {n: weak[n].throughput(32 * n) for n in COUNTS},
    "32 images a device, Ethernet": {n: (slow | {8: weak[8]})[n].throughput(32 * n) for n in COUNTS},
    "1,024 images in all, InfiniBand": {n: each.throughput(GLOBAL) for n, each in strong.items()},
}
reached = {name: images[1024] / images[8] / 128 for name, images in cases.items()}
with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, images in cases.items():
        shares = [each / images[8] / (count / 8) for count, each in images.items()]
        ax.semilogx(list(images), shares, "o-", label=name)
        print(f"{name:<32} {images[8]:8,.0f} -> {images[1024]:10,.0f} images/s: {reached[name]:.0%} of ideal")
    ax.set_xticks(COUNTS, COUNTS)
    ax.set(xlabel="GPUs", ylabel="images a second and GPU, of those on 8 GPUs", ylim=(0, 1.05))
    ax.legend()
show(ax, "scaling")

# %% [markdown]
# 使用 InfiniBand 时，弱扩展接近理想，是 127 倍：计算几乎掩盖了所有通信。使用以太网时，有一部分通信没有被掩盖，是 106
# 倍。强扩展提高得最少，是 26 倍。这是通信造成的吗？
#
# ## 暴露的通信
#
# 被计算掩盖的通信不花时间，其余的是*暴露的*通信。预测结果给出暴露的部分：

# %%
exposed = {}
for name, each in (("InfiniBand", weak[64]), ("Ethernet", slow[64]), ("one image a device", strong[1024])):
    exposed[name] = each.trace.select(steps=1).summary()[0]["exposed_communication_s"] / each.step_time_s
    print(f"{name:<18} step {each.step_time_s * 1e3:5.1f} ms, exposed communication {exposed[name]:.0%} of it")
assert exposed["InfiniBand"] < 0.05 < exposed["one image a device"] < exposed["Ethernet"] < 0.2
launches = sum(event.rank == 0 and event.flops > 0 for event in strong[1024].trace.select(steps=1).events)
launches_s = launches * large.device.launch_s
assert 0.15 < launches_s / strong[1024].step_time_s < 0.25
print(f"one image a device: {launches} operations, whose launches take {launches_s * 1e3:.1f} ms")
figure, axes = plt.subplots(2, figsize=(12, 5), layout="constrained")
for (name, each), ax in zip((("InfiniBand", weak[64]), ("Ethernet", slow[64])), axes, strict=True):
    each.timeline(ax=ax, steps=1)
    ax.set_title(f"64 GPUs, {name}: the second step", loc="left", fontweight="bold")
show(figure, "exposed")

# %% [markdown]
# 反向还在进行时，梯度就按桶发送了，见图中的 `comm` 一行。使用以太网时，最后一个桶在反向结束很久之后才完成，
# 优化器要等它。
#
# 每个设备只有一张图片时，通信并不是主要的损失。仅仅启动操作就占一步的五分之一，而且小数组上的操作只能达到
# 峰值的一部分。设备需要足够大的批次。
#
# ## 一个慢设备
#
# 先猜一猜：四个设备中有一个做什么都要两倍的时间。一步变成多长？另外三个设备有几成时间空闲？

# %%
even = sp.dry_run(train_resnet, world_size=4, cluster="dgx-a100")
straggling = even.with_(stragglers={2: 2.0})
print(straggling.table())
slower = straggling.step_time_s / even.step_time_s
print(f"a step takes {slower:.2f} times as long")
assert 1.9 < slower < 2
show(straggling.timeline(steps=1), "straggler")

# %% [markdown]
# 每次 all-reduce 时所有设备都在等最慢的那个：一步几乎变成两倍长，另外三个设备有一半时间空闲。1,024
# 个设备中只有一个慢设备，结果也一样：它使集群损失一半。所以大型集群要找出*掉队者*。
#
# ## 模型运算与硬件运算
#
# 程序达到了峰值的多少？有两种回答。*硬件算力利用率*（HFU）计入所有做过的运算。*模型算力利用率*（MFU）
# 只计入模型所需要的运算。如果有的运算做了两遍，两者就不同：重计算在前向时释放激活，在反向时再算一遍。
#
# 先猜一猜：使用重计算后，哪一个会下降？


# %%
class Recomputed(sp.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return sp.nn.checkpoint(self.block, x)


def train_gpt(recompute):
    network = sp.models.gpt(8192, 512, num_layers=4, num_heads=8, width=1024)
    if recompute:
        network.blocks = sp.nn.ModuleList([Recomputed(block) for block in network.blocks])
    tokens = np.zeros((8, 513), np.int64)
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1)
    logits = network(sp.Tensor(tokens[:, :-1]))
    sp.functions.cross_entropy(logits.reshape(-1, 8192), sp.Tensor(tokens[:, 1:].reshape(-1))).backward()
    optimizer.step()


needed = GPTShape(4, 1024, 8, 512, 8192).flops(batch=8)
used = {}
for recompute in (False, True):
    each = sp.dry_run(train_gpt, (recompute,), cluster="dgx-a100")
    used[recompute] = each.utilisation(), each.utilisation(model_flops=needed), each.peak_bytes
    hfu, mfu, peak = used[recompute]
    print(f"recompute={recompute!s:<5} HFU {hfu:.0%}, MFU {mfu:.0%}, peak memory {peak / 1e9:.2f} GB")
assert used[True][1] < 0.8 * used[False][1]
assert used[True][2] < 0.5 * used[False][2]

# %% [markdown]
# MFU 下降：现在有四分之一的运算是为了节省内存，而不是为了模型。比较系统时请用 MFU，因为它与每秒处理的词元数
# 成正比。（这里是 float32 的运算。用两字节的数，峰值是 16 倍，也更难达到。）
#
# ## 内存
#
# 数组的产生和释放都会计数。先猜一猜：批次是四倍，需要的内存也是四倍吗？

# %%
peaks = {32: prediction.peak_bytes, 128: alone.peak_bytes}
slope = (peaks[128] - peaks[32]) / 96
print({samples: f"{peak / 1e9:.2f} GB" for samples, peak in peaks.items()}, f"{slope / 1e6:.0f} MB for each image")
assert peaks[128] < 4 * peaks[32]
most = int(32 + (2e9 - peaks[32]) / slope)
print(f"{most} images fit into 2 GB")
sp.dry_run(train_resnet, (most,), cluster="dgx-a100", device_memory="2GB")
try:
    sp.dry_run(train_resnet, (most + 2,), cluster="dgx-a100", device_memory="2GB")
except RunFailedError as error:
    out_of_memory = str(error.__cause__)
    print(out_of_memory)
show(weak[8].memory_over_time(), "memory")

# %% [markdown]
# 不是：参数、梯度和优化器状态不随批次增大，激活才会。如图所示，激活在前向时增加，在反向时减少。
# 只有用 `device_memory=` 指定，设备的容量才是限制。错误信息列出设备内存里有什么，以及在哪一层用完。
#
# ## 预测有多准？
#
# 预测里有三种不同的结论：
#
# * **准确的**：形状、字节数、运算次数、事件的顺序、内存。试运行执行的是同一个程序。
# * **模型给出的**：时间，来自屋顶线模型、延迟和带宽。
# * **假设的**：规格书里没有的数字。
#
# 先猜一猜：启动一个操作用时 5 µs，这是假设。如果是 10 µs，
# 上面 GPT 的一步会变长多少？如果所有操作都能用满内存带宽呢？

# %%
base, device = sp.dry_run(train_gpt, (False,), cluster="dgx-a100"), large.device
changed = {
    "launch 10 µs instead of 5": base.with_(device=replace(device, launch_s=10e-6)),
    "the full memory bandwidth": base.with_(device=replace(device, memory_efficiency=None)),
}
effects = {name: each.step_time_s / base.step_time_s - 1 for name, each in changed.items()}
for name, effect in effects.items():
    print(f"{name:<30} {effect:+.1%}")
assert all(abs(effect) < 0.01 for effect in effects.values())

# %% [markdown]
# 两种情况下都不到 1%：在这里，假设的数字影响很小。每当你要依据一个预测做决定时，都应该问这个问题。
#
# 另一种检验：与别人实测的结果对比。下面是 Megatron-LM 在 A100 上的三行数据（Narayanan 等 2021，表 1），
# 与 GPT 一步时间的公式对照。公式没有对它们做任何拟合：

# %%
ROWS = [  # 层数、宽度、头数；张量、流水线、数据并行，微批次大小、微批次数、块数；论文中的秒数
    ((24, 2304, 24), (1, 1, 32, 16, 1, 1), 3.528),
    ((40, 6144, 48), (8, 1, 32, 8, 4, 1), 9.399),
    ((80, 12288, 96), (8, 8, 24, 2, 48, 2), 24.82),
]
errors = []
for (layers, width, heads), parts, published in ROWS:
    plan = TrainingPlan(GPTShape(layers, width, heads, 2048, 51200), *parts, recompute="full")
    cluster = sp.cluster.describe(plan.world_size, "a100", nodes=plan.world_size // 8)
    predicted = gpt_step_time(plan, cluster).step_s
    errors.append(predicted / published - 1)
    parameters = f"{plan.shape.num_parameters / 1e9:.1f} billion parameters"
    print(f"{parameters} on {plan.world_size} GPUs: {published:.1f} s, predicted {predicted:.1f} s, {errors[-1]:+.1%}")
assert max(map(abs, errors)) < 0.05

# %% [markdown]
# 这几行的结果很好。对全部 224 个公开发表的训练步，误差的中位数是 7.5%，十分之一的误差超过 28%：
# 当时的软件达不到硬件的速度，而任何硬件描述都不知道这一点。`docs/published.md` 列出了每一行。
# 用来给并行策略排序，预测是够用的。要承诺完成日期，请实测。
#
# ## 常见错误
#
# **依赖数值的判断。** 试运行没有数值，不可能知道损失何时变小。**写错的名字。** 错误信息会列出可用的名字。
# 先猜一猜：在试运行里遇到 `if loss.item() < 0.1`，程序库应该猜一个值、忽略它，还是停下来？


# %%
def stop_early():
    x = sp.Tensor([1.0], requires_grad=True)
    loss = (x * x).sum()
    if loss.item() < 0.1:
        return
    loss.backward()


refusals = []
for attempt in (lambda: sp.dry_run(stop_early), lambda: sp.dry_run(train_lenet, cluster="dgx-b100")):
    try:
        attempt()
    except (RunFailedError, ClusterError) as error:
        refusals.append(str(error.__cause__ or error))
        print(f"{refusals[-1]}\n")
sp.dry_run(stop_early, unknown=1.0)  # 给出数值，继续执行

# %% [markdown]
# 它停下来，并指出是哪一行。如果猜一个值，就会悄悄给出错误的预测。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。答案在 `tutorials/solutions/06_hardware.py`。


# %%
def step_time(forward, backward, all_reduce):
    """练习 1：返回（一步的时间，暴露的通信时间）。

    `forward` 是一个时间，`backward` 和 `all_reduce` 是时间的列表。前向之后是反向，一层接一层：`backward[i]`
    是按反向顺序第 i 层的用时。这一层结束后，它的梯度就绪，它的 all-reduce 用时 `all_reduce[i]`。all-reduce
    与计算同时进行，但一次只有一个，并按这个顺序。全部完成时一步结束。没有优化器。
    """
    raise NotImplementedError


sp.exercises.check("step_time", step_time)


# %%
def ring_or_tree(ranks, size_bytes, latency_s, bandwidth):
    """练习 2：用本课的公式，返回较快的 all-reduce："ring" 或 "tree"。

    树有 `2 ceil(log2(ranks))` 条消息。如果两者一样快，哪个答案都对。
    """
    raise NotImplementedError


sp.exercises.check("ring_or_tree", ring_or_tree)


# %%
def largest_batch(memory_bytes, num_parameters, num_states, sample_bytes):
    """练习 3：返回设备内存最多能容纳的样本数，一个也放不下时返回 0。

    每个参数、它的梯度，以及优化器为它保存的 `num_states` 个数，各占 4 字节。一个样本的激活占 `sample_bytes` 字节。
    """
    raise NotImplementedError


sp.exercises.check("largest_batch", largest_batch)


# %%
def devices_needed(samples, batch, compute_s, gradient_bytes, latency_s, bandwidth, limit_s):
    """练习 4：返回在 `limit_s` 秒之内完成一轮 `samples` 个样本所需的最少设备数。

    每个设备每步处理 `batch` 个样本，最后一步可能不满，但用时相同。一步先计算 `compute_s` 秒，
    然后用环做一次 `gradient_bytes` 字节的 all-reduce。如果 64 个设备还不够，返回 None。
    """
    raise NotImplementedError


sp.exercises.check("devices_needed", devices_needed)
