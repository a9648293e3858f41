"""Programs as users write them, for runs with and without data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import simparallel as sp
from simparallel import data, functions as F, models, nn, ops, optim, parallel
from simparallel.algorithms import offers
from simparallel.compat import mindspore as ms, torch
from simparallel.optim import lr_scheduler
from simparallel.parallel.ddp import comm_hooks


class Program(NamedTuple):
    """A program, and the settings of its launch."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    settings: dict[str, Any]


PROGRAMS: dict[str, Program] = {}


def program(world_size: int = 1, *cases: Any, **settings: Any) -> Callable[[Any], Any]:
    """Register a function, once for each of the cases: a name, or a name and arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for case in cases or ((),):
            name, args = (case, (case,)) if isinstance(case, str) else (case[0], case[1:]) if case else ("", ())
            label = f"{function.__name__}[{name}]" if name else function.__name__
            PROGRAMS[label] = Program(function, args, world_size, settings)
        return function

    return register


def rows(count: int = 4, width: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, sp.get_rank()]).standard_normal((count, width)).astype(np.float32)


def labels(count: int = 4, classes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, sp.get_rank()]).integers(0, classes, count)


def net(dtype: Any = np.float32) -> nn.Module:
    sp.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, dtype=dtype), nn.Tanh(), nn.Linear(5, 3, dtype=dtype))


def train(model: nn.Module, steps: int = 2, optimizer: Any = None, x: Any = None, y: Any = None) -> None:
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(rows() if x is None else x)
        loss = F.cross_entropy(output, labels() if y is None else y) if output.ndim == 2 else (output * output).mean()
        loss.backward()
        optimizer.step()
        sp.log(loss=loss.item())
        print(f"loss is {loss.item():.3f}, {loss}, {loss!r}")


# --- optimizers, clipping, loss scales --------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": partial(optim.SGD, nesterov=True, momentum=0.9, weight_decay=0.1),
    "Momentum": lambda params: optim.Momentum(params, 0.1, 0.9, use_nesterov=True, loss_scale=4.0),
    "Adam": partial(optim.Adam, amsgrad=True),
    **{name: getattr(optim, name) for name in ("AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "LAMB")},
    # Beside it a network has vectors.
    "Muon": lambda params: optim.Muon([p for p in params if p.ndim == 2]),
    "LARS": partial(optim.LARS, weight_decay=0.1),
    "RMSprop": partial(optim.RMSprop, centered=True, momentum=0.5),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
}


@program(1, *OPTIMIZERS)
def optimizers(name: str) -> None:
    for dtype in (np.float32, np.float16):
        model = net(dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, 2, optimizer, rows().astype(dtype))
        state = optimizer.state_dict()
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(state)
        train(model, 1, optimizer, rows().astype(dtype))


@program(1, *SCHEDULES)
def schedules(name: str) -> None:
    model = net()
    optimizer = optim.SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1)
    scheduler = SCHEDULES[name](optimizer)
    for _ in range(3):
        train(model, 1, optimizer)
        scheduler.step()


@program(2)
def clipping() -> None:
    model = net()
    ddp = parallel.DistributedDataParallel(model)
    optimizer = optim.Adam(model.parameters(), lr=lambda step: 0.1 / (step + 1))
    for norm_type in (2.0, 1.0, float("inf")):
        optimizer.zero_grad()
        F.cross_entropy(ddp(rows()), labels()).backward()
        norm = optim.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        optim.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        print("norm", norm, f"{norm:.2f}")


@program(2, "dynamic", "fixed", "shared", "off")
def loss_scales(kind: str) -> None:
    model = net(np.float16)
    ddp = parallel.DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    scaler = {
        "dynamic": lambda: optim.GradScaler(init_scale=4.0, growth_interval=1),
        "fixed": lambda: optim.GradScaler(optim.FixedLossScaleManager(8.0)),
        "shared": lambda: parallel.DistributedGradScaler(optim.DynamicLossScaleManager(4.0)),
        "off": lambda: optim.GradScaler(enabled=False),
    }[kind]()
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(ddp(rows().astype(np.float16)), labels())).backward()
        scaler.unscale_(optimizer)
        optim.clip_grad_norm_(model.parameters(), 10.0)
        assert scaler.step(optimizer)
        scaler.update()


# --- data parallel ----------------------------------------------------------------------------------------

DDP = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "own gradients": {"gradient_as_bucket_view": False},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "float16": {"mixed_precision": parallel.MixedPrecision(np.float16, np.float32)},
    "reduced in float16": {"mixed_precision": parallel.MixedPrecision(reduce_dtype=np.float16)},
}


@program(3, *DDP)
def ddp(kind: str) -> None:
    train(parallel.DistributedDataParallel(net(), **DDP[kind]), 3)


@program(2)
def ddp_in_a_group() -> None:
    first = sp.new_group([1, 0])
    train(parallel.DistributedDataParallel(net(), process_group=first))
    model = parallel.DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(3)), broadcast_buffers=True)
    train(model)
    model.eval()
    train(model)
    print(parallel.max_difference_between_ranks(model.module))


@program(2)
def accumulation() -> None:
    model = parallel.DistributedDataParallel(net())
    optimizer = optim.Adam(model.parameters())
    for step in range(4):
        if step % 2 == 0:
            with model.no_sync():
                (F.cross_entropy(model(rows()), labels()) / 2).backward()
        else:
            (F.cross_entropy(model(rows()), labels()) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


class Branches(nn.Module):
    """Each rank and step uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        sp.manual_seed(0)
        self.first, self.left, self.right = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        layer = self.left if (self.calls + sp.get_rank()) % 2 else self.right
        return layer(self.first(x))


