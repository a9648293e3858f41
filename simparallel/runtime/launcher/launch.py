"""The two entry points: `launch` for one run, `Cluster` for devices that stay warm between runs."""

from __future__ import annotations

import inspect
import logging
import math
import os
import reprlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, Unpack

from simparallel.algorithms import names
from simparallel.base.attributes import setting
from simparallel.base.callsite import user_level
from simparallel.base.checks import check_choice, check_count, check_seconds
from simparallel.base.html import table
from simparallel.base.system import missing_for_processes
from simparallel.clock.memory import parse_bytes
from simparallel.clock.recording import check_record, join, timer_of
from simparallel.comm.fault_spec import VARIABLE, parse
from simparallel.comm.memory.memfd import disabled, start_method
from simparallel.comm.transport import CHECKS, DEFAULT_TIMEOUT_S
from simparallel.errors import InputError, LaunchError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec, describe
from simparallel.machine.ranktable import RankTable
from simparallel.runtime.environment import places
from simparallel.runtime.launcher import settings as checked
from simparallel.runtime.launcher.pool import START_LIMIT_S, Pool, pack
from simparallel.runtime.launcher.settings import ClusterSettings, check_function, check_keywords
from simparallel.runtime.log_folder import RANK_LINKS, forget_reports
from simparallel.runtime.preflight import check_memory, check_not_in_a_rank
from simparallel.runtime.ranks.notices import Notes
from simparallel.runtime.ranks.rank import RunSettings
from simparallel.runtime.ranks.threads import run_threads
from simparallel.runtime.reports import Outcome, raise_failure
from simparallel.trace import Trace

TRANSPORTS = ("shm", "inline")
P = ParamSpec("P")
T = TypeVar("T")


@cache
def usual_transport() -> str:
    """Return "shm" where device processes can run, else "inline", after a line that says so once."""
    if not (missing := missing_for_processes()):
        return "shm"
    print(f'simparallel: {missing}, so ranks are threads that take turns (transport="inline").', file=sys.stderr)
    return "inline"


class Results(list[T]):
    """The return values of all ranks, in order of rank, with the run's trace, metrics and memory.

    Made by `launch` and `Cluster.run`.

    Attributes:
        trace: the events of all ranks.
        metrics: values logged with `sp.log`: rank -> list of (step, name, value).
        memory: rank -> memory of its device, as counted: peak_bytes, at_peak and live by category, limit_bytes; under
            "devices" the same for each of its devices, by name; for a rank on a GPU, under "measured" the peak_bytes
            that its memory pool held on the GPU, and the pool's limit_bytes.
    """

    def __init__(self, outcomes: list[Outcome], cluster: ClusterSpec) -> None:
        super().__init__(outcome.value for outcome in outcomes)
        # The program may have replaced the device that the launcher assumed.
        cluster = next((outcome.cluster for outcome in outcomes if outcome.cluster is not None), cluster)
        recorded = [outcome.recorded for outcome in outcomes]
        events, totals = join(recorded)
        self.trace = Trace(events, cluster, totals=totals, timed_by=timer_of(recorded))
        self.metrics = {outcome.rank: outcome.metrics for outcome in outcomes}
        self.memory = {outcome.rank: outcome.memory for outcome in outcomes}

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: each rank's return value, and the summary of the trace."""
        rows = [(str(rank), reprlib.repr(value)) for rank, value in enumerate(self)]
        return table([("rank", "returned"), *rows], left=True) + self.trace._repr_html_()


class Around(Protocol):
    """A tool that runs code around the program of each rank, such as `testing.CommCounter`."""

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that the ranks call in place of `function`."""

    def collect(self, outcomes: list[Outcome]) -> None:
        """Take the tool's own part out of the values that the wrapped function returned."""


@contextmanager
def running(around: Around) -> Iterator[None]:
    """Let a tool run around the programs of all runs that begin inside the block."""
    with setting(Cluster, around=(*Cluster.around, around)):
        yield


