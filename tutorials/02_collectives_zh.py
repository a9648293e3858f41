# %% [markdown]
# # 第 2 课：集合通信
#
# rank 是各自拥有独立内存的进程。*集合通信*是一组 rank 共同调用的函数，用来交换数组或把数组加起来。
# 所有并行训练都由少数几种集合通信搭建而成。学习本课需要会用 NumPy；第 1 课讲单个设备如何训练，本课用不到。
#
# 运行方式：`python tutorials/02_collectives_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 集合通信 | collective |
# | 广播、散发、收集、归约 | broadcast, scatter, gather, reduce |
# | 全收集、归约散发、全交换 | all-gather, reduce-scatter, all-to-all |
# | 根 | root |
# | 块 | chunk |
# | 消息 | message |
# | 死锁 | deadlock |
# | 环、树 | ring, tree |
# | 折半与倍增 | halving and doubling |
# | 延迟、带宽 | latency, bandwidth |
# | 模拟时间 | simulated time |
#
# 先看结果：四个进程把各自的数组加起来，每个进程都得到总和。

# %%
import re
from pathlib import Path

import numpy as np

import simparallel as sp
from simparallel.errors import RunFailedError


def add_up():
    x = 10.0 * sp.get_rank() + np.arange(4)
    before = x.copy()
    sp.all_reduce(x)  # 把 x 替换为所有 rank 的总和
    return before, x


results = sp.launch(add_up, world_size=4)
for rank, (before, after) in enumerate(results):
    print(f"rank {rank}: {before} -> {after}")

# %% [markdown]
# ## 与单个设备对比
#
# 集合通信应当返回什么，一行 NumPy 就能说清楚。每种集合通信都有这样一行，它就是该集合通信的测试。

# %%
expected = np.sum([before for before, _ in results], axis=0)
for _, after in results:
    np.testing.assert_array_equal(after, expected)
print("all ranks have", expected)

# %% [markdown]
# ## 谁拥有什么
#
# 为了看清数值的去向，给每个值一个专属的二进制位：rank 1 的第 2 块是只有第 6 位为 1 的整数。这样，
# 从一个和就能看出它的全部加数。图中用字母 `B` 表示 rank 1，所以这个值写作 `B2`，而 `AB2` 是 rank 0 和 rank 1 的第 2
# 块之和。
#
# 本课的大多数程序使用 `transport="inline"`：各个 rank 是轮流运行的线程，启动比进程快，结果相同。
#
# 先看有*根*的集合通信：通信之前只有根拥有数据，或者通信之后只有根得到结果。
#
# - `broadcast`（广播）把根的数组复制到所有 rank。
# - `scatter`（散发）把根的数组分成块，每个 rank 一块。
# - `gather`（收集）把每个 rank 的一块收集到根。
# - `reduce`（归约）把所有数组加起来，只有根得到结果。
#
# 先猜一猜：`scatter` 之后 rank 2 有什么？`reduce` 之后 rank 0 有什么？

# %%
P = 4


def tagged():
    return 1 << (P * sp.get_rank() + np.arange(P))


def at_its_place(chunk):
    """返回 P 个块：给定的块放在这个 rank 的位置，其余为空。"""
    return np.where(np.arange(P) == sp.get_rank(), chunk, 0)


def contents(rows):
    return [[[divmod(bit, P) for bit in range(P * P) if value >> bit & 1] for value in map(int, row)] for row in rows]


def before_and_after(collective):
    before, after = zip(*sp.launch(collective, world_size=P, transport="inline"), strict=True)
    name = collective.__name__
    return {f"before {name}": contents(before), f"after {name}": contents(after)}


def show(picture, name):
    """保存图片。notebook 也会在单元格下方显示它。"""
    sp.view.save_figure(picture, Path("pictures", "02_collectives", f"{name}.png"), dpi=100)


# %%
def broadcast():
    x = tagged() if sp.get_rank() == 0 else np.zeros(P, int)
    return x.copy(), sp.broadcast(x, src=0)


