# %% [markdown]
# # 第 10 课：同一个脚本在 GPU 和集群上运行
#
# 训练脚本不应该关心自己在哪里运行。本课用同一个脚本，先单独运行，再在四个 rank 上、在两个节点上、
# 用其他启动器的选项运行，并在目前可能的范围内放到 GPU 上。学习本课需要了解数据并行（第 3 课），
# 检查点一节还需要了解布局（第 4 课）。不需要 GPU，也不需要 MPI：缺少什么，相应的单元格会说明。
#
# 运行方式：`python tutorials/10_gpu_and_cluster_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 脚本和日志写到当前目录。图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 启动器 | launcher |
# | 节点 | node |
# | 节点内编号 | local rank |
# | 环境变量 | environment variable |
# | 主机文件 | host file |
# | 槽位 | slot |
# | rank 表 | rank table |
# | 检查点 | checkpoint |
# | 切片 | slice |
# | 替身 | stand-in |
#
# 先看结果：一个脚本，一条命令，在四个 rank 上运行。

# %%
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import ClusterError, DeviceMismatchError, InputError

Path("train.py").write_text("""
import simparallel as sp

sp.init()
sp.set_seed(1)
images, labels = sp.data.digits("train")[:64]
mine = slice(sp.get_rank(), None, sp.get_world_size())
model = sp.parallel.DistributedDataParallel(sp.nn.Linear(64, 10))
optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = sp.functions.cross_entropy(model(sp.Tensor(images[mine])), sp.Tensor(labels[mine]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sp.all_reduce(loss, "mean")
    sp.log(loss=loss.item())
print(f"rank {sp.get_rank()} of {sp.get_world_size()}: loss {loss.item():.4f}")
""")


