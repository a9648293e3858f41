"""The record of a schedule: what it costs as published."""

from __future__ import annotations

from typing import NamedTuple


class ScheduleRecord(NamedTuple):
    """A schedule on four ranks for F = I = W = 1.

    Attributes:
        makespan: time of a step.
        live: for each rank the most activations that it keeps until their weight gradients.
        span: the longest time from the first to the last action of a rank, where it is published.
        microbatches: their number.
    """

    makespan: int
    live: tuple[int, ...]
    span: int | None = None
    microbatches: int = 8


RECORDS = {
    "gpipe": ScheduleRecord(33, (8, 8, 8, 8)),
    "gpipe_reversed": ScheduleRecord(33, (8, 8, 8, 8)),
    "1f1b": ScheduleRecord(33, (4, 3, 2, 1)),
    "eager_1f1b": ScheduleRecord(33, (7, 5, 3, 1)),
    "pipedream": ScheduleRecord(33, (4, 3, 2, 1)),
    "pipedream_2bw": ScheduleRecord(33, (4, 3, 2, 1)),
    "interleaved_1f1b": ScheduleRecord(57, (11, 9, 7, 5)),
    "looped_bfs": ScheduleRecord(57, (16, 16, 16, 16)),
    "zb_h1": ScheduleRecord(27, (4, 4, 4, 4), 27),
    "zb_h2": ScheduleRecord(27, (7, 7, 7, 7), 24),
    "interleaved_zb": ScheduleRecord(51, (8, 8, 8, 8)),
    "zbv": ScheduleRecord(51, (8, 8, 8, 8), 48),
    "v_half": ScheduleRecord(53, (6, 6, 6, 6)),
    "v_min": ScheduleRecord(59, (4, 4, 4, 4)),
    "dualpipe_v": ScheduleRecord(54, (9, 9, 9, 9)),
    "dualpipe": ScheduleRecord(26, (5, 5, 5, 5)),
    "chimera": ScheduleRecord(16, (3, 4, 4, 3), microbatches=4),
}
