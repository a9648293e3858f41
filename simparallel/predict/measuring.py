"""Measurements of this host for `calibration`: training programs, collectives, and ranks that share the cores.

The times of operations are those of small training programs and not of operations in a loop: between two uses, the
arrays of an operation leave the cache, as they do in training. An operation lasts from the end of the one before it, so
that the interpreter's part is in its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from simparallel import functions as F, nn, optim
from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_tensor
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.comm import current
from simparallel.machine.cluster import describe

NS_PER_S = 10**9


class Sample(NamedTuple):
    """The measured time [s] of an operation, and the work on which its price depends."""

    name: str
    flops: int
    size_bytes: int
    results: int
    time_s: float


class OperationSpan(NamedTuple):
    """An operation that ran from one wall time to another, in a step of an optimizer."""

    step: int
    wall_start_ns: int
    wall_end_ns: int
    work: tuple[str, int, int, int]  # name, flops, bytes, results


class Stopwatch(Recorder):
    """A recorder that keeps spans in place of events: events lack the number of results, on which prices depend."""

    def __init__(self) -> None:
        # The work is that of our own kernels, as the calibrated device runs them.
        cluster = describe(1)
        plain = replace(cluster.device, software="plain", matrix_units=None)
        super().__init__(0, replace(cluster, device=plain), record="off")
        self.spans: list[OperationSpan] = []
        self._work: dict[int, tuple[str, int, int, int]] = {}

    def price(self, name: str, flops: int, size_bytes: int, itemsize: int, results: int = 0, *how: Any) -> Any:
        price = super().price(name, flops, size_bytes, itemsize, results, *how)
        # Prices are kept, so no other one gets this id.
        self._work[id(price)] = name, flops, size_bytes, results
        return price

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: tuple[int, int, int], layer: str = ""
    ) -> None:
        self.spans.append(OperationSpan(self.step, wall_start_ns, wall_end_ns, self._work[id(price)]))


# --- training programs ---------------------------------------------------------------------------

Step = Callable[[], object]


class Attention(nn.Module):
    """A transformer block with a further projection between attention and MLP.   x: (B, T, D)"""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, causal=True)
        self.projection = nn.Linear(width, 3 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: Any) -> Tensor:
        x = x + self.attention(self.norm1(x))
        q, k, v = self.projection(x).reshape(*x.shape[:-1], 3, x.shape[-1]).permute(2, 0, 1, 3).split(1)
        x = x + (q + k + v).squeeze(0)
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Text(nn.Module):
    """Tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Attention(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Any) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Residual(nn.Module):
    """Convolutions with batch norms, beside a projection.   x: (N, channels, H, W)"""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out_channels), nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.side = nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Any) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.side(x))


