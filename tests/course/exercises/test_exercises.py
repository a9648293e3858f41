"""The exercises of the lessons: solutions pass, wrong answers are refused with a picture of the failing case."""

from __future__ import annotations

import ast
import pickle
import re
import runpy
import string
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from itertools import count, repeat
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import exercises
from simparallel.course.exercises import remarks
from simparallel.course.exercises.check import Verdict
from simparallel.course.exercises.exercise import EXERCISES, _Ranks, as_array, difference
from simparallel.course.exercises.remarks import CHINESE, Remark, translated
from simparallel.errors import InputError, UnknownNameError
from simparallel.runtime.ranks import threads

COURSE = Path(remarks.__file__).parent
ROOT = Path(__file__).parents[3]
WRONG: dict[str, dict[str, Callable[..., Any]]] = {}
for path in sorted(Path(__file__).parent.glob("wrong_*.py")):
    WRONG |= runpy.run_path(str(path))["WRONG"]


def solution(name: str) -> Callable[..., Any]:
    """Return the solution of an exercise, from the file of its lesson."""
    (path,) = (ROOT / "tutorials" / "solutions").glob(f"{exercises.get(name).lesson:02d}_*.py")
    found: Callable[..., Any] = runpy.run_path(str(path))[name]
    return found


@pytest.mark.matrices
@pytest.mark.parametrize("name", exercises.names())
def test_wrong_answers_are_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least three of them, each with the text of its smallest failing case, and the first one with the picture."""
    assert len(WRONG[name]) >= 3
    plt.close("all")  # of other tests
    for number, (told, answer) in enumerate(WRONG[name].items()):
        if number:
            monkeypatch.setattr(Verdict, "draw", lambda verdict: None)
        verdict = exercises.check(name, answer)
        assert not verdict
        assert told in verdict.text
        assert capsys.readouterr().out == f"{verdict.text}\n"
        assert verdict.case is not None
        assert len(plt.get_fignums()) == (number == 0)
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
        ({"y": [1]}, {"y": None}, "y is None"),
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
    with refused(InputError):
        exercises.check("ring_all_reduce", print, language="fr")
    with refused(UnknownNameError):
        exercises.check("ring_allreduce", print)


# --- hostile answers --------------------------------------------------------------------------------------

# An interrupt that arrives in a callback of the garbage collector is lost with a warning, and sent again.
interrupted = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# An answer by itself, and one on ranks.
BOTH = ["adam", "ring_all_reduce"]


def endless(*_: Any) -> Any:
    while True:
        pass


def endless_in_collectives(*_: Any) -> Any:
    while True:
        sp.barrier()


def last_rank_is_endless(x: Any) -> Any:
    if sp.get_rank() == 1:
        endless()
    return x if sp.get_world_size() == 1 else sp.all_reduce(x)


def catches_all(*_: Any) -> Any:
    while True:
        with suppress(Exception):
            endless()


def all_end(known: set[threading.Thread]) -> bool:
    """Return whether all threads but those end, within some seconds."""
    others = set(threading.enumerate()) - known
    for thread in others:
        thread.join(5.0)
    return not any(thread.is_alive() for thread in others)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Ranks, "limit_s", 0.3)
    monkeypatch.setattr(sys.modules[exercises.check.__module__], "COUNT_S", 0.3)


@interrupted
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("answer", [endless, catches_all])
def test_endless_loop_is_stopped(name: str, answer: Callable[..., Any], short_limit: None) -> None:
    """Its thread ends, and the text says at which line it was."""
    threads = set(threading.enumerate())
    verdict = exercises.check(name, answer)
    assert re.search(r"stopped after 0.3 s, at .*test_exercises.py:\d+; look for a loop", verdict.text)
    assert (verdict.passed, verdict.num_passed) == (False, None)
    assert all_end(threads)


@interrupted
@pytest.mark.parametrize("answer", [endless_in_collectives, last_rank_is_endless])
def test_endless_ranks_are_stopped(answer: Callable[..., Any], short_limit: None) -> None:
    threads = set(threading.enumerate())
    verdict = exercises.check("mean_of_samples", answer)
    assert not verdict
    assert all_end(threads)


@interrupted
def test_endless_loop_is_stopped_in_another_thread(short_limit: None) -> None:
    verdicts: list[Any] = []
    thread = threading.Thread(target=lambda: verdicts.append(exercises.check("adam", endless)))
    thread.start()
    thread.join()
    assert "stopped after" in verdicts[0].text


@pytest.mark.parametrize("name", BOTH)
def test_call_that_python_cannot_interrupt(name: str, short_limit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check goes on without its thread."""
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.3)
    held = threading.Lock()
    held.acquire()
    try:
        verdict = exercises.check(name, lambda *_: held.acquire())
        assert "stopped after" in verdict.text
    finally:
        held.release()


