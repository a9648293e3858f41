# %% [markdown]
# # 第 8 课：调试
#
# 并行程序有自己特有的出错方式：挂起；一个 rank 死掉，其他 rank 等它；或者一切正常，但是数值不对。
# 本课故意把程序弄错，再阅读报错。学习本课需要了解集合通信、消息和数据并行。
#
# 运行方式：`python tutorials/08_debugging_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 挂起 | hang |
# | 死锁 | deadlock |
# | 调用不一致 | mismatch |
# | 期限 | deadline, timeout |
# | 调用栈 | traceback |
# | 屏障 | barrier |
# | 标签 | tag |
# | 慢节点（掉队者） | straggler |
# | 梯度裁剪 | gradient clipping |
# | 提前停止 | early stopping |
#
# 先看结果：两个 rank 调用同样的两个集合通信，但是顺序不同。

# %%
import os
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import NotEquivalentError, RunFailedError
from simparallel.testing import assert_equivalent

rows = np.arange(8.0).reshape(4, 2)


def totals(swaps):
    own = rows[sp.get_rank() :: sp.get_world_size()]
    if swaps and sp.get_rank() == 1:
        largest, total = sp.all_reduce(own.max(0), "max"), sp.all_reduce(own.sum(0))
    else:
        total, largest = sp.all_reduce(own.sum(0)), sp.all_reduce(own.max(0), "max")
    return total.tolist(), largest.tolist()


def failure_of(program, *arguments, **settings):
    """在真实的进程上运行一个会失败的程序，返回它的错误。"""
    try:
        sp.launch(program, arguments, echo=False, **settings)
    except RunFailedError as error:
        return error
    raise AssertionError("the program did not fail")


error = failure_of(totals, True, world_size=2)
print(str(error).partition("\n\n")[0])

# %% [markdown]
# ## 在单个设备上
#
# 先猜一猜：这个程序在一个 rank 上会怎样？改正后的程序在两个 rank 上会返回什么？

# %%
alone = sp.launch(totals, (True,), world_size=1)[0]
right = sp.launch(totals, (False,), world_size=2)
print("one rank, with the mistake:", alone)
print("two ranks, mended:         ", right[0])
assert alone == right[0] == right[1] == (rows.sum(0).tolist(), rows.max(0).tolist())

# %% [markdown]
# 在一个 rank 上，这个错误没有任何影响：结果与改正后的程序在两个 rank 上的结果相同。所以在单个设备上正确的程序，
# 在集群上不一定正确；请用两个、三个 rank 运行它。
#
# ## 阅读错误信息
#
# 上面的错误信息有四部分：*通信组*和调用的编号（`world, collective #1`）；*每个 rank* 调用了什么，在哪一行；
# 这些调用*哪里不同*；以及*规则*。集合通信开始之前，所有 rank 先比较各自要做的事。所以没有数据被改动，
# 并且每个 rank 都知道出了错，而不只是其中一个。
#
# 先猜一猜：如果不做比较，两个 rank 会算出什么？

# %%
unchecked = sp.launch(totals, (True,), world_size=2, check="off", transport="inline")
for rank, (total, largest) in enumerate(unchecked):
    print(f"rank {rank}: sum {total}, maximum {largest}")
assert unchecked[0] != right[0]


def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "08_debugging", f"{name}.png"), dpi=100)


calls = {
    "rank 0": [("call 1 and 2", ["all_reduce(sum)", "all_reduce(max)"])],
    "rank 1": [("call 1 and 2", ["all_reduce(max)", "all_reduce(sum)"])],
}
show(sp.view.plot_cells(calls, title="The calls of rank 1 that differ from those of rank 0"), "calls")

# %% [markdown]
# 结果错误，而且没有任何提示：一个 rank 的求和遇上了另一个 rank 的求最大值。如果不做比较，这种程序在形状碰巧一致时
# 给出错误的数值，不一致时可能挂起或崩溃。
#
# 错误也是数据。`error.facts` 里有每个 rank 的报告：

# %%
for rank, report in error.facts["reports"].items():
    print(f"rank {rank} failed in {report['at'].rpartition(' in ')[2]}: {report['summary'].partition(':')[0]}")

# %% [markdown]
# ## 死锁
#
# 四个 rank 沿着环传递一个数。每个 rank 发送给下一个 rank，接收时却也从下一个 rank 接收，这就是错误所在。
#
# 先猜一猜：每个 rank 都发送一次、接收一次。每个 rank 在等哪一个？


