"""A trace as one HTML file: a timeline to zoom, search and walk through, without a network and without libraries.

The page is in `page/`: its HTML, its style, and its script in three files. The events are put into it as columns of
JSON. Rows of events are ordered by rank and stream, and in a row by start; each start is relative to the event before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from simparallel.base.html import escaped
from simparallel.base.units import format_seconds
from simparallel.clock.breakdown import Totals, add_up, makespan_ps
from simparallel.clock.critical_path import communications, critical_path
from simparallel.clock.event import COMPUTE, Event, lane_names
from simparallel.clock.memory import CATEGORIES
from simparallel.machine.cluster import PS_PER_S
from simparallel.trace import metrics

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("model.js", "picture.js", "controls.js")
_NUMBERS = ("step", "seq", "flops", "size_bytes", "sent_bytes")


def dumps(
    events: Sequence[Event],
    totals: Mapping[tuple[int, int], Totals],
    title: str,
    notes: Sequence[str],
    measured: str = "measured on this machine",
) -> str:
    """Return the text of the page.

    Args:
        events: in the order of `Trace.events`.
        totals: (rank, device) -> totals of all events of the run.
        title: name of the trace and of the hardware.
        notes: sentences below the table of totals.
        measured: how wall times were measured.
    """
    # "<" only occurs in texts of JSON; as an escape it cannot end the script element, whatever the texts are.
    data = json.dumps(_data(events, totals, title, notes, measured), separators=(",", ":"), allow_nan=False)
    parts = _page()
    return "".join((parts[0], escaped(title), parts[1], data.replace("<", "\\u003c"), parts[2]))


@cache
def _page() -> tuple[str, str, str]:
    """Return the parts of the page before the title, between title and data, and after the data."""
    page = (PAGE / "page.html").read_text("utf-8")
    page = page.replace("{{style}}", (PAGE / "page.css").read_text("utf-8"))
    page = page.replace("{{script}}", "\n".join((PAGE / name).read_text("utf-8") for name in SCRIPTS))
    head, rest = page.split("{{title}}")
    middle, tail = rest.split("{{data}}")
    return head, middle, tail


def _data(
    events: Sequence[Event], totals: Mapping[tuple[int, int], Totals], title: str, notes: Sequence[str], measured: str
) -> dict[str, Any]:
    # Drawing is optional, and its modules are slow to import.
    from simparallel.view.bars import COLORS, HATCHED, OTHER_COLOR, SHOWN_NAMES

    lanes = lane_names(events)
    rows = {lane: number for number, lane in enumerate(lanes)}
    order = sorted(range(len(events)), key=lambda i: (rows[events[i].lane], events[i].sim_start_ps, i))
    place = {index: number for number, index in enumerate(order)}
    path = critical_path(events)
    events = [events[index] for index in order]
    kinds = [*COLORS, *sorted({event.kind for event in events} - COLORS.keys())]
    return {
        "title": title,
        "count": len(events),
        "kinds": [
            {
                "id": kind, "name": SHOWN_NAMES.get(kind, kind), "colour": COLORS.get(kind, OTHER_COLOR),
                "hatched": kind in HATCHED,
            }
            for kind in kinds
        ],
        "present": sorted({event.kind for event in events}),
        "rows": [{"rank": rank, "name": name} for (rank, _, _), name in lanes.items()],
        **_columns(events, rows, kinds),
        "memory": _memory(events),
        "totals": metrics.cells(metrics.summarize(totals)),
        "shares": _shares(events, totals),
        "notes": list(notes),
        "path": [place[index] for index in path],
        "path_text": _path_text([events[place[index]] for index in path]),
        "measured": measured,
    }  # fmt: skip


class _Numbers(dict[Any, int]):
    """Consecutive numbers for distinct keys, in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


def _columns(events: Sequence[Event], rows: Mapping[Any, int], kinds: Sequence[str]) -> dict[str, Any]:
    # The events have the numbers of these values, which the page has once.
    numbered = {
        "name": _Numbers(),
        "layer": _Numbers({"": 0}),
        "algorithm": _Numbers({"": 0}),
        "group": _Numbers({(): 0}),
    }
    number_of_kind = {kind: number for number, kind in enumerate(kinds)}
    calls = [-1] * len(events)
    for number, members in enumerate(found for found in communications(events) if len(found) > 1):
        for index in members:
            calls[index] = number
    columns = {
        "row": [rows[event.lane] for event in events],
        "kind": [number_of_kind[event.kind] for event in events],
        **{field: [numbers[getattr(event, field)] for event in events] for field, numbers in numbered.items()},
        "call": calls,
        **{field: [getattr(event, field) for event in events] for field in _NUMBERS},
        "sim_start": _differences([event.sim_start_ps for event in events]),
        "sim_span": [event.sim_end_ps - event.sim_start_ps for event in events],
        "wall_start": _differences([event.wall_start_ns for event in events]),
        "wall_span": [event.wall_end_ns - event.wall_start_ns for event in events],
    }
    return {
        "columns": {name: _packed(values) for name, values in columns.items()},
        **{f"{field}s": list(numbers) for field, numbers in numbered.items()},
    }


