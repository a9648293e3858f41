"""Reports on the ends of ranks, and the root cause of several failures."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from simparallel.base import pickling
from simparallel.base.callsite import cell_of, is_inside, short_place
from simparallel.base.files import write_atomically
from simparallel.base.system import KILL
from simparallel.base.units import format_ranks
from simparallel.clock.recording import Recorded
from simparallel.comm.diagnosis import unreceived
from simparallel.comm.memory.segment import SharedSegment
from simparallel.comm.transport import LEFT
from simparallel.errors import DeadlineError, RankFailedError, RunFailedError, SimParallelError
from simparallel.machine.cluster import ClusterSpec
from simparallel.runtime.log_folder import SCHEDULER_LOG
from simparallel.runtime.module_watch import is_installed

# Places of interrupted ranks that a message lists.
MAX_PLACES = 8


@dataclass
class Outcome:
    """The end of one rank, and its records.

    Attributes:
        rank: the rank.
        value: return value of its function.
        report: None, or the failure: summary, traceback, places (the user's lines of the traceback), secondary (caused
            by another rank's failure), time_ns, pid, exit_code, at (the user's line that was running, such as
            "train.py:7 in step"), missing (ranks that it waited for too long), was_stopped (present only if a signal
            stopped it), exception (pickled, or None if that fails; the exception itself if the rank is a thread).
        recorded: its events and totals.
        metrics: (step, name, value) of each `sp.log`.
        memory: usage of its devices, see `Results`.
        cluster: the hardware that priced its work; None if the rank ended before it had one.
        kept_messages: (sender, text) of messages that arrived with a tag that it never received.
        modules: files of the user's modules that its process has imported since the previous run.
        lost_output: size and cause of output that could not be written to its log; "" for none.
    """

    rank: int
    value: Any = None
    report: dict[str, Any] | None = None
    recorded: Recorded = field(default_factory=Recorded)
    metrics: list[tuple[int, str, float]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    cluster: ClusterSpec | None = None
    kept_messages: list[tuple[int, str]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    lost_output: str = ""


def failure_report(error: BaseException, *, keep: bool = False) -> dict[str, Any]:
    """Return an exception as plain data that can be sent and saved.

    Args:
        error: the exception.
        keep: store the exception itself, not pickled: for ranks that are threads.
    """
    # First: the earliest failure is the cause, and a text may take long.
    time_ns, exit_code = time.monotonic_ns(), 1
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else 1
        summary = f"sys.exit({error.code!r})"
    # A rank that has left the run normally caused no failure: the error of the rank that waits for it is the root.
    caused_by_others = isinstance(error, RankFailedError) and error.facts.get("cause") != LEFT
    carried: Any = error
    if not keep:
        try:
            carried = pickling.dumps(error)
        except BaseException:
            # A user's class may fail here in any way; the text of the error is kept.
            carried = None
    return {
        **_report(os.getpid(), summary, exit_code, caused_by_others or isinstance(error, KeyboardInterrupt)),
        "traceback": "".join(traceback.format_exception(_without_our_frames(error))),
        "places": _places(error),
        "notes": list(map(str, getattr(error, "__notes__", ()))),
        "at": _innermost_line(error),
        "time_ns": time_ns,
        "missing": list(error.facts.get("missing", ())) if isinstance(error, DeadlineError) else [],
        "exception": carried,
    }


def _without_our_frames(error: BaseException) -> BaseException:
    """Return the error with a traceback that starts at the user's code."""
    # An error without any of the user's lines keeps its traceback.
    trace = error.__traceback__
    while trace is not None and is_inside(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def _places(error: BaseException) -> str:
    """Return the traceback to show below the message: without the message, and without lines of this package.

    An error that the package did not raise on purpose keeps these lines. Returns "" if no line is left.
    """
    report = traceback.TracebackException.from_exception(error)
    cells: dict[str, str] = {}
    chain: list[tuple[traceback.TracebackException | None, BaseException | None]] = [(report, error)]
    # The list grows during the loop, which appends causes and contexts.
    for one, raised in chain:
        if one is not None and raised is not None:
            one.stack = _users_lines(one.stack, meant=isinstance(raised, SimParallelError))
            cells |= {line.filename: cell for line in one.stack if (cell := cell_of(line.filename))}
            chain += [(one.__cause__, raised.__cause__), (one.__context__, raised.__context__)]
    is_alone = report.__cause__ is None and (report.__context__ is None or report.__suppress_context__)
    if is_alone and not report.stack and not isinstance(error, BaseExceptionGroup):
        return ""
    # The message stands above the traceback already, so its end only names the class. Groups show their members.
    lines = list(report.format())
    if not isinstance(error, BaseExceptionGroup):
        count = len(list(report.format_exception_only()))
        lines[-count:] = [_name(type(error))]
    text = "".join(lines)
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', f"Cell {cell}")
    return text.rstrip()


def _innermost_line(error: BaseException) -> str:
    """Return the user's line that was running when the error was raised; "" if there was none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_inside(code.co_filename) and not is_installed(code.co_filename):
            found = short_place(code.co_filename, line, code.co_name)
    return found


def where_stopped(reports: Mapping[int, dict[str, Any] | None]) -> str:
    """Return the places at which ranks were interrupted, one per line; "" if there are none."""
    ranks_at: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if report is not None and report["at"] and report["summary"] == KeyboardInterrupt.__name__:
            ranks_at.setdefault(report["at"], []).append(rank)
    lines = [f"{format_ranks(ranks)} {'were' if ranks[1:] else 'was'} at {at}" for at, ranks in ranks_at.items()]
    more = [f"and {len(lines) - MAX_PLACES} more places"] if len(lines) > MAX_PLACES else []
    return "\n".join(lines[:MAX_PLACES] + more)


def _users_lines(stack: traceback.StackSummary, *, meant: bool) -> traceback.StackSummary:
    # An unexpected error in our own code is a bug of ours: keep the lines that show it.
    if stack and is_inside(stack[-1].filename) and not meant:
        return stack
    return traceback.StackSummary.from_list([line for line in stack if not is_inside(line.filename)])


def _name(kind: type[BaseException]) -> str:
    """Return the name of an exception class as tracebacks print it."""
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return module + kind.__qualname__


def report_unreceived(segment: SharedSegment, outcomes: list[Outcome]) -> None:
    """Report unreceived messages as a failure of their receiver, unless some rank has failed already."""
    if all(outcome.report is None for outcome in outcomes):
        kept = {outcome.rank: outcome.kept_messages for outcome in outcomes}
        of_rank = {outcome.rank: outcome for outcome in outcomes}
        for rank, error in unreceived(segment, kept).items():
            report = of_rank[rank].report = failure_report(error)
            report["pid"] = segment.words[segment.map.pid(rank)]


def check_received(segment: SharedSegment, rank: int, kept: list[tuple[int, str]]) -> None:
    """Check, when all ranks have ended, that one rank has received all messages to it.

    Raises:
        CommError: messages are left.
    """
    error = unreceived(segment, {rank: kept}).get(rank)
    if error is not None:
        raise error


def death_report(pid: int, exit_code: int | None, *, by_us: bool = False) -> dict[str, Any]:
    """Return the report of a process that ended without sending one.

    Args:
        pid: the process.
        exit_code: negative for a signal, None if unknown.
        by_us: the launcher ended it because of another rank's failure.
    """
    if exit_code is None:
        summary, code = "process ended; the host process, which would know how, does not answer", 1
    elif exit_code < 0:
        name = signal.Signals(-exit_code).name
        often = ", often the out-of-memory killer" if exit_code == -KILL and not by_us else ""
        # The exit code of shells: 128 plus the number of the signal.
        summary, code = f"killed by {name}{often}", 128 - exit_code
    else:
        summary, code = f"process ended with exit code {exit_code} in the middle of the run", exit_code or 1
    return _report(pid, summary, code, by_us)


def stop_report(pid: int, timeout_s: float, *, secondary: bool = False) -> dict[str, Any]:
    """Return the report of a process that a signal had stopped for too long, so that it was killed.

    `secondary`: it was found stopped, and killed, after another rank's failure.
    """
    summary = (
        f"process is stopped (SIGSTOP), was not continued within {timeout_s:g} s (timeout_s), and was killed. "
        "Send SIGCONT in time, or raise timeout_s (--timeout)."
    )
    return {**_report(pid, summary, 1, secondary), "was_stopped": True}


def _report(pid: int, summary: str, code: int, secondary: bool) -> dict[str, Any]:
    return {
        "summary": summary,
        "traceback": "",
        "places": "",
        "at": "",
        "secondary": secondary,
        "time_ns": time.monotonic_ns(),
        "pid": pid,
        "exit_code": code,
        "exception": None,
    }


def write_report(log_dir: str | Path, rank: int, report: Mapping[str, Any]) -> None:
    """Write the report of a rank that failed to `error_rankN.json`."""
    text = json.dumps(plain_report(report), indent=1) + "\n"
    write_atomically(Path(log_dir, f"error_rank{rank}.json"), text.encode())


def raise_failure(outcomes: list[Outcome], log_dir: str | Path | None = None, world_size: int | None = None) -> None:
    """Raise the error of a failed run, after writing the reports of its ranks; return if no rank has failed.

    Args:
        outcomes: of the ranks that have run.
        log_dir: the directory of the reports; None for none.
        world_size: number of ranks, if some of them have not run.

    Raises:
        RunFailedError: the root cause comes first; `__cause__` is its original exception.
    """
    __tracebackhide__ = True
    if all(outcome.report is None for outcome in outcomes):
        return
    error, cause = run_failed(outcomes, log_dir, world_size)
    try:
        for rank, report in error.facts["reports"].items():
            if log_dir is not None:
                write_report(log_dir, rank, report)
    except OSError as problem:
        # A full disk must not replace the error of the run.
        error.add_note(f"error_rankN.json could not be written: {problem}")
    raise error from cause


def run_failed(
    outcomes: list[Outcome], log_dir: str | Path | None, world_size: int | None
) -> tuple[RunFailedError, BaseException | None]:
    """Return the error of a failed run, root cause first, and the original exception.

    The root cause is the earliest failure that another rank did not cause. If it is a timeout of a wait for ranks that
    a signal had stopped, the root cause is the stopped rank.
    """
    reports = {outcome.rank: outcome.report for outcome in outcomes if outcome.report is not None}
    order = sorted(reports, key=lambda rank: (reports[rank]["secondary"], reports[rank]["time_ns"]))
    # A stable sort: only a stopped rank that the first failure waited for moves to the front.
    missing = reports[order[0]].get("missing", ())
    order.sort(key=lambda rank: not (rank in missing and reports[rank].get("was_stopped")))
    root, others = order[0], order[1:]
    cause = reports[root]
    lines = [f"rank {root} of {world_size or len(outcomes)} failed: {cause['summary']}"]
    if cause["places"]:
        lines += ["", f"Traceback of rank {root} (pid {cause['pid']}):", cause["places"]]
    stopped = [rank for rank in sorted(others) if reports[rank]["secondary"]]
    if stopped:
        lines += ["", f"Stopped because of it: {format_ranks(stopped)}.", *_notes(reports, stopped)]
        lines += filter(None, [where_stopped({rank: reports[rank] for rank in stopped})])
    independent = [rank for rank in others if not reports[rank]["secondary"]]
    same = [rank for rank in sorted(independent) if _error(reports[rank]) == _error(cause)]
    if same:
        lines += ["", f"Failed in the same way: {format_ranks(same)}.", *_notes(reports, same)]
    later = [f"Also failed, later: rank {r}: {reports[r]['summary']}" for r in independent if r not in same]
    lines += ["", *later] if later else []
    names = [] if log_dir is None else [os.path.join(log_dir, name) for name in (f"worker_{root}.log", SCHEDULER_LOG)]
    # Ranks that are threads have no logs.
    if logs := [name for name in names if os.path.exists(name)]:
        lines += ["", f"Logs: {', '.join(logs)}"]
    plain = {rank: plain_report(report) for rank, report in reports.items()}
    error = RunFailedError("\n".join(lines), rank=root, exit_code=cause["exit_code"], reports=plain)
    return error, _original(cause["exception"])


def plain_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without its exception, which JSON cannot hold."""
    return {key: value for key, value in report.items() if key != "exception"}


def _notes(reports: Mapping[int, dict[str, Any]], ranks: Sequence[int]) -> list[str]:
    """Return the notes of the errors of these ranks, such as their places in a pipeline."""
    return [note for rank in ranks for note in reports[rank].get("notes", ())][:MAX_PLACES]


def _error(report: dict[str, Any]) -> str:
    """Return the summary of a report without notes, which may differ between ranks."""
    text: str = report["summary"]
    for note in reversed(report.get("notes", ())):
        text = text.removesuffix(note).rstrip()
    return text


def _original(carried: Any) -> BaseException | None:
    if carried is None:
        return None
    if isinstance(carried, BaseException):
        _forget_frames(carried)
        return carried
    try:
        error = cloudpickle.loads(carried)
    except (Exception, SystemExit):
        # A class that exists only in the rank's process; the message has the text of the error.
        return None
    return error if isinstance(error, BaseException) else None


def _forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an exception and its causes: their frames would keep the rank's arrays alive.

    The message has their text.
    """
    seen: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            # Call the base method, because a user's class may override it.
            BaseException.with_traceback(one, None)
            found += [one.__cause__, one.__context__]
            found += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