# %%
def ring():
    rank, size = sp.get_rank(), sp.get_world_size()
    received = np.empty(1)
    sp.send(np.array([float(rank)]), (rank + 1) % size)
    sp.recv(received, (rank + 1) % size)


deadlock = str(failure_of(ring, world_size=4)).partition("\n\n")[0]
print(deadlock)
waits = [(int(a), int(b)) for a, b in re.findall(r"rank (\d) waits in recv\(.*?src=(\d)", deadlock)]
assert waits == [(0, 1), (1, 2), (2, 3), (3, 0)]

_, ax = plt.subplots(figsize=(4.5, 4), layout="constrained")
places = {rank: np.array([np.sin(rank * np.pi / 2), np.cos(rank * np.pi / 2)]) for rank in range(4)}
for a, b in waits:
    style = {"arrowstyle": "-|>", "shrinkA": 22, "shrinkB": 22, "connectionstyle": "arc3,rad=-0.2", "lw": 2}
    ax.annotate("", places[b], places[a], arrowprops=style)
    ax.text(*places[a], f"rank {a}", ha="center", va="center", bbox={"boxstyle": "circle", "fc": "#56B4E9"})
ax.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), title="Who waits for whom")
ax.axis("off")
show(ax, "waits")

# %% [markdown]
# 每个 rank 都在等下一个，形成一个环。当*所有* rank 都在等待时，谁也不可能继续，因此几分之一秒之内就报错，
# 不用等到超时。错误信息里有每个 rank 所在的行，因为错误常常在你没有注意的那个 rank 上。
#
# ## 没有来的 rank
#
# 现在只有一部分 rank 在等待。rank 1 长时间忙于别的事情。
#
# 先猜一猜：其他 rank 能知道 rank 1 永远不会来吗？


# %%
def busy():
    if sp.get_rank() == 1:
        time.sleep(60)
    sp.all_reduce(np.ones(2))


late = str(failure_of(busy, world_size=4, timeout_s=1.0)).partition("\n\n")[0]
print(late)
assert "rank 1" in late

# %% [markdown]
# 不能：它也许在加载数据。所以每次等待都有*期限* `timeout_s`（默认 60 秒）。错误信息指出是哪个 rank 拖住了其他 rank。
# 如果加载确实需要几分钟，就把期限调大。
#
# ## 死掉的 rank
#
# rank 2 被杀死，就像系统在内存耗尽时所做的那样。
#
# 先猜一猜：rank 2 已经不能说话了。其他 rank 要等多久？它们知道什么？


# %%
def killed():
    for step in range(5):
        if step == 3 and sp.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sp.all_reduce(np.ones(4))


death = failure_of(killed, world_size=4)
print(str(death).partition("\n\n")[0])
for rank in (0, 1, 3):
    print(f"rank {rank}:", death.facts["reports"][rank]["summary"].partition(": ")[2])
assert death.facts["rank"] == 2

# %% [markdown]
# 它们马上停止。每个 rank 都报告自己当时在等哪个调用，以及 rank 2 被杀死了。
# 要看的是*最先的*失败：其他 rank 报告的都是后果。
#
# ## 数值错误：比较各个 rank
#
# 最糟的错误不会报错。下面的训练缺少梯度的 all-reduce。`X` 和 `Y` 是 24 个样本和它们的目标值，
# 取自后面要介绍的错误程序集。
#
# 先猜一猜：损失会下降吗？几步之后各个 rank 的权重开始不同？


# %%
X, Y = sp.zoo.given.X, sp.zoo.given.Y


def train(averages):
    rank, size = sp.get_rank(), sp.get_world_size()
    sp.set_seed(0)
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.05)
    losses, weights = [], []
    for _ in range(8):
        weights.append(model.weight.numpy().copy())
        loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
        optimizer.zero_grad()
        loss.backward()
        if averages:
            for parameter in model.parameters():
                sp.all_reduce(parameter.grad, "mean")
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights}


runs = {name: sp.launch(train, (name == "mended",), world_size=4, transport="inline") for name in ("wrong", "mended")}
apart = {}
for name, results in runs.items():
    weights = np.array([result["weights"] for result in results])
    apart[name] = np.abs(weights - weights[0]).max(axis=(0, 2, 3))
    first = results[0]["losses"]
    print(f"{name:<6} loss of rank 0: {first[0]:.2f} -> {first[-1]:.2f}, weights apart at step 1: {apart[name][1]:.3f}")
