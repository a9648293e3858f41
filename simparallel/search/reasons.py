"""Explain the choices of a plan by the costs of the search: see `explanation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simparallel.search.explanation import Move, Option
from simparallel.search.graph import NODE
from simparallel.search.prices import Events, TimedCollective, TimedCompute, TimedMessages
from simparallel.search.problem import Problem
from simparallel.search.space import FORBIDDEN_PS, Space

# Number of alternatives beside the chosen strategy.
OTHERS = 2


def options_of(
    space: Space, problem: Problem, exposed: float, choice: Sequence[int], number: int
) -> tuple[Option, ...]:
    """Return the costs of an op's strategy and of the next best ones, given the choices of all other ops.

    `problem` is that of the space with the share `exposed` of the sums of gradients.
    """
    costs = problem.costs_at(number, choice)
    others = (int(i) for i in costs.argsort(kind="stable") if i != choice[number] and costs[i] < FORBIDDEN_PS)
    order = [choice[number], *others]
    is_given = space.graph.nodes[number].op.in_strategy is not None
    found = []
    for each in order[: OTHERS + 1]:
        own = space.choices[number][each]
        compute_ps = space.cost_ps(number, own, TimedCompute)
        exchange_ps = space.cost_ps(number, own) - compute_ps
        exposed_ps = round(exposed * space.own_sums_ps(own))
        rest_ps = int(costs[each]) - compute_ps - exchange_ps - exposed_ps
        strategy = (None, None) if is_given else own.strategy
        found.append(Option(*strategy, compute_ps, exchange_ps, exposed_ps, rest_ps))  # type: ignore[arg-type]
    return tuple(found)


def moves_into(space: Space, choice: Sequence[int], number: int) -> Iterator[Move]:
    """Yield the redistributions of an op's inputs."""
    for i, source in enumerate(space.graph.nodes[number].inputs):
        there, back = space.moves(choice, number, i)
        if there or back:
            name = space.graph.nodes[source.number].name if source.kind == NODE else source.kind
            cost_ps = sum(map(space.prices.cost_ps, (there, back)))
            yield Move(i, name, _text(there), _text(back), cost_ps)


def _text(events: Events) -> str:
    """Return the exchanges of a redistribution as text."""
    if not events:
        return ""
    texts = []
    for event in events:
        if isinstance(event, TimedCollective):
            texts.append(f"{event.op} in groups of {len(event.groups[0])}")
        elif isinstance(event, TimedMessages):
            texts.append(f"{len(event.pairs)} messages")
    return ", ".join(texts) or "slice"
