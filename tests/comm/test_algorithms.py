"""Algorithms on messages: NumPy's results, the same bits everywhere, the textbook's messages and bytes."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import oracles
import pytest
import test_collectives
from algorithm_records import RECORDS
from hypothesis import given, strategies as st
from oracles import OPS, TRANSPORTS, World
from refusals import refused
from test_collectives import ROOTED, assert_same, cases, perform, values

import simparallel as sp
from simparallel import algorithms
from simparallel.algorithms import find, names, number_of, offers, split
from simparallel.algorithms.ledger import Ledger, StepTraffic
from simparallel.algorithms.reduction import Combine
from simparallel.algorithms.rehearsal import play, rehearse
from simparallel.comm.memory.segment import RING
from simparallel.errors import ClusterError, CollectiveMismatchError, DeadlockError, InputError, RunFailedError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec, describe

for module in (sys.modules[__name__], test_collectives):  # devices need not import Hypothesis
    cloudpickle.register_pickle_by_value(module)

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter",
)  # fmt: skip
ALGORITHMS = names()
OFFERED = [(name, op) for name in ALGORITHMS[1:] for op in COLLECTIVES if offers(name, op)]
# An algorithm need not have an all_reduce.
REDUCING = [name for name in ALGORITHMS[1:] if offers(name, "all_reduce")]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16)
# 1 ps a byte, 1000 ps a message: prices can be computed by hand.
LINK = LinkSpec(1e-9, 1e12)
DEVICE = DeviceSpec("plain", {4: 1e12}, 1e12, 10**9, 0.0)


def test_every_algorithm_has_a_record():
    assert {name: {op for other, op in OFFERED if other == name} for name in ALGORITHMS[1:]} == {
        name: set(record.sent) for name, record in RECORDS.items()
    }
    assert [number_of(name) for name in ALGORITHMS] == [*range(len(ALGORITHMS))]


# --- results, without a run ---------------------------------------------------------------------------


def played(algorithm: str, op: str, xs: list[Any], root: int, reduce_op: str) -> tuple[list[Any], Ledger]:
    """Play an algorithm on flat inputs; return the outputs of all positions in the oracles' form."""
    size, combine = len(xs), None
    if op in ("all_reduce", "reduce", "reduce_scatter"):
        combine = Combine(reduce_op, xs[0].dtype, size)
    xs = [x.copy() for x in xs]
    if op in ("all_reduce", "reduce_scatter"):
        ledger = play(algorithm, op, [(x, combine) for x in xs])
        return ([split(x, size)[i] for i, x in enumerate(xs)] if op == "reduce_scatter" else xs), ledger
    if op in ("broadcast", "reduce"):
        ledger = play(algorithm, op, [(x, root, *([combine] if combine else [])) for x in xs])
        return xs, ledger
    if op == "all_gather":
        wholes = [np.zeros(size * x.size, x.dtype) for x in xs]
        for i, x in enumerate(xs):
            split(wholes[i], size)[i][...] = x
        return wholes, play(algorithm, op, [(whole,) for whole in wholes])
    if op == "all_to_all":
        given = [np.split(x, size) for x in xs]
        taken = [[np.zeros_like(part) for part in parts] for parts in given]
        ledger = play(algorithm, op, list(zip(given, taken, strict=True)))
        return [np.concatenate(parts) for parts in taken], ledger
    rows = [
        [x.copy() if i == rank or rank == root else np.zeros_like(x) for i, x in enumerate(xs)] for rank in range(size)
    ]
    if op == "scatter":
        rows = [rows[root] if rank == root else [np.zeros_like(x) for x in xs] for rank in range(size)]
        ledger = play(algorithm, op, [(parts, root) for parts in rows])
        return [parts[i] for i, parts in enumerate(rows)], ledger
    rows[root] = [x.copy() if i == root else np.zeros_like(x) for i, x in enumerate(xs)]
    ledger = play(algorithm, op, [(parts, root) for parts in rows])
    return [parts if i == root else None for i, parts in enumerate(rows)], ledger


