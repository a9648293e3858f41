"""One contract for all transports: collectives match one line of NumPy."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial, reduce as fold
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import oracles
import pytest
from hypothesis import given, settings, strategies as st
from oracles import OPS, World
from refusals import refused

import simparallel as sp
from simparallel.clock.recorder import WorkPrice, current_recorder
from simparallel.comm.direct import direct
from simparallel.comm.memory.segment import FAILED, SLOT_BYTES, SharedSegment
from simparallel.comm.shm import transport as shm
from simparallel.comm.transport import Condition
from simparallel.errors import CommError, DTypeError, RunFailedError
from simparallel.machine.cluster import describe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # devices need not import Hypothesis

NUMBERS = tuple(
    np.dtype(name)
    for name in (
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex64",
        "complex128",
        "longdouble",
    )
)
OTHERS = (
    np.dtype("M8[s]"), np.dtype("m8[ns]"), np.dtype("S5"), np.dtype("U3"), np.dtype(">i4"),
    np.dtype([("a", "<i2"), ("b", "<f8")]),
    np.dtype({"names": ["b", "a"], "formats": ["f4", "i4"], "offsets": [4, 0]}),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]}), np.dtype("S100000"),
)  # fmt: skip
LARGE = ((SLOT_BYTES // 8 + 1,), (4099,), (3, 2731), (1, 40_000), (131_100,))
LAYOUTS = ("plain", "transposed", "strided", "reversed", "shared", "shared view")
IN_PLACE = ("all_reduce", "broadcast", "reduce")
ROOTED = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src"}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


# --- programs on the ranks --------------------------------------------------------------------------


def values(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return small integers in any dtype: sums and products of a few are exact."""
    rng = np.random.default_rng(seed)
    if dtype.names:
        out = np.empty(shape, dtype)
        for name in dtype.names:
            out[name] = values(seed, shape, dtype[name])
        return out
    low, high = {"b": (0, 2), "u": (0, 5)}.get(dtype.kind, (-4, 5))
    integers = rng.integers(low, high, shape)
    if dtype.kind == "c":
        integers = integers + 1j * rng.integers(low, high, shape)
    return np.asarray(integers).astype(dtype)


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """Return the same values with other strides or in other memory."""
    if layout == "transposed":
        return x.T.copy().T
    if layout == "strided":
        out = np.zeros((*x.shape, 2), x.dtype)[..., 1]
    elif layout == "reversed":
        out = np.zeros_like(x)[(..., *(slice(None, None, -1),) * x.ndim)]
    elif layout == "shared":
        out = sp.empty(x.shape, x.dtype, shared=True)
    elif layout == "shared view":
        out = sp.empty(x.size + 5, x.dtype, shared=True)[3 : 3 + x.size].reshape(x.shape)
    else:
        return x
    out[...] = x
    return out


@dataclass(frozen=True)
class Case:
    name: str
    size: int
    ranks: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: np.dtype
    layout: str
    seed: int
    is_async: bool
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(self.size))

    def inputs(self) -> list[Any]:
        """Return the input of each position in the group."""
        if self.name == "scatter":
            return [[values(self.seed + i, self.shape, self.dtype) for i, _ in enumerate(self.members)]] * len(
                self.members
            )
        return [values(self.seed + i, self.shape, self.dtype) for i, _ in enumerate(self.members)]

    def expected(self) -> list[Any]:
        kwargs = dict(self.kwargs)
        if self.name in ROOTED:
            kwargs["root"] = self.members.index(kwargs.pop(ROOTED[self.name]))
        return getattr(oracles, self.name)(self.inputs(), **kwargs)


def perform(case: Case) -> Any:
    """Make the call; return (result, the input afterwards)."""
    group = None if case.ranks is None else sp.new_group(case.ranks)
    if case.ranks is not None and group.rank is None:
        return "outside"
    me = sp.get_rank() if group is None else group.rank
    call = partial(getattr(sp, case.name), group=group, async_op=case.is_async, **case.kwargs)
    if case.name == "scatter":
        x = [laid_out(part, case.layout) for part in case.inputs()[me]]
        result = call(x if sp.get_rank() == case.kwargs["src"] else None)
    else:
        x = laid_out(case.inputs()[me], case.layout)
        result = call(x)
    if case.is_async:
        assert isinstance(result, sp.Work)
        again = result.wait()
        assert result.wait() is again
        assert result.is_completed()
        result = again
    if case.name in IN_PLACE:
        assert result is x
        return np.array(result)
    parts = x if isinstance(x, list) else [x]
    for part, before in zip(parts, [case.inputs()[me]] if parts[0] is x else case.inputs()[me], strict=True):
        assert np.array_equal(part, before), "an input was changed"
        for out in result if isinstance(result, list) else [] if result is None else [result]:
            assert not np.shares_memory(out, part), "a result lies in the memory of an input"
            assert out.flags.writeable
    return result


