"""Norms of arrays, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from simparallel.arrays.seam import arrays_of, for_each, totals
from simparallel.autograd import Tensor
from simparallel.backend import Array, each, get_namespace, has_data, is_array, read_numbers
from simparallel.base.checks import check_number
from simparallel.clock.recorder import observer_of
from simparallel.comm import current
from simparallel.errors import InputError

# Elements summed in their own precision; the sums of blocks are added in float64.
_BLOCK = 1 << 16


def square_sum(x: Array) -> Any:
    """Return the sum of squares of an array in host memory, accurate to about 1e-7 for any number of elements."""
    flat, total = x.reshape(-1), 0.0
    for start in each(range(0, flat.size, _BLOCK), x):
        part = flat[start : start + _BLOCK]
        if part.dtype.itemsize < 4:
            part = part.astype("float32")  # float16 ends at 65504, below the square of 256
        # NumPy's sum adds pairwise; a dot product would accumulate rounding errors.
        total += (part * part).sum().item()
    return total


def squares(xp: Any, x: Array) -> Array:
    """Return the squares in float64, for sums in a kernel."""
    x = x.astype("float64")
    return x * x


def norm(x: Array, of: Tensor | None = None) -> Any:
    """Return the Euclidean norm of all elements; if `of` is sharded, x is this rank's slice, laid out like `of`.

    The result is a number; for an array on a GPU that is not a slice a 0-d array, so that the host does not wait.

    Collective: yes, over the ranks that have its slices, if `of` is cut.
    """
    total = arrays_of(x).total(x, square_sum, squares)
    if of is not None and of.placement is not None:
        total, group = read_numbers([total])[0], of.interpreter.slice_group(of)  # type: ignore[union-attr]
        if group is not None:
            total = current().all_reduce(get_namespace(total).asarray([total]), "sum", group)[0].item()
    return get_namespace(total).sqrt(total) if is_array(total) else math.sqrt(total)


def over_slices(
    values: list[float], tensors: list[Tensor], op: str = "sum", holders: Sequence[int] | None = None
) -> list[float]:
    """Reduce one value per tensor over all of its slices; a slice that several ranks hold counts once.

    A rank outside of a tensor's mesh holds none of its elements, and gives 0. If there are copies of a tensor on
    several meshes, as with data parallelism, a "sum" is the mean over the copies.

    Args:
        values: of the tensors.
        tensors: this rank's.
        op: "sum" or "max".
        holders: for each tensor the number of ranks that have it, or slices of it. Then ranks may have different
            tensors, and the result is a single value for all of them.

    Collective: yes, if any of them is sharded, or with `holders`.
    """
    if holders is None and all(tensor.placement is None for tensor in tensors):
        return values
    communicator, count, xp = current(), len(values), get_namespace(*values)
    if op == "sum":
        # Several ranks may hold the same slice. Scale each value by slices / ranks, so that the sum over all ranks
        # counts each slice once.
        parts = [1 if t.placement is None else math.prod(t.placement.layout.cuts) for t in tensors]
        ranks = [communicator.world.ranks if t.placement is None else t.placement.layout.mesh.ranks for t in tensors]
        counts = holders or list(map(len, ranks))
        values = [v * part / number for v, part, number in zip(values, parts, counts, strict=True)]
        if holders is None and any(len(own) < communicator.world_size for own in ranks):
            # Other ranks may have a copy on another mesh: count the copies, to divide by their number.
            values += [(communicator.rank in own) / len(own) for own in ranks]
    if holders is not None:
        count, values = 1, [sum(values) if op == "sum" or not values else xp.max(xp.asarray(values))]
    found = [value.item() for value in communicator.all_reduce(xp.asarray(values, "float64"), op)]
    return found if len(found) == count else [a / b for a, b in zip(found, found[count:], strict=False)]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    holders: Sequence[int] | None = None,
) -> float:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), where norm is their total norm.

    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", algorithm 1,
    with PyTorch's names and its 1e-6. In place: a gradient in a bucket stays in it.

    Args:
        parameters: their gradients are clipped; parameters without `.grad` are skipped.
        max_norm: upper bound of the norm, 0 or more; `math.inf` only measures the norm.
        norm_type: p of the norm, above 0; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is NaN or infinite. Otherwise one such gradient
            turns all gradients into NaN or 0.
        holders: numbers of ranks with each gradient, for parameters that differ between ranks; see `over_slices`.

    Returns:
        The norm before clipping. For sharded parameters the norm of the whole tensors, the same on every rank.

    Collective: yes, if any gradient is sharded, or with `holders`.

    Raises:
        InputError: a setting out of range; or a norm that is not finite, and then nothing is changed.
    """
    if max_norm != math.inf:
        check_number("clip_grad_norm_", "max_norm", max_norm)
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise InputError(f"clip_grad_norm_: norm_type={norm_type!r} must be above 0, or math.inf.")
    tensors = _gradients(parameters)
    grads = [tensor.data for tensor in tensors]
    if norm_type == 2:
        values = totals(grads, square_sum, squares)
    elif norm_type == math.inf:
        values = read_numbers(get_namespace(grad).abs(grad).max() if grad.size else 0.0 for grad in grads)
    else:
        values = read_numbers(_power_sum(grad, norm_type) for grad in grads)
    found = over_slices(values, tensors, "max" if norm_type == math.inf else "sum", holders)
    # PyTorch leaves the norm on the device.
    observer_of(None).read(is_check=True)
    unknown = next((x for x in (*grads, *found) if not has_data(x)), None)
    if unknown is not None:
        return get_namespace(unknown).asarray(unknown).sum().item()
    if norm_type == math.inf:
        # Python's max drops NaN.
        total = math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
    else:
        total = math.sqrt(sum(found)) if norm_type == 2 else sum(found) ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise InputError(
            f"clip_grad_norm_: the norm of the {len(grads)} gradients is {total}, so nothing was clipped. Skip "
            "this step, lower the learning rate or the loss scale (error_if_nonfinite=False lets it pass)."
        )
    # Not above 1: gradients with a small norm stay bit-identical.
    factor = max_norm / (total + 1e-6)
    if max_norm != math.inf and not factor >= 1.0:  # also for NaN
        for_each(scale, [([grad], [float(factor)]) for grad in grads])
    return total


def scale(xp: Any, x: Array, factor: float) -> None:
    """Multiply an array in place, for `for_each`."""
    x *= factor


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clip every element of the gradients to -clip_value … clip_value, in place.

    Args:
        parameters: one Tensor, or several.
        clip_value: the bound, 0 or more.

    Raises:
        InputError: `clip_value` is not a number of 0 or more.
    """
    check_number("clip_grad_value_", "clip_value", clip_value)
    numbers = -float(clip_value), float(clip_value)
    for_each(_clip, [([tensor.data], numbers) for tensor in _gradients(parameters)])


def _clip(xp: Any, x: Array, low: float, high: float) -> None:
    xp.clip(x, low, high, out=x)


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients, each once: a parameter may be listed twice (tied weights)."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    unique = {id(tensor): tensor for tensor in tensors}.values()
    return [tensor.grad for tensor in unique if tensor.grad is not None]


def _power_sum(grad: Array, p: float) -> Any:
    xp = get_namespace(grad)
    return xp.sum(xp.abs(grad).astype("float64") ** p)
