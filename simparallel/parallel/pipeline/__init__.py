"""Pipeline parallelism: schedules as data, and the runtime that executes them."""

from simparallel.parallel.pipeline.attribution import Bubble, Bubbles
from simparallel.parallel.pipeline.schedule import Schedule, pipeline_schedule
from simparallel.parallel.pipeline.timing import Cost

__all__ = ["Bubble", "Bubbles", "Cost", "Schedule", "pipeline_schedule"]
