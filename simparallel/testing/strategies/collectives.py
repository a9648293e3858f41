"""Programs of collectives, which every rank runs alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from simparallel import collectives
from simparallel.comm import current
from simparallel.testing.strategies.values import Draw, Shape, shapes, world_sizes

OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class ProgramCall(NamedTuple):
    """One collective of a program.

    Attributes:
        name: name of the collective.
        shape: shape of each rank's array; its first dim is a multiple of the group's size.
        op: "sum" or "max".
        root: a rank of the group.
        group: ranks of the group; None for all.
    """

    name: str
    shape: Shape
    op: str
    root: int
    group: tuple[int, ...] | None


@dataclass(frozen=True)
class Program:
    """A program of collectives on small integers: call it on each rank, and it returns the results.

    Attributes:
        world_size: number of ranks.
        calls: in order.
    """

    world_size: int
    calls: tuple[ProgramCall, ...]

    def __call__(self) -> list[np.ndarray | None]:
        """Run the program on this rank. Collective: yes."""
        found: list[np.ndarray | None] = []
        for number, call in enumerate(self.calls):
            group = None if call.group is None else collectives.new_group(call.group)
            rank = current().rank
            if call.group is not None and rank not in call.group:
                found.append(None)
                continue
            x = self.array(number, rank)
            settings: dict[str, Any] = {"group": group}
            if call.name in ("broadcast", "reduce"):
                settings["src" if call.name == "broadcast" else "dst"] = call.root
            if call.name in ("all_reduce", "reduce", "reduce_scatter"):
                settings["op"] = call.op
            if call.name == "barrier":
                collectives.barrier(**settings)
                found.append(None)
            else:
                result = getattr(collectives, call.name)(x, **settings)
                found.append(np.array(x if result is None else result))
        return found

    def array(self, number: int, rank: int) -> np.ndarray:
        """Return the array that a rank passes to call `number`: element i is i % 7 + 10 * rank + number, float64."""
        call = self.calls[number]
        return (np.arange(np.prod(call.shape, dtype=int)) % 7 + 10.0 * rank + number).reshape(call.shape)


@st.composite
def programs(draw: Draw, world_size: int | None = None, *, max_calls: int = 5) -> Program:
    """Draw programs of collectives that are valid on every transport and with every algorithm.

    Args:
        draw: supplied by Hypothesis.
        world_size: number of ranks; by default 1 to 4.
        max_calls: maximum number of calls.

    Example:
        >>> from hypothesis import given
        >>> from simparallel.testing.strategies import programs
        >>> @given(programs())
        ... def test_processes_compute_as_threads(world, program):
        ...     inline = sp.launch(program, world_size=program.world_size, transport="inline")
        ...     assert repr(world.run(program.world_size, program)) == repr(inline)
    """
    size = draw(world_sizes(4)) if world_size is None else world_size
    groups = st.permutations(range(size)).flatmap(
        lambda order: st.integers(1, size).map(lambda count: tuple(order[:count]))
    )

    @st.composite
    def one(draw: Draw) -> ProgramCall:
        group = draw(st.none() | groups)
        members = group or tuple(range(size))
        rows = len(members) * draw(st.integers(1, 3))
        return ProgramCall(
            draw(st.sampled_from(OPS)),
            (rows, *draw(shapes(0, 1, min_size=1))),
            draw(st.sampled_from(("sum", "max"))),
            draw(st.sampled_from(members)),
            group,
        )

    return Program(size, tuple(draw(st.lists(one(), min_size=1, max_size=max_calls))))
