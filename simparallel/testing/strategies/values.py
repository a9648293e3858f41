"""Shapes, arrays, operands and gradients: small integers, whose sums are exact, or floats away from 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

Shape = tuple[int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]

# Random bytes index into these tables: one draw per array of any size, which shrinks
# towards the first entry. Sums of small integers are exact in any order and any dtype.
INTEGERS = (0, 1, -1, 2, -2, 3, -3, 4, -4)
POSITIVE_INTEGERS = (1, 2, 3, 4)
NONZERO_INTEGERS = (1, -1, 2, -2, 4, -4)
POSITIVE_FLOATS = tuple(0.5 + 0.17 * i for i in range(16))
FLOATS = tuple(sign * value for value in POSITIVE_FLOATS for sign in (1, -1))  # away from kinks at 0


@st.composite
def arrays(draw: Draw, shape: Shape, dtype: Any = np.float64, *, values: tuple[float, ...] = INTEGERS) -> np.ndarray:
    """Draw arrays of `shape` and `dtype` with elements from `values`, small integers by default.

    Args:
        draw: supplied by Hypothesis.
        shape: shape of the array.
        dtype: dtype of the array; must be able to hold `values`.
        values: up to 256 numbers; `FLOATS` are at least 0.5 away from 0, for finite differences.
    """
    size = prod(shape)
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return np.array(values, dtype=dtype)[data % len(values)].reshape(shape)


def shapes(min_dims: int = 0, max_dims: int = 3, *, min_size: int = 0, max_size: int = 4) -> Any:
    """Draw shapes of `min_dims … max_dims` dims, each of size `min_size … max_size` (0 and 1 included)."""
    return st.lists(st.integers(min_size, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


def broadcastable_shapes(num_shapes: int, max_dims: int = 3, *, min_size: int = 0) -> Any:
    """Draw tuples of `num_shapes` shapes that broadcast together: some dims missing on the left, or of size 1.

    Args:
        num_shapes: shapes in a tuple.
        max_dims: maximum number of dims.
        min_size: smallest size of a dim.
    """

    def one_of(shape: Shape) -> st.SearchStrategy[Shape]:
        kept = st.tuples(*(st.sampled_from((size, 1)) for size in shape))
        return st.tuples(kept, st.integers(0, len(shape))).map(lambda pair: pair[0][pair[1] :])

    return shapes(0, max_dims, min_size=min_size).flatmap(
        lambda shape: st.tuples(*(one_of(shape) for _ in range(num_shapes)))
    )


def world_sizes(max_size: int = 8) -> st.SearchStrategy[int]:
    """Draw numbers of ranks, 1 included.

    Args:
        max_size: the largest number.
    """
    return st.integers(1, max_size)


@st.composite
def cuttable_arrays(draw: Draw, max_dims: int = 3, max_parts: int = 4, max_local: int = 3) -> tuple[np.ndarray, Shape]:
    """Draw (array, cuts): every cut divides its dim; float64, elements 0, 1, 2, … in row-major order.

    Args:
        max_dims: maximum number of dims.
        max_parts: maximum number of parts of a dim.
        max_local: largest size of a part.
    """
    cuts = draw(shapes(1, max_dims, min_size=1, max_size=max_parts))
    shape = tuple(cut * draw(st.integers(1, max_local)) for cut in cuts)
    return np.arange(prod(shape), dtype=np.float64).reshape(shape), cuts


@st.composite
def matmul_operands(draw: Draw, dtype: Any = np.float64, *, exact: bool = True) -> list[np.ndarray]:
    """Draw [x, w] of shapes (…, m, k) and (…, k, n) with broadcastable leading dims; sizes 0 and 1 included.

    Args:
        dtype: dtype of both.
        exact: draw small integers, whose products are exact.
    """
    leading_x, leading_w = draw(broadcastable_shapes(2, 2))
    m, k, n = (draw(st.integers(0, 4)) for _ in range(3))
    return [draw(operand((*leading_x, m, k), dtype, exact)), draw(operand((*leading_w, k, n), dtype, exact))]


def operand(shape: Shape, dtype: Any, exact: bool) -> Any:
    """Draw an input of an op: small integers if `exact`, else floats at least 0.5 away from 0.

    Args:
        shape: size of each dim.
        dtype: dtype of the array.
        exact: draw small integers.
    """
    return arrays(shape, dtype, values=INTEGERS if exact else FLOATS)


@st.composite
def gradients(
    draw: Draw, world_size: int | None = None, shapes_of: Sequence[Shape] | None = None, dtype: Any = np.float32,
    *, exact: bool = True,
) -> list[list[np.ndarray]]:  # fmt: skip
    """Draw the gradients of all ranks: for each rank a list of arrays, of the same shapes on every rank.

    Args:
        draw: supplied by Hypothesis.
        world_size: number of ranks; by default 1 to 4.
        shapes_of: shapes of the parameters; by default up to three.
        dtype: of the arrays.
        exact: small integers, whose sums are exact in any order; False for floats.

    Example:
        >>> from hypothesis import given
        >>> from simparallel.testing.strategies import gradients
        >>> @given(gradients(world_size=2, shapes_of=[(3,)]))
        ... def test_mean(each):
        ...     def program():
        ...         return sp.all_reduce(each[sp.get_rank()][0].copy(), "mean")
        ...     for found in sp.launch(program, world_size=2, transport="inline"):
        ...         assert np.array_equal(found, (each[0][0] + each[1][0]) / 2)
    """
    count = draw(world_sizes(4)) if world_size is None else world_size
    wanted = draw(st.lists(shapes(min_size=1), min_size=1, max_size=3)) if shapes_of is None else shapes_of
    return [[draw(operand(shape, dtype, exact)) for shape in wanted] for _ in range(count)]
