# %% [markdown]
# # Lesson 6: Described hardware: predict before you rent
#
# How long would a training step take on 64 GPUs, and would it fit? You do not need the GPUs to find out. This lesson
# describes hardware by numbers, and predicts the time and the memory of a program on it. You need to know data
# parallelism.
#
# Run it: `python tutorials/06_hardware.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: two training steps of ResNet-18 on 64 A100 GPUs, with 32 images for each.

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
    images = np.broadcast_to(np.float32(0), (samples, 3, 224, 224))  # zeros that take no memory
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
# A *dry run* executes the program without data. Tensors have shapes and dtypes, but no elements. So nothing is
# computed, and a second is enough for 64 GPUs. All 64 ranks do the same, so only two of them were run.
#
# ## Check it against one device, and against a real run
#
# Predict first: a dry run does not multiply a single number. Which of these can it know exactly: the flops, the bytes
# that are sent, the order of the operations, the loss?


# %%
def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
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
    """Return what was done when, in simulated time, on each rank."""
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


alone = sp.dry_run(train_resnet, (4 * 32,), cluster="dgx-a100")  # the images of four devices
assert work_flops(alone) == 4 * work_flops(prediction)

# %% [markdown]
# All but the loss. The events of the dry run are those of the real run: the same operations with the same flops and
# bytes, at the same simulated times. Values need data. One device with the images of four does the flops of four.
#
# Now the basics: where do the times come from?
#
# ## A device
#
# A device is described by a few numbers: its peak (flops a second), the bandwidth of its memory (bytes a second), its
# memory (bytes), and the time to start an operation. A *link* has a latency and a bandwidth. Each number has a source:
# a data sheet, a measurement, or an assumption.

# %%
small, large = (sp.cluster.load_cluster(name, 64) for name in ("a100", "dgx-a100"))
print(small.table())
kinds = Counter(source.partition(":")[0] for source in (large.device.sources | large.node_link.sources).values())
print("dgx-a100, device and links between nodes:", dict(kinds))

# %% [markdown]
# `a100` is the simple preset: peaks and bandwidths as on the data sheet. `dgx-a100` also knows that a small operation
# reaches less of the peak, and that eight GPUs form a node with fast links, and InfiniBand between the nodes. Its
# efficiencies are assumed: the last line counts the numbers of each kind.
#
# ## The roofline
#
# An operation has to compute (flops) and to move bytes from and to memory. Both happen at once, so the longer one
# counts: `launch + max(flops / peak, bytes / bandwidth)`. The ratio flops / bytes is the *arithmetic intensity*. Below
# a certain intensity, the *ridge*, the memory limits an operation, above it the peak does.
#
# Predict first: which one limits the sum of two large vectors? And the product of two 64 x 64 matrices?

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
# The sum moves 12 bytes for one flop, so the memory limits it at any size. The product of 64 x 64 has more flops for
# each byte, just above the ridge, but it is far below the roof: the launch takes nearly all of its time. Only large
# products come near the peak. That is why large batches use a device better than small ones.

# %%
assert rows["add"][2] == "memory"
assert rows["matmul 64"][2] == "peak"
assert rows["matmul 64"][1] < 0.01 * chip.peak(4)
assert rows["matmul 4096"][1] > 0.95 * chip.peak(4)

# %% [markdown]
# ## The simulated clock
#
# Each device has a clock. An operation moves it by the modelled time. A collective begins when its last rank arrives,
# so it joins the clocks of its group. Simulated times are integers, and equal on every run.
#
# Predict first: rank 1 does three times the work of rank 0, then both call `all_reduce`. Who waits, and what does rank
# 0's clock show after the call?


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
# Rank 0 waits, and both clocks show the same time afterwards: that of rank 1. The times that you measure on your
# laptop, the *wall* times, are in the events as well. They differ from run to run, and have nothing to do with a GPU.
#
# ## The time of an all-reduce
#
# A message of `s` bytes takes `α + s / B`: a latency, and the bytes over the bandwidth. (This is the alpha-beta model
# of Hockney, with β = 1 / B.) An algorithm is a number of messages, one after the other:
#
# * a *ring* of `p` ranks sends `2 (p - 1)` messages of `s / p` bytes,
# * a *tree* sends `2 log2(p)` messages of `s` bytes, up to the root and down again.
#
# Predict first: which one is faster for 1 kB, and which one for 100 MB? How does it change with more ranks?

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
# The tree is faster for small arrays: it has fewer messages, so fewer latencies. The ring is faster for large ones: it
# sends each byte only about twice. With more ranks the tree wins up to larger sizes, because the ring has two latencies
# for each rank.
#
# Libraries such as NCCL choose by the size. They also know the nodes: each GPU of `dgx-a100` has a port of its own to
# the other nodes, so the slow links between nodes are used eight at a time. The model has the tables by which NCCL
# chooses an algorithm and a *protocol*: `LL` has a small latency and half of the bandwidth, `Simple` all of the
# bandwidth and a large latency, `LL128` is between them. The interpreter starts a collective as it starts an operation.

