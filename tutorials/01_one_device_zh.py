# %% [markdown]
# # 第 1 课：单个设备，一小时看懂引擎
#
# 并行训练就是把普通的训练切成几份。所以第一课只有一个设备：张量、梯度、模块、优化器和时钟。到了最后会有两个设备，
# 我们跟随一个训练步，从 `loss.backward()` 一直到共享内存里的字节。学习本课需要会用 NumPy，并且知道链式法则。
#
# 运行方式：`python tutorials/01_one_device_zh.py`，或者作为 notebook 打开。图片同时保存到文件夹 `pictures`，
# 图中文字为英文。
#
# | 中文 | English |
# |---|---|
# | 张量 | tensor |
# | 梯度 | gradient |
# | 计算带 | tape |
# | 叶子 | leaf |
# | 前向、反向 | forward, backward |
# | 有限差分 | finite differences |
# | 模块、参数 | module, parameter |
# | 优化器、动量 | optimizer, momentum |
# | 激活 | activation |
# | 模拟时间 | simulated time |
# | 拓扑次序 | topological order |
#
# 先看结果：一个手写数字的分类器。图像有 8 x 8 个像素，数据随软件包提供。

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
# ## 同样的计算，用 NumPy
#
# 这里面没有魔法。对于线性模型和交叉熵，梯度有简短的公式：logits 的梯度等于“概率减去正确答案”，再除以样本数。
#
# 先猜一猜：下面这几行的损失与上面的损失相差多少？

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
    """保存图片。notebook 也会在单元格下方显示它。"""
    sp.view.save_figure(picture, Path("pictures", "01_one_device", f"{name}.png"), dpi=100)


apart = np.abs(np.subtract(losses, by_hand)).max()
print(f"the losses differ by at most {apart:.0e}")
assert apart < 1e-5
assert accuracy > 0.85
show(sp.view.plot_loss({"simparallel": losses, "NumPy": by_hand}, title="A linear classifier"), "losses")

# %% [markdown]
# 只差舍入误差。本课余下的部分讲的是两个*程序*的区别：第一个程序里没有任何梯度公式。
#
# ## 张量与计算带
#
# `Tensor` 里有一个数组。带有 `requires_grad=True` 的张量是一个需要梯度的*叶子*。每个读取这种张量的运算，除了用 NumPy
# 算出结果，还会在*计算带*上记一行：是什么运算，输入是什么。
#
# 图中每个运算和每个叶子各有一个方框。先猜一猜：下面 `x` 用了两次。一共有几个方框？反向必须按什么次序访问它们？

# %%
x = sp.Tensor([1.0, 2.0], requires_grad=True)
w = sp.Tensor([0.5, -1.0], requires_grad=True)
y = (x * w + x).tanh().sum()
print(f"y = {y.item():.4f}")
show(sp.view.plot_tape(y, {"x": x, "w": w}, title="The tape of y = sum(tanh(x w + x))"), "tape")
y.backward()
print("gradient of x:", x.grad, " gradient of w:", w.grad)

# %% [markdown]
# 六个：两个叶子和四个运算，按运行的先后编号。反向从 3 走到 0。`x` 必须等*两*处使用都访问完：它的梯度是两个箭头之和。
#
# ## 手写反向
#
# 计算带很简单，可以自己写一个。每一行有结果的名字、输入，以及一个函数，它把结果的梯度变成各个输入的梯度。
# 这个函数就是一个运算的链式法则。

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
        gradients[source] = gradients.get(source, 0) + gradient  # 多次使用的张量：相加

for leaf, name in ((x, "x"), (w, "w")):
    np.testing.assert_allclose(gradients[name], leaf.grad.numpy(), rtol=1e-6)
print({name: np.round(gradient, 4).tolist() for name, gradient in gradients.items()})

