"""Ranks that torchrun, mpiexec, srun or mpirun started: their variables, the order of launchers, contradictions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from joining import LAUNCHERS, train, variables_of
from refusals import refused
from test_joined import _own_folder, run_cases  # noqa: F401 (a fixture)

import simparallel as sp
from simparallel.errors import LaunchError
from simparallel.runtime.joined import join
from simparallel.runtime.joined.identity import identify
from simparallel.world.launchers import foreign_launcher

# The launchers in the order in which they count, with the name of the rank.
ORDER = {
    "torchrun": "RANK", "MindSpore": "RANK_ID", "PMI": "PMI_RANK", "Cray": "PMI_RANK", "Slurm": "SLURM_PROCID",
    "by hand": "SLURM_PROCID", "Open MPI": "OMPI_COMM_WORLD_RANK",
}  # fmt: skip
PLAIN = st.sampled_from(LAUNCHERS)


@given(st.lists(PLAIN, min_size=1), st.integers(2, 9), st.data())
def test_first_launcher_tells_the_rank(names: list[str], size: int, data: st.DataObject) -> None:
    """Several that agree are one job, and all its ranks have one key."""
    rank = data.draw(st.integers(0, size - 1))
    first = min(names, key=LAUNCHERS.index)
    environments = [{k: v for name in names for k, v in variables_of(name, r, size).items()} for r in (rank, 0)]
    found, other = map(identify, environments)
    assert (found.rank, found.world_size, found.node, found.is_here) == (rank, size, 0, True)
    assert found.source.startswith(ORDER[first])
    assert found.is_mpi == (not {"torchrun", "MindSpore"}.issuperset(names))
    assert found.key == other.key
    assert f"{ORDER[first]}=0 " in found.command_of(0)
    assert foreign_launcher(environments[0])


@given(st.sampled_from(["PMI", "Cray", "Slurm", "Open MPI"]), PLAIN, st.integers(2, 4), st.integers(2, 4), st.data())
def test_daemons_of_a_launcher_are_no_ranks(
    outer: str, inner: str, nodes: int, per_node: int, data: st.DataObject
) -> None:
    """One process on each node, started by srun or mpirun, may start the ranks, which inherit its variables."""
    rank = data.draw(st.integers(0, nodes * per_node - 1))
    daemon = variables_of(outer, rank // per_node, nodes, per_node=1)
    ours = variables_of(inner, rank, nodes * per_node, per_node)
    if not daemon.keys() & ours.keys():
        found = identify({**daemon, **ours})
        assert (found.rank, found.world_size) == (rank, nodes * per_node)
        assert found.source.startswith(ORDER[inner])


@pytest.mark.parametrize("outer", ["PMI", "Slurm", "Open MPI"])
def test_agent_for_one_rank_may_number_it_anew(outer: str) -> None:
    """torchrun chooses the order of its agents."""
    assert identify({**variables_of(outer, 1, 2, 1), "RANK": "0", "WORLD_SIZE": "2"}).rank == 0


def of(*names: str, rank: int = 1, size: int = 4) -> dict[str, str]:
    return {key: text for name in names for key, text in variables_of(name, rank, size).items()}


CONTRADICTIONS = {
    "rank alone": {"RANK": "0"},
    "rank id alone": {"RANK_ID": "3"},
    "PMI rank alone": {"PMI_RANK": "1"},
    "MPI rank alone": {"OMPI_COMM_WORLD_RANK": "1"},
    "PMI size alone": {"PMI_SIZE": "4"},
    "no number": {"RANK": "1", "WORLD_SIZE": "four"},
    "Slurm rank too large": of("Slurm", rank=4),
    "PMI rank too large": of("PMI", rank=9),
    "local rank too large": {**of("torchrun"), "LOCAL_RANK": "4"},
    "local size too large": {**of("PMI"), "MPI_LOCALNRANKS": "8"},
    "node too large": {**of("Slurm"), "SLURM_NODEID": "1"},
    "sizes of PMI and Slurm": {**of("PMI"), **of("by hand", size=8)},
    "sizes of RANK and Slurm": {"RANK": "1", "WORLD_SIZE": "4", **of("Slurm", size=8)},
    "sizes of Slurm and Open MPI": {**of("by hand"), **of("Open MPI", size=8)},
    "ranks of RANK and PMI": {**of("torchrun"), **of("PMI", rank=2)},
    "ranks of Slurm and Open MPI": {**of("Slurm", rank=3), **of("Open MPI")},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str) -> None:
    """Both variables are named, with their numbers."""
    with refused(LaunchError):
        identify(CONTRADICTIONS[case])


@pytest.mark.parametrize("size", [1, 3])
def test_mpi_of_another_size_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of MPI: on several machines; another number: anywhere."""

    class Everyone:
        pass

    Everyone.size = size  # type: ignore[attr-defined]
    monkeypatch.setattr("simparallel.comm.mpi.transport.is_available", lambda: True)
    monkeypatch.setattr("simparallel.comm.mpi.transport.world", Everyone)
    monkeypatch.setattr(join.os, "environ", variables_of("Slurm", 1, 4, per_node=2))
    with refused(LaunchError):
        join.join(None, None)