@program(3)
def different_graphs() -> None:
    train(parallel.DistributedDataParallel(Branches(), find_unused_parameters=True), 3)


@program(3)
def join() -> None:
    model = parallel.DistributedDataParallel(net())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with parallel.Join(model):
        for _ in range(1 + sp.get_rank()):
            train(model, 1, optimizer)


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mean": lambda: (None, comm_hooks.mean_hook),
    "fp16": lambda: (None, comm_hooks.fp16_compress_hook),
    "adasum": lambda: (None, comm_hooks.adasum_hook),
    "nodes": lambda: (parallel.Nodes([[0, 1], [2, 3]]), comm_hooks.adasum_hook),
    "powersgd": lambda: (
        parallel.PowerSGDState(matrix_approximation_rank=2, start_powerSGD_iter=1, min_compression_rate=1),
        comm_hooks.powerSGD_hook,
    ),
    "local": lambda: (
        parallel.PostLocalSGDState(None, sp.new_group(sp.node_group().ranks, True), 1),
        comm_hooks.post_localSGD_hook,
    ),
}


@program(4, *HOOKS, nodes=2)
def hooks(name: str) -> None:
    model = parallel.DistributedDataParallel(net())
    model.register_comm_hook(*HOOKS[name]())
    train(model, 3)


@program(4, "all", "nodes", "two steps", nodes=2)
def adasum_optimizer(kind: str) -> None:
    model = net()
    settings = {"all": {}, "nodes": {"nodes": [[0, 1], [2, 3]]}, "two steps": {"local_steps": 2}}[kind]
    train(model, 3, parallel.AdasumOptimizer(optim.SGD(model.parameters(), lr=0.1), **settings))


@program(2)
def local_sgd() -> None:
    model = net()
    averager = parallel.PeriodicModelAverager(2, warmup_steps=1)
    optimizer = parallel.PostLocalSGDOptimizer(optim.SGD(model.parameters(), lr=0.1), averager)
    train(model, 4, optimizer)


