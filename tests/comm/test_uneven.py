"""Parts of different sizes, prefixes, logical reductions, groups of their members, barriers with a limit."""

from __future__ import annotations

import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel import functions as F
from simparallel.comm import current
from simparallel.comm.memory.segment import ControlMap
from simparallel.errors import (
    CollectiveMismatchError,
    CommError,
    DeadlineError,
    DeadlockError,
    DTypeError,
    InputError,
    RunFailedError,
    ShapeError,
)


def failed(world: World, size: int, program: Any, *args: Any, **kwargs: Any) -> RunFailedError:
    with refused(RunFailedError) as caught:
        world.run(size, program, *args, **kwargs)
    return caught.value


# --- different sizes --------------------------------------------------------------------------------

LARGE = 3000  # rows that exceed a slot


@st.composite
def cases(draw: Any, max_size: int) -> Any:
    """Draw (members, sizes[giver][taker], other dims, dim, dtype, root, is_async)"""
    size = draw(st.integers(1, max_size))
    members = tuple(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
    count = len(members)
    sizes = st.one_of(st.integers(0, 3), st.integers(0, 3), st.just(LARGE))
    table = [[draw(sizes) for _ in range(count)] for _ in range(count)]
    others = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    dtype = draw(st.sampled_from(("float64", "int8", "float16", "complex128", "S5", ">i4", "bool")))
    return (
        members,
        table,
        others,
        draw(st.integers(0, len(others))),
        dtype,
        draw(st.sampled_from(members)),
        draw(st.booleans()),
    )


def part(giver: int, taker: int, size: int, others: Any, dim: int, dtype: str) -> np.ndarray:
    shape = (*others[:dim], size, *others[dim:])
    return ((np.arange(np.prod(shape)) + 7 * giver + 3 * taker) % 100).astype(dtype).reshape(shape)


def exchange(case: Any) -> Any:
    members, table, others, dim, dtype, root, is_async = case
    group = sp.new_group(members)
    if group.rank is None:
        return "outside"
    me, first_dim = group.rank, dim == 0
    mine = [part(me, j, n, others, dim, dtype) for j, n in enumerate(table[me])]
    x, whole = np.concatenate(mine, dim), mine[0]
    before = x.copy()
    works = [
        sp.all_gather(whole, dim, group, is_async, uneven=True),
        sp.all_to_all(x, dim, dim, group, is_async, input_splits=table[me], output_splits=[row[me] for row in table]),
        sp.gather(whole, root, group, is_async, uneven=True) if first_dim else None,
        sp.scatter(mine if sp.get_rank() == root else None, root, group, is_async, uneven=True) if first_dim else None,
    ]
    results = [work.wait() if isinstance(work, sp.Work) else work for work in works]
    assert (x == before).all()
    return results


def test_matches_numpy(world):
    def body(case):
        members, table, others, dim, dtype, root, _ = case
        size = max(members) + 1
        source = members.index(root)
        wholes = [part(i, 0, row[0], others, dim, dtype) for i, row in enumerate(table)]
        for rank, got in enumerate(world.run(size, exchange, case)):
            if rank not in members:
                assert got == "outside"
                continue
            me = members.index(rank)
            parts = [part(i, me, row[me], others, dim, dtype) for i, row in enumerate(table)]
            expected = [np.concatenate(wholes, dim), np.concatenate(parts, dim)]
            if dim == 0:
                expected += [wholes if rank == root else None, part(source, me, table[source][me], others, 0, dtype)]
            for mine, right in zip(got, expected, strict=False):
                for a, b in zip(*([v] if isinstance(v, np.ndarray) else v or [] for v in (mine, right)), strict=True):
                    assert a.shape == b.shape
                    assert a.dtype == b.dtype.newbyteorder("=")
                    assert (a == b).all()

    world.check(cases(world.max_size), body)


@st.composite
def reductions(draw: Any, max_size: int) -> Any:
    """Draw (members, sizes by taker, other dims, dim, op, dtype, is_async)"""
    size = draw(st.integers(1, max_size))
    members = tuple(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
    sizes = st.one_of(st.integers(0, 3), st.integers(0, 3), st.just(LARGE))
    others = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    return (
        members,
        [draw(sizes) for _ in members],
        others,
        draw(st.integers(0, len(others))),
        draw(st.sampled_from(("sum", "max"))),
        draw(st.sampled_from(("float64", "int16", "float16", ">i4"))),
        draw(st.booleans()),
    )


def reduced(case: Any) -> Any:
    members, sizes, others, dim, op, dtype, is_async = case
    group = sp.new_group(members)
    if group.rank is None:
        return "outside"
    x = part(group.rank, 0, sum(sizes), others, dim, dtype)
    before, shared = x.copy(), sp.empty(x.shape, x.dtype, shared=True)
    shared[...] = x
    own = shared[(slice(None),) * dim + (slice(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1])),)]
    results = [
        sp.reduce_scatter(x, dim, op, group, is_async, input_splits=sizes),
        sp.reduce_scatter(x, dim, op, group, is_async, input_splits=np.array(sizes), out=np.empty_like(own)),
        sp.reduce_scatter(shared, dim, op, group, is_async, input_splits=sizes, out=own),
    ]
    results = [result.wait() if is_async else result for result in results]
    assert (x == before).all()
    return results


