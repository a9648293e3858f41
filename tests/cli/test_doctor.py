"""`simparallel doctor`, and machines that lack something."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from refusals import refused

import simparallel
from simparallel.cli import doctor, main
from simparallel.comm.memory import memfd
from simparallel.comm.memory.segment import SharedSegment
from simparallel.comm.shm import transport
from simparallel.errors import InputError, SharedMemoryError

HOME = str(Path(simparallel.__file__).parents[1])


def states() -> dict[str, str]:
    return {finding.name: finding.state for finding in doctor.findings()}


def test_table_of_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("Runs work here.")
    assert re.match(r"\d+ cores, [\d.]+ .B of memory available, ranks are processes, (no|\d) GPU\n\n", out)
    for name in (
        "memfd",
        "futex",
        "pidfd",
        "posix_fallocate",
        "/dev/shm",
        "cores",
        "affinity",
        "blas",
        "memory",
        "overcommit",
        "descriptors",
        "address space",
        "file size",
        "merged log",
        "cupy",
        "mpi4py",
        "launcher",
    ):
        assert re.search(rf"^{name} +(ok|fallback|absent) +\S", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("environment", "state", "detail"),
    [
        ({}, "absent", "none started this process"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "ok", "rank 1 of 4 by SLURM_PROCID and SLURM_NTASKS (Slurm)"),
        ({"PMIX_RANK": "1"}, "ok", "rank 1 of several by PMIX_RANK (PMIx)"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, "fallback", "SLURM_NTASKS=8"),
    ],
)
def test_launcher_is_named(
    environment: dict[str, str], state: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **environment})
    found = doctor._launcher()
    assert found.state == state
    assert detail in found.detail


def test_blas_kernel_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert states()["blas"] == "ok"
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    told = next(finding for finding in doctor.findings() if finding.name == "blas")
    assert told.state == "fallback"
    assert "OPENBLAS_CORETYPE=Nehalem" in told.detail


def test_forbidden_affinity_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that forbids to set the affinity is reported as a fallback, and runs work."""

    def forbidden(pid: int, cores: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert states()["affinity"] == "fallback"
    transport.spread(1, 2)


def test_blas_uses_the_chosen_kernels(tmp_path: Path) -> None:
    """In a separate process, because BLAS chooses its kernels at load time."""
    code = "from simparallel.base import blas; print(*blas.core())"
    names = []
    for variable in ({}, {"OPENBLAS_CORETYPE": "Nehalem"}):
        environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"} | variable
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": HOME},
        )
        names.append(done.stdout.split())
    if "openblas" not in names[0] or platform.machine() != "x86_64":
        pytest.skip("NumPy's BLAS here has no kernels for that processor")
    assert names[1][-1] == "Nehalem" != names[0][-1]


@pytest.mark.parametrize("name", ["memfd", "futex", "pidfd", "fork"])
def test_disabled_features_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = states()
    monkeypatch.setenv("SIMPARALLEL_DISABLE", name)
    found = states()
    if name == "fork":
        # New interpreters write their records to the merged log themselves.
        del before["merged log"]
    assert found == {**before, name: "fallback"}


@pytest.mark.parametrize(
    ("number", "limit", "told"),
    [
        (resource.RLIMIT_NOFILE, 60, {"descriptors": r"60: room for about \d+ ranks; raise it \(ulimit -n\)"}),
        (resource.RLIMIT_AS, 8 << 30, {
            "address space": r"8\.59 GB: shared memory is the smaller.* \(ulimit -v\)",
            "shared memory of 2 ranks": r"\d.* of address space for each, where 17\.2 GB is usual",
        }),
        (resource.RLIMIT_FSIZE, 8 << 30, {
            "file size": r"8\.59 GB: shared memory, logs and checkpoints are no larger; raise it \(ulimit -f\)",
            "shared memory of 2 ranks": "where 17.2 GB is usual",
        }),
    ],
)  # fmt: skip
def test_process_limits_are_reported(number: int, limit: int, told: dict[str, str]) -> None:
    """In a separate process: this one may already use more address space than the limit."""
    code = f"""
import json, resource
from simparallel.cli import doctor
before = doctor.findings()
resource.setrlimit({number}, ({limit}, resource.getrlimit({number})[1]))
print(json.dumps([before, doctor.findings()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": HOME}
    )
    before, found = json.loads(done.stdout)
    states_before = {name: state for name, state, _ in before}
    assert {name: state for name, state, _ in found} == {**states_before, **dict.fromkeys(told, "fallback")}
    for name, _, detail in found:
        assert re.search(told.get(name, ""), detail)


def test_descriptor_estimate_suffices_for_a_launch(tmp_path: Path) -> None:
    """With as many descriptors as the doctor demands for two ranks, two ranks start."""
    text = """
