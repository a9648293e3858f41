# %% [markdown]
# # Lesson 11: Pipelines
#
# A pipeline cuts a model into *stages*, one after the other, and gives each rank some of them. No rank needs memory
# for the whole model. You need to know data parallelism; pipelines are new here.
#
# Run it: `python tutorials/11_pipelines.py`, or open it as a notebook. Pictures also go into the folder
# `pictures`.
#
# First the result: a network of eight linear layers, trained by four ranks. Each rank has two of them.

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
    optimizer = sp.optim.SGD(pipeline.parameters(), lr=0.05)  # of this rank's stages only
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(images, labels).item())  # forward and backward of the whole batch
        optimizer.step()
    return losses, pipeline.stages


losses, stages = sp.launch(train, world_size=4)[0]
for rank, names in enumerate(stages):
    print(f"rank {rank} has the layers {', '.join(names)}")
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% [markdown]
# ## The same on one device
#
# Predict first: is a pipeline an approximation? How far are its losses from those of one device?


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
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "11_pipelines", f"{name}.png"), dpi=100)


alone = train_alone()
apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
print(f"the losses differ by at most {apart:.0e}")
assert apart < 1e-5
picture = sp.view.plot_loss({"four stages": losses, "one device": alone}, title="Pipeline and one device")
show(picture, "losses")

# %% [markdown]
# It is no approximation. The ranks compute the same gradients. Only the order of additions differs.
#
# Now build it up.
#
# ## Micro-batches
#
# Stage 1 needs the output of stage 0, and stage 0 needs the gradient from stage 1. With the whole batch in one piece,
# one rank works and all others wait. Their waiting time is the *bubble*.
#
# So the batch is split into *micro-batches*. While rank 1 works on micro-batch 0, rank 0 works on micro-batch 1. The
# gradients of all micro-batches are added, and the optimizer makes one step at the end. This is gradient
# accumulation.
#
# Predict first: with four ranks and one micro-batch, what share of the time is a rank idle? And with eight
# micro-batches?

# %%
one = sp.pipeline_schedule("gpipe", ranks=4, microbatches=1)
eight = sp.pipeline_schedule("gpipe", ranks=4, microbatches=8)
print(one)
print(eight)
figure, axes = plt.subplots(2, figsize=(12, 5.4), layout="constrained", sharex=True)
# The forward of one micro-batch, the whole batch, takes as long as those of eight micro-batches together.
sp.view.plot_schedule(eight, axes[1])
sp.view.plot_schedule(one, axes[0], forward=8, input_gradient=8, weight_gradient=8)
axes[1].set_xlabel("time [forwards of an eighth of the batch in a stage]")
show(figure, "microbatches")

# %% [markdown]
# `F` is a forward, `B` a backward, and the number is the micro-batch. A backward takes twice as long as a forward: it
# computes the gradients of the input and of the weights. Dots in the text are the bubble.
#
# With `P` ranks, the bubble is as long as `P - 1` forwards and backwards of a micro-batch. A smaller micro-batch has
# shorter ones. With `M` micro-batches, each rank is idle for the share `(P - 1) / (M + P - 1)` of the step:

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
# Without a bubble, a step would take 3 forwards of a batch. More micro-batches have a price: each one is smaller, and
# small matrix products use a device badly.
#
# ## A schedule is data
#
# The picture above is a *schedule*: for each rank a list of actions. `"2F0"` is stage 2, forward, micro-batch 0. The
# schedule GPipe (Huang et al. 2019) does all forwards first. Between its forward and its backward, a micro-batch
# keeps its activations in memory.
#
# The schedule 1F1B (Narayanan et al. 2019) starts each backward as early as it can. After a warm-up, every rank does
# one forward and one backward by turns.
#
# Predict first: is the bubble of 1F1B smaller? How many micro-batches does rank 0 keep in memory?

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
# The bubble is the same. The memory is not: GPipe keeps all micro-batches, and 1F1B at most as many as there are
# ranks. So 1F1B can have many micro-batches, and that makes the share of the bubble small.
#
# The grey area below the boxes is the number of live micro-batches. The last rank of 1F1B has one: its backward
# follows its forward at once.
#
# ## Backward in two parts
#
# A backward computes two gradients. The gradient of the *input* is urgent: the stage before waits for it. The
# gradient of the *weights* is not: only the optimizer needs it, at the end. ZB-H1 (Qi et al. 2023) splits them into
# the actions `I` and `W`, and puts `W` where the bubble was.
#
# Predict first: 1F1B has a bubble of 9 forwards. How much is left?

# %%
split = sp.pipeline_schedule("zb_h1", ranks=4, microbatches=8)
print(split)
assert (one_by_one.cost().bubble, split.cost().bubble) == (9, 3)
assert max(split.cost().peak_live_at_weight_gradient) == max(one_by_one.cost().peak_live_at_weight_gradient)
picture = sp.view.plot_schedule(split)
picture.set_xlabel("time [forwards of a stage]")
show(picture, "zb_h1")

