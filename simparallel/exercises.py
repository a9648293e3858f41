"""Exercises of the lessons. `check("ring_all_reduce", fn)` runs an answer on all cases, and draws one that fails."""

from simparallel.course.exercises import (
    Case,
    Exercise,
    Verdict,
    call_case,
    check,
    exercise,
    get,
    integers,
    names,
    ranks_case,
)

__all__ = ["Case", "Exercise", "Verdict", "call_case", "check", "exercise", "get", "integers", "names", "ranks_case"]
