"""Bubble over memory of the named pipeline schedules, and of the best ones that a search finds for each memory."""

from typing import Any

import simparallel as sp
from simparallel.parallel.pipeline.rules import RULES


def draw() -> Any:
    # PipeDream has no flush, and reversed backwards change neither bubble nor memory.
    names = [name for name in RULES if not name.startswith("pipedream") and name != "gpipe_reversed"]
    return sp.view.plot_schedule_tradeoff(
        [sp.pipeline_schedule(name) for name in names],
        [sp.search_schedule(memory=memory).schedule for memory in range(1, 5)],
        title="Pipeline schedules: 4 ranks, 8 micro-batches, F = I = W",
    )
