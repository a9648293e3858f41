"""Resize images and sequences: nearest and linear interpolation, one dim after the other."""

from __future__ import annotations

from math import floor
from typing import Any

import numpy as np

from simparallel.autograd.methods import function
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import get_namespace, to_device_like
from simparallel.base.checks import check_choice
from simparallel.errors import DTypeError, InputError, ShapeError

_MODES = {"nearest": (3, 4, 5), "linear": (3,), "bilinear": (4,)}


@function()
def interpolate(
    x: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = False,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Resize the dims of x (N, C, ...) after the channels, as `torch.nn.functional.interpolate`.

    Args:
        x: (N, C, L), (N, C, H, W) or (N, C, D, H, W) for "nearest"; "linear" takes the first, "bilinear" the second.
        size: size of the result, an integer or one for each dim. Give either `size` or `scale_factor`.
        scale_factor: the size is this factor times the size of x, rounded down; a number or one for each dim.
        mode: "nearest", "linear" or "bilinear".
        align_corners: whether the centres of the corner pixels keep their positions; for "linear" and "bilinear".
        recompute_scale_factor: take the distance between pixels from the two sizes. By default `scale_factor` gives
            it, which differs where the size was rounded down.

    Returns:
        A Tensor of the dtype of x. The linear modes round uint8 after each dim, the last dim first, as PyTorch does.

    Raises:
        InputError: an unknown mode, not exactly one of size and scale_factor, a size below 1, align_corners with
            "nearest", or recompute_scale_factor without scale_factor. ShapeError: dims that do not fit. DTypeError: a
            linear mode of other integers than uint8.
    """
    check_settings("interpolate", size, scale_factor, mode, align_corners, recompute_scale_factor)
    x = as_tensor(x)
    if x.ndim not in _MODES[mode]:
        dims = " or ".join(map(str, _MODES[mode]))
        raise ShapeError(f"interpolate: mode {mode!r} needs x of {dims} dims, (N, C, ...), got shape {x.shape}.")
    if mode != "nearest" and not (x.dtype.kind == "f" or x.dtype == np.uint8):
        raise DTypeError(
            f"interpolate: mode {mode!r} takes floating point or uint8, got {x.dtype}; use astype('float32')."
        )
    given = np.atleast_1d(size if scale_factor is None else scale_factor).tolist()
    given = given * (x.ndim - 2) if len(given) == 1 else given
    if len(given) != x.ndim - 2:
        raise ShapeError(
            f"interpolate: {given} must have one entry for each of the {x.ndim - 2} dims of {x.shape} after C."
        )
    for dim, value in reversed(tuple(enumerate(given, 2))):
        before = x.shape[dim]
        after = value if scale_factor is None else floor(before * value)
        if not (isinstance(after, int) and after > 0 and before > 0):
            raise InputError(
                f"interpolate: dim {dim} of {x.shape} cannot be resized to {after!r}; the size must be 1 or more."
            )
        ratio = before / after if scale_factor is None or recompute_scale_factor else 1 / value
        x = _along(x, dim, after, ratio, mode, bool(align_corners))
    return x


def check_settings(
    who: str, size: Any, scale_factor: Any, mode: str, align_corners: Any, recompute_scale_factor: Any
) -> None:
    """Refuse settings of `interpolate` that are wrong for every input.

    Raises:
        InputError: see `interpolate`.
    """
    check_choice(who, "mode", mode, _MODES)
    if (size is None) == (scale_factor is None):
        raise InputError(f"{who}: give either size or scale_factor.")
    if align_corners and mode == "nearest":
        raise InputError(f"{who}: align_corners applies only to the modes 'linear' and 'bilinear'.")
    if recompute_scale_factor and scale_factor is None:
        raise InputError(f"{who}: recompute_scale_factor needs scale_factor; leave it out if size is given.")


def _along(x: Tensor, dim: int, size: int, ratio: float, mode: str, align_corners: bool) -> Tensor:
    """Resize one dim of x; `ratio` is the distance in the old dim between neighbours in the new one."""
    old, at = x.shape[dim], np.arange(size)
    if mode == "nearest":
        return _taken(x, np.floor(at * ratio).astype(np.int64), dim)
    if align_corners:
        place = at * ((old - 1) / (size - 1) if size > 1 else 0.0)
    else:
        # Pixel i covers i … i + 1, so its centre is at i + 0.5.
        place = np.maximum((at + 0.5) * ratio - 0.5, 0)
    # Linear: y = (1 - share) x[low] + share x[low + 1]; at the end of the dim both are the last element.
    low = np.minimum(place.astype(np.int64), old - 1)
    share = (place - low).clip(0, 1).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
    weights = np.stack([1 - share, share])
    is_float = x.dtype.kind == "f"
    if not is_float:
        # PyTorch's weights of uint8 are 16-bit integers, so that these sums are exact in float32.
        unit = 2.0 ** (14 if weights.max() * 2**15 + 0.5 >= 2**15 else 15)
        weights = np.floor(weights * unit + 0.5) / unit
    lower, upper = get_namespace(x._data).asarray(weights, dtype=x.dtype if is_float else np.float32)
    y = _taken(x, low, dim) * lower + _taken(x, low + 1, dim) * upper
    return y if is_float else (y + 0.5).floor().astype(x.dtype)


def _taken(x: Tensor, at: np.ndarray, dim: int) -> Tensor:
    """Select positions along a dim; those beyond its end give the last element."""
    return x.take(to_device_like(np.minimum(at, x.shape[dim] - 1), x._data), dim)
