# %% [markdown]
# # Lesson 10: The same script on a GPU and on a cluster
#
# A training script should not know where it runs. This lesson takes one script, and runs it alone, on four ranks, on
# two nodes, with the flags of other launchers, and on a GPU as far as that is possible here. You need to know data
# parallelism (lesson 3), and layouts (lesson 4) for the section on checkpoints. No GPU and no MPI are needed: where
# something is missing, the cell says so.
#
# Run it: `python tutorials/10_gpu_and_cluster.py`, or open it as a notebook. Scripts, logs and pictures go into the
# folder `runs/10_gpu_and_cluster`.
#
# First the result: a script, and one command that runs it on four ranks.

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

os.makedirs("runs/10_gpu_and_cluster", exist_ok=True)
os.chdir("runs/10_gpu_and_cluster")
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
    """Start a command of simparallel, or a script, with this Python."""
    program, *words = shlex.split(command)
    module = ["-m", "simparallel"] if program == "simparallel" else []
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"} | variables
    return subprocess.Popen(
        [sys.executable, *module, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*commands, **variables):
    """Run commands at the same time; print and return what the ranks say, in order, and the errors."""
    ended = [(each, *each.communicate()) for each in [start(command, **variables) for command in commands]]
    lines = sorted(line for _, out, _ in ended for line in out.splitlines() if re.match(r"\[rank|rank \d", line))
    errors = [error for each, _, error in ended if each.returncode]
    for text in (*lines, *errors):
        print(text.partition("\n\nAlso failed")[0].rstrip())
    return lines, "".join(errors)


four, _ = run("simparallel run -n 4 train.py")

# %% [markdown]
# ## The same on one device
#
# Predict first: without the launcher, the script is one process. Which loss does it print?

# %%
alone, _ = run("python train.py")
assert len(four) == 4
assert {line.partition("loss ")[2] for line in four} == {alone[0].partition("loss ")[2]}

# %% [markdown]
# The same loss. `sp.init()` finds out where it is: the launcher tells it by environment variables, and without them
# the world is one rank. The batch is always the same 64 images, `mine` is the part of this rank.
#
# Now step by step.
#
# ## What a rank is told
#
# Every launcher sets variables for each process. Those printed below have the names of PyTorch; the names of MindSpore
# are set, too (`RANK_ID`, `RANK_SIZE`, `DEVICE_ID`). A second script then sums 4 MB inside each node, and over both
# nodes.
#
# Predict first: four ranks on two nodes. What is the number of rank 2's node, and what is the number of rank 2 on it?

# %%
Path("who.py").write_text("""
import os

import simparallel as sp

sp.init()
names = ("RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(f"rank {sp.get_rank()}:", *(f"{name}={os.environ.get(name)}" for name in names))
""")
one_command, _ = run("simparallel run -n 4 --nodes 2 --record off who.py")


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
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
run("simparallel run -n 4 --nodes 2 --record full --cluster dgx-a100 links.py")
trace = sp.Trace.load("runs/links/trace.json")
times = [e.sim_end_ps - e.sim_start_ps for e in trace.events if e.rank == 0 and e.name == "all_reduce"]
print(f"4 MB inside a node: {times[0] / 1e6:.0f} µs, among both nodes: {times[1] / 1e6:.0f} µs")
assert times[1] > 3 * times[0]
show(trace.timeline(), "links")

# %% [markdown]
# Rank 2 is the process 0 of node 1. The *rank* counts all processes, the *local rank* those of a node: it chooses the
# GPU. Consecutive ranks share a node, and links inside a node are faster, so it matters which ranks exchange the most
# data.
#
# ## Other launchers, the same variables
#
# On a cluster you start one command on each node. torchrun and msrun have flags of their own for this. The commands
# `simparallel torchrun` and `simparallel msrun` take the same flags. Two of them at the same time are two nodes on one
# machine.
#
# Predict first: each command below starts two processes. How does a process of the second command know that it is
# rank 2 or 3?

# %%
PORT = str(20_000 + os.getpid() % 10_000)  # nodes of one job have the same; another job has another one
torchrun = f"simparallel torchrun --nnodes 2 --nproc-per-node 2 --master-port {PORT} --record off"
two_commands, refusals = run(f"{torchrun} --node-rank 0 who.py", f"{torchrun} --node-rank 1 who.py")
assert two_commands == one_command or "Linux" in refusals

# %% [markdown]
# From its `--node-rank` and the number of processes on each node: 1 * 2 + 0 and 1 * 2 + 1. The variables are those of
# the single command above. The flags of msrun for this are `--worker_num 4 --local_worker_num 2 --node_rank 0`.
#
# The variables are enough, a launcher is not needed. Here are two processes, started one by one with MindSpore's names:

# %%
pair = [start("python train.py", RANK_ID=str(rank), RANK_SIZE="2", MASTER_PORT=PORT) for rank in (0, 1)]
for process in pair:
    said, refused = process.communicate()
    print(said.strip() or refused.strip().splitlines()[-1])
    assert said.strip().endswith(four[0].partition("loss ")[2]) or "Linux" in refused

# %% [markdown]
# ## Host files and rank tables
#
# Which ranks are on which node? MPI reads it from a *host file*: a line for each node, with its number of ranks
# (slots). MindSpore reads a *rank table*: JSON with the servers and their devices.
#
# Predict first: in the host file below, which ranks does `node2` have?

# %%
Path("hosts").write_text("node1 slots=3\nnode2 slots=1\nnode3 slots=2\n")
nodes = sp.cluster.read_host_file("hosts")
print("host file:", nodes)
assert nodes[1] == (3,)

run("simparallel rank-table make --servers 2 --devices 2 --out table.json")
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
# Only rank 3: `node1` has ranks 0 to 2. The launcher takes the number of ranks and nodes from the table. In the
# picture, a described cluster has the nodes of the host file: bright squares are nodes, and every message to another
# node is slow.
#
# ## Logs
#
# A run writes a folder: `worker_N.log` with the output of rank N, `scheduler.log` with the log records of all, a trace,
# a timeline, and the numbers that the script gave to `sp.log`. Launchers on clusters write one log for each rank, too.

# %%
folder = Path("runs", "train")
print(*sorted(path.name for path in folder.iterdir() if path.is_file()))
log = Path(folder, "worker_3.log")
print("worker_3.log:", log.read_text().strip() if log.exists() else "none, ranks are threads here")
losses = json.loads(Path(folder, "metrics.json").read_text())["metrics"]["loss"]  # (step, loss)
show(sp.view.plot_loss({"four ranks": losses}, title="Noted with sp.log"), "loss")

# %% [markdown]
# ## Several machines: MPI
#
# Shared memory ends at the border of a machine. Beyond it, messages travel by MPI, and the script stays the same:
#
# ```sh
# pip install "simparallel[mpi]" mpich
# simparallel run --transport mpi --mpiexec "mpiexec -hosts node1,node2" -n 4 train.py
# ```
#
# Predict first: all losses are sums of numbers that arrive by messages, in some order. Are they the same bits as with
# shared memory?

# %%
has_mpi = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpiexec") is not None
if has_mpi:
    by_mpi, _ = run("simparallel run --transport mpi -n 4 --out runs/mpi train.py")
    assert {line.partition("loss ")[2] for line in by_mpi} == {alone[0].partition("loss ")[2]}
else:
    print("not run here: mpi4py or mpiexec is missing")
    _, refusal = run("simparallel run --transport mpi -n 4 train.py")

# %% [markdown]
# They are: every algorithm adds in an order that does not depend on the transport. (With MPI installed, the cell above
# compares the printed digits.) If MPI is missing, the command says what to install, and starts nothing.
#
# ## A GPU
#
# Ops, modules and optimizers call the array library of their data: NumPy for arrays in memory, CuPy for arrays on a
# GPU. `model.to("cuda:0")` moves a model. `simparallel run --array cupy train.py` puts each new Tensor of a run on the
# GPU of its rank, so that the script stays the same; in Python, `launch(..., array="cupy")` and `Cluster(array="cupy")`
# do so. This has run on one H100. The tests of this project run it everywhere, on a *stand-in* for CuPy
# (`tests/stand_in`), which computes with NumPy and refuses what CuPy refuses.
#
# Predict first: where is the gradient of a model that was moved? And what happens to a script that asks for a GPU
# where there is none?


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
# On the device of the model. Without a GPU the script runs on a simulated device, with the same numbers, and a note
# says so: otherwise the run would be slow, and nobody would know why. With a GPU the last line is a frequent mistake
# in a program that moves to one: an array was left in host memory, and the error says which.
#
# ## A program of PyTorch
#
# With `--as torch`, `import torch` finds a module of simparallel in this run, `simparallel.compat.torch`. It has the
# names of PyTorch, and calls the functions that you know. Where there is no GPU, `cuda:k` means simulated device k.
# Here is a program that imports nothing else:

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
# On a cluster with PyTorch, `torchrun --nproc-per-node 2 torch_train.py` runs the same file on GPUs.
# `--as mindspore` does so for MindSpore.
#
# ## Checkpoints that move to another number of ranks
#
# A job on a cluster ends early, and the next one gets fewer nodes. So a checkpoint must not depend on the number of
# ranks that saved it. Here four ranks hold slices of a matrix and of the states of Adam. They save after three steps,
# and go on for two more.
#
# Predict first: three ranks restore it. Rank 1 then has rows 4 to 7 of the matrix of 12 rows. From the files of which
# old ranks does it read them?


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
# From the files of ranks 1 and 2: rows 4 to 7 are the last two rows of the old slice 1, and the first two of slice 2.
# The manifest of a checkpoint says which file has which rows. Nothing is gathered in between:

# %%
manifest = json.loads(next(Path("checkpoints").rglob("manifest.json")).read_text())
blocks = manifest["tensors"]["model.0.weight"][0]["blocks"]
for block in blocks:
    print(f"rows {block['start'][0]} to {block['start'][0] + block['shape'][0] - 1}: {block['file']}")

# %% [markdown]
# ## What goes wrong
#
# **A node never comes.** **A rank fails.** **A wrong host file.** Predict first: one of two nodes does not start. What
# should the other one do, and what should the error say?

# %%
_, absent = run(f"{torchrun} --node-rank 0 --cluster-time-out 2 who.py")
assert "did not arrive" in absent or "Linux" in absent

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
# A start that waits has a deadline, and names the ranks that did not come, with the command that would start them. A
# failure ends all ranks, the first one is reported, and the exit status is not 0, so that a batch system knows. The
# next job restores the last checkpoint.
#
# ## Exercises
#
# Write these functions. Each check starts with the smallest case, and draws the first one that fails. Solutions:
# `tutorials/solutions/10_gpu_and_cluster.py`.


# %%
def ranks_of_node(text):
    """Exercise 1: return a dict from each host to the list of its ranks, from the text of a host file.

    A line is "node1 slots=3". Empty lines and what follows a # do not count. A host that comes again gets more ranks.
    Ranks are counted in the order of the lines.
    """
    raise NotImplementedError


sp.exercises.check("ranks_of_node", ranks_of_node)


# %%
def local_rank(rank, slots):
    """Exercise 2: return the tuple (node number, local rank) of `rank`; node i has `slots[i]` consecutive ranks."""
    raise NotImplementedError


sp.exercises.check("local_rank", local_rank)


# %%
def shards_after_resize(length, old, new, rank):
    """Exercise 3: return what a rank reads from a checkpoint, as a list of (old rank, first row, last row + 1).

    `old` ranks saved a tensor of `length` rows, each an equal slice, in order. Now `new` ranks read it, each an equal
    slice, and `rank` is one of them. Rows count from the start of the old rank's slice. Leave out old ranks of which
    nothing is read, and sort by old rank. `old` and `new` divide `length`.
    """
    raise NotImplementedError


sp.exercises.check("shards_after_resize", shards_after_resize)


# %%
def run_command(flags, local_rank):
    """Exercise 4: return the environment of a process of torchrun, as a dict.

    `flags` is the list of "--nnodes=N", "--nproc-per-node=P" and "--node-rank=R" in this order, `local_rank` the number
    of the process on its node, from 0. The keys are RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, the
    values strings or integers.
    """
    raise NotImplementedError


sp.exercises.check("run_command", run_command)