@st.composite
def cases(draw: Any, name: str, max_size: int) -> Case:
    size = draw(st.integers(1, max_size))
    ranks = None
    if draw(st.booleans()):
        ranks = tuple(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
    members = ranks or tuple(range(size))
    dims_needed = name in ("all_gather", "reduce_scatter", "all_to_all")
    small = st.lists(st.integers(0, 5), min_size=dims_needed, max_size=3).map(tuple)
    shape = draw(small if draw(st.integers(0, 3)) else st.sampled_from(LARGE))
    kwargs: dict[str, Any] = {}
    if name in ROOTED:
        kwargs[ROOTED[name]] = draw(st.sampled_from(members))
    dims = st.integers(-len(shape), len(shape) - 1)
    if name in ("all_gather", "reduce_scatter"):
        kwargs["dim"] = draw(dims)
    if name == "all_to_all":
        kwargs["split_dim"], kwargs["concat_dim"] = draw(dims), draw(dims)
    if name in ("reduce_scatter", "all_to_all"):
        cut = kwargs.get("dim", kwargs.get("split_dim")) % len(shape)
        shape = (*shape[:cut], shape[cut] * len(members), *shape[cut + 1 :])
    dtype = draw(st.sampled_from(NUMBERS))
    if name in REDUCING:
        integer, real = dtype.kind in "bui", dtype.kind in "fc"
        kwargs["op"] = draw(
            st.sampled_from(
                [op for op in OPS if not (op == "mean" and not real or op in ("and", "or") and not integer)]
            )
        )
    layout, seed, is_async = draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 999)), draw(st.booleans())
    return Case(name, size, ranks, shape, dtype, layout, seed, is_async, kwargs)


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert isinstance(got, list)
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif expected is None:
        assert got is None
    else:
        assert isinstance(got, np.ndarray)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(got, expected)


def assert_case(world: World, case: Case) -> None:
    results = world.run(case.size, perform, case)
    expected = case.expected()
    for rank, result in enumerate(results):
        if rank in case.members:
            assert_same(result, expected[case.members.index(rank)])
        else:
            assert result == "outside"


# --- the contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
)
def test_matches_numpy(world, name):
    world.check(cases(name, world.max_size), lambda case: assert_case(world, case))


