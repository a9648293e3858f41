"""Hooks: functions that observe a gradient or change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from simparallel.arrays.captures import HOOKS, refuse, running
from simparallel.autograd.tape import Node, Reversible
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


def hooks_on_the_tape(y: Tensor) -> list[Hook]:
    """Return the list of hooks of y, for the caller to extend; the first call puts it on the tape."""
    node = y._node
    assert node is not None
    if not isinstance(node.op, _Hooks):
        # The hooks see the gradient of y summed over all uses, so they are an entry of the tape between y and its op.
        before = y._like(y._data, node)
        y._node = node = Node(_Hooks(before), SimpleNamespace(needs=(True,)), (before,))  # type: ignore[arg-type]
    return node.op._hooks  # type: ignore[attr-defined]


class _Hooks(Reversible):
    """The tape's entry for the hooks of a tensor."""

    def __init__(self, before: Tensor) -> None:
        self._before = before
        self._hooks: list[Hook] = []

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        return (changed_by(self._hooks, self._before, dy),)

    def __repr__(self) -> str:
        return "register_hook"
