"""Reshaped sharded tensors whose elements have not moved yet.

A reshape computes nothing, and moves nothing if its output can keep the layout of its input. Otherwise it is executed
lazily: the first op that reads the elements determines their layout, and one redistribution of the tensor before the
reshape takes them there. Any other access executes the reshape (the view is then *settled*): the elements move to the
layout that its rule or strategy gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.hooks import RemovableHandle
from simparallel.autograd.interpreter import AbstractInterpreter
from simparallel.autograd.tape import grad_mode
from simparallel.base.attributes import setting
from simparallel.errors import AutogradError
from simparallel.layout.sharding import Placement, placement
from simparallel.machine.devices import Device
from simparallel.parallel.operator.op_call import OpCall


class PendingView(Tensor):
    """A reshaped tensor that gets its elements, and its graph node, on first access.

    Shape, dtype and layout are known at once. Once settled, it is a Tensor like any other.

    Collective: the first access to the elements, such as `data`; every rank has to make it.
    """

    __slots__ = ("_is_passed_over", "_root", "_settle")
    # Whether an op has read the elements from `_root`, so that no gradient passes through the view.
    _is_passed_over: bool
    # The tensor before the reshape, which has the elements.
    _root: Tensor
    # Executes the reshape; None once the view is settled.
    _settle: Callable[[], Tensor] | None

    def __getstate__(self) -> Any:
        self.settle()
        return super().__getstate__()

    def settle(self) -> None:
        """Execute the reshape, and move the elements to its output layout."""
        if self._settle is None:
            return
        # The mode of the call that made the view decides whether the reshape is recorded, not the mode of this access.
        with setting(grad_mode, enabled=self._requires_grad):
            y = self._settle()
        # Become the result: take its attributes, and drop the base.
        self._settle = None
        del self._root
        self._data, self._node, self.placement, self._requires_grad = (
            y._data, y._node, y.placement, y._requires_grad,
        )  # fmt: skip

    def pass_over(self) -> Tensor:
        """Return the base of the view, for an op that redistributes it across the reshape without settling the view."""
        self._is_passed_over = True
        return self._root

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        if self._is_passed_over:
            raise AutogradError(
                f"register_hook: an op has read the elements of this view of shape {self.shape} from the tensor before "
                "the reshape already, so no gradient passes through the view. Register the hook before the "
                "view is used."
            )
        return super().register_hook(hook)

    def __getattr__(self, name: str) -> Any:
        """Settle the view when an unset slot is read: Python calls this only for those."""
        if name not in ("_data", "_node") or self._settle is None:
            raise AttributeError(name)
        self.settle()
        return getattr(self, name)

    @property
    def is_leaf(self) -> bool:
        return not self._requires_grad if self._settle else super().is_leaf

    @property
    def dtype(self) -> np.dtype:
        return self._root.dtype if self._settle else super().dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> Device:
        return self._root.device if self._settle else super().device

    def __repr__(self) -> str:
        if self._settle is None:
            return super().__repr__()
        return f"Tensor(not moved yet, shape={self.shape}, layout={self.layout!r}, dtype={self.dtype})"


def root_of(x: Tensor) -> Tensor:
    """Return the tensor that holds the elements: x, or the base of a pending view."""
    return x._root if isinstance(x, PendingView) and x._settle else x


def pending_view(
    x: Tensor, place: Placement | None, call: OpCall, settle: Callable[[], Tensor], interpreter: AbstractInterpreter
) -> PendingView | None:
    """Return the pending output of a reshape of `x`; None if the reshape has to run at once.

    Args:
        x: the input; it may be a pending view itself.
        place: its placement; None for a plain tensor.
        call: the reshape.
        settle: executes the reshape.
        interpreter: runs the ops on the view.
    """
    # A plain parameter is replaced by its slice now.
    if place is None and x.is_leaf and x.requires_grad:
        return None
    # Without `Tensor.__init__`: slots for data and graph node stay unset until the view is settled. A view of a view
    # starts from the base of both.
    source = place or call.whole[0]
    y = PendingView.__new__(PendingView)
    y._root, y._settle, y._is_passed_over = root_of(x), settle, False
    y._grad = y._hooks = y._room = None
    y._requires_grad = grad_mode.enabled and x.requires_grad
    y._device, y.name, y.interpreter = x._device, "", interpreter
    y.placement = placement(call.output.layout, call.output.shape, source.source or source)
    return y