def test_reduces_parts_of_different_sizes(world):
    def body(case):
        members, sizes, others, dim, op, dtype, _ = case
        given = [part(i, 0, sum(sizes), others, dim, dtype) for i in range(len(members))]
        whole = {"sum": np.sum, "max": np.max}[op](np.array(given, dtype), axis=0)
        parts = np.split(whole, np.cumsum(sizes)[:-1], dim)
        for rank, got in enumerate(world.run(max(members) + 1, reduced, case)):
            if rank not in members:
                assert got == "outside"
                continue
            right = parts[members.index(rank)]
            for mine in got:
                assert mine.shape == right.shape
                assert (mine == right).all()
            assert got[0].dtype == np.dtype(dtype).newbyteorder("=")

    world.check(reductions(world.max_size), body)


def give_too_few() -> None:
    me, x = sp.get_rank(), np.ones((3, 2))
    try:
        sp.all_to_all(x, input_splits=[1, 2] if me == 0 else [2, 1], output_splits=[1, 1] if me else [1, 2])
    finally:
        assert (x == 1).all()


def test_bad_sizes_are_reported_on_all_ranks(world):
    with pytest.raises(RunFailedError) as caught:  # each rank has a text of its own
        world.run(2, give_too_few)
    error = caught.value
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(error.reports) == {0, 1}


@pytest.mark.parametrize(
    "program",
    [
        lambda: sp.all_gather(np.ones((2, 2 + sp.get_rank())), uneven=True),
        lambda: sp.all_gather(np.ones(2), uneven=sp.get_rank() == 0),
        lambda: sp.all_gather(np.ones(2, "f4" if sp.get_rank() else "f8"), uneven=True),
        lambda: sp.gather(np.ones(2), dst=sp.get_rank(), uneven=True),
        lambda: sp.all_to_all(np.ones(2), **{"input_splits": [1, 1]} if sp.get_rank() else {}),
        lambda: sp.reduce_scatter(np.ones(3), input_splits=[1, 2][:: 1 - 2 * sp.get_rank()]),
        lambda: sp.reduce_scatter(np.ones(2), **{"input_splits": [1, 1]} if sp.get_rank() else {}),
        lambda: sp.reduce_scatter(np.ones((2, 2)), sp.get_rank(), input_splits=[0, 2]),
    ],
)  # fmt: skip
def test_other_differences_are_mismatches(world, program):
    error = failed(world, 2, program)
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(error.reports) == {0, 1}


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ShapeError, lambda: sp.all_to_all(np.ones(3), input_splits=[1])),
        (InputError, lambda: sp.all_to_all(np.ones(3), input_splits=[1, 2])),
        (InputError, lambda: sp.all_to_all(np.ones(3), output_splits=[-1])),
        (InputError, lambda: sp.all_to_all(np.ones(3), output_splits=3)),
        (InputError, lambda: sp.all_to_all(np.ones((3, 1)), 0, 1, input_splits=[3])),
        (InputError, lambda: sp.all_to_all(np.ones(3), input_splits=[3], out=np.ones(3))),
        (ShapeError, lambda: sp.reduce_scatter(np.ones(3), input_splits=[2])),
        (InputError, lambda: sp.reduce_scatter(np.ones(3), input_splits=[1, 2])),
        (InputError, lambda: sp.reduce_scatter(np.ones(3), input_splits=[3], algorithm="ring")),
        (InputError, lambda: sp.all_gather(np.ones(3), algorithm="ring", uneven=True)),
        (ShapeError, lambda: sp.all_gather(np.ones(()), uneven=True)),
        (ShapeError, lambda: sp.scatter([np.ones(())], uneven=True)),
        (InputError, lambda: sp.scatter([np.ones(2)], uneven=True, algorithm="naive")),
    ],
)  # fmt: skip
def test_bad_arguments(kind, call):
    with pytest.raises(kind):
        call()


