# %% [markdown]
# # 第 11 课：流水线并行
#
# 流水线并行把模型切成前后相接的*阶段*，每个 rank 只负责其中几个阶段，因此没有哪个 rank 需要放下整个模型。
# 学习本课需要了解数据并行，不需要了解流水线。
#
# 运行方式：`python tutorials/11_pipelines_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 阶段 | stage |
# | 微批次 | micro-batch |
# | 调度 | schedule |
# | 气泡 | bubble |
# | 前向、反向 | forward, backward |
# | 输入梯度、权重梯度 | input gradient, weight gradient |
# | 激活 | activation |
# | 预热 | warm-up |
# | 关键路径 | critical path |
# | 共享权重 | tied weights |
# | 跳跃连接 | skip connection |
#
# 先看结果：一个有八个线性层的网络，由四个 rank 训练，每个 rank 负责两层。

# %%
import os
import signal
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import RunFailedError, ScheduleError

images, labels = sp.data.digits("train")[:64]
loss_fn = sp.nn.CrossEntropyLoss()


def make_network():
    sp.set_seed(1)
    pairs = [(sp.nn.Linear(64, 64, weight_init="he_normal"), sp.nn.ReLU()) for _ in range(7)]
    return sp.nn.Sequential(*[layer for pair in pairs for layer in pair], sp.nn.Linear(64, 10))


def train(schedule="1f1b", steps=20):
    pipeline = sp.parallel.Pipeline(make_network(), loss_fn, microbatches=8, schedule=schedule)
    optimizer = sp.optim.SGD(pipeline.parameters(), lr=0.05)  # 只有这个 rank 的阶段
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(images, labels).item())  # 整个批次的前向和反向
        optimizer.step()
    return losses, pipeline.stages


losses, stages = sp.launch(train, world_size=4)[0]
for rank, names in enumerate(stages):
    print(f"rank {rank} has the layers {', '.join(names)}")
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# ## 与单个设备对比
#
# 先猜一猜：流水线并行是一种近似吗？它的损失与单个设备相差多少？


# %%
def train_alone(steps=20):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(network(images), sp.Tensor(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "11_pipelines", f"{name}.png"), dpi=100)


alone = train_alone()
apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
print(f"the losses differ by at most {apart:.0e}")
assert apart < 1e-5
picture = sp.view.plot_loss({"four stages": losses, "one device": alone}, title="Pipeline and one device")
show(picture, "losses")

# %% [markdown]
# 它不是近似。各个 rank 算出的是同样的梯度，只有加法的顺序不同。
#
# 下面从头搭建。
#
# ## 微批次
#
# 阶段 1 需要阶段 0 的输出，阶段 0 又需要阶段 1 传回的梯度。如果整个批次作为一块，那么一个 rank 工作时，
# 其他 rank 都在等待。等待的时间就是*气泡*。
#
# 因此把批次切成*微批次*。rank 1 处理微批次 0 的时候，rank 0 处理微批次 1。所有微批次的梯度相加，
# 最后优化器只更新一次。这就是梯度累积。
#
# 先猜一猜：四个 rank、一个微批次时，一个 rank 有多大比例的时间空闲？八个微批次时呢？

# %%
one = sp.pipeline_schedule("gpipe", ranks=4, microbatches=1)
eight = sp.pipeline_schedule("gpipe", ranks=4, microbatches=8)
print(one)
print(eight)
figure, axes = plt.subplots(2, figsize=(12, 5.4), layout="constrained", sharex=True)
# 唯一的微批次就是整个批次，它的前向用时等于八个微批次的前向之和。
sp.view.plot_schedule(eight, axes[1])
sp.view.plot_schedule(one, axes[0], forward=8, input_gradient=8, weight_gradient=8)
axes[1].set_xlabel("time [forwards of an eighth of the batch in a stage]")
show(figure, "microbatches")

