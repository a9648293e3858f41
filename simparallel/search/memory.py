"""The memory that a plan holds from forward to backward, as a sum over its ops, which a search can bound.

What ops keep for backward is held until backward has passed them; a redistributed copy counts as held, even if its op
does not keep it. A recomputed part holds only its inputs. `rehearsal` has the peak of a step.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.layout.sharding import Placement
from simparallel.search.following import data_parallel
from simparallel.search.rehearsal import StepRehearsal

if TYPE_CHECKING:
    from simparallel.search.space import Space


Tables = dict[tuple[int, int], np.ndarray]


def held_bytes(space: Space) -> tuple[tuple[np.ndarray, ...], Tables]:
    """Return the bytes that each choice of each op holds, and those of the copies of redistributed inputs, by edge."""
    held = _of_nodes(space)
    copies: Tables = {}
    known: dict[Any, np.ndarray] = {}
    for reader, node in enumerate(space.graph.nodes):
        if not node.has_backward or reader in space.again:
            continue
        for i, spec in enumerate(node.plan.inputs):
            maker, table = space.table(reader, i)
            if table is None:
                continue
            same = id(table), id(space.choices[reader]), i
            if same not in known:
                sizes = [local_size(choice.inputs[i], ()) * spec.dtype.itemsize for choice in space.choices[reader]]
                known[same] = np.where(table > 0, np.array(sizes, np.int64), 0)
            if maker is None:
                held[reader] = held[reader] + known[same][0]
            else:
                add(copies, (maker, reader), known[same])
    return tuple(held), copies


def add(tables: Tables, edge: tuple[int, int], table: np.ndarray) -> None:
    """Add a table to those of an edge."""
    before = tables.get(edge)
    tables[edge] = table if before is None else before + table


def _of_nodes(space: Space) -> list[np.ndarray]:
    """Return the bytes of parameters, and of arrays that are held from forward to backward, for each choice.

    These arrays grow with the op's output, so a rehearsal of one plan tells them for all choices.
    """
    known: dict[Any, np.ndarray] = {}
    found, plain = [], data_parallel(space)
    for number, held_bytes in enumerate(StepRehearsal(space, plain).held_bytes):
        choices, leaves = space.choices[number], space.leaves_of(number)
        size = max(prod(choices[plain[number]].output.local_shape), 1)
        key = id(choices), held_bytes, size, repr([(i, each) for _, i, each in leaves])
        if key not in known:
            sizes = [
                held_bytes * prod(choice.output.local_shape) // size
                + sum(each * local_size(choice.inputs[i], shape) for shape, i, each in leaves)
                for choice in choices
            ]
            known[key] = np.array(sizes, np.int64)
        found.append(known[key])
    return found


def local_size(place: Placement | None, shape: tuple[int, ...]) -> int:
    """Return the elements of a rank's slice; those of `shape` for a tensor without a placement."""
    return prod(shape if place is None else place.local_shape)
