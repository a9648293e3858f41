"""Hooks: functions that observe a gradient or change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from simparallel.arrays.captures import HOOKS, refuse, running
from simparallel.backend import Array

if TYPE_CHECKING:
    from simparallel.autograd.tensor import Tensor


class Hook:
    """One registration of a function: it may be registered twice, and each registration is removed separately.

    Attributes:
        function: the function to call.
        may_change: call it with the gradient before that is accumulated; it may return another gradient. Else call it
            with the leaf once `.grad` is complete.
    """

    __slots__ = ("function", "may_change")

    def __init__(self, function: Callable[[Tensor], Any], may_change: bool) -> None:
        self.function, self.may_change = function, may_change


class RemovableHandle:
    """The handle of a registration: `remove()`, a call of the handle or the end of its `with` block removes the hook.

    Args:
        hooks: the list to which the hook is appended.
        hook: an object of this registration only.
    """

    def __init__(self, hooks: list[Any], hook: object) -> None:
        self._hooks, self._hook = hooks, hook
        hooks.append(hook)

    def remove(self) -> None:
        """Remove the hook. Removing it again does nothing."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)

    __call__ = remove

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def changed_by(hooks: Sequence[Hook] | None, tensor: Tensor, gradient: Array) -> Array:
    """Return the gradient of a tensor after running the hooks that may change it."""
    if hooks and running.step:
        refuse("calls a hook of a Tensor", HOOKS)
    for hook in tuple(hooks or ()):
        if hook.may_change:
            found = hook.function(tensor._gradient(gradient.copy()))  # a copy: the hook may keep it or write to it
            if found is not None:
                gradient = tensor._as_gradient(found)._data.astype(gradient.dtype)
    return gradient


def hooks_of(x: Tensor) -> list[Hook]:
    """Return the list of hooks of a tensor, for the caller to extend: of a leaf itself, or of the node that made it."""
    node = x._node
    if node is None:
        x._hooks = [] if x._hooks is None else x._hooks
        return x._hooks
    if node.hooks is None:
        node.hooks = _ResultHooks(x)
    return node.hooks.hooks  # type: ignore[attr-defined]


class _ResultHooks:
    """The hooks of a node's result: they see its gradient summed over all uses."""

    def __init__(self, y: Tensor) -> None:
        # Has the device and the layout of y, and not its values.
        self._without_data = y._like(np.empty(0))
        self.hooks: list[Hook] = []

    def __call__(self, dy: Array) -> Array:
        return changed_by(self.hooks, self._without_data._like(dy), dy)
