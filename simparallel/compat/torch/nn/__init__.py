"""`torch.nn`: `sp.nn`, with PyTorch's arguments where they differ."""

# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any

from simparallel import nn
from simparallel.compat.front import front, refuse
from simparallel.compat.torch.nn import functional, parallel, utils
from simparallel.nn import *
from simparallel.nn import SyncBatchNorm, init
from simparallel.parallel import DataParallel

# sp's takes (x, context, mask) and returns one result: PyTorch's (query, key, value) would be misread.
del MultiheadAttention  # noqa: F821


@front(nn.CrossEntropyLoss)
def CrossEntropyLoss(
    weight: Any = None, *, ignore_index: int | None = None, reduction: str = "mean", label_smoothing: float = 0.0
) -> None:
    """See `sp.nn.CrossEntropyLoss`; a label of -100 is an error unless `ignore_index` asks for it."""


@front(nn.NLLLoss)
def NLLLoss(weight: Any = None, *, ignore_index: int | None = None, reduction: str = "mean") -> None:
    """See `sp.nn.NLLLoss`; a label of -100 is an error unless `ignore_index` asks for it."""


@front(nn.MaxPool2d)
def MaxPool2d(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    return_indices: bool = False,
    ceil_mode: bool = False,
) -> None:
    """See `sp.nn.MaxPool2d`."""
    refuse("MaxPool2d", "leave it out", return_indices=return_indices)


@front(nn.AvgPool2d)
def AvgPool2d(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> None:
    """See `sp.nn.AvgPool2d`."""
    refuse("AvgPool2d", "divide the result", divisor_override=divisor_override)


@front(nn.Upsample)
def UpsamplingNearest2d(size: Any = None, scale_factor: Any = None) -> None:
    """Resize images by nearest neighbour; see `sp.nn.Upsample`."""


@front(nn.Upsample)
def UpsamplingBilinear2d(size: Any = None, scale_factor: Any = None) -> dict[str, Any]:
    """Resize images bilinearly with aligned corners; see `sp.nn.Upsample`."""
    return {"mode": "bilinear", "align_corners": True}
