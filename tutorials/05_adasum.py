# %% [markdown]
# # Lesson 5: Adasum
#
# With data parallelism, the ranks average their gradients. With more ranks, the batch grows, a pass over the data has
# fewer steps, and the model learns less from it. Adasum (Maleki et al. 2020) combines gradients by their directions,
# so that a large batch still makes progress. You need to know collectives and data parallelism.
#
# Run it: `python tutorials/05_adasum.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: sixteen workers, the learning rate of a single worker, and three ways to combine gradients.

# %%
import warnings
from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import InputError

images, labels = (array[:1024] for array in sp.data.digits("train")[:])
BATCH, RATE = 8, 0.3  # of each worker


def make_network():
    sp.set_seed(1)
    return sp.nn.Sequential(sp.nn.Linear(64, 64, weight_init="he_normal"), sp.nn.ReLU(), sp.nn.Linear(64, 10))


def schedule(steps, rate=RATE):
    """Return the learning rate of each step: it rises during a fifth of them, and then falls to 0."""
    return sp.Tensor(np.interp(np.arange(1, steps + 1), [0, steps / 5, steps], [0, rate, 0]).astype(np.float32))


def gradients(network, step, worker, workers, batch=BATCH):
    """Return a worker's loss and gradients."""
    first = (step * workers + worker) * batch % len(images)
    logits = network(images[first : first + batch])
    loss = sp.functions.cross_entropy(logits, sp.Tensor(labels[first : first + batch]))
    network.zero_grad()
    loss.backward()
    return loss.item(), [parameter.grad.numpy() for parameter in network.parameters()]


# %% [markdown]
# In each step, `all_reduce` replaces the gradients of the ranks by their sum, their mean, or their Adasum.


# %%
def train(how, steps=24, rate=RATE):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=schedule(steps, rate))
    losses = []
    for step in range(steps):
        loss, grads = gradients(network, step, sp.get_rank(), sp.get_world_size())
        optimizer(sp.all_reduce(grads, how))
        losses.append(sp.all_reduce(np.array(loss), "mean").item())
    return losses, network


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "05_adasum", f"{name}.png"), dpi=100)


curves = {}
for how in ("sum", "mean", "adasum"):
    curves[how], _ = sp.launch(train, (how,), world_size=16, transport="inline")[0]
    print(f"{how:<6} loss {curves[how][0]:.3f} -> {curves[how][-1]:.3f}, at most {max(curves[how]):.3f}")
picture = sp.view.plot_loss(curves, title="Sixteen workers, the learning rate of one")
picture.set_ylim(0, 5)
show(picture, "losses")
assert min(curves, key=lambda how: curves[how][-1]) == "adasum"
assert max(curves["sum"]) > 2 * curves["sum"][0]

# %% [markdown]
# The steps of the sum are too large, and its loss jumps up. Those of the mean are too small. Adasum needs no new
# learning rate.
#
# ## The same on one device
#
# `sp.adasum` takes the gradients of all workers, and needs no ranks. So one device can do the work of all sixteen, one
# after the other.
#
# Predict first: are the losses equal?

# %%
network = make_network()
optimizer = sp.optim.SGD(network.parameters(), lr=schedule(24))
alone = []
for step in range(24):
    losses, grads = zip(*(gradients(network, step, worker, 16) for worker in range(16)), strict=True)
    optimizer(sp.adasum(grads))
    alone.append(np.mean(losses))
apart = max(abs(a - b) for a, b in zip(alone, curves["adasum"], strict=True))
print(f"the losses differ by at most {apart:.0e}")
assert apart < 1e-5

# %% [markdown]
# They are. Now build it up.
#
# ## Two gradients
#
# Two workers have the gradients `g1` and `g2`. If these are *orthogonal*, the workers have learned about different
# things. Their sum makes both steps. If they are *parallel*, both workers say the same, and the sum makes one step
# twice; the mean makes it once.
#
# Predict first: is Adasum equal to the sum, to the mean, or to neither in each case below?

# %%
CASES = {"orthogonal": ([2, 0], [0, 1]), "45 degrees": ([2, 0], [1, 1]), "parallel": ([2, 0], [1, 0])}
combined = {}
for title, pair in CASES.items():
    g1, g2 = np.array(pair, float)
    combined[title] = {"g1": g1, "g2": g2, "sum": g1 + g2, "mean": (g1 + g2) / 2, "Adasum": sp.adasum([g1, g2])}
    print(f"{title:<10}", *(f"{name} {vector}" for name, vector in list(combined[title].items())[2:]))
