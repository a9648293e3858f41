"""Traces as Chrome JSON, the format of ui.perfetto.dev and chrome://tracing.

A rank is a process (pid), a stream of one of its devices is a thread (tid), an event is a complete
slice ("X"), and an arrow ("s", "t", "f") runs through the slices of one collective or copy. The `args` of
every event hold its exact integers, so that `loads` returns the events of `dumps` unchanged, although
viewers round times.

The format: Trace Event Format (Google, 2016); slices of one thread must nest or be disjoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from simparallel.base.files import parse_json
from simparallel.clock.breakdown import Totals
from simparallel.clock.critical_path import communications
from simparallel.clock.event import Event, Lane, check_clock, lane_names
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec
from simparallel.machine.description import from_plain, plain

FORMAT = "simparallel-trace-1"
_TEXTS = ("stream", "name", "kind", "algorithm", "layer")
_LISTS = ("group", "live_bytes", "step_ps")
# Fields of events in `args`: all but those under the format's own keys (name, cat, pid).
_ARGS = tuple(field for field in Event._fields if field not in ("rank", "name", "kind"))
# Fields with an empty tuple or text as default: `dumps` leaves them out if they are empty.
_DEFAULTS = {field: value for field, value in Event._field_defaults.items() if value in ((), "")}
# The largest magnitude of a number in a trace: recorded numbers are 64-bit integers.
_LARGEST = 2**63 - 1
_TIDS_PER_RANK = 1000


def dumps(
    events: Sequence[Event],
    cluster: ClusterSpec,
    *,
    name: str = "",
    clock: str = "sim",
    totals: Mapping[tuple[int, int], Totals] | None = None,
    timed_by: str = "",
) -> str:
    """Return the Chrome JSON text of events.

    Args:
        events: in any order.
        cluster: the described hardware, stored with them.
        name: name of the trace.
        clock: "sim" or "wall": the clock that places the slices.
        totals: totals of all events of the run, if `events` are only some of them.
        timed_by: see `Trace`.

    Raises:
        InputError: unknown clock.
    """
    check_clock(clock)
    # The wall clock counts from boot: shift it to start at 0.
    origin = min((event.wall_start_ns for event in events), default=0) if clock == "wall" else 0
    # Viewers count nanoseconds. Rounding both ends down keeps consecutive events disjoint.
    unit = 1 if clock == "wall" else 1000
    spans = [((start - origin) // unit, (end - origin) // unit) for start, end in (e.span(clock) for e in events)]
    # In the order of their starts, in which `_threads` gives each event the first free thread.
    order = sorted(range(len(events)), key=lambda index: (spans[index], events[index].rank))
    tids, threads = _threads(events, spans, order)

    rows = _metadata(events, threads)
    arrows = _arrows(events, order)
    for index in order:
        event, (start_ns, end_ns) = events[index], spans[index]
        where = {"pid": event.rank, "tid": tids[index], "ts": _microseconds(start_ns)}
        # Empty lists and texts are left out, and restored by `loads` from the defaults: most events have none.
        args = {field: value for field in _ARGS if (value := getattr(event, field)) != _DEFAULTS.get(field)}
        duration = {"dur": _microseconds(end_ns - start_ns)}
        rows.append({"ph": "X", "name": event.name, "cat": event.kind, **where, **duration, "args": args})
        if index in arrows:
            rows.append({"name": event.name, "cat": event.kind, **where, **arrows[index]})

    other: dict[str, Any] = {"format": FORMAT, "name": name, "clock": clock, "cluster": plain(cluster)}
    if timed_by:
        other["timed_by"] = timed_by
    if totals is not None:
        other["totals"] = [{"rank": rank, "device": device, **one._asdict()} for (rank, device), one in totals.items()]
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    tail = json.dumps(other, sort_keys=True, allow_nan=False)
    return f'{{"traceEvents": [\n{lines}\n],\n"displayTimeUnit": "ns",\n"otherData": {tail}}}\n'


def _microseconds(time_ns: int) -> float:
    """Return a time in µs such that truncating `1000 * value`, as viewers do, gives `time_ns` again."""
    value = time_ns / 1000
    while int(value * 1000) < time_ns:
        # Rounding: 1.001 * 1000 is 1000.999...
        value = math.nextafter(value, math.inf)
    return value


def _threads(
    events: Sequence[Event], spans: Sequence[tuple[int, int]], order: Sequence[int]
) -> tuple[dict[int, int], dict[int, dict[int, str]]]:
    """Return the tid of every event, and rank -> {tid: thread name}.

    A stream of a device is one thread, unless its events overlap, like the wall times of concurrent collectives: then
    the stream gets as many threads as it needs, since slices of one thread must not overlap.
    """
    free_at: dict[Lane, list[int]] = {}  # end [ns] of each thread
    chosen: dict[int, tuple[Lane, int]] = {}
    for index in order:
        lane, (start_ns, end_ns) = events[index].lane, spans[index]
        ends = free_at.setdefault(lane, [])
        thread = next((number for number, end in enumerate(ends) if end <= start_ns), len(ends))
        ends[thread:thread + 1] = [end_ns]  # fmt: skip  # replaces, or opens a new thread
        chosen[index] = lane, thread

    tid_of: dict[tuple[Lane, int], int] = {}
    names: dict[int, dict[int, str]] = {}
    for lane, title in lane_names(events).items():
        rank = lane[0]
        for thread in range(len(free_at[lane])):
            named = names.setdefault(rank, {})
            # Never equal to a pid, which would mean "the main thread of that process".
            tid = _TIDS_PER_RANK * (rank + 1) + len(named) + 1
            tid_of[lane, thread] = tid
            named[tid] = title if thread == 0 else f"{title} ({thread + 1})"
    return {index: tid_of[key] for index, key in chosen.items()}, names


def _metadata(events: Sequence[Event], threads: dict[int, dict[int, str]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rank in sorted(threads):
        # Use an existing tid: viewers would show a new one as an empty thread.
        first = min(threads[rank])
        named = [("process", first, f"rank {rank}", rank)]
        named += [("thread", tid, stream, position) for position, (tid, stream) in enumerate(threads[rank].items())]
        for what, tid, name, position in named:
            for field, value in (("name", name), ("sort_index", position)):
                rows.append({"ph": "M", "name": f"{what}_{field}", "pid": rank, "tid": tid, "args": {field: value}})
    return rows


def _arrows(events: Sequence[Event], order: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the flow event of each slice that belongs to a communication between ranks, by index."""
    place = {index: number for number, index in enumerate(order)}
    arrows: dict[int, dict[str, Any]] = {}
    # A single slice has nothing to point to.
    linked = (sorted(indices, key=place.__getitem__) for indices in communications(events) if len(indices) > 1)
    for number, indices in enumerate(linked):
        for position, index in enumerate(indices):
            # start, step, finish: the phases of a flow.
            phase = "s" if position == 0 else "f" if position == len(indices) - 1 else "t"
            arrows[index] = {"ph": phase, "id": number, "bp": "e"}
    return arrows


