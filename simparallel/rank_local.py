"""Rank-local variables: each rank has its own, where a program of one rank would have global variables."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar, cast

T = TypeVar("T")


class _DefaultFactory:
    """The default of a variable: `make()`, called once for each rank."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def per_rank(make: Callable[[], T]) -> T:
    """Declare a variable of a `RankLocal` that begins as `make()` on each rank, such as an empty list."""
    return cast(T, _DefaultFactory(make))


class RankLocal(threading.local):
    """A base class for variables of which each rank has its own; there is one instance for all ranks.

    A subclass declares them with their defaults, as class attributes. Defaults that can change are made for each rank,
    by `per_rank`:

        class OpenBlocks(RankLocal):
            depth = 0
            names: list[str] = per_rank(list)

        open_blocks = OpenBlocks()

    A rank is the thread that runs its program: the main thread of a process, or, inline and in dry runs, one of several
    threads. Any other thread, whether the program or a library has started it, begins with the defaults and shares
    nothing with the rank; code that computes for the rank in threads of its own (`parallel_apply`) hands over what it
    needs.

    A process may run one program after another; `begin_run` restores the defaults. Only a subclass that `outlasts_runs`
    keeps its values: a program may keep the objects that they describe.

    Cost: an attribute is read as fast as any attribute of a `threading.local`, without a call.
    """

    outlasts_runs: ClassVar[bool] = False
    _factories: ClassVar[dict[str, Callable[[], Any]]] = {}
    # The instances that `begin_run` resets. They are variables of modules, so they never end.
    _of_runs: ClassVar[list[RankLocal]] = []

    def __init_subclass__(cls) -> None:
        own = {name: value.make for name, value in vars(cls).items() if isinstance(value, _DefaultFactory)}
        cls._factories = {**cls._factories, **own}

    def __new__(cls) -> Self:
        local = super().__new__(cls)
        if not cls.outlasts_runs:
            cls._of_runs.append(local)
        return local

    def __reduce__(self) -> str:
        # As functions are: by the name of a variable of its module. Another process has its own values.
        return next(name for name, value in vars(sys.modules[type(self).__module__]).items() if value is self)

    def __init__(self) -> None:
        # Python calls this once in each thread that uses the instance.
        for name, make in self._factories.items():
            setattr(self, name, make())


def begin_run() -> None:
    """Restore the defaults of this thread, before it runs the program of a rank."""
    for local in tuple(RankLocal._of_runs):
        variables = vars(local)
        variables.clear()
        for name, make in local._factories.items():
            variables[name] = make()
