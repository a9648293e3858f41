"""The memory of a device under a plan: a sum that a search can bound, and the peak of a step.

The tape holds the inputs of all ops that a gradient passes, their redistributed copies, and the outputs that backward
reads, until backward has passed them. A recomputed part holds only its inputs. Work arrays of kernels do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.layout.sharding import Placement
from simparallel.search.graph import NODE, Node, Part

if TYPE_CHECKING:
    from simparallel.search.space import Choice, Space


class Memory:
    """The memory that the ops of a space hold.

    Args:
        space: the choices.
    """

    def __init__(self, space: Space) -> None:
        self._space, self._nodes = space, space.graph.nodes
        # A view holds no memory of its own, but that of the result that it is a view of.
        self._base = list(range(len(self._nodes)))
        for number, node in enumerate(self._nodes):
            if node.is_view and node.inputs[0].kind == NODE:
                self._base[number] = self._base[node.inputs[0].number]
        # Result -> the last op that reads it, and whether the tape holds it.
        self._last = list(range(len(self._nodes)))
        self._on_tape = [node.has_backward and node.keeps_output for node in self._nodes]
        for number, node in enumerate(self._nodes):
            for source in node.inputs:
                if source.kind == NODE:
                    base = self._base[source.number]
                    self._last[base] = number
                    self._on_tape[base] |= node.has_backward

    # --- a sum ----------------------------------------------------------------------------------------

    def of_nodes(self) -> tuple[np.ndarray, ...]:
        """Return the bytes that each choice of each op holds: parameters, and the arrays that it keeps for backward."""
        dropped = self._dropped
        known: dict[Any, np.ndarray] = {}
        found = []
        for number, (node, choices) in enumerate(zip(self._nodes, self._space.choices, strict=True)):
            leaves = self._space.leaves_of(number)
            keeps, keeps_output = node.has_backward and number not in dropped, self._is_kept(number)
            key = id(choices), keeps, keeps_output, repr([(i, each) for _, i, each in leaves])
            if key not in known:
                sizes = [
                    keeps_output * self._result_bytes(number, choice)
                    + keeps * self._other_bytes(node, choice)
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

    # --- the peak -------------------------------------------------------------------------------------

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """Return the peak [bytes] of a step: the arrays that are held, and the live gradients of activations."""
        space, nodes = self._space, self._nodes
        chosen = [choices[number] for choices, number in zip(space.choices, choice, strict=True)]
        result = [self._result_bytes(n, each) for n, each in enumerate(chosen)]
        beside = [self._other_bytes(node, each) for node, each in zip(nodes, chosen, strict=True)]
        into: list[list[int]] = []
        for number, node in enumerate(nodes):
            sizes = [
                _local_size(place, spec.shape) * spec.dtype.itemsize
                for place, spec in zip(chosen[number].inputs, node.plan.inputs, strict=True)
            ]
            into.append(sizes)
            moved = (i for i in range(len(sizes)) if any(space.moves(choice, number, i)))
            beside[number] += sum(sizes[i] for i in moved)
        live = sum(
            each * _local_size(chosen[n].inputs[i], shape)
            for n in range(len(nodes))
            for shape, i, each in space.leaves_of(n)
        )
        peak, held = live, [0] * len(nodes)

        def run(numbers: range) -> None:
            """Run forward; results that nothing holds are freed after their last reader."""
            nonlocal live, peak
            for number in numbers:
                live += result[number] + beside[number] - held[number]
                held[number] = result[number] + beside[number]
                peak = max(peak, live)
                for other in {number, *(self._base[s.number] for s in nodes[number].inputs if s.kind == NODE)}:
                    stays = self._on_tape[other] * result[other] + nodes[other].has_backward * beside[other]
                    if self._last[other] <= number and held[other] > stays:
                        live += stays - held[other]
                        held[other] = stays

        def drop(part: Part) -> None:
            nonlocal live
            for number in range(part.begin, part.end):
                stays = result[number] if self._last[number] >= part.end else 0
                live += stays - held[number]
                held[number] = stays

        parts = self._parts
        start = 0
        for part in parts:
            run(range(start, part.end))
            drop(part)
            start = part.end
        run(range(start, len(nodes)))
        ends = {part.end - 1: part for part in parts}
        gradients: dict[int, int] = {}
        for number in reversed(range(len(nodes))):
            if number in ends:
                run(range(ends[number].begin, ends[number].end))
            node = nodes[number]
            if not node.has_backward:
                continue
            made = sum(size for size, needed in zip(into[number], node.needs, strict=True) if needed)
            peak = max(peak, live + made)
            for source, size, needed in zip(node.inputs, into[number], node.needs, strict=True):
                # Gradients of parameters are counted from the start.
                if needed and source.kind == NODE and source.number not in gradients:
                    gradients[source.number] = size
                    live += size
            live -= gradients.pop(number, 0) + held[number]
            held[number] = 0
        return peak

    def _result_bytes(self, number: int, choice: Choice) -> int:
        """Return the bytes of a result, and of an unfinished sum before it is cut."""
        itemsize, made = self._nodes[number].plan.output.dtype.itemsize, choice.call.made
        is_cut = made is not choice.output and choice.output is not made.gradient
        sizes = prod(choice.output.local_shape) + is_cut * prod(made.local_shape)
        return sizes * itemsize if self._base[number] == number else 0

    def _other_bytes(self, node: Node, choice: Choice) -> int:
        """Return the bytes of other arrays that an op keeps for backward."""
        return node.kept_bytes * prod(choice.output.local_shape) // max(prod(node.plan.output.shape), 1)


def _local_size(place: Placement | None, shape: tuple[int, ...]) -> int:
    return prod(shape if place is None else place.local_shape)