assert np.array_equal(combined["orthogonal"]["Adasum"], combined["orthogonal"]["sum"])
assert np.array_equal(combined["parallel"]["Adasum"], combined["parallel"]["mean"])
show(sp.view.plot_vectors(combined), "vectors")

# %% [markdown]
# Orthogonal gradients are added, and parallel ones are averaged. In between, Adasum goes smoothly from one to the
# other. The formula subtracts from the sum half of the *projection* of each gradient on the other one:

# %%
angles = np.radians(np.arange(0, 181, 5))
lengths = {"sum": [], "Adasum": [], "mean": []}
for angle in angles:
    g1, g2 = np.array([1.0, 0.0]), np.array([np.cos(angle), np.sin(angle)])
    dot = g1 @ g2
    by_hand = (1 - dot / (2 * g1 @ g1)) * g1 + (1 - dot / (2 * g2 @ g2)) * g2
    assert np.allclose(by_hand, sp.adasum([g1, g2]))
    for name, vector in (("sum", g1 + g2), ("Adasum", by_hand), ("mean", (g1 + g2) / 2)):
        lengths[name].append(np.linalg.norm(vector))
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for name, line in (("sum", "-"), ("Adasum", "o-"), ("mean", "--")):
    ax.plot(np.degrees(angles), lengths[name], line, label=name)
ax.set(xlabel="angle between two gradients of length 1 [degrees]", ylabel="length of the result")
ax.legend()
show(ax, "angles")

# %% [markdown]
# Beyond 90 degrees the gradients disagree, and the result is longer than the sum. Opposite ones cancel.
#
# ## Where the formula comes from
#
# One worker would make two steps, one after the other. The gradient of the second step is computed with the weights
# after the first one. Workers in parallel do not have these weights.
#
# Here are two samples of a linear model with the loss `(x @ w - y)^2 / 2`. The learning rate is as high as such a
# sample allows: a step makes its own loss zero.
#
# Predict first: two steps in sequence depend on the order of the samples. Which combination of the two *first*
# gradients leads to the mean of both ends?

# %%
samples = [(np.array([2.0, 0.0]), 1.0), (np.array([1.2, 1.6]), 2.0)]
rate = 1 / 4  # 1 over the squared length of x; both have length 2


def gradient(w, sample):
    x, y = sample
    return (x @ w - y) * x


start = np.array([2.0, 1.5])
ends = []
for first, second in (samples, samples[::-1]):
    middle = start - rate * gradient(start, first)
    ends.append(middle - rate * gradient(middle, second))
g1, g2 = (gradient(start, sample) for sample in samples)
steps = {"sum": g1 + g2, "mean": (g1 + g2) / 2, "Adasum": sp.adasum([g1, g2])}
_, ax = plt.subplots(figsize=(7, 5), layout="constrained")
ax.plot(*zip(start, ends[0], strict=True), "k:", *zip(start, ends[1], strict=True), "k:")
ax.plot(*zip(*ends, strict=True), "ks-", label="two steps in sequence, both orders")
ax.plot(*start, "k*", markersize=14, label="start")
for (name, step), marker in zip(steps.items(), "ovD", strict=True):
    ax.plot(*(start - rate * step), marker, markersize=11, label=f"one step: {name}")
    print(f"{name:<6} ends at {start - rate * step}")
print("mean of both orders:", np.mean(ends, axis=0))
ax.set(xlabel="weight 0", ylabel="weight 1")
ax.legend()
show(ax, "sequence")

# %% [markdown]
# Adasum does. For samples like these it is exact. For a network it is an approximation: it uses the outer product of
# the gradient with itself in place of the curvature of the loss.

# %%
assert np.allclose(start - rate * steps["Adasum"], np.mean(ends, axis=0))

# %% [markdown]
# ## More workers: a tree
#
# The formula is for two. Four ranks combine 0 with 1 and 2 with 3, and then the two results. With `2^k` ranks, the
# tree has `k` levels.
#
# Predict first: four gradients can be given to four ranks in 24 orders. Is the result always the same?