assert runs["wrong"][0]["losses"][-1] < runs["wrong"][0]["losses"][0]
assert apart["wrong"][0] == 0 < apart["wrong"][1]
assert not apart["mended"].any()
with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for name, line in apart.items():
        ax.plot(line, "o-", label=name)
    ax.set(xlabel="step", ylabel="largest difference of weights")
    ax.legend()
show(ax, "apart")

# %% [markdown]
# 每个 rank 的损失都在下降：它们各自用四分之一的数据训练自己的模型。但是第一步之后权重就不同了。在数据并行中，
# 所有 rank 的权重始终相等，所以数值看起来不对时，请*比较各个 rank*：先比参数，再比梯度，然后比输入。
# 第一个不同之处离错误不远。
#
# `assert_equivalent` 对整个程序做这件事，并且还与单个设备比较：

# %%
assert_equivalent(train, (True,), per_rank=["losses"])
try:
    assert_equivalent(train, (False,), per_rank=["losses"])
except NotEquivalentError as different:
    print(different)

# %% [markdown]
# ## 慢的 rank
#
# 结果都对，只是很慢。先猜一猜：rank 2 的用时是其他 rank 的三倍。哪个 rank 等待的时间*最少*？


# %%
def train_digits():
    images, labels = sp.data.digits("train")[:64]
    own = slice(sp.get_rank(), None, sp.get_world_size())
    model = sp.parallel.DistributedDataParallel(sp.models.mlp((64, 128, 10)))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sp.functions.cross_entropy(model(sp.Tensor(images[own])), sp.Tensor(labels[own])).backward()
        optimizer.step()


slow = replace(sp.cluster.load_cluster("a100", 4), stragglers={2: 3.0})
trace = sp.launch(train_digits, world_size=4, transport="inline", device=slow, record="full").trace
waiting = {}
for row in trace.summary():
    waiting[row["rank"]] = row["idle_time_s"] * 1e6
    print(f"rank {row['rank']}: computes {row['compute_time_s'] * 1e6:4.0f} µs, idle {waiting[row['rank']]:4.0f} µs")
assert min(waiting, key=waiting.get) == 2
show(trace.timeline(steps=1), "straggler")

# %% [markdown]
# 就是慢的那个：它最后到，从不等待。空闲时间多的 rank 没有问题；要找的是没有空闲的那个。
#
# ## 错误程序集
#
# `sp.zoo` 收集了许多错误的程序，每个程序有一个人们真的会犯的错误。`simparallel zoo` 列出它们。下面看其中六个。
# `X` 和 `Y` 就是上面的样本和目标值。第三个程序里的 `ssend` 也是发送，但是要等消息被接收后才返回。

# %%
found_by = Counter((entry.category, entry.found_by) for entry in map(sp.zoo.get, sp.zoo.names()))
categories = sorted({category for category, _ in found_by})
print(f"{len(sp.zoo.names())} programs")
with plt.style.context("tableau-colorblind10"):
    _, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
    left = np.zeros(len(categories), int)
    for how in ("the run", "assert_equivalent"):
        counts = np.array([found_by[category, how] for category in categories])
        ax.barh(categories, counts, left=left, label=f"found by {how}")
        left += counts
    ax.set(xlabel="wrong programs", xlim=(0, 20))
    ax.legend()
show(ax, "zoo")


def visit(*names):
    """打印错误的程序。"""
    for name in names:
        print("def " + sp.zoo.get(name).source.partition("\ndef ")[2])


def told(*names):
    """运行错误的程序，打印得到的提示。"""
    for name in names:
        entry = sp.zoo.get(name)
        print(f"{name}: {entry.title}.\n{entry.told}\n")


visit("collective_on_rank_0", "uneven_number_of_batches", "swapped_tags")

# %% [markdown]
# 先猜一猜，对三个程序分别回答：错在哪里？哪些 rank 在等待？等的是什么？

# %%
told("collective_on_rank_0", "uneven_number_of_batches", "swapped_tags")