class Cluster:
    """Simulated devices, one process each, that stay warm between runs.

    Devices keep their imported modules, and the state in them, from run to run. If the file of such a module has
    changed when a run begins, the devices are replaced by new ones, with a warning, so that the run uses the new code.

    Args:
        world_size: number of ranks.
        device: the hardware that prices their work: name of a preset, path of a .json file, `DeviceSpec` or
            `ClusterSpec`; None assumes an a100, and lets the program choose (`set_context(device_target=…)`).
        link: the links between devices (inside a node); by default the preset's.
        nodes: number of simulated nodes, with equally many devices on each; or the ranks of each node.
            It determines `node_group()`, `get_local_rank()` and the links that price communication.
        node_link: the links between nodes; by default the preset's.
        rank_table: a rank table, or the path of one: it gives the nodes, and each rank's device number.
        environment: variables for `os.environ` of every rank, such as MASTER_ADDR, in addition to RANK, LOCAL_RANK,
            WORLD_SIZE, … (not with "inline", whose ranks are threads).
        transport: "shm" (processes) or "inline" (threads of this process, taking turns); None means "shm", or, after a
            line that says so, "inline" on systems where processes cannot run.
        log_dir: directory for `scheduler.log` and `worker_N.log`, and links: `rank.N/stdout`, and with
            several nodes `node_K/worker_N.log`; None keeps no files.
        log_links: name of each rank's link, with "{rank}" in it.
        log_files: names of files that you write to `log_dir` yourself, such as pictures: an earlier run's are
            removed with its logs. Files that no run wrote are never replaced, see Raises.
        device_memory: capacity of each device, such as "64MB"; None for no limit. With array="cupy" it also limits the
            memory pool of each rank on its GPU.
        devices_per_rank: simulated devices of each rank, "sim:0" to "sim:n-1", of the same kind and with the
            same link between them; None creates each when the program first names it. One process drives them all.
        dtype: what the described devices compute in, such as "bfloat16", see `ClusterSpec`: times, and bytes that are
            sent, are those of this type, and the values stay float32; None for that of `device`.
        timeout_s: seconds that a rank waits for another one before it raises, and that a rank may stay stopped
            (SIGSTOP) before it is killed; `math.inf` for no limit. With "inline" also the time that a rank may keep the
            turn from the others; a call that Python cannot interrupt (`time.sleep`, a lock) is then left behind in
            its thread.
        algorithm: "direct", "naive", "ring", "tree" or "halving_doubling", for collectives that do not name
            one themselves. Collectives that the algorithm does not implement use "direct".
        arena_bytes: address space for each rank's shared memory, such as "1GB"; 0 for the default.
        blas_threads: BLAS threads of each device; None for cores // ranks, at least 1.
        start_timeout_s: seconds that the device processes may take to start.
        check: facts about each collective call that ranks compare before they touch data. "full":
            everything that has to match (number, op, reduce op, root, dtype, shape, dim, ranks). "light":
            the op, and the operator or reducer that makes the call. "off": nothing; errors then name no call
            sites, and a wrong program hangs until `timeout_s` or gives wrong numbers.
        record: events kept for the trace. "summary": exact totals, and the events of whole steps, up to about
            100,000 of all ranks: every step of a short run; the first and the last steps of a long one, and pairs
            of steps in between. "full": all events, with the live memory after each (`Trace.memory`); about 400 bytes
            each on a rank and 700 here. "off": the simulated clocks alone. True means "full", False "off".
        array: "numpy", or "cupy": each new Tensor, parameter and optimizer state is on the GPU of its rank. Ranks
            beyond the number of GPUs share them. Random numbers, and so weights and masks, are the same as with NumPy.
        echo: print the output of ranks, with `[rank N]` before each line; or the ranks whose output is printed.

    Attributes:
        world_size: number of ranks.
        spec: the described hardware, a `ClusterSpec`.
        trace: the events of the last run, a `Trace`.

    Raises:
        ClusterError: unknown device, a `world_size` below 1, or `nodes` that do not fit it.
        RankTableError: the rank table breaks a rule.
        InputError: unknown transport, algorithm or check, bad timeout; at the first run: log_dir cannot be
            used, or contains a file under one of these names that no earlier run wrote.
        LaunchError: the device processes did not start (at the first run).

    Example:
        >>> with sp.Cluster(2, transport="inline") as cluster:
        ...     cluster.run(pow, 2, 3)
        [8, 8]
    """

    # Runs a program in place of the ranks: (call, settings of the run) -> outcomes; see `predict.dry_run`.
    instead: ClassVar[Callable[..., list[Outcome]] | None] = None
    # Whether each rank of a run is a process of its own, forked from the warm one or, where it is unsafe, new: then no
    # run sees what an earlier one changed in its process. Not on GPUs, which a forked process cannot use.
    forks = False
    # Seconds that a run of ranks that are threads may take.
    limit_s: ClassVar[float] = math.inf
    # Tools around the programs of all runs; see `running`.
    around: ClassVar[tuple[Around, ...]] = ()

    def __init__(
        self,
        world_size: int,
        *,
        device: str | DeviceSpec | ClusterSpec | None = None,
        link: LinkSpec | None = None,
        nodes: int | Sequence[Sequence[int]] = 1,
        node_link: LinkSpec | None = None,
        rank_table: RankTable | str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        log_links: str = RANK_LINKS,
        log_files: Sequence[str] = (),
        start_timeout_s: float = START_LIMIT_S,
        transport: str | None = None,
        log_dir: str | Path | None = None,
        device_memory: str | int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        algorithm: str = "direct",
        check: str = "full",
        arena_bytes: int | str = 0,
        blas_threads: int | None = None,
        record: bool | str = "summary",
        array: str = "numpy",
        echo: bool | Collection[int] = True,
        devices_per_rank: int | None = None,
        dtype: str | None = None,
    ) -> None:
        if transport is None:
            # A dry run has no ranks.
            transport = usual_transport() if self.instead is None else "shm"
        if transport not in TRANSPORTS:
            mpi = " MPI processes run scripts: simparallel run --transport mpi." * (transport == "mpi")
            raise InputError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}.{mpi}")
        timeout_s = check_seconds("Cluster", "timeout_s", timeout_s)
        start_timeout_s = check_seconds("Cluster", "start_timeout_s", start_timeout_s)
        check_choice("Cluster", "algorithm", algorithm, names())
        check_choice("Cluster", "check", check, CHECKS)
        # All settings are checked here; processes start with the first run.
        where = places(world_size, nodes, rank_table, checked.environment(environment))
        self.spec = describe(
            world_size, device, link, where.nodes, node_link, devices_per_rank, where.device_ids, dtype
        )
        self.world_size = world_size
        self.transport = transport
        log_folder = checked.folder("log_dir", log_dir)
        self.log_dir = None if log_folder is None else str(log_folder)
        self.timeout_s = timeout_s
        if blas_threads is not None:
            blas_threads = check_count("Cluster", "blas_threads", blas_threads)
        self._run_settings: dict[str, Any] = {
            "timeout_s": timeout_s,
            "algorithm": algorithm,
            "check": check,
            "record": check_record(record),
            "array": checked.array(array),
            "blas_threads": blas_threads,
            "memory_bytes": None if device_memory is None else parse_bytes(device_memory),
        }
        self.echo = echo
        self.trace = Trace([], self.spec)
        self._pool_settings: dict[str, Any] = {
            "device_ids": where.device_ids, "environment": where.environment, "log_dir": log_folder,
            "links": checked.text("log_links", log_links), "files": checked.names("log_files", log_files),
            "arena_bytes": checked.arena_size(arena_bytes), "blas_threads": blas_threads,
            "start_timeout_s": start_timeout_s,
        }  # fmt: skip
        self._pool: Pool | None = None
        self._closed = False
        self._running = threading.Lock()

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Results[T]:
        """Call `function(*args, **kwargs)` on every rank.

        Returns:
            The ranks' return values in order, with `.trace` and `.metrics`.

        Raises:
            RunFailedError: a rank raised, exited or died; the root cause comes first. `__cause__` is the
                original exception, without its traceback, which is in the message; None if a process ended without
                an exception, or with one that cannot be pickled (a lock in it, a constructor with arguments of its
                own). Ranks that are threads need no pickling.
            LaunchError: the function cannot be sent, the devices cannot be started, they are busy with a run of
                another thread, or they belong to the process that this one was forked from.
            InputError: SIMPARALLEL_FAULT has a wrong field (see `simparallel.comm.fault_spec`), or SIMPARALLEL_DISABLE
                a wrong name.
            KeyboardInterrupt: after all ranks have stopped; the cluster stays usable.
        """
        # IPython and pytest hide frames with this variable: the failure is on the ranks, not in our code.
        __tracebackhide__ = True
        if self._closed:
            raise LaunchError("this Cluster is closed; create a new one.")
        if self._pool is not None and self._pool.owner != os.getpid():
            raise LaunchError(
                f"this Cluster's devices belong to process {self._pool.owner}, and process {os.getpid()} was forked "
                "from it: two processes would receive each other's answers. Create a new Cluster here."
            )
        check_function("run", function)
        # Threads may be nested, up to a limit of their own.
        if self.transport != "inline":
            check_not_in_a_rank()
        if not self._running.acquire(blocking=False):
            raise LaunchError("this Cluster is busy with another run; wait for it, or create a second Cluster.")
        around = self.around
        for each in around:
            function = each.wrapped(function)
        try:
            outcomes = self._outcomes(function, args, kwargs)
        except KeyboardInterrupt as error:
            # Our frames would bury the note that says where the ranks were.
            raise error.with_traceback(None) from None
        finally:
            self._running.release()
        for each in reversed(around):
            each.collect(outcomes)
        # Also after a failure: the trace of a failed run shows what led to it.
        results: Results[T] = Results(outcomes, self.spec)
        self.trace = results.trace
        raise_failure(outcomes, self.log_dir)
        lost = [f"of rank {o.rank} {o.lost_output}" for o in outcomes if o.lost_output]
        if lost:
            warnings.warn(f"the logs lack output: {', '.join(lost)}.", stacklevel=user_level())
        return results

    def _outcomes(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Outcome]:
        if self.instead is not None:
            return self.instead(partial(function, *args, **kwargs), RunSettings(self.spec, **self._run_settings))
        is_inline = self.transport == "inline"
        faults = parse(self._fault_text(), self.world_size, threads=is_inline)
        # This raises for a wrong SIMPARALLEL_DISABLE before anything starts.
        disabled()
        settings = RunSettings(self.spec, faults=faults, **self._run_settings)
        notes = Notes(self.log_dir)
        try:
            if is_inline:
                self._forget_reports()
                call = partial(function, *args, **kwargs)
                arena_bytes = self._pool_settings["arena_bytes"]
                return run_threads(call, settings, tell=notes, arena_bytes=arena_bytes, limit_s=self.limit_s)
            # Pack first: a function that cannot be sent should not cost the start of the processes.
            payload = pack(function, args, kwargs)
            pool = self._warm_pool()
            self._forget_reports()
            fork = self.forks and settings.array == "numpy"
            if fork and start_method() == "spawn":
                # The next run starts new ones.
                fork, pool.usable = False, False
            return pool.run(payload, settings, fork=fork, echo=self.echo, note=notes, apart=notes.bar.hidden)
        finally:
            notes.bar.close()
            if self._pool is not None and not self._pool.usable:
                # Its processes may be in any state; the next run starts new ones.
                self._pool.close()
                self._pool = None

    def _fault_text(self) -> str:
        return os.environ.get(VARIABLE, "")

    def _warm_pool(self) -> Pool:
        if self._pool is not None and not self._pool.is_intact():
            logging.getLogger("simparallel").warning("a process ended between two runs; starting new ones")
            self._pool.close()
            self._pool = None
        if self._pool is not None and (changed := self._pool.sources.changed()):
            self._pool.close()
            # Forget the pool before the warning, which a filter may turn into an error.
            self._pool = None
            warnings.warn(
                f"{', '.join(map(os.path.basename, changed))} changed since the devices imported it; starting new "
                "ones. What earlier runs kept on them is gone.",
                stacklevel=user_level(),
            )
        # Here, and not at construction: a Cluster costs nothing until its first run.
        if self._pool is None:
            check_memory(self.world_size)
            self._pool = Pool(self.spec.nodes, **self._pool_settings)
        return self._pool

    def _forget_reports(self) -> None:
        """Remove the previous run's failure reports; called once the next run is sure to begin."""
        if self.log_dir is not None:
            forget_reports(Path(self.log_dir))

    def close(self) -> None:
        """End the device processes. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "warm" if self._pool else "idle"
        return f"Cluster({self.spec.name}, transport={self.transport!r}, {state})"


def launch(
    fn: Callable[..., T],
    args: tuple[Any, ...] | list[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    world_size: int = 1,
    **settings: Unpack[ClusterSettings],
) -> Results[T]:
    """Start `world_size` devices, call `fn(*args, **kwargs)` on each, and end them.

    Args:
        fn: any function, also one defined in a notebook cell.
        args, kwargs: its arguments, copied to every rank.
        world_size: number of devices.
        settings: the settings of `Cluster`: device, link, transport, log_dir, timeout_s, algorithm, …

    Returns:
        The ranks' return values in order, with `.trace` and `.metrics`.

    Raises:
        InputError: `args` is neither a tuple nor a similar iterable, `kwargs` is not a dict, or `fn` is not a function.
        TypeError: unknown setting.
        Also every error of `Cluster` and `Cluster.run`.

    Example:
        >>> sp.launch(lambda: sp.get_rank(), world_size=3, transport="inline")
        [0, 1, 2]
    """
    # See `Cluster.run`.
    __tracebackhide__ = True
    check_keywords(launch, settings)
    check_function("launch", fn)
    args, kwargs = checked.arguments(args, kwargs)
    with Cluster(world_size, **settings) as cluster:
        return cluster.run(fn, *args, **kwargs)


def _with_settings(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature with the settings of `Cluster` written out, for `help` and tab completion."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    settings = [p for p in inspect.signature(Cluster).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return inspect.signature(function).replace(parameters=[*own, *settings])


launch.__signature__ = _with_settings(launch)  # type: ignore[attr-defined]
