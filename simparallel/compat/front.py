"""Tools for fronts: classes with another framework's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from simparallel.clock.notes import note_once
from simparallel.errors import InputError


class FrontType(type):
    """A metaclass: objects of a front class's base are instances of it: `isinstance(sp.nn.Linear(1, 1), nn.Dense)`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(instance.__class__, cls)

    def __subclasscheck__(cls, other: type) -> bool:
        # Only the front's own class stands for its base; subclasses that users derive from it are compared as usual.
        if "is_front" in cls.__dict__:
            return issubclass(other, cls.__mro__[1])
        return super().__subclasscheck__(other)


def front(
    base: type, name: str = "", members: Mapping[str, str] | None = None, **renamed: str
) -> Callable[[Callable[..., Mapping[str, Any] | None]], Any]:
    """Turn a function with a framework's arguments into a class. A decorator.

    The class has the function's signature, docstring and name (or the given one); in everything else it is `base`.
    Arguments that `base` has, too, are passed on, under their own names or, as `renamed` says, under the name in
    `base`. The function refuses settings, notes unused ones, and may return arguments of `base` that replace them.
    `members` are the framework's names of parameters and buffers, {"weight": "gamma"}.
    """
    known = inspect.signature(base).parameters

    def make(translate: Callable[..., Mapping[str, Any] | None]) -> Any:
        signature = inspect.signature(translate)
        # Mistakes in a front are found when it is imported.
        assert {*renamed} <= {*signature.parameters}, renamed
        assert {*renamed.values()} <= {*known}, renamed

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            changed = translate(*args, **kwargs) or {}
            # Bind the arguments to get the framework's defaults, even where ours differ.
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            own = {renamed.get(name, name): value for name, value in given.arguments.items()}
            passed = {name: value for name, value in own.items() if name in known}
            base.__init__(self, **{**passed, **changed})  # type: ignore[misc]

        names = {
            "__init__": __init__,
            "__module__": translate.__module__,
            "__qualname__": name or translate.__name__,
            "__doc__": translate.__doc__ or base.__doc__,
            "__signature__": signature,
            "is_front": True,
            **({"_renamed": members} if members else {}),
        }
        # A base with a metaclass of its own needs a metaclass derived from both.
        meta = type("FrontType", (FrontType, type(base)), {}) if type(base) is not type else FrontType
        return meta(name or translate.__name__, (base,), names)

    return make


_TOOLS = (
    "typing", "collections.abc", "functools", "__future__", "simparallel.compat.cutting", "simparallel.compat.front",
    "simparallel.compat.groups", "simparallel.clock.notes",
)  # fmt: skip


def is_public(value: object) -> bool:
    """Return whether a value belongs to a front, rather than being imported for the front's own use."""
    if isinstance(value, ModuleType):
        return value.__name__.startswith(f"{__package__}.")
    return value is not None and getattr(value, "__module__", "") not in _TOOLS


def public_names(namespace: Mapping[str, Any], *own: str) -> list[str]:
    """List the framework's names in a front's module: all but private ones, its tools, and the given `own` ones."""
    return sorted(
        name for name, value in namespace.items() if not name.startswith("_") and name not in own and is_public(value)
    )


def take(namespace: dict[str, Any], source: Any, names: str, **renamed: str) -> None:
    """Put names of another module into a front's: `names` as they are there, `renamed` by {the framework's: ours}."""
    taken = {**{name: name for name in names.split()}, **renamed}
    namespace.update((name, getattr(source, ours)) for name, ours in taken.items())


def unused(who: str, **given: Any) -> None:
    """Note settings that have no effect here and do not change the result; None counts as not given."""
    for name, value in given.items():
        if value is not None:
            note_once(f"{who}: {name}={value!r} has no effect here.")


class Settings(ModuleType):
    """A module of settings without a meaning here: each that a program assigns is noted, and kept."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets __spec__ and its kin.
        if not name.startswith("__"):
            unused(self.__name__.removeprefix(f"{__package__}."), **{name: value})
        super().__setattr__(name, value)


def refuse(who: str, way_out: str, **given: Any) -> None:
    """Refuse settings that would change the result and do not exist here; None and False count as not given.

    Raises:
        InputError: one of them was given.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise InputError(f"{who}: {name}={value!r} is not supported; {way_out}.")