import os, re, resource
import simparallel as sp
from simparallel.cli import doctor
limit = len(os.listdir("/proc/self/fd")) + 8 + 4 * 2
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 1000))
print([f.detail for f in doctor.findings() if f.name == "descriptors"])
print(sp.launch(sp.get_rank, world_size=2, echo=False))
"""
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": HOME}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    assert re.fullmatch(r"\['\d+: room for about 2 ranks; raise .*'\]\n\[0, 1\]\n", done.stdout)


def detail(name: str) -> str:
    return next(": ".join(finding[1:]) for finding in doctor.findings() if finding.name == name)


def test_cupy_without_a_gpu_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda *names: "13.4" if "cupy" in names else "")
    monkeypatch.setattr(doctor.backend, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.backend, "why_no_gpu", lambda: "there is no NVIDIA driver")
    assert detail("cupy") == "fallback: 13.4; there is no NVIDIA driver; arrays are NumPy's"
    monkeypatch.setattr(doctor.backend, "device_count", lambda: 2)
    assert detail("cupy") == "ok: 13.4; 2 GPUs"


def test_mpi4py_without_mpi_library_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_version", lambda *names: "4.1" if "mpi4py" in names else "")
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor, "LINKER", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert detail("mpi4py").startswith("fallback: 4.1; no MPI library is found")
    library = tmp_path / "lib" / "libmpi.so.12"
    library.parent.mkdir()
    library.touch()
    assert detail("mpi4py") == f"ok: 4.1; simparallel run --transport mpi; {library}"


def test_futex_without_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.futex_answer() == errno.EAGAIN
    monkeypatch.setattr(doctor, "futex_answer", lambda: errno.ENOSYS)
    assert detail("futex").startswith("fallback: it does not work here (Function not implemented)")


def test_unusable_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert main.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "posix_fallocate           FATAL     No space left on device" in out
    assert "No run is possible here: posix_fallocate, shared memory of 2 ranks." in out


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5)])
def test_cpu_limit(text: str, cores: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_lines", lambda path: [text] if path.endswith("cpu.max") else [])
    assert doctor.cpu_limit() == cores


def test_available_memory_respects_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"meminfo": "MemAvailable: 1000 kB", "memory.max": "300000", "memory.current": "100000"}
    monkeypatch.setattr(memfd, "_lines", lambda path: [files[Path(path).name]] if Path(path).name in files else [])
    assert memfd.available_memory() == 200_000


def test_lack_of_shared_memory_gives_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPARALLEL_DISABLE", "memfd")
    monkeypatch.setattr(memfd, "free_bytes", lambda folder: 4096)
    with refused(SharedMemoryError):
        SharedSegment(2)


def test_only_optional_features_can_be_disabled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIMPARALLEL_DISABLE", "memfd, futex,")
    assert [memfd.is_disabled(name) for name in ("memfd", "futex", "pidfd", "fd")] == [True, True, False, False]
    monkeypatch.setenv("SIMPARALLEL_DISABLE", "futex,memdf")
    told = "SIMPARALLEL_DISABLE: 'memdf' is not one of memfd, futex, pidfd, fork."
    with refused(InputError):
        simparallel.launch(simparallel.get_rank, world_size=2)
    assert main.main(["doctor"]) == 2
    assert told in capsys.readouterr().err


# --- runs on poor machines ---------------------------------------------------------------------------

PROGRAM = """
import logging, sys
import numpy as np
import simparallel as sp
def train(size_bytes):
    logging.getLogger("poor").warning("hello from a rank")
    return int(sp.all_reduce(np.ones(size_bytes, np.uint8))[0])
