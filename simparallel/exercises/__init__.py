"""Exercises of the lessons. `check("ring_all_reduce", fn)` runs an answer on all cases, and draws one that fails."""

# Each of these registers its exercises.
from simparallel.exercises import (  # noqa: F401
    adasum,
    auto_parallel,
    cluster,
    collectives,
    data_parallel,
    debugging,
    hardware,
    one_device,
    pipelines,
    slicing,
    testing,
)
from simparallel.exercises.check import Verdict, check, get, names
from simparallel.exercises.exercise import Case, Exercise, exercise

__all__ = ["Case", "Exercise", "Verdict", "check", "exercise", "get", "names"]
