"""Norms of arrays, and clipping of gradients by them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace
from simparallel.errors import InputError
from simparallel.optim.checks import check_number

_BLOCK = 1 << 16  # elements summed in their own precision; the blocks' sums are added in float64


def square_sum(x: Array) -> float:
    """Sum of squares, accurate to about 1e-7 however many elements there are."""
    flat = x.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        if part.dtype.itemsize < 4:
            part = part.astype("float32")  # the square of 300 is past the range of float16
        total += float((part * part).sum())  # NumPy adds pairwise; a dot product would drift
    return total


def norm(x: Array) -> float:
    """Euclidean norm over all elements."""
    return math.sqrt(square_sum(x))


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> float:  # fmt: skip
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), where norm is that of all together.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1,
    with PyTorch's names and its 1e-6. In place: a gradient in a bucket stays there.

    Args:
        parameters: those whose `.grad` counts; without one they are passed over.
        max_norm: the largest norm that is left alone, 0 or more.
        norm_type: p of the norm, above 0; `math.inf` for the largest magnitude.
        error_if_nonfinite: refuse a norm that is NaN or infinite. Otherwise one such gradient
            makes NaN or 0 of all of them.

    Returns:
        The norm before clipping.

    Raises:
        InputError: a setting out of range; a norm that is not finite, nothing is changed then.
    """
    check_number("clip_grad_norm_", "max_norm", max_norm)
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise InputError(f"clip_grad_norm_: norm_type={norm_type!r} must be above 0, or math.inf.")
    grads = _grads(parameters)
    if norm_type == 2:
        total = math.sqrt(sum(square_sum(grad) for grad in grads))
    elif norm_type == math.inf:
        # max of the host drops NaN; the namespace's keeps it
        largest = [float(get_namespace(grad).abs(grad).max()) for grad in grads if grad.size]
        total = math.nan if any(math.isnan(value) for value in largest) else max(largest, default=0.0)
    else:
        total = sum(_power_sum(grad, norm_type) for grad in grads) ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise InputError(
            f"clip_grad_norm_: the norm of the {len(grads)} gradients is {total}, nothing was clipped. Skip "
            "this step, lower the learning rate or the loss scale (error_if_nonfinite=False lets it pass)."
        )
    factor = max_norm / (total + 1e-6)
    if not factor >= 1.0:  # also for NaN
        for grad in grads:
            grad *= factor
    return total


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Bring every element of the gradients into -clip_value … clip_value, in place.

    Raises:
        InputError: `clip_value` is not a number of 0 or more.
    """
    check_number("clip_grad_value_", "clip_value", clip_value)
    for grad in _grads(parameters):
        get_namespace(grad).clip(grad, -clip_value, clip_value, out=grad)


def _grads(parameters: Tensor | Iterable[Tensor]) -> list[Array]:
    """The gradients' arrays, each once: a parameter may be listed twice (tied weights)."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    unique = {id(tensor): tensor for tensor in tensors}.values()
    return [tensor.grad.data for tensor in unique if tensor.grad is not None]


def _power_sum(grad: Array, p: float) -> float:
    xp = get_namespace(grad)
    return float(xp.sum(xp.abs(grad).astype("float64") ** p))
