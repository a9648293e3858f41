"""The legal strategies nearest to an illegal one, for the suggestions in errors.

The caller (`strategy`) decides whether a strategy is legal. This module only chooses the candidates
and their order: those that change the fewest entries first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from math import prod
from typing import Any

from simparallel.layout.layout import INTERLEAVED, Layout
from simparallel.layout.rule import Place, Shape

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
    shapes: tuple[Shape, ...], strategy: Sequence[Sequence[int]], device_num: int, is_legal: Callable[[Strategy], bool]
) -> list[Strategy]:
    """Return the legal tuple strategies that change the fewest cuts, three at most."""
    # Legal cuts divide the dim and the devices. The nearest few of each dim keep the product of choices small.
    choices = [
        [_closest(cut, [1, *_divisors(size, device_num)]) for cut, size in zip(entry, shape, strict=True)]
        for entry, shape in zip(strategy, shapes, strict=True)
    ]
    # One list over all dims of all inputs, for `product`; `_regroup` makes entries of it again.
    flat = [cuts for entry in choices for cuts in entry]
    # With many dims even these are too many to sort: offer only to keep or to drop each cut.
    if prod(map(len, flat)) > 4096:
        flat = [sorted({1, cut}, reverse=True) for entry in strategy for cut in entry]
    lengths = [len(entry) for entry in strategy]
    old = [cut for entry in strategy for cut in entry]

    def distance(cuts: tuple[int, ...]) -> tuple[int, int]:
        changed = [(a, b) for a, b in zip(cuts, old, strict=True) if a != b]
        return len(changed), sum(abs(a - b) for a, b in changed)

    whole = tuple(_regroup([1] * len(old), lengths))
    made = (tuple(_regroup(cuts, lengths)) for cuts in sorted(product(*flat), key=distance))
    return _first(made, whole, is_legal)


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


def _regroup(flat: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    start = 0
    for length in lengths:
        yield tuple(flat[start : start + length])
        start += length


def _closest(cut: int, values: list[int]) -> list[int]:
    return sorted(set(values), key=lambda value: abs(value - cut))[:4]


def _divisors(size: int, device_num: int) -> list[int]:
    return [cut for cut in range(1, device_num + 1) if device_num % cut == 0 and size % cut == 0]