try:
    print(sp.launch(train, (int(sys.argv[1]),), world_size=2, log_dir=sys.argv[2], echo=False))
except (sp.errors.RunFailedError, sp.errors.SharedMemoryError) as error:
    print(type(error.__cause__ or error).__name__, error)
"""


@cache
def cannot_mount() -> str:
    """Return the reason why no private /dev/shm can be mounted; "" if it can."""
    if shutil.which("unshare") is None:
        return "needs the command unshare"
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip()


def run_with_shm(folder: Path, size: str, read_only: bool, size_bytes: int, disable: str) -> str:
    if cannot_mount():
        pytest.skip(f"a /dev/shm of one's own cannot be mounted: {cannot_mount()}")
    script = folder / "script.py"
    script.write_text(PROGRAM)
    call = [sys.executable, str(script), str(size_bytes), str(folder / "log")]
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm" + (" && mount -o remount,ro /dev/shm" * read_only)
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *call],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": HOME, "SIMPARALLEL_DISABLE": disable},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr  # no SIGBUS on any rank
    assert "SIGBUS" not in ended.stdout
    return ended.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("disable", "read_only"), [("", True), ("memfd", False), ("memfd", True), ("memfd,futex,pidfd", False)]
)
def test_tiny_or_read_only_dev_shm(tmp_path: Path, disable: str, read_only: bool) -> None:
    assert run_with_shm(tmp_path, "64k", read_only, 8 << 20, disable) == "[2, 2]\n"
    for rank in range(2):
        own = (tmp_path / "log" / f"worker_{rank}.log").read_text()
        assert own.count("hello from a rank") == 1
    merged = (tmp_path / "log" / "scheduler.log").read_text()
    if read_only:
        assert "records of the devices are not merged here, only in worker_N.log: [Errno 30]" in merged
    else:
        assert merged.count("hello from a rank") == 2


@pytest.mark.process
def test_runs_without_the_merged_log(tmp_path: Path) -> None:
    """A checkout on a machine where nothing is installed: records stay in the ranks' logs, and a note says so."""
    (tmp_path / "multiprocessing_logging.py").write_text("raise ImportError('not installed')\n")
    program = (
        "import logging, simparallel as sp\n"
        "def train(): logging.getLogger('mine').warning('hello from a rank')\n"
        "sp.launch(train, world_size=2, log_dir='log', echo=False)\n"
        "from simparallel.cli import doctor\n"
        "print(*(f for f in doctor.findings() if f.name == 'merged log'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{HOME}"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    assert "not installed; records are only in each worker_N.log" in ended.stdout
    for rank in range(2):
        assert "hello from a rank" in (tmp_path / "log" / f"worker_{rank}.log").read_text()
    merged = (tmp_path / "log" / "scheduler.log").read_text()
    assert "records of the devices are not merged here, only in worker_N.log: not installed" in merged


@pytest.mark.process
def test_small_dev_shm_that_fills_up(tmp_path: Path) -> None:
    """It has room for the beginning, but not for the array."""
    out = run_with_shm(tmp_path, "8m", False, 8 << 20, "memfd")
    assert out.startswith("SharedMemoryError rank ")
    needed, available = map(int, re.search(r"(\d+) bytes of shared memory cannot be reserved; (\d+) are", out).groups())
    assert available < needed >= 4 << 20  # each of two ranks exposes the half that the other one reduces


@pytest.mark.process
@pytest.mark.parametrize("disable", ["futex", "pidfd", "memfd,futex,pidfd,fork"])
def test_deaths_are_reported_without_features(disable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import simparallel as sp

    monkeypatch.setenv("SIMPARALLEL_DISABLE", disable)
    monkeypatch.setenv("SIMPARALLEL_FAULT", "rank=1;seq=3;phase=reduce;action=SIGKILL")

    def train() -> None:
        for _ in range(5):
            sp.barrier()

    with refused(sp.errors.RunFailedError) as caught:
        sp.launch(train, world_size=3, echo=False)
    for rank in (0, 2):
        assert "was killed by SIGKILL" in caught.value.reports[rank]["summary"]
