"""less_bn of MindSpore's boost: fewer normalisations, a normalised head, centred gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from simparallel import nn
from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.errors import InputError
from simparallel.optim import Optimizer

_CONV, _NORM = re.compile(r"conv(\d+)"), re.compile(r"bn(\d+)")
EPSILON = 1e-12


class NormalizedLinear(nn.Module):
    """y = multiplier * (x / ||x||) (weight / ||weight||)^T, norms of rows: cosines, times a learned scale.

    MindSpore's `CommonHeadLastFN`; it has no bias.

    Args:
        linear: its weight is taken over, the very parameter.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.multiplier = nn.Parameter(np.ones((), linear.weight.dtype))

    def forward(self, x: Any) -> Tensor:
        return (_unit_rows(x) @ _unit_rows(self.weight).transpose(0, 1)) * self.multiplier


def _unit_rows(x: Tensor) -> Tensor:
    epsilon = max(EPSILON, float(np.finfo(x.dtype).tiny))  # a row of zeros stays zeros, in float16 too
    return x / ((x * x).sum(-1, keepdim=True) + epsilon) ** 0.5


def remove_norms(network: nn.Module) -> list[str]:
    """In each residual block keep only the batch norm before the addition; returns the names of the others.

    A block is a module with children conv1, bn1, conv2, bn2, … (the names of torchvision and of `sp.models`).
    The norm of the shortcut stays.

    Raises:
        InputError: no such block.
    """
    removed = []
    for path, block in network.named_modules():
        children = block._modules
        numbers = sorted(int(match[1]) for name in children if (match := _NORM.fullmatch(name)))
        numbers = [number for number in numbers if f"conv{number}" in children]
        for number in numbers[:-1]:
            setattr(block, f"bn{number}", nn.Identity())
            removed.append(f"{path}.bn{number}".lstrip("."))
    if not removed:
        raise InputError(
            "less_bn: the network has no residual block, a module with children conv1, bn1, conv2, bn2, …; switch "
            "less_bn off."
        )
    return removed


def normalize_head(network: nn.Module, optimizer: Optimizer) -> str:
    """Make the last Linear a `NormalizedLinear`, whose multiplier the optimizer trains; returns its name.

    Raises:
        InputError: no Linear.
    """
    found = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not found or not found[-1][0]:
        raise InputError(
            "less_bn: the network has no Linear layer to normalise; set less_bn's fn_flag to False."
        )
    path, linear = found[-1]
    parent, _, name = path.rpartition(".")
    owner = dict(network.named_modules())[parent]
    head = NormalizedLinear(linear)
    setattr(owner, name, head)
    optimizer.add_param_group({"params": [head.multiplier]})
    return path


def centred(network: nn.Module) -> list[Tensor]:
    """The weights whose gradients are centred: of Linear and of convolutions without groups."""
    return list(_centred(network))


def _centred(network: nn.Module) -> Iterator[Tensor]:
    for module in network.modules():
        is_conv = isinstance(module, nn.Conv2d) and module.groups == 1
        if is_conv or isinstance(module, nn.Linear):
            yield module.weight


def centre(grad: Array) -> None:
    """Gradient centralization, in place: subtract each output channel's mean (Yong et al. 2020)."""
    grad -= grad.mean(axis=tuple(range(1, grad.ndim)), keepdims=True)