def test_scatter_into_out(world):
    def program(rows: int) -> Any:
        parts = [np.full(i + 1, i) for i in range(2)] if sp.get_rank() == 0 else None
        return sp.scatter(parts, uneven=True, out=np.zeros(rows if sp.get_rank() else 1, int)).tolist()

    assert list(world.run(2, program, 2)) == [[0], [1, 1]]
    failed(world, 2, program, 3)


def test_price_counts_travelling_bytes():
    def program() -> None:
        me = sp.get_rank()
        sp.all_gather(np.ones(me + 1), uneven=True)
        sp.all_to_all(np.ones(6), input_splits=[[1, 2, 3], [6, 0, 0], [0, 6, 0]][me])

    with sp.Cluster(3, transport="inline") as cluster:
        events = [e for e in cluster.run(program).trace.events if e.kind == "collective"]
    assert {(e.name, e.size_bytes) for e in events} == {("all_gather", 48), ("all_to_all", 64)}
    assert [e.sent_bytes for e in events if e.name == "all_to_all"] == [40, 48, 48]
    assert len({e.sim_end_ps for e in events if e.name == "all_to_all"}) == 1


# --- prefixes and reductions ------------------------------------------------------------------------

REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "bxor": np.bitwise_xor}


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (LARGE, 2)])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_scans_match_numpy(world, op, shape):
    def value(rank: int) -> np.ndarray:
        return ((np.arange(np.prod(shape, dtype=int)) + 2 * rank) % 5 - 1).reshape(shape)

    def program(into: bool) -> Any:
        group, results = sp.new_group([2, 0, 1]), []
        for name in (sp.scan, sp.exscan):
            x = value(group.rank)
            result = name(x, op, group, async_op=into, out=np.empty_like(x) if into else None)
            result = result.wait() if into else result
            assert into or result is x
            assert not into or (x == value(group.rank)).all()
            results.append(result)
        return results

    for into in (False, True):
        outs = world.run(3, program, into)
        totals = list(accumulate([value(i) for i in range(3)], REDUCTIONS[op]))
        for position, rank in enumerate((2, 0, 1)):
            scanned, shifted = outs[rank]
            assert (scanned == totals[position]).all()
            if position:
                assert (shifted == totals[position - 1]).all()
            else:  # it changes nothing
                assert (REDUCTIONS[op](shifted, value(1)) == value(1)).all()


def test_scans_of_all_kinds():
    assert sp.scan(np.array([2, 0]), "land").tolist() == [1, 0]
    assert sp.exscan(np.array([2.0]), "max").tolist() == [-np.inf]
    assert sp.exscan(np.array([True]), "min").tolist() == [True]
    with refused(InputError):
        sp.scan(np.ones(2), "mean")
    with refused(DTypeError):
        sp.exscan(np.array(["2020"], "M8[s]"), "max")


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint8", "uint64"])
@pytest.mark.parametrize("op", ["and", "or", "xor", "min", "max"])
def test_first_rank_of_exscan_gets_the_identity(op, dtype):
    x = np.array([0, 1, -1]).astype(dtype)
    first = sp.exscan(x.copy(), op)
    assert first.dtype == x.dtype
    ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "min": np.minimum, "max": np.maximum}
    assert (ufunc[op](first, x) == x).all()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64"])