# %% [markdown]
# 引擎的全部思想就是这些。真正的运算只是函数更长一些，而次序由计算带得出：最新的一行在先，
# 因为一个结果的所有使用都比它自己新。
#
# ## 检查梯度
#
# 错误的梯度不会引发异常，只会让网络学得很差。所以要与有限差分比较：`(f(x + ε) - f(x - ε)) / 2 ε` 应当等于梯度。
# `check_gradients` 用 float64 完成这件事。
#
# 下面是我们自己的运算：softplus，即 `log(1 + exp(x))`。先猜一猜：它的反向有什么错误？


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
# 它忘了 `dy`：必须乘上传进来的梯度。如果 `dy = 1`，例如求和的时候，就看不出错误。


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
# ## 模块
#
# `Module` 把参数收集起来。它的 `forward` 是普通的 Python 代码；参数按名字查找，模块里的模块也一样。


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
# ## 优化器
#
# `backward` 之后，每个参数的梯度在 `.grad` 里。优化器负责改变参数。SGD 只有一行：`p -= lr * p.grad`。
# *动量*保留以前梯度的和，像一个沉重的球。*Adam* 除以每个元素的梯度通常的大小。
#
# 先猜一猜：有一条长长的山谷，横向比纵向陡十倍。30 步之后，哪个优化器离最低点最近？


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
# 动量最近：它沿着山谷不断加速，横向的摆动互相抵消。学习率相同的 SGD 沿山谷前进得更慢，而且学习率超过 1 时，
# 横向就会发散。Adam 开始时在两个方向上的步长相等，最后阶段需要更小的学习率。没有哪个优化器对所有山谷都最好。
# SGD 的第一步就是这个公式：

# %%
steps = paths["SGD"]
np.testing.assert_allclose(steps[1], steps[0] - 0.9 * 2 * steps[0] * np.array([0.1, 1.0]))
distance = {name: np.linalg.norm(points[-1]) for name, points in paths.items()}
assert min(distance, key=distance.get) == "SGD, momentum 0.5"

# %% [markdown]
# ## 训练循环
#
# `DataLoader` 打乱样本，并组成批次。每个批次执行的，就是开头的那四行。
#
# 先猜一猜：线性分类器答对了十分之九的测试图像。带有 64 个单元隐藏层的网络能答对多少？


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
    with sp.no_grad():  # 没有计算带：不为反向保留任何内容
        right = network(test_images).numpy().argmax(axis=1) == test_labels
    return losses, float(right.mean())


sp.set_seed(0)
losses, accuracy = train(Classifier(64))
print(f"{len(losses)} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy:.1%} right")
assert accuracy > 0.94
show(sp.view.plot_loss({"hidden layer of 64": losses}, title="Eight epochs"), "training")

# %% [markdown]
# 100 张里约有 97 张。（训练的步数也更多：360 步，而不是 50 步。）
#
# ## 没有设备也能计时
#
# 到目前为止，程序都在这台机器的 CPU 上运行。`launch` 在一个*描述出来的*设备上运行函数，默认是 A100。
# 计算仍然在这台机器上进行，结果相同。但是每个运算还会说明自己需要多少次浮点运算和多少字节，
# 由设备的描述得出在那个设备上需要多长时间。这种*模拟时间*每次运行都相同。
#
# `transport="inline"` 让函数在本进程的一个线程里运行，`record="full"` 记录每一个运算。
#
# 先猜一猜：与 32 张图像的一步相比，1024 张图像的一步要多花多少时间？


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
# 几乎没有多花。在这个设备上，启动一个运算需要 5 µs，而这么小的网络，计算本身几乎不花时间。大设备只有少量计算时，
# 大部分时间在空转；第 6 课专门讲这个。
#
# 内存随着数组的产生和释放来统计。先猜一猜：峰值出现在什么时候？由什么组成？

# %%
memory = runs[1024].memory[0]
for category, size_bytes in memory["at_peak"].items():
    print(f"{category:<16} {size_bytes / 1e3:7.1f} kB")
print(f"{'peak':<16} {memory['peak_bytes'] / 1e3:7.1f} kB")
assert sum(memory["at_peak"].values()) == memory["peak_bytes"]
assert memory["at_peak"]["activations"] > memory["peak_bytes"] / 2
show(sp.view.plot_memory(runs[1024].trace.events, title="Memory of a step with 1,024 images"), "memory")