def _packed(values: Sequence[int]) -> Any:
    """Return one value for a column of equal values, {"of", "at"} for one of few distinct values, or the column."""
    numbers = _Numbers()
    at = [numbers[value] for value in values]
    if len(numbers) == 1:
        return values[0]
    return {"of": list(numbers), "at": at} if 4 * len(numbers) < len(values) else values


def _differences(times: Sequence[int]) -> list[int]:
    """Return the first time relative to the earliest, then the difference of each further time from the one before."""
    return [time - before for before, time in pairwise([min(times, default=0), *times])]


def _memory(events: Sequence[Event]) -> dict[str, Any]:
    """Return a track for each device with memory figures: its events in order of time, and live bytes by category."""
    from simparallel.view.memory import COLORS

    noted: dict[tuple[int, int], list[int]] = {}
    for index, event in enumerate(events):
        if event.live_bytes:
            noted.setdefault((event.rank, event.device), []).append(index)
    with_devices = {rank for rank, device in noted if device}
    # An older file has fewer categories.
    by_category = zip(*(events[j].live_bytes for found in noted.values() for j in found), strict=True)
    used = [i for i, live in enumerate(by_category) if any(live)]
    return {
        "categories": [CATEGORIES[i] for i in used],
        "colours": [COLORS[CATEGORIES[i]] for i in used],
        "tracks": [
            {
                "rank": rank, "name": f"sim:{device} memory" if rank in with_devices else "memory",
                "events": found, "live": [_packed([events[j].live_bytes[i] for j in found]) for i in used],
            }
            for (rank, device), found in sorted(noted.items())
            if used
        ],
    }  # fmt: skip


def _shares(events: Sequence[Event], totals: Mapping[tuple[int, int], Totals]) -> dict[str, Any]:
    """Return for each clock how each rank's first device spent its time, as shares of the makespan.

    On the simulated clock the makespan is that of the whole run. On the wall clock it is the time of the recorded
    steps, and what is neither computing nor communication is the interpreter's time: "other", not "idle".
    """
    # Drawing is optional, and its modules are slow to import.
    from simparallel.view.timeline import step_spans

    bars = [(event.wall_start_ns, event.wall_end_ns - event.wall_start_ns) for event in events]
    recorded_ns = sum(width for _, width in step_spans(events, bars))
    by_wall = add_up(event._replace(sim_start_ps=event.wall_start_ns, sim_end_ps=event.wall_end_ns) for event in events)
    clocks = {"sim": (totals, makespan_ps(totals), "idle"), "wall": (by_wall, recorded_ns, "other")}
    return {clock: _parts(*each) for clock, each in clocks.items()}


def _parts(totals: Mapping[tuple[int, int], Totals], span: float, rest: str) -> list[dict[str, Any]]:
    first: dict[int, Totals] = {}
    for (rank, _), one in sorted(totals.items()):
        first.setdefault(rank, one)
    span = span or 1
    return [
        {
            "rank": rank,
            "parts": {
                "compute": one.compute_ps / span,
                "exposed": (one.busy_ps - one.compute_ps) / span,
                rest: max(0.0, 1 - one.busy_ps / span),
            },
        }
        for rank, one in first.items()
    ]


def _path_text(path: Sequence[Event]) -> str:
    """Return a sentence on the length of the critical path and its shares."""
    if not path:
        return ""
    compute_ps, communication_ps = (_length(e for e in path if (e.stream == COMPUTE) is own) for own in (True, False))
    span_ps = path[-1].sim_end_ps - path[0].sim_start_ps
    parts = [
        (compute_ps, "computes"),
        (communication_ps, "communicates"),
        (span_ps - compute_ps - communication_ps, "waits"),
    ]
    shares = ", ".join(f"{what} {format_seconds(ps / PS_PER_S)}" for ps, what in parts if ps > 0)
    ranks = len({event.rank for event in path})
    whole = format_seconds(span_ps / PS_PER_S)
    return f"critical path: {len(path)} events on {ranks} of the ranks; it {shares}, {whole} in all"


def _length(events: Iterable[Event]) -> int:
    # A receive lasts from the start of its message, whose send is on the path, too, and counts already.
    return sum(event.sim_end_ps - event.sim_start_ps for event in events if event.name != "recv")
