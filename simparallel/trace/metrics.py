"""Where the time went: one row of numbers per rank and device, and those rows as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from simparallel.cluster import PS_PER_S
from simparallel.events import COMPUTE, Event
from simparallel.units import si_scale

NS_PER_S = 10**9

# (heading, key of the summary, base unit)
_COLUMNS = (
    ("rank", "rank", None),
    ("device", "device", None),
    ("steps", "steps", None),
    ("compute", "compute_time_s", "s"),
    ("comm", "communication_time_s", "s"),
    ("exposed", "exposed_communication_s", "s"),
    ("idle", "idle_time_s", "s"),
    ("wall compute", "wall_compute_s", "s"),
    ("wall comm", "wall_communication_s", "s"),
    ("sent", "sent_bytes", "B"),
    ("work", "flops", "flop"),
)
_WALL_TIMES = tuple(key for _, key, _ in _COLUMNS if key.startswith("wall"))
_SIMULATED_TIMES = tuple(key for _, key, unit in _COLUMNS if unit == "s" and key not in _WALL_TIMES)


def busy(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of half-open intervals, in their own unit."""
    total = 0
    covered_until: int | None = None
    for start, end in sorted(intervals):
        if covered_until is not None:
            start = max(start, covered_until)
        if end > start:
            total += end - start
            covered_until = end
    return total


def makespan_ps(events: Sequence[Event]) -> int:
    """Simulated time [ps] from the first start to the last end; 0 without events."""
    if not events:
        return 0
    return max(event.sim_end_ps for event in events) - min(event.sim_start_ps for event in events)


def num_steps(events: Iterable[Event]) -> int:
    """Optimizer steps that were finished. Set-up and evaluation carry step numbers too, but are none."""
    return len({event.step for event in events if event.kind == "optimizer"})


def summarize(events: Sequence[Event]) -> list[dict[str, Any]]:
    """One row per rank and device, in order. `Trace.summary` says what the columns mean."""
    span_ps = makespan_ps(events)
    by_device: dict[tuple[int, int], list[Event]] = {}
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_device.setdefault((event.rank, event.device), []).append(event)
        by_rank.setdefault(event.rank, []).append(event)
    steps = {rank: num_steps(found) for rank, found in by_rank.items()}
    return [_row(*key, steps[key[0]], by_device[key], span_ps) for key in sorted(by_device)]


def _row(rank: int, device: int, steps: int, events: list[Event], span_ps: int) -> dict[str, Any]:
    compute = [event for event in events if event.stream == COMPUTE]
    communication = [event for event in events if event.stream != COMPUTE]
    compute_ps = busy((event.sim_start_ps, event.sim_end_ps) for event in compute)
    communication_ps = busy((event.sim_start_ps, event.sim_end_ps) for event in communication)
    any_ps = busy((event.sim_start_ps, event.sim_end_ps) for event in events)
    return {
        "rank": rank,
        "device": device,
        "steps": steps,
        "compute_time_s": compute_ps / PS_PER_S,
        "communication_time_s": communication_ps / PS_PER_S,
        # What communication adds to the union is what no compute hides.
        "exposed_communication_s": (any_ps - compute_ps) / PS_PER_S,
        "idle_time_s": (span_ps - any_ps) / PS_PER_S,
        "wall_compute_s": busy((e.wall_start_ns, e.wall_end_ns) for e in compute) / NS_PER_S,
        "wall_communication_s": busy((e.wall_start_ns, e.wall_end_ns) for e in communication) / NS_PER_S,
        "sent_bytes": sum(event.sent_bytes for event in events),
        "flops": sum(event.flops for event in events),
    }


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `summarize` as aligned columns, under their names and units.

    All simulated times share one unit, all measured ones another. Devices are shown where a rank has several.
    """
    columns = []
    for heading, key, unit in _COLUMNS:
        if key == "device" and not any(row["device"] for row in rows):
            continue
        texts, told = [str(row[key]) for row in rows], ""
        if unit is not None:
            is_time = unit == "s"
            together = (_SIMULATED_TIMES, _WALL_TIMES)[key in _WALL_TIMES] if is_time else (key,)
            factor, prefix = si_scale(
                [row[name] for name in together for row in rows],
                smallest=-12 if is_time else 0, largest=0 if is_time else 18, digits=4,
            )  # fmt: skip
            decimals = 0 if factor == 1 and not is_time else 2  # no fractions of a byte
            texts, told = [f"{row[key] / factor:.{decimals}f}" for row in rows], f"[{prefix}{unit}]"
        above, _, name = heading.rpartition(" ")
        cells = [above, name, told, *texts]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line) for line in zip(*columns, strict=True))