# %% [markdown]
# `F` 是前向，`B` 是反向，数字是微批次的编号。反向要计算输入梯度和权重梯度，所以用时是前向的两倍。
# 文字图中的点就是气泡。
#
# 有 `P` 个 rank 时，气泡的长度是一个微批次的 `P - 1` 次前向和反向。微批次越小，这些前向和反向就越短。
# 有 `M` 个微批次时，每个 rank 的空闲比例是 `(P - 1) / (M + P - 1)`：

# %%
shares = {}
for microbatches in (1, 2, 4, 8, 16, 32):
    cost = sp.pipeline_schedule("gpipe", 4, microbatches).cost()
    assert cost.work / microbatches == 3
    shares[microbatches] = cost.bubble / cost.makespan
    assert np.isclose(shares[microbatches], 3 / (microbatches + 3))
    step = cost.makespan / microbatches
    print(f"M = {microbatches:2d}: a step takes {step:5.2f} forwards of a batch, idle {shares[microbatches]:.0%}")

# %% [markdown]
# 如果没有气泡，一步需要 3 个批次前向的时间。微批次多也有代价：每个微批次更小，而小的矩阵乘法不能充分利用设备。
#
# ## 调度就是数据
#
# 上图就是一个*调度*：每个 rank 有一个动作列表。`"2F0"` 表示阶段 2、前向、微批次 0。
# GPipe 调度（Huang 等 2019）先做完所有前向。从前向到反向之间，微批次的激活一直占用内存。
#
# 1F1B 调度（Narayanan 等 2019）尽早开始每个反向。预热之后，每个 rank 交替执行一次前向和一次反向。
#
# 先猜一猜：1F1B 的气泡更小吗？rank 0 的内存里要保留几个微批次？

# %%
gpipe, one_by_one = (sp.pipeline_schedule(name, ranks=4, microbatches=8) for name in ("gpipe", "1f1b"))
print("rank 2 of 1f1b:", *one_by_one.actions[2])
for schedule in (gpipe, one_by_one):
    cost = schedule.cost()
    print(f"{schedule.name:<6} bubble {cost.bubble}, live micro-batches by rank {cost.peak_live_at_weight_gradient}")
assert gpipe.cost().bubble == one_by_one.cost().bubble
figure, axes = plt.subplots(2, figsize=(12, 7), layout="constrained")
for schedule, ax in zip((gpipe, one_by_one), axes, strict=True):
    sp.view.plot_schedule(schedule, ax, live=True)
axes[1].set_xlabel("time [forwards of a stage]")
show(figure, "live")

# %% [markdown]
# 气泡相同，内存不同：GPipe 保留所有微批次，而 1F1B 保留的微批次不超过 rank 的个数。所以 1F1B 可以使用很多微批次，
# 从而减小气泡的比例。
#
# 方块下面的灰色区域是保留的微批次数。1F1B 的最后一个 rank 只保留一个，因为它的反向紧跟在前向之后。
#
# ## 反向分成两部分
#
# 反向计算两种梯度。*输入梯度*很急：前一个阶段在等它。*权重梯度*不急：只有最后的优化器才用到它。
# ZB-H1（Qi 等 2023）把反向分成动作 `I` 和 `W`，并把 `W` 放到原来是气泡的地方。
#
# 先猜一猜：1F1B 的气泡是 9 个前向，这样之后还剩多少？

# %%
split = sp.pipeline_schedule("zb_h1", ranks=4, microbatches=8)
print(split)
assert (one_by_one.cost().bubble, split.cost().bubble) == (9, 3)
assert max(split.cost().peak_live_at_weight_gradient) == max(one_by_one.cost().peak_live_at_weight_gradient)
picture = sp.view.plot_schedule(split)
picture.set_xlabel("time [forwards of a stage]")
show(picture, "zb_h1")

# %% [markdown]
# 只剩三分之一，而 rank 0 的内存不变。每个梯度仍然只计算一次，相加的顺序也相同，所以损失逐位相等：

# %%
assert sp.launch(train, ("zb_h1",), world_size=4)[0][0] == losses