def scatter():
    chunks = list(tagged().reshape(P, 1)) if sp.get_rank() == 0 else None
    return tagged() if chunks else [0] * P, at_its_place(sp.scatter(chunks, src=0))


def gather():
    chunk = tagged()[sp.get_rank()]
    found = sp.gather(chunk.reshape(1), dst=0)
    return at_its_place(chunk), [0] * P if found is None else np.concatenate(found)


def reduce():
    return tagged(), sp.reduce(tagged(), dst=0)


panels = {}
for collective in (broadcast, scatter, gather, reduce):
    panels |= before_and_after(collective)
assert panels["after scatter"][2] == [[], [], [(0, 2)], []]
assert panels["after reduce"][0][3] == [(0, 3), (1, 3), (2, 3), (3, 3)]
show(sp.view.plot_chunks(panels), "one_and_all")

# %% [markdown]
# rank 2 只有根的第 2 块。`reduce` 之后，根有总和，其他 rank 的数据不变。`gather` 是 `scatter` 的逆过程；把 `broadcast`
# 的方向反过来就是 `reduce`：送出副本的地方，变成收进加数的地方。反向传播正是利用了这一点：广播的梯度是归约。
#
# ## 从所有到所有
#
# 另外四种没有根：每个 rank 都给出数据，也都得到数据。
#
# - `all_gather`（全收集）：每个 rank 有一块，得到所有块。
# - `reduce_scatter`（归约散发）：每个 rank 有所有块，得到其中一块的总和。
# - `all_reduce`：每个 rank 得到所有块的总和。
# - `all_to_all`（全交换）：rank `i` 的第 `j` 块成为 rank `j` 的第 `i` 块。
#
# 先猜一猜：把所有 rank 的块写成矩阵，每个 rank 一行。`all_to_all` 对这个矩阵做了什么？


# %%
def all_gather():
    chunk = tagged()[sp.get_rank()]
    return at_its_place(chunk), sp.all_gather(chunk.reshape(1))


def reduce_scatter():
    return tagged(), at_its_place(sp.reduce_scatter(tagged()))


def all_reduce():
    return tagged(), sp.all_reduce(tagged())


def all_to_all():
    return tagged(), sp.all_to_all(tagged())


panels = {}
for collective in (all_gather, reduce_scatter, all_reduce, all_to_all):
    panels |= before_and_after(collective)
matrix = panels["before all_to_all"]
assert panels["after all_to_all"] == [list(column) for column in zip(*matrix, strict=True)]
show(sp.view.plot_chunks(panels), "all_and_all")

# %% [markdown]
# 它把矩阵转置了。
#
# 再看一遍图：`reduce_scatter` 结束时数据所在的位置，正是 `all_gather` 开始时的位置。因此两者先后相接就是 `all_reduce`。
# 实际的系统就利用了这一点：分片训练（Rajbhandari 等，2020）中，每个 rank 只存放参数的一个切片，
# 并且在不同的时刻分别调用这两半。


# %%
def in_two_halves():
    x = np.random.default_rng(sp.get_rank()).normal(size=8)
    return sp.all_gather(sp.reduce_scatter(x)), sp.all_reduce(x.copy())


for halves, whole in sp.launch(in_two_halves, world_size=P):
    np.testing.assert_allclose(halves, whole, rtol=1e-12)
print("reduce_scatter, then all_gather: the result of all_reduce")

# %% [markdown]
# ## 消息
#
# 集合通信的下面，是从一个 rank 到另一个 rank 的消息：`send(x, dst)` 和 `recv(x, src)`。`send` 返回之后就可以修改 `x`；
# `recv` 一直等到消息填满它的数组。`isend` 启动一条消息后立即返回，它的 `wait()` 在消息发出之后返回。
#
# 下面每个 rank 把一个 8 MB 的数组传给下一个 rank，形成一条链。设备是描述出来的：一条消息需要 5 µs，每个字节再加 0.1
# ns。图中显示的是这种*模拟时间*。
#
# 先猜一猜：数组从 rank 0 到 rank 3 需要多长时间？如果分成八段、每段 1 MB 呢？