def reduce_everything(size: int, num_elements: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for dtype in (*NUMBERS, *OTHERS[:-1]):
        for op in OPS:
            x = values(sp.get_rank(), (num_elements,), dtype)
            try:
                results[dtype.str, op] = sp.all_reduce(x, op)
            except DTypeError:
                results[dtype.str, op] = "refused"
    return results


@pytest.mark.parametrize("num_elements", [0, 1, 7, SLOT_BYTES + 3])
def test_every_op_on_every_dtype(world, num_elements):
    size = 3
    results = world.run(size, reduce_everything, size, num_elements)
    for dtype in NUMBERS:
        xs = [values(rank, (num_elements,), dtype) for rank in range(size)]
        for op in OPS:
            without_meaning = (op == "mean" and dtype.kind not in "fc") or (
                op in ("and", "or") and dtype.kind not in "bui"
            )
            for result in results:
                if without_meaning:
                    assert isinstance(result[dtype.str, op], str)
                else:
                    assert_same(result[dtype.str, op], oracles.reduced(xs, op))
    for result in results:
        for dtype in OTHERS[:-1]:
            possible = {"M": ("max", "min"), "m": ("sum", "max", "min")}.get(dtype.kind, ())
            if dtype.kind != "i":
                assert [op for op in OPS if not isinstance(result[dtype.str, op], str)] == list(possible)
            xs = [values(rank, (num_elements,), dtype) for rank in range(size)]
            for op in possible:
                assert_same(result[dtype.str, op], oracles.reduced(xs, op))


def all_reduce_again_and_again(piece_bytes: int, pair_bytes: int, sizes: list[int], shared: int) -> list[Any]:
    direct.PIECE_BYTES, direct.PAIR_BYTES, direct.SMALL_BYTES = piece_bytes, pair_bytes, pair_bytes
    me, results = sp.get_rank(), []
    for number, num_elements in enumerate(sizes):
        x = sp.empty(num_elements, np.int64, shared=bool(shared >> me & 1))
        x[...] = values(me + number, (num_elements,), x.dtype)
        results.append(sp.all_reduce(x).copy())
    return results


@given(st.data())
@settings(max_examples=40)
def test_large_arrays_in_pieces(data):
    """Sizes change between calls, pieces are uneven, and some ranks show their own array."""
    item_bytes, least = 8, SLOT_BYTES // 8 + 1
    sizes = data.draw(st.lists(st.integers(least, 4 * least), min_size=1, max_size=6))
    piece_bytes = item_bytes * data.draw(st.integers(least // 8, 2 * least))
    pair_bytes = data.draw(st.sampled_from([0, item_bytes * 2 * least]))
    shared, size = data.draw(st.integers(0, 7)), data.draw(st.sampled_from([2, 2, 3]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "PIECE_BYTES", piece_bytes)  # threads share the module, which is restored afterwards
        patch.setattr(direct, "PAIR_BYTES", pair_bytes)
        patch.setattr(direct, "SMALL_BYTES", pair_bytes)
        program = all_reduce_again_and_again
        results = sp.launch(program, (piece_bytes, pair_bytes, sizes, shared), world_size=size, transport="inline")
    for number, num_elements in enumerate(sizes):
        xs = [values(rank + number, (num_elements,), np.dtype(np.int64)) for rank in range(size)]
        for result in results:
            assert_same(result[number], oracles.reduced(xs, "sum"))


@pytest.mark.parametrize("shared", range(4))
def test_two_ranks_may_show_large_arrays_differently(world, monkeypatch, shared):
    sizes, limits = [20_000, 70_001, 5_000, 70_001, 33_333], (40_008, 60_000)
    for name in ("PIECE_BYTES", "PAIR_BYTES", "SMALL_BYTES"):
        monkeypatch.setattr(direct, name, None)  # threads share the module, which is restored afterwards
    results = world.run(2, all_reduce_again_and_again, *limits, sizes, shared)
    for number, num_elements in enumerate(sizes):
        xs = [values(rank + number, (num_elements,), np.dtype(np.int64)) for rank in range(2)]
        for result in results:
            assert_same(result[number], oracles.reduced(xs, "sum"))


def move_everything(shape: tuple[int, ...]) -> list[Any]:
    me, size, results = sp.get_rank(), sp.get_world_size(), []
    for dtype in (*NUMBERS, *OTHERS):
        x = values(me, shape, dtype)
        received = np.zeros_like(x)
        sp.send(x, (me + 1) % size)
        sp.recv(received, (me - 1) % size)
        moved = [
            sp.broadcast(x.copy(), src=1), sp.all_gather(x), sp.all_to_all(x), sp.gather(x, dst=1), received,
        ]  # fmt: skip
        if dtype.names is None and len(dtype.str) < 8:
            moved.append(sp.scatter([x, x[::-1]] if me == 1 else None, src=1))
        results.append(moved)
    return results


@pytest.mark.parametrize("shape", [(2,), (4, 3)])
def test_every_dtype_moves(world, shape):
    results = world.run(2, move_everything, shape)
    for i, dtype in enumerate((*NUMBERS, *OTHERS)):
        xs = [values(rank, shape, dtype) for rank in range(2)]
        expected = [
            oracles.broadcast(xs, 1), oracles.all_gather(xs), oracles.all_to_all(xs), oracles.gather(xs, 1),
            [xs[1], xs[0]], oracles.scatter([None, [xs[1], xs[1][::-1]]], 1),
        ]  # fmt: skip
        for rank, result in enumerate(results):
            for got, wanted in zip(result[i], expected, strict=False):
                if dtype.byteorder == ">":  # joined arrays have this machine's byte order, others their own
                    got, wanted = native(got), [native(one) for one in wanted]
                assert_same(got, wanted[rank])


def native(value: Any) -> Any:
    if isinstance(value, list):
        return [native(one) for one in value]
    return value if value is None else value.astype(value.dtype.newbyteorder("="))


def test_scatter_refuses_unannounceable_arrays(world):
    with refused(RunFailedError):
        world.run(2, lambda: sp.scatter([np.ones(1, [("a", "<i4")])] * 2 if sp.get_rank() == 0 else None))
    with refused(RunFailedError):
        world.run(2, lambda: sp.scatter([np.ones((1,) * 9)] * 2 if sp.get_rank() == 0 else None))


def test_scalars_come_as_arrays(world):
    def program():
        x = np.array(sp.get_rank() + 1.0)
        parts = [np.array(5.0), np.array(6.0)] if sp.get_rank() == 0 else None
        return [sp.scatter(parts), sp.all_reduce(x.copy()), sp.gather(x, dst=1), sp.broadcast(x.copy(), src=1)]

    first, second = world.run(2, program)
    assert_same(first, [np.array(5.0), np.array(3.0), None, np.array(2.0)])
    assert_same(second, [np.array(6.0), np.array(3.0), [np.array(1.0), np.array(2.0)], np.array(2.0)])


def test_more_dims_than_a_header_holds(world):
    shape = (2,) * 11

    def program():
        x = values(sp.get_rank(), shape, np.dtype(np.int64))
        out = np.zeros_like(x)
        sp.send(x, 1 - sp.get_rank())
        return [sp.all_gather(x, dim=9), sp.all_to_all(x, 10, 0), sp.recv(out, 1 - sp.get_rank()), sp.all_reduce(x)]

    xs = [values(rank, shape, np.dtype(np.int64)) for rank in range(2)]
    expected = [oracles.all_gather(xs, 9), oracles.all_to_all(xs, 10, 0), xs[::-1], oracles.all_reduce(xs)]
    for rank, result in enumerate(world.run(2, program)):
        assert_same(result, [wanted[rank] for wanted in expected])


# --- bits -------------------------------------------------------------------------------------------


def random_sums(order: tuple[int, ...], shape: tuple[int, ...]) -> list[bytes]:
    """Return results on floats that round: the bits reveal the order of the additions."""
    group, results = sp.new_group(order), []
    for name in ("float16", "float32", "float64", "complex64"):
        for op in ("sum", "mean", "prod"):
            x = floats(sp.get_rank(), shape, name)
            results.append(sp.all_reduce(x, op, group=group).tobytes())
    return results


def floats(rank: int, shape: tuple[int, ...], name: str) -> np.ndarray:
    rng = np.random.default_rng(rank)
    return np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 1, shape)).astype(name)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (5, 3), (9000,), (70_001,)])
