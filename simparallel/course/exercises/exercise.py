"""An exercise: its cases, from small to large, and the right result of each.

An exercise is one function. Its parameters name a case, and it returns the `Case`: the input, the right result, and the
way to run an answer. `@exercise` gives the values of each parameter, the smallest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import to_host
from simparallel.course.exercises.remarks import Remark
from simparallel.errors import InputError
from simparallel.runtime.launcher.launch import Cluster, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Label -> number, text, list or array.
Values = Mapping[str, Any]
Run = Callable[[Callable[..., Any]], Values]


def rows(label: str, value: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield (label, cells) for each row of a number, text, list or array."""
    array = as_array(value)
    if array.ndim < 2:
        yield label, array.reshape(-1).tolist()
    else:
        for index in np.ndindex(array.shape[:-1]):
            yield f"{label}[{', '.join(map(str, index))}]", array[index].tolist()


def as_array(value: Any) -> np.ndarray:
    """Return a value as a NumPy array; texts, and rows of unequal length, as an array of objects."""
    if isinstance(value, Tensor):
        value = value.detach().data
    try:
        array = to_host(value)
    except ValueError:
        array = np.empty(len(value), object)
        array[:] = value
    return array if array.dtype.kind in "biufc" else array.astype(object)


def difference(expected: Values, found: Values) -> str | None:
    """Return the first difference as text; None if there is none. Floats may differ by rounding."""
    for label, right in expected.items():
        if label not in found:
            return Remark("{} is missing", label)
        if found[label] is None and right is not None:
            return Remark("{} is None", label)
        try:
            a, b = as_array(right), as_array(found[label])
        except InputError as error:
            return f"{label}: {error}"
        if a.shape != b.shape:
            return Remark("{} has shape {}, expected {}", label, b.shape, a.shape)
        for index in np.argwhere(~equal(a, b)):
            where = f"[{', '.join(map(str, index))}]" if a.ndim else ""
            return Remark("{} is {}, expected {}", label + where, *(show(x[tuple(index)]) for x in (b, a)))
    return None


def equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where two arrays of one shape are equal; floats up to rounding."""
    if a.dtype == object or b.dtype == object:
        return np.asarray(a.astype(object) == b.astype(object), bool).reshape(a.shape)
    return np.isclose(b, a, rtol=1e-6, atol=1e-9, equal_nan=True)


def show(value: Any) -> str:
    """Return a cell as short text."""
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


@dataclass(frozen=True)
class Case:
    """One case of an exercise.

    Attributes:
        given: the input, by label, as the picture shows it.
        expected: the right result, by label.
        run: calls an answer and returns its result, with the labels of `expected`.
        judge: compares (expected, found) and returns the first difference as text, None if there is none.
        draw: draws the result of an answer; None for cells with its values.
    """

    given: Values
    expected: Values
    run: Run
    judge: Callable[[Values, Values], str | None] = difference
    draw: Callable[[Values, Axes], None] | None = None


@dataclass(frozen=True)
class Exercise:
    """An exercise by name.

    Attributes:
        name: its name, also the name of the function to write.
        lesson: number of its lesson.
        task: the task in words.
        make: makes a case.
        values: the values of each parameter of `make`, the smallest first.
    """

    name: str
    lesson: int
    task: str
    make: Callable[..., Case]
    values: Mapping[str, Sequence[Any]]

    def cases(self) -> Iterator[tuple[dict[str, Any], Case]]:
        """Yield the parameters of each case, and the case; small ones first."""
        positions = product(*(range(len(values)) for values in self.values.values()))
        for position in sorted(positions, key=lambda position: (sum(position), position)):
            chosen = {name: values[i] for (name, values), i in zip(self.values.items(), position, strict=True)}
            yield chosen, self.make(**chosen)


EXERCISES: dict[str, Exercise] = {}


def exercise(lesson: int, **values: Sequence[Any]) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Register a function as an exercise: its name, its docstring as the task, and the values of its parameters.

    Args:
        lesson: number of the lesson.
        values: for each parameter of the function its values, the smallest first.

    Raises:
        InputError: an exercise of another module has this name.
    """

    def register(make: Callable[..., Case]) -> Callable[..., Case]:
        known = EXERCISES.get(make.__name__)
        # A notebook may execute a cell again.
        if known is not None and known.make.__module__ != make.__module__:
            raise InputError(
                f"exercise: there is an exercise {known.name!r} in lesson {known.lesson}; choose another name."
            )
        EXERCISES[make.__name__] = Exercise(make.__name__, lesson, make.__doc__ or "", make, values)
        return make

    return register


