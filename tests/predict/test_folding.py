"""Ranks with the same program run once: the events of each rank are those of its representative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.comm.views import Views
from simparallel.errors import ClusterError, RunFailedError
from simparallel.machine.cluster import describe
from simparallel.predict.dry_run import dry_run
from simparallel.predict.prediction import Prediction


def events_of(prediction: Prediction, rank: int) -> list[tuple[Any, ...]]:
    """Return the events of a rank without names of ranks and wall times, in simulated order."""
    return sorted(
        (event.name, event.kind, event.step, event.sim_start_ps, event.sim_end_ps, event.flops, event.size_bytes,
         len(event.group), event.live_bytes, event.algorithm)
        for event in prediction.trace.events
        if event.rank == prediction.stands_for[rank]
    )  # fmt: skip


def check_folded(program: Any, world_size: int, *args: Any, **described: Any) -> Prediction:
    """Assert that the folded prediction equals the prediction with all ranks; return it."""
    folded = dry_run(program, args, world_size=world_size, **described)
    whole = dry_run(program, args, world_size=world_size, fold=False, **described)
    for rank in range(world_size):
        assert events_of(folded, rank) == events_of(whole, rank), rank
        assert folded.memory[folded.stands_for[rank]] == whole.memory[whole.stands_for[rank]]
    assert folded.makespan_s == whole.makespan_s
    assert folded.classes == whole.classes
    assert folded.sent_bytes() == whole.sent_bytes()
    assert len(folded.memory) <= world_size
    return folded


def sharded(dp: int, tp: int, width: int, hidden: int) -> None:
    """Train a network whose weights are cut along one axis and whose batch is cut along the other."""
    layout = sp.Layout((dp, tp), ("dp", "tp"))
    up = sp.parallel.ColumnParallelLinear(width, hidden, layout)
    down = sp.parallel.RowParallelLinear(hidden, width, layout)
    optimizer = sp.optim.Adam([*up.parameters(), *down.parameters()], lr=0.1)
    for _ in range(2):
        x = sp.distribute_tensor(np.ones((2 * dp, width), np.float32), layout("dp", "None"))
        loss = (down(sp.functions.relu(up(x))) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def data_parallel(hidden: int, steps: int) -> None:
    model = sp.nn.Sequential(sp.nn.Linear(5, hidden), sp.nn.ReLU(), sp.nn.Linear(hidden, 3))
    ddp = sp.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = sp.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        loss = (ddp(sp.Tensor(np.ones((4, 5), np.float32))) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.matrices
@settings(max_examples=6)
@given(
    dp=st.sampled_from((1, 2, 3, 4, 8)),
    tp=st.sampled_from((1, 2, 4, 8)),
    width=st.integers(1, 6),
    hidden=st.integers(1, 20),
    nodes=st.booleans(),
)
def test_folded_mesh_equals_all_ranks(dp: int, tp: int, width: int, hidden: int, nodes: bool) -> None:
    check_folded(sharded, dp * tp, dp, tp, width, hidden, nodes=dp if nodes else 1)


@pytest.mark.matrices
@settings(max_examples=6)
@given(dp=st.sampled_from((2, 3, 8)), tp=st.sampled_from((1, 2, 4)), data=st.data())
def test_folded_stragglers_equal_all_ranks(dp: int, tp: int, data: Any) -> None:
    slow = data.draw(st.lists(st.integers(0, dp * tp - 1), min_size=1, max_size=3, unique=True))
    cluster = replace(describe(dp * tp, "a100", nodes=dp), stragglers={rank: 1.5 + i for i, rank in enumerate(slow)})
    check_folded(sharded, dp * tp, dp, tp, 4, 8, cluster=cluster)


@settings(max_examples=6)
@given(world_size=st.integers(1, 16), hidden=st.integers(1, 40), steps=st.integers(0, 3))
def test_folded_data_parallel_equals_all_ranks(world_size: int, hidden: int, steps: int) -> None:
    folded = check_folded(data_parallel, world_size, hidden, steps)
    assert len(folded.memory) <= 2
    assert len(folded.classes) == 1


def test_first_rank_of_its_own_is_found() -> None:
    """Bisection finds the border between the one rank that does more and the others."""

    def program() -> None:
        x = sp.Tensor(np.ones(3, np.float32), requires_grad=True)
        if sp.get_rank() == 0:
            (x * x).sum().backward()
        sp.barrier()

    folded = check_folded(program, 40)
    assert list(folded.classes.values()) == [1, 39]
    assert len(folded.memory) < 10


def test_receivers_and_roots_run() -> None:
    """Every rank of a ring sends to the next one, so all of them run."""

    def program() -> None:
        rank, size = sp.get_rank(), sp.get_world_size()
        got = np.zeros(2 + rank % 2)
        sp.sendrecv(np.full(2 + (rank + 1) % 2, 1.0), (rank + 1) % size, got, (rank - 1) % size)
        sp.broadcast(got[:2], src=5)

    check_folded(program, 6)


def uneven_calls(calls: list[tuple[str, list[list[int]]]], parts: int) -> None:
    """Make calls whose sizes differ by rank, and compute with each result.

    Args:
        calls: name, and a square matrix of sizes: row r has those of the group's member r.
        parts: number of groups of the world.
    """
    rank, size = sp.get_rank(), sp.get_world_size() // parts
    groups = [sp.new_group(range(start, start + size)) for start in range(0, size * parts, size)]
    group, me = groups[rank // size], rank % size
    for name, sizes in calls:
        own, ends = sizes[me], {"group": group}
        x: Any = np.ones((own[0], 2), np.float32)
        if name in ("all_gather", "gather"):
            x = getattr(sp, name)(x, **ends, uneven=True, **({"dst": group.ranks[-1]} if name == "gather" else {}))
        elif name == "scatter":
            root = group.ranks[size // 2]
            given = [np.ones((n, 2), np.float32) for n in sizes[size // 2]]
            x = sp.scatter(given if rank == root else None, root, group, uneven=rank == root)
        elif name == "all_to_all":
            rows = np.ones((sum(own), 2), np.float32)
            x = sp.all_to_all(rows, **ends, input_splits=own, output_splits=[row[me] for row in sizes])
        elif name == "reduce_scatter":
            x = sp.reduce_scatter(np.ones((sum(sizes[0]), 2), np.float32), **ends, input_splits=sizes[0])
        elif name == "sendrecv":
            got = np.empty((sizes[me - 1][0], 2), np.float32)
            sp.sendrecv(x, group.ranks[(me + 1) % size], got, group.ranks[me - 1])
            x = got
        else:  # objects whose sizes ascend
            x = sp.all_gather_object(b"x" * sum(sizes[0][: me + 1]), group)[me]
        rows = sum(map(len, x)) if isinstance(x, list) else 0 if x is None else len(x)
        w = sp.Tensor(np.ones((rows, 2), np.float32), requires_grad=True)
        (w * w).sum().backward()


@st.composite
def uneven_programs(draw: Any) -> tuple[int, list[tuple[str, list[list[int]]]], int]:
    """Draw the size of the world, calls, and the number of groups."""
    size, parts = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    names = ["all_gather", "gather", "scatter", "all_to_all", "reduce_scatter", "sendrecv", "objects"]
    row = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    matrix = st.lists(row, min_size=size, max_size=size)
    return size * parts, draw(st.lists(st.tuples(st.sampled_from(names), matrix), min_size=1, max_size=3)), parts


@settings(max_examples=20)
@given(uneven_programs())
def test_folded_uneven_calls_equal_all_ranks(program: Any) -> None:
    world_size, calls, parts = program
    check_folded(uneven_calls, world_size, calls, parts)


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4], [1, 2, 2, 1]])
def test_sizes_of_ranks_between_others_count(sizes: list[int]) -> None:
    folded = check_folded(lambda: sp.all_gather(np.ones((sizes[sp.get_rank()], 3)), uneven=True), 4)
    assert [event.size_bytes for event in folded.trace.events] == [24 * sum(sizes)] * 4


@pytest.mark.parametrize("size", [1, 70_000])
def test_folded_values_count_every_rank(size: int) -> None:
    """Real arrays of collectives: the ranks that do not run give what their representative gives."""

    def program() -> tuple[Any, ...]:
        total = sp.all_reduce(np.ones(size))
        return float(total[0]), sp.all_gather(np.zeros(2)).shape, len(sp.all_gather_object("x"))

    prediction = dry_run(program, world_size=1000)
    assert prediction.values == {0: (1000.0, (2000,), 1000), 999: (1000.0, (2000,), 1000)}


def test_notes_are_read_once_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of an exchange of objects grows with the number of ranks, and not with its square."""
    counts, words_of = [], Views.words_of
    for world_size in (10, 1000):
        reads: list[int] = []
        monkeypatch.setattr(Views, "words_of", lambda *args, reads=reads: reads.append(1) or words_of(*args))
        dry_run(lambda: sp.all_gather_object("x"), world_size=world_size)
        monkeypatch.undo()
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0