def test_reductions_are_bitwise_reproducible(world, order, shape):
    """All ranks, runs and transports give the same bits, reduced in the order of the group."""
    runs = [world.run(4, random_sums, order, shape) for _ in range(2)]
    expected = []
    for name in ("float16", "float32", "float64", "complex64"):
        for op in ("sum", "mean", "prod"):
            xs = [floats(rank, shape, name) for rank in order]
            expected.append(oracles.reduced(xs, op).tobytes())
    for run in runs:
        for result in run:
            assert result == expected


def test_order_of_reduce_and_reduce_scatter(world):
    """Both fold the ranks in the same order, wherever a result is stored."""

    def program():
        x = floats(sp.get_rank(), (6, 9), "float64")
        strided = laid_out(x, "strided")
        return [
            sp.reduce(x.copy(), dst=1), sp.reduce(strided, dst=1), sp.reduce_scatter(x), sp.reduce_scatter(x, dim=1),
        ]  # fmt: skip

    total = fold(np.add, [floats(rank, (6, 9), "float64") for rank in range(3)])
    for rank, result in enumerate(world.run(3, program)):
        if rank == 1:
            assert result[0].tobytes() == result[1].tobytes() == total.tobytes()
        assert result[2].tobytes() == total[2 * rank : 2 * rank + 2].tobytes()
        assert result[3].tobytes() == total[:, 3 * rank : 3 * rank + 3].tobytes()


# --- several works at once --------------------------------------------------------------------------


@st.composite
def overlapped(draw: Any, max_size: int) -> Any:
    """Draw (size, order of the group, calls, order of waiting per rank).

    A call is (name, in the group?, elements, layout, blocking?).
    """
    size = draw(st.integers(2, max_size))
    order = tuple(draw(st.permutations(range(size))))
    call = st.tuples(
        st.sampled_from(("all_reduce", "all_gather", "broadcast")),
        st.booleans(),
        st.sampled_from((1, 5, 3000, 20_000)),
        st.sampled_from(LAYOUTS),
        st.integers(0, 3).map(lambda n: n == 0),
    )
    calls = draw(st.lists(call, min_size=1, max_size=6))
    waits = [draw(st.permutations(range(len(calls)))) for _ in range(size)]
    return size, order, calls, waits


def overlap(order: tuple[int, ...], calls: list[Any], waits: list[Any]) -> list[Any]:
    group, works, results = sp.new_group(order), [], [None] * len(calls)
    for i, (name, in_group, num_elements, layout, is_blocking) in enumerate(calls):
        x = laid_out(values(100 * i + sp.get_rank(), (num_elements,), np.dtype(np.float64)), layout)
        kwargs = {"group": group if in_group else None, "async_op": not is_blocking}
        result = getattr(sp, name)(x, **kwargs)
        works.append(None if is_blocking else result)
        if is_blocking:
            results[i] = np.array(result)
    for i in waits[sp.get_rank()]:
        if works[i] is not None:
            results[i] = np.array(works[i].wait())
    return results