@st.composite
def rehearsals(draw: Any) -> Any:
    (algorithm, op), size = draw(st.sampled_from(OFFERED)), draw(st.sampled_from(SIZES))
    dtype = np.dtype(draw(st.sampled_from(("int64", "uint8", "bool", "float64", "float32", "complex128"))))
    reduce_op = draw(st.sampled_from([o for o in OPS if not (o == "mean" and dtype.kind not in "fc")]))
    if dtype.kind in "fc" and reduce_op in ("and", "or", "prod"):  # products of many factors are not exact
        reduce_op = "sum"
    num_elements = draw(st.sampled_from((0, 1, 2, 3, 7, 16, 37)))
    if op in ("reduce_scatter", "all_to_all"):
        num_elements *= size
    return (
        algorithm,
        op,
        size,
        num_elements,
        dtype,
        draw(st.integers(0, size - 1)),
        reduce_op,
        draw(st.integers(0, 99)),
    )


@given(rehearsals())
def test_algorithms_match_numpy(case):
    """Each algorithm matches NumPy, and at every step the bytes sent are the bytes received."""
    algorithm, op, size, num_elements, dtype, root, reduce_op, seed = case
    xs = [values(seed + i, (num_elements,), dtype) for i in range(size)]
    kwargs: dict[str, Any] = {"root": root} if op in ROOTED else {}
    if op in ("all_reduce", "reduce", "reduce_scatter"):
        kwargs["op"] = reduce_op
    expected = getattr(oracles, op)([xs] * size if op == "scatter" else xs, **kwargs)

    results, ledger = played(algorithm, op, xs, root, reduce_op)

    for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if op != "reduce" or i == root:  # elsewhere x is scratch
            assert_same(result, wanted)
    total = ledger.total
    assert total[:2] == total[2:]
    for steps in zip(*(entry.steps for entry in ledger.entries), strict=True):
        in_step = sum(steps, StepTraffic())
        assert in_step[:2] == in_step[2:]
        assert all(max(step.sent_messages, step.received_messages) <= 1 for step in steps)  # one port for each rank


@pytest.mark.parametrize(("algorithm", "op"), OFFERED)
@pytest.mark.parametrize("size", SIZES)
def test_every_root_and_every_uneven_size(algorithm, op, size):
    for num_elements in (0, 1, size + 1, 2 * size - 1):
        count = num_elements * size if op in ("reduce_scatter", "all_to_all") else num_elements
        xs = [values(i, (count,), np.dtype(np.int64)) for i in range(size)]
        for root in range(size if op in ROOTED else 1):
            kwargs: dict[str, Any] = {"root": root} if op in ROOTED else {}
            expected = getattr(oracles, op)([xs] * size if op == "scatter" else xs, **kwargs)
            results, _ = played(algorithm, op, xs, root, "sum")
            for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                if op != "reduce" or i == root:
                    assert_same(result, wanted)


def random_floats(size: int, num_elements: int) -> list[np.ndarray]:
    rng = np.random.default_rng(size)
    return [(rng.standard_normal(num_elements) * 10.0 ** rng.integers(-3, 4)).astype(np.float32) for _ in range(size)]