def test_large_world_runs_few_ranks() -> None:
    prediction = dry_run(sharded, (512, 8, 4, 16), world_size=4096, nodes=512)
    assert prediction.classes == {0: 4096}
    assert len(prediction.memory) == 4
    assert prediction.stands_for == [0] * 4096


def test_program_of_its_own_on_every_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon: a chain of messages doubles in each run."""
    monkeypatch.setattr("simparallel.predict.dry_run.MOST_RANKS", 64)
    runs = []

    def program() -> None:
        rank, size = sp.get_rank(), sp.get_world_size()
        runs.append(rank)
        sp.recv(np.empty(1), (rank + 1) % size)

    with refused(ClusterError, world_size=16_384, most=64):
        dry_run(program, world_size=16_384)
    assert len(runs) < 2 * 64


def test_chain_of_messages_is_found_in_few_runs() -> None:
    """Each rank sends to the next one, as the stages of a pipeline do."""
    runs = []

    def program() -> None:
        rank, size, x = sp.get_rank(), sp.get_world_size(), np.zeros(1)
        runs.append(rank)
        if rank:
            sp.recv(x, rank - 1)
        if rank < size - 1:
            sp.send(x, rank + 1)

    assert len(check_folded(program, 32).memory) == 32
    assert runs.count(0) <= 7


def test_chain_of_groups_is_found_in_one_run() -> None:
    """Each two neighbours are a group, so the run of one rank needs all of them."""
    runs = []

    def program() -> None:
        rank = sp.get_rank()
        runs.append(rank)
        for group in [sp.new_group((first, first + 1)) for first in range(20)]:
            if rank in group.ranks:
                sp.all_reduce(np.zeros(2), group=group)

    dry_run(program, world_size=64)
    assert sorted(runs) == sorted([0, 63, *range(22), 63])


def mesh_with_stages(dp: int, pp: int, tp: int) -> None:
    """Train stages whose weights are cut over groups that the members of a stage make alone."""
    mesh = sp.Mesh((dp, pp, tp), ("dp", "pp", "tp"))
    width = 4 * tp
    layers = [sp.nn.Linear(width, width) for _ in range(2 * pp)]
    network = sp.nn.Sequential(*layers)
    layout = sp.Layout((tp,), ("tp",), mesh.group("tp", sp.get_rank()))
    sp.distribute_module(network, layout, {"*.weight": ("tp", "None"), "*.bias": ("tp",)})
    stages = [[f"{2 * stage}", f"{2 * stage + 1}"] for stage in range(pp)]
    pipeline = sp.parallel.Pipeline(network, lambda y, target: ((y - target) ** 2).mean(), 2, "1f1b", stages, mesh=mesh)
    optimizer = sp.optim.Adam(pipeline.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipeline.step(np.ones((6, width), np.float32), np.zeros((6, width), np.float32))
        optimizer.step()


@pytest.mark.parametrize(("shape", "most"), [((2, 2, 2), 8), ((2, 2, 4), 8), ((1, 3, 5), 6), ((3, 2, 3), 12)])
def test_groups_of_members_alone_fold(shape: tuple[int, int, int], most: int) -> None:
    """The ends of each group run, and no member between them."""
    folded = check_folded(mesh_with_stages, int(np.prod(shape)), *shape)
    assert len(folded.memory) <= most


@given(st.integers(3, 20), st.data())
def test_ranks_without_a_group_are_alike(world_size: int, data: Any) -> None:
    """They are not like the members of a group, next to which they are."""
    start = data.draw(st.integers(1, world_size - 2))
    members = range(start) if data.draw(st.booleans()) else range(start, world_size)

    def program() -> None:
        group = sp.new_group(members)
        if sp.get_rank() in members:
            sp.all_reduce(np.zeros(2), group=group)

    check_folded(program, world_size)


def test_objects_that_fill_the_memory_are_refused() -> None:
    with refused(RunFailedError) as caught:
        dry_run(lambda: sp.all_gather_object(bytes(10**6)), world_size=8192)
    assert caught.value.__cause__.facts == {"world_size": 8192, "most": 1 << 30}


def test_root_of_a_broadcast_is_no_change_of_sizes():
    found = sp.dry_run(lambda: sp.broadcast_object("x" * 1000 if sp.get_rank() == 0 else None), world_size=64)
    assert len(found.memory) == 2


def test_objects_that_can_change_are_a_ranks_own() -> None:
    """Equal strings of a class with attributes are one object for each member, as in a run."""

    class Note(str):
        readers: int

    def program() -> list[int]:
        note = Note("x")
        note.readers = 0
        got = sp.all_gather_object(note)
        got[0].readers += 1
        return [each.readers for each in got]

    real = sp.launch(program, world_size=4, transport="inline")[0]
    assert set(map(tuple, dry_run(program, world_size=4).values.values())) == {tuple(real)} == {(1, 0, 0, 0)}


def test_equal_models_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks compare theirs: decoding one for each rank made 16,384 ranks take minutes."""
    from simparallel.comm.dry import medium

    decoded, unpack = [], medium._unpack
    monkeypatch.setattr(medium, "_unpack", lambda data: decoded.append(1) or unpack(data))
    counts = []
    for world_size in (8, 64):
        decoded.clear()
        monkeypatch.setattr(medium, "_last", [(b"", None)])
        dry_run(data_parallel, (4, 1), world_size=world_size)
        counts.append(len(decoded))
    assert 0 < counts[0] == counts[1]
