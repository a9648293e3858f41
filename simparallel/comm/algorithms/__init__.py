"""Collectives as algorithms on messages, chosen by name: `all_reduce(x, algorithm="ring")`.

Each module is one algorithm; its `__all__` names the collectives that it has. (Adasum, a reduction that is not
elementwise, has a module of its own, with one function for each algorithm.) Each function uses `PointToPoint` (send,
receive, a ledger), knows positions in the group but no ranks, and works in place on flat arrays, so it runs on any
transport and can be read by itself. `direct`, the default, sends no messages: it reads the peers' pages (`direct.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from simparallel.comm.algorithms import adasum, halving_doubling, naive, ring, tree
from simparallel.comm.algorithms.point_to_point import PointToPoint, Steps, split
from simparallel.comm.call_header import ALGORITHMS
from simparallel.errors import InputError

__all__ = ["ALGORITHMS", "DIRECT", "PointToPoint", "Steps", "check_algorithm", "find", "offers", "split"]

DIRECT = "direct"
_MODULES: dict[str, ModuleType] = {
    "naive": naive, "ring": ring, "tree": tree, "halving_doubling": halving_doubling,
}  # fmt: skip


def offers(algorithm: str, op: str) -> bool:
    """Return whether an algorithm implements a collective."""
    return algorithm == DIRECT or op in _ops_of(algorithm)


def check_algorithm(who: str, algorithm: str, op: str | None = None) -> None:
    """Refuse an unknown algorithm, and one that does not have this collective.

    Raises:
        InputError: lists the available ones.
    """
    if algorithm not in ALGORITHMS:
        raise InputError(f"{who}: algorithm={algorithm!r} is not one of {', '.join(ALGORITHMS)}.")
    if op is not None and not offers(algorithm, op):
        having = [name for name in ALGORITHMS if offers(name, op)]
        raise InputError(
            f"{who}: algorithm={algorithm!r} has no {op}; choose from {', '.join(having)}. "
            f"{algorithm} has {', '.join(_ops_of(algorithm))}."
        )


def find(algorithm: str, op: str) -> Callable[..., Steps]:
    """Return the function by which an algorithm runs a collective."""
    place = (adasum, algorithm) if op == "adasum" else (_MODULES[algorithm], op)
    function: Callable[..., Steps] = getattr(*place)
    return function


def _ops_of(algorithm: str) -> list[str]:
    return [*_MODULES[algorithm].__all__, *(["adasum"] if algorithm in adasum.__all__ else [])]