# %%
four = np.random.default_rng(4).normal(size=(4, 2))
tree = sp.adasum([sp.adasum(four[:2]), sp.adasum(four[2:])])
assert np.allclose(tree, sp.adasum(four))
results = {tuple(sp.adasum([four[i] for i in order]).round(9)) for order in permutations(range(4))}
print(f"{len(results)} different results:", *(f"({x:.3f}, {y:.3f})" for x, y in sorted(results)))
_, ax = plt.subplots(figsize=(7, 5), layout="constrained")
ax.plot(*four.T, ".", color="0.6")
ax.quiver(*np.zeros((2, 4)), *four.T, angles="xy", scale_units="xy", scale=1, color="0.7")
ax.plot(*zip(*results, strict=True), "D", markersize=9, label="Adasum in all orders")
ax.plot(*four.sum(axis=0), "o", markersize=9, label="sum")
ax.plot(*four.mean(axis=0), "v", markersize=9, label="mean")
ax.set_aspect("equal")
ax.set_title("four gradients (grey)")
ax.legend()
show(ax, "orders")
assert len(results) == 3

# %% [markdown]
# No. Adasum of two is symmetric, but it is not associative: only the three ways to form two pairs matter. So the tree
# is part of the definition, and all algorithms have to follow it.
#
# ## Layer by layer
#
# A model has many parameters, and each one is combined by itself. Predict first: two layers, parallel in the first
# one and orthogonal in the second one. What if the model were one long vector?

# %%
worker_0 = [np.array([3.0, 0.0]), np.array([1.0, 0.0])]
worker_1 = [np.array([3.0, 0.0]), np.array([0.0, 1.0])]
by_layer = sp.adasum([worker_0, worker_1])
flat = sp.adasum([np.concatenate(worker_0), np.concatenate(worker_1)])
print("layer by layer:", *by_layer, "\none vector:    ", flat)
assert np.array_equal(np.concatenate(by_layer), [3, 0, 1, 1])
assert np.allclose(flat, [3.3, 0, 0.55, 0.55])

# %% [markdown]
# The large first layer decides for both, and the second one gets little more than the mean. That is why
# `all_reduce(grads, "adasum")` takes a list: each array counts for itself.
#
# ## How orthogonal are real gradients?
#
# The squared length of the result, divided by the sum of the squared lengths of the gradients, is 1 if all are
# orthogonal, and `1 / n` if all `n` are equal.
#
# Predict first: each worker computes its gradient from 8 samples, and then from 128. When are the gradients more
# orthogonal? Does the ratio rise or fall during training?


# %%
def watch(batch, steps=36):
    network = make_network()
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1)
    ratios = {name: [] for name, _ in network.named_parameters()}
    for step in range(steps):
        _, grads = gradients(network, step, sp.get_rank(), sp.get_world_size(), batch)
        squares = sp.all_reduce(np.array([np.sum(grad**2) for grad in grads]))
        results = sp.all_reduce(grads, "adasum")  # in place: `grads` now has the results
        for name, result, square in zip(ratios, results, squares, strict=True):
            ratios[name].append(float(np.sum(result**2) / square))
        optimizer(results)
    return ratios


early, late = {}, {}
for batch in (8, 128):
    ratios = sp.launch(watch, (batch,), world_size=8, transport="inline")[0]
    mean = np.mean(list(ratios.values()), axis=0)
    early[batch], late[batch] = mean[:3].mean(), mean[18:].mean()
    print(f"{batch:3} samples: {early[batch]:.2f} in the first 3 steps, {late[batch]:.2f} in the second half")
show(sp.view.plot_orthogonality(ratios, workers=8, smooth=3), "orthogonality")

# %% [markdown]
# A gradient has a part that all samples share, and noise. The noise of two workers is nearly orthogonal, and a small
# batch has much of it. With large batches, the shared part remains, and the gradients are more parallel.
#
# The picture is for 128 samples, and the ratio rises in most layers. At first all samples pull the weights away from
# the random start, in one direction. Later they disagree. With 8 samples the ratio is high from the start, and falls a
# little. So no fixed factor between sum and mean is right for all batches, layers and steps.

# %%
assert early[8] > 2 * early[128]
assert late[128] > 1.3 * early[128]
assert late[8] < early[8]

# %% [markdown]
# ## Large batches
#
# Now three passes over the data, with 1, 4 and 16 workers, at the same learning rate. With one worker, these are 384
# steps of 8 samples. With 16 workers, they are 24 steps of 128 samples.
#
# Predict first: which method keeps its accuracy?

# %%
test_images, test_labels = sp.data.digits("test")[:]


def accuracy(how, workers):
    steps = 3 * len(images) // (BATCH * workers)
    _, network = sp.launch(train, (how, steps), world_size=workers, transport="inline")[0]
    return float(np.mean(network(test_images).numpy().argmax(axis=1) == test_labels))


one = [accuracy("sum", 1)]
accuracies = {how: [(1, one)] for how in ("sum", "mean", "adasum")}
for how, points in accuracies.items():
    points += [(workers, [accuracy(how, workers)]) for workers in (4, 16)]
    print(f"{how:<6}", *(f"{workers:2} workers {found[0]:4.0%}  " for workers, found in points))
