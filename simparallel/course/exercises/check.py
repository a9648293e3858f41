"""Check an answer to an exercise, and draw the smallest case that fails."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from simparallel.base.names import find
from simparallel.course.exercises.exercise import EXERCISES, Case, Exercise, NoResultError, Values, rows, show
from simparallel.course.exercises.remarks import Remark, language_of, translated
from simparallel.errors import DeadlineError, InputError, RunFailedError
from simparallel.view import plot_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Seconds to spend on counting the cases that pass.
COUNT_S = 5.0


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
        num_cases: number of cases; 0 for an answer that is not written.
        num_passed: how many of them passed; None if counting them would take too long.
    """

    name: str
    passed: bool
    text: str
    num_cases: int
    num_passed: int | None = None
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
        # `check` has printed the text.
        title = f"{self.name}, {_chosen(self.parameters)}"
        draw = partial(self.case.draw, self.found) if self.case.draw and self.found else None
        return plot_cells(cells, title=title, draw=draw)


def _chosen(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in parameters.items())


def check(name: str, answer: Callable[..., Any], *, language: str | None = None) -> Verdict:
    """Check an answer on all cases of an exercise, small ones first.

    Print the result. If a case fails, draw the first one: a notebook shows the picture below the cell. Answers that
    communicate run on ranks that are threads, so a check takes about a second. An answer that takes more than 5 s for a
    case is stopped.

    Args:
        name: the exercise, such as "ring_all_reduce"; `names()` lists them.
        answer: the function; the lesson states its arguments and its result.
        language: of the text, "en" or "zh"; by default that of the answer's docstring.

    Returns:
        The verdict: true if all cases pass.

    Raises:
        UnknownNameError: no exercise has this name.
        InputError: `answer` is not a function, or the language is another one.
    """
    exercise = get(name)
    if not callable(answer):
        raise InputError(f"check({name!r}): give the function itself, not {answer!r}.")
    if language not in (None, "en", "zh"):
        raise InputError(f"check({name!r}): language={language!r} is not one of en, zh.")
    verdict = _verdict(exercise, answer)
    spoken = language or language_of(getattr(answer, "__doc__", None))
    verdict = replace(verdict, text=translated(verdict.text, spoken))
    print(verdict.text)
    verdict.draw()
    return verdict


def _verdict(exercise: Exercise, answer: Callable[..., Any]) -> Verdict:
    name, cases = exercise.name, list(exercise.cases())
    total = len(cases)
    for number, (parameters, case) in enumerate(cases, 1):
        begin_s = time.monotonic()
        try:
            wrong, found = _attempt(case, answer)
        except NotImplementedError:
            return Verdict(name, False, Remark("{}: not written yet", name), 0)
        if wrong:
            passed = _count(cases[number:], answer, number - 1, begin_s + COUNT_S)
            where = _chosen(parameters), wrong
            if passed is None:
                text = Remark("{}: wrong in case {} of {}, {}: {}", name, number, total, *where)
            else:
                text = Remark("{}: {} of {} cases pass. Wrong in case {}, {}: {}", name, passed, total, number, *where)
            return Verdict(name, False, text, total, passed, parameters, case, found)
    return Verdict(name, True, Remark("{}: right in all {} cases", name, total), total, total)


def _attempt(case: Case, answer: Callable[..., Any]) -> tuple[str | None, Values]:
    """Return what is wrong with an answer in a case, None if nothing is, and its result.

    Raises:
        NotImplementedError: the answer is not written yet.
    """
    found: Values = {}
    try:
        found = case.run(answer)
        return case.judge(case.expected, found), found
    except Exception as error:
        cause = error.__cause__ or error if isinstance(error, RunFailedError) else error
        if isinstance(cause, NotImplementedError):
            raise cause from None
        return _error_text(cause, answer), found


def _count(cases: Sequence[Any], answer: Callable[..., Any], passed: int, end_s: float) -> int | None:
    """Return `passed`, plus the number of these cases that pass; None if they are not finished at `end_s`."""
    # What an answer prints has been shown up to the case that fails.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        for _, case in cases:
            if time.monotonic() > end_s:
                return None
            with suppress(NotImplementedError):
                passed += _attempt(case, answer)[0] is None
    return passed


def _error_text(error: BaseException, answer: Callable[..., Any]) -> str:
    """Return an error as text, with the last line of the answer that led to it."""
    if isinstance(error, NoResultError):
        return cast(str, error.args[0])
    if isinstance(error, DeadlineError) and "place" in error.facts:
        limit_s, place = error.facts["timeout_s"], error.facts["place"]
        text = Remark("stopped after {:g} s, at {}; look for a loop that does not end", limit_s, place)
        left = "{}. Python cannot interrupt that line; its thread runs on until it returns"
        return Remark(left, text) if hasattr(error, "__notes__") else text
    file = getattr(getattr(answer, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if lines:
        return Remark("{} in its line {}: {}", type(error).__name__, lines[-1], error)
    return Remark("{}: {}", type(error).__name__, error)


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
