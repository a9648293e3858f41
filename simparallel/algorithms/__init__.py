"""Collectives as algorithms on messages, chosen by name: `all_reduce(x, algorithm="ring")`.

Each file is one algorithm: its name and number, and for each of its collectives the function and the price. (Adasum, a
reduction that is not elementwise, has a file of its own, with one function for each algorithm.) Each function uses
`PointToPoint` (send, receive, a ledger), knows positions in the group but no ranks, and works in place on flat arrays,
so it runs on any transport and can be read by itself. `direct`, the default, sends no messages: it reads the peers'
pages (`comm/direct/direct.py`), and has only prices here.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from simparallel.algorithms.algorithm import (
    DIRECT,
    check_algorithm,
    find,
    name_of,
    names,
    number_of,
    offers,
    price,
    priced,
)
from simparallel.algorithms.point_to_point import PointToPoint, Steps, split

__all__ = [
    "DIRECT", "PointToPoint", "Steps", "check_algorithm", "find", "name_of", "names", "number_of", "offers", "price",
    "priced", "split",
]  # fmt: skip

# Importing a module registers its algorithm, so a new file in this folder needs no other entry.
for _each in iter_modules(__path__):
    import_module(f"{__name__}.{_each.name}")