# %% [markdown]
# A third is left, with the same memory on rank 0. The losses do not change by a bit, because every gradient is still
# computed once, and added in the same order:

# %%
assert sp.launch(train, ("zb_h1",), world_size=4)[0][0] == losses

# %% [markdown]
# ## Several stages on a rank
#
# The bubble is as long as `P - 1` forwards and backwards of a stage. Smaller stages have shorter ones. Interleaved
# 1F1B (Narayanan et al. 2021) cuts the model into eight stages for four ranks: rank 0 has the stages 0 and 4. ZBV (Qi
# et al. 2024) puts them on a V: rank 0 has the first stage and the last one.
#
# Predict first: what do smaller stages cost?


# %%
def cost_of(schedule, message=0.0):
    """Return the cost if a forward, an input gradient and the weight gradients of a rank's whole part take 1 each."""
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
# Two stages on a rank halve the bubble of 1F1B. Every micro-batch now crosses more borders between ranks, so there
# are more than twice as many messages. Darker boxes are the second stage of a rank.
#
# ## Latency
#
# So far messages took no time. Now each one takes up to the time of a forward.
#
# Predict first: 1F1B and GPipe have the same bubble without latency. Which one suffers more from slow messages?

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
# 1F1B does. In its steady part, a rank sends a micro-batch on and waits until the gradient of an earlier one comes
# back: each turn contains the latency of messages in both directions. GPipe pays the latency only on the way in and
# on the way out. Interleaving loses most of its advantage, because more messages follow each other.
#
# `eager_1f1b` does about twice as many forwards in the warm-up. There is always another micro-batch to work on while
# messages travel. The price is memory:

# %%
eager = sp.pipeline_schedule("eager_1f1b", ranks=4, microbatches=8)
for schedule in (one_by_one, eager):
    cost = schedule.cost(message=1)
    print(f"{schedule.name:<10} makespan {cost.makespan}, live {cost.peak_live_at_weight_gradient}")
assert eager.cost(message=1).makespan < one_by_one.cost(message=1).makespan

# %% [markdown]
# ## Where the time goes
#
# `bubbles` gives the reasons for the idle time of each rank. *warm-up*: its first action has not come yet.
# *activation*: the stage before is not ready. *gradient*: the stage behind is not ready. *memory*: a forward could
# run, but it would need room for one more micro-batch. *barrier*: the rank has finished, and waits for the others.
#
# The *critical path* is a chain of actions and messages without idle time, from the start of the step to its end.
# Only a faster action or message on it can make the step faster.

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
# The path of 1F1B goes down and up again and again: each time the messages of both directions are on it. The path of
# `eager_1f1b` goes down once, stays on the last rank, and goes up once.
#
# ## Edit a schedule
#
# Suppose that rank 0 has memory for three micro-batches, and 1F1B needs four. One idea: do the first backward right
# after the first forward. Actions are strings in lists, so the edit is short.
#
# Predict first: does it run?

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
# The ranks would wait for each other in a circle. `check` finds it before any process starts, and names the cells.
#
# A better edit: rank 0 does one forward less in its warm-up.
#
# Predict first: what happens to the bubble?

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
# It runs, and it is slow: every forward of rank 0 now waits for a gradient, and the other ranks wait for rank 0. It
# still computes the right gradients. Train with it, on threads this time, which start faster than processes:

# %%
assert sp.launch(train, (lean,), world_size=4, transport="inline")[0][0] == losses

