"""Check an answer to an exercise, and draw the smallest case that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from simparallel.base.names import find
from simparallel.course.exercises.exercise import EXERCISES, Case, Exercise, Values, rows, show
from simparallel.errors import InputError, RunFailedError
from simparallel.view import plot_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Verdict:
    """The result of a check; true if the answer is right.

    Attributes:
        name: the exercise.
        passed: whether every case passed.
        text: the result in words: the smallest failing case and its first difference.
        parameters: of the smallest failing case; empty if none failed.
        case: the smallest failing case, None if none failed.
        found: the result of the answer in it; empty if the answer raised.
        num_cases: number of cases that were run.
    """

    name: str
    passed: bool
    text: str
    num_cases: int
    parameters: dict[str, Any] = field(default_factory=dict)
    case: Case | None = None
    found: Values = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.passed

    def _ipython_display_(self) -> None:
        """Show nothing: `check` has printed the text and drawn the picture."""

    def draw(self) -> Figure | None:
        """Draw the smallest failing case: the input, the right result and the answer's; None if no case failed."""
        if self.case is None:
            return None
        blocks = {
            title: [row for label, value in values.items() for row in rows(label, value)]
            for title, values in (("given", self.case.given), ("expected", self.case.expected), ("yours", self.found))
        }
        cells = {title: [(label, list(map(show, row))) for label, row in block] for title, block in blocks.items()}
        return plot_cells(cells, title=self.text, draw=_drawing(self.case, self.found))


def _drawing(case: Case, found: Values) -> Callable[[Any], None] | None:
    return partial(case.draw, found) if case.draw and found else None


def check(name: str, answer: Callable[..., Any]) -> Verdict:
    """Check an answer on all cases of an exercise, small ones first, and stop at the first that fails.

    Print the result. If a case fails, draw it: a notebook shows the picture below the cell. Answers that communicate
    run on ranks that are threads, so a check takes about a second.

    Args:
        name: the exercise, such as "ring_all_reduce"; `names()` lists them.
        answer: the function; the lesson states its arguments and its result.

    Returns:
        The verdict: true if all cases pass.

    Raises:
        UnknownNameError: no exercise has this name.
        InputError: `answer` is not a function.
    """
    exercise = get(name)
    if not callable(answer):
        raise InputError(f"check({name!r}): give the function itself, not {answer!r}.")
    verdict = _verdict(exercise, answer)
    print(verdict.text)
    verdict.draw()
    return verdict


def _verdict(exercise: Exercise, answer: Callable[..., Any]) -> Verdict:
    count = 0
    for count, (parameters, case) in enumerate(exercise.cases(), 1):
        found: Values = {}
        try:
            found = case.run(answer)
            wrong = case.judge(case.expected, found)
        except Exception as error:
            cause = error.__cause__ or error if isinstance(error, RunFailedError) else error
            if isinstance(cause, NotImplementedError):
                return Verdict(exercise.name, False, f"{exercise.name}: not written yet", 0)
            wrong = _told(cause, answer)
        if wrong:
            chosen = ", ".join(f"{name}={value!r}" for name, value in parameters.items())
            text = f"{exercise.name}: wrong in case {count}, {chosen}: {wrong}"
            return Verdict(exercise.name, False, text, count, parameters, case, found)
    return Verdict(exercise.name, True, f"{exercise.name}: right in all {count} cases", count)


def _told(error: BaseException, answer: Callable[..., Any]) -> str:
    """Return an error as text, with the last line of the answer that led to it."""
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    at = f" in its line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{at}: {error}"


def names(lesson: int | None = None) -> list[str]:
    """Return the names of all exercises, or of those of one lesson, in the order of the lessons."""
    found = sorted(EXERCISES.values(), key=lambda one: one.lesson)
    return [one.name for one in found if lesson in (None, one.lesson)]


def get(name: str) -> Exercise:
    """Return the exercise of a name.

    Raises:
        UnknownNameError: there is none.
    """
    return find(EXERCISES, name, "exercises", "exercise")
