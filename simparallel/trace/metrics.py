"""The summary of a trace: one row of times and counts per rank and device, and the rows as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simparallel.base.units import si_scale
from simparallel.clock.breakdown import Totals, makespan_ps
from simparallel.machine.cluster import PS_PER_S

NS_PER_S = 10**9

# (heading, key of the summary, base unit, value from the totals and the makespan [ps])
_COLUMNS: tuple[tuple[str, str, str | None, Callable[[Totals, int], float]], ...] = (
    ("steps", "steps", None, lambda one, _: one.steps),
    ("compute", "compute_time_s", "s", lambda one, _: one.compute_ps / PS_PER_S),
    ("comm", "communication_time_s", "s", lambda one, _: one.communication_ps / PS_PER_S),
    # busy is the union of compute and communication, so the difference is communication without compute.
    ("exposed", "exposed_communication_s", "s", lambda one, _: (one.busy_ps - one.compute_ps) / PS_PER_S),
    ("idle", "idle_time_s", "s", lambda one, span_ps: (span_ps - one.busy_ps) / PS_PER_S),
    ("wall compute", "wall_compute_s", "s", lambda one, _: one.wall_compute_ns / NS_PER_S),
    ("wall comm", "wall_communication_s", "s", lambda one, _: one.wall_communication_ns / NS_PER_S),
    ("sent", "sent_bytes", "B", lambda one, _: one.sent_bytes),
    ("work", "flops", "flop", lambda one, _: one.flops),
)
_WALL_TIMES = tuple(key for _, key, *_ in _COLUMNS if key.startswith("wall"))
_SIMULATED_TIMES = tuple(key for _, key, unit, _ in _COLUMNS if unit == "s" and key not in _WALL_TIMES)


def summarize(totals: Mapping[tuple[int, int], Totals]) -> list[dict[str, Any]]:
    """Return one row per rank and device; `Trace.summary` documents the keys."""
    span_ps = makespan_ps(totals)
    return [
        {"rank": rank, "device": device, **{key: value(one, span_ps) for _, key, _, value in _COLUMNS}}
        for (rank, device), one in totals.items()
    ]


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows of `summarize` as aligned columns, under their names and units."""
    lines = []
    for column in _columns(rows):
        # Headings of two words take two lines, so that the table fits into 80 columns.
        above, _, name = column[0].rpartition(" ")
        texts = [above, name, *column[1:]]
        width = max(map(len, texts))
        lines.append([text.rjust(width) for text in texts])
    return "\n".join("  ".join(line) for line in zip(*lines, strict=True))


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return rows of `summarize` as text, below a row of names with units; [] without rows."""
    columns = _columns(rows) if rows else []
    named = [[" ".join(filter(None, column[:2])), *column[2:]] for column in columns]
    return [list(row) for row in zip(*named, strict=True)]


def _columns(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return [name, unit, values…] of each column.

    All simulated times share one unit, all measured times another. Devices are shown only if a rank has several.
    """
    columns = []
    numbered = [("rank", "rank", None), *[("device", "device", None)] * any(row["device"] for row in rows)]
    for heading, key, unit in (*numbered, *(column[:3] for column in _COLUMNS)):
        texts, unit_text = [str(row[key]) for row in rows], ""
        if unit is not None:
            is_time = unit == "s"
            # One unit for all columns of a kind, so that they can be compared by eye.
            together = (_SIMULATED_TIMES, _WALL_TIMES)[key in _WALL_TIMES] if is_time else (key,)
            factor, prefix = si_scale(
                [row[name] for name in together for row in rows],
                # Times from picoseconds to seconds; no milli-bytes or milli-operations.
                smallest=-12 if is_time else 0,
                largest=0 if is_time else 18,
                digits=4,
            )
            # Bytes and operations without a prefix have no fractions.
            decimals = 0 if factor == 1 and not is_time else 2
            texts, unit_text = [f"{row[key] / factor:.{decimals}f}" for row in rows], f"[{prefix}{unit}]"
        columns.append([heading, unit_text, *texts])
    return columns
