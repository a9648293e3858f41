"""Parameters without data: shape, dtype and initializer, until the needed slice is known.

A model that is larger than one device is built like any other, inside `no_init_parameters()`. No array is allocated;
each parameter stores the recipe of its elements. Random numbers here are a function of the element's index
(`backend.random_bits`), so a rank draws only its slice, bit-identical to that slice of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np

from simparallel.autograd.interpreter import NamedInterpreter
from simparallel.backend import Array, filled, is_array, to_host
from simparallel.base.attributes import setting
from simparallel.clock.memory import PARAMETERS
from simparallel.clock.recorder import observer_of
from simparallel.errors import AutogradError
from simparallel.rank_local import RankLocal

# (first element, number of elements) -> their values, row-major.
Recipe = Callable[[int, int], Any]

# Elements drawn at a time: their float64 values fit in the cache.
_BLOCK = 1 << 18


class _Deferring(RankLocal):
    active = False


deferring = _Deferring()


def no_init_parameters() -> AbstractContextManager[None]:
    """Return a block that creates parameters without data: they get a shape, a dtype and an initializer.

    Under `AutoParallel`, or with `distribute_module`, each rank later draws only its slices, bit for bit equal to the
    slices of the whole; an op on plain tensors draws its parameters whole.
    """
    return setting(deferring, active=True)


def placeholder(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of this shape and dtype that takes no memory; it reads as NaN, or as 0 for integers."""
    return np.broadcast_to(np.array(np.nan if dtype.kind in "fc" else 0, dtype), shape)


def draw(recipe: Recipe, shape: tuple[int, ...], dtype: np.dtype, index: tuple[slice, ...] | None = None) -> np.ndarray:
    """Draw a tensor of `shape`, or only its slice `index`, whose elements are the same as in the whole.

    Args:
        recipe: values of a run of elements, in row-major order.
        shape: of the whole tensor.
        dtype: of the result.
        index: one slice of step 1 for each dim.

    Cost: the rows of the slice are drawn whole, so a cut of the first dim saves time and memory, others only memory.
    """
    if not shape:
        return np.array(recipe(0, 1), dtype).reshape(())
    index = index or tuple(slice(0, size) for size in shape)
    row = prod(shape[1:])
    y = np.empty(tuple(part.stop - part.start for part in index), dtype)
    rows = max(_BLOCK // max(row, 1), 1)
    # Long rows, uncut: draw them in blocks of elements. Otherwise, blocks are whole rows.
    if row > _BLOCK and index[1:] == tuple(slice(0, size) for size in shape[1:]):
        flat, first = y.reshape(-1), index[0].start * row
        for start in range(0, flat.size, _BLOCK):
            part = flat[start : start + _BLOCK]
            part[:] = recipe(first + start, part.size)
        return y
    for start in range(index[0].start, index[0].stop, rows):
        count = min(rows, index[0].stop - start)
        block = np.broadcast_to(np.asarray(recipe(start * row, count * row)), (count * row,))
        y[start - index[0].start :][:count] = block.reshape(count, *shape[1:])[(slice(None), *index[1:])]
    return y


def recipe_of(values: Any) -> Recipe:
    """Return a recipe that copies the current elements of a Tensor or an array."""
    if is_deferred(values):
        return values.initial
    flat = to_host(values if is_array(values) else values.data).copy().reshape(-1)
    return lambda start, count: flat[start : start + count]


def zero_row(parameter: Any, row: int) -> None:
    """Set a row of a matrix to 0, now or when it is drawn."""
    if parameter.initial is None:
        parameter.data[row] = 0
        return
    recipe, width, first = parameter.initial, parameter.data.shape[1], row % parameter.data.shape[0]

    def but_row(start: int, count: int) -> np.ndarray:
        values = np.array(np.broadcast_to(recipe(start, count), (count,)))
        low, high = first * width - start, (first + 1) * width - start
        values[max(low, 0) : max(high, 0)] = 0
        return values

    parameter.initial = but_row


def materialize(parameter: Any, index: tuple[slice, ...] | None = None) -> Array:
    """Draw the data of a deferred parameter, or the slice `index` of it; returns the data.

    Raises:
        AutogradError: it has no initializer, so its values are unknown.
    """
    if parameter.initial is None:
        raise AutogradError(
            f"a parameter of shape {parameter.data.shape} has no data and no initializer; inside no_init_parameters() "
            "fill parameters by simparallel.nn.init."
        )
    recipe, shape, dtype = parameter.initial, parameter.data.shape, parameter.data.dtype
    own = shape if index is None else tuple(part.stop - part.start for part in index)
    parameter.data = filled(own, dtype, parameter.data, lambda: draw(recipe, shape, dtype, index))
    parameter.initial = None
    observer_of(parameter._device).memory.hold(parameter.data, PARAMETERS)
    return parameter.data


class _Drawing(NamedInterpreter):
    """The interpreter that draws deferred parameters whole before an op on plain tensors, which no strategy cuts."""

    def run(self, op: Any, inputs: tuple[Any, ...]) -> Any:
        # Another interpreter may need only a slice.
        for x in inputs:
            if x.interpreter is not self and x.interpreter is not None:
                return x.interpreter.run(op, inputs)
        for x in inputs:
            if x.interpreter is self:
                materialize(x)
        return None


DRAWING = _Drawing("DRAWING")


def is_deferred(tensor: Any) -> bool:
    """Return whether `tensor` is a parameter without data."""
    return getattr(tensor, "initial", None) is not None
