"""`out`: the destination of a collective's results. The same contract for any strides and any memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import oracles
import pytest
import test_collectives
from hypothesis import given, settings, strategies as st
from oracles import World
from refusals import refused
from test_collectives import LAYOUTS, NUMBERS, OTHERS, ROOTED, Case, assert_same, cases, laid_out, native, values

import simparallel as sp
from simparallel.algorithms import names, offers
from simparallel.comm import Group, call_header as h, current
from simparallel.comm.direct import direct
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.validate import own_piece
from simparallel.errors import CollectiveMismatchError, RunFailedError

for module in (sys.modules[__name__], test_collectives):
    cloudpickle.register_pickle_by_value(module)

NAMES = ("all_reduce", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
AT_ROOT = ("reduce", "gather")
LARGE = SLOT_BYTES // 8 + 6  # elements of 8 bytes, even and a multiple of 3


def own_place(case: Case, me: int, wanted: Any) -> tuple[Any, Any]:
    """Put x and out in one memory as the collective allows: x is out, or its own part, or out is x's own part."""
    given, layout = case.inputs()[me], case.layout
    if case.name in ("all_gather", "gather"):
        out = laid_out(np.zeros(np.shape(wanted), case.dtype), layout)
        dim = case.kwargs.get("dim", 0) % given.ndim if case.name == "all_gather" else None
        parts = out[me, ...] if dim is None else np.split(out, len(case.members), dim)[me]
        parts[...] = given
        return parts, out
    if case.name == "scatter":
        parts = [laid_out(part, layout) for part in given]
        return parts, parts[me]
    x = laid_out(given, layout)
    if case.name == "reduce_scatter":
        return x, np.split(x, len(case.members), case.kwargs["dim"])[me]
    return x, (x if x.shape == wanted.shape else laid_out(np.zeros(wanted.shape, x.dtype), layout))


def overlapping(case: Case, me: int, wanted: Any) -> tuple[Any, Any]:
    """Overlap the end of x with the beginning of out."""
    given, shape = case.inputs()[me], np.shape(wanted)
    one = given[0] if case.name == "scatter" else given
    size = int(np.prod(shape))
    memory = laid_out(np.zeros(one.size + size, case.dtype), case.layout)
    x, start = memory[: one.size].reshape(one.shape), one.size // 2
    x[...] = one
    out = memory[start : start + size].reshape(shape)
    return ([x, *given[1:]] if case.name == "scatter" else x), out


def perform_into(case: Case, how: str, algorithm: str | None = None) -> Any:
    """Make the call with an `out` laid out as `how` says; return the result."""
    group = None if case.ranks is None else sp.new_group(case.ranks)
    if case.ranks is not None and group.rank is None:
        return "outside"
    me = sp.get_rank() if group is None else group.rank
    wanted, given = case.expected()[me], case.inputs()[me]
    x: Any = [laid_out(part, case.layout) for part in given] if case.name == "scatter" else laid_out(given, case.layout)
    out = None
    if case.name not in AT_ROOT or case.kwargs[ROOTED[case.name]] == sp.get_rank():
        if how == "own place":
            x, out = own_place(case, me, wanted)
        elif how == "overlapping":
            x, out = overlapping(case, me, wanted)
        else:
            out = laid_out(values(99, np.shape(wanted), case.dtype), how)
    if case.name == "gather" and out is not None and case.seed % 2:
        out = list(out) if case.shape else [out[i, ...] for i in range(len(out))]
    if case.name == "scatter" and sp.get_rank() != case.kwargs["src"]:
        x = None
    kwargs = {**case.kwargs, "group": group, "async_op": case.is_async, "algorithm": algorithm}
    result = getattr(sp, case.name)(x, out=out, **kwargs)
    if case.is_async:
        assert isinstance(result, sp.Work)
        result = result.wait()
    if out is None:
        assert result is (x if case.name == "reduce" else None)
    else:
        assert result is out
    if how not in ("own place", "overlapping") and x is not None:
        for part, before in zip(*((x, given) if isinstance(x, list) else ([x], [given])), strict=True):
            assert np.array_equal(part, before), "x was changed"
    if isinstance(result, list):
        return [np.array(one) for one in result]
    if case.name == "gather" and out is not None:
        return [np.array(result[i, ...]) for i in range(len(result))]
    return np.array(result)


@st.composite
def cases_into(draw: Any, name: str, max_size: int) -> tuple[Case, str, str | None]:
    case, how = draw(cases(name, max_size)), draw(st.sampled_from((*LAYOUTS, "own place", "overlapping")))
    algorithm = draw(st.sampled_from([None, *(one for one in names() if offers(one, name))]))
    if case.dtype == np.float16 and algorithm not in (None, "direct"):
        case = replace(case, dtype=np.dtype(np.float32))  # algorithms on messages round at each step
    return case, how, algorithm


