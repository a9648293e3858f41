"""Small training programs for tests of plans, with values for which all sums are exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import simparallel as sp
from simparallel import functions as F, nn
from simparallel.machine.cluster import ClusterSpec, describe
from simparallel.parallel import micro_batches
from simparallel.search import planner
from simparallel.search.graph import Graph
from simparallel.search.plan import Plan
from simparallel.search.space import Space

# Slow devices, so that cuts pay off, and links that make redistributions of all kinds worthwhile.
SLOW = sp.DeviceSpec("slow", {4: 1e9, 8: 1e9}, 1e9, 1 << 40, 1e-7)


def slow_cluster(
    device_num: int, bandwidth: float = 1e9, software: str = "plain", op_start_s: float = 0.0
) -> ClusterSpec:
    device = dataclasses.replace(SLOW, software=software, op_start_s=op_start_s)
    return describe(device_num, device, sp.LinkSpec(1e-6, bandwidth))


class Program(NamedTuple):
    """A network, the arguments of a step, the loss of outputs and labels, and whether a step may split its batch."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[np.ndarray, ...]]
    loss: Callable[[Any, Any], Any]
    splits: bool = False

    def backward(self, network: nn.Module, x: Any, labels: Any) -> list[Any]:
        """Run forward and backward; return the loss of each micro-batch."""
        losses = []
        for part, wanted in micro_batches(x, labels) if self.splits else [(x, labels)]:
            losses.append(self.loss(network(part), wanted))
            losses[-1].backward()
        return losses


def _numbers(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)).reshape(shape) % 7 - 3).astype(np.float64)


class Residual(nn.Module):
    """x + linear(relu(linear(x))), with a weight that two ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, dtype=np.float64), nn.Linear(16, 8, dtype=np.float64)

    def forward(self, x: Any) -> Any:
        x = x + self.down(self.up(x).relu())
        return F.linear(F.linear(x, self.up.weight), self.down.weight)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, dtype=np.float64), nn.Linear(16, 8, dtype=np.float64)

    def forward(self, x: Any) -> Any:
        return self.second(nn.checkpoint(lambda y: self.first(y).relu(), x))


class Saving(nn.Module):
    """Two residual blocks, which a plan may recompute; the second one reads what the first one has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(), Residual()

    def forward(self, x: Any) -> Any:
        y = nn.checkpoint(self.first, x, optional=True)
        return nn.checkpoint(self.second, y, optional=True) + y


class Images(nn.Module):
    """Convolution, norm, pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, dtype=np.float64)
        self.norm, self.fc = nn.BatchNorm2d(4, dtype=np.float64), nn.Linear(4 * 16, 8, dtype=np.float64)

    def forward(self, x: Any) -> Any:
        y = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.fc(y.reshape(y.shape[0], -1))


class Tokens(nn.Module):
    """A block of attention over embedded tokens, and logits by the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, dtype=np.float64)
        self.norm, self.attend = nn.LayerNorm(8, dtype=np.float64), nn.MultiheadAttention(8, 4, dtype=np.float64)

    def forward(self, tokens: Any) -> Any:
        x = self.table(tokens)
        x = x + self.attend(self.norm(x))
        return F.linear(x, self.table.weight).reshape(-1, 16)


def _square(y: Any, labels: Any) -> Any:
    return ((y - labels) ** 2).sum()


def _cross_entropy(y: Any, labels: Any) -> Any:
    return F.cross_entropy(y, labels)


PROGRAMS = {
    "residual": Program(Residual, lambda: (_numbers(8, 8), _numbers(8, 8)), _square),
    "checkpointed": Program(Checkpointed, lambda: (_numbers(8, 8), _numbers(8, 8)), _square),
    "saving": Program(Saving, lambda: (_numbers(16, 8), _numbers(16, 8)), _square, True),
    "images": Program(Images, lambda: (_numbers(8, 2, 8, 8), np.arange(8) % 8), _cross_entropy),
    "tokens": Program(Tokens, lambda: (np.arange(32).reshape(8, 4) % 16, np.arange(32) % 16), _cross_entropy),
}


def train(name: str, mode: str | None = "auto", steps: int = 2, **settings: Any) -> Any:
    """Train for some steps; return the losses, the parameters and the AutoParallel. Without a mode: on one device."""
    sp.set_seed(1)
    program = PROGRAMS[name]
    network = program.make()
    if program.loss is _square:
        for parameter in network.parameters():
            parameter.data[...] = np.round(parameter.data * 8)
    optimizer = sp.optim.Momentum(network.parameters(), 0.125, 0.5)

    def step(x: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        losses = program.backward(network, x, labels)
        optimizer.step()
        return losses

    parallel: Any = step if mode is None else sp.AutoParallel(step, mode, **settings)
    args = program.args()
    losses = [parallel(*(sp.Tensor(a) if mode is None else a for a in args)) for _ in range(steps)]
    if not sp.backend.has_data(losses[0][0].data):
        return getattr(parallel, "plan", None)
    whole = [p.full_tensor().numpy() if p.placement is not None else p.numpy() for p in network.parameters()]
    return [sum(loss.item() for loss in each) for each in losses], whole, getattr(parallel, "plan", None)


def space_of(name: str, cluster: ClusterSpec, num_micro_batches: int = 1, **settings: Any) -> tuple[Space, Any]:
    """Return the space of a program's choices, and its optimizer, which has to be kept."""
    graph, kept = graph_of(name, cluster.world_size, num_micro_batches)
    return Space(graph, cluster, **settings), kept


def graph_of(name: str, device_num: int, num_micro_batches: int = 1) -> tuple[Graph, Any]:
    """Return the graph of a program, and its optimizer, which has to be kept."""
    program = PROGRAMS[name]
    network = program.make()
    optimizer = sp.optim.Momentum(network.parameters(), 0.125, 0.5)

    def step(x: Any, labels: Any) -> None:
        program.backward(network, x, labels)

    whole = sp.Layout((device_num,), ("rank",))
    args = [sp.Tensor._result(a, placement=_placement(whole, a)) for a in program.args()]
    return planner.graph_of(step, args, {}, num_micro_batches), optimizer


def _placement(layout: sp.Layout, x: np.ndarray) -> Any:
    from simparallel.layout.sharding import placement

    return placement(layout(*["None"] * x.ndim), x.shape)


def plan_of(space: Space, choice: Any) -> Plan:
    """Return the plan of a choice, as a hand-made one."""
    plan = Plan(space.device_num, planner.planned(space, choice), num_micro_batches=space.graph.num_micro_batches)
    begins = tuple(plan.ops[part.begin].name for part in space.recomputed if part.is_optional)
    return dataclasses.replace(plan, recomputed=begins)
