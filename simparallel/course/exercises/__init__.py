"""Exercises of the lessons, checked on all cases; `sp.exercises`."""

# Each of these registers its exercises.
from simparallel.course.exercises import (  # noqa: F401
    adasum,
    auto_parallel,
    cluster,
    collectives,
    data_parallel,
    debugging,
    hardware,
    one_device,
    pipelines,
    sharded_states,
    slicing,
    testing,
)
from simparallel.course.exercises.check import Verdict, check, get, names
from simparallel.course.exercises.exercise import Case, Exercise, call_case, exercise, integers, ranks_case

__all__ = ["Case", "Exercise", "Verdict", "call_case", "check", "exercise", "get", "integers", "names", "ranks_case"]
