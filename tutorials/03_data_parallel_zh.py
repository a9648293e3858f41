# %% [markdown]
# # 第 3 课：数据并行
#
# 所有 rank 都有同样的模型，每个 rank 用批次中自己的那一份数据计算梯度。梯度取平均之后，所有 rank 迈出同样的一步。
# 学习本课需要了解集合通信 `all_reduce`（第 2 课）和单个设备的训练（第 1 课）。
#
# 运行方式：`python tutorials/03_data_parallel_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 数据并行 | data parallelism |
# | 批次、微批次 | batch, micro-batch |
# | 梯度累积 | gradient accumulation |
# | 激活 | activation |
# | 桶 | bucket |
# | 计算与通信重叠 | overlap |
# | 采样器 | sampler |
# | 轮次 | epoch |
# | 填充 | padding |
# | 批归一化 | batch norm |
# | 随机种子 | seed |
#
# 先看结果：四个 rank 训练一个识别手写数字的网络，每个 rank 得到每个批次的四分之一。

# %%
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import RunFailedError

images, labels = sp.data.digits("train")[:]
loss_fn = sp.nn.CrossEntropyLoss()
P, BATCH = 4, 120


def make_network():
    sp.set_seed(1)
    first, second = (sp.nn.Linear(size, 256, weight_init="he_normal") for size in (64, 256))
    return sp.nn.Sequential(first, sp.nn.ReLU(), second, sp.nn.ReLU(), sp.nn.Linear(256, 10))


