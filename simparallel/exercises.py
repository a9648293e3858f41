"""Exercises of the lessons. `check("ring_all_reduce", fn)` runs an answer on all cases, and draws one that fails."""

from simparallel.course.exercises import Case, Exercise, Verdict, check, exercise, get, names

__all__ = ["Case", "Exercise", "Verdict", "check", "exercise", "get", "names"]