# %%
link = sp.LinkSpec(latency_s=5e-6, bandwidth_bytes_per_s=10e9)


def pass_on(pieces):
    rank, last = sp.get_rank(), sp.get_world_size() - 1
    x = np.full(1_000_000, float(rank))  # 8 MB
    for piece in np.array_split(x, pieces):
        if rank > 0:
            sp.recv(piece, rank - 1)
        if rank < last:
            sp.send(piece, rank + 1)
    return x[0], x[-1]


times = {}
for pieces in (1, 8):
    run = sp.launch(pass_on, (pieces,), world_size=P, link=link, transport="inline")
    assert run == [(0.0, 0.0)] * P
    times[pieces] = run.trace.makespan_s * 1e3
    print(f"pieces: {pieces}, time: {times[pieces]:.3f} ms")
show(sp.view.plot_timeline(run.trace.events, title="Eight pieces, passed on in a chain"), "chain")
assert np.isclose(times[1], 3 * (0.005 + 0.8))
assert np.isclose(times[8], (3 + 7) * (0.005 + 0.1))

# %% [markdown]
# 整段传送时，一条链路在传，其余链路都空闲：共需三个 0.805 ms。分段之后，各条链路同时工作：rank 1
# 转发一段的同时接收下一段，十轮、每轮 0.105 ms 就够了。下面所有快速算法都这样做：切开数组，让每条链路都忙起来。
#
# （细线是不需要等待的 `recv`：消息在该 rank 发送时已经到达。）
#
# ## 互相等待的两个 rank
#
# 先猜一猜：两个 rank 都先从对方接收，然后再发送。会发生什么？


# %%
def both_receive_first():
    other = 1 - sp.get_rank()
    received = np.empty(3)
    sp.recv(received, other)
    sp.send(np.ones(3), other)


def said(program, world_size=2):
    """运行一个错误的程序，返回错误信息，不含调用栈和路径。"""
    try:
        sp.launch(program, world_size=world_size, echo=False)
    except RunFailedError as error:
        return re.sub(r" at \S+:(\d+)", r", line \1", str(error).split("\n\n")[0])


deadlock = said(both_receive_first)
print(deadlock)
assert "DeadlockError" in deadlock

# %% [markdown]
# 这就是*死锁*：没有一个 rank 能继续。大多数系统会一直挂在这里，直到有人来终止。这里的系统发现所有 rank 都在等待，
# 并指出那两行代码。
#
# 解决办法是先启动消息，再接收，最后等待消息发出。
#
# 先猜一猜：下面的程序能正常运行吗？


# %%
def exchange():
    rank = sp.get_rank()
    received = np.empty(3)
    sending = sp.isend(np.full(3, rank), 1 - rank)
    sp.recv(received, 1 - rank)
    sending.wait()
    return received[0]


wrong_dtype = said(exchange)
print(wrong_dtype)
assert "int64" in wrong_dtype

# %% [markdown]
# 还不能：`np.full(3, 0)` 生成的是整数，而接收方准备的是浮点数组。消息的形状和数据类型必须与接收数组一致。
# 换成浮点数就可以了：


# %%
def exchange_floats():
    rank = sp.get_rank()
    received = np.empty(3)
    sending = sp.isend(np.full(3, float(rank)), 1 - rank)
    sp.recv(received, 1 - rank)
    sending.wait()
    return float(received[0])


swapped = sp.launch(exchange_floats, world_size=2)
print("received by ranks 0 and 1:", *swapped)
assert swapped == [1, 0]

# %% [markdown]
# ## 用消息实现 all-reduce
#
# 最直接的方法：所有 rank 把数组发给 rank 0，rank 0 加起来，再把总和发回去。这样一切都由 rank 0 接收和发送，
# 其余链路都空闲。
#
# *环*算法（Patarasuk 和 Yuan，2009）让所有链路始终忙碌。各个 rank 围成一圈，数组切成与 rank 数相同的块。每一轮，每个
# rank 向下一个 rank 发送一块：
#
# - 前 `P - 1` 轮，接收方把收到的块*加*到自己的块上。这是归约散发。
# - 后 `P - 1` 轮，接收方用收到的块*替换*自己的块。这是全收集。
#
# 为了便于观察，这里把四个 rank 放在一个进程里。`state[rank, chunk]` 逐轮变化。