# %% [markdown]
# ## Search
#
# Is this the best schedule for three live micro-batches? `search_schedule` looks for the least makespan, and proves a
# lower bound for every schedule with one stage on each rank.

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
# The makespan is even less than that of 1F1B, which keeps four: the split backward gives the search more freedom.
#
# ## Bubble and memory
#
# All schedules in one picture. A point further down has a smaller bubble, a point further left needs less memory. The
# red line is the best that one stage on each rank can do.
#
# Predict first: which schedules can lie below the line, and why?

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
# `v_min`, `v_half` and `zbv` do. They have two stages on a V. In 1F1B the first rank holds its activations longest,
# and the last one frees them at once. On a V the first rank has the last stage, too, so all ranks need about as much
# memory.
#
# ## Models with code of their own
#
# Not every model is a `Sequential`. This one adds the embedding to the output of the last layer (a *skip connection*
# past two stages), and uses the table of the embedding again as its output layer (*tied weights*). Stages are lists
# of names. A stage that uses a parameter of another stage in its own code names that parameter.
#
# Predict first: ranks 0 and 3 both have the table. What must they do before the optimizer's step?


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
# They add their gradients, because each has seen one use of the table. In the picture, this is the all-reduce in the
# lane `comm [0, 3]`. Then both copies make the same step, and stay equal. The skip travels from rank 0 to rank 3
# directly, and its gradient travels back the same way. (The all-reduce of all ranks is the mean loss.)
#
# ## Data, pipeline and tensor parallelism at once
#
# Large models are cut in three ways together. Eight ranks form a mesh of 2 x 2 x 2: `dp`, two pipelines with half of
# the batch each; `pp`, two stages; `tp`, two ranks that share the matrices of a stage.
#
# Predict first: which ranks have slices of the same matrix? Which ranks add gradients of the same slice?

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
    mine = sentences[8 * pipeline.replica : 8 * (pipeline.replica + 1)]  # this pipeline's half of the batch
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
# The ranks of a mesh are counted from the last axis: ranks 0 and 1 share matrices, ranks 0 and 4 add gradients.
#
# ## Predict the time on hardware
#
# So far a forward took 1. `dry_run` executes the same program without data on a described cluster, here four H100,
# and tells simulated times. Now the stages are unequal: the last one also computes the logits of all tokens. With
# `example`, the runtime finds stages of nearly equal time by itself.
#
# Predict first: in the table of bubbles above, the order was `1f1b`, `interleaved_1f1b`, `zb_h1`, `zbv`. Is it the
# same here?


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
# The order is the same, but `zb_h1` gains little on `interleaved_1f1b`: a backward in two parts takes longer than one
# in one part. A bubble is not the only cost, so predict the whole step. GPipe and 1F1B take the same time, and 1F1B
# needs less memory.

# %%
milliseconds = {name: prediction.step_time_s * 1e3 for name, prediction in predictions.items()}
assert min(milliseconds, key=milliseconds.get) == "zbv"
assert milliseconds["zb_h1"] < milliseconds["interleaved_1f1b"] < milliseconds["1f1b"]
assert np.isclose(milliseconds["gpipe"], milliseconds["1f1b"], rtol=0.01)
assert predictions["1f1b"].peak_bytes < predictions["gpipe"].peak_bytes

# %% [markdown]
# ## Without a flush: old weights
#
# All schedules above end a step with a *flush*: they empty the pipeline, and then all ranks update. PipeDream
# (Narayanan et al. 2019) has no flush and no bubble between steps. Each micro-batch is a batch of its own, and a rank
# updates right after each backward. When a micro-batch returns to rank 0, that rank has made updates in between, so
# its gradient belongs to *old weights*, up to `P - 1` updates old.
#
# Predict first: the learning rate is the same as for one device. Does it still learn as well?

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
# No. At the lower rate old weights do less harm, because the weights change less between a forward and its update.
# The schedule `pipedream_2bw` (Narayanan et al. 2021) adds the gradients of a whole batch, and all its weights are
# one update old.

# %%
behind = {rate: of_old - of_fresh for rate, (of_old, of_fresh) in means.items()}
assert 0 < behind[0.01] < behind[0.04] / 2

# %% [markdown]
# ## What goes wrong
#
# **A stage dies.** Here the process of rank 2 is killed in the middle of a step. Predict first: how long do the other
# ranks wait, and what can they tell you?


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
# All ranks stop at once. Each one names its action, and the value for which it waited.
#
# **Micro-batches of unequal size.** Ten samples make four micro-batches of 2, 3, 2 and 3 samples. A simple program
# divides every loss by the number of micro-batches. Predict first: is the sum the mean loss of the batch?


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
# It is not: samples in small micro-batches would count more. `Pipeline` weighs each micro-batch by its samples. If a
# loss is a mean over tokens, and some sentences are padded, give the number of tokens with `weight_fn=`.
#
# **Batch norm.** It normalises with the mean and the variance of a batch, but a stage sees one micro-batch at a time.
# Predict first: which of the two lines below is level?


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
# Layer norm normalises each sample on its own, so the cut of the batch does not matter. Use layer norm or group norm
# in pipelines.
#
# ## Exercises
#
# Write the functions. Each check begins with the smallest cases, and draws the first one that fails. Solutions are in
# `tutorials/solutions/11_pipelines.py`.


# %%
def lists_of_1f1b(ranks, microbatches):
    """Exercise 1: return the schedule 1F1B, for each rank a list of actions such as "2F0".

    The last rank takes a forward and a backward by turns. Each rank before it does one more forward first.
    """
    raise NotImplementedError


sp.exercises.check("lists_of_1f1b", lists_of_1f1b)


# %%
def fewest_microbatches(ranks, share):
    """Exercise 2: return the least number of micro-batches with which GPipe's bubble is at most `share` of the step."""
    raise NotImplementedError


sp.exercises.check("fewest_microbatches", fewest_microbatches)


# %%
def balanced_stages(times, ranks):
    """Exercise 3: cut a row of layers into stages, so that the slowest stage is as fast as possible.

    `times` has the time of each layer. Return the number of layers of each stage, one or more.
    """
    raise NotImplementedError


sp.exercises.check("balanced_stages", balanced_stages)