# %% [markdown]
# ## 一个 rank 上有多个阶段
#
# 气泡的长度是一个阶段的 `P - 1` 次前向和反向。阶段越小，它们就越短。
# 交错式 1F1B（Narayanan 等 2021）在四个 rank 上把模型切成八个阶段：rank 0 负责阶段 0 和阶段 4。
# ZBV（Qi 等 2024）把阶段排成 V 形：rank 0 负责第一个和最后一个阶段。
#
# 先猜一猜：阶段变小的代价是什么？


# %%
def cost_of(schedule, message=0.0):
    """返回代价：一个 rank 的全部阶段的前向、输入梯度和权重梯度各用时 1。"""
    part = 1 / schedule.chunks
    return schedule.cost(part, part, part, message)


looped, v_shaped = (sp.pipeline_schedule(name, ranks=4, microbatches=8) for name in ("interleaved_1f1b", "zbv"))
for schedule in (one_by_one, looped, split, v_shaped):
    cost = cost_of(schedule)
    live = max(cost.peak_live_at_weight_gradient) / schedule.chunks
    print(f"{schedule.name:<17} bubble {cost.bubble:3g}, live {live}, messages {cost.messages}")
assert cost_of(looped).bubble == cost_of(one_by_one).bubble / 2
figure, axes = plt.subplots(2, figsize=(12, 5.4), layout="constrained")
for schedule, ax in zip((looped, v_shaped), axes, strict=True):
    sp.view.plot_schedule(schedule, ax, forward=1 / 2, input_gradient=1 / 2, weight_gradient=1 / 2)
axes[1].set_xlabel("time [forwards of the part of a rank]")
show(figure, "interleaved")

# %% [markdown]
# 每个 rank 有两个阶段时，1F1B 的气泡减半。但是每个微批次要更多次跨越 rank 的边界，所以消息数是原来的两倍多。
# 颜色较深的方块是该 rank 的第二个阶段。
#
# ## 延迟
#
# 到目前为止，消息不花时间。现在每条消息都有延迟，最长等于一次前向的时间。
#
# 先猜一猜：没有延迟时，1F1B 和 GPipe 的气泡相同。消息变慢时，哪一个受的影响更大？

# %%
latencies = np.linspace(0, 1, 11)
bubbles = {}
with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, line in (("gpipe", "-"), ("1f1b", "-"), ("eager_1f1b", "--"), ("interleaved_1f1b", "-")):
        schedule = sp.pipeline_schedule(name, ranks=4, microbatches=8)
        bubbles[name] = [cost_of(schedule, float(latency)).bubble for latency in latencies]
        ax.plot(latencies, bubbles[name], line, label=name, linewidth=2.5)
        print(f"{name:<17} bubble {bubbles[name][0]:4g} without latency, {bubbles[name][-1]:4g} with slow messages")
ax.set(xlabel="latency of a message [forwards]", ylabel="bubble [forwards]", ylim=(0, None))
ax.legend()
show(ax, "latency")

# %% [markdown]
# 是 1F1B。在稳定部分，一个 rank 把微批次发送出去，然后等待更早的微批次的梯度传回来：
# 每一轮都包含两个方向的消息延迟。GPipe 只在进入和离开流水线时付出延迟。交错式失去了大部分优势，
# 因为有更多的消息前后相接。
#
# `eager_1f1b` 在预热时多做大约一倍的前向。消息在路上的时候，总有另一个微批次可以处理。代价是内存：

# %%
eager = sp.pipeline_schedule("eager_1f1b", ranks=4, microbatches=8)
for schedule in (one_by_one, eager):
    cost = schedule.cost(message=1)
    print(f"{schedule.name:<10} makespan {cost.makespan}, live {cost.peak_live_at_weight_gradient}")
assert eager.cost(message=1).makespan < one_by_one.cost(message=1).makespan

# %% [markdown]
# ## 时间花在哪里
#
# `bubbles` 给出每个 rank 空闲的原因。*warm-up*：第一个动作还没有到来。*activation*：前一个阶段还没有完成。
# *gradient*：后一个阶段还没有完成。*memory*：可以做一次前向，但是需要再多保留一个微批次。*barrier*：
# 这个 rank 已经完成，在等其他 rank。
#
# *关键路径*是从一步开始到结束、中间没有空闲的一串动作和消息。只有加快这条路径上的动作或消息，才可能缩短这一步。

