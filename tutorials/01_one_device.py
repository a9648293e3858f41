# %% [markdown]
# # Lesson 1: One device, the engine in an hour
#
# Parallel training is ordinary training, cut into parts. So the first lesson has one device: tensors, gradients,
# modules, an optimizer, and a clock. At its end there are two devices, and you follow one training step from
# `loss.backward()` to the bytes in shared memory. You need NumPy, and the chain rule.
#
# Run it: `python tutorials/01_one_device.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: a classifier of handwritten digits. The images have 8 x 8 pixels, and come with the package.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.errors import AutogradError, ShapeError
from simparallel.trace import CallTrace

images, labels = sp.data.digits("train")[:]
test_images, test_labels = sp.data.digits("test")[:]

sp.set_seed(0)
model = sp.nn.Linear(64, 10)
start = model.state_dict()
optimizer = sp.optim.SGD(model.parameters(), lr=0.5)
losses = []
for _ in range(50):
    loss = sp.functions.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
accuracy = np.mean(model(test_images).numpy().argmax(axis=1) == test_labels)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy:.1%} of the test images are right")

# %% [markdown]
# ## The same in NumPy
#
# There is no magic in it. For a linear model and cross-entropy, the gradients are short formulas: the gradient of the
# logits is "probabilities minus the right answer", divided by the number of samples.
#
# Predict first: how far are the losses of these lines from those above?

# %%
weight, bias = start["weight"].copy(), start["bias"].copy()
by_hand = []
for _ in range(50):
    logits = images @ weight.T + bias
    logits = logits - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    by_hand.append(-np.log(probabilities[np.arange(len(labels)), labels]).mean())
    gradient = (probabilities - np.eye(10)[labels]) / len(labels)
    weight -= 0.5 * gradient.T @ images
    bias -= 0.5 * gradient.sum(axis=0)


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "01_one_device", f"{name}.png"), dpi=100)


apart = np.abs(np.subtract(losses, by_hand)).max()
print(f"the losses differ by at most {apart:.0e}")
assert apart < 1e-5
assert accuracy > 0.85
show(sp.view.plot_loss({"simparallel": losses, "NumPy": by_hand}, title="A linear classifier"), "losses")

# %% [markdown]
# Only by rounding. The rest of this lesson is about the difference between the *programs*: the first one contains no
# formula of a gradient.
#
# ## Tensors and the tape
#
# A `Tensor` contains an array. With `requires_grad=True` it is a *leaf* that gets a gradient. Every operation that
# reads such a tensor computes its result with NumPy, and also writes a line on the *tape*: which operation, on which
# inputs.
#
# The picture has a box for each operation and for each leaf. Predict first: `x` is used twice below. How many boxes are
# there, and in which order must backward visit them?

# %%
x = sp.Tensor([1.0, 2.0], requires_grad=True)
w = sp.Tensor([0.5, -1.0], requires_grad=True)
y = (x * w + x).tanh().sum()
print(f"y = {y.item():.4f}")
show(sp.view.plot_tape(y, {"x": x, "w": w}, title="The tape of y = sum(tanh(x w + x))"), "tape")
y.backward()
print("gradient of x:", x.grad, " gradient of w:", w.grad)

# %% [markdown]
# Six: two leaves and four operations, numbered as they ran. Backward visits them from 3 to 0. `x` must wait for *both*
# of its uses: its gradient is the sum of the two arrows.
#
# ## Backward by hand
#
# A tape is simple enough to be written by hand. Each line has the name of the result, the inputs, and a function that
# turns the gradient of the result into those of the inputs. That function is the chain rule for one operation.

# %%
values = {"x": np.array([1.0, 2.0]), "w": np.array([0.5, -1.0])}
tape = []


def record(name, inputs, value, pull_back):
    values[name] = value
    tape.append((name, inputs, pull_back))


record("a", ("x", "w"), values["x"] * values["w"], lambda d: (d * values["w"], d * values["x"]))
record("b", ("a", "x"), values["a"] + values["x"], lambda d: (d, d))
record("c", ("b",), np.tanh(values["b"]), lambda d: (d * (1 - values["c"] ** 2),))
record("y", ("c",), values["c"].sum(), lambda d: (d * np.ones(2),))

gradients = {"y": 1.0}
for name, inputs, pull_back in reversed(tape):
    for source, gradient in zip(inputs, pull_back(gradients[name]), strict=True):
        gradients[source] = gradients.get(source, 0) + gradient  # a tensor with several uses: add

for leaf, name in ((x, "x"), (w, "w")):
    np.testing.assert_allclose(gradients[name], leaf.grad.numpy(), rtol=1e-6)
print({name: np.round(gradient, 4).tolist() for name, gradient in gradients.items()})

