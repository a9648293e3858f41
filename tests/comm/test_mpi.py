"""Ranks under mpiexec: the contract's tests, the command, scripts of other launchers, reports of failures.

By default only with this Python's mpi4py; with `-m mpi` also with the Open MPI and the MPICH of
`python -m benchmarks --setup`, where this Python's own version is the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from leaks import MARK, marked, wait_for
from refusals import refused

import simparallel as sp
from benchmarks.environments import PEERS
from simparallel.runtime.mpi.launcher import OPEN_MPI
from simparallel.trace import Trace

pytestmark = [pytest.mark.mpi, pytest.mark.process]
ROOT = Path(__file__).parents[2]
LIMIT_S = 110


class Mpi:
    """A Python with mpi4py, and its mpiexec."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
        self.environment = {**OPEN_MPI, **os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}

    def python_(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def mpiexec(self, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
        beside = Path(self.python).with_name("mpiexec")
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
        command = [mpiexec, "-n", str(ranks), self.python, *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )

    def run(self, ranks: int, text: str, *words: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "train.py").write_text(text)
        return self.python_("-m", "simparallel", "run", "--transport", "mpi", "-n", str(ranks), *words, "train.py")


@pytest.fixture(params=["here", "openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> Mpi:
    if request.param == "here":
        if find_spec("mpi4py") is None:
            pytest.skip('this Python has no mpi4py: pip install "simparallel[mpi]" mpich')
        return Mpi(sys.executable, tmp_path)
    if "mpi" not in request.config.option.markexpr:
        pytest.skip("only with -m mpi")
    peer = PEERS[request.param]
    python = peer.directory / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not peer.is_ready or not (peer.directory / "bin" / version).exists():
        pytest.skip(f"{peer.label} is not set up for {version}: python -m benchmarks --setup --peers {peer.name}")
    return Mpi(str(python), tmp_path)


def test_contract_holds(mpi: Mpi) -> None:
    options = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(ROOT), "--color=no"]
    done = mpi.mpiexec(4, "-m", "mpi4py", str(ROOT / "tests" / "worlds_mpi.py"), str(mpi.folder), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
    for rank in range(1, 4):
        assert " passed" in (mpi.folder / f"rank_{rank}.txt").read_text()


# --- the command ----------------------------------------------------------------------------------------

TRAIN = """
import os
import numpy as np
import simparallel as sp

sp.init()
model = sp.nn.Linear(64, 10)
ddp = sp.parallel.DistributedDataParallel(model)
digits = sp.data.digits("train")
loader = sp.data.DataLoader(digits, batch_size=30, sampler=sp.data.DistributedSampler(digits))
optimizer = sp.optim.SGD(ddp.parameters(), lr=0.1)
for (images, labels), _ in zip(loader, range(3)):
    loss = sp.functions.cross_entropy(ddp(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sp.log(loss=loss)
sp.all_reduce(np.ones(30_000), group=sp.node_group())
print(os.environ["RANK"], os.environ["LOCAL_RANK"], sp.node_group().ranks, repr(float(loss)))
"""


def test_script_matches_run_on_devices(mpi: Mpi) -> None:
    """The same bits, and the same simulated times."""
    done = mpi.run(4, TRAIN, "--nodes", "2", "--devices-per-rank", "2")
    assert done.returncode == 0, done.stderr
    run = mpi.folder / "runs" / "train"
    told = {line for line in done.stdout.splitlines() if line.startswith("[rank")}
    assert told == {f"[rank {r}] {(run / f'worker_{r}.log').read_text().rstrip()}" for r in range(4)}
    assert (run / "node_1" / "worker_3.log").exists()
    assert "ended with 0" in (run / "scheduler.log").read_text()
    assert json.loads((run / "metrics.json").read_text())["cluster"] == "4 ranks x 2 a100 on 2 nodes"

    # In a process of its own: a seed that another test has set would be that of the ranks.
    devices = mpi.folder / "devices"
    words = ["run", "-n", "4", "--nodes", "2", "--devices-per-rank", "2", "--log-dir", "devices", "train.py"]
    done = mpi.python_("-m", "simparallel", *words)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert (run / f"worker_{rank}.log").read_text() == (devices / f"worker_{rank}.log").read_text()
    first, second = Trace.load(run / "trace.json"), Trace.load(devices / "trace.json")
    assert simulated(first) == simulated(second)


def sp_run(*words: str) -> int:
    from simparallel.cli import main

    return main.main(words)


def simulated(trace: Trace) -> list[tuple[object, ...]]:
    """Return the times of all events, but not of the exchange of objects, whose sizes differ without pickle."""
    return sorted(
        (e.rank, e.stream, e.name, e.seq, e.sim_end_ps - e.sim_start_ps, e.sent_bytes)
        for e in trace.events
        if e.name != "all_gather"
    )


FAILING = {
    "raises": ("if me == 1: raise ValueError('boo')", 1, "rank 1 of 3 failed: ValueError: boo"),
    "exits": ("import sys\nif me == 2: sys.exit(3)", 3, "rank 2 of 3 failed: sys.exit(3)"),
    "leaves": ("import sys\nif me == 1: sys.exit(0)", 1, "rank 1 returned from its function"),
    "other shape": ("sp.all_reduce(np.ones(2 + (me == 1)))", 1, "rank 1 called all_reduce(sum) float64 (3,)"),
    "unreceived": ("if me == 1: sp.send(np.ones(3), 0, 5)", 1, "rank 0 ended without receiving 1 message"),
    "each other": (
        "sp.recv(np.ones(3), src=(me + 1) % 3)",
        1,
        "every rank waits for another one, so none can continue",
    ),
    "object": ("sp.all_gather_object(lambda: 0)", 1, "class function cannot be sent over MPI"),
}


@pytest.fixture
def no_named_memory() -> Iterator[None]:
    """Nothing new may stay in /dev/shm; segments that other tests share meanwhile disappear when those have started."""

    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("mpich_shm_*")}

    before = names()
    yield
    wait_for(lambda: not names() - before)


@pytest.mark.parametrize("case", FAILING)
def test_failures_are_reported_as_on_devices(mpi: Mpi, case: str, no_named_memory: None) -> None:
    """The job leaves no memory behind."""
    body, code, text = FAILING[case]
    done = mpi.run(3, f"import numpy as np, simparallel as sp\nsp.init()\nme = sp.get_rank()\n{body}\nsp.barrier()\n")
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    records = [json.loads(path.read_text()) for path in (mpi.folder / "runs" / "train").glob("error_rank*.json")]
    assert any(text.split("failed: ")[-1] in record["summary"] for record in records)


def test_rank_that_works_too_long_is_named(mpi: Mpi) -> None:
    sleep = "if sp.get_rank() == 1: time.sleep(60)"
    text = f"import time, simparallel as sp\nsp.init()\nsp.barrier()\n{sleep}\nsp.barrier()\n"
    done = mpi.run(2, text, "--timeout", "1")
    assert done.returncode == 1
    assert "rank 0 waited 1 s in world, collective #2 barrier at train.py:5" in done.stderr
    assert "Missing: rank 1, its last collectives: world #1 barrier at train.py:3" in done.stderr


def test_rank_that_is_killed_ends_the_job(mpi: Mpi) -> None:
    text = "import os, simparallel as sp\nsp.init()\nif sp.get_rank() == 1: os.kill(os.getpid(), 9)\nsp.barrier()\n"
    done = mpi.run(2, text)
    assert done.returncode not in (0, 2)
    assert "no rank gave a reason: a rank may have been killed" in done.stderr


@pytest.mark.parametrize(
    ("victim", "number"), [("launcher", signal.SIGHUP), ("launcher", signal.SIGKILL), ("mpiexec", signal.SIGKILL)]
)
def test_nothing_outlives_a_killed_job(mpi: Mpi, victim: str, number: signal.Signals, no_named_memory: None) -> None:
    text = "import pathlib, simparallel as sp\nsp.init()\nsp.barrier()\n"
    text += "pathlib.Path(f'started_{sp.get_rank()}').touch()\nwhile True: sp.barrier()\n"
    (mpi.folder / "train.py").write_text(text)
    mpi.environment[MARK] = mark = uuid.uuid4().hex
    words = ["env", "--default-signal=HUP", mpi.python]  # nohup ignores it
    words += ["-m", "simparallel", "run", "--transport", "mpi", "-n", "2", "train.py"]
    with subprocess.Popen(
        words, cwd=mpi.folder, env=mpi.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        started = [mpi.folder / f"started_{rank}" for rank in range(2)]
        wait_for(lambda: all(path.exists() for path in started) or launcher.poll() is not None, LIMIT_S)
        assert len(marked(mark)) >= 4
        if victim == "launcher":
            launcher.send_signal(number)
        else:
            os.kill(children(launcher.pid)[0], number)
        wait_for(lambda: not marked(mark))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_mpiexec_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    """With any MPI: mpiexec gets SIGTERM, and can end its ranks."""
    mpiexec, told = tmp_path / "mpiexec", tmp_path / "told"
    mpiexec.write_text(
        f"#!/bin/sh\ntrap 'echo ended > {told}; exit' TERM\necho $$ > {tmp_path}/pid\nwhile true; do sleep 0.01; done\n"
    )
    mpiexec.chmod(0o700)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mpi4py").mkdir()  # to be found; the launcher does not import it
    words = ["-m", "simparallel", "run", "--transport", "mpi", "--mpiexec", str(mpiexec), "train.py"]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}) as job:
        wait_for(lambda: (tmp_path / "pid").exists())
        job.kill()
        wait_for(told.exists)


def test_missing_mpi_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No mpi4py, or an mpiexec that does not exist."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    monkeypatch.setattr("simparallel.comm.mpi.transport.is_available", lambda: False)
    assert sp_run("run", "--transport", "mpi", "train.py") == 2
    assert 'pip install "simparallel[mpi]" mpich' in capsys.readouterr().err
    monkeypatch.setattr("simparallel.comm.mpi.transport.is_available", lambda: True)
    assert sp_run("run", "--transport", "mpi", "--mpiexec", "no-such-command -x", "train.py") == 2
    assert "no-such-command cannot be started" in capsys.readouterr().err
    with refused(sp.errors.InputError):
        sp.Cluster(2, transport="mpi")


# --- scripts started by mpiexec itself --------------------------------------------------------------------

SCRIPT = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import simparallel as sp

sp.init()
sp.init()
me, size = sp.get_rank(), sp.get_world_size()
assert sp.all_gather_object({"rank": me, "array": np.arange(me)})[2]["array"].tolist() == [0, 1]
assert (sp.get_local_rank(), sp.get_local_world_size(), sp.get_num_nodes()) == (me, size, 1)
with ThreadPoolExecutor(1) as other:
    assert other.submit(sp.get_rank).result() == me
    assert "communicates only in the thread" in str(other.submit(sp.barrier).exception())
x = sp.all_reduce(np.full(30_000, me + 1.0))
if len(sys.argv) > 1 and me == 1:
    raise ValueError("boo")
print(f"sum {sp.all_reduce(x)[-1]:g}")
"""


@pytest.mark.parametrize("through", [["-m", "mpi4py"], []], ids=["mpi4py", "plain"])
def test_processes_of_mpiexec_join(mpi: Mpi, through: list[str]) -> None:
    (mpi.folder / "train.py").write_text(SCRIPT)
    done = mpi.mpiexec(3, *through, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 18") == 3
    done = mpi.mpiexec(3, *through, "train.py", "fail")
    assert done.returncode != 0
    assert "ValueError: boo" in done.stderr
    for rank in (0, 2):
        assert f"rank {rank} was stopped in world, collective #3 all_reduce(sum) float64 (30000,)" in done.stderr


def test_example_for_clusters(mpi: Mpi) -> None:
    """The ranks of a job's script meet over MPI, and its program finds its place in torchrun's variables."""
    script = ROOT / "examples" / "clusters" / "train.py"
    (mpi.folder / "train.py").write_text(f"{script.read_text()}\nimport os\nprint('local', os.environ['LOCAL_RANK'])\n")
    done = mpi.mpiexec(3, "-m", "mpi4py", "train.py")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^epoch \d, 3 ranks, loss is ", done.stdout, re.MULTILINE)) == 3
    assert {line for line in done.stdout.splitlines() if "local" in line} == {f"local {rank}" for rank in range(3)}
    assert re.search(r"rank 0 of 3 by \w+_RANK and \w+_SIZE \((PMI|Open MPI)\); the ranks meet over MPI", done.stderr)


def test_one_process_of_mpiexec_is_alone(mpi: Mpi) -> None:
    (mpi.folder / "train.py").write_text("import simparallel as sp\nsp.init()\nprint(sp.get_world_size())\n")
    assert mpi.mpiexec(1, "train.py").stdout.strip() == "1"


PIPELINE = """
import numpy as np
import simparallel as sp

sp.init()
sp.set_seed(1)
net = sp.nn.Sequential(*[layer for _ in range(8) for layer in (sp.nn.Linear(8, 8), sp.nn.Tanh())])
pipeline = sp.parallel.Pipeline(net, sp.nn.CrossEntropyLoss(), 4, "{schedule}")
optimizer = sp.optim.SGD(pipeline.parameters(), lr=0.1)
x, labels = np.random.default_rng(0).standard_normal((10, 8), np.float32), np.arange(10) % 8
for _ in range(3):
    optimizer.zero_grad()
    loss = pipeline.step(x, labels)
    optimizer.step()
print(loss.item().hex())
"""


GPU_PROGRAM = """
import numpy as np
import simparallel as sp

x = sp.Tensor(np.arange(6.0) + sp.get_rank())
work = sp.all_reduce(x * 2, async_op=True)
print(type(x.data).__name__, sp.all_reduce(x).tolist(), work.wait().tolist(), sp.all_to_all(x).tolist())
"""


@pytest.mark.parametrize(("devices", "link"), [(3, "NCCL"), (1, "host memory")])
def test_gpu_arrays_travel_between_machines(mpi: Mpi, devices: int, link: str) -> None:
    """On a stand-in for GPUs: by NCCL, or copied through the host if ranks share one."""
    mpi.environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
    mpi.environment |= {"SIMPARALLEL_STAND_IN": "stand_in.strict", "SIMPARALLEL_STAND_IN_DEVICES": str(devices)}
    found = mpi.run(3, GPU_PROGRAM, "--array", "cupy")
    lines = sorted(line for line in found.stdout.splitlines() if "StrictArray" in line)
    xs = np.arange(6.0) + np.arange(3)[:, None]
    for rank, line in enumerate(lines):
        exchanged = np.tile(xs.sum(0)[2 * rank : 2 * rank + 2], 3)  # x was summed in place
        values = [xs.sum(0).tolist(), (2 * xs.sum(0)).tolist(), exchanged.tolist()]
        assert line == f"[rank {rank}] StrictArray {' '.join(map(str, values))}"
    assert len(lines) == 3, found.stderr
    assert f"use {link}" in found.stdout + found.stderr


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_pipelines_match_those_of_devices(mpi: Mpi, schedule: str) -> None:
    text = PIPELINE.format(schedule=schedule)
    done = mpi.run(4, text)
    assert done.returncode == 0, done.stderr
    devices = mpi.python_("-m", "simparallel", "run", "-n", "4", "train.py")
    assert devices.returncode == 0, devices.stderr
    bits = [re.findall(r"-?0x[0-9a-fp.+-]+", each.stdout) for each in (done, devices)]
    assert len(bits[0]) == 4
    assert bits[0] == bits[1]