# %%
table = one_by_one.bubbles(message=1)
print(table)
print(*(cell for _, cell, _ in one_by_one.critical_path(message=1)))
figure, axes = plt.subplots(2, figsize=(12, 5.4), layout="constrained")
for schedule, ax in zip((one_by_one, eager), axes, strict=True):
    sp.view.plot_schedule(schedule, ax, critical_path=True, message=1)
axes[1].set_xlabel("time [forwards of a stage]")
show(figure, "critical_path")

# %% [markdown]
# 1F1B 的关键路径反复下行和上行，每次都经过两个方向的消息。`eager_1f1b` 的关键路径下行一次，留在最后一个 rank，
# 再上行一次。
#
# ## 修改调度
#
# 假设 rank 0 的内存只能保留三个微批次，而 1F1B 需要四个。一个想法是：第一个前向之后马上做第一个反向。
# 动作是列表里的字符串，所以很容易修改。
#
# 先猜一猜：它能运行吗？

# %%
rows = [list(row) for row in one_by_one.actions]
rows[0].remove("0B0")
rows[0].insert(1, "0B0")
try:
    one_by_one.with_actions(rows).check(memory=3)
except ScheduleError as error:
    refusal = str(error)
    print(refusal)

# %% [markdown]
# 各个 rank 会互相等待，形成一个环。`check` 在启动进程之前就能发现，并指出是哪些动作。
#
# 更好的修改：rank 0 在预热时少做一次前向。
#
# 先猜一猜：气泡会怎样变化？

# %%
rows = [list(row) for row in one_by_one.actions]
warm_up, steady, end = ["0F0", "0F1", "0F2"], [], [f"0B{m}" for m in (5, 6, 7)]
for m in range(5):
    steady += [f"0B{m}", f"0F{m + 3}"]
rows[0] = warm_up + steady + end
lean = one_by_one.with_actions(rows, name="three live")
cost = lean.check(memory=3)
print(f"bubble {one_by_one.cost().bubble} -> {cost.bubble}, differences {len(lean.diff(one_by_one))}")
picture = sp.view.plot_schedule(lean)
picture.set_xlabel("time [forwards of a stage]")
show(picture, "edited")

# %% [markdown]
# 它能运行，但是很慢：rank 0 的每个前向都要等一个梯度，其他 rank 又要等 rank 0。梯度仍然是正确的。用它来训练，
# 这次用线程，因为线程比进程启动得快：

# %%
assert sp.launch(train, (lean,), world_size=4, transport="inline")[0][0] == losses

# %% [markdown]
# ## 搜索
#
# 保留三个微批次时，这是最好的调度吗？`search_schedule` 寻找总时间最短的调度，
# 并且对每个 rank 只有一个阶段的所有调度证明一个下界。

# %%
found = sp.search_schedule(ranks=4, microbatches=8, memory=3)
print(found)
assert found.is_optimal
assert found.makespan < lean.cost().makespan
assert sp.launch(train, (found.schedule,), world_size=4, transport="inline")[0][0] == losses
picture = sp.view.plot_schedule(found.schedule)
picture.set_xlabel("time [forwards of a stage]")
show(picture, "search")

# %% [markdown]
# 它的总时间甚至比保留四个微批次的 1F1B 还短：反向分成两部分，搜索就有了更大的自由度。
#
# ## 气泡与内存
#
# 把所有调度画在一张图里。点越低，气泡越小。点越靠左，需要的内存越少。
# 红线是每个 rank 只有一个阶段时能达到的最好结果。
#
# 先猜一猜：哪些调度能在红线下方？为什么？