def dense(sizes: Sequence[int]) -> nn.Module:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for size, following in pairwise(sizes):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def filters(channels: Sequence[int], kernel: int, hidden: int, side: int) -> nn.Module:
    """Return convolutions with poolings, and linear layers."""
    layers: list[nn.Module] = []
    for count, following in pairwise(channels):
        layers += [nn.Conv2d(count, following, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
        side //= 2
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(channels[-1] * side**2, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


def residual(channels: Sequence[int]) -> nn.Module:
    """Return blocks of convolutions; each after the first halves height and width."""
    blocks = [Residual(count, following, 1 + (count > 3)) for count, following in pairwise(channels)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


class Workload(NamedTuple):
    """A network to train, and the shape of its input, which has integers below `below` unless that is 0."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    below: int = 0
    optimizer: Callable[..., Any] = partial(optim.SGD, lr=1e-4)


_ADAM, _ADAMW = partial(optim.Adam, lr=1e-5), partial(optim.AdamW, lr=1e-5)
_MOMENTUM = partial(optim.SGD, lr=1e-5, momentum=0.9)
PROGRAMS = (
    Workload(partial(dense, (96, 48, 24, 10)), (8, 96)),
    Workload(partial(dense, (256, 192, 320, 24)), (24, 256), optimizer=_ADAM),
    Workload(partial(dense, (640, 384, 768, 100)), (48, 640)),
    Workload(partial(dense, (1000, 700, 300, 12)), (200, 1000), optimizer=_MOMENTUM),
    Workload(partial(dense, (1536, 1024, 10)), (400, 1536)),
    Workload(partial(dense, (512, 256, 512, 64)), (64, 512), optimizer=_ADAMW),
    Workload(partial(dense, (1024, 512, 512, 16)), (128, 1024)),
    Workload(partial(dense, (768, 512, 10)), (16, 768)),
    Workload(partial(filters, (1, 4, 8), 5, 60, 24), (16, 1, 24, 24)),
    Workload(partial(filters, (3, 8, 24), 5, 100, 32), (48, 3, 32, 32), optimizer=_MOMENTUM),
    Workload(partial(filters, (1, 12, 32), 3, 200, 28), (96, 1, 28, 28)),
    Workload(partial(residual, (3, 24, 48)), (4, 3, 24, 24)),
    Workload(partial(residual, (3, 48, 96, 192)), (8, 3, 32, 32)),
    Workload(partial(residual, (3, 80, 160, 320, 400)), (12, 3, 32, 32), optimizer=_MOMENTUM),
    # Powers of two, as in most networks: 3 x 3 kernels have two algorithms, and these channels fit both.
    *(Workload(partial(residual, (3, 64, 128, 256, 512)), (batch_size, 3, 32, 32)) for batch_size in (2, 8)),
    Workload(partial(residual, (3, 16, 32, 64, 128)), (16, 3, 32, 32)),
    Workload(partial(residual, (3, 32, 64, 128)), (8, 3, 64, 64)),
    Workload(partial(filters, (1, 8, 16), 5, 128, 32), (32, 1, 32, 32)),
    Workload(partial(filters, (1, 6, 12), 5, 96, 28), (64, 1, 28, 28)),
    Workload(partial(Text, 64, 32, 2, 64, 2), (4, 24), 64),
    Workload(partial(Text, 512, 64, 4, 256, 3), (8, 32), 512),
    Workload(partial(Text, 256, 128, 4, 512, 2), (8, 64), 256),
    Workload(partial(Text, 256, 256, 8, 1024, 2), (4, 64), 256),
    Workload(partial(Text, 300, 96, 3, 256, 2), (8, 48), 300, _ADAM),
    Workload(partial(Text, 500, 192, 6, 640, 2), (12, 96), 500, _ADAMW),
    Workload(partial(Text, 1000, 320, 5, 1024, 1), (16, 64), 1000),
)


def training(program: Workload, seed: int = 0, read: Callable[[Tensor], object] | None = None) -> Step:
    """Return a training step of the program; `read` reads its loss, by default `backward` does."""
    net = program.make()
    generator = np.random.default_rng(seed)
    if program.below:
        text = generator.integers(0, program.below, program.shape)
        inputs, labels = as_tensor(text), as_tensor(text.reshape(-1))
    else:
        inputs = as_tensor(generator.standard_normal(program.shape, dtype=np.float32))
        labels = as_tensor(generator.integers(0, 10, program.shape[0]))
    optimizer = program.optimizer(net.parameters())

    def step() -> None:
        logits = net(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)
        optimizer.zero_grad()
        if read is not None:
            read(loss)
        loss.backward(check_finite=read is None)
        optimizer.step()

    return step


def repeat(step: Step, seconds: float, least: int = 10, most: int = 200) -> list[float]:
    """Return the times [s] of steps after the first two, for about `seconds`: at least `least` and at most `most`."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    for number in range(most + 2):
        start = time.perf_counter()
        step()
        now = time.perf_counter()
        if number >= 2:
            times.append(now - start)
        if len(times) >= least and now > end:
            break
    return times


def op_samples(train: Callable[[], object]) -> list[Sample]:
    """Run a training program on this rank alone; return the median time of each operation of a step."""
    watch = Stopwatch()
    with use_recorder(watch):
        train()
    return samples_of(watch.spans)


def steps_of(program: Workload, seconds: float) -> list[Sample]:
    """Return the samples of a program that trains for about `seconds`, and for more steps if there is more time."""
    return op_samples(lambda: repeat(training(program), seconds, least=max(3, round(25 * seconds))))


def samples_of(spans: Sequence[OperationSpan]) -> list[Sample]:
    """Return the median time of each operation of a rank's training step, over all steps but the first two.

    The time between two steps belongs to the optimizer: it is a cost of each step.
    """
    steps: dict[int, list[OperationSpan]] = {}
    for span in spans:
        steps.setdefault(span.step, []).append(span)
    each = list(steps.values())
    found: list[list[float]] = []
    for before, step in pairwise(each[1:]):
        ends = [before[-1].wall_end_ns, *(span.wall_end_ns for span in step)]
        times = [float(end - start) for start, end in pairwise(ends)]
        between = step[0].wall_start_ns - before[-1].wall_end_ns
        times[0] -= between
        times[-1] += between
        found.append(times)
    medians = np.median(found, axis=0) / NS_PER_S
    return [Sample(*span.work, float(time_s)) for span, time_s in zip(each[-1], medians, strict=True)]


# --- ranks that share the cores ------------------------------------------------------------------


def shared_step_s(program: Workload, seconds: float) -> float:
    """Return the mean time [s] of a step of this rank, while all ranks train for the same time.

    Where ranks take turns on a core, few steps hold all of the waiting: a median would miss it.
    """
    step = training(program)
    step()
    current().barrier()
    times = repeat(step, seconds, least=3, most=100_000)
    return sum(times) / len(times)


# --- collectives ---------------------------------------------------------------------------------

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")


def _call(op: str, size_bytes: int) -> Callable[[], Any]:
    """Return a call of a collective on a vector of `size_bytes`, as the cluster's prices count it."""
    communicator = current()
    if op == "barrier":
        return communicator.barrier
    count = max(1, size_bytes // 4)
    if op == "all_gather":
        count = max(1, count // communicator.world_size)
    elif op in ("reduce_scatter", "all_to_all"):
        count = -(-count // communicator.world_size) * communicator.world_size
    # In memory that peers can read, like gradients in their buckets.
    x = communicator.empty(count, np.dtype(np.float32))
    x[...] = 0
    return partial(getattr(communicator, op), x)


def collective_s(op: str, size_bytes: int, seconds: float) -> float:
    """Return the median time [s] of a call of this rank; all ranks make equally many calls."""
    call = _call(op, size_bytes)
    communicator = current()
    call()
    start = time.perf_counter()
    call()
    # A call is short beside the time slices of the system where ranks share cores, so calls are timed in batches.
    batch = communicator.broadcast_object(max(1, min(20, round(0.02 / max(time.perf_counter() - start, 1e-9)))))
    rounds = communicator.broadcast_object(max(3, min(25, round(seconds / 0.02))))
    times = []
    for _ in range(rounds):
        communicator.barrier()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return float(np.median(times))


def free_and_joined_s(program: Workload, seconds: float) -> tuple[float, float]:
    """Return the time [s] of a step without and with a barrier behind it, while all ranks train.

    Ranks that take turns on a core arrive one after the other, and a core may be idle until the last has arrived.
    """
    communicator = current()
    step, barrier = training(program), communicator.barrier

    def joined() -> None:
        step()
        barrier()

    step()
    start = time.perf_counter()
    step()
    # All ranks make equally many steps, so that every barrier has its counterparts.
    batch = communicator.broadcast_object(max(3, round(0.05 / (time.perf_counter() - start))))
    times: dict[Step, list[float]] = {step: [], joined: []}
    # In turns, so that other programs on the machine slow both down alike.
    for _ in range(max(1, round(seconds / 0.2))):
        for each, found in times.items():
            barrier()
            start = time.perf_counter()
            for _ in range(batch):
                each()
            # Until the last rank is done: ranks that are done leave their core to the others.
            barrier()
            found.append((time.perf_counter() - start) / batch)
    return float(np.median(times[step])), float(np.median(times[joined]))


def message_s(size_bytes: int, seconds: float) -> float:
    """Return the median time [s] of a message from rank 0 to rank 1: half of a round trip."""
    communicator = current()
    x, peer = np.zeros(size_bytes, np.uint8), 1 - communicator.rank
    steps: tuple[Callable[..., object], ...] = (communicator.send, communicator.recv)

    def round_trip() -> None:
        for step in steps if peer == 1 else steps[::-1]:
            step(x, peer)

    # Both ranks make equally many.
    count = max(3, min(25, round(seconds / 0.02)))
    return float(np.median(repeat(round_trip, 0.0, count, count))) / 2
