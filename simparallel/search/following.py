"""The choices that a program makes by itself: ops follow the cuts of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simparallel.layout import strategy
from simparallel.layout.layout import Layout
from simparallel.search.graph import ARGUMENT, NODE, PARAMETER

if TYPE_CHECKING:
    from simparallel.search.space import Space


def data_parallel(space: Space) -> tuple[int, ...]:
    """Return the choices that semi-automatic mode makes without strategies: cut the batch, and follow."""
    return follow(space, {}, strategy.default)


def follow(space: Space, given: Mapping[int, int], start: Callable[..., Any] = strategy.whole) -> tuple[int, ...]:
    """Return the given choices (op -> choice), and for all other ops those that follow from their inputs.

    Where no input of an op is cut, `start` gives its cuts.
    """
    chosen: list[int] = []
    placed: dict[int, Layout | None] = {}
    for number, node in enumerate(space.graph.nodes):
        layouts: list[Layout | None] = []
        for source in node.inputs:
            if source.kind == NODE:
                layouts.append(space.choices[source.number][chosen[source.number]].output.layout)
            elif source.kind == ARGUMENT:
                layouts.append(space.graph.arguments[source.number].layout)
            else:
                layouts.append(placed.get(source.number) if source.kind == PARAMETER else None)
        if number in given or len(space.choices[number]) == 1:
            chosen.append(given.get(number, 0))
        else:
            chosen.append(space.nearest(number, _followed(space, number, layouts, start)))
        for source, place in zip(node.inputs, space.choices[number][chosen[-1]].inputs, strict=True):
            if source.kind == PARAMETER and place is not None:
                placed.setdefault(source.number, place.layout)
    return tuple(chosen)


def _followed(space: Space, number: int, layouts: list[Layout | None], start: Callable[..., Any]) -> Any:
    """Return the Sharding of an op that follows its inputs, as in `op_call.decide`; `start` gives it if none is cut."""
    node = space.graph.nodes[number]
    if any(layout is not None and any(cut > 1 for cut in layout.cuts) for layout in layouts):
        return strategy.follow(node.rule, node.shapes, layouts)
    is_of_parameters = all(source.kind == PARAMETER for source in node.inputs)
    return (strategy.whole if is_of_parameters else start)(node.rule, node.shapes, space.device_num)