# %%
assert found.makespan < one_by_one.cost().makespan
known = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "v_min")
schedules = [sp.pipeline_schedule(name, ranks=4, microbatches=8) for name in known]
front = [sp.search_schedule(ranks=4, microbatches=8, memory=memory).schedule for memory in range(1, 9)]
for schedule, best in zip((schedules[8], schedules[7], schedules[6]), (front[1], front[2], front[3]), strict=True):
    assert cost_of(schedule).bubble < best.cost().bubble
picture = sp.view.plot_schedule_tradeoff(schedules, front)
show(picture, "tradeoff")

# %% [markdown]
# 是 `v_min`、`v_half` 和 `zbv`。它们的两个阶段排成 V 形。在 1F1B 里，第一个 rank 的激活保留得最久，
# 最后一个 rank 马上就释放。在 V 形里，第一个 rank 同时负责最后一个阶段，所以所有 rank 需要的内存差不多。
#
# ## 有自己代码的模型
#
# 不是所有模型都是 `Sequential`。下面的模型把嵌入加到最后一层的输出上（*跳跃连接*，越过两个阶段），
# 并且把嵌入表又用作输出层（*共享权重*）。阶段就是名字的列表。如果一个阶段在自己的代码里用到另一个阶段的参数，
# 就在这个阶段也写上该参数的名字。
#
# 先猜一猜：rank 0 和 rank 3 都有嵌入表。在优化器更新之前，它们必须做什么？


# %%
class Language(sp.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = sp.nn.Embedding(32, 16)
        self.first, self.second, self.third = (sp.nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens):
        x = self.tokens(tokens)
        y = self.third(self.second(self.first(x).tanh()).tanh())
        return sp.functions.linear(y + x, self.tokens.weight)


def token_loss(logits, labels):
    return sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def make_language():
    sp.set_seed(2)
    return Language()


def language_gradients():
    model = make_language()
    stages = [["tokens"], ["first"], ["second"], ["third", "tokens.weight"]]
    pipeline = sp.parallel.Pipeline(model, token_loss, microbatches=4, stages=stages)
    pipeline.step(text[:, :-1], text[:, 1:])
    return {name: parameter.grad.numpy() for name, parameter in pipeline.named_parameters()}


text = np.random.default_rng(0).integers(0, 32, (8, 9))
results = sp.launch(language_gradients, world_size=4, transport="inline", record="full")
model = make_language()
token_loss(model(text[:, :-1]), sp.Tensor(text[:, 1:])).backward()
expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
for rank, own in enumerate(results):
    print(f"rank {rank}: {', '.join(own)}")
    for name, gradient in own.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-7)
ends = [event for event in results.trace.events if event.rank in (0, 3)]
show(sp.view.plot_timeline(ends, title="The first and the last rank, simulated time"), "language")

# %% [markdown]
# 它们把梯度相加，因为各自只看到了嵌入表的一次使用。这就是图中 `comm [0, 3]` 一行的 all-reduce。
# 然后两份拷贝做同样的更新，保持相等。跳跃连接的值从 rank 0 直接送到 rank 3，它的梯度也直接送回。
# （所有 rank 的 all-reduce 计算平均损失。）
#
# ## 同时使用数据并行、流水线并行和张量并行
#
# 大模型同时用三种方式切分。八个 rank 组成 2 x 2 x 2 的设备网格：`dp` 是两条流水线，各处理批次的一半。
# `pp` 是两个阶段。`tp` 是两个 rank 共同持有一个阶段的矩阵。
#
# 先猜一猜：哪些 rank 持有同一个矩阵的切片？哪些 rank 把同一个切片的梯度相加？

# %%
CUTS = {
    "*.up.weight": ("tp", "None"),
    "*.up.bias": ("tp",),
    "*.down.weight": ("None", "tp"),
    "*.out.weight": ("None", "tp"),
    "tokens.weight": ("tp", "None"),
}
GPT_STAGES = [["tokens", "positions", "blocks.0"], ["blocks.1", "norm", "tokens.weight"]]
sentences = np.random.default_rng(1).integers(0, 16, (16, 9))


def make_gpt():
    sp.set_seed(5)
    return sp.models.gpt(16, 8, num_layers=2, num_heads=2, width=16)


