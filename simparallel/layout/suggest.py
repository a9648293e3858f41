"""The legal strategies nearest to an illegal one, for the suggestions in errors.

The caller (`strategy`) decides whether a strategy is legal. This module only chooses the candidates
and their order: those that change the fewest entries first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import Any

from simparallel.layout.layout import INTERLEAVED, Layout
from simparallel.layout.rule import Place, Shape, places

# Strategies named in one error.
MOST = 3
# Candidates tested; with more, an error would take seconds.
_MOST_TESTED = 2000
# Candidates generated.
_MOST_MADE = 20_000

# For each input a tuple of cuts, or a called Layout.
Strategy = tuple[Any, ...]
Axes = tuple[str, ...]


def tuples(
    rule: str,
    shapes: tuple[Shape, ...],
    strategy: Sequence[Sequence[int]],
    device_num: int,
    is_legal: Callable[[Strategy], bool],
) -> list[Strategy]:
    """Return the legal tuple strategies that change the fewest cuts, by the least, three at most; of two, more cuts."""
    old = list(chain.from_iterable(strategy))

    def distance(entries: Strategy) -> tuple[int, int, int]:
        new = list(chain.from_iterable(entries))
        changed = [(a, b) for a, b in zip(new, old, strict=True) if a != b]
        return len(changed), sum(abs(a - b) for a, b in changed), -prod(new)

    made = [entries for _, entries in islice(tuple_strategies(rule, shapes, device_num), _MOST_MADE)]
    return _first(sorted(made, key=distance), made[0], is_legal)


def tuple_strategies(
    rule: str, shapes: tuple[Shape, ...], device_num: int, most_dims: int | None = None
) -> Iterator[tuple[dict[str, int], tuple[tuple[int, ...], ...]]]:
    """Yield cuts of the named dims, and the tuple strategy with these cuts, which may be illegal for other reasons.

    The cuts are all factorisations of `device_num` and of its divisors into divisors of the sizes, with at most
    `most_dims` dims cut at once; the one without cuts comes first.
    """
    inputs, output = places(rule, shapes)
    found: dict[str, int] = {}
    whole: set[str] = set()
    for tensor in (*inputs, output):
        for place in tensor:
            if place.kind == "whole":
                whole.update(place.names)
            for name, size in zip(place.names, place.sizes, strict=True):
                found.setdefault(name, size)
    sizes = [(name, 1 if name in whole else size) for name, size in found.items()]
    for cuts in _factorisations(sizes, device_num, len(sizes) if most_dims is None else most_dims):
        yield cuts, tuple(tuple(prod(cuts[n] for n in place.names) for place in tensor) for tensor in inputs)


def _factorisations(sizes: list[tuple[str, int]], device_num: int, most_dims: int) -> Iterator[dict[str, int]]:
    """Yield all cuts of the dims whose product divides the number of devices, with at most `most_dims` dims cut."""
    if not sizes:
        yield {}
        return
    (name, size), *rest = sizes
    cuts = (c for c in range(1, device_num + 1) if device_num % c == 0 and size % c == 0)
    for cut in cuts if most_dims else (1,):
        for others in _factorisations(rest, device_num // cut, most_dims - (cut > 1)):
            yield {name: cut, **others}


def layouts(
    tensors: tuple[tuple[Place, ...], ...], strategy: Sequence[Layout], is_legal: Callable[[Strategy], bool]
) -> list[Strategy]:
    """Return the nearest legal strategies of Layouts over the given axes, three at most.

    Nearest are strategies that change the fewest entries (a dim of an input), then those that move the
    fewest axes, then those with the most distinct slices. Every legal strategy assigns each axis to one
    named dim of the op or to none, so the candidates are all such assignments.

    Args:
        tensors: the dims of every input.
        strategy: for each input a called Layout with an entry per dim, all of one device matrix.
        is_legal: returns whether a candidate is legal.
    """
    base = strategy[0]
    old = [entry for layout in strategy for entry in layout.axes_by_dim]
    # Input -> its interleaved dim. The virtual axis is not a device axis: it stays where it is, or is dropped.
    pieces = {
        i: layout.axes_by_dim.index(entry)
        for i, layout in enumerate(strategy)
        for entry in layout.axes_by_dim
        if INTERLEAVED in entry
    }
    names = list(dict.fromkeys(name for tensor in tensors for place in tensor for name in place.names))
    sizes = dict(zip(base.alias_name, base.device_matrix, strict=True))
    axes = [axis for axis in base.alias_name if sizes[axis] > 1 and axis != INTERLEAVED]
    allowed = dict.fromkeys(axes, names)
    # With too many assignments, let each axis stay in its present dims or cut none.
    if prod(len(names) + 1 + i for i in range(len(axes))) > _MOST_MADE:
        dims = [place for tensor in tensors for place in tensor]
        allowed = {
            axis: list(
                dict.fromkeys(
                    name for place, entry in zip(dims, old, strict=True) if axis in entry for name in place.names
                )
            )
            for axis in axes
        }

    def entries(cuts: dict[str, Axes], is_interleaved: bool) -> list[list[Axes]]:
        found = [[_joined(place, cuts) for place in tensor] for tensor in tensors]
        if is_interleaved:
            for i, dim in pieces.items():
                found[i][dim] = (*found[i][dim], INTERLEAVED)
        return found

    def distance(candidate: list[list[Axes]]) -> tuple[int, int, int]:
        new = list(chain.from_iterable(candidate))
        changed = [(a, b) for a, b in zip(new, old, strict=True) if a != b]
        used = set(chain.from_iterable(new))
        return len(changed), sum(len({*a} ^ {*b}) for a, b in changed), -prod(sizes[axis] for axis in used)

    candidates = [
        entries(cuts, is_interleaved)
        for cuts in _assignments(allowed)
        for is_interleaved in ([True, False] if pieces else [False])
    ]
    # Sort plain tuples, and make Layouts only of the few that are tested.
    candidates.sort(key=distance)
    made = (tuple(base(*(axes or "None" for axes in entry)) for entry in each) for each in candidates)
    whole = tuple(base(*["None"] * len(tensor)) for tensor in tensors)
    return _first(made, whole, is_legal)


def format_strategies(strategies: Iterable[Strategy]) -> str:
    """Format strategies as a user writes them; Layouts share one device matrix, written once as `layout`.

    Example:
        >>> from simparallel.layout.suggest import format_strategies
        >>> layout = sp.Layout((2, 4), ("dp", "mp"))
        >>> format_strategies([(layout("dp", "mp"), layout("mp", "None"))])
        "(layout('dp', 'mp'), layout('mp', 'None')) with layout = Layout((2, 4), ('dp', 'mp'))"
    """
    strategies = list(strategies)
    text = " or ".join(map(str, strategies))
    for entry in (entry for each in strategies for entry in each if isinstance(entry, Layout)):
        bare = repr(Layout(entry.device_matrix, entry.alias_name, entry.rank_list))
        return f"{text.replace(bare, 'layout')} with layout = {bare}"
    return text


def _first(candidates: Iterable[Strategy], whole: Strategy, is_legal: Callable[[Strategy], bool]) -> list[Strategy]:
    """Return the first legal candidates; if none of those tested is legal, `whole`, which cuts nothing."""
    found: list[Strategy] = []
    for candidate in islice(candidates, _MOST_TESTED):
        if candidate not in found and is_legal(candidate):
            found.append(candidate)
        if len(found) == MOST:
            break
    return found or [whole] * is_legal(whole)


def _assignments(allowed: Mapping[str, Sequence[str]]) -> list[dict[str, Axes]]:
    """Assign each axis to one of its names or to none, in every order within a name; at most _MOST_MADE assignments."""
    found: list[dict[str, Axes]] = [{}]
    for axis, names in allowed.items():
        longer = [
            {**cuts, name: (*own[:at], axis, *own[at:])}
            for cuts in found
            for name in names
            for own in [cuts.get(name, ())]
            for at in range(len(own) + 1)
        ]
        found = [*found, *longer][:_MOST_MADE]
    return found


def _joined(place: Place, cuts: dict[str, Axes]) -> Axes:
    return tuple(axis for name in place.names for axis in cuts.get(name, ()))