@program(3, ("mean", True), ("sum", False))
def grad_reducer(mean: bool) -> None:
    model = net()
    parallel.broadcast_parameters(model.parameters())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    reducer = parallel.DistributedGradReducer(optimizer.parameters, mean=mean)
    grad = sp.value_and_grad(lambda x, y: F.cross_entropy(model(x), y), optimizer.parameters)
    for _ in range(2):
        _, grads = grad(rows(), labels())
        optimizer(reducer(grads))


@program(2)
def gradients_from_numpy() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    for _ in range(2):
        optimizer([np.ones(p.shape, p.dtype) for p in model.parameters()])


@program(3)
def sync_batch_norm() -> None:
    sp.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    model = parallel.convert_sync_batchnorm(model)
    images = np.random.default_rng(0).standard_normal((4 + sp.get_rank(), 2, 4, 4)).astype(np.float32)
    train(parallel.DistributedDataParallel(model), 2, None, images, labels(len(images)))


# --- modules and models -----------------------------------------------------------------------------------

IMAGES = (2, 3, 12, 12)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, groups=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, stride=2, groups=2), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(2),
            nn.ConvTranspose2d(8, 2, 2, stride=2), nn.Upsample(scale_factor=2), nn.AvgPool2d(2),
        ), IMAGES,
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.GELU(), nn.BatchNorm1d(4)), (2, 3, 9)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6), nn.Dropout(0.3), nn.Sigmoid(), nn.Softmax(-1)),
              (2, 4, 6)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, dropout=0.1, causal=True), (2, 5, 6)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2), (2, 5, 6)),
    "lenet": (models.lenet5, (2, 1, 28, 28)),
    "mlp": (lambda: models.mlp((6, 5, 3)), (2, 6)),
    # Eight values or more in each channel: of two, batch norm leaves little more than the sign of their difference. In
    # float32, rounding also takes elements of ResNet-50 across the zero of a ReLU.
    "resnet18": (lambda: models.resnet18(3, stem="cifar"), (2, 3, 16, 16)),
    "resnet50": (lambda: models.resnet50(3).to(np.float64), (2, 3, 48, 48)),
}  # fmt: skip


@program(1, *MODULES)
def modules(name: str) -> None:
    sp.manual_seed(0)
    make, shape = MODULES[name]
    model = make()
    x = np.random.default_rng(0).standard_normal(shape).astype(next(model.parameters()).dtype)
    model.eval()
    with sp.no_grad():
        model(x)
    train(model.train(), 1, None, x, labels(shape[0]))


@program(1, "RNN", "LSTM", "GRU")
def recurrent(name: str) -> None:
    layer = getattr(nn, name)(4, 3, num_layers=2, bidirectional=True, batch_first=True)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        y, _ = layer(rows(10, 4).reshape(2, 5, 4))
        (y**2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@program(2)
def gpt() -> None:
    sp.manual_seed(0)
    model = models.GPT(11, 8, num_layers=2, num_heads=2, width=8)
    network = parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = optim.AdamW(model.parameters())
    tokens = np.random.default_rng(sp.get_rank()).integers(0, 11, (2, 9))
    for _ in range(2):
        loss = F.cross_entropy(network(tokens[:, :-1]).reshape(-1, 11), tokens[:, 1:].reshape(-1))
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program(1)
def sequence_to_sequence() -> None:
    model = nn.Transformer(6, 2, 1, 1, 8, batch_first=True)
    y = model(rows(10).reshape(2, 5, 6), rows(6).reshape(2, 3, 6))
    (y**2).mean().backward()


@program(1)
def embeddings_and_losses() -> None:
    table = nn.Embedding(7, 6, padding_idx=0)
    tokens = np.array([[1, 2, 0], [6, 1, 1]])
    y = table(tokens)
    target = np.random.default_rng(0).random((2, 3, 6)).astype(np.float32)
    losses = [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()]
    total = sum(loss(y, target) for loss in losses) + nn.BCELoss()(F.sigmoid(y), target)
    total = (
        total
        + nn.NLLLoss()(F.log_softmax(y[:, 0], -1), np.array([1, 2]))
        + nn.CrossEntropySmooth(num_classes=6)(y[:, 0], [1, 2])
    )
    total.backward()


@program(1)
def recomputation() -> None:
    sp.manual_seed(0)
    part = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
    for _ in range(2):
        y = nn.checkpoint(part, sp.Tensor(rows(), requires_grad=True))
        (y * y).sum().backward()


@program(1, "O1", "O2", "O3")
def mixed_precision(level: str) -> None:
    sp.manual_seed(0)
    model = nn.auto_mixed_precision(
        nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)), level
    )
    train(model, 2, None, np.ones((2, 3, 4, 4), np.float32), labels(2))