def train_on_mesh(steps=8):
    mesh = sp.Mesh((2, 2, 2), ("dp", "pp", "tp"))
    network = make_gpt()
    layout = sp.Layout((2,), ("tp",), mesh.group("tp", sp.get_rank()))
    sp.distribute_module(network, layout, CUTS)
    pipeline = sp.parallel.Pipeline(network, token_loss, 4, "1f1b", GPT_STAGES, mesh=mesh)
    optimizer = sp.optim.Adam(pipeline.parameters(), 0.01)
    mine = sentences[8 * pipeline.replica : 8 * (pipeline.replica + 1)]  # 这条流水线的半个批次
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(mine[:, :-1], mine[:, 1:]).item())
        optimizer.step()
    return losses, mesh.coordinate(sp.get_rank())


results = sp.launch(train_on_mesh, world_size=8, transport="inline")
for rank, (_, (replica, stage, part)) in enumerate(results):
    print(f"rank {rank}: pipeline {replica}, stage {stage}, slice {part}")
mesh_losses = results[0][0]

network = make_gpt()
optimizer = sp.optim.Adam(network.parameters(), 0.01)
gpt_losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = token_loss(network(sentences[:, :-1]), sp.Tensor(sentences[:, 1:]))
    loss.backward()
    optimizer.step()
    gpt_losses.append(loss.item())
np.testing.assert_allclose(mesh_losses, gpt_losses, rtol=1e-4)
picture = sp.view.plot_loss({"eight ranks": mesh_losses, "one device": gpt_losses}, title="GPT on a 2 x 2 x 2 mesh")
show(picture, "mesh")

# %% [markdown]
# 网格里的 rank 从最后一个轴开始编号：rank 0 和 rank 1 共同持有矩阵，rank 0 和 rank 4 把梯度相加。
#
# ## 预测硬件上的时间
#
# 到目前为止，一次前向的时间是 1。`dry_run` 在描述的集群上（这里是四个 H100）不用数据执行同一个程序，
# 给出模拟时间。现在各阶段并不相等：最后一个阶段还要计算所有词元的 logits。给出 `example`，
# 就能自动找到用时接近的阶段。
#
# 先猜一猜：在前面的气泡表里，顺序是 `1f1b`、`interleaved_1f1b`、`zb_h1`、`zbv`。这里的顺序也一样吗？


# %%
def train_large(schedule):
    network = sp.models.gpt(4096, 256, num_layers=8, num_heads=8, width=1024)
    tokens = np.random.default_rng(0).integers(0, 4096, (32, 257))
    x, y = tokens[:, :-1], tokens[:, 1:]
    pipeline = sp.parallel.Pipeline(network, token_loss, 8, schedule, example=(x[:2], y[:2]))
    optimizer = sp.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.step(x, y)
    optimizer.step()


predictions = {}
for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
    predictions[name] = sp.dry_run(train_large, (name,), world_size=4, cluster="dgx-h100")
    memory = predictions[name].peak_bytes / 1e9
    print(f"{name:<17} {predictions[name].step_time_s * 1e3:5.1f} ms, at most {memory:.2f} GB on a rank")
for name in ("1f1b", "zb_h1"):
    events = predictions[name].trace.events
    backward_s = sum(event.sim_end_ps - event.sim_start_ps for event in events if event.kind == "backward") / 1e12
    print(f"{name:<6} backward of all ranks together: {backward_s * 1e3:.1f} ms")
picture = sp.view.plot_timeline(predictions["1f1b"].trace.events, title="1F1B on four H100, simulated time")
show(picture, "timeline")

# %% [markdown]
# `zbv` 最快，但是 `interleaved_1f1b` 超过了 `zb_h1`：这里把反向分成两部分，比不分用时更长。气泡不是唯一的代价，
# 所以要预测整个一步。GPipe 和 1F1B 用时相同，而 1F1B 需要的内存更少。