# %%
assert cross[8] < 2.5e6 < cross[64]
for size in (10**4, 10**8):
    for count in (8, 64):
        cost = large.collective("all_reduce", size, tuple(range(count)))
        print(f"{size / 1e6:6.2f} MB on {count:2} GPUs of dgx-a100: {cost.time_ps / 1e6:7.1f} µs, {cost.algorithm}")

# %% [markdown]
# ## Scaling
#
# Now for many devices: 8, 64 and 1,024. There are two questions. *Weak scaling*: each device keeps its 32 images, and
# the batch grows. *Strong scaling*: the batch stays at 1,024 images, and each device gets fewer of them. The network
# between the nodes is either InfiniBand, or Ethernet with 10 Gb/s for each GPU.
#
# Predict first: with 128 times as many devices, how many times as many images a second do you get? Which of the three
# cases gains the least?

# %%
ethernet = sp.LinkSpec(30e-6, 1.25e9)  # 30 µs, 10 Gb/s
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
# With InfiniBand, weak scaling is nearly ideal, with 127 times as many images: computing hides nearly all
# communication. On Ethernet a part of it shows, and there are 107 times as many. Strong scaling gains the least, 15
# times. Is that because of the communication?
#
# ## Exposed communication
#
# Communication that is hidden behind computing costs nothing. The rest is *exposed*. A prediction has the exposed part:

# %%
exposed = {}
for name, each in (("InfiniBand", weak[64]), ("Ethernet", slow[64]), ("one image a device", strong[1024])):
    exposed[name] = each.trace.select(steps=1).summary()[0]["exposed_communication_s"] / each.step_time_s
    print(f"{name:<18} step {each.step_time_s * 1e3:5.1f} ms, exposed communication {exposed[name]:.0%} of it")
assert exposed["InfiniBand"] < 0.05 < 0.1 < exposed["one image a device"] < exposed["Ethernet"] < 0.2
starts = sum(event.rank == 0 and event.flops > 0 for event in strong[1024].trace.select(steps=1).events)
starts_s = starts * large.device.op_start_s
assert 0.9 < starts_s / strong[1024].step_time_s < 1
print(f"one image a device: {starts} operations, which the interpreter starts in {starts_s * 1e3:.1f} ms")
figure, axes = plt.subplots(2, figsize=(12, 5), layout="constrained")
for (name, each), ax in zip((("InfiniBand", weak[64]), ("Ethernet", slow[64])), axes, strict=True):
    each.timeline(ax=ax, steps=1)
    ax.set_title(f"64 GPUs, {name}: the second step", loc="left", fontweight="bold")
show(figure, "exposed")

# %% [markdown]
# The gradients are sent in buckets while backward still runs. The lane `comm` shows them. On Ethernet the last bucket
# ends long after backward, and the optimizer waits for it.
#
# With one image a device, communication is an eighth of the step, and not the main loss. The Python interpreter takes
# 59 µs to start an operation, in nearly all of the step: the device is ready before, and waits. With more images the
# interpreter is ahead, and its time is hidden. A device needs a batch that is large enough.
#
# ## One slow device
#
# Predict first: one of four devices takes twice as long for everything. How much longer does a step take? For which
# part of it are the three others idle?

# %%
even = sp.dry_run(train_resnet, world_size=4, cluster="dgx-a100")
straggling = even.with_(stragglers={2: 2.0})
print(straggling.table())
slower = straggling.step_time_s / even.step_time_s
print(f"a step takes {slower:.2f} times as long")
assert 1.9 < slower < 2
show(straggling.timeline(steps=1), "straggler")

# %% [markdown]
# All wait for the slow one at each all-reduce: a step takes nearly twice as long, and the three others are idle for
# half of it. It would be the same with one slow device of 1,024: it costs half of the cluster. This is why large
# clusters look for *stragglers*.
#
# ## Model flops and hardware flops
#
# What share of the peak does a program reach? There are two answers. *Hardware flops utilisation* (HFU) counts all
# flops that were done. *Model flops utilisation* (MFU) counts those that the model needs. They differ if flops are
# done twice: recomputation frees activations in forward, and computes them again in backward.
#
# Predict first: with recomputation, which of the two falls?


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
assert used[True][2] < 0.55 * used[False][2]

# %% [markdown]
# MFU falls: a quarter of the flops is now done for memory, not for the model. Compare systems by MFU, because it is
# proportional to tokens a second. By custom it counts all scores of attention, also those that the mask hides, which
# the kernel leaves out: so it is above HFU without recomputation. (These are the flops of float32; with two-byte
# numbers the peak is 16 times as high, and harder to reach.)
#
# ## Memory
#
# Arrays are counted as they come and go. Predict first: for four times the batch, do you need four times the
# memory?

