"""A log directory. Files of earlier runs may be replaced; the user's own files are never touched.

The first line of `scheduler.log` names the files that runs write there. Without that line only failure reports count
as ours, which are recognised by their content. A run that would replace a user's file is refused before it starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from simparallel.base.files import read_limited
from simparallel.errors import InputError

RANK_LINKS = "rank.{rank}/stdout"
# The layout of `mpirun --output-filename`: job, rank.
MPIRUN_LINKS = "1/rank.{rank}/stdout"
NODE_LINKS = "node_{node}/worker_{rank}.log"
SCHEDULER_LOG = "scheduler.log"
FORMER_LOGS = "worker_[0-9]*.log"
FORMER_LINKS = ("rank.*/stdout", "1/rank.*/stdout", "node_*/worker_*.log", "*.log")
_WORKER = re.compile(r"worker_\d+\.log")
_HEAD = "written by simparallel: "
_LOGS = (SCHEDULER_LOG, "worker_N.log", "error_rankN.json")
# Limit of the first line; ours is always shorter.
_HEAD_BYTES = 4096
# Most of a report: tracebacks of a rank.
_REPORT_BYTES = 1 << 26
Nodes = Sequence[Sequence[int]]


def head(files: Sequence[str] = ()) -> str:
    """Return the first line of `scheduler.log`; `files` are names of further files that the run writes there."""
    return f"{_HEAD}{', '.join((*_LOGS, *files))}\n"


def files_of_former_run(log_dir: Path) -> list[str] | None:
    """Return the further files that an earlier run wrote; None if no run has used the directory."""
    try:
        with open(log_dir / SCHEDULER_LOG, "rb") as file:
            line = file.readline(_HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    if not line and not any(path.stat().st_size for path in log_dir.glob(FORMER_LOGS)):
        # An earlier run ended before it could write anything.
        return []
    if not line.startswith(_HEAD):
        return None
    names = line.removeprefix(_HEAD).strip().split(", ")
    # Plain names only: a path in that line must not make us remove a file outside of the directory.
    return [name for name in names if name not in _LOGS and os.path.basename(name) == name]


def check_log_dir(log_dir: Path, nodes: Nodes, links: str = RANK_LINKS, files: Sequence[str] = ()) -> None:
    """Make the directory, and check that a run can write there without replacing a file of the user.

    Args:
        log_dir: the directory.
        nodes: the ranks of each node.
        links: name of each rank's link, with "{rank}" in it.
        files: names of further files that the run will write there.

    Raises:
        InputError: the directory cannot be made or written, or a file of the user is in the way.
    """
    try:
        os.makedirs(log_dir, mode=0o700, exist_ok=True)
        if not os.access(log_dir, os.W_OK | os.X_OK):
            raise PermissionError("nothing can be written there")
        # The first obstacle is enough for an error.
        whose = next(_not_ours(log_dir, nodes, links, files), None)
    except OSError as error:
        raise unusable(log_dir, error) from error
    if whose is not None:
        raise unusable(log_dir, whose, "Choose an empty one.")


def unusable(log_dir: str | Path, why: object, way_out: str = "Choose another one.") -> InputError:
    """Return the error for a log directory that a run cannot use."""
    return InputError(f"log directory {str(log_dir)!r} cannot be used: {why}. {way_out}")


def _not_ours(log_dir: Path, nodes: Nodes, links: str, files: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each file that is in the way of a run."""
    # Every rank's log counts, since `forget_former_run` also removes logs of ranks that this run lacks.
    former = files_of_former_run(log_dir)
    ranks = [rank for node in nodes for rank in node]
    written = [SCHEDULER_LOG, *(f"worker_{rank}.log" for rank in ranks), *files]
    for path in [*(log_dir / name for name in written), *log_dir.glob(FORMER_LOGS)]:
        if path.name in written and os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            yield f"{path.name} is in the way: it is not a regular file"
        elif path.is_file() and (former is None or path.name in files and path.name not in former):
            yield f"{path.name} is a file of yours, which no earlier run wrote"
    for path in (log_dir / f"error_rank{rank}.json" for rank in ranks):
        if os.path.lexists(path) and not _is_our_report(path):
            yield f"{path.name} is a file of yours, and a rank that fails would replace it"
    for link, _ in _links(log_dir, nodes, links):
        if os.path.lexists(link) and not _is_our_link(link):
            yield f"{_shown_path(link, log_dir)} is a file of yours, not a link of an earlier run"
        for folder in link.parents:
            if folder.is_symlink() and log_dir in folder.parents:
                shown = _shown_path(folder, log_dir)
                yield f"{shown} is a link, and logs would be linked from outside of the directory"
            if os.path.lexists(folder) and not folder.is_dir():
                shown = _shown_path(link, log_dir)
                yield f"{_shown_path(folder, log_dir)} is a file of yours, and {shown} has to be below it"


