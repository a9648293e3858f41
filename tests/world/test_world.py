"""A rank's place in the world: numbers, nodes, environment variables, foreign launchers."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.clock.notes import forget_notes
from simparallel.errors import ClusterError, LaunchError, RankTableError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec, describe
from simparallel.machine.ranktable import make_rank_table
from simparallel.runtime.environment import variables
from simparallel.trace import Trace
from simparallel.world import launchers, rank as world

NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "RANK_ID", "DEVICE_ID", "RANK_SIZE",
)  # fmt: skip
TRANSPORTS = ("inline", pytest.param("shm", marks=pytest.mark.process))


@st.composite
def shared_out(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Draw nodes of any sizes, with ranks in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = draw(st.permutations(range(sum(sizes))))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(ranks[start : start + size]) for start, size in zip(starts, sizes, strict=True))


def place() -> dict[str, Any]:
    group = sp.node_group()
    return {
        "ranks": group.ranks, "local_rank": sp.get_local_rank(), "local_world_size": sp.get_local_world_size(),
        "node_rank": sp.get_node_rank(), "num_nodes": sp.get_num_nodes(), "again": sp.node_group() is group,
        "sum": sp.all_reduce(sp.Tensor([float(sp.get_rank())]), group=group).item(),
    }  # fmt: skip


# --- nodes ----------------------------------------------------------------------------------------------


@given(shared_out())
def test_every_rank_finds_its_node(nodes: tuple[tuple[int, ...], ...]) -> None:
    world_size = sum(map(len, nodes))
    for rank, found in enumerate(sp.launch(place, world_size=world_size, nodes=nodes, transport="inline")):
        number = next(i for i, node in enumerate(nodes) if rank in node)
        assert found == {
            "ranks": nodes[number],
            "local_rank": nodes[number].index(rank),
            "local_world_size": len(nodes[number]),
            "node_rank": number,
            "num_nodes": len(nodes),
            "again": True,
            "sum": float(sum(nodes[number])),
        }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nodes_of_equal_size(transport: str) -> None:
    with sp.Cluster(4, nodes=2, transport=transport, echo=False) as cluster:
        found = cluster.run(place)
        assert [place["ranks"] for place in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
        assert list(cluster.run(sp.get_local_rank)) == [0, 1, 0, 1]


def test_alone_there_is_one_node() -> None:
    assert (sp.get_local_rank(), sp.get_local_world_size(), sp.get_node_rank(), sp.get_num_nodes()) == (0, 1, 0, 1)
    assert sp.node_group().ranks == (0,)


DEVICE = DeviceSpec("plain", {4: 1e12}, 1e12, 10**9, launch_s=0)
FAST, SLOW = LinkSpec(1e-9, 1e12), LinkSpec(5e-9, 1e11)


@given(shared_out(), st.integers(0, 10**6), st.data())
def test_group_is_as_slow_as_its_slowest_link(nodes: Any, size: int, data: st.DataObject) -> None:
    world_size = sum(map(len, nodes))
    spec = describe(world_size, DEVICE, FAST, nodes, SLOW)
    ranks = tuple(data.draw(st.permutations(range(world_size))))[: data.draw(st.integers(1, world_size))]
    inside = any(set(ranks) <= set(node) for node in nodes)
    flat = ClusterSpec(world_size, DEVICE, FAST if inside else SLOW)
    for op in ("all_reduce", "broadcast", "reduce_scatter"):
        assert spec.collective(op, size, ranks, algorithm="ring") == flat.collective(op, size, ranks, algorithm="ring")
    for op in ("all_reduce", "broadcast", "all_to_all", "barrier") if inside else ():
        assert spec.collective(op, size, ranks) == flat.collective(op, size, ranks)
    assert spec.message(size, ranks[0], ranks[-1]) == ClusterSpec(
        world_size, DEVICE, FAST if spec.node_of(ranks[0]) == spec.node_of(ranks[-1]) else SLOW
    ).message(size, ranks[0], ranks[-1])


def test_time_between_nodes_is_on_the_trace() -> None:
    def program() -> None:
        sp.all_reduce(sp.Tensor([0.0] * 1000))
        sp.all_reduce(sp.Tensor([0.0] * 1000), group=sp.node_group())

    trace = sp.launch(program, world_size=4, nodes=2, transport="inline").trace
    events = [event for event in trace.events if event.name == "all_reduce"]
    spec = describe(4, nodes=2)
    for event in events:
        cost = spec.collective("all_reduce", 4000, event.group)
        assert event.sim_end_ps - event.sim_start_ps == cost.time_ps
    assert len({event.sim_end_ps - event.sim_start_ps for event in events}) == 2
    assert "on 2 nodes" in trace.table()


def test_nodes_survive_in_a_saved_trace(tmp_path: Any) -> None:
    trace = sp.launch(sp.barrier, world_size=4, nodes=[[0, 3], [1, 2]], transport="inline").trace
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").cluster == trace.cluster


@pytest.mark.parametrize(
    ("world_size", "nodes"),
    [
        (4, 3), (4, 0), (4, -1), (2, 4),
        (4, [[0, 1], [2]]), (2, [[0, 1], []]), (2, [[0, 1], [1]]),
    ],
)  # fmt: skip
def test_bad_nodes_are_refused(world_size: int, nodes: Any) -> None:
    with refused(ClusterError):
        sp.Cluster(world_size, nodes=nodes)


# --- environment variables --------------------------------------------------------------------------------


@given(shared_out())
def test_variables_agree_with_the_nodes(nodes: tuple[tuple[int, ...], ...]) -> None:
    told = [variables(rank, nodes) for rank in range(sum(map(len, nodes)))]
    for rank, found in enumerate(told):
        node = nodes[int(found["NODE_RANK"])]
        assert node[int(found["LOCAL_RANK"])] == rank == int(found["RANK"]) == int(found["RANK_ID"])
        assert int(found["LOCAL_WORLD_SIZE"]) == len(node)
        assert int(found["WORLD_SIZE"]) == int(found["RANK_SIZE"]) == len(told)
        assert found["GROUP_RANK"] == found["NODE_RANK"]


@pytest.mark.process
def test_every_process_has_its_variables() -> None:
    def read() -> list[str]:
        return [os.environ[name] for name in (*NAMES, "MINE", "RANK_TABLE_FILE")]

    table = make_rank_table(2, 2)
    before = dict(os.environ)
    results = sp.launch(
        read, world_size=4, rank_table=table, environment={"MINE": "x", "MASTER_PORT": "1234", "RANK": "9"}, echo=False
    )
    for rank, found in enumerate(results):
        local, node = rank % 2, rank // 2
        assert found == [
            *map(str, (rank, local, 4, 2, node, node, "127.0.0.1", 1234, rank, local, 4)),
            "x",
            "rank_table.json",
        ]
    assert dict(os.environ) == before


# --- foreign launchers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ""), ({"WORLD_SIZE": "1"}, ""), ({"OMPI_COMM_WORLD_SIZE": "1"}, ""), ({"WORLD_SIZE": "x"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE"), ({"RANK_SIZE": "8"}, "RANK_SIZE"), ({"RANK": "0"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""), ({"RANK": "", "WORLD_SIZE": ""}, ""), ({"PMI_RANK": "0"}, "PMI_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE"), ({"PMIX_RANK": "0"}, "PMIX_RANK"),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, "SLURM_NTASKS"),
        # The shells of salloc, the script of sbatch, and an srun in it.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "ENVIRONMENT": "BATCH"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_ID": "0", "ENVIRONMENT": "BATCH"}, "SLURM_NTASKS"),
        ({"RANK_TABLE_FILE": "t.json"}, ""), ({"RANK_TABLE_FILE": "t", "DEVICE_ID": "1"}, "RANK_TABLE_FILE"),
        ({"RANK_TABLE_FILE": "t", "RANK_ID": "1"}, "RANK_TABLE_FILE"),
    ],
)  # fmt: skip
def test_launchers_are_recognised(environment: dict[str, str], names: str) -> None:
    assert " ".join(launchers.foreign_launcher(environment)) == names


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset all variables of launchers; some launcher may have started the tests."""
    for name in (*launchers._NAMES, *NAMES, "RANK_TABLE_FILE", world.CHILD_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"])
def test_unjoinable_processes_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank, other machines without MPI, and a launcher that does not state the number of ranks."""
    clear(monkeypatch)
    monkeypatch.setattr("simparallel.comm.mpi.transport.is_available", lambda: False)
    more = {"PMI_SIZE": {"PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}}
    more["SLURM_STEP_NUM_TASKS"] = {"SLURM_PROCID": "3", "SLURM_NNODES": "2"}
    for variable, text in {name: "4", **more.get(name, {})}.items():
        monkeypatch.setenv(variable, text)
    with refused(LaunchError):
        sp.init()
    if name == "WORLD_SIZE":
        monkeypatch.setenv("RANK_TABLE_FILE", "t.json")
        monkeypatch.setenv("RANK_ID", "1")
        with refused(RankTableError):
            sp.init()
    assert sp.launch(lambda: sp.init() or sp.get_world_size(), world_size=2, transport="inline") == [2, 2]


def test_script_of_sbatch_runs_alone_with_a_note(monkeypatch, capsys) -> None:
    clear(monkeypatch)
    for name, text in {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, text)
    forget_notes()
    sp.init()
    assert sp.get_world_size() == 1
    assert "SLURM_NTASKS=4, but" in capsys.readouterr().err


def step_once() -> None:
    x = sp.nn.Parameter([1.0])
    optimizer = sp.optim.SGD([x], 0.1)
    for _ in range(2):
        (x * x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "4", "RANK": "1"}, "(WORLD_SIZE=4)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "(OMPI_COMM_WORLD_SIZE=2)"),
        ({"RANK_TABLE_FILE": "t", "DEVICE_ID": "3", "RANK_SIZE": "8"}, "(RANK_SIZE=8 RANK_TABLE_FILE=t)"),
        ({"RANK_TABLE_FILE": "t.json", "DEVICE_ID": "3"}, "(RANK_TABLE_FILE=t.json)"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({}, None),
        ({"WORLD_SIZE": "4", world.CHILD_VARIABLE: "1 of a rank"}, None),
    ],
)
def test_training_alone_without_init_is_noted(environment, told, monkeypatch, capsys) -> None:
    clear(monkeypatch)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    forget_notes()
    step_once()
    step_once()
    notes = [line for line in capsys.readouterr().err.splitlines() if "trains alone" in line]
    assert len(notes) == (told is not None)
    assert told is None or f"SGD.step: this process is one of several by its environment {told}, but" in notes[0]
    # Ranks have joined.
    sp.launch(step_once, world_size=2, transport="inline")
    assert "trains alone" not in capsys.readouterr().err
