"""The memory that a plan holds from forward to backward, as a sum over its ops, which a search can bound.

The tape holds the inputs of all ops that a gradient passes, their redistributed copies, and what ops keep for backward,
until backward has passed them. A recomputed part holds only its inputs. `rehearsal` has the peak of a step.
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


def of_nodes(space: Space) -> list[np.ndarray]:
    """Return the bytes that each choice of each op holds: parameters, and arrays from forward to backward.

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
                + sum(each * _local_size(choice.inputs[i], shape) for shape, i, each in leaves)
                for choice in choices
            ]
            known[key] = np.array(sizes, np.int64)
        found.append(known[key])
    return found


def of_edge(space: Space, reader: int, i: int, table: np.ndarray) -> np.ndarray | None:
    """Return the bytes of the copies of an input that is redistributed, for each pair of choices; None for none.

    `table` has the costs of the redistributions.
    """
    node = space.graph.nodes[reader]
    if not node.has_backward or reader in space.again:
        return None
    sizes = [_local_size(choice.inputs[i], ()) * node.plan.inputs[i].dtype.itemsize for choice in space.choices[reader]]
    return np.where(table > 0, np.array(sizes, np.int64), 0)


def _local_size(place: Placement | None, shape: tuple[int, ...]) -> int:
    return prod(shape if place is None else place.local_shape)