picture, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for how, points in accuracies.items():
    ax.plot(*zip(*points, strict=True), "o-", label=how)
ax.set(xlabel="workers", xscale="log", xticks=(1, 4, 16), xticklabels=(1, 4, 16), ylabel="test accuracy")
ax.legend()
show(picture, "accuracies")

# %% [markdown]
# Adasum does. With 4 workers the sum and the mean are nearly as good. With 16 workers the sum is useless, and the mean
# learns too slowly; a higher learning rate would help it, but must be found anew for each number of workers.

# %%
at_16 = {how: points[-1][1][0] for how, points in accuracies.items()}
assert at_16["sum"] < 0.4 < at_16["mean"] < 0.85 < at_16["adasum"]

# %% [markdown]
# ## The price
#
# The formula needs the dot products `g1 @ g2`, `g1 @ g1` and `g2 @ g2`, but no rank has to see two whole gradients: a
# dot product is a sum over slices. In the published algorithm, two ranks exchange halves of their vectors. One of them
# then has the first half of both vectors, and the other one the second half. They compute the three dot products of
# their halves, and add them with the ranks that have the other parts. Then they combine their halves, go on with
# quarters, and come back.
#
# `dry_run` runs a program without its data, and predicts the time on described hardware, here on four H100. Predict
# first: four ranks, one vector. How many bytes more than for a sum does a rank send?


