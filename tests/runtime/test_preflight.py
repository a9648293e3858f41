"""Launches refused before a device process starts: from ranks, and of more ranks than memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from leaks import finish, no_leaks, start_script  # noqa: F401 (no_leaks is a fixture)
from refusals import refused

import simparallel as sp
from simparallel.cli import doctor, main
from simparallel.comm.memory import memfd, segment
from simparallel.errors import ClusterError, LaunchError, RunFailedError, SharedMemoryError
from simparallel.runtime import preflight
from simparallel.runtime.preflight import MAX_NESTED, needed_bytes, room_for_ranks
from simparallel.world.rank import CHILD_VARIABLE

process = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def _blas_has_its_threads() -> None:
    """BLAS starts a thread when ranks that are threads restore its limit; that is not a leak."""
    sp.launch(sp.get_rank, transport="inline")


LESSON = """
import simparallel as sp

def train():
    return sp.get_rank()

{launch}
"""
LAUNCHES = {
    "launch": "sp.launch(train, world_size=2)",
    "Cluster": "with sp.Cluster(2) as cluster:\n    cluster.run(train)",
}


@process
@pytest.mark.parametrize("how", LAUNCHES)
def test_import_in_a_rank_does_not_launch_again(tmp_path: Path, how: str) -> None:
    """A module that launches at import, which ranks import to find their function."""
    (tmp_path / "lesson.py").write_text(LESSON.format(launch=LAUNCHES[how]))
    out, err = finish(start_script(tmp_path, "from lesson import train"))
    last = err.split("RunFailedError: ")[-1]
    assert "lesson.py:" in last
    assert 'under `if __name__ == "__main__":`' in last
    assert re.search(r"^Failed in the same way: rank [01]\.$", last, re.MULTILINE)
    assert len(err) < 4000


@process
def test_guarded_module_is_launched_by_its_importer(tmp_path: Path) -> None:
    """Red control: with the guard, the same import does no harm, and ranks import the module."""
    guarded = 'if __name__ == "__main__":\n    sp.launch(train, world_size=2)'
    (tmp_path / "lesson.py").write_text(LESSON.format(launch=guarded))
    text = "import simparallel as sp\nfrom lesson import train\nprint(sp.launch(train, world_size=2))"
    assert finish(start_script(tmp_path, text)) == ("[0, 1]\n", "")


def refused_kinds() -> dict[str, Callable[[Path], None]]:
    def itself(script: Path) -> None:
        sp.launch(sp.get_rank)

    def subprocess_of_it(script: Path) -> None:
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        raise LaunchError(done.stderr.splitlines()[-1])

    def command(script: Path) -> None:
        done = subprocess.run([sys.executable, "-m", "simparallel", "run", str(script)], capture_output=True, text=True)
        assert done.returncode == 2
        raise LaunchError(done.stderr)

    return {"itself": itself, "a subprocess": subprocess_of_it, "simparallel run": command}


@process
@pytest.mark.parametrize("kind", refused_kinds())
def test_ranks_start_no_ranks(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "lesson.py"
    script.write_text(LESSON.format(launch=LAUNCHES["launch"]))
    home = str(Path(sp.__file__).parents[1])
    with refused(RunFailedError) as info:
        sp.launch(refused_kinds()[kind], (script,), environment={"PYTHONPATH": home}, echo=False)
    told = str(info.value.__cause__)
    assert isinstance(info.value.__cause__, LaunchError)
    assert "__main__" in told
    assert ("rank 0 started" in told) == (kind != "itself")


@process
def test_ranks_may_nest_harmless_launches() -> None:
    """Threads inside a rank, and processes where the program asks for them explicitly."""

    def tries() -> list[list[int]]:
        inline = sp.launch(sp.get_rank, world_size=3, transport="inline")
        del os.environ[CHILD_VARIABLE]
        return [inline, sp.launch(sp.get_rank, world_size=2, echo=False)]

    assert sp.launch(tries, echo=False) == [[[0, 1, 2], [0, 1]]]


def test_function_that_launches_itself_ends() -> None:
    calls = []

    def again() -> None:
        calls.append(1)
        sp.launch(again, world_size=2, transport="inline")

    with refused(RunFailedError) as info:
        sp.launch(again, world_size=2, transport="inline")
    assert len(calls) <= sum(2**depth for depth in range(1, MAX_NESTED + 1))
    root: BaseException | None = info.value
    while isinstance(root, RunFailedError):
        root = root.__cause__
    assert isinstance(root, LaunchError)
    assert root.facts == {"depth": MAX_NESTED + 1}


def test_depth_is_reset_after_a_run() -> None:
    """Runs one after the other are not nested."""

    def one(depth: int) -> int:
        return sp.launch(one, (depth - 1,), transport="inline")[0] + 1 if depth else 0

    for _ in range(2):
        assert sp.launch(one, (MAX_NESTED - 1,), transport="inline") == [MAX_NESTED - 1]


# --- memory ----------------------------------------------------------------------------------------


@given(st.integers(0, 10**13))
def test_room_for_ranks_is_maximal(free_bytes: int) -> None:
    ranks = room_for_ranks(free_bytes)
    assert ranks == 0 or needed_bytes(ranks) <= free_bytes
    assert needed_bytes(ranks + 1) > free_bytes


def test_more_ranks_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = needed_bytes(7)
    monkeypatch.setattr(preflight, "available_memory", lambda: free)
    with refused(LaunchError) as info:
        sp.launch(sp.get_rank, world_size=8)
    assert info.value.facts == {"needed_bytes": needed_bytes(8), "available_bytes": free}
    assert sp.launch(sp.get_rank, world_size=8, transport="inline") == list(range(8))


@process
def test_as_many_ranks_as_memory_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: needed_bytes(2))
    assert sp.launch(sp.get_rank, world_size=2) == [0, 1]


def test_unknown_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 0)
    preflight.check_memory(10**5)


def test_control_words_beyond_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them is reserved: a memfd itself has no limit."""
    monkeypatch.setattr(memfd, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(segment.os, "posix_fallocate", lambda *_: pytest.fail("memory was reserved that is not there"))
    with refused(SharedMemoryError) as info:
        sp.launch(sp.get_rank, world_size=1000, transport="inline")
    assert info.value.facts["available_bytes"] == 1 << 20


@pytest.mark.parametrize("nodes", [1, 10])
def test_huge_world_is_refused(nodes: int) -> None:
    for world_size in (10**9, 10**400):
        with refused(ClusterError):
            sp.launch(sp.get_rank, world_size=world_size, nodes=nodes)


def test_doctor_counts_ranks_by_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memfd, "available_memory", lambda: needed_bytes(21))
    assert main.main(["doctor"]) == 0
    memory = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory "))
    assert "room for about 21 ranks" in memory
    monkeypatch.setattr(memfd, "available_memory", lambda: needed_bytes(3))
    found = {finding.name: finding.state for finding in doctor.findings()}
    assert found["memory"] == "fallback"