@pytest.mark.parametrize("op", ["land", "lor", "lxor"])
def test_logical_reductions(world, op, dtype):
    truth = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}[op]
    values = np.array([[0, 0, 4, 6], [0, 3, 0, 9], [5, 0, 0, 2]]).astype(dtype)

    def program(size: int) -> Any:
        x, y = values[sp.get_rank()].copy(), np.tile(values[sp.get_rank()], size)
        out = np.empty_like(x)
        reduced = x.copy()
        reduced.flags.writeable = sp.get_rank() == 1 % size  # the other ranks keep theirs
        assert sp.reduce(reduced, 1 % size, op) is reduced
        sp.all_reduce(x, op, out=out)
        assert (x == values[sp.get_rank()]).all()
        listed = sp.all_reduce([x.copy(), x[:1].copy()], op)
        works = sp.reduce(x.copy(), 0, op, async_op=True).wait()
        without_dims = sp.all_reduce(np.array(values[sp.get_rank(), 2]), op)
        assert without_dims == truth.reduce(values[:size, 2])
        scattered = sp.reduce_scatter(y, op=op)
        return out, reduced, listed[0], scattered, sp.all_reduce(x, op, async_op=True).wait(), works

    for size in (1, 3):
        expected = truth.reduce(values[:size]).astype(dtype)
        for rank, (out, reduced, listed, scattered, again, rooted) in enumerate(world.run(size, program, size)):
            for got in (out, listed, scattered, again):
                assert got.dtype == dtype
                assert (got == expected).all()
            assert (reduced == (expected if rank == 1 % size else values[rank])).all()
            assert (rooted == (expected if rank == 0 else values[rank])).all()


def test_reductions_have_the_names_of_pytorch(world):
    def program() -> Any:
        x = np.array([sp.get_rank() + 1, 5])
        return [sp.all_reduce(x.copy(), op).tolist() for op in ("band", "bor", "bxor", "and", "or", "xor")]

    assert world.run(2, program)[1] == [[0, 5], [3, 5], [3, 0]] * 2
    with refused(DTypeError):
        sp.all_reduce(np.ones(2), "land")


# --- groups and barriers ----------------------------------------------------------------------------


def make_locally(groups: list[Any]) -> Any:
    """Return the sum of the ranks of each group that this rank is in; other ranks take no part in making it."""
    me, sums = sp.get_rank(), []
    for ranks in groups:
        if me in ranks:
            group = sp.new_group(ranks, use_local_synchronization=True)
            sums.append(int(sp.all_reduce(np.array([me]), group=group)[0]))
            assert sp.all_gather(np.array([me]), group=group).tolist() == list(ranks)
    return sums


def test_members_alone_make_groups(world):
    groups = [[0, 2], [1, 3], [3, 1], [0, 1, 2, 3], [2, 3], [1], [0, 2], [0, 3]]
    sums = list(world.run(4, make_locally, groups))
    for rank, got in enumerate(sums):
        assert got == [sum(ranks) for ranks in groups if rank in ranks]


def test_members_must_name_the_same_ranks(world):
    def program() -> None:
        if sp.get_rank() < 2:
            sp.new_group([0, 1] if sp.get_rank() else [0, 1, 2][:2][::-1], use_local_synchronization=True)

    with pytest.raises(RunFailedError) as caught:  # each rank has a text of its own
        world.run(3, program)
    error = caught.value
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(error.reports) >= {0, 1}


def test_missing_member_of_local_group_is_a_deadlock(world):
    def program() -> None:
        if sp.get_rank():
            sp.new_group([0, 1], use_local_synchronization=True)
        else:
            sp.barrier()

    error = failed(world, 2, program)
    assert isinstance(error.__cause__, DeadlockError)


def test_local_groups_are_limited():
    with refused(RunFailedError):
        sp.launch(
            lambda: sp.new_group([0], use_local_synchronization=True) if sp.get_rank() else None,
            world_size=2,
            transport="inline",
            echo=False,
        )

    def program() -> int:
        made = 0
        with refused(CommError):
            for made in range(1000):  # noqa: B007
                sp.new_group([1, 0], use_local_synchronization=True)
        return made

    assert sp.launch(program, world_size=2, transport="inline") == [2 * ControlMap(2).local_groups] * 2