class Scaled(sp.Function):
    """An op of a user."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        return dy * 2 + x * 0


@program(1)
def tensors() -> None:
    """Indexing, changes in place, hooks, functions of NumPy, ops of a user."""
    w = sp.Tensor(rows(), requires_grad=True)
    w.register_hook(lambda grad: grad * 2)
    y = (Scaled.apply(w)[1:, ::2] + w[[0, 1, 2], :3]).relu() @ rows(3, 4).T[:3, :3]
    y = F.cat([y, y.T], 1).max(1) + np.exp(w).sum(0)[:3]
    y.sum().backward()
    total = sp.Tensor(np.zeros(3, np.float32))
    total += y.detach()
    total[1:] = y.detach()[1:]
    mean = sp.Tensor(np.zeros(6, np.float32))
    mean.data[...] += 1
    w.grad.data[...] *= 0.5
    w.data -= 0.1 * w.grad.data
    print(total, repr(total), w.grad)


# --- cut over devices -------------------------------------------------------------------------------------

MESH = ((2, 2), ("dp", "tp"))


class Cut(nn.Module):
    """The network of the tutorial, smaller."""

    def __init__(self, kind: str, sizes: tuple[int, ...] = (16, 8, 8, 10)) -> None:
        super().__init__()
        a, b, c, d = sizes
        self.fc1 = nn.initializer("normal", [a, b])
        self.fc2 = nn.initializer("normal", [b, c])
        self.fc3 = nn.initializer("normal", [c, d])
        layout, flat = sp.Layout((2, 2, 2), ("dp", "sp", "mp")), sp.Layout((8,), ("tp",))
        first, second = {
            "tuples": (((2, 4), (4, 1)), ((1, 8), (8, 1))),
            "layouts": (
                (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")),
                (flat("None", "tp"), flat("tp", "None")),
            ),
        }[kind]
        self.matmul1, self.relu1 = ops.MatMul().shard(first), ops.ReLU().shard(((4, 1),))
        self.matmul2, self.relu2 = ops.MatMul().shard(second), ops.ReLU().shard(((8, 1),))
        self.matmul3 = ops.MatMul()

    def forward(self, x: Any) -> Any:
        x = self.relu1(self.matmul1(x, self.fc1))
        return self.matmul3(self.relu2(self.matmul2(x, self.fc2)), self.fc3)


@program(8, *(f"{kind} {data}{later}" for kind in ("tuples", "layouts") for data in ("full_batch", "data_parallel")
              for later in ("", " later")))  # fmt: skip
def auto_parallel(case: str) -> None:
    kind, dataset, *later = case.split()
    sp.manual_seed(1)
    with parallel.no_init_parameters() if later else sp.enable_grad():
        model = Cut(kind)
        optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    grad = sp.value_and_grad(lambda x, t: F.cross_entropy(model(x), t), optimizer.parameters)

    def step(x: Any, t: Any) -> Any:
        loss, grads = grad(x, t)
        optimizer(grads)
        return loss

    run = parallel.AutoParallel(step, dataset_strategy=dataset)
    count = 16 if dataset == "full_batch" else 2
    for _ in range(2):
        print("loss", run(np.ones((count, 16), np.float32), np.arange(count) % 10))


@program(8, "LAMB", "LARS", "AdamW", "Muon", "clipped")
def optimizers_of_slices(name: str) -> None:
    sp.manual_seed(1)
    model = Cut("layouts")
    optimizer = OPTIMIZERS.get(name, optim.SGD)(model.parameters())
    x, t = np.ones((16, 16), np.float32), np.arange(16) % 10

    def step(x: Any, t: Any) -> Any:
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        if name == "clipped":
            optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = parallel.AutoParallel(step)
    for _ in range(2):
        run(x, t)


@program(4)
def sharded_ops() -> None:
    x, w = sp.Tensor(np.ones((8, 6), np.float32), requires_grad=True), sp.Tensor(np.ones((6, 4)), requires_grad=True)

    def step() -> None:
        y = ops.MatMul().shard(((2, 2), (2, 1)))(x.astype(np.float64), w)
        z = ops.Softmax().shard(((2, 2),))(ops.Add().shard(((4, 1), (1,)))(y, np.ones(4)))
        (z.full_tensor() ** 2).sum().backward()

    parallel.AutoParallel(step)()


@program(4)
def layouts() -> None:
    """Tensors that move between layouts, with cuts of unequal size."""
    mesh = sp.Layout(*MESH)
    x = parallel.distribute_tensor(np.ones((5, 7), np.float32), mesh("dp", "tp"), requires_grad=True)
    y = (x.redistribute(mesh("tp", "None")) * 2).redistribute(mesh("None", ("dp", "tp")))
    z = y @ parallel.distribute_tensor(np.ones((7, 3), np.float32), mesh(("dp", "tp"), "None"), requires_grad=True)
    (z.redistribute(mesh("dp", "None")) ** 2).sum().full_tensor().backward()
    local = parallel.from_local(np.ones((2, 2), np.float32), mesh("dp", "tp"))
    (local * 3).to_local()


@program(4, ("", False), ("sequence", True))
def transformer_block(sequence: bool) -> None:
    sp.manual_seed(0)
    mesh = sp.Layout(*MESH)
    block = parallel.ParallelTransformerBlock(8, 2, mesh, sequence_parallel=sequence)
    optimizer = optim.AdamW(block.parameters())
    for _ in range(2):
        x = parallel.distribute_tensor(np.ones((4, 6, 8), np.float32), mesh("dp", "None", "None"), requires_grad=True)
        (block(x) ** 2).mean().full_tensor().backward()
        optimizer.step()
        optimizer.zero_grad()


@program(4)
def language_model_cut_by_layers() -> None:
    sp.manual_seed(0)
    mesh = sp.Layout(*MESH)
    model = nn.Sequential(
        parallel.VocabParallelEmbedding(10, 8, mesh), parallel.ColumnParallelLinear(8, 12, mesh), nn.GELU(),
        parallel.RowParallelLinear(12, 8, mesh), parallel.ColumnParallelLinear(8, 10, mesh, bias=False),
    )  # fmt: skip
    loss_function = parallel.VocabParallelCrossEntropy()
    optimizer = optim.Adam(model.parameters())
    for _ in range(2):
        tokens = parallel.distribute_tensor(np.arange(12).reshape(4, 3) % 10, mesh("dp", "None"))
        targets = parallel.distribute_tensor(np.arange(12) % 10, mesh("dp"))
        loss = loss_function(model(tokens).reshape(12, 10), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program(4)
def whole_model_cut_by_names() -> None:
    sp.manual_seed(0)
    mesh = sp.Layout(*MESH)
    model = parallel.distribute_module(net(), mesh, {"0.weight": ("tp", "None"), "0.bias": ("tp",)})
    optimizer = optim.Adam(model.parameters())
    for _ in range(2):
        x = parallel.distribute_tensor(rows(4), mesh("dp", "None"))
        (model(x) ** 2).mean().full_tensor().backward()
        optimizer.step()
        optimizer.zero_grad()


@program(4)
def images_cut_in_height() -> None:
    """Neighbours exchange rows; statistics of the whole batch."""
    sp.manual_seed(0)
    mesh = sp.Layout((2, 2), ("dp", "h"))
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    parallel.distribute_module(model, mesh)
    x = parallel.distribute_tensor(np.ones((2, 2, 8, 6), np.float32), mesh("dp", "None", "h", "None"))
    (model(x) ** 2).sum().full_tensor().backward()


# --- several devices of a rank ----------------------------------------------------------------------------


@program(1)
def data_parallel() -> None:
    model = parallel.DataParallel(net(), [0, 1, 2])
    train(model, 2, optim.SGD(model.parameters(), lr=0.1), rows(5), labels(5))


@program(1)
def replicas() -> None:
    model = net()
    parts = parallel.scatter((sp.Tensor(rows(5)),), [0, 1])
    outputs = parallel.parallel_apply(parallel.replicate(model, [0, 1]), parts)
    (parallel.gather(outputs, 0) ** 2).sum().backward()


@program(2, devices_per_rank=2)
def layers_on_two_devices() -> None:
    sp.manual_seed(0)
    first, second = nn.Linear(6, 5).to("sim:0"), nn.Linear(5, 3).to("sim:1")
    optimizer = optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(2):
        y = second(first(sp.Tensor(rows())).to("sim:1"))
        loss = F.cross_entropy(y, sp.Tensor(labels()).to("sim:1"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


# --- communication ----------------------------------------------------------------------------------------


def payload(kind: str, shape: tuple[int, ...] = (12, 3)) -> Any:
    """Return an array, or a Tensor that a trained parameter made."""
    if kind == "arrays":
        return np.ones(shape, np.float32)
    return (sp.Tensor(np.ones(shape, np.float32), requires_grad=True) * 2).detach()


@program(4, *(f"{kind} {algorithm}" for kind in ("tensors", "arrays")
              for algorithm in ("direct", "ring", "tree", "naive", "halving_doubling")))  # fmt: skip
def collectives(case: str) -> None:
    kind, algorithm = case.split()
    rank, size = sp.get_rank(), sp.get_world_size()
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: sp.all_reduce(x, "mean", algorithm=algorithm),
        "broadcast": lambda x: sp.broadcast(x, 1, algorithm=algorithm),
        "reduce": lambda x: sp.reduce(x, 1, algorithm=algorithm),
        "all_gather": lambda x: sp.all_gather(x, 1, algorithm=algorithm),
        "reduce_scatter": lambda x: sp.reduce_scatter(x, algorithm=algorithm),
        "all_to_all": lambda x: sp.all_to_all(x, 0, 1, algorithm=algorithm),
        "gather": lambda x: sp.gather(x, 2, algorithm=algorithm),
        "scatter": lambda x: sp.scatter([x] * size if rank == 0 else None, algorithm=algorithm),
        "adasum": lambda x: sp.all_reduce(x, "adasum", algorithm=algorithm),
    }
    for name, call in calls.items():
        if offers(algorithm, name):
            for shape in ((12, 3), (1200, 3), (4, 0)):
                call(payload(kind, shape))


@program(3, "tensors", "arrays")
def other_collectives(kind: str) -> None:
    """Scans, uneven parts, lists, async calls, results in given arrays, objects."""
    rank, size, x = sp.get_rank(), sp.get_world_size(), payload(kind)
    sp.scan(x)
    sp.exscan(x)
    sp.all_reduce([payload(kind), payload(kind, (2,))])
    sp.all_gather(x[: rank + 1], uneven=True)
    sp.gather(x[: rank + 1], 1, uneven=True)
    sp.scatter([x[: i + 1] for i in range(size)] if rank == 2 else None, 2, uneven=True)
    sp.all_to_all(x, input_splits=[2, 4, 6], output_splits=[2 * rank + 2] * size)
    sp.reduce_scatter(x, input_splits=[1, 5, 6])
    out = np.empty((36, 3), np.float32)
    works = [sp.all_reduce(payload(kind), async_op=True), sp.all_gather(x, out=out, async_op=True)]
    for work in works:
        work.wait()
    sp.barrier()
    loss = x.sum()
    print(sp.all_gather_object({"rank": rank, "x": x, "loss": loss.item()}))
    print(sp.broadcast_object([loss, "text", x[0]] if rank == 1 else None, 1), sp.gather_object((rank, x.shape), 0))
    assert sp.all_reduce(np.array([rank]))[0] == 3  # what is known stays known


@program(3, "tensors", "arrays")
def messages(kind: str) -> None:
    rank, size, x = sp.get_rank(), sp.get_world_size(), payload(kind)
    following, previous = (rank + 1) % size, (rank - 1) % size
    sp.sendrecv(x, following, payload(kind), previous)
    sp.sendrecv(x, following, np.empty((12, 3), np.float32), previous)
    receive = sp.irecv(payload(kind), previous, tag=2)
    sp.isend(x, following, tag=2).wait()
    receive.wait()
    sp.send(x[:3], following, 5)
    found = sp.probe(previous)
    sp.recv(np.empty(found.shape, found.dtype), found.src, found.tag)
    if rank == 0:
        sp.ssend(x, 1)
    elif rank == 1:
        got = sp.recv(sp.Tensor(np.empty((12, 3), np.float32)))
        (got * 2).sum()


@program(4, nodes=2)
def groups() -> None:
    rank = sp.get_rank()
    evens, odds = sp.new_group([2, 0]), sp.new_group([1, 3])
    own = evens if rank % 2 == 0 else odds
    pair = sp.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    for group in (own, pair, sp.node_group(), None):
        sp.all_reduce(payload("tensors"), group=group)
        sp.all_gather(payload("tensors"), group=group, algorithm="ring")


@program(4)
def collectives_on_the_tape() -> None:
    rank, size = sp.get_rank(), sp.get_world_size()
    x = sp.Tensor(np.ones((8, 4), np.float32), requires_grad=True)
    y = F.all_reduce(x * 2, "mean") + F.broadcast(x, 1) + F.reduce(x, 2)
    y = F.reduce_scatter(F.all_gather(y, 0), 0) + F.all_to_all(y, 0, 0)
    uneven = F.all_gather(x[: rank + 1], uneven=True)
    parts = F.gather_to(x, 1)
    own = F.scatter_from([x * i for i in range(size)] if rank == 1 else None, 1)
    total = (y**2).sum() + uneven.sum() + (own**2).sum()
    total = total + sum(part.sum() for part in parts) if parts is not None else total
    total.backward()


@program(4)
def mpi_style() -> None:
    """A network trained by averages of its weights, as programs with MPI do."""
    rank, size = sp.get_rank(), sp.get_world_size()
    model = net()
    for p in model.parameters():
        sp.broadcast(p.data, 0)
    for _ in range(2):
        F.cross_entropy(model(rows()), labels()).backward()
        for p in model.parameters():
            sp.all_reduce(p.grad.data)
            p.data -= 0.1 / size * p.grad.data
            p.grad = None
    counts = sp.gather(np.array([rank + 1]), 0)
    if rank == 0 and sum(int(count[0]) for count in counts) == 10:
        sp.send(np.zeros(2), 1)
    elif rank == 1:
        sp.recv(np.empty(2), 0)
    sp.barrier()


# --- training loops, data, fronts -------------------------------------------------------------------------


@program(2, "plain", "O2", "boost")
def model_train(kind: str) -> None:
    network = net()
    dataset = data.NumpySlicesDataset((rows(8), labels(8)), ["image", "label"], shuffle=False).batch(4)
    settings: dict[str, Any] = {
        "plain": {},
        "O2": {"amp_level": "O2"},
        "boost": {
            "boost_level": "O1",
            "boost_config_dict": {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": True}},
        },
    }[kind]
    manager = optim.FixedLossScaleManager(4.0) if kind == "O2" else None
    sp.set_auto_parallel_context(parallel_mode=sp.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    optimizer = optim.Momentum(network.parameters(), 0.1, 0.9)
    metrics = {"loss", "acc", "top_1_accuracy"}
    model = sp.Model(network, nn.CrossEntropyLoss(), optimizer, metrics, loss_scale_manager=manager, **settings)
    history = model.fit(2, dataset, dataset, callbacks=[sp.LossMonitor(1), sp.TimeMonitor()], progress=False)
    print(history.history, model.eval(dataset))


@program(2)
def loaders() -> None:
    dataset = data.TensorDataset(np.arange(66, dtype=np.float32).reshape(11, 6), np.arange(11) % 3)
    sampler = data.DistributedSampler(dataset, shuffle=True)
    loader = data.DataLoader(dataset, 2, sampler=sampler)
    model = parallel.DistributedDataParallel(net())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train(model, 1, optimizer, x, y)


@program(2)
def mindspore_front() -> None:
    network = ms.nn.SequentialCell(ms.nn.Dense(6, 5), ms.nn.ReLU(), ms.nn.Dense(5, 3))
    optimizer = ms.nn.SGD(network.trainable_params(), 1e-2)
    loss_fn = ms.nn.CrossEntropyLoss()
    grad = ms.value_and_grad(lambda x, y: loss_fn(network(x), y), None, optimizer.parameters)
    reducer = ms.nn.DistributedGradReducer(optimizer.parameters)
    for _ in range(2):
        loss, grads = grad(ms.Tensor(rows()), ms.Tensor(labels()))
        optimizer(reducer(grads))
        print("loss is %s, %.3f" % (loss, loss.item()))  # noqa: UP031


@program(2)
def torch_front() -> None:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(rows())), torch.tensor(labels()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gathered = [torch.zeros(3) for _ in range(2)]
        torch.distributed.all_gather(gathered, model(torch.tensor(rows()))[0].detach())
    torch.distributed.barrier()


LISTINGS = Path(__file__).parents[1] / "listings"
# Imports that the listings lack, and fewer steps of a smaller network on other data.
CHANGES = (
    ("import os\n", "from mindspore.common.initializer import initializer\nfrom mindspore.parallel import Layout\n"),
    ("create_dataset(32)", "batches"),
    ("None, optimizer.parameters)", "None, optimizer.parameters, has_aux=True)"),
    ("range(10)", "range(1)"),
    ("28*28", "16"),
    ("512", "8"),
    # Only an installed front has modules by other names.
    ("mindspore.parallel.auto_parallel", "mindspore.parallel"),
    ("mindspore", "simparallel.compat.mindspore"),
)


@program(8, "data_parallel", "operator_parallel", "operator_parallel_layout")
def listings(name: str) -> None:
    """The tutorials' programs as they are printed, but for `CHANGES`."""
    text = (LISTINGS / f"{name}.txt").read_text()
    if name == "operator_parallel_layout":
        whole = (LISTINGS / "operator_parallel.txt").read_text()
        start, _, rest = whole.partition("import mindspore as ms\nfrom mindspore import nn, ops\n")
        text = start + text + rest[rest.index("\nfrom mindspore.nn.utils") :]
    for before, after in CHANGES:
        text = text.replace(before, after)
    batches = [(ms.Tensor(rows(32, 16)), ms.Tensor(labels(32, 10))) for _ in range(2)]
    if name != "data_parallel":
        batches = [(ms.Tensor(np.ones((32, 16), np.float32)), ms.Tensor(np.arange(32) % 10)) for _ in range(2)]
    exec(compile(text, name, "exec"), {"batches": batches, "__name__": name})


@program(4, nodes=2, device="ascend910")
def other_hardware() -> None:
    train(parallel.DistributedDataParallel(net()))


@program(2, device_memory="2KB")
def little_memory() -> None:
    try:
        train(parallel.DistributedDataParallel(net()), 2, None, rows(20), labels(20))
    except sp.errors.DeviceOutOfMemoryError as error:
        sp.barrier()
        print(error)
    else:
        raise AssertionError("2 KB are enough")