# %% [markdown]
# 1. 只有 rank 0 调用 `all_reduce`。如果不比较调用，它会一直等 rank 1，而 rank 1 已经在 `broadcast` 中了。
# 2. rank 0 有三个样本，rank 1 有两个。所以 rank 0 在第三次反向中等待，而 rank 1 已经返回。
# 3. rank 0 等标签为 0 的消息被接收，rank 1 等标签为 1 的消息到来。
#
# 下面三个不会挂起。

# %%
visit("no_set_epoch", "clip_before_reduce", "draw_on_rank_0_only")

# %% [markdown]
# 先猜一猜：数值有什么不对？哪一个在损失曲线上看不出来？

# %%
told("no_set_epoch", "clip_before_reduce", "draw_on_rank_0_only")
assert {sp.zoo.get(name).found_by for name in ("clip_before_reduce", "draw_on_rank_0_only")} == {"assert_equivalent"}

# %% [markdown]
# 第一个程序每个 epoch 都按同样的顺序取样本。第二个程序里每个 rank 裁剪自己的梯度，而先裁剪再求均值，
# 不等于先求均值再裁剪。
# 第三个程序里 rank 0 比其他 rank 多抽了一个随机数，此后的随机数就都不同了。
#
# 三个在损失曲线上都看不出来：训练照常进行，只是差一点。在第二个程序中，所有 rank 甚至彼此一致，
# 只有与单个设备比较才能发现错误。
#
# 要改正一个程序，先复制它，修改，再让 `sp.zoo.check` 检查。下面改正第二个：先归约，再裁剪。


# %%
def clip_before_reduce():
    rank, size = sp.get_rank(), sp.get_world_size()
    model = sp.nn.Linear(4, 1)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    loss = sp.functions.mse_loss(model(X[rank::size]), Y[rank::size])
    loss.backward()
    for parameter in model.parameters():
        sp.all_reduce(parameter.grad, "mean")
    sp.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return model.state_dict()


sp.zoo.check("clip_before_reduce", clip_before_reduce)
print("mended")

# %% [markdown]
# ## 调试时会出什么问题
#
# **打印。** 所有 rank 同时打印；请写上 rank，或者查看 `runs/.../worker_N.log`。**屏障。** “在前面加一个屏障”
# 只会改变程序挂起的地方。**捕获错误。** 一个 rank 捕获了自己的错误并继续执行，就会与其他 rank 在不同的调用上相遇。
#
# 先猜一猜：rank 1 出了错，它捕获错误，然后“为了安全”调用屏障。你读到的是 rank 1 的错误吗？

# %%
print(sp.zoo.get("barrier_in_except").told)

# %% [markdown]
# 你读到的是调用不一致，而 `IndexError` 被掩盖了。让错误结束这个 rank 就好：其他 rank 会自己停下来。
#
# ## 练习
#
# 改正三个程序：`both_receive_first`、`early_stopping_by_rank` 和 `mean_of_means`。在这里它们带有参数，
# 并在不同数目的 rank 上运行。先看错误的版本：

# %%
visit("both_receive_first", "early_stopping_by_rank", "mean_of_means")

# %% [markdown]
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。答案在 `tutorials/solutions/08_debugging.py`。


# %%
def pass_around(x):
    """练习 1：把 x 发送给下一个 rank，返回上一个 rank 的 x。

    与 `both_receive_first` 类似，但是环上可以有任意个 rank。`x` 是数组，各个 rank 的形状和 dtype 相同；不要修改它。
    只有一个 rank 时，它把 x 传给自己。
    """
    raise NotImplementedError


sp.exercises.check("pass_around", pass_around)


# %%
def stop_together(losses, limit):
    """练习 2：返回所有 rank 的平均损失首次低于界限 `limit` 的那一步的编号（从 1 开始）。

    与 `early_stopping_by_rank` 类似：列表 `losses` 是这个 rank 每一步的损失，各个 rank 的步数相同。每一步由所有 rank
    共同决定。如果始终不低于界限，返回全部步数。
    """
    raise NotImplementedError


sp.exercises.check("stop_together", stop_together)


# %%
def mean_of_samples(rows):
    """练习 3：返回所有 rank 的全部样本的均值；`rows` 是这个 rank 的样本，形状为（个数, 2）。

    与 `mean_of_means` 类似：各个 rank 的样本数可以不同，也可以没有样本，但不会全都没有。
    每个 rank 都返回形状为 (2,) 的数组。
    """
    raise NotImplementedError


sp.exercises.check("mean_of_samples", mean_of_samples)
