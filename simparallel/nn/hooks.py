"""Functions that run before and after a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hooks:
    """The forward hooks of one module, called in the order in which they were added."""

    def __init__(self) -> None:
        self.before: list[Callable[..., Any]] = []
        self.after: list[Callable[..., Any]] = []

    def add(
        self, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> Callable[[], None]:
        """Add a hook; returns a function that removes it (calling that again does nothing)."""
        hooks, hook = (self.before, before) if before is not None else (self.after, after)
        entry = _Entry(hook)
        hooks.append(entry)
        return lambda: hooks.remove(entry) if entry in hooks else None

    def call(self, module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module.forward`, with the hooks around it."""
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


class _Entry:
    """One registration: the same function may be registered twice, and be removed once."""

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self.hook = hook

    def __call__(self, *arguments: Any) -> Any:
        assert self.hook is not None
        return self.hook(*arguments)
