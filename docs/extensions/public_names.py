"""The public names: what users reach from `sp` without an underscore, and the path that documents each thing."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import simparallel as sp

# Modules that users import by their full names, because they need another package or are seldom used.
APART = (
    "simparallel.simulate.config",
    "simparallel.simulate.prediction",
    "simparallel.simulate.transformer",
    "simparallel.simulate.transformer_memory",
    "simparallel.simulate.transformer_time",
    "simparallel.testing.strategies",
)


@dataclass(frozen=True)
class Name:
    """A public name: `path` as users write it, such as "sp.nn.Linear", and its value."""

    path: str
    thing: Any

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def last(self) -> str:
        return self.path.rpartition(".")[2]


def shown(module: ModuleType) -> list[str]:
    """Return the names that a module offers: what tab completion shows, in `__all__` if it has one."""
    if module is sp.ops:  # its `__all__` is for type checkers
        names = dir(module)
    elif hasattr(module, "__all__"):
        names = [name for name in module.__all__ if name in dir(module)]
    else:
        names = [name for name in dir(module) if getattr(getattr(module, name), "__module__", "") == module.__name__]
    return sorted(name for name in names if not name.startswith("_"))


@cache
def public_modules() -> dict[str, ModuleType]:
    """Return the modules with public names, by the names that users give them: "sp", "sp.nn", "sp.nn.init", …"""
    found: dict[str, ModuleType] = {}

    def visit(path: str, module: ModuleType) -> None:
        found[path] = module
        for name in shown(module):
            inner = getattr(module, name)
            if inspect.ismodule(inner) and inner not in found.values():
                visit(f"{path}.{name}", inner)

    visit("sp", sp)
    return found | {name: import_module(name) for name in APART}


@cache
def public_names() -> tuple[Name, ...]:
    """Return every public name except modules; an object with several names appears under each."""
    names = (
        Name(f"{path}.{name}", getattr(module, name))
        for path, module in public_modules().items()
        for name in shown(module)
    )
    return tuple(name for name in names if not inspect.ismodule(name.thing))


@cache
def _paths_by_identity() -> dict[int, str]:
    found: dict[int, str] = {}
    # The shortest path first; of these the one with the name of the definition.
    for name in sorted(public_names(), key=lambda name: (name.path.count("."), not _is_defined_as(name), name.path)):
        if not isinstance(name.thing, (int, str, tuple)):  # equal constants may be one object
            found.setdefault(id(name.thing), name.path)
    return found


def _is_defined_as(name: Name) -> bool:
    return getattr(name.thing, "__name__", "") == name.last


def main_path(thing: Any) -> str | None:
    """Return the path under which a value is documented; None for constants and private values."""
    return _paths_by_identity().get(id(thing))


def main_names() -> list[Name]:
    """Return each public name that has an entry of its own; the other ones are further names of the same things."""
    return [name for name in public_names() if main_path(name.thing) in (name.path, None)]