def test_works_may_be_waited_for_in_any_order(world):
    def body(case):
        size, order, calls, waits = case
        results = world.run(size, overlap, order, calls, waits)
        for i, (name, in_group, num_elements, _, _) in enumerate(calls):
            members = order if in_group else tuple(range(size))
            xs = [values(100 * i + rank, (num_elements,), np.dtype(np.float64)) for rank in members]
            kwargs = {"root": members.index(0)} if name == "broadcast" else {}
            expected = getattr(oracles, name)(xs, **kwargs)
            for rank, result in enumerate(results):
                assert_same(result[i], expected[members.index(rank)])

    world.check(overlapped(world.max_size), body)


def test_unfinished_works_end_with_the_run(world):
    def program():
        kept = np.full(50_000, sp.get_rank() + 1.0)
        sp.all_reduce(kept, async_op=True)
        return kept

    assert len(world.run(3, program)) == 3
    events = [event for event in world.run(3, program).trace.events if event.name == "all_reduce"]
    assert len(events) == 3


def test_shared_array_may_be_changed_after_the_call(world):
    """Peers read a shared array in place, so the call returns only after they have read it."""

    def program(num_elements):
        x = sp.empty(num_elements + 7, np.float64, shared=True)[7:]
        results = []
        for i in range(12):
            x[...] = sp.get_rank() + i
            sp.all_reduce(x)
            results.append((x.min(), x.max()))
            x[...] = sp.get_rank() - i
            y = sp.all_gather(x)
            x[...] = -1e9
            results.append((y[::num_elements].tolist(), y.sum()))
            x[...] = i
            sp.broadcast(x, src=i % sp.get_world_size())
            x[...] = -1e9
        return results

    for num_elements in (3000, 60_000):
        for size in (2, 3):
            for result in world.run(size, program, num_elements):
                for i in range(12):
                    total = sum(range(size)) + size * i
                    assert result[2 * i] == (total, total)
                    ranks = [float(rank - i) for rank in range(size)]
                    assert result[2 * i + 1] == (ranks, sum(ranks) * num_elements)


def test_staging_memory_grows_and_shrinks(world):
    """Sizes go up and down, so that both staging copies are replaced while peers read the other one."""

    def program():
        sizes = [3000, 9000, 2500, 40_000, 2100, 70_000, 3, 2100, 90_000]
        return [sp.all_reduce(np.full(n, sp.get_rank() + 1.0)).mean() for n in sizes * 3]

    for result in world.run(3, program):
        assert result == [6.0] * 27


# --- messages ---------------------------------------------------------------------------------------


@st.composite
def mail(draw: Any, max_size: int) -> Any:
    """Draw (size, messages, seed); a message is (src, dst, tag, elements, dtype)."""
    size = draw(st.integers(1, max_size))
    rank = st.integers(0, size - 1)
    message = st.tuples(
        rank, rank, st.integers(0, 2), st.sampled_from((0, 1, 7, 5000)), st.sampled_from(("float32", "int64", "bool"))
    )
    return (size, draw(st.lists(message, max_size=12)) * draw(st.sampled_from((1, 1, 9))), draw(st.integers(0, 9)))


def deliver(messages: list[Any], seed: int) -> dict[int, np.ndarray]:
    me = sp.get_rank()
    rng = np.random.default_rng([seed, me])
    sends, receives = [], {}
    channels: dict[Any, list[int]] = {}
    for i, (src, dst, tag, n, dtype) in enumerate(messages):
        if dst == me:
            channels.setdefault((src, tag), []).append(i)
        if src == me:
            sends.append(sp.isend(values(i, (n,), np.dtype(dtype)), dst, tag))
    for channel in rng.permutation(len(channels)):  # tags in any order; within a tag, in the order of sending
        for i in list(channels.values())[channel]:
            src, _, tag, n, dtype = messages[i]
            receives[i] = sp.irecv(np.zeros(n, dtype), src, tag)
    works = [*sends, *receives.values()]
    for i in rng.permutation(len(works)):
        works[i].wait()
    return {i: work.wait() for i, work in receives.items()}