def _shown_path(path: Path, log_dir: Path) -> Path:
    """Return the path to show: relative to the directory if it is inside."""
    return path.relative_to(log_dir) if path.is_relative_to(log_dir) else path


def forget_former_run(log_dir: Path) -> None:
    """Remove an earlier run's files: it may have had more ranks, and its pictures would pass for the next run's.

    Raises:
        OSError: a file cannot be removed.
    """
    former = files_of_former_run(log_dir)
    if former is None:
        return
    links = [path for pattern in FORMER_LINKS for path in log_dir.glob(pattern)]
    # Links before logs: glob finds a link only while its target exists.
    for path in links:
        if _is_our_link(path):
            path.unlink()
            # The folder may still contain files of the user.
            with contextlib.suppress(OSError):
                path.parent.rmdir()
    for path in [*log_dir.glob(FORMER_LOGS), *(log_dir / name for name in former)]:
        if path.is_file() and not path.is_symlink():
            path.unlink()
    forget_reports(log_dir)


def forget_reports(log_dir: Path) -> None:
    """Remove the failure reports of the previous run's ranks."""
    for path in log_dir.glob("error_rank[0-9]*.json"):
        if _is_our_report(path):
            path.unlink(missing_ok=True)


def link_logs(log_dir: Path, nodes: Nodes, links: str = RANK_LINKS, only: int | None = None) -> None:
    """Link to the log of each rank, or of rank `only`, under the names that other launchers use.

    Raises:
        OSError: a link cannot be made, for example because the user has a file of that name.
    """
    for link, rank in _links(log_dir, nodes, links):
        if only in (None, rank):
            # With the mode of the folder itself: `parents` would leave the mode of parents to the umask.
            for folder in (link.parent.parent, link.parent):
                folder.mkdir(0o700, exist_ok=True)
            # A link of an earlier run; a file of the user makes `symlink_to` fail.
            if _is_our_link(link):
                link.unlink()
            link.symlink_to(os.path.relpath(log_dir / f"worker_{rank}.log", link.parent))


def _links(log_dir: Path, nodes: Nodes, links: str) -> Iterator[tuple[Path, int]]:
    """Yield (link, its rank); with several nodes also a link in each node's own folder."""
    names = [links, NODE_LINKS] if len(nodes) > 1 else [links]
    ranks = [(rank, number) for number, node in enumerate(nodes) for rank in node]
    for (rank, number), name in itertools.product(ranks, names):
        # With msrun's usual name the log itself has the name of its link.
        if name != "worker_{rank}.log":
            yield log_dir / name.format(rank=rank, node=number), rank


def _is_our_link(path: Path) -> bool:
    return path.is_symlink() and _WORKER.fullmatch(Path(os.readlink(path)).name) is not None


def _is_our_report(path: Path) -> bool:
    """Return whether the file holds a report as `reports.failure_report` makes it."""
    try:
        found = None if path.is_symlink() else json.loads(read_limited(path, _REPORT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"summary", "secondary", "time_ns"} <= found.keys()