# %%
milliseconds = {name: prediction.step_time_s * 1e3 for name, prediction in predictions.items()}
assert min(milliseconds, key=milliseconds.get) == "zbv"
assert milliseconds["interleaved_1f1b"] < milliseconds["zb_h1"] < milliseconds["1f1b"]
assert np.isclose(milliseconds["gpipe"], milliseconds["1f1b"], rtol=0.01)
assert predictions["1f1b"].peak_bytes < predictions["gpipe"].peak_bytes

# %% [markdown]
# ## 不清空流水线：旧权重
#
# 上面所有的调度都在一步结束时*清空*流水线（flush），然后所有 rank 一起更新。
# PipeDream（Narayanan 等 2019）不清空流水线，步与步之间没有气泡。每个微批次自成一个批次，
# 每个 rank 在每个反向之后马上更新。一个微批次的梯度回到 rank 0 时，rank 0 已经更新过几次，
# 所以这个梯度属于*旧权重*，最多旧 `P - 1` 次更新。
#
# 先猜一猜：学习率与单个设备相同，它还学得一样好吗？

# %%
many_images, many_labels = sp.data.digits("train")[:960]
BATCH = 4


def train_pipedream(rate):
    updates = len(many_images) // BATCH
    pipeline = sp.parallel.Pipeline(make_network(), loss_fn, updates, "pipedream")
    optimizer = sp.optim.SGD(pipeline.parameters(), rate)
    pipeline.step(many_images, many_labels, optimizer)
    return [loss.item() for loss in pipeline.losses]