# %%
values = np.array([[1 << (P * rank + chunk) for chunk in range(P)] for rank in range(P)])
states = [values]
for turn in range(2 * (P - 1)):
    state = states[-1].copy()
    for rank in range(P):
        chunk, after = (rank - 1 - turn) % P, (rank + 1) % P
        arriving = states[-1][rank, chunk]
        state[after, chunk] = arriving + (state[after, chunk] if turn < P - 1 else 0)
    states.append(state)
assert (states[-1] == values.sum(axis=0)).all()
titles = ["start", *(f"turn {turn}: {'add' if turn < P - 1 else 'replace'}" for turn in range(2 * (P - 1)))]
panels = {title: contents(state) for title, state in zip(titles, states, strict=True)}
show(sp.view.plot_chunks(panels, title="A ring of four ranks"), "ring")

# %% [markdown]
# 跟踪第 3 块：它从 rank 0 出发，第 2 轮之后已经经过所有 rank。这时每个 rank 各有一个完整的块，即有四条色带的块。
# 然后这些完整的块再绕一圈。
#
# 先猜一猜：数组有 `n` 个字节时，每个 rank 发送多少字节？如果有 1000 个 rank 呢？
#
# 库里有这个算法。`Ledger` 统计每一步的消息数和字节数：


# %%
def counted(algorithm):
    with sp.Ledger() as ledger:
        sp.all_reduce(np.ones(1000, np.float32), algorithm=algorithm)
    return ledger