# %% [markdown]
# 出现在反向：前向的激活还在，梯度又来了。激活占了大部分，并且随批次增长。Adam 的状态是每个参数两个数，
# 在它走完第一步时出现（在这张图之后），以后一直保留。（图中是每个运算结束时的内存；运算过程中可能更多，
# 所以打印出来的峰值略高。）
#
# ## 两个设备：从一步到字节
#
# 现在由两个真正的进程训练同一个网络，各用半个批次，并在反向期间对梯度取平均（第 3 课）。从 `loss.backward()`
# 到共享内存里的字节，中间运行了哪些代码？`CallTrace` 统计软件包的函数在每个阶段的调用，并记下通往 `ENDS` 中各行的路径。
#
# 先猜一猜：一步会经过软件包的多少个函数？几十、几百，还是几千？

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
    return min(traces, key=CallTrace.total)  # 最初几步要做规划，有些步需要等待


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
# 几百次调用，涉及一百多个不同的函数。请从上到下读一条路径：沿计算带反向遍历，算完一个参数的梯度；一个钩子（hook）
# 把它放进桶里；桶满了就启动一次 all-reduce；最后一行把字节复制到另一个进程能读到的地方。按这个次序打开这些文件，
# 就读完了整个引擎。`tutorials/one_step.py` 为一个普通的网络打印同样的内容。
#
# ## 常见错误
#
# **反向两次。** 先猜一猜：为什么第二次 `loss.backward()` 会失败？


# %%
def said(program):
    """运行一个错误的程序，返回错误信息的第一行。"""
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
# 反向会逐行释放前向保留的内容，让内存尽早下降。`retain_graph=True` 会保留它们。
#
# **没有 `zero_grad`。** 先猜一猜：走三步，一直不清除梯度。`.grad` 里是什么？

# %%
x = sp.Tensor([1.0, 2.0], requires_grad=True)
for _ in range(3):
    (x * x).sum().backward()
print(x.grad)
assert x.grad.tolist() == [6, 12]

# %% [markdown]
# 三倍的梯度：`backward` 会累加。第 3 课特意利用了这一点。
#
# **前向与反向之间改变了数值。** `x * x` 的梯度需要 `x`。先猜一猜：如果程序在两者之间写入 `x`，会怎样？

# %%
x = sp.Tensor([1.0, 2.0], requires_grad=True)
loss = (x * x).sum()
with sp.no_grad():
    x += 1
changed = said(loss.backward)
print(changed)
assert changed

# %% [markdown]
# 引擎发现了，并且拒绝计算。否则梯度会混用新旧两种数值，悄无声息地出错。
#
# **形状。** 偏置有 10 个元素，输出有 12 个：

# %%
wrong_shape = said(lambda: sp.functions.linear(sp.Tensor(np.ones((4, 3))), np.ones((12, 3)), np.ones(10)))
print(wrong_shape)
assert "10" in wrong_shape

# %% [markdown]
# 错误信息指出了运算、维度和两个大小。
#
# ## 练习
#
# 写出下面的函数。每个检查从最小的情况开始，并画出第一个不通过的情况。答案在 `tutorials/solutions/01_one_device.py`。


# %%
def layer_norm_backward(x, dy, eps):
    """练习 1：已知 `y` 的梯度 `dy`，返回 `x` 的梯度（一个数组）。

    `x`、`dy` 和结果的形状都是 (rows, columns)。对每一行，`y = (x - mean) / sqrt(variance + eps)`，
    方差是偏差平方的平均。均值和方差也依赖于 `x`。
    """
    raise NotImplementedError


sp.exercises.check("layer_norm_backward", layer_norm_backward)


# %%
def backward_order(inputs, root):
    """练习 2：从 `root` 开始，按反向可以访问的次序返回节点列表（拓扑次序）。

    `inputs` 是计算带：一个字典，从每个节点到它读取的节点列表（叶子的列表为空）。一个节点排在所有读取它的节点之后，
    并且只出现一次。`root` 不依赖的节点不列出。
    """
    raise NotImplementedError


sp.exercises.check("backward_order", backward_order)


# %%
def adam(parameters, gradients, lr, beta1, beta2, eps):
    """练习 3：依次用每个梯度走一步，返回最后的参数数组。

    `parameters` 是数组，`gradients` 是同样形状的数组的列表；不要改动它们。

    m = beta1 m + (1 - beta1) g，v = beta2 v + (1 - beta2) g²，都从零开始。在第 t = 1, 2, … 步，
    用 m / (1 - beta1^t) 和 v / (1 - beta2^t) 弥补从零开始的影响，然后用它们计算 p = p - lr m / (sqrt(v) + eps)。
    """
    raise NotImplementedError


sp.exercises.check("adam", adam)