def train_fresh(rate):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), rate)
    losses = []
    for first in range(0, len(many_images), BATCH):
        optimizer.zero_grad()
        x, y = many_images[first : first + BATCH], many_labels[first : first + BATCH]
        loss = loss_fn(network(x), sp.Tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


schedule = sp.pipeline_schedule("pipedream", ranks=4, microbatches=8)
print("versions that micro-batch 7 reads:", [schedule.weight_version(rank, 7) for rank in range(4)])
means = {}
for rate in (0.01, 0.04):
    old = sp.launch(train_pipedream, (rate,), world_size=4, transport="inline")[3]
    fresh = train_fresh(rate)
    means[rate] = np.mean(old), np.mean(fresh)
    print(
        f"learning rate {rate}: mean loss {means[rate][0]:.3f} with old weights, {means[rate][1]:.3f} with fresh ones"
    )
curves = {"PipeDream": old, "a flush after each batch": fresh}
smooth = {
    name: [(first + 20, float(np.mean(curve[first : first + 40]))) for first in range(0, len(curve), 40)]
    for name, curve in curves.items()
}
picture = sp.view.plot_loss(smooth, title="Old weights: means of 40 updates, learning rate 0.04")
show(picture, "pipedream")

# %% [markdown]
# 不一样好。学习率较低时，旧权重的害处较小，因为从前向到更新之间权重变化较小。
# `pipedream_2bw` 调度（Narayanan 等 2021）把整个批次的梯度相加，它的所有权重都只旧一次更新。

# %%
behind = {rate: of_old - of_fresh for rate, (of_old, of_fresh) in means.items()}
assert 0 < behind[0.01] < behind[0.04] / 2

# %% [markdown]
# ## 会出什么问题
#
# **一个阶段被杀死。** 这里 rank 2 的进程在一步的中间被杀死。先猜一猜：其他 rank 要等多久？它们能告诉你什么？


# %%
class Killed(sp.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = sp.nn.Linear(64, 64), 0

    def forward(self, x):
        self.calls += 1
        if sp.get_rank() == 2 and self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def step_until_killed():
    network = sp.nn.Sequential(sp.nn.Linear(64, 64), sp.nn.Linear(64, 64), Killed(), sp.nn.Linear(64, 10))
    sp.parallel.Pipeline(network, loss_fn, microbatches=8).step(images, labels)


try:
    sp.launch(step_until_killed, world_size=4, echo=False)
except RunFailedError as error:
    failed = error.facts
    print(f"rank {failed['rank']} failed")
    for rank, report in failed["reports"].items():
        if rank != failed["rank"]:
            print(f"rank {rank}:", *report["notes"])

# %% [markdown]
# 所有 rank 马上停止。每个 rank 都说出自己的动作，以及它在等哪个值。
#
# **大小不等的微批次。** 十个样本分成四个微批次，分别有 2、3、2、3 个样本。简单的程序把每个损失除以微批次的个数。
# 先猜一猜：加起来就是批次的平均损失吗？


# %%
def step_of_ten():
    pipeline = sp.parallel.Pipeline(make_network(), loss_fn, microbatches=4)
    loss = pipeline.step(images[:10], labels[:10])
    return loss.item(), [part.item() for part in pipeline.losses]


loss, parts = sp.launch(step_of_ten, world_size=4, transport="inline")[3]
exact = loss_fn(make_network()(images[:10]), sp.Tensor(labels[:10])).item()
print(f"one device {exact:.4f}, the pipeline {loss:.4f}, mean of the micro-batches' means {np.mean(parts):.4f}")
assert np.isclose(loss, exact)
assert not np.isclose(np.mean(parts), exact)

# %% [markdown]
# 不是：小微批次里的样本会占更大的权重。`Pipeline` 按样本数给每个微批次加权。如果损失是对词元的平均，
# 而有的句子有填充，就用 `weight_fn=` 给出词元数。
#
# **批归一化。** 它用批次的均值和方差做归一化，但是一个阶段每次只看到一个微批次。先猜一猜：下面两条线中，
# 哪一条是水平的？


# %%
def first_loss(norm, microbatches):
    sp.set_seed(3)
    network = sp.nn.Sequential(sp.nn.Linear(64, 32), norm(32), sp.nn.ReLU(), sp.nn.Linear(32, 10))
    return sp.parallel.Pipeline(network, loss_fn, microbatches).step(images, labels).item()


counts = (1, 2, 4, 8, 16)
norms = {"batch norm": sp.nn.BatchNorm1d, "layer norm": sp.nn.LayerNorm}
first_losses = {
    name: [sp.launch(first_loss, (norm, count), world_size=2, transport="inline")[0] for count in counts]
    for name, norm in norms.items()
}
for name, row in first_losses.items():
    print(f"{name}: " + ", ".join(f"{loss:.4f}" for loss in row))
assert np.allclose(first_losses["layer norm"], first_losses["layer norm"][0], rtol=1e-5)
assert not np.allclose(first_losses["batch norm"], first_losses["batch norm"][0], rtol=1e-3)
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for (name, row), marker in zip(first_losses.items(), "os", strict=True):
    ax.plot(counts, row, marker=marker, label=name)
ax.set_xscale("log", base=2)
ax.set_xticks(counts, counts)
ax.set(xlabel="micro-batches of a batch of 64", ylabel="loss of the first step")
ax.legend()
show(ax, "norms")

# %% [markdown]
# 层归一化对每个样本单独计算，所以批次怎样切分都没有影响。在流水线里请使用层归一化或组归一化。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。答案在 `tutorials/solutions/11_pipelines.py`。


# %%
def lists_of_1f1b(ranks, microbatches):
    """练习 1：返回 1F1B 调度，每个 rank 是一个动作列表，动作形如 "2F0"。

    最后一个 rank 交替执行前向和反向。往前每一个 rank 都先多做一次前向。
    """
    raise NotImplementedError


sp.exercises.check("lists_of_1f1b", lists_of_1f1b)


# %%
def fewest_microbatches(ranks, share):
    """练习 2：GPipe 的气泡最多占一步的 `share`，返回所需的最少微批次数。"""
    raise NotImplementedError


sp.exercises.check("fewest_microbatches", fewest_microbatches)


# %%
def balanced_stages(times, ranks):
    """练习 3：把一列层切成阶段，使最慢的阶段尽可能快。

    `times` 是每一层的用时。返回每个阶段的层数，至少为一。
    """
    raise NotImplementedError


sp.exercises.check("balanced_stages", balanced_stages)