def train():
    model = sp.parallel.DistributedDataParallel(make_network())  # 在反向传播期间对梯度取平均
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for first in range(0, len(images), BATCH):
        mine = range(first, first + BATCH)[sp.get_rank() :: P]
        loss = loss_fn(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.module.state_dict()


results = sp.launch(train, world_size=P)
parallel_losses = np.mean([losses for losses, _ in results], axis=0)
print(f"{len(parallel_losses)} steps: loss {parallel_losses[0]:.4f} -> {parallel_losses[-1]:.4f}")

# %% [markdown]
# ## 与单个设备对比
#
# 先猜一猜：单个设备用完整的批次训练。它的损失和权重与四个 rank 相差多少？


# %%
def train_alone():
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.3)
    losses = []
    for first in range(0, len(images), BATCH):
        loss = loss_fn(network(images[first : first + BATCH]), labels[first : first + BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network.state_dict()


def difference(a, b):
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def show(picture, name):
    """保存图片。notebook 也会在单元格下方显示它。"""
    sp.view.save_figure(picture, Path("pictures", "03_data_parallel", f"{name}.png"), dpi=100)


losses_alone, weights_alone = train_alone()
between_ranks = max(difference(results[0][1], weights) for _, weights in results)
to_one_device = difference(results[0][1], weights_alone)
print(f"weights: largest difference between ranks {between_ranks:g}, to one device {to_one_device:.0e}")
assert between_ranks == 0
assert to_one_device < 1e-5
assert np.abs(parallel_losses - losses_alone).max() < 1e-5
show(sp.view.plot_loss({"four ranks": parallel_losses.tolist(), "one device": losses_alone}), "losses")

# %% [markdown]
# 各个 rank 之间毫无差别：它们从 `all_reduce` 得到完全相同的二进制位。与单个设备相比，最后几位不同，
# 因为求和的次序不同。
#
# 原因只是一行代数：损失是对批次的平均，梯度也是。120 个样本的平均，等于四份 30 个样本的平均的平均。请记住条件：
# 各份的大小必须*相等*。
#
# ## 先不用多个 rank：梯度累积
#
# 单个设备也能利用同样的代数，一份接一份地计算。`backward` 会把梯度*累加*起来，所以对每一份都调用它，最后再迈一步。
# 这样内存里每次只有一份数据的激活。
#
# 先猜一猜：960 个样本一次算完，或者分成八份。后者还需要几成内存？


# %%
def accumulated(parts):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.3)
    for x, y in zip(np.split(images[:960], parts), np.split(labels[:960], parts), strict=True):
        loss = loss_fn(network(x), y) / parts  # 平均的平均
        loss.backward()
    optimizer.step()
    return network.state_dict()


whole, in_parts = (sp.launch(accumulated, (parts,), record="full", transport="inline") for parts in (1, 8))
assert difference(whole[0], in_parts[0]) < 1e-6
peaks = [run.memory[0]["peak_bytes"] / 1e6 for run in (whole, in_parts)]
print(f"peak of memory: {peaks[0]:.2f} MB at once, {peaks[1]:.2f} MB in eight parts")
assert peaks[1] < peaks[0] / 2
figure, axes = plt.subplots(2, figsize=(11, 6), layout="constrained")
for run, ax, title in zip((whole, in_parts), axes, ("960 samples at once", "eight parts of 120"), strict=True):
    sp.view.plot_memory(run.trace.events, ax=ax, title=title)
    ax.set_ylim(0, 1.15 * peaks[0])
show(figure, "accumulation")

# %% [markdown]
# 约三成。参数和参数的梯度不变，激活缩小到八分之一。代价是时间：八个小批次比一个大批次慢。
# （图中是每个运算结束时的内存；打印出来的峰值还包括运算过程中的内存，所以略高。）
#
# ## DataParallel：一个进程，多个设备
#
# 最早使用多个设备的方法：由一个进程驱动所有设备。每一步，它把模型从第一个设备复制到其他设备，切分批次，
# 用线程运行各个副本，再在第一个设备上把梯度加起来。程序只需要改一行。
#
# 先猜一猜：下图是其中一步。其他设备等待的时候，第一个设备在忙什么？


# %%
def step_of(model, x, y, steps=2):
    """训练，返回最后的损失。"""
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def with_threads():
    return step_of(sp.parallel.DataParallel(make_network()), images[:BATCH], labels[:BATCH])


def last_step(run):
    """返回最后一步的事件，以及它的模拟时间 [µs]。"""
    last = max(event.step for event in run.trace.events if event.kind == "forward")
    events = [event for event in run.trace.events if event.step == last]
    return events, (max(e.sim_end_ps for e in events) - min(e.sim_start_ps for e in events)) / 1e6


link = sp.LinkSpec(latency_s=1e-6, bandwidth_bytes_per_s=200e9)  # 任意两个设备之间
run = sp.launch(with_threads, devices_per_rank=P, link=link, transport="inline")
events, threads_us = last_step(run)
print(f"a step of DataParallel on four devices: {threads_us:.0f} µs simulated")
show(sp.view.plot_timeline(events, title="DataParallel: one process, four devices"), "threads")

# %% [markdown]
# 它在忙着复制：模型和批次送出去，输出收回来，梯度也收回来，全都经过第一个设备。而且所有设备上的运算都由同一个 Python
# 解释器启动。所以更好的办法是每个设备一个进程。
#
# ## 自己动手
#
# 每个设备一个进程，就不必复制模型：所有 rank 从同样的权重出发，加上同样的梯度，迈出同样的步子。只需要在 `backward`
# 之后调用带 `"mean"` 的 `all_reduce`。


# %%
def quarter(count=BATCH):
    mine = slice(sp.get_rank(), count, sp.get_world_size())
    return images[mine], labels[mine]


def by_hand(steps=2):
    network = make_network()
    parameters = list(network.parameters())
    optimizer = sp.optim.SGD(parameters, lr=0.3)
    x, y = quarter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(network(x), y).backward()
        for parameter in parameters:
            sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return network.state_dict()


run = sp.launch(by_hand, world_size=P, link=link, transport="inline")
reference = make_network()
step_of(reference, images[:BATCH], labels[:BATCH])
assert difference(run[0], reference.state_dict()) < 1e-6
events, hand_us = last_step(run)
print(f"a step by hand: {hand_us:.0f} µs simulated, of DataParallel {threads_us:.0f} µs")
assert hand_us < threads_us
show(sp.view.plot_timeline([e for e in events if e.rank < 2], title="By hand: all-reduce after backward"), "by_hand")

# %% [markdown]
# 结果正确，也更快。但是请看 `compute` 这一行：all-reduce 期间，设备什么也不做。而且共有六次 all-reduce，
# 每个权重和偏置各一次，每次都有延迟。
#
# ## 桶与重叠
#
# `DistributedDataParallel` 对此做了两件事（Li 等，2020）：
#
# - 把梯度复制到*桶*里，每个桶只需要一次 all-reduce。这样节省延迟。
# - 反向传播先算出最后一层的梯度。一个桶一满，它的 all-reduce 就开始，同时反向传播继续计算前面的层。通信与计算*重叠*。
#
# 先猜一猜：是一个大桶最好，还是每层一个桶，还是介于两者之间？


# %%
def make_deep():
    sp.set_seed(1)
    return sp.nn.Sequential(sp.nn.Linear(64, 512), *(sp.nn.Linear(512, 512) for _ in range(8)), sp.nn.Linear(512, 10))


def overlapped(bucket_mb):
    model = sp.parallel.DistributedDataParallel(make_deep(), bucket_cap_mb=bucket_mb)
    return step_of(model, *quarter(64))


step_us, runs = {}, {}
for bucket_mb in (0.001, 1.1, 2.2, 4.4, 25):
    runs[bucket_mb] = sp.launch(overlapped, (bucket_mb,), world_size=P, link=link, transport="inline")
    events, step_us[bucket_mb] = last_step(runs[bucket_mb])
    count = sum(event.kind == "collective" and event.rank == 0 for event in events)
    print(f"buckets of at most {bucket_mb:6.3f} MiB: {count:2d} all-reduces, {step_us[bucket_mb]:.0f} µs simulated")
best = min(step_us, key=step_us.get)
figure, axes = plt.subplots(3, figsize=(13, 7), layout="constrained")
for ax, bucket_mb in zip(axes, (0.001, best, 25), strict=True):
    shown = [event for event in last_step(runs[bucket_mb])[0] if event.rank == 0]
    ax.set_xlim(0, max(step_us.values()))
    sp.view.plot_timeline(shown, ax=ax, title=f"at most {bucket_mb} MiB in a bucket: {step_us[bucket_mb]:.0f} µs")
show(figure, "buckets")

# %% [markdown]
# 介于两者之间。只有一个桶时，要等反向传播结束，all-reduce 才能开始；每个数组一个桶时，延迟会累加起来。各种情况下，
# 损失的二进制位完全相同。

# %%
assert best not in (0.001, 25)
assert len({tuple(run) for run in runs.values()}) == 1

# %% [markdown]
# ## 多个 rank 上的梯度累积：`no_sync`
#
# 既用梯度累积，*又*有多个 rank，那么只有最后一次反向传播需要取平均。在此之前，`no_sync()` 让梯度留在各自的 rank 上。
#
# 先猜一猜：每一步有三个微批次。`no_sync` 节省多少字节？权重会改变吗？


# %%
def accumulate_on_ranks(saves):
    model = sp.parallel.DistributedDataParallel(make_network())
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    x, y = quarter()
    parts = list(zip(np.split(x, 3), np.split(y, 3), strict=True))
    for number, (x_part, y_part) in enumerate(parts):
        is_last = number == len(parts) - 1
        with model.no_sync() if saves and not is_last else nullcontext():
            (loss_fn(model(x_part), y_part) / len(parts)).backward()
    optimizer.step()
    return model.module.state_dict()


often, once = (sp.launch(accumulate_on_ranks, (saves,), world_size=P, transport="inline") for saves in (False, True))
sent = [sum(e.sent_bytes for e in run.trace.events if e.name == "all_reduce" and e.rank == 0) for run in (often, once)]
print(f"sent by rank 0: {sent[0] / 1e6:.2f} MB in every backward, {sent[1] / 1e6:.2f} MB in the last one")
assert sent[0] == 3 * sent[1]
assert difference(often[0], once[0]) < 1e-6

# %% [markdown]
# 节省三分之二的字节，因为三次反向中只有最后一次发送。除舍入误差之外权重相同。
#
# ## 一个 rank 得到哪些样本？
#
# 到目前为止，每个程序都自己切分批次。`DistributedSampler` 为 `DataLoader` 做这件事：它以所有 rank
# 都相同的次序打乱全部样本，rank `r` 得到第 `r`、`r + P`、`r + 2 P` … 个样本。
#
# 先猜一猜：十个样本，四个 rank。每个 rank 得到几个？


# %%
numbers = sp.data.TensorDataset(np.arange(10))


def samples_of(epoch, drop_last=False):
    rows = []
    for rank in range(P):
        sampler = sp.data.DistributedSampler(numbers, P, rank, drop_last=drop_last)
        sampler.set_epoch(epoch)
        rows.append(sampler.indices().tolist())
    return rows


orders = {"epoch 0": samples_of(0), "epoch 1": samples_of(1), "epoch 1, drop_last": samples_of(1, drop_last=True)}
panels = {name: [[[(rank, i)] for i in row] for rank, row in enumerate(rows)] for name, rows in orders.items()}
show(sp.view.plot_chunks(panels, title="Ten samples for four ranks"), "sampler")
together = [i for row in orders["epoch 0"] for i in row]
print(f"epoch 0: {len(together)} samples, twice: {sorted(i for i in set(together) if together.count(i) > 1)}")
assert set(together) == set(range(10))
assert len(together) == 12
assert len({i for row in orders["epoch 1, drop_last"] for i in row}) == 8

# %% [markdown]
# 每个三个（图中的 `A9` 是 rank 0 上的第 9 个样本）：次序末尾用它自己的开头*填充*，所以有两个样本算了两次。所有 rank
# 的步数必须相同，否则会有 rank 等待一个已经结束的伙伴。如果用 `drop_last=True`，则舍去两个样本。
#
# 次序取决于轮次，而轮次必须告诉采样器。先猜一猜：没有 `set_epoch` 会怎样？


# %%
def two_epochs(tells_epoch):
    sampler = sp.data.DistributedSampler(numbers, seed=3)
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            if tells_epoch:
                sampler.set_epoch(epoch)
            loader = sp.data.DataLoader(numbers, 2, sampler=sampler)
            seen.append([int(i) for (batch,) in loader for i in batch])
    return seen, [str(warning.message) for warning in caught]


(same, said_once), (other, said_nothing) = (
    sp.launch(two_epochs, (tells,), world_size=P, transport="inline")[0] for tells in (False, True)
)
print("rank 0, without set_epoch:", *same)
print("rank 0, with set_epoch:   ", *other)
print(*said_once)
assert same[0] == same[1]
assert other[0] != other[1]
assert not said_nothing

# %% [markdown]
# 每个轮次的次序都相同，同样的样本总是聚在同一个 rank 上。训练照样进行，只是效果变差，这个错误很容易被忽略，
# 因此这里会给出警告。
#
# ## 批归一化
#
# 批归一化用批次的均值和方差做归一化，而一个 rank 只看得到自己的那一份。
#
# 先猜一猜：32 个样本，4 个 rank。损失与单个设备相同吗？


# %%
def with_batch_norm(synchronized, steps=12):
    sp.set_seed(2)
    layers = [sp.nn.Linear(64, 32), sp.nn.BatchNorm1d(32), sp.nn.ReLU(), sp.nn.Linear(32, 10)]
    network = sp.nn.Sequential(*layers)
    if synchronized:
        network = sp.nn.SyncBatchNorm.convert_sync_batchnorm(network)
    model = sp.parallel.DistributedDataParallel(network)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        loss = loss_fn(model(quarter(32)[0]), quarter(32)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(sp.all_reduce(loss.detach().numpy().copy(), "mean")))  # 所有 rank 合起来的损失
    return losses


runs = {
    "four ranks, BatchNorm1d": sp.launch(with_batch_norm, (False,), world_size=P, transport="inline")[0],
    "four ranks, SyncBatchNorm": sp.launch(with_batch_norm, (True,), world_size=P, transport="inline")[0],
    "one device": sp.launch(with_batch_norm, (False,), world_size=1, transport="inline")[0],
}
for name, losses in runs.items():
    print(f"{name:<26} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
separate, synchronized, one = runs.values()
assert np.allclose(synchronized, one, rtol=1e-4)
assert abs(separate[0] - one[0]) > 1e-2
show(sp.view.plot_loss(runs, title="Batch norm over a part, and over the batch"), "batch_norm")

# %% [markdown]
# 不相同：每个 rank 用八个样本的统计量做归一化。`SyncBatchNorm` 把所有 rank 的和与个数加起来，得到整个批次的统计量。
# 代价是每次前向和每次反向各多一次 all-reduce。每一份较大时，很少需要它。
#
# ## 常见错误
#
# 前四个程序都能运行到底，损失看起来也正常，所以这些错误才危险。
#
# **各份大小不等。** 十个样本，四个 rank：3、3、2、2。每个 rank 取自己的平均损失，再对梯度取平均。先猜一猜：
# 每个样本的权重是多少？


# %%
def gradient_of_ten(weighs):
    network = make_network()
    x, y = quarter(10)
    # 对 rank 取平均会除以 P；样本多的 rank 权重应当更大。
    weight = len(x) * sp.get_world_size() / 10 if weighs else 1.0
    model = sp.parallel.DistributedDataParallel(network)
    (loss_fn(model(x), y) * weight).backward()
    return network[4].bias.grad.numpy()


exact = sp.launch(gradient_of_ten, (False,), world_size=1, transport="inline")[0]
plain, weighted = (sp.launch(gradient_of_ten, (weighs,), world_size=P, transport="inline")[0] for weighs in (0, 1))
wrong_by, right_by = (np.abs(found - exact).max() / np.abs(exact).max() for found in (plain, weighted))
print(f"largest error of the gradient: {wrong_by:.1%} plain, {right_by:.0e} weighted")
assert wrong_by > 0.01
assert right_by < 1e-5
counts = np.array([3, 3, 2, 2])
_, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
ax.bar(range(10), np.repeat(1 / (P * counts), counts), color=plt.get_cmap("tab10")(np.repeat(range(P), counts)))
ax.axhline(1 / 10, color="black", linestyle="--", label="mean over the batch")
ax.set(xlabel="sample, coloured by rank", ylabel="weight in the gradient", xticks=range(10))
ax.legend()
show(ax, "weights")

# %% [markdown]
# 在有三个样本的 rank 上，一个样本的权重是 1/12；在有两个样本的 rank 上是 1/8。办法是给每个 rank 一个权重：
# 它的样本数除以平均样本数。
#
# **用求和代替平均。** 先猜一猜：`all_reduce(gradient)` 没有写 `"mean"`。会有什么变化？


# %%
def first_weights(op, lr):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=lr)
    x, y = quarter()
    loss_fn(network(x), y).backward()
    for parameter in network.parameters():
        sp.all_reduce(parameter.grad, op)
    optimizer.step()
    return network.state_dict()


settings = (("mean", 0.3), ("sum", 0.3), ("sum", 0.3 / P))
mean, total, slow_total = (sp.launch(first_weights, each, world_size=P, transport="inline")[0] for each in settings)
print(
    f"sum for mean: weights differ by {difference(mean, total):.0e}, with lr / 4 by {difference(mean, slow_total):.0e}"
)
assert difference(mean, total) > 1e-3
assert difference(mean, slow_total) < 1e-6

# %% [markdown]
# 梯度变成四倍，相当于学习率变成四倍，而且随 rank 数增长。（Adam 会除以梯度的大小，从而掩盖这个错误。）
#
# **初始权重不同。** 自己动手写的程序，每个 rank 用各自的随机种子，梯度的平均是正确的。先猜一猜：各个 rank
# 的模型会逐渐变得相同吗？


# %%
def own_seeds(steps=10):
    sp.set_seed(sp.get_rank())
    network = sp.nn.Linear(64, 10)
    optimizer = sp.optim.SGD(network.parameters(), lr=0.3)
    x, y = quarter()
    apart = []
    for _ in range(steps):
        apart.append(sp.parallel.max_difference_between_ranks(network))
        optimizer.zero_grad()
        loss_fn(network(x), y).backward()
        for parameter in network.parameters():
            sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
    return apart


apart = sp.launch(own_seeds, world_size=P, transport="inline")[0]
print(f"largest difference between ranks: {apart[0]:.3f} at the start, {apart[-1]:.3f} after {len(apart) - 1} steps")
assert np.isclose(apart[0], apart[-1], rtol=1e-3)

# %% [markdown]
# 永远不会：所有 rank 把同样的步子加到不同的权重上。`DistributedDataParallel` 在创建时把 rank 0 的权重复制到所有 rank。
#
# **所有 rank 的噪声都相同。** 相反的错误：加在图像上的噪声应当因 rank 而异，但是所有 rank 用了同一个种子。
# 先猜一猜：四个 rank 共八个样本，有几行不同的噪声？


# %%
def noise(with_rank):
    random = np.random.default_rng([7, sp.get_rank()] if with_rank else 7)
    return random.normal(size=(2, 64))


for with_rank in (False, True):
    rows = np.concatenate(sp.launch(noise, (with_rank,), world_size=P, transport="inline"))
    print(f"rank in the seed: {with_rank}; {len(np.unique(rows, axis=0))} different rows of {len(rows)}")
    assert len(np.unique(rows, axis=0)) == (8 if with_rank else 2)

# %% [markdown]
# 两行：批次变成四倍，多样性却没有增加。权重需要所有 rank 用同一个种子，噪声需要每个 rank 各用一个种子。
#
# **一个 rank 的批次较少。** 这个程序不会运行到底。先猜一猜：rank 0 走三步，rank 1 走两步。
# 哪个 rank 会失败？它报告什么？


# %%
def three_and_two(joins):
    model = sp.parallel.DistributedDataParallel(make_network())
    optimizer = sp.optim.SGD(model.parameters(), lr=0.3)
    x, y = quarter(8)
    with model.join() if joins else nullcontext():
        for _ in range(3 - sp.get_rank()):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    return sp.parallel.max_difference_between_ranks(model.module) if joins else None


try:
    sp.launch(three_and_two, (False,), world_size=2, echo=False)
except RunFailedError as error:
    refusal = str(error).split("\n\n")[0]
    print(re.sub(r" at \S+:(\d+)", r", line \1", refusal))
assert "rank 1 returned" in refusal
assert sp.launch(three_and_two, (True,), world_size=2) == [0, 0]

# %% [markdown]
# rank 0 报告说 rank 1 已经返回，并指出正在等待的桶。`DistributedSampler` 会填充，所以不会发生这种情况。各个 rank
# 的数据量不同时可以用 `join()`：已经结束的 rank 用零参与其他 rank 的 all-reduce。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。答案在
# `tutorials/solutions/03_data_parallel.py`。


# %%
def accumulate(model, loss_fn, x, y, size):
    """练习 1：在参数的 `.grad` 里留下 `loss_fn(model(x), y)` 的梯度，损失是对样本的平均。

    `x` 和 `y` 是数组，每个样本一行；`.grad` 起初为空。每次最多用 `size` 个样本。最后一个微批次可以更小，
    所有样本的权重相同。不需要返回值。
    """
    raise NotImplementedError


sp.exercises.check("accumulate", accumulate)


# %%
def average_gradients(gradients, samples):
    """练习 2：在每个 rank 上返回整个批次的梯度的列表。

    `gradients` 是数组的列表：这个 rank 对自己的 `samples` 个样本取平均损失所得的梯度。
    样本数因 rank 而异。
    """
    raise NotImplementedError


sp.exercises.check("average_gradients", average_gradients)


# %%
def sampler_indices(size, ranks, rank, epoch):
    """练习 3：返回一个 rank 在一个轮次里得到的样本编号的列表。

    全部样本的次序是 `np.random.default_rng(epoch).permutation(size)`。它用自己的开头填充，必要时重复多次，
    使所有 rank 得到同样多的样本。rank r 得到第 r、r + ranks、r + 2 ranks … 个位置。
    """
    raise NotImplementedError


sp.exercises.check("sampler_indices", sampler_indices)


# %%
def sync_batch_norm(x):
    """练习 4：用每一列在所有 rank 上的统计量，返回 `(x - mean) / sqrt(variance + 1e-5)`。

    `x` 是这个 rank 的那一份批次，形状是 (n, c)，与结果相同；n 因 rank 而异。方差是偏差平方的平均。
    """
    raise NotImplementedError


sp.exercises.check("sync_batch_norm", sync_batch_norm)
