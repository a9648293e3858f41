"""All strategies of an op, from which a search chooses. Pure integers."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from simparallel.errors import StrategyError
from simparallel.layout.rule import Place, Shape, places
from simparallel.layout.sharding import Sharding
from simparallel.layout.strategy import from_tuples
from simparallel.layout.suggest import tuple_strategies


class Candidate(NamedTuple):
    """A legal strategy of an op, as arguments of `shard`, and what follows from it.

    Attributes:
        in_strategy: for each input its cuts.
        out_strategy: cuts of the output if a new dim is cut or a sum is reduce-scattered; else None.
        sharding: the cuts of the op's dims.
    """

    in_strategy: tuple[tuple[int, ...], ...]
    out_strategy: tuple[int, ...] | None
    sharding: Sharding


@lru_cache(maxsize=1024)
def candidates(
    rule: str,
    shapes: tuple[Shape, ...],
    device_num: int,
    repeat: str = "right",
    order: tuple[str, ...] = (),
    most_dims: int | None = None,
    fully: bool = False,
) -> tuple[Candidate, ...]:
    """Return all legal tuple strategies of an op, the one without cuts first.

    The cuts of the named dims are all factorisations of `device_num` and of its divisors; left-over devices repeat
    slices. A sum over a cut dim is finished on all ranks, or cuts a dim of the output further (a reduce-scatter).

    Args:
        rule, shapes, device_num, repeat, order: as for `strategy.from_strategy`.
        most_dims: largest number of dims cut at once; None for any number.
        fully: only strategies that use all devices, and the one without cuts.
    """
    inputs, output = places(rule, shapes)
    made = {name for place in output for name in place.names} - {n for t in inputs for p in t for n in p.names}
    found = []
    for cuts, entries in tuple_strategies(rule, shapes, device_num, most_dims):
        if fully and prod(cuts.values()) not in (1, device_num):
            continue
        out = tuple(prod(cuts[n] for n in place.names) for place in output)
        new = out if any(cuts[name] > 1 for name in made) else None
        try:
            sharding = from_tuples(rule, shapes, entries, device_num, repeat, order, new)
            # A tuple has one cut for a merged dim, read as cuts of its outermost factors; no tuple stands for others.
            if all(sharding.cut(name) == cut for name, cut in cuts.items()):
                found.append(Candidate(entries, new, sharding))
                found += [Candidate(entries, cut, sharding) for cut in _scattered(sharding, output) if new is None]
        except StrategyError:
            continue
    return tuple(found)


def _scattered(sharding: Sharding, output: tuple[Place, ...]) -> list[tuple[int, ...]]:
    """Return the possible cuts of the output where all axes of an unfinished sum cut one of its dims further."""
    made: Any = sharding.output_layout
    share = prod(made.mesh.axis_size(axis) for axis in made.partial)
    if share == 1:
        return []
    cuts = made.cuts
    further = ((d, cuts[d] * share) for d in range(len(cuts)))
    return [(*cuts[:d], cut, *cuts[d + 1 :]) for d, cut in further if output[d].size % cut == 0]
