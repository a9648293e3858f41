"""less_bn of MindSpore's boost: fewer normalisations, a normalised head, centred gradients."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from simparallel import nn
from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.optim import Optimizer

_NORM = re.compile(r"bn(\d+)")
EPSILON = 1e-12


class NormalizedLinear(nn.Module):
    """A linear layer of cosines: y = multiplier * (x / ||x||) (weight / ||weight||)^T, norms of rows.

    The multiplier is a learned scale. This is MindSpore's `CommonHeadLastFN`; it has no bias.

    Args:
        linear: the layer to replace; its weight parameter is shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.multiplier = nn.Parameter(np.ones((), linear.weight.dtype))

    def forward(self, x: Any) -> Tensor:
        return (_unit_rows(x) @ _unit_rows(self.weight).transpose(0, 1)) * self.multiplier


def _unit_rows(x: Tensor) -> Tensor:
    # Keeps a row of zeros at zero, in float16 too.
    epsilon = max(EPSILON, float(np.finfo(x.dtype).tiny))
    return x / ((x * x).sum(-1, keepdim=True) + epsilon) ** 0.5


def misfit(network: nn.Module, with_head: bool) -> str:
    """Return the reason why the network does not allow less_bn; an empty string if it does."""
    if not any(len(_norms(block)) > 1 for block in network.modules()):
        return "the network has no residual block, a module with children conv1, bn1, conv2, bn2, …"
    if with_head and not _head(network)[0]:
        return "the network has no Linear layer to normalise (set less_bn's fn_flag to False)"
    return ""


def remove_norms(network: nn.Module) -> list[str]:
    """Keep only the batch norm before the addition in each residual block; return the names of the others.

    A block is a module with children conv1, bn1, conv2, bn2, … (the names of torchvision and of `sp.models`).
    The norm of the shortcut stays. Norms already removed are skipped.
    """
    removed = []
    for path, block in network.named_modules():
        for name in _norms(block)[:-1]:
            if not isinstance(block._modules[name], nn.Identity):
                # Identity keeps the block's forward, which calls the norm by its name.
                setattr(block, name, nn.Identity())
                removed.append(f"{path}.{name}".lstrip("."))
    return removed


def normalize_head(network: nn.Module, optimizer: Optimizer) -> str:
    """Replace the last Linear by a `NormalizedLinear`, add its multiplier to the optimizer, return the layer's name.

    A head that is normalised already stays as it is; `misfit` reports a network without a head.
    """
    path, head = _head(network)
    if isinstance(head, nn.Linear):
        parent, _, name = path.rpartition(".")
        head = NormalizedLinear(head)
        setattr(network.get_submodule(parent), name, head)
    if head.multiplier not in set(optimizer.parameters):
        # The multiplier is new: the optimizer was made before it.
        optimizer.add_param_group({"params": [head.multiplier]})
    return path


def _norms(block: nn.Module) -> list[str]:
    """Return the names of the norms that follow a convolution, in their order."""
    numbers = sorted(int(match[1]) for name in block._modules if (match := _NORM.fullmatch(name)))
    return [f"bn{number}" for number in numbers if f"conv{number}" in block._modules]


def _head(network: nn.Module) -> tuple[str, Any]:
    """Return the name of the last Linear, normalised or not, and the layer; ("", None) if there is none."""
    # In the order of definition. A head that is already normalised counts, so that repeated calls are no-ops.
    heads = [(p, m) for p, m in network.named_modules() if isinstance(m, (nn.Linear, NormalizedLinear))]
    return heads[-1] if heads else ("", None)


def centred(network: nn.Module) -> list[Tensor]:
    """Return the weights that need centred gradients: of Linear, and of Conv2d without groups."""
    layers = (m for m in network.modules() if isinstance(m, nn.Linear) or isinstance(m, nn.Conv2d) and m.groups == 1)
    return [layer.weight for layer in layers]


def centre(grad: Array) -> None:
    """Centralise a gradient in place: subtract each output channel's mean (Yong et al. 2020)."""
    grad -= grad.mean(axis=tuple(range(1, grad.ndim)), keepdims=True)