# %%
limited = {"cluster": "dgx-a100", "device_memory": "80GB"}
peaks = {samples: sp.dry_run(train_resnet, (samples,), **limited).peak_bytes for samples in (32, 128)}
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
# No: parameters, gradients and the state of the optimizer do not grow with the batch. Activations do. They grow in
# forward, and fall in backward, as the picture shows. The capacity of the described device is a limit only if you say
# so with `device_memory=`; then the images count, too. The error lists what the device holds, and in which layer the
# memory runs out.
#
# ## How good is a prediction?
#
# A prediction contains three kinds of statements:
#
# * **exact**: shapes, bytes, flops, the order of events, memory. A dry run executes the same program.
# * **modelled**: times, from a roofline and from latencies and bandwidths.
# * **assumed**: numbers of the description that no data sheet has.
#
# Predict first: the time to start an operation, 5 µs, is assumed. If it were 10 µs, how much longer would the step of
# the GPT above take? And if operations reached the full memory bandwidth?

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
# By less than 1% in both cases: here the assumed numbers matter little. Ask this question of every prediction that you
# act on.
#
# The other test: compare with steps that others have measured. Three rows of Megatron-LM on A100 (Narayanan et al.
# 2021, table 1), beside the closed form of a GPT's step; Megatron-LM has fused kernels.
# Nothing was fitted to them:

# %%
ROWS = [  # layers, width, heads, tensor, pipeline, data, micro-batch, micro-batches, chunks; seconds, from the paper
    ((24, 2304, 24), (1, 1, 32, 16, 1, 1), 3.528),
    ((40, 6144, 48), (8, 1, 32, 8, 4, 1), 9.399),
    ((80, 12288, 96), (8, 8, 24, 2, 48, 2), 24.82),
]
errors = []
for (layers, width, heads), parts, published in ROWS:
    plan = TrainingPlan(GPTShape(layers, width, heads, 2048, 51200), *parts, recompute="full")
    cluster = sp.cluster.describe(plan.world_size, "a100", nodes=plan.world_size // 8)
    cluster = replace(cluster, device=replace(cluster.device, software="fused"))
    predicted = gpt_step_time(plan, cluster).step_s
    errors.append(predicted / published - 1)
    parameters = f"{plan.shape.num_parameters / 1e9:.1f} billion parameters"
    print(f"{parameters} on {plan.world_size} GPUs: {published:.1f} s, predicted {predicted:.1f} s, {errors[-1]:+.1%}")
assert max(map(abs, errors)) < 0.05

# %% [markdown]
# These are good rows. Over all 224 published steps the median error is 5.3%, and one in ten is off by more than 15%:
# software of its time was slower than the hardware, and no description of hardware knows that. The page
# `docs/published.md` has every row. To rank strategies, a prediction is good. To promise a date, measure.
#
# ## What goes wrong
#
# **A decision by a value.** A dry run has no values, so it cannot know when a loss is small. **A wrong name.** Errors
# name what is there. Predict first: what should a library do with `if loss.item() < 0.1` in a dry run: guess, go on, or
# stop?


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
sp.dry_run(stop_early, unknown=1.0)  # say what the value is, and go on

# %% [markdown]
# It stops and names the line. A guess would be a wrong prediction without a word.
#
# ## Exercises
#
# Write these functions. Each check starts with the smallest case, and draws the first one that fails. Solutions:
# `tutorials/solutions/06_hardware.py`.


# %%
def step_time(forward, backward, all_reduce):
    """Exercise 1: return (time of the step, exposed communication).

    `forward` is one time, `backward` and `all_reduce` are lists of times. Backward comes after forward, one layer after
    the other: `backward[i]` is the time of layer i in the order of backward. After it, the layer's gradient is ready,
    and its all-reduce takes the time `all_reduce[i]`. All-reduces run beside computing, one at a time and in this
    order. The step ends when all are done. There is no optimizer.
    """
    raise NotImplementedError


sp.exercises.check("step_time", step_time)


# %%
def ring_or_tree(ranks, size_bytes, latency_s, bandwidth):
    """Exercise 2: return "ring" or "tree", the faster all-reduce, by the formulas of this lesson.

    The tree has `2 ceil(log2(ranks))` messages. If both take equally long, either is right.
    """
    raise NotImplementedError


sp.exercises.check("ring_or_tree", ring_or_tree)


# %%
def largest_batch(memory_bytes, num_parameters, num_states, sample_bytes):
    """Exercise 3: return the largest number of samples that fits into the memory of a device, 0 if none does.

    Parameters, gradients, and `num_states` numbers of the optimizer for each parameter take 4 bytes each. The
    activations of a sample take `sample_bytes`.
    """
    raise NotImplementedError


sp.exercises.check("largest_batch", largest_batch)


# %%
def devices_needed(samples, batch, compute_s, gradient_bytes, latency_s, bandwidth, limit_s):
    """Exercise 4: return the least number of devices that finish an epoch of `samples` in at most `limit_s`.

    Each device takes `batch` samples in each step, the last step may be smaller but takes as long. A step takes
    `compute_s`, and then an all-reduce of `gradient_bytes` by a ring. Return None if more than 64 devices were needed.
    """
    raise NotImplementedError


sp.exercises.check("devices_needed", devices_needed)