def test_messages_arrive_by_tag_and_in_order(world):
    def body(case):
        size, messages, seed = case
        results = world.run(size, deliver, messages, seed)
        for i, (_, dst, _, n, dtype) in enumerate(messages):
            assert_same(results[dst][i], values(i, (n,), np.dtype(dtype)))

    world.check(mail(world.max_size), body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_any_layout(world, layout):
    def program():
        x = laid_out(values(sp.get_rank(), (4, 5, 3), np.dtype(np.int32)), layout)
        before = x.copy()
        sp.send(x, 1 - sp.get_rank())
        assert np.array_equal(x, before)
        out = laid_out(np.zeros((4, 5, 3), np.int32), layout)
        x[...] = 99  # a sent array may be changed immediately
        assert sp.recv(out, 1 - sp.get_rank()) is out
        return out.copy()

    xs = [values(rank, (4, 5, 3), np.dtype(np.int32)) for rank in range(2)]
    for rank, result in enumerate(world.run(2, program)):
        assert_same(result, xs[1 - rank])


def test_blocking_sends_advance_the_clock(world):
    """A blocking send takes the price of its message on the simulated clock, also when the message slots are full."""

    def program(count):
        for i in range(count):
            if sp.get_rank() == 0:
                sp.send(np.full(1000, i), 1)
        if sp.get_rank() == 1:
            for _ in range(count):
                sp.recv(np.empty(1000, np.int64), 0)
        return current_recorder().now_ps

    for count in (1, 16, 17, 40):
        cost_ps = describe(2).message(8000, 0, 1).time_ps
        assert list(world.run(2, program, count)) == [count * cost_ps] * 2


BYTE_ORDER_CALLS: dict[str, Any] = {
    "all_gather": sp.all_gather,
    "all_gather by ring": lambda x: sp.all_gather(x, algorithm="ring"),
    "reduce_scatter": sp.reduce_scatter,
    "reduce_scatter of dim 1": lambda x: sp.reduce_scatter(x, dim=1),
    "reduce_scatter by ring": lambda x: sp.reduce_scatter(x, algorithm="ring"),
    "all_to_all": sp.all_to_all,
    "all_to_all by naive": lambda x: sp.all_to_all(x, algorithm="naive"),
    "gather": lambda x: (sp.gather(x) or [x.astype("=f4")])[-1],
    "gather by naive": lambda x: (sp.gather(x, algorithm="naive") or [x.astype("=f4")])[-1],
    "scatter": lambda x: sp.scatter(None if sp.get_rank() else [x] * sp.get_world_size()),
}


@pytest.mark.parametrize("columns", [6, 6000])
@pytest.mark.parametrize("name", BYTE_ORDER_CALLS)
def test_new_arrays_have_native_byte_order(world, name, columns):
    def program():
        call = BYTE_ORDER_CALLS[name]
        x = np.arange(6 * columns, dtype="=f4").reshape(6, columns) + sp.get_rank()
        found, wanted = call(x.astype(x.dtype.newbyteorder())), call(x)
        return found.dtype == x.dtype and np.array_equal(found, wanted)

    for size in (1, 2, 3):
        assert list(world.run(size, program)) == [True] * size


# --- objects, Tensors, groups -----------------------------------------------------------------------


def test_objects(world):
    def program(order):
        group, me = sp.new_group(order), sp.get_rank()
        value = {"rank": me, "text": "é" * (me * 50), "array": np.arange(me)}
        if group.rank is None:
            return None
        gathered = sp.all_gather_object(value, group)
        root = order[-1]
        at_root = sp.gather_object(("from", me), dst=root, group=group)
        sent = sp.broadcast_object(value if me == root else None, src=root, group=group)
        return [v["rank"] for v in gathered], [len(v["text"]) for v in gathered], at_root, sent["rank"]

    for order in [(0,), (2, 0), (0, 1, 2), (1, 2, 0)]:
        for rank, result in enumerate(world.run(3, program, order)):
            if rank not in order:
                assert result is None
                continue
            at_root = [("from", r) for r in order] if rank == order[-1] else None
            assert result == (list(order), [50 * r for r in order], at_root, order[-1])


def test_read_only_inputs_are_accepted(world):
    """A read-only array may be passed wherever the call does not write."""

    def program():
        x = np.arange(3.0) + sp.get_rank()
        x.flags.writeable = sp.get_rank() != 1
        reduced = sp.reduce(x, dst=0).copy()
        return reduced, sp.broadcast(x, src=1), sp.all_gather(x)

    for _, copied, _ in world.run(3, program):
        assert_same(copied, np.arange(3.0) + 1)


def test_collectives_accept_tensors(world):
    def program():
        x, y, z = (sp.Tensor(np.full(3, sp.get_rank() + 1.0)) for _ in range(3))
        assert sp.all_reduce(x) is x
        work = sp.broadcast(y, src=1, async_op=True)
        assert "broadcast" in repr(work)
        assert work.wait() is y
        assert work.finished
        assert work.result is y
        return x.data, y.data, sp.all_gather(z)

    for x, y, z in world.run(2, program):
        assert_same(x, np.full(3, 3.0))
        assert_same(y, np.full(3, 2.0))
        assert_same(z, np.repeat([1.0, 2.0], 3))


def test_number_of_groups_is_limited(world):
    def program():
        groups = [sp.new_group([1, 0]) for _ in range(63 + 4 * 2)]
        total = sp.all_reduce(np.ones(3), group=groups[-1])[0]
        with refused(CommError):
            sp.new_group([0])
        return total, sp.all_reduce(np.ones(1))[0]

    assert list(world.run(2, program)) == [(2.0, 2.0)] * 2
    assert list(world.run(2, program)) == [(2.0, 2.0)] * 2  # the next run has all groups again


def test_new_groups_leave_no_plans(world):
    """A plan has bytes for each rank: kept for each of 299 groups of 301 ranks, they took gigabytes."""

    def program():
        from simparallel.comm import current

        groups = [sp.new_group([1, 0]) for _ in range(9)]
        return len(groups), len(current().groups[0].direct.plans)

    assert list(world.run(2, program)) == [(9, 0)] * 2


def test_memory_of_a_run_is_freed(world):
    """Staging and messages: fifty runs need no more memory than one."""

    def program():
        from simparallel.comm import current

        sp.all_reduce(np.ones(100_000))
        sp.send(np.ones(1000), 1 - sp.get_rank())
        sp.recv(np.empty(1000), 1 - sp.get_rank())
        x = sp.empty(1000, shared=True)
        del x
        return len(current().transport.arena._sizes)

    first = list(world.run(2, program))
    for _ in range(5):
        assert list(world.run(2, program)) == first


# --- events -----------------------------------------------------------------------------------------


def eventful(order: tuple[int, ...]) -> None:
    recorder, me = current_recorder(), sp.get_rank()
    group = sp.new_group(order)
    for i, step in enumerate((3, 1, 2)):
        recorder.compute("work", "forward", 0, 0, WorkPrice(1_000_000 * step * (me + i) % 7, 0))
        sp.all_reduce(np.ones(1000, np.float32))
        if group.rank is not None:
            sp.all_gather(np.ones((3, 2)), group=group)
            sp.broadcast(np.ones(5), src=order[1], group=group)
    x = [np.ones(6)] * 3 if me == 2 else None
    sp.scatter(x, src=2)
    sp.gather(np.ones(7), dst=1)
    sp.reduce(np.ones(8), dst=2)
    sp.reduce_scatter(np.ones(9))
    sp.all_to_all(np.ones(12, np.int16))
    sp.barrier()


def test_every_collective_is_one_event_on_every_rank(world):
    order = (2, 0)
    results = world.run(3, eventful, order)
    spec, events = describe(3), results.trace.events
    world_calls = [
        ("new_group", 0, 0), *[("all_reduce", 4000, 0)] * 3, ("scatter", 144, 2), ("gather", 168, 1),
        ("reduce", 64, 2), ("reduce_scatter", 72, 0), ("all_to_all", 24, 0), ("barrier", 0, 0),
    ]  # fmt: skip
    group_calls = [("all_gather", 96, 0), ("broadcast", 40, 1)] * 3
    for stream, calls, members in (("comm world", world_calls, (0, 1, 2)), ("comm 1", group_calls, order)):
        for rank in range(3):
            own = [event for event in events if event.rank == rank and event.stream == stream]
            own.sort(key=lambda event: event.seq)
            if rank not in members:
                assert own == []
                continue
            assert [event.seq for event in own] == list(range(1, len(calls) + 1))
            for event, (name, size_bytes, root) in zip(own, calls, strict=True):
                cost = spec.collective(name, size_bytes, members, position=members.index(rank), root=root)
                assert (event.name, event.kind, event.size_bytes, event.group) == (
                    name,
                    "collective",
                    size_bytes,
                    members,
                )
                assert event.sent_bytes == cost.sent_bytes
                assert event.sim_end_ps - event.sim_start_ps == cost.time_ps
                assert event.wall_start_ns <= event.wall_end_ns
            for before, after in pairwise(own):
                assert before.sim_end_ps <= after.sim_start_ps


def test_collective_starts_with_its_last_rank(world):
    def program(costs):
        recorder, ready = current_recorder(), []
        for i in range(4):
            recorder.compute("work", "forward", 0, 0, WorkPrice(costs[sp.get_rank()][i], 0))
            ready.append(recorder.now_ps)
            sp.all_reduce(np.ones(10 + i))
        return ready

    costs = [[5, 10**7, 3, 0], [10**6, 1, 2, 0], [7, 8, 10**8, 0]]
    results = world.run(3, program, costs)
    for seq in range(1, 5):
        events = [event for event in results.trace.events if event.seq == seq]
        starts = {(event.sim_start_ps, event.sim_end_ps) for event in events}
        assert len(events) == 3
        assert len(starts) == 1
        assert starts.pop()[0] == max(ready[seq - 1] for ready in results)


def test_overlapped_collective_delays_only_its_wait(world):
    def program():
        recorder = current_recorder()
        work = sp.all_reduce(np.ones(1000), async_op=True)
        recorder.compute("work", "forward", 0, 0, WorkPrice(1000, 0))
        at_wait = recorder.now_ps
        work.wait()
        after_wait = recorder.now_ps
        second = sp.all_reduce(np.ones(1000), async_op=True)
        recorder.compute("work", "forward", 0, 0, WorkPrice(10**12, 0))
        second.wait()
        return at_wait, after_wait, recorder.now_ps

    cost_ps = describe(2).collective("all_reduce", 8000, (0, 1)).time_ps
    for result in world.run(2, program):
        assert result == (1000, cost_ps, cost_ps + 10**12)


def test_groups_overlap_on_the_clock(world):
    """On the simulated clock, the works of one group are sequential and those of two groups overlap."""

    def program():
        group = sp.new_group([1, 0])
        start_ps = current_recorder().now_ps
        works = [sp.all_reduce(np.ones(1000), group=g, async_op=True) for g in (None, group, None, group)]
        for work in works:
            work.wait()
        return start_ps, current_recorder().now_ps

    results = world.run(2, program)
    cost_ps = describe(2).collective("all_reduce", 8000, (0, 1)).time_ps
    for rank, (start_ps, end_ps) in enumerate(results):
        assert end_ps == start_ps + 2 * cost_ps
        for stream in ("comm world", "comm 1"):
            own = [e for e in results.trace.events if (e.rank, e.stream, e.name) == (rank, stream, "all_reduce")]
            assert sorted(e.sim_start_ps for e in own) == [start_ps, start_ps + cost_ps]


def test_barrier_waits_for_all_ranks(world):
    events = world.run(3, lambda: [sp.barrier() for _ in range(30)] and None).trace.events
    for seq in range(1, 31):
        barrier = [event for event in events if event.seq == seq]
        assert len(barrier) == 3
        assert max(event.wall_start_ns for event in barrier) <= min(event.wall_end_ns for event in barrier)


def test_simulated_timeline_is_reproducible(world):
    def timeline():
        events = world.run(3, eventful, (2, 0)).trace.events
        return sorted((e.rank, e.stream, e.seq, e.name, e.sim_start_ps, e.sim_end_ps, e.sent_bytes) for e in events)

    first = timeline()
    assert timeline() == first
    with World("inline") as other:
        events = other.run(3, eventful, (2, 0)).trace.events
    assert first == sorted(
        (e.rank, e.stream, e.seq, e.name, e.sim_start_ps, e.sim_end_ps, e.sent_bytes) for e in events
    )


# --- waiting ----------------------------------------------------------------------------------------


class Changing:
    """Words of which one reaches its target between two looks at it; then its rank fails, if `state` is given."""

    def __init__(self, index: int, target: int, looks: int, state: int | None = None) -> None:
        self.index, self.target, self.looks, self.state = index, target, looks, state

    def __getitem__(self, index: int) -> int:
        if index == self.state and self.looks <= 0:
            return FAILED
        if index != self.index:
            return 0
        self.looks -= 1
        return self.target if self.looks < 0 else self.target - 1

    def __setitem__(self, index: int, value: int) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("looks", range(6))
def test_wait_survives_change_between_looks(looks, fails):
    """A waiting rank does not miss a word that changes between any two looks, also if the rank that wrote it fails."""
    segment = SharedSegment(2, arena_bytes=4 << 20)
    segment.write_record(1, json.dumps({"summary": "ValueError: after the call"}))
    transport = shm.ShmTransport(segment, 0)
    transport._futex = SimpleNamespace(sleep=lambda index, value: None)
    index = segment.map.mark(0, 1, 0)
    transport.words = Changing(index, 5, looks, segment.map.state(1) if fails else None)
    transport._sleep_until_met([Condition((index,), (1,), 5)], lambda: "test")
    segment.close_fd()


def test_oracles():
    xs = [np.arange(6).reshape(2, 3) * 10**rank for rank in range(2)]
    first, second = oracles.all_to_all(xs, 0, 1)
    assert (first.tolist(), second.tolist()) == ([[0, 1, 2, 0, 10, 20]], [[3, 4, 5, 30, 40, 50]])
    assert oracles.reduce_scatter(xs, 0)[1].tolist() == [[33, 44, 55]]
    assert oracles.all_gather(xs, 1)[0].tolist() == [[0, 1, 2, 0, 10, 20], [3, 4, 5, 30, 40, 50]]
    assert oracles.reduced([np.array([1]), np.array([2])], "max").tolist() == [2]
