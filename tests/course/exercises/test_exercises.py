"""The exercises of the lessons: solutions pass, wrong answers are refused with a picture of the failing case."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from refusals import refused

from simparallel import exercises
from simparallel.course.exercises.exercise import difference
from simparallel.errors import InputError, UnknownNameError

ROOT = Path(__file__).parents[3]
WRONG: dict[str, dict[str, Callable[..., Any]]] = {}
for path in sorted(Path(__file__).parent.glob("wrong_*.py")):
    WRONG |= runpy.run_path(str(path))["WRONG"]


def solution(name: str) -> Callable[..., Any]:
    """Return the solution of an exercise, from the file of its lesson."""
    (path,) = (ROOT / "tutorials" / "solutions").glob(f"{exercises.get(name).lesson:02d}_*.py")
    found: Callable[..., Any] = runpy.run_path(str(path))[name]
    return found


@pytest.mark.parametrize("name", exercises.names())
def test_solution_is_right(name: str) -> None:
    verdict = exercises.check(name, solution(name))
    assert verdict, verdict.text
    assert verdict.draw() is None


@pytest.mark.matrices
@pytest.mark.parametrize("name", exercises.names())
def test_wrong_answers_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At least three of them, each with the text and the picture of its smallest failing case."""
    assert len(WRONG[name]) >= 3
    plt.close("all")  # of other tests
    for told, answer in WRONG[name].items():
        verdict = exercises.check(name, answer)
        assert not verdict
        assert told in verdict.text
        assert capsys.readouterr().out == f"{verdict.text}\n"
        assert verdict.case is not None
        assert len(plt.get_fignums()) == 1
        plt.close("all")


def test_every_exercise_has_answers() -> None:
    assert set(WRONG) == set(exercises.names())


def test_unwritten_answer() -> None:
    def nothing(*_: Any) -> Any:
        raise NotImplementedError

    for name in exercises.names():
        verdict = exercises.check(name, nothing)
        assert (verdict.passed, verdict.text) == (False, f"{name}: not written yet")


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        ({"y": 1.0}, {"y": 1.0 + 1e-12}, None),
        ({"y": 1.0}, {"y": 1.1}, "y is 1.1, expected 1"),
        ({"y": np.ones(2)}, {"y": [1, 2]}, "y[1] is 2, expected 1"),
        ({"y": np.ones(2)}, {"y": np.ones((2, 1))}, "y has shape (2, 1), expected (2,)"),
        ({"y": ["a", "b"]}, {"y": ["a", "c"]}, "y[1] is c, expected b"),
        ({"y": [1]}, {"y": None}, "y has shape (), expected (1,)"),
        ({"y": [[1], [1, 2]]}, {"y": [[1], [1, 3]]}, "y[1] is [1, 3], expected [1, 2]"),
        ({"y": np.nan}, {"y": np.nan}, None),
        ({"x": 1, "y": 2}, {"x": 1}, "y is missing"),
        ({"y": np.ones((0, 2))}, {"y": np.ones((0, 2))}, None),
    ],
)
def test_first_difference(expected: dict[str, Any], found: dict[str, Any], told: str | None) -> None:
    assert difference(expected, found) == told


def test_errors() -> None:
    with refused(InputError):
        exercises.check("ring_all_reduce", 3)  # type: ignore[arg-type]
    with refused(UnknownNameError):
        exercises.check("ring_allreduce", print)