def start(command, **variables):
    """用当前的 Python 启动 simparallel 的命令或脚本。"""
    program, *words = shlex.split(command)
    module = ["-m", "simparallel"] if program == "simparallel" else []
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"} | variables
    return subprocess.Popen(
        [sys.executable, *module, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*commands, **variables):
    """同时运行几条命令；按顺序打印并返回各个 rank 的输出，以及错误。"""
    ended = [(each, *each.communicate()) for each in [start(command, **variables) for command in commands]]
    lines = sorted(line for _, out, _ in ended for line in out.splitlines() if re.match(r"\[rank|rank \d", line))
    errors = [error for each, _, error in ended if each.returncode]
    for text in (*lines, *errors):
        print(text.partition("\n\nAlso failed")[0].rstrip())
    return lines, "".join(errors)


four, _ = run("simparallel run -n 4 train.py")

# %% [markdown]
# ## 与单个设备对比
#
# 先猜一猜：不用启动器时，脚本就是一个进程。它会打印出怎样的损失？

# %%
alone, _ = run("python train.py")
assert len(four) == 4
assert {line.partition("loss ")[2] for line in four} == {alone[0].partition("loss ")[2]}

# %% [markdown]
# 损失相同。`sp.init()` 会弄清楚自己在哪里：启动器通过环境变量告诉它；没有这些变量时，就只有一个 rank。
# 批次始终是同样的 64 张图片，`mine` 是这个 rank 的那一部分。
#
# 下面一步一步来。
#
# ## rank 得到哪些信息
#
# 每种启动器都为每个进程设置环境变量。下面打印的是 PyTorch 的名字，MindSpore 的名字（`RANK_ID`、`RANK_SIZE`、
# `DEVICE_ID`）也同时设置。第二个脚本先在每个节点内、再在两个节点之间对 4 MB 求和。
#
# 先猜一猜：四个 rank 分布在两个节点上。rank 2 在几号节点上？它在这个节点内是几号？

# %%
Path("who.py").write_text("""
import os

import simparallel as sp

sp.init()
names = ("RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(f"rank {sp.get_rank()}:", *(f"{name}={os.environ[name]}" for name in names))
""")
one_command, _ = run("simparallel run -n 4 --nodes 2 --record off who.py")


def show(picture, name):
    """保存图片。notebook 还会在单元格下面显示它。"""
    sp.view.save_figure(picture, Path("pictures", "10_gpu_and_cluster", f"{name}.png"), dpi=100)


Path("links.py").write_text("""
import numpy as np

import simparallel as sp

sp.init()
nodes = [sp.new_group([0, 1]), sp.new_group([2, 3])]
x = np.ones(1_000_000, np.float32)
sp.all_reduce(x, group=nodes[sp.get_node_rank()])
sp.all_reduce(x)
""")
run("simparallel run -n 4 --nodes 2 --record full --device dgx-a100 links.py")
trace = sp.Trace.load("runs/links/trace.json")
times = [e.sim_end_ps - e.sim_start_ps for e in trace.events if e.rank == 0 and e.name == "all_reduce"]
print(f"4 MB inside a node: {times[0] / 1e6:.0f} µs, among both nodes: {times[1] / 1e6:.0f} µs")
assert times[1] > 3 * times[0]
show(trace.timeline(), "links")

# %% [markdown]
# rank 2 是节点 1 的 0 号进程。*rank* 对所有进程编号，*节点内编号*（local rank）对一个节点的进程编号，
# 用来选择 GPU。连续的 rank 在同一个节点上，节点内的链路更快，所以哪些 rank 之间通信最多很重要。
#
# ## 其他启动器，同样的变量
#
# 在集群上，每个节点启动一条命令。torchrun 和 msrun 各有自己的选项，`simparallel torchrun` 和
# `simparallel msrun` 接受同样的选项。同时运行两条这样的命令，就相当于一台机器上的两个节点。
#
# 先猜一猜：下面每条命令启动两个进程。第二条命令的进程怎么知道自己是 rank 2 或 rank 3？

# %%
PORT = str(20_000 + os.getpid() % 10_000)  # 同一个任务的节点用同一个端口，其他任务用别的
torchrun = f"simparallel torchrun --nnodes 2 --nproc-per-node 2 --master-port {PORT} --record off"
two_commands, _ = run(f"{torchrun} --node-rank 0 who.py", f"{torchrun} --node-rank 1 who.py")
assert two_commands == one_command

# %% [markdown]
# 根据它的 `--node-rank` 和每个节点的进程数：1 * 2 + 0 和 1 * 2 + 1。变量与上面一条命令的完全相同。
# msrun 的写法是 `--worker_num 4 --local_worker_num 2 --node_rank 0`。
#
# 有变量就够了，并不一定需要启动器。下面用 MindSpore 的变量名逐个启动两个进程：

# %%
pair = [start("python train.py", RANK_ID=str(rank), RANK_SIZE="2", MASTER_PORT=PORT) for rank in (0, 1)]
for process in pair:
    said = process.communicate()[0].strip()
    print(said)
    assert said.endswith(four[0].partition("loss ")[2])

# %% [markdown]
# ## 主机文件与 rank 表
#
# 哪些 rank 在哪个节点上？MPI 从*主机文件*读取：每个节点一行，写明它的 rank 数（槽位）。
# MindSpore 读取 *rank 表*：一个 JSON 文件，列出服务器和它们的设备。
#
# 先猜一猜：在下面的主机文件里，`node2` 有哪些 rank？

# %%
Path("hosts").write_text("node1 slots=3\nnode2 slots=1\nnode3 slots=2\n")
nodes = sp.cluster.read_host_file("hosts")
print("host file:", nodes)
assert nodes[1] == (3,)

run("simparallel rank-table make --servers 2 --devices 2 -o table.json")
servers = json.loads(Path("table.json").read_text())["server_list"]
for server in servers:
    print(server["server_id"], "has the ranks", [int(device["rank_id"]) for device in server["device"]])
with_table, _ = run("simparallel run --rank-table table.json --record off who.py")
assert with_table == one_command

cluster = sp.cluster.describe(6, "dgx-a100", nodes=nodes)
times = [[cluster.message(10**6, src, dst).time_ps / 1e6 for dst in range(6)] for src in range(6)]
_, ax = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
image = ax.imshow(times, cmap="cividis_r")
for src, dst in np.ndindex(6, 6):
    ax.text(dst, src, f"{times[src][dst]:.0f}", ha="center", va="center", color="w" if times[src][dst] > 20 else "k")
ax.set(title="A message of 1 MB [µs]", xlabel="to rank", ylabel="from rank", xticks=range(6), yticks=range(6))
show(ax, "messages")

# %% [markdown]
# 只有 rank 3：`node1` 有 rank 0 到 2。启动器从 rank 表得到 rank 数和节点数。
# 图中的集群按主机文件划分节点：浅色方块是节点，
# 发往其他节点的消息都很慢。
#
# ## 日志
#
# 一次运行会写一个文件夹：`worker_N.log` 是 rank N 的输出，`scheduler.log` 是所有 rank 的日志记录，
# 另外还有事件记录、时间线，以及脚本交给 `sp.log` 的数值。集群上的启动器也为每个 rank 写一份日志。

# %%
folder = Path("runs", "train")
print(*sorted(path.name for path in folder.iterdir() if path.is_file()))
print("worker_3.log:", Path(folder, "worker_3.log").read_text().strip())
losses = json.loads(Path(folder, "metrics.json").read_text())["metrics"]["loss"]  # （步，损失）
show(sp.view.plot_loss({"four ranks": losses}, title="Noted with sp.log"), "loss")

# %% [markdown]
# ## 多台机器：MPI
#
# 共享内存止于一台机器的边界。跨越机器时，消息通过 MPI 传送，脚本不变：
#
# ```sh
# pip install ".[mpi]" mpich
# simparallel run --transport mpi --mpiexec "mpiexec -hosts node1,node2" -n 4 train.py
# ```
#
# 先猜一猜：损失是许多数的和，而这些数由消息以某种顺序送达。结果与共享内存逐位相同吗？

# %%
has_mpi = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpiexec") is not None
if has_mpi:
    by_mpi, _ = run("simparallel run --transport mpi -n 4 --log-dir runs/mpi train.py")
    assert {line.partition("loss ")[2] for line in by_mpi} == {alone[0].partition("loss ")[2]}
else:
    print("not run here: mpi4py or mpiexec is missing")
    _, refusal = run("simparallel run --transport mpi -n 4 train.py")

# %% [markdown]
# 相同：每种算法的加法顺序都与传输方式无关。（装有 MPI 时，上面的单元格会比较打印出的数字。）如果缺少 MPI，
# 命令会说明要安装什么，不启动任何进程。
#
# ## GPU
#
# 算子、模块和优化器调用数据所属的数组库：内存中的数组用 NumPy，GPU 上的数组用 CuPy。`model.to("cuda:0")` 移动模型。
# `simparallel run --array cupy train.py` 把一次运行中每个新的张量放到所属 rank 的 GPU 上，脚本不变；
# 在 Python 中是 `launch(..., array="cupy")` 和 `Cluster(array="cupy")`。这些都在一块 H100 上运行过。
# 本项目的测试则处处可以运行，用的是 CuPy 的一个*替身*（`tests/stand_in`）：它用 NumPy 计算，并拒绝 CuPy 拒绝的操作。
#
# 先猜一猜：模型移动之后，梯度在哪里？没有 GPU 时，要求 GPU 的脚本会怎样？


# %%
def step_on(device):
    sp.set_seed(3)
    model = sp.nn.Sequential(sp.nn.Linear(4, 8), sp.nn.ReLU(), sp.nn.Linear(8, 2)).to(device)
    x = sp.Tensor(np.ones((3, 4), np.float32)).to(device)
    loss = (model(x) ** 2).sum()
    loss.backward()
    return type(model[0].weight.grad.data).__module__, loss.item()


kind, loss = step_on("cpu")
print(f"cpu: loss {loss:.4f}, gradients are arrays of {kind}")
try:
    kind, loss_on_gpu = step_on("cuda:0")
    print(f"cuda:0: loss {loss_on_gpu:.4f}, gradients are arrays of {kind}")
    assert np.isclose(loss, loss_on_gpu)
    sp.Tensor(np.ones(3)).to("cuda:0") + np.ones(3)
except (InputError, DeviceMismatchError) as error:
    print(error)

# %% [markdown]
# 在模型所在的设备上。没有 GPU 时，脚本在移动处停下：如果悄悄改用 CPU，运行会很慢，而且没有人知道原因。
# 有 GPU 时，最后一行是把程序搬到 GPU 时的一个常见错误：有一个数组还留在主机内存里，错误信息会指出是哪一个。
#
# ## PyTorch 程序
#
# 使用 `--as torch` 时，这次运行中的 `import torch` 导入的是 simparallel 的模块 `simparallel.compat.torch`。
# 它提供 PyTorch 的名字，调用的是前面学过的函数。没有 GPU 时，`cuda:k` 表示第 k 个模拟设备。
# 下面的程序只导入 torch：

# %%
Path("torch_train.py").write_text("""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.manual_seed(0)
device = torch.device("cuda", dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 4, device=device) * (dist.get_rank() + 1)
for _ in range(3):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = loss.detach()
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {torch.__name__} says {total.item():.4f}")
""")
front, _ = run("simparallel run --as torch -n 2 --record off torch_train.py")
assert "simparallel.compat.torch" in front[-1]

# %% [markdown]
# 在装有 PyTorch 的集群上，`torchrun --nproc-per-node 2 torch_train.py` 在 GPU 上运行同一个文件。
# 对 MindSpore 程序则用 `--as mindspore`。
#
# ## 换一个 rank 数也能恢复的检查点
#
# 集群上的任务提前结束，下一个任务得到的节点更少。所以检查点不能依赖保存它的 rank 数。
# 这里四个 rank 各持有一个矩阵和 Adam 状态的切片。它们在三步之后保存，然后再做两步。
#
# 先猜一猜：由三个 rank 恢复时，矩阵的 12 行中 rank 1 得到第 4 到 7 行。它从哪些旧 rank 的文件读取这些行？


# %%
def sliced():
    ranks = sp.Layout((sp.get_world_size(),), ("tp",))
    sp.set_seed(5)
    model = sp.nn.Sequential(sp.nn.Linear(6, 12), sp.nn.ReLU(), sp.nn.Linear(12, 3))
    sp.distribute_module(model, ranks, {"0.weight": ("tp", "None"), "0.bias": ("tp",)})
    return model, sp.optim.Adam(model.parameters(), lr=0.01), ranks


def steps(count, model, optimizer, ranks):
    x, losses = sp.distribute_tensor(np.ones((4, 6), np.float32), ranks("None", "None")), []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save():
    model, optimizer, ranks = sliced()
    steps(3, model, optimizer, ranks)
    sp.CheckpointManager("checkpoints").save(3, model=model, optimizer=optimizer)
    return steps(2, model, optimizer, ranks)


def restore():
    model, optimizer, ranks = sliced()
    checkpoint = sp.CheckpointManager("checkpoints").restore(model=model, optimizer=optimizer)
    return checkpoint.step, model[0].weight.data.shape, steps(2, model, optimizer, ranks)


shutil.rmtree("checkpoints", ignore_errors=True)
expected = sp.launch(save, world_size=4, transport="inline")[0]
for count in (1, 3, 6):
    step, shape, found = sp.launch(restore, world_size=count, transport="inline")[0]
    print(f"{count} ranks go on from step {step}, each with a slice of {shape}")
    np.testing.assert_allclose(found, expected, rtol=1e-5)

by_4, by_3 = (sp.Layout((count,), ("tp",))("tp", "None") for count in (4, 3))
show(sp.view.plot_slices([("saved by four", by_4, (12, 6)), ("read by three", by_3, (12, 6))]), "slices")

# %% [markdown]
# 从 rank 1 和 rank 2 的文件：第 4 到 7 行是旧切片 1 的最后两行和旧切片 2 的前两行。
# 检查点的清单写明哪个文件有哪些行。中间不需要汇集整个张量：

# %%
manifest = json.loads(next(Path("checkpoints").rglob("manifest.json")).read_text())
blocks = manifest["tensors"]["model.0.weight"][0]["blocks"]
for block in blocks:
    print(f"rows {block['start'][0]} to {block['start'][0] + block['shape'][0] - 1}: {block['file']}")

# %% [markdown]
# ## 会出什么问题
#
# **一个节点一直没有来。** **一个 rank 失败。** **主机文件有错。** 先猜一猜：两个节点中有一个没有启动，
# 另一个应该怎么做？错误信息应当说明什么？

# %%
_, absent = run(f"{torchrun} --node-rank 0 --cluster-time-out 2 who.py")
assert "never came" in absent

Path("bad.py").write_text("""
import numpy as np

import simparallel as sp

sp.init()
for step in range(3):
    sp.all_reduce(np.ones(4))
    if step == 1 and sp.get_rank() == 2:
        raise ValueError("a bad batch")
""")
_, failed = run("simparallel run -n 4 --record off bad.py")
assert "Stopped because of it: ranks 0, 1, 3." in failed

Path("hosts").write_text("node1 slots=3\nnode2 slots=no\n")
try:
    sp.cluster.read_host_file("hosts")
except ClusterError as error:
    print(error)

# %% [markdown]
# 等待启动是有期限的，并且会指出哪些 rank 没有来，以及启动它们的命令。一个 rank 失败，所有 rank 都结束，
# 报告的是最先的失败；退出状态不为 0，批处理系统由此得知。下一个任务从最后的检查点恢复。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。
# 答案在 `tutorials/solutions/10_gpu_and_cluster.py`。


# %%
def ranks_of_node(text):
    """练习 1：由主机文件的文本返回字典：主机 -> 它的 rank 列表。

    一行形如 "node1 slots=3"。空行和 # 之后的内容不算。再次出现的主机得到更多的 rank。rank 按行的顺序编号。
    """
    raise NotImplementedError


sp.exercises.check("ranks_of_node", ranks_of_node)


# %%
def local_rank(rank, slots):
    """练习 2：返回一个 rank 的元组（节点编号，节点内编号）；节点 i 有 `slots[i]` 个连续的 rank。"""
    raise NotImplementedError


sp.exercises.check("local_rank", local_rank)


# %%
def shards_after_resize(length, old, new, rank):
    """练习 3：返回一个 rank 从检查点读取的内容：(旧 rank, 首行, 末行 + 1) 的列表。

    `old` 个 rank 按顺序保存了一个 `length` 行的张量，每个 rank 一个同样大小的切片。现在由 `new` 个 rank 读取，
    每个也是同样大小的切片，`rank` 是其中之一。行号从旧 rank 的切片开头算起。没有读取的旧 rank 不列出，
    结果按旧 rank 排序。`old` 和 `new` 都整除 `length`。
    """
    raise NotImplementedError


sp.exercises.check("shards_after_resize", shards_after_resize)


# %%
def run_command(flags, local_rank):
    """练习 4：以字典返回 torchrun 的一个进程的环境变量。

    列表 `flags` 依次是 "--nnodes=N"、"--nproc-per-node=P" 和 "--node-rank=R"，`local_rank` 是进程在节点内的编号，
    从 0 开始。键有 RANK、LOCAL_RANK、NODE_RANK、WORLD_SIZE、LOCAL_WORLD_SIZE，值可以是字符串或整数。
    """
    raise NotImplementedError


sp.exercises.check("run_command", run_command)
