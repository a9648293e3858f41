"""The listings' trainings in one process of PyTorch: read by test_listings.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.torch_models import mlp, resnet_cifar

torch.set_num_threads(1)  # other tests run at the same time


def difference(ours: Iterable, theirs: Iterable, start: Sequence | None = None) -> float:
    """Return the largest relative difference of paired arrays, by Euclidean norms; of their changes since `start`."""
    ours, theirs = ([np.asarray(x, np.float64) for x in arrays] for arrays in (ours, theirs))
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    norm = np.linalg.norm
    scales = [norm(x - (0 if start is None else start[i])) for i, x in enumerate(theirs)]
    found = [norm(x - y) / scale for x, y, scale in zip(ours, theirs, scales, strict=True)]
    return float(np.max(found))  # NaN, if one is


def state(network: nn.Module) -> list[np.ndarray]:
    """Return parameters and running statistics in the network's order; the arrays share its memory."""
    return [tensor.numpy() for tensor in network.state_dict().values()]


def loaded(network: nn.Module, start: Iterable[np.ndarray]) -> nn.Module:
    for array, values in zip(state(network), start, strict=True):
        array[...] = values
    return network


# --- one network ---------------------------------------------------------------------------------------


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), mlp())


def residual() -> nn.Module:
    return resnet_cifar((1, 1))


class Products(nn.Module):
    """Layers without bias, whose weights have the shape (inputs, outputs)."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(map(torch.empty, sizes, sizes[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for weight in self.weights[:-1]:
            x = torch.relu(x @ weight)
        return x @ self.weights[-1]


def train(network: nn.Module, start: Iterable, batches: Iterable, **settings: float) -> list[float]:
    """Train with SGD from `start`, one step for each batch; return the losses."""
    optimizer = torch.optim.SGD(loaded(network, start).parameters(), **settings)
    losses = []
    for data, labels in batches:
        loss = F.cross_entropy(network(torch.tensor(data)), torch.tensor(labels).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- Adasum --------------------------------------------------------------------------------------------


def same(x: torch.Tensor, kernel_size: int, stride: int, value: float = 0.0) -> torch.Tensor:
    """Pad as MindSpore's pad_mode="same", the odd pixel on the right and below; x: (N, C, H, H)."""
    missing = max((-(-x.shape[-1] // stride) - 1) * stride + kernel_size - x.shape[-1], 0)
    before, after = missing // 2, missing - missing // 2
    return F.pad(x, (before, after, before, after), value=value)


class Same(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel_size, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(same(x, self.kernel_size[0], self.stride[0]))


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            Same(inputs, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Same(width, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Same(width, outputs, 1),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(Same(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class AdasumResNet(nn.Module):
    """The network of `examples/adasum/resnet.py`."""

    def __init__(self, num_blocks: Sequence[int], num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(Same(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inputs = [], width
        for stage, count in enumerate(num_blocks):
            for i in range(count):
                blocks.append(Block(inputs, width << stage, 2 if stage and not i else 1))
                inputs = 4 * (width << stage)
        self.stages = nn.Sequential(*blocks)
        self.end_point = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(same(self.stem(x), 3, 2, -torch.inf), 3, 2)
        return self.end_point(self.stages(x).mean((2, 3)))


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute the tutorial's formula for two vectors in float64; a zero vector takes nothing from the other."""
    a, b = a.double(), b.double()
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - (dot / aa / 2 if aa else 0)) * a + (1 - (dot / bb / 2 if bb else 0)) * b


def smoothed(labels: torch.Tensor, num_classes: int, factor: float) -> torch.Tensor:
    """Smooth as `CrossEntropySmooth`, which spreads the factor over the other classes; PyTorch spreads it over all."""
    others = factor / (num_classes - 1)
    return others + (1 - factor - others) * F.one_hot(labels.long(), num_classes)


def train_with_adasum(
    networks: Sequence[nn.Module],
    start: Sequence[np.ndarray],
    nodes: Sequence[Sequence[int]],
    steps: Iterable[Sequence[tuple[np.ndarray, np.ndarray]]],
    rates: Iterable[float],
) -> list[list[float]]:
    """Train a network for each rank on two nodes: means inside a node, then Adasum of the nodes' deltas.

    Args:
        networks: one for each rank; they end trained.
        nodes: the ranks of both.
        steps: for each step and rank, a batch.
        rates: the learning rate of each step.

    Returns:
        For each step the losses of the ranks.
    """
    parameters = [list(loaded(network, start).parameters()) for network in networks]
    optimizers = [
        torch.optim.SGD(
            [
                {"params": [p for p in own if p.ndim > 1], "weight_decay": 1e-4},
                {"params": [p for p in own if p.ndim <= 1]},
            ],
            momentum=0.9,
        )
        for own in parameters
    ]
    losses = []
    for batches, rate in zip(steps, rates, strict=False):
        losses.append([])
        for network, optimizer, (data, labels) in zip(networks, optimizers, batches, strict=True):
            logits = network(torch.tensor(data))
            loss = F.cross_entropy(logits, smoothed(torch.tensor(labels), logits.shape[1], 0.1))
            optimizer.zero_grad()
            loss.backward()
            losses[-1].append(loss.item())
        for node in nodes:
            for shared in zip(*(parameters[rank] for rank in node), strict=True):
                mean = torch.stack([p.grad for p in shared]).mean(0)
                for p in shared:
                    p.grad = mean.clone()
        before = [p.detach().clone() for p in parameters[0]]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for old, new in zip(before, zip(*parameters, strict=True), strict=True):
            total = adasum(*(new[node[0]].detach() - old for node in nodes)).to(old.dtype)
            for p in new:
                p.data.copy_(old + total)
    return losses