def test_steps_of_a_job_have_different_keys() -> None:
    keys = {identify({**of("Slurm"), "SLURM_STEP_ID": step}).key for step in "012"}
    assert len(keys) == 3


@pytest.mark.process
def test_every_launcher_starts_the_same_run(tmp_path: Path) -> None:
    """The losses are those of `launch`, to the last bit; rank 0 says in one line who started it."""
    expected = list(sp.launch(train, world_size=3, echo=False))
    assert len(set(map(tuple, expected))) == 3
    cases = [f"train-{launcher}" for launcher in LAUNCHERS]
    assert all(told["codes"] == [0, 0, 0] for told in run_cases(tmp_path, 3, *cases).values())
    for launcher, case in zip(LAUNCHERS, cases, strict=True):
        lines = (tmp_path / case).read_text().splitlines()
        found = [line.removeprefix("losses ").split(" ", 1) for line in lines if line.startswith("losses ")]
        assert {int(rank): json.loads(losses) for rank, losses in found} == dict(enumerate(expected))
        (said,) = (line for line in lines if not line.startswith("losses "))
        assert said.startswith(f"simparallel: rank 0 of 3 by {ORDER[launcher]} and ")
        assert "the ranks meet in the shared memory of this machine" in said


@pytest.mark.process
def test_first_failure_is_first_in_the_log(tmp_path: Path) -> None:
    """All ranks write to one log, as under srun; the first error is that of the rank that failed, or names it."""
    first = {
        "raise-Slurm": "ZeroDivisionError: on purpose",
        "kill-PMI": r".*: rank 2 \(pid \d+\) was killed by SIGKILL",
    }
    run_cases(tmp_path, 3, *first)
    for case, expected in first.items():
        text = (tmp_path / case).read_text()
        errors = re.findall(r"^[\w.]+Error: .*", text, re.MULTILINE)
        assert len(errors) == (3 if case == "raise-Slurm" else 2), text
        assert re.match(expected, errors[0]), text
        assert all("rank 2" in error for error in errors[1:]), text


# --- job scripts ------------------------------------------------------------------------------------------

EXAMPLES = Path(sp.__file__).parents[1] / "examples" / "clusters"
# What this machine needs of srun: it starts the job's tasks with their variables, and fails as the first of them does.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from joining import variables_of
words = sys.argv[1:]
command = words[next(i for i, word in enumerate(words) if not word.startswith("-")):]
size = int(os.environ["SLURM_NTASKS"])
tasks = [subprocess.Popen(command, env={{**os.environ, **variables_of("Slurm", r, size)}}) for r in range(size)]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.process
def test_job_script_of_slurm(tmp_path: Path) -> None:
    """Its text, by shellcheck where there is one; and its ranks, with an srun that starts them on this machine."""
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, script], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time", "output"} <= options.keys()
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o700)
    of_job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", script], cwd=EXAMPLES, capture_output=True, text=True, timeout=60,
        env={**os.environ, **of_job, "ENVIRONMENT": "BATCH", "PATH": path, "TMPDIR": tempfile.gettempdir()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^epoch \d, 2 ranks, loss is (\S+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 3
    assert float(losses[0]) > float(losses[-1])
    assert "rank 0 of 2 by SLURM_PROCID and SLURM_STEP_NUM_TASKS (Slurm)" in done.stderr


def test_job_of_kubernetes() -> None:
    """It has a rank for each slot, and both kinds of pods have what the operator needs; see also test_mpi.py."""
    job = pytest.importorskip("yaml").safe_load((EXAMPLES / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,), (worker,) = (replicas[kind]["template"]["spec"]["containers"] for kind in ("Launcher", "Worker"))
    assert launcher["command"] == ["mpirun"]
    assert launcher["args"][:2] == ["-n", str(replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"])]
    assert launcher["args"][2:5] == ["python", "-m", "mpi4py"]
    folder, script = launcher["args"][5].rsplit("/", 1)
    assert (EXAMPLES / script).exists()
    assert [mount["mountPath"] for mount in worker["volumeMounts"]] == [folder]
    assert launcher["image"] == worker["image"]
    assert worker["resources"]["limits"]["cpu"] == job["spec"]["slotsPerWorker"]