def integers(*shape: int) -> np.ndarray:
    """Return an array of small integers as float64: sums of them are exact in any order. Equal on every call."""
    # 37 and 19 are coprime, so neighbours differ, and so do the rows of most shapes.
    return (np.arange(math.prod(shape), dtype=np.float64) * 37 % 19 - 9).reshape(shape)


class NoResultError(Exception):
    """An answer returned None where a result is expected."""


class _Ranks(Cluster):
    """Ranks that run an answer: threads, which are stopped after some seconds."""

    limit_s = 5.0


def call_answer(answer: Callable[..., Any], *arguments: Any) -> Any:
    """Return `answer(*arguments)`.

    Raises:
        NoResultError: it is None.
    """
    result = answer(*arguments)
    if result is None:
        raise NoResultError(Remark("it returned None: a `return` with the result is missing"))
    # What reads an iterator written in C, such as `itertools.count()`, cannot be stopped; a generator can.
    return (each for each in result) if isinstance(result, Iterator) else result


def run_ranks(answer: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> Results:
    """Run `answer(*inputs[rank])` on as many ranks as there are inputs, as threads; the inputs are copied.

    Raises:
        RunFailedError: a rank failed, all waited for each other, or the run took more than 5 s.
    """
    from simparallel.world.rank import get_rank

    # One by one: no rank sees what another one does to an array that all get.
    own = [deepcopy(each) for each in inputs]
    with _Ranks(len(inputs), transport="inline", echo=False) as ranks:
        return ranks.run(lambda: call_answer(answer, *own[get_rank()]))


def on_one_rank(run: Run) -> Run:
    """Return `run`, executed by a rank, which is stopped after 5 s."""
    return lambda answer: run_ranks(partial(run, answer), [()])[0]


def by_rank(values: Iterable[Any]) -> dict[str, Any]:
    """Return the values of the ranks under the labels "rank 0", "rank 1", …"""
    return {f"rank {rank}": value for rank, value in enumerate(values)}


def call_case(
    given: Values,
    expected: Values,
    judge: Callable[[Values, Values], str | None] = difference,
    *,
    calls: Iterable[tuple[Any, ...]] | None = None,
    form: Callable[[Any], Any] = lambda result: result,
    draw: Callable[[Values, Axes], None] | None = None,
) -> Case:
    """Return a case of an answer that is called here, once or several times.

    Args:
        given, judge, draw: as for `Case`.
        expected: the right result of each call, by label; for a single call, `form` may return results by label.
        calls: the arguments of each call, which are copied for each run; None for a single one with the values of
            `given`.
        form: turns the result of a call into one to compare.
    """
    each = [tuple(given.values())] if calls is None else list(calls)

    def run(answer: Callable[..., Any]) -> Values:
        found = {}
        for (label, right), arguments in zip(expected.items(), each, strict=False):
            # None is the right result of some cases.
            call = answer if right is None else partial(call_answer, answer)
            found[label] = form(call(*deepcopy(arguments)))
        return result if len(each) == 1 and isinstance(result := found[label], Mapping) else found

    return Case(given, expected, on_one_rank(run), judge, draw)


def ranks_case(given: Values, results: Iterable[Any], inputs: Sequence[tuple[Any, ...]]) -> Case:
    """Return a case of an answer that runs on ranks.

    Args:
        given: as for `Case`.
        results: the right result of each rank.
        inputs: the arguments of each rank.
    """
    return Case(given, by_rank(results), lambda answer: by_rank(run_ranks(answer, inputs)))


def frugal_case(given: Values, results: Sequence[Any], inputs: Sequence[tuple[Any, ...]], count: int) -> Case:
    """Return a case of an answer that runs on ranks and may send at most the bytes of ring all-reduces.

    Args:
        given: as for `Case`.
        results: the right result of each rank.
        inputs: the arguments of each rank.
        count: float64 numbers in all these all-reduces together.
    """
    ranks = len(inputs)
    # `+ ranks`: each rank rounds its share of a number up to whole bytes.
    most_bytes = count * (2 * (ranks - 1) * np.dtype(np.float64).itemsize + ranks)

    def run(answer: Callable[..., Any]) -> Values:
        found = run_ranks(answer, inputs)
        return {**by_rank(found), "bytes sent": sum(event.sent_bytes for event in found.trace.events)}

    def judge(expected: Values, found: Values) -> str | None:
        if found["bytes sent"] > most_bytes:
            return Remark("the ranks send {} bytes, and {} are enough", found["bytes sent"], most_bytes)
        return difference(expected, found)

    return Case(given, by_rank(results), run, judge)