# %% [markdown]
# That is the whole idea of the engine. Real operations only have longer functions, and the order is found from the
# tape: the newest line first, because all uses of a result are newer than the result.
#
# ## Check a gradient
#
# A wrong gradient raises no error. The network only learns badly. So compare it with finite differences:
# `(f(x + ε) - f(x - ε)) / 2 ε` should be the gradient. `check_gradients` does so in float64.
#
# This is an operation of our own: softplus, `log(1 + exp(x))`. Predict first: which mistake does its backward have?


# %%
class Softplus(sp.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (1 + x.exp()).log()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return x.sigmoid()


try:
    sp.testing.check_gradients(Softplus.apply, [np.linspace(-3, 3, 25)])
except AssertionError as error:
    wrong_gradient = str(error)
    print(wrong_gradient)

# %% [markdown]
# It forgets `dy`: the gradient that arrives must be multiplied in. With `dy = 1`, as in a sum, the mistake
# does not show.


# %%
class MendedSoftplus(Softplus):
    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * x.sigmoid()


inputs = sp.Tensor(np.linspace(-3, 3, 25), requires_grad=True)
sp.testing.check_gradients(MendedSoftplus.apply, [inputs])
MendedSoftplus.apply(inputs).sum().backward()
points = inputs.detach().numpy()
differences = (np.log1p(np.exp(points + 0.1)) - np.log1p(np.exp(points - 0.1))) / 0.2
_, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
ax.plot(points, inputs.grad.numpy(), label="backward of softplus", linewidth=4, color="#56B4E9")
ax.plot(points, differences, "k--", label="finite differences, ε = 0.1")
ax.set(xlabel="x", ylabel="gradient")
ax.legend()
show(ax, "softplus")

# %% [markdown]
# ## Modules
#
# A `Module` collects parameters. Its `forward` is plain Python, and parameters are found by name, also in modules
# inside of modules.


# %%
class Classifier(sp.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = sp.nn.Linear(64, width, weight_init="he_normal")
        self.out = sp.nn.Linear(width, 10)

    def forward(self, x):
        return self.out(self.hidden(x).relu())


sp.set_seed(0)
model = Classifier(32)
for name, parameter in model.named_parameters():
    print(f"{name:<14} {parameter.shape}")
print(sp.nn.summary(model, (32, 64)))
loss = sp.functions.cross_entropy(model(images[:32]), labels[:32])
show(sp.view.plot_tape(loss, dict(model.named_parameters()), title="The tape of a loss"), "model")

# %% [markdown]
# ## The optimizer
#
# After `backward`, each parameter has its gradient in `.grad`. The optimizer changes the parameters. SGD is one line:
# `p -= lr * p.grad`. *Momentum* keeps a sum of earlier gradients, like a heavy ball. *Adam* divides by the usual size
# of each element's gradient.
#
# Predict first: a long valley, ten times as steep across as along. Which optimizer comes closest to its lowest point
# in 30 steps?


# %%
def path(optimizer_of):
    p = sp.Tensor([-4.0, 1.5], requires_grad=True)
    optimizer = optimizer_of([p])
    points = [p.detach().numpy().copy()]
    for _ in range(30):
        optimizer.zero_grad()
        (p * p * sp.Tensor([0.1, 1.0])).sum().backward()
        optimizer.step()
        points.append(p.detach().numpy().copy())
    return np.array(points)


paths = {
    "SGD": path(lambda p: sp.optim.SGD(p, lr=0.9)),
    "SGD, momentum 0.5": path(lambda p: sp.optim.SGD(p, lr=0.9, momentum=0.5)),
    "Adam": path(lambda p: sp.optim.Adam(p, lr=0.4)),
}
_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
along, across = np.meshgrid(np.linspace(-4.5, 1.5, 80), np.linspace(-1.8, 1.8, 60))
ax.contour(along, across, 0.1 * along**2 + across**2, levels=12, colors="0.8")
for (name, points), marker in zip(paths.items(), "os^", strict=True):
    ax.plot(points[:, 0], points[:, 1], marker=marker, markersize=4, label=name)
    print(f"{name:<18} {np.linalg.norm(points[-1]):.4f} from the lowest point after 30 steps")
ax.set(xlabel="first parameter", ylabel="second parameter")
ax.legend()
show(ax, "optimizers")

# %% [markdown]
# Momentum comes closest: it gains speed along the valley, and its swings across cancel. SGD with the same learning rate
# is slower along the valley, and above a rate of 1 it diverges across. Adam begins with steps of equal length in both
# directions, and needs a smaller rate towards the end. No optimizer is the best for all valleys. The first step of SGD
# is the formula:

# %%
steps = paths["SGD"]
np.testing.assert_allclose(steps[1], steps[0] - 0.9 * 2 * steps[0] * np.array([0.1, 1.0]))
distance = {name: np.linalg.norm(points[-1]) for name, points in paths.items()}
assert min(distance, key=distance.get) == "SGD, momentum 0.5"

# %% [markdown]
# ## A training loop
#
# A `DataLoader` shuffles the samples and makes batches of them. For each batch, the four lines from the beginning
# follow.
#
# Predict first: the linear classifier was right on nine of ten test images. How many does a network with a hidden layer
# of 64 get right?


# %%
def train(network, epochs=8, batch_size=32):
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for x, y in sp.data.DataLoader(sp.data.digits("train"), batch_size, shuffle=True):
            loss = sp.functions.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with sp.no_grad():  # no tape: nothing is kept for a backward
        right = network(test_images).numpy().argmax(axis=1) == test_labels
    return losses, float(right.mean())


sp.set_seed(0)
losses, accuracy = train(Classifier(64))
print(f"{len(losses)} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy:.1%} right")
assert accuracy > 0.94
show(sp.view.plot_loss({"hidden layer of 64": losses}, title="Eight epochs"), "training")

# %% [markdown]
# About 97 of 100. (It was trained for longer, too: 360 steps in place of 50.)
#
# ## The clock of a device you do not have
#
# So far the program ran here, on a CPU. `launch` runs a function on a *described* device, by default an A100. The
# arithmetic still happens here, with the same results. But each operation also says how many floating-point
# operations and bytes it needs, and the description says how long they take there. This *simulated time* is the same
# on every run.
#
# `transport="inline"` runs the function in a thread of this process, and `record="full"` records every operation.
#
# Predict first: how much longer does a step with 1,024 images take than a step with 32?


# %%
def one_step(batch_size):
    sp.set_seed(0)
    network = Classifier(64)
    optimizer = sp.optim.Adam(network.parameters(), lr=0.01)
    loss = sp.functions.cross_entropy(network(images[:batch_size]), labels[:batch_size])
    loss.backward()
    optimizer.step()


runs = {size: sp.launch(one_step, (size,), record="full", transport="inline") for size in (32, 1024)}
for size, run in runs.items():
    print(f"{size:4d} images: {run.trace.makespan_s * 1e6:.1f} µs simulated")
figure, axes = plt.subplots(2, figsize=(13, 4.6), layout="constrained")
for ax, (size, run) in zip(axes, runs.items(), strict=True):
    sp.view.plot_timeline(run.trace.events, ax=ax, title=f"{size} images")
show(figure, "clock")
assert runs[1024].trace.makespan_s < 1.2 * runs[32].trace.makespan_s

# %% [markdown]
# Hardly any longer. Starting an operation takes 5 µs on this device, and the arithmetic of such a small network takes
# almost no time. A large device with little work is mostly idle; lesson 6 is about that.
#
# Memory is counted as arrays come and go. Predict first: when is the peak, and what is it made of?

# %%
memory = runs[1024].memory[0]
for category, size_bytes in memory["at_peak"].items():
    print(f"{category:<16} {size_bytes / 1e3:7.1f} kB")
print(f"{'peak':<16} {memory['peak_bytes'] / 1e3:7.1f} kB")
assert sum(memory["at_peak"].values()) == memory["peak_bytes"]
assert memory["at_peak"]["activations"] > memory["peak_bytes"] / 2
show(sp.view.plot_memory(runs[1024].trace.events, title="Memory of a step with 1,024 images"), "memory")

# %% [markdown]
# It is in backward: the activations of forward are still there, and the gradients are added. Activations are most of
# it, and they grow with the batch. Adam's state, two numbers for each parameter, comes with its first step, after the
# end of this picture, and stays. (The picture shows the memory at the end of each operation. During an operation there
# may be more, so the printed peak is a little higher.)
#
# ## Two devices: one step to the bytes
#
# Now two real processes train the same network with half of the batch each, and average their gradients during backward
# (lesson 3). Which code runs between `loss.backward()` and the bytes in shared memory? `CallTrace` counts the functions
# of the package in each phase, and records the paths to the lines in `ENDS`.
#
# Predict first: how many functions of the package does one step run through, tens, hundreds or thousands?

# %%
ENDS = {
    "the copy into shared memory": ("comm/views.py:show", "own[...] = x"),
    "the sum over the ranks": ("algorithms/reduction.py:reduce_into", "rule.ufunc(parts[0][start:stop]"),
}


def traced_step(steps=10):
    sp.set_seed(0)
    network = sp.parallel.DistributedDataParallel(Classifier(1024))
    optimizer = sp.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    half = slice(sp.get_rank(), 64, 2)
    traces = [CallTrace(ENDS) for _ in range(steps)]
    for trace in traces:
        with trace.phase("forward"):
            loss = sp.functions.cross_entropy(network(images[half]), labels[half])
        with trace.phase("zero_grad"):
            optimizer.zero_grad()
        with trace.phase("backward"):
            loss.backward()
        with trace.phase("optimizer"):
            optimizer.step()
    return min(traces, key=CallTrace.total)  # the first steps plan, and some steps have to wait


trace = sp.launch(traced_step, world_size=2)[0]
print(trace.table())
for name in trace.paths:
    print(f"\nFrom loss.backward() to {name}:\n{trace.path(name)}")
calls, functions, files = trace.total()
assert 50 < functions < 200
assert set(trace.paths) == set(ENDS)
_, ax = plt.subplots(figsize=(9, 3), layout="constrained")
phases = list(trace.calls)[::-1]
ax.barh(phases, [trace.total(phase)[0] for phase in phases], color="#56B4E9", label="calls")
ax.barh(phases, [trace.total(phase)[1] for phase in phases], color="#0072B2", height=0.4, label="different functions")
ax.set_xlabel("functions of the package in one step on rank 0")
ax.legend()
show(ax, "calls")

# %% [markdown]
# A few hundred calls, of a little over a hundred different functions. Read a path from top to bottom: the walk over the
# tape finishes the gradient of a parameter; a hook puts it into a bucket; a full bucket starts an all-reduce; and its
# last line copies the bytes to where the other process can read them. Open these files in this order, and you have read
# the engine. `tutorials/one_step.py` prints the same for a plain network.
#
# ## What goes wrong
#
# **Backward twice.** Predict first: why does a second `loss.backward()` fail?


# %%
def said(program):
    """Run a wrong program, and return the first line of its error."""
    try:
        program()
    except (AutogradError, ShapeError) as error:
        return str(error).splitlines()[0]


x = sp.Tensor([1.0, 2.0], requires_grad=True)
loss = (x * x).sum()
loss.backward()
twice = said(loss.backward)
print(twice)
assert "consumed" in twice

# %% [markdown]
# Backward frees what forward has kept, line by line, so that memory falls early. `retain_graph=True` keeps it.
#
# **No `zero_grad`.** Predict first: three steps, and nothing clears the gradients. What is in `.grad`?

# %%
x = sp.Tensor([1.0, 2.0], requires_grad=True)
for _ in range(3):
    (x * x).sum().backward()
print(x.grad)
assert x.grad.tolist() == [6, 12]

# %% [markdown]
# Three times the gradient: `backward` adds. Lesson 3 uses that on purpose.
#
# **A value changes between forward and backward.** The gradient of `x * x` needs `x`. Predict first: what if the
# program writes to `x` in between?

# %%
x = sp.Tensor([1.0, 2.0], requires_grad=True)
loss = (x * x).sum()
with sp.no_grad():
    x += 1
changed = said(loss.backward)
print(changed)
assert changed

# %% [markdown]
# The engine notices, and refuses. Otherwise the gradient would mix old and new values, and be wrong without a word.
#
# **Shapes.** A bias of 10 for an output of 12:

# %%
wrong_shape = said(lambda: sp.functions.linear(sp.Tensor(np.ones((4, 3))), np.ones((12, 3)), np.ones(10)))
print(wrong_shape)
assert "10" in wrong_shape

# %% [markdown]
# The message names the operation, the dimension, and both sizes.
#
# ## Exercises
#
# Write the functions below. Each check begins with the smallest case, and draws the first that fails. Solutions are in
# `tutorials/solutions/01_one_device.py`.


# %%
def layer_norm_backward(x, dy, eps):
    """Exercise 1: return the gradient of `x`, an array, given the gradient `dy` of `y`.

    `x`, `dy` and the result have the shape (rows, columns). For each row, `y = (x - mean) / sqrt(variance + eps)`, with
    the mean of the squared deviations as variance. The mean and the variance depend on `x`, too.
    """
    raise NotImplementedError


sp.exercises.check("layer_norm_backward", layer_norm_backward)


# %%
def backward_order(inputs, root):
    """Exercise 2: return the list of nodes in an order in which backward may visit them, from `root` on.

    `inputs` is a tape, a dict from each node to the list of nodes that it reads (empty for a leaf). A node comes after
    all nodes that read it, and only once. Nodes that `root` does not depend on are left out.
    """
    raise NotImplementedError


sp.exercises.check("backward_order", backward_order)


# %%
def adam(parameters, gradients, lr, beta1, beta2, eps):
    """Exercise 3: return the array of parameters after one step for each of the gradients, in order.

    `parameters` is an array, and `gradients` a list of arrays of its shape; do not change them.

    m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², both from zero. In step t = 1, 2, …, m / (1 - beta1^t)
    and v / (1 - beta2^t) make up for the start at zero. Then p = p - lr m / (sqrt(v) + eps), with these m and v.
    """
    raise NotImplementedError


sp.exercises.check("adam", adam)