def loads(text: str) -> tuple[list[Event], ClusterSpec, str, dict[tuple[int, int], Totals] | None, str]:
    """Parse a text of `dumps`; return (events, cluster, name, totals, timed_by). The events are in any order.

    Raises:
        InputError: the text was not made by `dumps`.
    """
    return parse_json(text, _read)


def _read(data: Any) -> tuple[list[Event], ClusterSpec, str, dict[tuple[int, int], Totals] | None, str]:
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise InputError("not a trace: no object with a list 'traceEvents'; name a file that Trace.save has written")
    other = data.get("otherData")
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        found = other.get("format") if isinstance(other, dict) else None
        raise InputError(
            f"the trace of another program or version: otherData.format is {found!r}, not {FORMAT!r}; record it again"
        )
    texts: dict[str, Any] = {"name": other.get("name"), "timed_by": other.get("timed_by", "")}
    for field, text in texts.items():
        if not isinstance(text, str):
            raise InputError(f"otherData.{field} must be a string, got {text!r}")
    events = [
        _read_event(row, number)
        for number, row in enumerate(data["traceEvents"])
        # Metadata and arrows are made from the slices again; malformed rows go on to `_read_event`, which refuses them.
        if not isinstance(row, dict) or row.get("ph") == "X"
    ]
    cluster = from_plain(ClusterSpec, other.get("cluster"), "otherData.cluster")
    return events, cluster, texts["name"], _read_totals(other.get("totals"), cluster), texts["timed_by"]


def _read_event(row: Any, number: int) -> Event:
    try:
        values = {"rank": row["pid"], "name": row["name"], "kind": row["cat"]}
        values |= {field: row["args"][field] for field in _ARGS if field not in _DEFAULTS or field in row["args"]}
        values |= {field: tuple(values[field]) for field in _LISTS if field in values}
    except (TypeError, KeyError) as error:
        raise InputError(f"traceEvents[{number}]: {error!r} in {_short(row)}") from error
    for field, value in values.items():
        kind = str if field in _TEXTS else int
        # `_fits` compares exact types: isinstance would accept `true` as an int.
        if not all(_fits(item, kind) for item in (value if field in _LISTS else [value])):
            expected = "string" if kind is str else "64-bit integer"
            expected = f"a list of {expected}s" if field in _LISTS else f"a {expected}"
            raise InputError(f"traceEvents[{number}]: {field}={value!r} must be {expected}, in {_short(row)}")
    return Event(**values)


def _fits(value: Any, kind: type[Any]) -> bool:
    """Return whether a value has exactly this type and, if it is an integer, fits into 64 bits."""
    if kind is int and type(value) is int:
        return abs(value) <= _LARGEST
    return type(value) is kind


def _read_totals(data: Any, cluster: ClusterSpec) -> dict[tuple[int, int], Totals] | None:
    if data is None:
        return None
    totals = {}
    try:
        for row in data:
            rank, device, *numbers = (row[field] for field in ("rank", "device", *Totals._fields))
            if not all(_fits(value, int) for value in (rank, device, *numbers)):
                raise InputError(f"otherData.totals: a number that is not a 64-bit integer in {_short(row)}")
            if not 0 <= rank < cluster.world_size:
                raise InputError(f"otherData.totals: rank {rank} of a cluster of {cluster.world_size}")
            totals[rank, device] = Totals(*numbers)
    except (TypeError, KeyError) as error:
        raise InputError(f"otherData.totals is not a list of totals: {error!r}") from error
    return totals


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
