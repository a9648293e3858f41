"""Pipeline parallelism: schedules as data, the search for them, and the runtime that executes them."""

from simparallel.parallel.pipeline.attribution import Bubble, Bubbles
from simparallel.parallel.pipeline.schedule import Schedule, pipeline_schedule
from simparallel.parallel.pipeline.search import FoundSchedule, search_schedule
from simparallel.parallel.pipeline.timing import Cost

__all__ = ["Bubble", "Bubbles", "Cost", "FoundSchedule", "Schedule", "pipeline_schedule", "search_schedule"]
