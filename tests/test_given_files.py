"""Files that users give: mutated, endless, or no files at all. A reader raises its one error, which names the file."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from mutations import mutated
from refusals import refused

import simparallel as sp
from simparallel.cli.main import main
from simparallel.errors import (
    CheckpointError,
    ClusterError,
    InputError,
    PlanError,
    RankTableError,
    ScheduleError,
    SimParallelError,
)
from simparallel.machine.cluster import describe, load_cluster
from simparallel.machine.hostfile import read_host_file
from simparallel.machine.ranktable import read_rank_table
from simparallel.parallel.pipeline.schedule import Schedule
from simparallel.search.explanation import Move, Option
from simparallel.search.plan import PlannedOp


class Kind(NamedTuple):
    """A kind of file: how to write a valid one, its reader, the reader's error, and what one does with the result."""

    save: Callable[[Path], Any]
    load: Callable[[Path], Any]
    error: type[SimParallelError]
    use: Callable[[Any], Any] = str


def plan() -> sp.Plan:
    option = Option(((2, 1), (1,)), (2, 1), 10, 5, 0, 3)
    first = PlannedOp("fc.Linear", "Linear", ((8, 4), (4,)), ((2, 1), (1,)), (2, 1), "a.py:3", (option,), ())
    second = PlannedOp("Sum", "Sum", ((8, 4),), None, None, "", (option,), (Move(0, "fc.Linear", "slice", "", 4),))
    return sp.Plan(2, (first, second), "dp", "a100", 10**9, 2 * 10**9, 18, 17, 10**6, ("a note",), ("fc",), 2)


def use_plan(found: sp.Plan) -> None:
    str(found), found._repr_html_(), found.gap, found.step_time_s
    for planned in found.ops:
        if planned.options:
            str(found.explain(planned.name))
    assert sp.Plan.from_dict(found.to_dict()) == found


def use_schedule(found: Schedule) -> None:
    try:
        found.check(memory=3, depth=1)
    except ScheduleError:
        return
    str(found), found._repr_html_()


def use_trace(found: sp.Trace) -> None:
    str(found), found.table(), found.html(), found.critical_path(), found.summary()


@cache
def trace() -> sp.Trace:
    def step() -> None:
        with sp.record_function("step"):
            sp.all_reduce(np.ones(4))

    return sp.launch(step, world_size=2, transport="inline", record="full").trace


TABLE = """{"version": "1.0", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": [
 {"device_id": "0", "device_ip": "192.98.92.1", "rank_id": "0"}]}], "status": "completed"}"""
KINDS = {
    "plan": Kind(lambda path: plan().save(path), sp.Plan.load, PlanError, use_plan),
    "schedule": Kind(
        lambda path: sp.pipeline_schedule("dualpipe_v", 2, 4).save_csv(path),
        lambda path: Schedule.load_csv(path, placement="v"), ScheduleError, use_schedule,
    ),
    "trace": Kind(lambda path: trace().save(path), sp.Trace.load, InputError, use_trace),
    "cluster": Kind(lambda path: describe(4, "dgx-a100").save(path), lambda path: load_cluster(f"./{path}"),
                    ClusterError),
    "ranktable": Kind(lambda path: path.write_text(TABLE), read_rank_table, RankTableError),
    "hosts": Kind(lambda path: path.write_text("a slots=2\nb:3\n# c\n"), read_host_file, ClusterError),
    "arrays": Kind(lambda path: sp.save({"a": [np.arange(3), 1.5, "x"]}, path), sp.load, CheckpointError),
}  # fmt: skip


@cache
def valid(kind: str) -> bytes:
    path = Path(f"valid.{kind}.json")
    try:
        KINDS[kind].save(path)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(kind: str, content: bytes) -> Any:
    """Return what the reader returns for a file of this content, or its error, which names the file."""
    path = Path("given.json")
    path.write_bytes(content)
    try:
        found = KINDS[kind].load(path)
    except KINDS[kind].error as error:
        return error
    KINDS[kind].use(found)
    return found


@pytest.mark.filterwarnings("ignore:given.json")
@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 4))
@example(random.Random(0), 0)
def test_mutated_files_are_read_or_refused(kind: str, rng: random.Random, count: int) -> None:
    found = loaded(kind, mutated(valid(kind), rng, count))
    assert not isinstance(found, Exception) or (count and "given.json" in str(found))


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_waits_or_reads_without_end(kind: str) -> None:
    os.mkfifo("given.pipe")
    os.symlink("/dev/zero", "given.zeros")
    with open("given.sparse", "wb") as file:
        file.truncate(1 << 40)
    for name in ("given.pipe", "given.zeros", "given.sparse", "given.none", "."):
        with refused(KINDS[kind].error):
            KINDS[kind].load(Path(name))


def test_command_refuses_a_pipe_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("f")
    assert main(["trace", "f"]) == 2
    assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0F0,99999999F0", "0F0,0F99999999", "0F99999999999999999999", "\u0660F0", ""])
def test_schedules_of_impossible_size_are_refused(text: str) -> None:
    Path("s.csv").write_text(text)
    with refused(ScheduleError, path="s.csv"):
        Schedule.load_csv("s.csv")
