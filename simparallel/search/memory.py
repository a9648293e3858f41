"""The memory that a plan holds from forward to backward, as a sum over its ops, which a search can bound.

The tape holds the inputs of all ops that a gradient passes, their redistributed copies, and the outputs that backward
reads, until backward has passed them. A recomputed part holds only its inputs. `rehearsal` has the peak of a step.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.layout.sharding import Placement
from simparallel.search.following import data_parallel
from simparallel.search.graph import NODE, Part
from simparallel.search.rehearsal import StepRehearsal

if TYPE_CHECKING:
    from simparallel.search.space import Choice, Space


class Memory:
    """The memory that the ops of a space hold.

    Args:
        space: the choices.
    """

    def __init__(self, space: Space) -> None:
        self._space, self._nodes = space, space.graph.nodes
        # What an op keeps grows with its output, so one plan tells it for all choices.
        self._kept = rehearsed = StepRehearsal(space, data_parallel(space)).kept
        # A view holds no memory of its own, but that of the result that it is a view of.
        self._base = list(range(len(self._nodes)))
        for number, node in enumerate(self._nodes):
            if rehearsed[number].is_view and node.inputs[0].kind == NODE:
                self._base[number] = self._base[node.inputs[0].number]
        # Result -> the last op that reads it, and whether the tape holds it.
        self._last = list(range(len(self._nodes)))
        self._on_tape = [
            node.has_backward and rehearsed[number].keeps_output for number, node in enumerate(self._nodes)
        ]
        for number, node in enumerate(self._nodes):
            for source in node.inputs:
                if source.kind == NODE:
                    base = self._base[source.number]
                    self._last[base] = number
                    self._on_tape[base] |= node.has_backward

    def of_nodes(self) -> tuple[np.ndarray, ...]:
        """Return the bytes that each choice of each op holds: parameters, and the arrays that it keeps for backward."""
        dropped = self._dropped
        known: dict[Any, np.ndarray] = {}
        found = []
        for number, (node, choices) in enumerate(zip(self._nodes, self._space.choices, strict=True)):
            leaves = self._space.leaves_of(number)
            keeps, keeps_output = node.has_backward and number not in dropped, self._is_kept(number)
            kept = self._kept[number]
            key = id(choices), kept, keeps, keeps_output, repr([(i, each) for _, i, each in leaves])
            if key not in known:
                sizes = [
                    keeps_output * self._result_bytes(number, choice)
                    + keeps * kept.other_bytes * prod(choice.output.local_shape) // max(kept.output_size, 1)
                    + sum(each * _local_size(choice.inputs[i], shape) for shape, i, each in leaves)
                    for choice in choices
                ]
                known[key] = np.array(sizes, np.int64)
            found.append(known[key])
        return tuple(found)

    def of_edge(self, reader: int, i: int, table: np.ndarray) -> np.ndarray | None:
        """Return the bytes of the copies of an input that is redistributed, for each pair of choices; None for none.

        `table` has the costs of the redistributions.
        """
        if not self._nodes[reader].has_backward or reader in self._dropped:
            return None
        itemsize = self._nodes[reader].plan.inputs[i].dtype.itemsize
        sizes = [_local_size(choice.inputs[i], ()) * itemsize for choice in self._space.choices[reader]]
        return np.where(table > 0, np.array(sizes, np.int64), 0)

    def _is_kept(self, number: int) -> bool:
        """Return whether the result of an op is held from forward to backward."""
        if self._base[number] != number or not self._on_tape[number]:
            return False
        # A result in a recomputed part is held if an op after the part reads it.
        return number not in self._dropped or self._last[number] >= next(p.end for p in self._parts if number < p.end)

    @cached_property
    def _parts(self) -> list[Part]:
        return [part for part in self._space.recomputed if part.begin in self._space.again]

    @cached_property
    def _dropped(self) -> set[int]:
        """The ops whose activations do not count: those of all recomputed parts except the largest.

        While backward runs a part again, the activations of this part are held.
        """

        def size_bytes(part: Part) -> int:
            return sum(node.plan.output.size_bytes for node in self._nodes[part.begin : part.end])

        largest = max(self._parts, key=size_bytes, default=None)
        return self._space.again - (set() if largest is None else set(range(largest.begin, largest.end)))

    def _result_bytes(self, number: int, choice: Choice) -> int:
        """Return the bytes of a result, and of an unfinished sum before it is cut."""
        itemsize, made = self._nodes[number].plan.output.dtype.itemsize, choice.call.made
        is_cut = made is not choice.output and choice.output is not made.gradient
        sizes = prod(choice.output.local_shape) + is_cut * prod(made.local_shape)
        return sizes * itemsize if self._base[number] == number else 0


def _local_size(place: Placement | None, shape: tuple[int, ...]) -> int:
    return prod(shape if place is None else place.local_shape)