def come_late(folder: Path, timeout_s: float) -> None:
    """Rank 1 computes until both other ranks have failed: if it returned earlier, its end could be their error."""
    if sp.get_rank() == 1:
        deadline = time.monotonic() + 30
        while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
            pass
        return
    try:
        sp.monitored_barrier(timeout_s=timeout_s)
    finally:
        (folder / str(sp.get_rank())).touch()


@pytest.mark.process
def test_monitored_barrier_names_missing_ranks(tmp_path):
    with World("shm") as world:
        error = failed(world, 3, come_late, tmp_path, 0.3)
        assert isinstance(error.__cause__, DeadlineError)
        assert error.__cause__.facts["missing"] == [1]
        assert error.__cause__.facts["timeout_s"] == 0.3


def test_monitored_barrier_keeps_run_timeout(world):
    def program() -> float:
        sp.monitored_barrier(timeout_s=7.0)
        return current().transport.timeout_s

    assert set(world.run(2, program)) == {20.0}
    for wrong in (0, -1.0, float("nan")):
        with refused(InputError):
            sp.monitored_barrier(timeout_s=wrong)


# --- on the tape ------------------------------------------------------------------------------------


def test_gradients_of_different_sizes(world):
    def program() -> Any:
        me, size = sp.get_rank(), sp.get_world_size()
        rng = np.random.default_rng(me)
        x = sp.Tensor(rng.integers(-4, 5, (sum(range(me, me + size)), 2)).astype("f8"), requires_grad=True)
        splits = [me + j for j in range(size)]
        y = F.all_to_all(x, input_splits=splits, output_splits=splits)
        z = F.all_gather(x, uneven=True)
        part = F.reduce_scatter(z, input_splits=[1, len(z.data) - 1, *[0] * (size - 2)])
        results = y, z, part
        weights = [rng.integers(-4, 5, t.shape).astype("f8") for t in results]
        sum((t * w).sum() for t, w in zip(results, weights, strict=True)).backward()
        product = sum(float((t.data * w).sum()) for t, w in zip(results, weights, strict=True))
        return product, float((x.data * x.grad.data).sum())

    products = list(world.run(3, program))
    assert sum(a for a, _ in products) == sum(b for _, b in products)


# --- failures ---------------------------------------------------------------------------------------


def uneven_calls() -> None:
    x = np.ones(1 + sp.get_rank())
    sp.all_gather(x, uneven=True)
    sp.gather(x, uneven=True)
    sp.scatter(
        [np.ones(1 + i) for i in range(sp.get_world_size())], uneven=True
    ) if sp.get_rank() == 0 else sp.scatter()
    sp.all_to_all(np.ones(sp.get_world_size()), output_splits=[1] * sp.get_world_size())
    sp.scan(x[:1])
    sp.exscan(x[:1])


@pytest.mark.parametrize("phase", ["enter", "published", "reduce", "returned"])
@pytest.mark.parametrize("op", ["all_gather", "gather", "scatter", "all_to_all", "scan", "exscan"])
def test_rank_that_fails_in_the_middle_is_named(op, phase, monkeypatch):
    monkeypatch.setenv("SIMPARALLEL_FAULT", f"rank=0;op={op};phase={phase};action=raise")
    with pytest.raises(RunFailedError) as caught:
        sp.launch(uneven_calls, world_size=3, transport="inline", echo=False)
    assert caught.value.rank == 0
    assert "InjectedFault" in caught.value.reports[0]["summary"]


def alone_in(number: int) -> None:
    calls = [
        lambda: sp.all_gather(np.ones(2), uneven=True), lambda: sp.all_to_all(np.ones(2), input_splits=[1, 1]),
        lambda: sp.scan(np.ones(2)), lambda: sp.new_group([0, 1], use_local_synchronization=True),
    ]  # fmt: skip
    if sp.get_rank():
        calls[number]()
    else:
        sp.recv(np.ones(1), 1)


@pytest.mark.parametrize(
    ("number", "name"), list(enumerate(["all_gather", "all_to_all", "scan(sum)", "new_group([0, 1]"]))
)
def test_ranks_that_wait_for_each_other(world, number, name):
    error = failed(world, 2, alone_in, number)
    assert isinstance(error.__cause__, DeadlockError)
    assert name in error.__cause__.facts["waiting"][1]