@pytest.mark.parametrize("name", exercises.names())
def test_answers_without_a_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that returns None is told so, except where it leaves its result elsewhere."""
    if name not in BOTH:  # pictures of all exercises are tests of wrong answers
        monkeypatch.setattr(Verdict, "draw", lambda verdict: None)
    verdict = exercises.check(name, lambda *_: None)
    assert not verdict
    assert ("returned None" in verdict.text) == (name not in ("accumulate",))
    plt.close("all")


HOSTILE: dict[str, Callable[..., Any]] = {
    "exits": lambda *_: sys.exit(3),
    "raises": lambda *_: 1 / 0,
    "text": lambda *_: "?",
    "object": lambda *_: object(),
    "nan": lambda *_: float("nan"),
    "nan in a list": lambda *_: [float("nan")] * 2,
    "another shape": lambda *_: np.zeros((1, 2, 3, 4, 5)),
    "nothing": lambda *_: [],
    "endless generator": lambda *_: (0 for _ in repeat(None)),
    "endless iterator": lambda *_: count(),
    "a class": lambda *_: int,
}


# Every third pair, so that each exercise and each answer has its turn; the others with the whole matrix of faults.
PAIRS = [
    pytest.param(name, hostile, marks=pytest.mark.matrices if (i + j) % 3 == 0 else pytest.mark.faults)
    for i, name in enumerate(exercises.names())
    for j, hostile in enumerate(HOSTILE)
]


@interrupted
@pytest.mark.parametrize(("name", "hostile"), PAIRS)
def test_hostile_answers(name: str, hostile: str, short_limit: None) -> None:
    """They are wrong answers, and the check itself does not fail; it draws one picture."""
    plt.close("all")
    verdict = exercises.check(name, HOSTILE[hostile])
    # These ask for an effect, and for what may be true or false.
    assert name in ("accepts_mean", "accumulate") or not verdict
    assert verdict or len(plt.get_fignums()) == 1
    plt.close("all")


@interrupted
@pytest.mark.matrices
@pytest.mark.parametrize("name", exercises.names())
def test_endless_loop_is_stopped_in_each_exercise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Ranks, "limit_s", 0.1)  # any limit is too short for it
    monkeypatch.setattr(sys.modules[exercises.check.__module__], "COUNT_S", 0.1)
    monkeypatch.setattr(Verdict, "draw", lambda verdict: None)
    verdict = exercises.check(name, endless)
    assert "stopped after 0.1 s" in verdict.text
    assert verdict.num_passed is None
    plt.close("all")


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.matrices
def test_answer_that_prints_a_million_lines(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    def prints(*_: Any) -> Any:
        print("noise\n" * 10**6)

    verdict = exercises.check(name, prints)
    assert "returned None" in verdict.text
    assert capfd.readouterr().out.count("noise") == 10**6
    plt.close("all")


@pytest.mark.parametrize("name", exercises.names())
def test_solutions_are_right(name: str) -> None:
    """Each call gets arguments of its own; so a right answer that does it stays right, and so does the next one."""
    right = solution(name)

    def changes(*arguments: Any) -> Any:
        result = deepcopy(right(*arguments))
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                argument[...] = -1
            elif isinstance(argument, (list, dict)):
                argument.clear()
        return result

    for answer in (changes, right):
        verdict = exercises.check(name, answer)
        assert verdict, verdict.text
    assert verdict.draw() is None


def test_output_is_shown_up_to_the_case_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def answer(a: Any, b: Any) -> Any:
        print("noise")
        return a

    verdict = exercises.check("adasum_pair", answer)
    assert capfd.readouterr().out.splitlines() == ["noise"] * (verdict.text.count("case 2") + 1) + [verdict.text]


def test_number_of_cases_that_pass() -> None:
    """It is that of the cases in which the result is right."""
    verdict = exercises.check("adasum_pair", lambda a, b: a)
    right = [np.allclose(case.expected["Adasum"], case.given["a"]) for _, case in exercises.get("adasum_pair").cases()]
    assert (verdict.num_passed, verdict.num_cases) == (sum(right), len(right))
    assert f"{sum(right)} of {len(right)} cases pass" in verdict.text


@pytest.mark.parametrize("name", exercises.names())
def test_first_case_has_something_to_draw(name: str) -> None:
    _, case = next(exercises.get(name).cases())
    assert all(as_array(value).size for value in case.given.values())


# --- languages ----------------------------------------------------------------------------------------------


def placeholders(template: str) -> int:
    return sum(field is not None for _, field, _, _ in string.Formatter().parse(template))


def test_every_remark_has_a_translation() -> None:
    """With as many placeholders, and none is left over."""
    files = [path for path in COURSE.glob("*.py") if path.name != "remarks.py"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    templates = {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in CHINESE}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Remark"]
    literal = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert literal <= templates == set(CHINESE)
    assert all(placeholders(template) == placeholders(chinese) for template, chinese in CHINESE.items())


def test_text_is_in_the_language_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def chinese(a: Any, b: Any) -> Any:
        """练习 1：返回两个向量的 Adasum。"""
        return -a

    texts = [exercises.check("adasum_pair", chinese, language=language).text for language in (None, "zh", "en")]
    assert (
        texts[0]
        == texts[1]
        == "adasum_pair：通过了 2/10 个用例。用例 1（vectors='equal'）出错：Adasum[0] 是 -2，应为 2"
    )
    assert texts[2].startswith("adasum_pair: 2 of 10 cases pass. Wrong in case 1")
    assert capsys.readouterr().out.splitlines() == texts


def test_remark_survives_pickling() -> None:
    remark = Remark("{} is {}, expected {}", Remark("{} is None", "x"), 1, 2)
    assert translated(pickle.loads(pickle.dumps(remark)), "zh") == translated(remark, "zh") == "x 是 None 是 1，应为 2"


# --- own exercises ------------------------------------------------------------------------------------------


def test_documented_exercises(capsys: pytest.CaptureFixture[str]) -> None:
    """The code of the page runs, and prints what the page says."""
    page = (ROOT / "docs" / "course.md").read_text()
    variables: dict[str, Any] = {"__name__": "course"}
    known = set(EXERCISES)
    try:
        for _ in range(2):  # a notebook may execute a cell again
            for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
                exec(code, variables)
        shown = re.findall(r"```\n(.*: .*?)\n```", page)
        assert shown[0] in capsys.readouterr().out
        assert set(EXERCISES) - known == {"largest_of_all", "balanced_sizes"}
    finally:
        for name in set(EXERCISES) - known:
            del EXERCISES[name]


def test_name_of_another_exercise() -> None:
    def adam() -> Any: ...

    with refused(InputError):
        exercises.exercise(lesson=1)(adam)
