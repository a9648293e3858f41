"""Ops that add, drop, repeat or pad dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import FUNCTIONS, function
from simparallel.autograd.op import Context, Op, Spec, Work, as_dims, instance, normalize_dims, reduced_dims
from simparallel.autograd.ops.promotion import spread
from simparallel.autograd.ops.shape import AbstractView
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.base.checks import check_choice
from simparallel.errors import ShapeError
from simparallel.layout.rule import dim_names


class Squeeze(AbstractView):
    """y = x without dims of size 1

    Args:
        dim: dim or dims to drop, each of size 1.
    """

    def __init__(self, dim: int | tuple[int, ...]) -> None:
        self.dim = as_dims(f"{self.name}: dim", dim)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names = dim_names(len(shape))
        dropped = reduced_dims(self.dim, len(shape))
        for i in dropped:
            if shape[i] != 1:
                raise ShapeError(f"dim {i} of shape {shape} has size {shape[i]}; only a dim of size 1 can be dropped.")
        left = ["1" if i in dropped else name for i, name in enumerate(names)]
        return f"{' '.join(left)} -> {' '.join(name for name in left if name != '1')}"


class Unsqueeze(AbstractView):
    """y = x with new dims of size 1

    Args:
        dim: position or positions of the new dims in y.
    """

    def __init__(self, dim: int | tuple[int, ...]) -> None:
        self.dim = as_dims(f"{self.name}: dim", dim)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        count = 1 if isinstance(self.dim, int) else len(self.dim)
        new = normalize_dims(self.dim, len(shape) + count)
        names = dim_names(len(shape))
        rest = iter(names)
        right = ["1" if i in new else next(rest) for i in range(len(shape) + count)]
        return f"{' '.join(names)} -> {' '.join(right)}"


class BroadcastTo(Op):
    """y = x, broadcast along dims of size 1 and new leading dims (a read-only view)

    Args:
        shape: shape of y; -1 keeps a size of x.
    """

    linear = True

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = as_dims("BroadcastTo: a size", tuple(shape))

    def rule_for(self, shape: tuple[int, ...]) -> str:
        extra = len(self.shape) - len(shape)
        if extra < 0:
            raise ShapeError(f"cannot expand shape {shape} to {self.shape}, which has fewer dims.")
        names = dim_names(len(shape))
        left, right = list(names), []
        for i, size in enumerate(self.shape):
            own = shape[i - extra] if i >= extra else 1
            if i >= extra and size in (-1, own):
                right.append(names[i - extra])
            elif own == 1 and size >= 0:
                right.append(f"new{i}={size}")
                if i >= extra:
                    left[i - extra] = "1"
            else:
                raise ShapeError(
                    f"cannot expand shape {shape} to {self.shape}: dim {i} must be 1 in one or equal in both; -1 keeps "
                    "a size and cannot stand for a new dim."
                )
        return f"{' '.join(left)} -> {' '.join(right)}"

    def forward(self, ctx: Context, x: Array) -> Array:
        return ctx.xp.broadcast_to(x, ctx.plan.output.shape)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (ctx.arrays.unbroadcast(dy, ctx.plan.inputs[0].shape),)

    def work(self, x: Spec) -> Work:
        return Work(0, 0)


class Tile(Op):
    """y = x repeated `repeats[i]` times along dim i: A B becomes A B A B

    A repeated dim of x may not be cut, as slices would give A A B B; the number of repeats may.

    Args:
        repeats: aligned with the dims of x at the right, as in NumPy.

    Raises:
        ShapeError: a number of repeats is negative.
    """

    flops_per_element = 0

    def __init__(self, repeats: tuple[int, ...]) -> None:
        repeats = as_dims("Tile: a number of repeats", tuple(repeats))
        if any(count < 0 for count in repeats):
            raise ShapeError(f"Tile: repeats {repeats} must not be negative.")
        self.repeats = repeats

    def _pairs(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return (repeats, size) for every dim of y; a new dim has size 1."""
        ndim = max(len(shape), len(self.repeats))
        repeats = (1,) * (ndim - len(self.repeats)) + self.repeats
        return list(zip(repeats, (1,) * (ndim - len(shape)) + shape, strict=True))

    def _local_pairs(self, ctx: Context) -> list[tuple[int, int]]:
        """Return the pairs for this rank's slice, with its share of the repeats where these are cut."""
        pairs = self._pairs(ctx.plan.inputs[0].shape)
        sizes = ctx.plan.output.shape
        return [(own // size if size else count, size) for (count, size), own in zip(pairs, sizes, strict=True)]

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names = dim_names(len(shape))
        pairs = self._pairs(shape)
        left, right = list(names), []
        for i, (count, size) in enumerate(pairs, start=len(shape) - len(pairs)):
            if i < 0:
                right.append(f"again{i + len(pairs)}={count}")
            elif count == 1:
                right.append(names[i])
            else:
                left[i] = f"{{{names[i]}}}"
                right.append(f"(again{i}_={count} {names[i]}={size})")
        return f"{' '.join(left)} -> {' '.join(right)}"

    def forward(self, ctx: Context, x: Array) -> Array:
        return ctx.xp.tile(x, [count for count, _ in self._local_pairs(ctx)])

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        shape = ctx.plan.inputs[0].shape
        pairs = self._local_pairs(ctx)
        flat = tuple(size for pair in pairs for size in pair)
        wholes = tuple(range(0, len(flat), 2))
        return (dy.reshape(flat).sum(axis=wholes, dtype=wider(dy.dtype)).astype(dy.dtype).reshape(shape),)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.size_bytes // 8 * sum(needs), work.size_bytes * sum(needs))


class Pad(Op):
    """y = x padded with `value`; padded dims may not be cut

    Args:
        widths: for every dim of x, the numbers of elements before and after it.
        value: value of the new elements.

    Raises:
        ShapeError: a width is negative.
    """

    flops_per_element = 0

    def __init__(self, widths: tuple[tuple[int, int], ...], value: float = 0.0) -> None:
        if any(width < 0 for pair in widths for width in pair):
            raise ShapeError(f"Pad: widths {widths} must not be negative; use x[...] to crop.")
        self.widths = widths
        self.value = value

    def rule_for(self, shape: tuple[int, ...]) -> str:
        if len(self.widths) != len(shape):
            raise ShapeError(f"needs a pair of widths for each of the {len(shape)} dims, got {self.widths}.")
        names = dim_names(len(shape))
        left, right = list(names), list(names)
        for i, (before, after) in enumerate(self.widths):
            if before or after:
                left[i], right[i] = f"{{{names[i]}}}", str(before + shape[i] + after)
        return f"{' '.join(left)} -> {' '.join(right)}"

    def _inner(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(w[0], w[0] + size) for w, size in zip(self.widths, shape, strict=True))

    def forward(self, ctx: Context, x: Array) -> Array:
        y = ctx.xp.full(ctx.plan.output.shape, self.value, dtype=x.dtype)
        y[self._inner(x.shape)] = x
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy[self._inner(ctx.plan.inputs[0].shape)],)


@function("squeeze")
def squeeze(x: Any, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Drop the dims of size 1, or the given dims only, which must have size 1.

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all of size 1.
    """
    x = as_tensor(x)
    dims = tuple(i for i, size in enumerate(x.shape) if size == 1) if dim is None else as_dims("squeeze: dim", dim)
    return instance(Squeeze, dims)(x)


@function("unsqueeze")
def unsqueeze(x: Any, dim: int | tuple[int, ...]) -> Tensor:
    """Insert a dim of size 1 at `dim` of the result.

    Args:
        x: any shape.
        dim: a dim of the result, or a tuple of them.
    """
    return instance(Unsqueeze, as_dims("unsqueeze: dim", dim))(as_tensor(x))


@function("expand")
def expand(x: Any, *shape: int) -> Tensor:
    """Broadcast `x` to `shape` along dims of size 1 and new leading dims, as a read-only view; -1 keeps a size."""
    x, sizes = as_tensor(x), spread("expand: a size", shape)
    extra = len(sizes) - x.ndim
    kept = tuple(-1 if i >= extra and size == x.shape[i - extra] else size for i, size in enumerate(sizes))
    return instance(BroadcastTo, kept)(x)


FUNCTIONS["broadcast_to"] = broadcast_to = expand


@function("tile repeat")
def tile(x: Any, *repeats: int) -> Tensor:
    """Repeat `x` along its dims: A B becomes A B A B."""
    return instance(Tile, spread("tile: a number of repeats", repeats))(as_tensor(x))


_PADDING = ("constant", "reflect", "replicate", "circular")


def _positions(mode: str, size: int, before: int, after: int) -> list[int]:
    """Return, for each position along the padded dim, the position in x to read from."""
    cropped = max(-before, 0), max(-after, 0)
    # "circular" continues at the other end of what is left; "reflect" and "replicate" also read what is cropped.
    left = range(cropped[0], size - cropped[1])
    new = max(before, after, 0)
    least = {"constant": sum(cropped), "reflect": new + 1, "replicate": 1, "circular": new + sum(cropped)}[mode]
    if size < max(least, -before - after):
        raise ShapeError(f"pad: mode {mode!r} with ({before}, {after}) needs a dim of {least} or more, got {size}.")
    positions = range(-before, size + after)
    if mode == "constant":
        return list(left)
    if mode == "circular":
        return [left[(i - cropped[0]) % len(left)] for i in positions]
    if mode == "replicate":
        return [min(max(i, 0), size - 1) for i in positions]
    return [abs(i) if i < size else 2 * (size - 1) - i for i in positions]


@function()
def pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad `x` at both ends of its dims.

    Args:
        x: the tensor.
        pad: elements before and after, pair by pair, beginning with the *last* dim, as in PyTorch; negative ones crop.
        mode: "constant"; "reflect" mirrors x at its border elements, "replicate" repeats them, "circular" continues
            at the other end.
        value: value of the new elements in mode "constant".

    Raises:
        InputError: an unknown mode.
        ShapeError: an odd number of widths, or more than two for each dim; a dim that is too small for them.
    """
    x = as_tensor(x)
    # Earlier versions took `value` in this position.
    if isinstance(mode, (int, float)):
        mode, value = "constant", mode
    check_choice("pad", "mode", mode, _PADDING)
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ShapeError(f"pad: {list(pad)} must hold a pair for each of at most {x.ndim} dims.")
    widths = [(int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)]
    for i, (before, after) in enumerate(widths):
        at = x.ndim - 1 - i
        if (before, after) != (0, 0) if mode != "constant" else min(before, after) < 0:
            x = x.take(_positions(mode, x.shape[at], before, after), at)
    if mode != "constant":
        return x
    widths += [(0, 0)] * (x.ndim - len(widths))
    added = tuple((max(before, 0), max(after, 0)) for before, after in reversed(widths))
    return instance(Pad, added, value)(x)