@pytest.mark.parametrize("reduce_op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("algorithm", REDUCING)
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_same_bits(algorithm, size, reduce_op):
    xs = random_floats(size, 1001)
    results, _ = played(algorithm, "all_reduce", xs, 0, reduce_op)
    assert len({result.tobytes() for result in results}) == 1
    assert np.allclose(results[0], oracles.reduced([x.astype(np.float64) for x in xs], reduce_op), rtol=1e-2, atol=1e-3)


def test_reduction_order_matches_docstrings():
    x = random_floats(8, 40)
    for algorithm in REDUCING:
        results, _ = played(algorithm, "all_reduce", x, 0, "sum")
        total = RECORDS[algorithm].total
        assert total is not None
        assert all(np.array_equal(result, total(x)) for result in results), algorithm
    folded = halving_of([x[0] + x[1], x[2] + x[3], x[4], x[5]])
    assert np.array_equal(played("halving_doubling", "all_reduce", x[:6], 0, "sum")[0][0], folded)


def halving_of(x: list[np.ndarray]) -> np.ndarray:
    return (x[0] + x[2]) + (x[1] + x[3])


def test_float16_rounding_per_step():
    """The naive algorithm rounds float16 once, tree and halving_doubling at each step."""
    xs = [np.array([x], np.float16) for x in (2048, 1, 1)]
    for algorithm, wanted in (("tree", 2048), ("halving_doubling", 2048), ("naive", 2050)):
        assert played(algorithm, "all_reduce", xs, 0, "sum")[0][2] == [wanted], algorithm


# --- the ledger -----------------------------------------------------------------------------------------


def test_ledger_of_uneven_ring_all_reduce():
    chunks = [8, 8, 12]  # 7 elements of 4 bytes on 3 ranks: 2, 2, 3
    ledger = rehearse("ring", "all_reduce", 3, 7)
    for rank, entry in enumerate(ledger.entries):
        sent = [chunks[(rank - 1 - step) % 3] for step in range(2)] + [chunks[(rank - step) % 3] for step in range(2)]
        received = [chunks[(rank - 2 - step) % 3] for step in range(2)]
        received += [chunks[(rank - 1 - step) % 3] for step in range(2)]
        assert entry.steps == tuple(StepTraffic(1, a, 1, b) for a, b in zip(sent, received, strict=True))


@pytest.mark.parametrize(("algorithm", "op"), OFFERED)
@pytest.mark.parametrize("p", SIZES)
def test_ledger_and_price_match_textbook(algorithm, op, p):
    num_elements, root = 48 * p, p // 2 if op in ROOTED else 0
    num_elements *= 2 ** (p.bit_length() - 1)  # the core divides it as well
    n = 4 * num_elements
    ledger = rehearse(algorithm, op, p, num_elements, root=root)
    spec, ranks = ClusterSpec(p, DEVICE, LINK), tuple(range(p))
    columns = [entry.steps for entry in ledger.entries]
    step_ps = [1000 + max(step.sent_bytes for step in steps) for steps in zip(*columns, strict=True)]
    for entry in ledger.entries:
        cost = spec.collective(op, n, ranks, position=entry.rank, root=root, algorithm=algorithm)
        sent = RECORDS[algorithm].sent[op](p, n, (entry.rank - root) % p) if p > 1 else (0, 0)
        assert (entry.total.sent_messages, entry.total.sent_bytes) == sent
        assert cost.sent_bytes == entry.total.sent_bytes
        assert cost.time_ps == sum(step_ps)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_formulas_for_powers_of_two(p):
    spec, n, log_p = ClusterSpec(p, DEVICE, LINK), 4096 * p, p.bit_length() - 1
    time_ps = {(name, op): spec.collective(op, n, tuple(range(p)), algorithm=name).time_ps for name, op in OFFERED}
    assert time_ps["ring", "all_reduce"] == 2 * (p - 1) * 1000 + 2 * (p - 1) * n // p
    assert time_ps["halving_doubling", "all_reduce"] == 2 * log_p * 1000 + 2 * (p - 1) * n // p
    assert time_ps["tree", "all_reduce"] == 2 * log_p * (1000 + n)
    assert time_ps["naive", "all_reduce"] == 2 * (p - 1) * (1000 + n)
    assert time_ps["ring", "broadcast"] == (2 * p - 2) * (1000 + n // p)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 9, 13])
def test_folding_cost_is_within_textbook_bound(p):
    core = 2 ** (p.bit_length() - 1)
    n = 4 * core * p
    cost = ClusterSpec(p, DEVICE, LINK).collective("all_reduce", n, tuple(range(p)), algorithm="halving_doubling")
    log_core = core.bit_length() - 1
    assert cost.time_ps == 2 * log_core * 1000 + 2 * (core - 1) * n // core + 2 * 1000 + 2 * n


def test_ledger_reads_well():
    lines = rehearse("tree", "broadcast", 3, 5).table().splitlines()
    assert lines == [
        "rehearsal, collective #1: broadcast by tree; messages and bytes sent",
        "step     rank 0   rank 1   rank 2",
        "   0   1 (20 B)        -        -",
        "   1   1 (20 B)        -        -",
        " all   2 (40 B)        -        -",
    ]
    assert "1 (20 B)" in rehearse("tree", "broadcast", 3, 5).table(received=True).splitlines()[2]
    assert Ledger().table() == "no collective ran as messages"
    assert "2 messages, 40 B" in repr(rehearse("tree", "broadcast", 3, 5))


# --- real ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "op"), OFFERED)
def test_matches_numpy(world, algorithm, op):
    def body(case):
        case = replace(case, dtype=np.dtype(np.float32)) if case.dtype == np.float16 else case
        expected = case.expected()
        results = world.run(case.size, perform, replace(case, kwargs={**case.kwargs, "algorithm": algorithm}))
        for rank, result in enumerate(results):
            if rank in case.members:
                assert_same(result, expected[case.members.index(rank)])
            else:
                assert result == "outside"

    world.check(cases(op, world.max_size), body, parts=2)


def reduce_in_turn(order: tuple[int, ...], seed: int) -> list[Any]:
    group = sp.new_group(order)
    if group.rank is None:
        return []
    x = values(seed + group.rank, (len(order), 3), np.dtype(np.int32))
    results = []
    for algorithm in REDUCING:
        results.append(sp.all_reduce(x.copy(), group=group, algorithm=algorithm))
    for algorithm in ("naive", "ring", "tree"):
        results.append(sp.broadcast(x.copy(), src=order[-1], group=group, algorithm=algorithm))
    for algorithm in ("ring", "halving_doubling"):
        results.append(sp.all_gather(x, dim=1, group=group, algorithm=algorithm))
        results.append(sp.reduce_scatter(x, group=group, algorithm=algorithm))
    return results


@pytest.mark.parametrize("size", SIZES)
def test_worlds_of_any_size_and_groups_in_any_order(size):
    rng = np.random.default_rng(size)
    with World("inline") as world:
        for count in {size, max(1, size - 2)}:
            order = tuple(rng.permutation(size)[:count].tolist())
            xs = [values(7 + i, (count, 3), np.dtype(np.int32)) for i in range(count)]
            expected = [oracles.all_reduce(xs)] * len(REDUCING) + [oracles.broadcast(xs, count - 1)] * 3
            expected += [oracles.all_gather(xs, 1), oracles.reduce_scatter(xs)] * 2
            for rank, results in enumerate(world.run(size, reduce_in_turn, order, 7)):
                if rank in order:
                    assert_same(results, [wanted[order.index(rank)] for wanted in expected])


def random_sums(order: tuple[int, ...]) -> dict[str, bytes]:
    group = sp.new_group(order)
    x = random_floats(len(order), 5003)[group.rank]
    return {name: sp.all_reduce(x.copy(), "mean", group, algorithm=name).tobytes() for name in ("direct", *REDUCING)}


def test_runs_match_rehearsals_bitwise(world):
    """Runs and rehearsals give the same bits, on all ranks."""
    order = (2, 0, 1)
    results = world.run(3, random_sums, order)
    assert all(result == results[0] for result in results)
    assert results[0]["naive"] == results[0]["direct"]
    for algorithm in REDUCING:
        wanted, _ = played(algorithm, "all_reduce", random_floats(3, 5003), 0, "mean")
        assert results[0][algorithm] == wanted[0].tobytes()


def kept_books(order: tuple[int, ...]) -> Ledger:
    group = sp.new_group(order)
    sp.all_reduce(np.ones(5), algorithm="tree")  # outside the block
    with Ledger() as outer, Ledger() as ledger:
        sp.all_reduce(np.ones(5), algorithm="direct")
        for algorithm in REDUCING:
            work = sp.all_reduce(np.ones(7), group=group, algorithm=algorithm, async_op=True)
        sp.scatter([np.ones(2)] * 3 if sp.get_rank() == 1 else None, src=1, algorithm="naive")
    work.wait()
    sp.all_reduce(np.ones(5), algorithm="tree")
    assert outer.entries == ledger.entries
    return ledger


def test_runs_keep_the_ledger_of_rehearsals(world):
    """A run keeps the ledger of its rehearsal, and records one event for each collective."""
    order = (2, 0, 1)
    results = world.run(3, kept_books, order)
    for rank, ledger in enumerate(results):
        wanted = [rehearse(name, "all_reduce", 3, 7, np.float64) for name in REDUCING]
        books = {(entry.op, entry.algorithm): entry for entry in ledger.entries}
        assert len(books) == len(ledger.entries) == len(REDUCING) + 1
        for name, rehearsed in zip(REDUCING, wanted, strict=True):
            assert books["all_reduce", name].steps == rehearsed.entries[order.index(rank)].steps
        assert books["scatter", "naive"].total.sent_bytes == (32 if rank == 1 else 0)
    joined = Ledger.join(results)
    assert joined.total.sent_bytes == joined.total.received_bytes
    assert joined.table().count("group 1 (ranks 2, 0, 1), collective #") == len(REDUCING)

    spec, events = describe(3), results.trace.events
    assert {event.kind for event in events} == {"collective"}
    for rank in range(3):
        own = sorted((e for e in events if e.rank == rank and e.stream == "comm 1"), key=lambda event: event.seq)
        for name, event in zip(REDUCING, own, strict=True):
            cost = spec.collective("all_reduce", 56, order, position=order.index(rank), algorithm=name)
            assert event.sim_end_ps - event.sim_start_ps == cost.time_ps
            books = {(entry.op, entry.algorithm): entry for entry in results[rank].entries}
            assert event.sent_bytes == books["all_reduce", name].total.sent_bytes
        assert all(before.sim_end_ps <= after.sim_start_ps for before, after in pairwise(own))
        (scatter,) = (e for e in events if e.rank == rank and e.name == "scatter")
        cost = spec.collective("scatter", 48, (0, 1, 2), position=rank, root=1, algorithm="naive")
        assert (scatter.size_bytes, scatter.sent_bytes) == (48, cost.sent_bytes)
        assert scatter.sim_end_ps - scatter.sim_start_ps == cost.time_ps


def letters_around(algorithm: str, count: int) -> tuple[list[int], float]:
    me, size = sp.get_rank(), sp.get_world_size()
    works = [sp.isend(np.array([me * 1000 + i]), (me + 1) % size, tag=i % 2) for i in range(count)]
    early = sp.irecv(np.zeros(1, int), (me - 1) % size, tag=1)
    total = sp.all_reduce(np.full(5, me + 1.0), algorithm=algorithm)
    late = [sp.recv(np.zeros(1, int), (me - 1) % size, tag=i % 2) for i in range(count) if i != 1]
    return [int(early.wait()[0]), *(int(x[0]) for x in late), len([work.wait() for work in works])], total[0]


@pytest.mark.parametrize("algorithm", REDUCING)
def test_user_messages_do_not_interfere(world, algorithm):
    """The user's messages and those of an algorithm do not mix, also when the message slots are full."""
    count = RING + 5
    for rank, (received, total) in enumerate(world.run(3, letters_around, algorithm, count)):
        left = (rank - 1) % 3 * 1000
        assert received == [left + 1, *(left + i for i in range(count) if i != 1), count]
        assert total == 6


def all_in_flight(orders: list[tuple[int, ...]]) -> list[list[float]]:
    groups = [sp.new_group(order) for order in orders]
    works = [
        sp.all_reduce(np.full(9, sp.get_rank() + i + 1.0), group=group, algorithm=name, async_op=True)
        for i, name in enumerate(("direct", *REDUCING))
        for group in groups
    ]
    assert all(isinstance(work, sp.Work) for work in works)
    return [work.wait().tolist() for work in reversed(works)]


def test_works_of_several_groups_may_overlap(world):
    results = world.run(3, all_in_flight, [(0, 1, 2), (2, 1, 0)])
    sums = [[6.0 + 3 * i] * 9 for i in range(1 + len(REDUCING)) for _ in range(2)]
    assert all(result == sums[::-1] for result in results)


# --- choosing and refusing algorithms ---------------------------------------------------------------------


def with_the_default() -> tuple[list[tuple[str, str]], Any]:
    with Ledger() as ledger:
        sp.all_reduce(np.ones(4))
        sp.all_gather(np.ones(4))  # a tree has none
        sp.all_reduce(np.ones(4), algorithm="direct")
        sp.all_gather(np.ones(4), algorithm="ring")
        objects = sp.all_gather_object(sp.get_rank())
    return [(entry.op, entry.algorithm) for entry in ledger.entries], objects


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cluster_has_a_default(transport):
    results = sp.launch(with_the_default, world_size=2, transport=transport, algorithm="tree")
    assert list(results) == [([("all_reduce", "tree"), ("all_gather", "ring")], [0, 1])] * 2


def test_training_gives_the_same_by_any_algorithm():
    def train() -> np.ndarray:
        layer = sp.nn.Linear(4, 2)
        for parameter in layer.parameters():
            parameter.data[...] = np.arange(parameter.data.size).reshape(parameter.shape) % 3
        model = sp.parallel.DistributedDataParallel(layer)
        (model(sp.Tensor(np.full((1, 4), sp.get_rank() + 1.0))) ** 2).sum().backward()
        return np.concatenate([parameter.grad.data.ravel() for parameter in layer.parameters()])

    runs = [sp.launch(train, world_size=4, transport="inline", algorithm=name) for name in ("direct", *REDUCING)]
    assert all(np.array_equal(result, runs[0][0]) for run in runs for result in run)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sp.all_reduce(np.ones(2), algorithm="rign"),
        lambda: sp.gather(np.ones(2), algorithm="ring"),
        lambda: sp.all_gather(np.ones(2), algorithm="tree"),
        lambda: sp.Cluster(2, algorithm="star"),
        lambda: rehearse("ring", "gather", 2, 4),
        lambda: rehearse("ring", "all_gather", 2, 5),
        lambda: rehearse("tree", "broadcast", 2, 5, root=2),
        lambda: rehearse("tree", "broadcast", 0, 5),
        lambda: play("tree", "broadcast", [(np.ones(2), 0), (np.ones(3), 0)]),
    ],
)
def test_bad_arguments_are_named(call):
    with refused(InputError):
        call()