ledger = sp.Ledger.join(sp.launch(counted, ("ring",), world_size=P, transport="inline"))
print(ledger.table())
assert {entry.total.sent_bytes for entry in ledger.entries} == {2 * (P - 1) * 4000 // P}

# %% [markdown]
# 共 `2 (P - 1)` 轮，每轮 `n / P` 个字节，合计 `2 (P - 1) / P n` 个字节；这里数组有 4000 字节，每个 rank 发送 6000
# 字节。即使有 1000 个 rank，也不到 `2 n`。代价是轮数：它随 `P` 增长。
#
# ## 减少轮数
#
# *树*算法成对相加：rank 1 发给 rank 0，rank 3 发给 rank 2，然后 rank 2 发给 rank 0。`log2 P` 轮之后 rank 0 得到总和，
# 再沿同一棵树发回去。但是每条消息都是整个数组。
#
# *折半与倍增*（Rabenseifner，2004）轮数少，字节也少：每个 rank 先与一个伙伴交换半个数组，再与另一个伙伴交换四分之一，
# 依此类推，然后按原路返回。它要求 rank 数是 2 的幂。多出来的 rank 必须先把数组交给邻居，最后再取回结果。
#
# 先猜一猜：有八个 rank。哪种算法中，最忙的 rank 发送的字节最少？哪种算法轮数最少？

# %%
algorithms = ("naive", "ring", "tree", "halving_doubling")
figures = {}
for ranks in (8, 6):
    for algorithm in algorithms:
        entries = sp.Ledger.join(sp.launch(counted, (algorithm,), world_size=ranks, transport="inline")).entries
        busiest = max(entry.total.sent_bytes for entry in entries) / 4000
        figures[ranks, algorithm] = len(entries[0].steps), busiest
        print(
            f"{ranks} ranks, {algorithm:<16} {len(entries[0].steps):2d} turns, at most {busiest:.2f} n bytes of a rank"
        )
assert figures[8, "ring"] == (14, 1.75)
assert figures[8, "halving_doubling"] == (6, 1.75)
assert figures[8, "tree"] == (6, 3)
assert figures[8, "naive"] == (14, 7)

# %% [markdown]
# 八个 rank 时，折半与倍增的字节数与环一样少，轮数与树一样少。六个 rank 时，它最忙的 rank 发送的字节比环算法多。
#
# ## 延迟与带宽
#
# 一条 `m` 字节的消息需要 `α + m β`：`α` 是*延迟*，`1 / β` 是*带宽*（Hockney，1994）。算法的时间是各轮之和，
# 每轮取最大的消息。设 `q` 是不超过 `P` 的最大的 2 的幂：
#
# | `n` 字节的 all-reduce | 轮数 `α` | 字节 `n β` |
# |---|---|---|
# | 直接 | `2 (P - 1)` | `2 (P - 1)` |
# | 环 | `2 (P - 1)` | `2 (P - 1) / P` |
# | 树 | `2 ⌈log2 P⌉` | `2 ⌈log2 P⌉` |
# | 折半与倍增，`P = q` | `2 log2 q` | `2 (q - 1) / q` |
# | 折半与倍增，`P > q` | `2 log2 q + 2` | `2 (q - 1) / q + 2` |
#
# 数组小时只有轮数起作用，数组大时只有字节数起作用。模拟时钟使用这个模型，延迟和带宽取自描述的链路。
#
# 先猜一猜：有六个 rank。数组多大时环算法最快？

# %%
sizes = [4**k for k in range(1, 12)]  # 4 B 到 4 MiB


def of_all_sizes(algorithm):
    for size in sizes:
        sp.all_reduce(np.ones(size // 4, np.float32), algorithm=algorithm)


points = {}
for ranks in (6, 8):
    for algorithm in algorithms:
        # 预演：同样的程序，同样的时钟，但数组没有数据。
        events = sp.dry_run(of_all_sizes, (algorithm,), world_size=ranks, device="a100", link=link).trace.events
        calls = [event for event in events if event.kind == "collective" and event.rank == 0]
        seconds = [(call.sim_end_ps - call.sim_start_ps) / 1e12 for call in calls]
        points.setdefault(("all_reduce", ranks), {})[algorithm] = list(zip(sizes, seconds, strict=True))
show(sp.view.plot_collectives(points), "sizes")

# %% [markdown]
# 曲线左边是平的，那里只有延迟起作用；右边随大小上升。环与折半与倍增在哪里相交？由上表，两者分别是 `10 α + 5/3 n β` 和
# `6 α + 7/2 n β`，交点在 `n = 4 α / (11/6 β)`：

# %%
alpha, beta = 5e-6, 1 / 10e9
crossing = 4 * alpha / (11 / 6 * beta)
print(f"six ranks: the ring is the fastest above {crossing / 1000:.0f} kB")
fastest = {
    ranks: [min(algorithms, key=lambda name: points["all_reduce", ranks][name][i][1]) for i in range(len(sizes))]
    for ranks in (6, 8)
}
assert [name == "ring" for name in fastest[6]] == [size > crossing for size in sizes]
assert "ring" not in fastest[8]
for size, time_s in points["all_reduce", 6]["ring"]:
    assert np.isclose(time_s, 10 * alpha + 10 / 6 * size * beta, rtol=1e-4)

# %% [markdown]
# 在这个模型里，八个 rank 时环算法从不领先。但在真实网络上它常常领先：环上的邻居彼此靠近，而折半与倍增的伙伴相距较远，
# 还要共用链路。
#
# ## 选择算法
#
# `algorithm=` 为一次调用选择算法；用在 `launch` 中，则为所有调用选择。默认值是 `direct`：同一台机器上的 rank
# 直接读取彼此的内存，不需要消息。
#
# 先猜一猜：用不同算法得到的和相同吗？各个 rank 上得到的和相同吗？


# %%
def sum_of_floats():
    x = np.random.default_rng(sp.get_rank()).normal(size=1000)
    return sp.all_reduce(x)


sums = {name: sp.launch(sum_of_floats, world_size=6, algorithm=name) for name in ("direct", "ring", "tree")}
for name, by_rank in sums.items():
    between_ranks = max(np.abs(by_rank[0] - other).max() for other in by_rank)
    to_direct = np.abs(by_rank[0] - sums["direct"][0]).max()
    print(f"{name:<7} largest difference between ranks {between_ranks:g}, to direct {to_direct:.0e}")
    assert between_ranks == 0
    assert to_direct < 1e-14
assert not np.array_equal(sums["ring"][0], sums["tree"][0])

# %% [markdown]
# 所有 rank 得到完全相同的二进制位，因为每个元素只在一个 rank 上相加。不同算法之间，最后几位有差别：
# 它们相加的次序不同，而浮点数的和与次序有关。
#
# ## 常见错误
#
# **调用不同。** 所有 rank 必须以相同的次序进行相同的调用。先猜一猜：rank 0 调用 `all_reduce`，而 rank 1 调用
# `broadcast`。一个不比较调用的系统会怎样？


# %%
def different_calls():
    x = np.ones(3)
    if sp.get_rank() == 0:
        sp.all_reduce(x)
    else:
        sp.broadcast(x, src=0)


mismatch = said(different_calls)
print(mismatch)
assert "CollectiveMismatchError" in mismatch

# %% [markdown]
# 它会挂起，或者悄无声息地把两个调用的数据混在一起。这里每个调用都带有一份说明，各个 rank
# 在改动数据之前先比较这些说明。
#
# **写在 `if` 里的调用。** 最常见的原因：只有一个 rank 要打印平均损失。


# %%
def report():
    loss = np.array([1.0 + sp.get_rank()])
    if sp.get_rank() == 0:
        sp.all_reduce(loss, "mean")
        print("mean loss", loss)


forgotten = said(report)
print(forgotten)
assert "rank 1" in forgotten

# %% [markdown]
# 所有 rank 都必须调用 `all_reduce`，只有 `print` 应当写在 `if` 里。
#
# **数组被覆盖。** `all_reduce`、`broadcast` 和 `reduce` 会写入它们的参数。先猜一猜：下面的程序返回什么？


# %%
def replaced():
    x = np.ones(2)
    total = sp.all_reduce(x)
    return x, total / sp.get_world_size() - x


deviation = sp.launch(replaced, world_size=4, transport="inline")[0]
print("x is", deviation[0], "and mean - x is", deviation[1])
assert deviation[0].tolist() == [4, 4]
assert deviation[1].tolist() == [-3, -3]

# %% [markdown]
# 全是 1 的数组，平均值是 1，偏差应当是零。但是 `x` 现在已经是总和了。请使用 `sp.all_reduce(x.copy())`，或者用 `out=`
# 指定存放结果的数组。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。检查时所有 rank 都是线程，
# 发生死锁的答案会被终止。答案在 `tutorials/solutions/02_collectives.py`。


# %%
def ring_all_reduce(x):
    """练习 1：用环形传递的消息，返回一维数组 `x` 在所有 rank 上的总和。

    只用 `sp.isend` 和 `sp.recv`，并且只发给下一个 rank。`np.array_split(x, ranks)` 把数组切成块，
    有些块会少一个元素。
    """
    raise NotImplementedError


sp.exercises.check("ring_all_reduce", ring_all_reduce)


# %%
def tree_broadcast(x, root):
    """练习 2：用 rank `root` 的数组填充每个 rank 的数组 `x`，并返回它。

    只用消息。一轮之中，一个 rank 发送一条消息，或者接收一条消息。最多 `ceil(log2 P)` 轮，
    所以每一轮中，已有数据的 rank 都要转发。
    """
    raise NotImplementedError


sp.exercises.check("tree_broadcast", tree_broadcast)


# %%
def all_to_all_by_messages(x):
    """练习 3：返回与 `sp.all_to_all(x)` 相同的结果：rank i 的第 j 块成为 rank j 的第 i 块。

    只用消息。`x` 是一维数组，元素数能被 `P` 整除。
    """
    raise NotImplementedError


sp.exercises.check("all_to_all_by_messages", all_to_all_by_messages)


# %%
def fastest_algorithm(ranks, size_bytes, latency_s, bandwidth_bytes_per_s):
    """练习 4：按上表返回最快的 all-reduce 算法："ring"、"tree" 或 "halving_doubling"。

    如果两种一样快，哪个答案都对。
    """
    raise NotImplementedError


sp.exercises.check("fastest_algorithm", fastest_algorithm)