# %%
def reduce_once(size, op):
    x = sp.nn.initializer("zeros", [size // 4], np.float32).detach()
    sp.all_reduce(x, op, algorithm="halving_doubling")


rows = []
for size in (1 << 18, 1 << 21, 1 << 24):
    row = {}
    for op in ("sum", "adasum"):
        prediction = sp.dry_run(reduce_once, (size, op), world_size=4, cluster="dgx-h100")
        (event,) = (event for event in prediction.trace.events if event.rank == 0)
        row |= {f"{op}_s": prediction.step_time_s, f"{op}_bytes": event.sent_bytes}
    row["ratio"] = row["adasum_s"] / row["sum_s"]
    rows.append(row)
    print(f"{size:8} bytes: {row['adasum_bytes'] - row['sum_bytes']} more sent, {row['ratio']:.2f} times the time")

# %% [markdown]
# 72 bytes: three numbers of 8 bytes at the first level, and twice three at the second. The latency of these small
# messages does not depend on the vector. At 262 kB they make the call 1.7 times as long, at 16.8 MB 1.1 times.

# %%
assert all(row["adasum_bytes"] - row["sum_bytes"] == 72 for row in rows)
assert rows[0]["ratio"] > 1.5
assert rows[-1]["ratio"] < 1.15

# %% [markdown]
# ## Weights instead of gradients
#
# Optimizers such as Adam do not simply add the gradient to the weights. So each worker first makes its own step, and
# Adasum combines the *changes* of the weights. `AdasumOptimizer` does that around any optimizer. On a cluster, its
# `nodes` average the gradients inside each node, and take Adasum across nodes.
#
# Predict first: for which of SGD and Adam is this the same as Adasum of the gradients?


# %%
def one_step(make_optimizer, of_weights, nodes=None):
    network = make_network()
    optimizer = make_optimizer(network.parameters())
    if of_weights:
        optimizer = sp.parallel.AdasumOptimizer(optimizer, nodes=nodes)
    _, grads = gradients(network, 0, sp.get_rank(), sp.get_world_size())
    if of_weights:
        optimizer.step()
    else:
        optimizer(sp.all_reduce(grads, "adasum"))
    return network[0].weight.numpy()


OPTIMIZERS = {"SGD": lambda p: sp.optim.SGD(p, lr=0.2), "Adam": lambda p: sp.optim.Adam(p, lr=0.01)}
apart = {}
for name, make_optimizer in OPTIMIZERS.items():
    of_gradients, of_weights = (
        sp.launch(one_step, (make_optimizer, choice), world_size=4, transport="inline")[0] for choice in (False, True)
    )
    apart[name] = np.abs(of_gradients - of_weights).max()
    print(f"{name:<4} the weights differ by at most {apart[name]:.0e}")
assert apart["SGD"] < 1e-6 < 1e-3 < apart["Adam"]

# %% [markdown]
# For SGD, whose step is proportional to the gradient. Now on two nodes of two ranks, this time with real processes:

# %%
across = sp.launch(one_step, (OPTIMIZERS["SGD"], True, [[0, 1], [2, 3]]), world_size=4)[0]
network = make_network()
grads = [gradients(network, 0, worker, 4)[1][0] for worker in range(4)]
of_nodes = sp.adasum([(grads[0] + grads[1]) / 2, (grads[2] + grads[3]) / 2])
expected = network[0].weight.numpy() - 0.2 * of_nodes
np.testing.assert_allclose(across, expected, atol=1e-6)
_, ax = plt.subplots(figsize=(9, 3.5), layout="constrained")
norms = {"mean of all": np.mean(grads, axis=0), "nodes, then Adasum": of_nodes, "Adasum of all": sp.adasum(grads)}
norms = {name: float(np.linalg.norm(vector)) for name, vector in norms.items()}
ax.barh(list(norms), list(norms.values()))
ax.set_xlabel("length of the combined gradient of the first layer")
show(ax, "nodes")
assert norms["mean of all"] < norms["nodes, then Adasum"] < norms["Adasum of all"]

# %% [markdown]
# ## What goes wrong
#
# **Three ranks.** The tree is published for powers of two. **One node.** With all ranks on one node, there is nothing
# to take Adasum of. Predict first: what does the library do in each of these cases?


# %%
def on_one_node():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = one_step(OPTIMIZERS["SGD"], True, nodes=[[0, 1, 2, 3]])
    return weights, [str(warning.message) for warning in caught]


three = sp.adasum(four[:3])
assert np.allclose(three, sp.adasum([sp.adasum(four[:2]), four[2]]))
try:
    sp.adasum(four[:3], strict=True)
except InputError as error:
    refusal = str(error)
    print("three vectors:", refusal)
results = sp.launch(on_one_node, world_size=4)
weights, told = results[0][0], [text for _, texts in results for text in texts]
print("one node:", told[0])
np.testing.assert_allclose(weights, network[0].weight.numpy() - 0.2 * np.mean(grads, axis=0), atol=1e-6)

# %% [markdown]
# The third vector waits for the next level, unless `strict=True` refuses it. So it counts more than the other two. On
# one node, the result is the mean, and the library warns.
#
# **A learning rate for the number of workers.** With the mean, one often multiplies the learning rate by the number
# of workers. Predict first: what happens if the same is done with Adasum?

# %%
scaled = {}
for how in ("mean", "adasum"):
    scaled[how], _ = sp.launch(train, (how, 24, 16 * RATE), world_size=16, transport="inline")[0]
    print(f"{how:<6} at the rate of one worker {curves[how][-1]:.2f}, at sixteen times that rate {scaled[how][-1]:.2f}")
assert scaled["adasum"][-1] > 5 * curves["adasum"][-1]

# %% [markdown]
# It learns almost nothing. Adasum has already added what can be added. Begin with the learning rate of one worker.
#
# **A gradient of zeros.** Predict first: a worker with an empty batch has the gradient 0, another one has a tiny
# gradient. Do they have about the same effect?

# %%
g = np.array([1.0, 2.0])
print("with 0:", sp.adasum([g, 0 * g]), " with 1e-9 g:", sp.adasum([g, 1e-9 * g]))
assert np.array_equal(sp.adasum([g, 0 * g]), g)
assert np.allclose(sp.adasum([g, 1e-9 * g]), g / 2)

# %% [markdown]
# No. A parallel gradient halves the other one, however short it is. Zero has no direction, and changes nothing. The
# formula divides by the squared length, so a program has to treat 0 separately.
#
# ## Exercises
#
# Write the functions. Each check begins with the smallest cases, and draws the first one that fails. Solutions are in
# `tutorials/solutions/05_adasum.py`.


# %%
def adasum_pair(a, b):
    """Exercise 1: return the Adasum of two vectors. If one of them is zero, return the other one."""
    raise NotImplementedError


sp.exercises.check("adasum_pair", adasum_pair)


# %%
def adasum_tree(vectors):
    """Exercise 2: return the Adasum of 1, 2, 4, 8 … vectors: first of neighbours, then of their results, and so on.

    Use your `adasum_pair`, or `sp.adasum` of two vectors.
    """
    raise NotImplementedError


sp.exercises.check("adasum_tree", adasum_tree)


# %%
def adasum_of_slices(a, b):
    """Exercise 3: return this rank's slice of the Adasum of two vectors.

    `a` and `b` are this rank's slices of the two vectors; a slice may be empty. Send no more than an all-reduce of
    three numbers.
    """
    raise NotImplementedError


sp.exercises.check("adasum_of_slices", adasum_of_slices)