def test_unknown_prices_are_named():
    with refused(ClusterError):
        describe(2).collective("all_reduce", 8, (0, 1), algorithm="star")
    with refused(ClusterError):
        describe(2).collective("gather", 8, (0, 1), algorithm="ring")


def test_rehearsal_detects_deadlock():
    x = np.ones(4)
    with refused(DeadlockError):
        play("tree", "broadcast", [(x, 1), (x, 0)])  # each takes the other for the root


def differ(what: str) -> None:
    me = sp.get_rank()
    odd = me == 1
    x = np.full(3 if odd and what == "shape" else 4, me + 1, np.int32 if odd and what == "dtype" else np.float32)
    before = x.copy()
    try:
        sp.all_reduce(
            x,
            "max" if odd and what == "reduce op" else "sum",
            algorithm="tree" if odd and what == "algorithm" else None if odd and what == "default" else "ring",
        )
    finally:
        assert np.array_equal(x, before)


@pytest.mark.parametrize("what", ["shape", "dtype", "reduce op", "algorithm", "default"])
def test_mismatched_calls_change_no_data(world, what):
    with refused(RunFailedError) as caught:
        world.run(3, differ, what)
    named = "algorithm" if what == "default" else what
    assert set(caught.value.reports) == {0, 1, 2}
    for report in caught.value.reports.values():
        assert CollectiveMismatchError.__name__ in report["summary"]
        assert f"They differ in: {named}. No data was changed" in report["summary"]
        assert "by ring at" in report["summary"]


def test_mismatched_group_ranks_are_reported(world):
    with refused(RunFailedError):
        world.run(2, lambda: sp.new_group([0, 1] if sp.get_rank() else [1, 0]))


# --- the code itself -----------------------------------------------------------------------------------------


def test_every_algorithm_can_be_read_in_two_minutes():
    for name in ALGORITHMS[1:]:
        path = Path(algorithms.__file__).with_name(f"{name}.py")
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert {node.name for node in functions} >= {op for other, op in OFFERED if other == name}
        for node in functions:
            assert node.end_lineno - node.lineno + 1 < 60, f"{path.name}: {node.name}"
        for other, op in OFFERED:
            if other == name:
                assert "steps" in find(name, op).__doc__
