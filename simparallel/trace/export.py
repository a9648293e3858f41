"""Traces in the formats of other tools: a file for the trace, or one for each rank."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from simparallel.clock.event import Event
from simparallel.machine.cluster import ClusterSpec
from simparallel.trace import chakra, profiler


def table(events: Sequence[Event]) -> str:
    """Return CSV: a line for each event below the names of its fields; spaces separate the items of a list."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Event._fields)
    for event in events:
        writer.writerow([" ".join(map(str, value)) if isinstance(value, tuple) else value for value in event])
    return text.getvalue()


# Format -> (name of a rank's file, its bytes from the rank's events).
PER_RANK: Mapping[str, tuple[Callable[[int], str], Callable[[Sequence[Event], ClusterSpec, int], bytes]]] = {
    "kineto": (profiler.file_name, profiler.dumps),
    "chakra": (chakra.file_name, chakra.dumps),
}
FORMATS = ("chrome", *PER_RANK, "csv")
