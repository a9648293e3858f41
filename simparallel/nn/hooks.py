"""Functions that run before and after a module's forward, or when a gradient arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from simparallel.autograd import Tensor
from simparallel.autograd.hooks import RemovableHandle
from simparallel.layout.mesh import Mesh


class Hooks:
    """The forward hooks of one module, called in the order of registration."""

    def __init__(self) -> None:
        self.before: list[Callable[..., Any]] = []
        self.after: list[Callable[..., Any]] = []

    def add(self, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> RemovableHandle:
        """Add a hook; return a handle that removes it."""
        hooks, hook = (self.before, before) if before is not None else (self.after, after)
        assert hook is not None
        # An object of this registration only: a function may be registered twice.
        return RemovableHandle(hooks, partial(hook))

    def call(self, module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `module.forward` with the hooks around it."""
        # Iterate over a copy, because a hook may remove itself.
        for hook in tuple(self.before):
            changed = hook(module, inputs)
            if changed is not None:
                inputs = changed if isinstance(changed, tuple) else (changed,)
        output = module.forward(*inputs, **kwargs)
        for hook in tuple(self.after):
            changed = hook(module, inputs, output)
            if changed is not None:
                output = changed
        return output


def summed_along(parameter: Tensor) -> tuple[Mesh, tuple[str, ...]] | None:
    """Return a mesh and its axes along which a group of `fully_shard` sums this gradient; None if no group has it.

    Ops on slices sum along the axes that cut them, by their rules, so afterwards the ranks of a stage have gradients of
    their part of the batch. These are summed along the axes of data parallelism, and among the stages that use the
    parameter: by its group along the axes of that, by a `Pipeline` along all others, by `DistributedDataParallel` over
    the ranks of its group.
    """
    return None if parameter.interpreter is None else parameter.interpreter.along


def is_reduced(parameter: Tensor) -> bool:
    """Return whether a wrapper or a group of the model reduces this gradient: its size, dtype and device are fixed."""
    hooks = parameter._hooks or ()
    return summed_along(parameter) is not None or any(getattr(hook.function, "reduces", False) for hook in hooks)
