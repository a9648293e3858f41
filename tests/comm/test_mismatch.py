"""Programs that are wrong on one rank: every rank raises, names both calls and both lines, and no data is changed."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.errors import (
    CollectiveMismatchError,
    CommError,
    DeadlineError,
    DeadlockError,
    DTypeError,
    InputError,
    RankFailedError,
    RunFailedError,
    ShapeError,
)
from simparallel.runtime.launcher import run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHORT_S = 0.5


def reports_of(world: World, size: int, fn: Any, *args: Any, **kwargs: Any) -> tuple[RunFailedError, dict[int, Any]]:
    with refused(RunFailedError) as caught:
        world.run(size, fn, *args, **kwargs)
    return caught.value, caught.value.reports


def place(function: Any, offset: int = 1) -> str:
    """Return the place of the call in `function`, as messages show it."""
    return f"test_mismatch.py:{function.__code__.co_firstlineno + offset} in {function.__name__}"


# --- generated programs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    op: str = "sum"
    root: int = 0
    dim: int = 0
    is_async: bool = False

    @property
    def kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {} if self.name == "barrier" else {"async_op": self.is_async}
        if self.name in ("all_reduce", "reduce", "reduce_scatter"):
            kwargs["op"] = self.op
        if self.name in ("broadcast", "scatter"):
            kwargs["src"] = self.root
        if self.name in ("reduce", "gather"):
            kwargs["dst"] = self.root
        if self.name in ("all_gather", "reduce_scatter"):
            kwargs["dim"] = self.dim
        if self.name == "all_to_all":
            kwargs["split_dim"] = self.dim
        return kwargs


NAMES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
WRONG_FIELDS = {"op": "reduce op", "root": "root", "dim": "dim", "dtype": "dtype", "shape": "shape", "name": "op"}


NAMES_WITH = {
    "name": NAMES,
    "shape": NAMES[:-2],
    "dtype": NAMES[:-2],
    "op": ("all_reduce", "reduce", "reduce_scatter"),
    "root": ("broadcast", "reduce", "gather", "scatter"),
    "dim": ("all_gather", "reduce_scatter", "all_to_all"),
}


def here(call: Call, arguments: tuple[Any, ...], group: Any) -> Any:
    return getattr(sp, call.name)(*arguments, group=group, **call.kwargs)


def there(call: Call, arguments: tuple[Any, ...], group: Any) -> Any:
    return getattr(sp, call.name)(*arguments, group=group, **call.kwargs)


def follow(program: list[Call], order: tuple[int, ...] | None, wrong: tuple[int, int, Call] | None) -> int:
    """Make the calls; `wrong` is (rank, position, the call to make instead)."""
    me = sp.get_rank()
    group = None if order is None else sp.new_group(order)
    if order is not None and me not in order:
        return 0
    arrays, works = [], []
    try:
        for i, right in enumerate(program):
            is_wrong = wrong is not None and wrong[:2] == (me, i)
            call = wrong[2] if is_wrong else right
            x = sp.empty(call.shape, call.dtype, shared=i % 2 == 1)
            x[...] = me + 1
            arguments: tuple[Any, ...] = (x,)
            if call.name == "scatter":
                arguments = ([x] * (len(order) if order else sp.get_world_size()) if me == call.root else None,)
            if call.name == "barrier":
                arguments = ()
            wrong_from = wrong is not None and i >= wrong[1]
            arrays.append((x, wrong_from))
            works.append((there if is_wrong else here)(call, arguments, group))
        for work in works:
            if isinstance(work, sp.Work):
                work.wait()
    except CommError as error:
        if not all((x == me + 1).all() for x, wrong_from in arrays if wrong_from):
            raise AssertionError("data was changed") from error
        raise
    return len(works)


@st.composite
def programs(draw: Any, max_size: int, what: str = "") -> Any:
    """Draw (size, order of the group, calls, one rank's deviation); `what` is the field that it changes."""
    size = draw(st.integers(2, max_size))
    order = None
    if draw(st.booleans()):
        order = tuple(draw(st.permutations(range(size)))[: draw(st.integers(2, size))])
    members = order or tuple(range(size))
    length = len(members)

    @st.composite
    def calls(draw: Any) -> Call:
        large = draw(st.sampled_from((2, 2, 50)))
        shape = (large * length, large * length)
        return Call(
            draw(st.sampled_from(NAMES)),
            shape,
            draw(st.sampled_from(("float64", "int32"))),
            draw(st.sampled_from(("sum", "max"))),
            draw(st.sampled_from(members)),
            draw(st.integers(0, 1)),
            draw(st.booleans()),
        )

    program = draw(st.lists(calls(), min_size=1, max_size=5))
    if not what:
        return size, order, program, None
    rank, position = draw(st.sampled_from(members)), draw(st.integers(0, len(program) - 1))
    right = program[position] = replace(program[position], name=draw(st.sampled_from(NAMES_WITH[what])))
    other = {
        "name": NAMES[(NAMES.index(right.name) + draw(st.integers(1, 8))) % 9],
        "shape": draw(st.sampled_from([(right.shape[0] * 2, right.shape[1]), (*right.shape, 1), right.shape[:1]])),
        "dtype": "float32" if right.dtype == "float64" else "uint32",
        "op": "min" if right.op == "sum" else "prod",
        "root": members[(members.index(right.root) + 1) % length],
        "dim": 1 - right.dim,
    }[what]
    wrong = replace(right, **{what: other})
    if what == "shape" and len(wrong.shape) == 1 and right.dim == 1:
        wrong = replace(wrong, dim=0)
    return size, order, program, (rank, position, wrong)


def test_right_programs_run(world):
    def body(case):
        size, order, program, _ = case
        members = order or tuple(range(size))
        expected = [len(program) if rank in members else 0 for rank in range(size)]
        assert list(world.run(size, follow, program, order, None)) == expected

    world.check(programs(world.max_size), body)


@pytest.mark.parametrize("what", WRONG_FIELDS)
def test_every_rank_reports_both_calls_and_places(world, what):
    def body(case):
        size, order, program, wrong = case
        members = order or tuple(range(size))
        rank, position, _ = wrong
        error, reports = reports_of(world, size, follow, program, order, wrong)
        assert set(reports) == set(members)
        assert isinstance(error.__cause__, CollectiveMismatchError)
        assert error.__cause__.seq == position + 1
        assert set(error.__cause__.calls) == set(members)
        for report in reports.values():
            text = report["summary"]
            assert "CollectiveMismatchError" in text
            assert f"collective #{position + 1}" in text
            assert re.search(rf"rank {rank} called .* at .*{re.escape(place(there))}", text)
            for other in members:
                if other != rank:
                    line = next(line for line in text.splitlines() if place(here) in line)
                    assert re.search(rf"\b{other}\b.* called {program[position].name}\b", line)
            assert "No data was changed" in text
            assert WRONG_FIELDS[what] in re.search("They differ in: (.*?)\\. No data", text)[1]

    world.check(programs(world.max_size, what), body, parts=3)


def test_groups_of_other_ranks(world):
    def program():
        sp.new_group([0, 1] if sp.get_rank() != 2 else [1, 0])

    error, reports = reports_of(world, 3, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(reports) == {0, 1, 2}


def test_records_of_equal_size_but_other_fields(world):
    def program():
        sp.all_gather(np.ones(2, [("a", "<i4")] if sp.get_rank() else [("a", "<f4")]))

    error, reports = reports_of(world, 2, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert len(set(error.__cause__.calls.values())) == 2
    assert set(reports) == {0, 1}


def test_many_dims_that_differ_in_the_last_one(world):
    def program():
        sp.all_gather(np.ones((1,) * 10 + (3 + sp.get_rank(),)))

    error, _ = reports_of(world, 2, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)


def test_swallowed_mismatch_blocks_the_group(world):
    """A rank that swallows it cannot use the group again, and is not reported as well."""

    def program():
        for _ in range(3):
            try:
                sp.all_reduce(np.ones(2 + sp.get_rank()))
            except CollectiveMismatchError:
                continue
            raise AssertionError("no error")

    error, reports = reports_of(world, 2, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(reports) == {0, 1}


# --- ranks that do not arrive -----------------------------------------------------------------------


def leave(size: int, leaver: int, count: int) -> None:
    for i in range(count + 1):
        if i == count and sp.get_rank() == leaver:
            return
        sp.all_reduce(np.ones(3))


@pytest.mark.parametrize(("leaver", "count"), [(0, 0), (2, 0), (1, 3)])
def test_rank_that_leaves(world, leaver, count):
    error, reports = reports_of(world, 3, leave, 3, leaver, count)
    assert isinstance(error.__cause__, RankFailedError)
    assert set(reports) == {0, 1, 2} - {leaver}
    for report in reports.values():
        assert f"rank {leaver} returned from its function" in report["summary"]
        assert f"collective #{count + 1} all_reduce(sum) float64 (3,)" in report["summary"]
        assert place(leave, 4) in report["summary"]


def lonely_recv() -> None:
    sp.recv(np.ones(3), src=(sp.get_rank() + 1) % sp.get_world_size(), tag=4)


def lonely_calls() -> None:
    first, second = sp.new_group([0, 1]), sp.new_group([1, 0])
    sp.all_reduce(np.ones(3), group=first if sp.get_rank() else second)


def wrong_tag() -> None:
    if sp.get_rank() == 0:
        sp.send(np.ones(2), dst=1, tag=1)
    sp.recv(np.ones(3), src=1 - sp.get_rank(), tag=4)


def full_ring() -> None:
    for _ in range(17):
        sp.send(np.ones(3), dst=1 - sp.get_rank(), tag=4)


@pytest.mark.parametrize(
    ("program", "call", "offset"),
    [(lonely_recv, "recv", 1), (lonely_calls, "all_reduce", 2), (wrong_tag, "recv", 3), (full_ring, "send", 2)],
)
def test_ranks_that_wait_for_each_other(world, program, call, offset):
    """Found at once where ranks are threads that take turns; between processes, long before the timeout."""
    error, reports = reports_of(world, 2, program)
    assert set(reports) == {0, 1}
    assert isinstance(error.__cause__, DeadlockError)
    assert set(error.__cause__.waiting) == {0, 1}
    for report in reports.values():
        for rank in range(2):
            told = rf"rank {rank} waits in .*{call}.*{re.escape(place(program, offset))}"
            assert re.search(told, report["summary"])


def test_rank_that_works_too_long(world, monkeypatch):
    if world.transport == "inline":
        pytest.skip("threads take turns: a rank that works makes nobody wait")
    if world.transport == "mpi":
        pytest.skip("nobody sends a signal to a rank that works; test_mpi has this case")

    monkeypatch.setattr(
        run, "ESCALATION", ((0.3, signal.SIGINT), *run.ESCALATION[1:])
    )  # it sleeps: only a signal ends that

    def program():
        import time

        if sp.get_rank() == 1:
            time.sleep(30)
        sp.barrier()

    error, reports = reports_of(world, 3, program, timeout_s=SHORT_S)
    assert isinstance(error.__cause__, DeadlineError)
    assert error.__cause__.missing == [1]
    assert set(reports) == {0, 1, 2}


# --- ranks that fail --------------------------------------------------------------------------------


def fail(culprit: int, message: str) -> None:
    sp.barrier()
    if sp.get_rank() == culprit:
        raise ZeroDivisionError(message)
    sp.all_reduce(np.ones(50_000))


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("message", ["batch of no rows", "é" * 4000, "\x01\ud800" * 2000])
def test_others_stop_and_cause_comes_first(world, culprit, message):
    with pytest.raises(RunFailedError) as caught:
        world.run(3, fail, culprit, message)
    error, reports = caught.value, caught.value.reports
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.rank == culprit
    assert str(error).startswith(f"rank {culprit} of 3 failed: ZeroDivisionError: {message[:50]}")
    assert set(reports) == {0, 1, 2}
    assert not reports[culprit]["secondary"]
    for rank in {0, 1, 2} - {culprit}:
        summary = reports[rank]["summary"]
        assert reports[rank]["secondary"]
        assert "RankFailedError" in summary
        assert f"rank {culprit} failed with ZeroDivisionError: {message[:50]}" in summary
        assert summary.count("was stopped in") == 1  # reported by the culprit, not by another rank that was stopped
        assert place(fail, 4) in summary
    assert list(world.run(3, sp.get_rank)) == [0, 1, 2]


def test_exception_between_works_is_the_cause(world):
    def program():
        work = sp.all_reduce(np.ones(50_000), async_op=True)
        if sp.get_rank() == 1:
            raise KeyError("lost")
        work.wait()
        sp.barrier()

    error, reports = reports_of(world, 3, program)
    assert isinstance(error.__cause__, KeyError)
    assert error.rank == 1
    assert set(reports) == {0, 1, 2}


# --- messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [("float64 (3,)", "float64 (2,)"), ("float32 (4,)", "float64 (4,)"), ("int32 (2, 3)", "int32 (3, 2)")],
)
def test_mismatched_messages(world, sent, wanted):
    def array(text):
        dtype, shape = text.split(" ", 1)
        return np.full(eval(shape), 7, dtype)

    def program():
        if sp.get_rank() == 0:
            sp.send(array(sent), 1, tag=3)
            return
        x = array(wanted)
        work = sp.irecv(x, 0, tag=3)
        for _ in range(2):
            try:
                work.wait()
            except CollectiveMismatchError:
                assert (x == 7).all()
            else:
                raise AssertionError("no error")

    error, reports = reports_of(world, 2, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(reports) == {1}
    assert re.search(rf"recv\({re.escape(wanted)}, src=0, tag=3\) at .*test_mismatch.py:\d+ in program", str(error))
    assert re.search(rf"rank 0 sent {re.escape(sent)} at .*test_mismatch.py:\d+ in program", str(error))


# --- bad arguments ----------------------------------------------------------------------------------


def raised(kind: type[Exception], call: Any) -> str:
    """Return the text of the error of `call()` (devices need not import pytest)."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


def read_only() -> np.ndarray:
    x = np.ones(2)
    x.flags.writeable = False
    return x


def matrix() -> np.ndarray:
    return np.ones((4, 6)).view(np.matrix)  # NumPy's own way to make one warns


ONES = np.ones((4, 6))
BAD_CALLS: dict[str, tuple[Any, type[Exception]]] = {
    "a list": (lambda: sp.all_reduce([1.0]), InputError),
    "a number": (lambda: sp.all_gather(1.0), InputError),
    "a number to sum": (lambda: sp.all_reduce(3), InputError),
    "a number to be filled": (lambda: sp.gather(ONES, out=3), InputError),
    "a number to send": (lambda: sp.send(1.0, 0), InputError),
    "objects": (lambda: sp.all_gather(np.array([None, 1])), DTypeError),
    "objects to send": (lambda: sp.isend(np.array([None]), 0), DTypeError),
    "objects in a record": (lambda: sp.broadcast(np.zeros(1, [("a", "O")])), DTypeError),
    "read-only all_reduce": (lambda: sp.all_reduce(read_only()), InputError),
    "read-only recv": (lambda: sp.recv(read_only(), 0), InputError),
    "a mask": (lambda: sp.all_reduce(np.ma.masked_array(ONES, ONES > 0)), InputError),
    "a mask in a list": (lambda: sp.all_reduce([np.ones(2), np.ma.ones(2)]), InputError),
    "a mask to send": (lambda: sp.send(np.ma.ones(2), 0), InputError),
    "a matrix": (lambda: sp.all_gather(matrix()), InputError),
    "a matrix as out": (lambda: sp.all_reduce(ONES, out=matrix()), InputError),
    "matrices to scatter": (lambda: sp.scatter([matrix()] * 3, src=sp.get_rank()), InputError),
    "dim too large": (lambda: sp.all_gather(ONES, dim=2), ShapeError),
    "dim too small": (lambda: sp.all_gather(ONES, dim=-3), ShapeError),
    "dim of a scalar": (lambda: sp.all_gather(np.array(1.0)), ShapeError),
    "dim is not an integer": (lambda: sp.all_gather(ONES, dim=0.0), InputError),
    "concat_dim": (lambda: sp.all_to_all(ONES, 1, 2), ShapeError),
    "not divisible": (lambda: sp.reduce_scatter(ONES, dim=0), ShapeError),
    "split not divisible": (lambda: sp.all_to_all(ONES, 0, 1), ShapeError),
    "root too large": (lambda: sp.broadcast(ONES, src=3), InputError),
    "root negative": (lambda: sp.reduce(ONES, dst=-1), InputError),
    "root is not an integer": (lambda: sp.gather(ONES, dst=1.0), InputError),
    "root is None": (lambda: sp.broadcast(ONES, src=None), InputError),
    "root of uneven parts is None": (lambda: sp.gather(ONES, dst=None, uneven=True), InputError),
    "root of an object is None": (lambda: sp.gather_object(ONES, dst=None), InputError),
    "root is a bool": (lambda: sp.gather(ONES, dst=True), InputError),
    "unknown op": (lambda: sp.all_reduce(ONES, "average"), InputError),
    "op of another call": (lambda: sp.reduce(ONES, op="adasum"), InputError),
    "op is not a string": (lambda: sp.all_reduce(ONES, None), InputError),
    "op is a list": (lambda: sp.scan(ONES, ["sum"]), InputError),
    "mean of integers": (lambda: sp.all_reduce(np.ones(2, int), "mean"), DTypeError),
    "and of floats": (lambda: sp.reduce(ONES, op="and"), DTypeError),
    "sum of dates": (lambda: sp.reduce_scatter(np.zeros(3, "M8[s]")), DTypeError),
    "sum of strings": (lambda: sp.all_reduce(np.zeros(3, "S3")), DTypeError),
    "max of records": (lambda: sp.all_reduce(np.zeros(3, [("a", "i4")]), "max"), DTypeError),
    "no group": (lambda: sp.barrier(group=[0, 1]), InputError),
    "empty group": (lambda: sp.new_group([]), InputError),
    "double rank": (lambda: sp.new_group([0, 0]), InputError),
    "rank outside": (lambda: sp.new_group([0, 3]), InputError),
    "rank is not an integer": (lambda: sp.new_group([0, 1.5]), InputError),
    "ranks as text": (lambda: sp.new_group("01"), InputError),
    "negative shape": (lambda: sp.empty((2, -3), shared=True), ShapeError),
    "an invalid shape": (lambda: sp.empty(1.5, shared=True), ShapeError),
    "shared objects": (lambda: sp.empty(3, object, shared=True), DTypeError),
    "an invalid dtype": (lambda: sp.empty(3, "x3", shared=True), DTypeError),
    "negative tag": (lambda: sp.send(ONES, 0, tag=-1), InputError),
    "tag is not an integer": (lambda: sp.irecv(ONES, 0, tag="a"), InputError),
    "no such receiver": (lambda: sp.send(ONES, 3), InputError),
    "no such sender": (lambda: sp.recv(ONES, -1), InputError),
    "receiver is a bool": (lambda: sp.send(ONES, True), InputError),
    "scatter of nothing": (lambda: sp.scatter(None, src=sp.get_rank()), InputError),
    "scatter too few": (lambda: sp.scatter([ONES], src=sp.get_rank()), InputError),
    "scatter of shapes": (lambda: sp.scatter([ONES, ONES, ONES[1:]], src=sp.get_rank()), ShapeError),
    "scatter of dtypes": (lambda: sp.scatter([ONES, ONES > 0, ONES], src=sp.get_rank()), ShapeError),
    "out of another shape": (lambda: sp.all_gather(ONES, out=np.empty((4, 18))), ShapeError),
    "out of another dtype": (lambda: sp.all_reduce(ONES, out=np.empty((4, 6), "f4")), DTypeError),
    "out is read-only": (lambda: sp.reduce_scatter(np.ones(6), out=read_only()), InputError),
    "out is not an array": (lambda: sp.all_to_all(np.ones(3), out=[0.0] * 3), InputError),
    "out on other ranks": (lambda: sp.reduce(ONES, dst=(sp.get_rank() + 1) % 3, out=ONES.copy()), InputError),
    "out of a list": (lambda: sp.all_reduce([ONES], out=[ONES]), InputError),
    "gather into too few": (lambda: sp.gather(ONES, dst=sp.get_rank(), out=[ONES.copy()]), InputError),
    "gather into one": (lambda: sp.gather(ONES, dst=sp.get_rank(), out=ONES.copy()), InputError),
    "gather into a scalar": (lambda: sp.gather(ONES, dst=sp.get_rank(), out=np.array(1.0)), InputError),
    "gather into rows of another shape": (
        lambda: sp.gather(ONES, dst=sp.get_rank(), out=np.ones((3, 4, 5))),
        ShapeError,
    ),
    "gather into one again": (lambda: sp.gather(ONES, dst=sp.get_rank(), out=[np.empty((4, 6))] * 3), InputError),
    "scatter into another shape": (lambda: sp.scatter([ONES] * 3, src=sp.get_rank(), out=np.empty(3)), ShapeError),
    "scatter into a number": (lambda: sp.scatter([ONES] * 3, src=sp.get_rank(), out=1.0), InputError),
    "scatter from other ranks": (lambda: sp.scatter([ONES] * 3, src=(sp.get_rank() + 1) % 3), InputError),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_arguments_have_no_effect(world, what):
    """Bad arguments are refused before anything is changed or counted."""
    call, kind = BAD_CALLS[what]

    def program():
        before = ONES.copy()
        sp.all_reduce(np.ones(2))
        with refused(kind):
            call()
        assert (before == ONES).all()
        sp.send(np.ones(1), (sp.get_rank() + 1) % 3)
        sp.recv(np.ones(1), (sp.get_rank() - 1) % 3)
        return sp.all_reduce(np.ones(2)).tolist()

    results = world.run(3, program)
    assert list(results) == [[3.0, 3.0]] * 3
    assert max(event.seq for event in results.trace.events if event.kind == "collective") == 2


def test_group_is_for_its_members(world):
    def program():
        group = sp.new_group([2, 0])
        if group.rank is None:
            text = raised(InputError, lambda: sp.all_reduce(np.ones(1), group=group))
            assert "rank 1 is not a member of group 1 (ranks 2, 0)" in text
        else:
            text = raised(InputError, lambda: sp.broadcast(np.ones(1), src=1, group=group))
            assert "rank 1 is not a member" in text
            sp.all_reduce(np.ones(1), group=group)
        return sp.all_reduce(np.ones(1))[0]

    assert list(world.run(3, program)) == [3.0] * 3


def test_group_is_for_its_run(world):
    def program():
        import oracles  # a module of the process, which a warm cluster keeps

        kept = vars(oracles).setdefault("_kept_groups", {})
        me = sp.get_rank()
        old = kept.get(me)
        if old is None:
            kept[me] = sp.new_group([1, 0])
            return sp.all_reduce(np.ones(1), group=kept[me])[0]
        del kept[me]
        x = np.ones(1)
        for call in (lambda: sp.all_reduce(x, group=old), lambda: sp.barrier(group=old)):
            with refused(InputError):
                call()
        return sp.all_reduce(x, group=sp.new_group(old.ranks))[0]

    for _ in range(2):
        assert list(world.run(2, program)) == [2.0] * 2


# --- lists and objects ------------------------------------------------------------------------------


def lists(shapes: tuple[Any, Any], op: str) -> None:
    """Reduce a list of arrays, or one array if all shapes are numbers."""
    own = shapes[sp.get_rank()]
    is_list = isinstance(own[0], tuple)
    arrays = [np.full(shape, i + 1.0) for i, shape in enumerate(own if is_list else [own])]
    try:
        sp.all_reduce(arrays if is_list else arrays[0], op)
    finally:
        for i, array in enumerate(arrays):
            assert (array == i + 1.0).all()


@pytest.mark.parametrize("op", ["sum", "max", "adasum"])
@pytest.mark.parametrize(
    "shapes",
    [
        (((2,), (3,)), ((3,), (2,))), (((2, 3),), ((3, 2),)), (((2, 3), (1,)), ((6,), (1,))), (((5,),), (5,)),
        (((2,), (3,)), (5,)), (((1,),) * 9 + ((2,), (1,)), ((1,),) * 9 + ((1,), (2,))), (((0,), (4,)), ((4,),)),
    ],
)  # fmt: skip
def test_lists_of_other_shapes(world, shapes, op):
    error, reports = reports_of(world, 2, lists, shapes, op)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(reports) == {0, 1}
    assert re.search(r"called all_reduce\(\w.*\) float64 list of \d+, sizes \(.*\), shapes #", str(error))


def test_lists_of_the_same_shapes_are_one_call(world):
    def program(op):
        arrays = [np.full(shape, sp.get_rank() + 1.0) for shape in ((2, 3), (), (4, 0), (5,))]
        return [array.tolist() for array in sp.all_reduce(arrays, op)]

    expected = [np.full(shape, 3.0).tolist() for shape in ((2, 3), (), (4, 0), (5,))]
    assert list(world.run(2, program, "sum")) == [expected] * 2


OBJECT_CALLS: dict[str, Any] = {
    "all_gather_object": lambda: sp.all_gather_object({"a": 1}),
    "broadcast_object": lambda: sp.broadcast_object({"a": 1}),
    "gather_object": lambda: sp.gather_object({"a": 1}),
    "gather_object root 1": lambda: sp.gather_object({"a": 1}, dst=1),
    "all_gather int64 (1,) dim 0": lambda: sp.all_gather(np.array([5])),
    "broadcast int64 (1,) root 0": lambda: sp.broadcast(np.array([5])),
}


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("all_gather_object", "all_gather int64 (1,) dim 0"), ("broadcast_object", "broadcast int64 (1,) root 0"),
        ("gather_object", "all_gather int64 (1,) dim 0"), ("gather_object", "all_gather_object"),
        ("gather_object", "gather_object root 1"), ("broadcast_object", "all_gather_object"),
    ],
)  # fmt: skip
def test_objects_match_nothing_but_objects(world, mine, other):
    def program():
        OBJECT_CALLS[other if sp.get_rank() else mine]()

    error, reports = reports_of(world, 2, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(reports) == {0, 1}


def test_byte_order_is_reported(world):
    def program():
        sp.all_reduce(np.ones(3, ">f4" if sp.get_rank() else "<f4"))

    text = str(reports_of(world, 2, program)[0])
    other = "big" if sys.byteorder == "little" else "little"
    assert f"called all_reduce(sum) float32 {other}-endian (3,) at" in text
    assert "called all_reduce(sum) float32 (3,) at" in text
    assert "They differ in: dtype. No data was changed" in text


# --- places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["/tmp/caf\udce9", "/home/" + "数据并行" * 30, "/" + "a" * 300 + "ä" * 90],
                         ids=["not a string", "three bytes each", "two bytes each"])  # fmt: skip
def test_any_file_name_is_reported(world, folder):
    """Also a name that is not UTF-8, or longer than the record of the call site."""
    source = "import simparallel as sp, numpy as np\ndef step(n): return sp.all_reduce(np.ones(n))[0]\nfound = step(3)"

    def program(differ):
        code = compile(source.replace("(3)", f"({3 + differ * sp.get_rank()})"), f"{folder}/train.py", "exec")
        names: dict[str, Any] = {}
        exec(code, names)
        return names["found"]

    assert list(world.run(2, program, False)) == [2.0] * 2
    error, _ = reports_of(world, 2, program, True)
    assert str(error.__cause__).count("/train.py:2 in step\n") == 2


def test_deleted_working_directory(world):
    def program():
        before = os.open(".", os.O_RDONLY)
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        try:
            return sp.all_reduce(np.ones(3)).sum()
        finally:
            os.fchdir(before)
            os.close(before)

    size = 1 if world.transport == "inline" else 2  # threads have one working directory
    assert list(world.run(size, program)) == [3.0 * size] * size


def test_many_call_sites_keep_their_lines():
    """The error names the line of a call, also after hundreds of other call sites."""
    lines = ["sp.barrier()"] * 600 + ["sp.all_reduce(np.ones(1 + sp.get_rank()))"]
    text = "def calls(sp, np):\n" + "".join(f"    {line}\n" for line in lines)

    def program():
        names = {}
        exec(compile(text, "many.py", "exec"), names)
        names["calls"](sp, np)

    with refused(RunFailedError):
        sp.launch(program, world_size=2, transport="inline")


@pytest.mark.parametrize("wrong", [0.0, False])
def test_number_equal_to_a_dim_is_refused(wrong: Any) -> None:
    """Also where a call with the integer has a plan, which 0.0 and False would find: they are equal to 0."""
    sp.all_gather(np.ones(2), dim=0)
    sp.broadcast(np.ones(2), src=0)
    with refused(InputError):
        sp.all_gather(np.ones(2), dim=wrong)
    with refused(InputError):
        sp.broadcast(np.ones(2), src=wrong)
