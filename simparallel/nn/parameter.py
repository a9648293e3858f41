"""`Parameter`: a tensor that a module trains."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.tape import mark_changed
from simparallel.backend import Array, is_array, to_device_like, to_host
from simparallel.clock.memory import PARAMETERS
from simparallel.comm import current
from simparallel.errors import DTypeError, LayoutError, ShapeError
from simparallel.nn.deferred import DRAWING, Recipe, deferring, draw, is_deferred, placeholder, recipe_of
from simparallel.nn.device_moves import hold


class Parameter(Tensor):
    """A leaf tensor that a Module registers, and that requires a gradient by default.

    Args:
        data: array (kept, not copied), Tensor, number or nested sequence; floating point. A sharded Tensor makes a
            sharded parameter of its layout.
        requires_grad: collect a gradient for it.
        name: for messages and for parameter groups. If empty, it becomes the dotted path below the outermost module,
            completed as each module is registered in its parent.
        device: see `Tensor`.

    Raises:
        LayoutError: a sharded Tensor that is an unfinished sum.
    """

    __slots__ = ("_initial",)
    # One without data takes no memory.
    _counts_itself = True

    def __init__(self, data: Any, requires_grad: bool = True, name: str = "", device: Any = None) -> None:
        super().__init__(data, requires_grad, name, device)
        if self.layout is not None and self.layout.partial:
            raise LayoutError(
                f"Parameter: the data is laid out as {self.layout!r}, an unfinished sum over "
                f"{', '.join(self.layout.partial)}; finish it first: redistribute() it to a layout without a sum."
            )
        self._initial: Recipe | None = None
        if is_deferred(data):
            self.initial = data.initial
        if not deferring.active:
            hold(self, PARAMETERS, f"a parameter of shape {self.shape}")

    @Tensor.data.getter  # type: ignore[attr-defined]
    def data(self) -> Array:
        return self._data if self.interpreter is None else self.interpreter.data_of(self)

    @property
    def initial(self) -> Recipe | None:
        """The recipe by which the first op draws the data; None once the parameter has data."""
        return self._initial

    @initial.setter
    def initial(self, recipe: Recipe | None) -> None:
        self._initial = recipe
        # The ranks of a sharded parameter draw their slices.
        if self.interpreter is None or self.interpreter is DRAWING:
            self.interpreter = None if recipe is None else DRAWING

    def set_data(self, data: Any, slice_shape: bool = False) -> Self:
        """Copy other values into this parameter, in place, in its dtype; returns self. MindSpore's name.

        A refused call changes nothing.

        Args:
            data: array, Tensor, number or nested sequence of this parameter's shape.
            slice_shape: for a sharded parameter, `data` is this rank's slice instead of the whole. A plain parameter
                takes the shape of `data`, and its gradient is dropped if the shape differs.

        Raises:
            ShapeError: another shape.
            DTypeError: no real numbers.
            LayoutError: a Tensor of another layout.
        """
        given = data if isinstance(data, Tensor) or is_array(data) else Tensor(data)
        if np.dtype(given.dtype).kind not in "fiub":
            raise DTypeError(f"set_data: the data has dtype {given.dtype}, expected numbers for {self.dtype}.")
        placed = given.placement if isinstance(given, Tensor) else None
        if placed is not None and placed != self.placement:
            raise LayoutError("set_data: the data is laid out differently from the parameter; redistribute() it first.")
        is_slice = placed is not None or (slice_shape and self.placement is not None)
        shape = tuple(given.data.shape if isinstance(given, Tensor) else given.shape)
        needed = self._data.shape if is_slice else self.shape
        if shape != needed and not (slice_shape and self.placement is None):
            raise ShapeError(f"set_data: the data has shape {shape}, {self.name or 'the parameter'} has {needed}.")
        if is_deferred(self):
            self.initial = recipe_of(given)
            self.data = placeholder(shape, self.dtype)
            return self
        array = given.data if isinstance(given, Tensor) else given
        if is_deferred(given):
            array = draw(recipe_of(given), shape, self.dtype)
        if self.placement is not None and not is_slice:
            array = array[self.placement.layout.slices(current().rank, shape)]
        if shape != needed:
            self._grad = None
            self.data = to_device_like(to_host(array).astype(self.dtype), self._data)
        else:
            # In place: a bucket may share this memory.
            self._data[...] = to_device_like(to_host(array), self._data)
        mark_changed((self,))
        return self

    def __repr__(self) -> str:
        return super().__repr__().replace("Tensor", "Parameter", 1)
