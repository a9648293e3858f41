"""Compare two traces of one program: a run beside its prediction, or two predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from simparallel.base.text_table import aligned
from simparallel.base.units import format_number_of, format_seconds
from simparallel.clock.event import Event
from simparallel.errors import InputError
from simparallel.machine.cluster import PS_PER_S
from simparallel.trace.trace import Trace

NS_PER_S = 10**9
# Number of differences of a kind that are listed one by one.
_LISTED = 5
# What is equal in events that are matched.
_KEY = attrgetter("rank", "name", "kind", "step", "device", "flops", "size_bytes", "group")


class Line(NamedTuple):
    """All events of one name and kind, on the ranks that both traces have.

    Attributes:
        name, kind: of the events.
        num_first, num_second: number of events in each trace.
        wall_s: time measured in the first trace [s].
        first_s, second_s: simulated time in each trace [s].
    """

    name: str
    kind: str
    num_first: int
    num_second: int
    wall_s: float
    first_s: float
    second_s: float


class Difference(NamedTuple):
    """The comparison of two traces.

    Attributes:
        ranks: the ranks that both traces have.
        lines: a line for each name and kind, the longest simulated time first.
        missing, extra: (rank, name, step, number of events) of events that only the first, or only the second, has.
        moved: number of events that both have, at other simulated times.
    """

    ranks: tuple[int, ...]
    lines: tuple[Line, ...]
    missing: tuple[tuple[int, str, int, int], ...]
    extra: tuple[tuple[int, str, int, int], ...]
    moved: int

    @property
    def is_equal(self) -> bool:
        """Whether both traces have the same events at the same simulated times."""
        return not (self.missing or self.extra or self.moved)

    def table(self) -> str:
        """Return the comparison as text."""
        names = ("event", "kind", "count", "measured", "first", "second", "second / first")
        rows = [
            (line.name, line.kind, _both(line.num_first, line.num_second), format_seconds(line.wall_s),
             format_seconds(line.first_s), format_seconds(line.second_s), _ratio(line.second_s, line.first_s))
            for line in self.lines
        ]  # fmt: skip
        text = aligned([names, *rows], "<<>")
        text.append("measured: wall time of the first trace; first, second: simulated")
        if self.is_equal:
            text.append("the same events at the same simulated times")
        for title, found in (("only in the first", self.missing), ("only in the second", self.extra)):
            if found:
                listed = "; ".join(
                    f"rank {rank}, step {step}: {count} x {name}" for rank, name, step, count in found[:_LISTED]
                )
                more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
                text.append(f"{title}: {listed}{more}")
        if self.moved:
            text.append(f"{format_number_of(self.moved, 'event')} at other simulated times")
        return "\n".join(text)


def diff(first: Trace, second: Trace) -> Difference:
    """Compare two traces, event by event.

    Events of a rank are the same if they have the same name, kind, step, device, flops, bytes and group; equal ones are
    matched in order. Ranks that only one trace has are left out: in a prediction, one rank may stand for all ranks with
    its program.

    Raises:
        InputError: no rank has events in both.
    """
    ranks = sorted({event.rank for event in first.events} & {event.rank for event in second.events})
    if not ranks:
        raise InputError("trace diff: no rank has events in both traces.")
    mine, others = (_by_key(trace.events, set(ranks)) for trace in (first, second))
    missing, extra = (_only(a, b) for a, b in ((mine, others), (others, mine)))
    moved = sum(a[2:] != b[2:] for key, found in mine.items() for a, b in zip(found, others.get(key, ()), strict=False))
    sums: dict[tuple[str, str], list[float]] = {}
    for side, table in enumerate((mine, others)):
        for key, found in table.items():
            total = sums.setdefault((key[1], key[2]), [0.0] * 5)
            total[side] += len(found)
            total[3 + side] += sum(end - start for _, _, start, end in found) / PS_PER_S
            if not side:
                total[2] += sum(end - start for start, end, _, _ in found) / NS_PER_S
    lines = [Line(*key, int(total[0]), int(total[1]), *total[2:]) for key, total in sums.items()]
    lines.sort(key=lambda line: (-max(line.first_s, line.second_s), line.name, line.kind))
    return Difference(tuple(ranks), tuple(lines), missing, extra, moved)


def _by_key(events: Iterable[Event], ranks: set[int]) -> dict[tuple[Any, ...], list[tuple[int, int, int, int]]]:
    found: dict[tuple[Any, ...], list[tuple[int, int, int, int]]] = {}
    for event in events:
        if event.rank in ranks:
            found.setdefault(_KEY(event), []).append((*event.span("wall"), *event.span("sim")))
    return found


def _only(mine: dict[Any, list[Any]], others: dict[Any, list[Any]]) -> tuple[tuple[int, str, int, int], ...]:
    counts: Counter[tuple[int, str, int]] = Counter()
    for key, found in mine.items():
        counts[key[0], key[1], key[3]] += max(0, len(found) - len(others.get(key, ())))
    return tuple((*key, count) for key, count in sorted(counts.items()) if count)


def _both(first: int, second: int) -> str:
    return str(first) if first == second else f"{first} / {second}"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "-"