@pytest.mark.parametrize("name", NAMES)
def test_matches_numpy(world: World, name: str) -> None:
    def body(drawn: tuple[Case, str, str | None]) -> None:
        case = drawn[0]
        results, expected = world.run(case.size, perform_into, *drawn), case.expected()
        for rank, result in enumerate(results):
            if rank not in case.members:
                assert result == "outside"
            elif name not in AT_ROOT or case.kwargs[ROOTED[name]] == rank:
                assert_same(result, expected[case.members.index(rank)])

    world.check(cases_into(name, world.max_size), body)


def test_large_arrays_in_every_place(world: World) -> None:
    """Rare among the drawn cases: payloads that are read in place, or that come in pieces."""

    def program(how: str, layout: str) -> list[Any]:
        results = []
        for name in NAMES:
            kwargs: dict[str, Any] = {ROOTED[name]: 1} if name in ROOTED else {}
            kwargs |= {"dim": 0} if name in ("all_gather", "reduce_scatter") else {}
            kwargs |= {"split_dim": 1, "concat_dim": 1} if name == "all_to_all" else {}
            shape = (6, 3 * (LARGE // 9))
            case = Case(name, 3, None, shape, np.dtype(np.int64), layout, 7, False, kwargs)
            results.append((case, perform_into(case, how)))
        return results

    for how in ("shared", "own place", "overlapping"):
        for layout in ("plain", "shared", "strided"):
            for rank, made in enumerate(world.run(3, program, how, layout)):
                for case, result in made:
                    if case.name not in AT_ROOT or rank == 1:
                        assert_same(result, case.expected()[rank])


def sums_in_pieces(piece_bytes: int, pair_bytes: int, sizes: list[int], layouts: list[str]) -> list[Any]:
    direct.PIECE_BYTES, direct.PAIR_BYTES = piece_bytes, pair_bytes
    me, results = sp.get_rank(), []
    for number, num_elements in enumerate(sizes):
        x = laid_out(values(me + number, (num_elements,), np.dtype(np.int64)), layouts[me])
        out = laid_out(np.zeros(num_elements, np.int64), layouts[2]) if me or number % 2 else None
        results.append(np.array(sp.all_reduce(x, out=out)))
    return results


@given(st.data())
@settings(max_examples=40)
def test_large_sums_in_pieces(data: st.DataObject) -> None:
    """Only some ranks pass an `out`, and only some ranks' arrays are in the arena."""
    least = SLOT_BYTES // 8 + 1
    sizes = data.draw(st.lists(st.integers(least, 4 * least), min_size=1, max_size=5))
    limits = 8 * data.draw(st.integers(least // 8, 2 * least)), data.draw(st.sampled_from([0, 16 * least]))
    layouts = data.draw(st.lists(st.sampled_from(("plain", "shared", "strided")), min_size=3, max_size=3))
    size = data.draw(st.sampled_from([2, 2, 3]))
    layouts = [*layouts[:2], layouts[0]] if size == 3 else layouts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "PIECE_BYTES", limits[0])  # threads share the module, which is restored afterwards
        patch.setattr(direct, "PAIR_BYTES", limits[1])
        results = sp.launch(sums_in_pieces, (*limits, sizes, layouts), world_size=size, transport="inline")
    for number, num_elements in enumerate(sizes):
        xs = [values(rank + number, (num_elements,), np.dtype(np.int64)) for rank in range(size)]
        for result in results:
            assert_same(result[number], oracles.reduced(xs, "sum"))


def test_every_dtype_moves(world: World) -> None:
    dtypes = (*NUMBERS, *OTHERS[:-1])

    def program() -> list[Any]:
        me, results = sp.get_rank(), []
        for dtype in dtypes:
            x = values(me, (4, 3), dtype)
            whole, part, rows = np.zeros((8, 3), dtype), np.zeros((4, 3), dtype), np.zeros((2, 4, 3), dtype)
            results.append(
                [
                    sp.all_gather(x, out=whole).copy(),
                    sp.all_to_all(x, out=part).copy(),
                    sp.gather(x, dst=1, out=rows if me else None),
                ]
            )
            if dtype.names is None and len(dtype.str) < 8:
                parts = [x, x[::-1]] if me else None  # they become one array, in this machine's byte order
                results[-1].append(sp.scatter(parts, src=1, out=native(part)))
        return results

    for rank, result in enumerate(world.run(2, program)):
        for dtype, found in zip(dtypes, result, strict=True):
            xs = [values(one, (4, 3), dtype) for one in range(2)]
            rows = np.array(xs, dtype) if rank else None
            assert_same(found[:3], [np.concatenate(xs).astype(dtype), oracles.all_to_all(xs)[rank].astype(dtype), rows])
            if len(found) > 3:
                assert_same(found[3], native(xs[1][:: -1 if rank else 1]))


def test_adasum(world: World) -> None:
    def program(num_elements: int, algorithm: str | None) -> Any:
        x = sp.empty(num_elements, np.float64, shared=sp.get_rank() == 0)
        x[...] = np.cos(np.arange(num_elements) + sp.get_rank())
        before, out = x.copy(), np.empty_like(x)
        assert sp.all_reduce(x, "adasum", out=out, algorithm=algorithm) is out
        assert (x == before).all()
        return out, sp.all_reduce(x, "adasum", algorithm=algorithm)

    for num_elements in (1, 5, 3 * LARGE):
        for algorithm in (None, "tree", "naive", "ring"):
            for out, x in world.run(3, program, num_elements, algorithm):
                assert (out == x).all()


def test_mismatched_calls_write_nothing(world: World) -> None:
    def program(num_elements: int) -> str:
        me = sp.get_rank()
        out, x = np.full((3, num_elements), -1.0), np.ones((3, num_elements))
        for wrong in (
            lambda: sp.all_reduce(x if me else x[:2], out=out if me else out[:2]),
            lambda: sp.all_reduce(x, op="max" if me else "min", out=out, algorithm="ring"),
        ):
            try:
                wrong()
            except CollectiveMismatchError:
                assert (out == -1).all()
                raise
        return "not found"

    for num_elements in (2, LARGE):
        with refused(RunFailedError) as caught:
            world.run(3, program, num_elements)
        assert isinstance(caught.value.__cause__, CollectiveMismatchError)


@pytest.mark.parametrize("algorithm", [None, "naive"])
def test_scatter_into_unfitting_out(world: World, algorithm: str | None) -> None:
    """Only the source knows the shape, so its receiver raises and writes nothing."""

    def program() -> None:
        me, out = sp.get_rank(), np.full((2, 4), -1.0)
        parts = [np.ones((2, 4), np.float64 if me else np.float32)] * 3 if me == 1 else None
        try:
            sp.scatter(parts, src=1, out=out if me == 1 else out[:, :3] if me else None, algorithm=algorithm)
        except CollectiveMismatchError:
            assert (out == -1).all()
            raise
        sp.barrier()

    with refused(RunFailedError) as caught:
        world.run(3, program)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert caught.value.rank == 2
    assert str(caught.value).count("test_collectives_out.py:") >= 2


def zero_copy_of(call: Any) -> list[int]:
    """List the ranks whose own array was read in a call, by its notes."""
    world = current().world
    call()
    return world.views.words_of(h.EXPOSURE, world.seq & 1)


def gather_in_own_place() -> list[list[int]]:
    out = sp.empty((3, LARGE), np.int64, shared=True)
    found = []
    me = sp.get_rank()
    for shift in (0, 1 if me == 0 else -1):
        x = out.reshape(-1)[me * LARGE + shift :][:LARGE].reshape(1, LARGE)
        x[...] = me
        found.append(zero_copy_of(lambda x=x: sp.all_gather(x, out=out)))
        assert (out == np.arange(3)[:, None]).all()
    return found


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_input_inside_out_is_read_in_place(transport: str) -> None:
    """An input that is the rank's own slice of `out` is read in place; one that overlaps otherwise is copied."""
    results = sp.launch(gather_in_own_place, world_size=3, transport=transport)
    assert results == [[[1, 1, 1], [0, 0, 0]]] * 3


def turn_round(num_elements: int) -> np.ndarray:
    x = sp.empty((3, num_elements), np.int64, shared=True)
    x[...] = 10 * sp.get_rank() + np.arange(3)[:, None]
    return sp.all_to_all(x, out=x)[:, 0].copy()


def test_overlap_needs_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control: without the copy, an overlap of input and `out` gives wrong numbers."""
    right = [[0 + rank, 10 + rank, 20 + rank] for rank in range(3)]
    found = [result.tolist() for result in sp.launch(turn_round, (LARGE,), world_size=3, transport="inline")]
    assert found == right
    run = Group.run
    monkeypatch.setattr(Group, "run", lambda *args, must_copy=False: run(*args, must_copy=False))
    found = [result.tolist() for result in sp.launch(turn_round, (LARGE,), world_size=3, transport="inline")]
    assert found != right


def test_own_piece() -> None:
    class Second:
        size, rank = 3, 1

    x = np.arange(12).reshape(2, 6)
    assert x[own_piece(x, 1, Second)].tolist() == [[2, 3], [8, 9]]


def test_tensors(world: World) -> None:
    def program() -> bool:
        x, out = sp.Tensor(np.full(3, sp.get_rank() + 1.0)), sp.Tensor(np.zeros(3))
        assert sp.all_reduce(x, out=out) is out
        assert out.data.tolist() == [3.0] * 3
        rows = [sp.Tensor(np.zeros(3)), np.zeros(3)] if sp.get_rank() == 0 else None
        assert sp.gather(x, out=rows) is rows
        work = sp.all_gather(x, out=(whole := sp.Tensor(np.zeros(6))), async_op=True)
        assert work.wait() is whole
        assert x.data.tolist() == [sp.get_rank() + 1.0] * 3
        return rows is None or (rows[0].data.tolist(), rows[1].tolist()) == ([1.0] * 3, [2.0] * 3)

    assert list(world.run(2, program)) == [True, True]


@pytest.mark.parametrize("x", [np.ones(2), sp.Tensor([1.0, 2.0])], ids=["array", "Tensor"])
def test_broadcast_takes_no_out(x: Any) -> None:
    with pytest.raises(TypeError, match="out"):
        sp.broadcast(x, out=None)
