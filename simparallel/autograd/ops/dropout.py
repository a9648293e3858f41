"""Dropout with a mask that does not depend on the cuts of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.arrays.captures import running
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, instance
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, Part, filled, fused, random_bits, random_state
from simparallel.errors import DTypeError, InputError
from simparallel.layout.rule import dim_names

# Four elements share a random word of 64 bits: 16 bits each, so p is rounded to 1/65536.
_LEVELS = 1 << 16
_PER_WORD = 4


class Dropout(Op):
    """y = x * mask / (1 - p), mask 0 with probability p, else 1 (Srivastava et al. 2014)

    Inputs: x of any shape, and the number of the call, an integer of shape (). The mask is a pure
    function of (seed, stream, call, index of the element in the whole tensor): ranks drop the same
    elements of their slices as a single device does, and ranks with the same slice agree. A cut of
    the first dim costs nothing; under a cut of another dim, each rank draws whole rows.

    Args:
        p: probability of dropping an element, rounded to 1/65536; the division is by 1 - the rounded value.
        seed: seed of the run.
        stream: names this mask among all random numbers of the seed.
        part: (position, count): x is a part of a batch that is `count` times as large, and begins after
            `position` times its size along the first dim; every part has its own mask. Integers for
            equal parts, fractions for others.

    Raises:
        InputError: p is outside of 0 … 1.
    """

    def __init__(self, p: float = 0.5, seed: int = 0, stream: str = "dropout", part: Part = (0, 1)) -> None:
        if not 0 <= p <= 1:
            raise InputError(f"Dropout: p={p!r} must be within 0 … 1.")
        self.p, self.seed, self.stream, self.part = p, seed, stream, part

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        names = " ".join(dim_names(len(shapes[0])))
        return f"{names}, -> {names}"

    def infer(self, x: Spec, call: Spec) -> Spec:
        if x.dtype.kind != "f" or call.dtype.kind not in "iu":
            raise DTypeError(f"x has dtype {x.dtype}, call {call.dtype}; expected floating point and an integer.")
        super().infer(x, call)
        return x

    def forward(self, ctx: Context, x: Array, call: Array) -> Array:
        names = dim_names(x.ndim)
        size, offset = [ctx.size(name) for name in names], [ctx.offset(name) for name in names]
        if names:
            position, count = self.part
            offset[0] += int(position * size[0])
            size[0] = int(count * size[0])
        capture, number = running.capture, int(call)

        def draw() -> np.ndarray:
            # The later calls of a captured step have later masks.
            later = 0 if capture is None else capture.draws_since(self.stream)
            return mask(self.seed, self.stream, number + later, self.p, tuple(size), tuple(offset), x.shape, x)

        ctx.keep = ctx.arrays.from_host(draw, x)
        return self._apply(ctx, x)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return self._apply(ctx, dy), None

    def _apply(self, ctx: Context, x: Array) -> Array:
        kept = _LEVELS - _threshold(self.p)
        return fused(ctx.xp, _drop, scales=0 < kept < _LEVELS)(x, ctx.keep, _LEVELS / max(kept, 1))

    def work(self, x: Spec, call: Spec) -> Work:
        # A random number counts 10 by convention.
        return Work(12 * prod(x.shape), 4 * x.size_bytes + 3 * prod(x.shape))

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.flops // 6, work.size_bytes)

    def eager_work(self, plan: Plan) -> Work:
        # Random numbers stay in registers; the mask has a byte for each element.
        x = plan.inputs[0]
        return Work(plan.work.flops, 2 * x.size_bytes + prod(x.shape))


def _drop(xp: ModuleType, x: Array, keep: Array, factor: float, *, scales: bool) -> Array:
    y = x * keep
    if scales:
        y *= factor
    return y


def _threshold(p: float) -> int:
    return round(p * _LEVELS)


def mask(
    seed: int,
    stream: str,
    call: int,
    p: float,
    size: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    x: Array = None,
) -> np.ndarray:
    """Return a slice, True for kept elements: it begins at `offset` in the mask of a tensor of shape `size`.

    If x has no data (a dry run), the slice has none either.
    """
    threshold = _threshold(p)
    if threshold == _LEVELS:
        return np.zeros(shape, bool)
    # Random words are addressed by the row-major index of an element, so whole rows of the first dim are drawn.
    row = prod(size[1:])
    start, count = (offset[0] * row, shape[0] * row) if shape else (0, 1)
    words_per_call = -(-prod(size) // _PER_WORD)
    first, skip = divmod(start, _PER_WORD)
    num_words = -(-(skip + count) // _PER_WORD)

    def draw() -> np.ndarray:
        words = random_bits(seed, stream, call * words_per_call + first, num_words)
        return words.astype("<u8", copy=False).view("<u2")[skip : skip + count] >= threshold

    keep = filled((count,), bool, x, draw)
    if not shape:
        return keep.reshape(())
    keep = keep.reshape((shape[0], *size[1:]))
    inner = (slice(o, o + s) for o, s in zip(offset[1:], shape[1:], strict=True))
    return keep[(slice(None), *inner)]


@function()
def dropout(x: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """Set elements of x to 0 with probability p and divide the others by 1 - p; return x if not `training`.

    Each call draws a new mask. If x is sharded, each rank applies its slice of the mask of the whole tensor.
    """
    x = as_tensor(x)
    if not training or p == 0:
        return x
    # A sharded x is the whole batch already; a plain x may be one rank's part of it.
    stream, part = "functions.dropout", random_state.part if x.placement is None else (0, 1)
    # The number of the call stays on the host, where masks are drawn.
    call = Tensor._result(np.array(random_state.next_call(stream), np.int64))
    return instance(Dropout, p, random_state.seed, stream, part)(x, call)
