"""The files of a run, and their lines on the console as they are written."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from simparallel.errors import InputError

RANK_LINKS = "rank.{rank}/stdout"
MPIRUN_LINKS = "1/rank.{rank}/stdout"  # as `mpirun --output-filename` lays them out: job, rank
NODE_LINKS = "node_{node}/worker_{rank}.log"
FORMER_FILES = ("worker_[0-9]*.log", "error_rank[0-9]*.json")
FORMER_LINKS = ("rank.*/stdout", "1/rank.*/stdout", "node_*/worker_*.log")
_WORKER = re.compile(r"worker_\d+\.log")


class LogFiles:
    """One file for the host and one for each rank, open from before the processes start.

    Args:
        log_dir: where `scheduler.log` and `worker_N.log` go, and links to them; None keeps them in
            unnamed files that vanish with the run.
        nodes: the ranks of each node. Of several nodes, each has its own folder of links.
        links: name of the link of each rank.

    Raises:
        InputError: the directory cannot be made or written.
        OSError: the unnamed files cannot be made.
    """

    def __init__(
        self, log_dir: str | Path | None, nodes: Sequence[Sequence[int]], links: str = RANK_LINKS
    ) -> None:
        self.log_dir = None if log_dir is None else str(log_dir)
        world_size = sum(map(len, nodes))
        names = ["scheduler.log", *(f"worker_{rank}.log" for rank in range(world_size))]
        self.fds: list[int] = []
        try:
            if self.log_dir is not None:
                forget_former_run(Path(self.log_dir))
            for name in names:
                self.fds.append(self._open(name))
            if self.log_dir is not None:
                link_logs(Path(self.log_dir), nodes, links)
        except OSError as error:
            self.close()
            if self.log_dir is None:
                raise
            raise InputError(
                f"log_dir={self.log_dir!r} cannot be used: {error}. Choose another one."
            ) from error

    @property
    def host_fd(self) -> int:
        return self.fds[0]

    @property
    def rank_fds(self) -> list[int]:
        return self.fds[1:]

    def _open(self, name: str) -> int:
        if self.log_dir is None:
            fd, path = tempfile.mkstemp(prefix="simparallel-")
            os.unlink(path)
            return fd
        os.makedirs(self.log_dir, mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(os.path.join(self.log_dir, name), flags, 0o600)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def forget_former_run(log_dir: Path) -> None:
    """Remove the logs and reports of ranks that an earlier run left: it may have had more of them.

    Raises:
        OSError: something of it cannot be removed.
    """
    for pattern in FORMER_LINKS:
        for path in list(log_dir.glob(pattern)):  # which finds a link only while there is what it leads to
            if path.is_symlink() and _WORKER.fullmatch(Path(os.readlink(path)).name):
                path.unlink()
                with contextlib.suppress(OSError):  # somebody has put more there
                    path.parent.rmdir()
    for pattern in FORMER_FILES:
        for path in log_dir.glob(pattern):
            if path.is_file() and not path.is_symlink():
                path.unlink()


def link_logs(
    log_dir: Path, nodes: Sequence[Sequence[int]], links: str = RANK_LINKS, only: int | None = None
) -> None:
    """Names that other launchers give to the file of each rank, or of one, as links to it.

    Raises:
        OSError: a link cannot be made; there is a file with its name, which is not ours to replace.
    """
    names = [links, NODE_LINKS] if len(nodes) > 1 else [links]
    ranks = [(rank, number) for number, node in enumerate(nodes) for rank in node if only in (None, rank)]
    for (rank, number), name in itertools.product(ranks, names):
        link = log_dir / name.format(rank=rank, node=number)
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(os.path.relpath(log_dir / f"worker_{rank}.log", link.parent))


class Tail:
    """Copies new lines of the ranks' files to the console, each with its rank before it."""

    def __init__(self, fds: list[int], out: TextIO | None, first_rank: int = 0) -> None:
        self._fds = fds
        self._first_rank = first_rank
        self._out = out
        self._read = [os.fstat(fd).st_size for fd in fds]
        self._open_line = [b""] * len(fds)
        self._encoding = getattr(out, "encoding", None) or "utf-8"

    def show(self, *, final: bool = False) -> None:
        """Print the whole lines written since the last time; finally also an unfinished one."""
        for rank, fd in enumerate(self._fds):
            size = os.fstat(fd).st_size
            if size < self._read[rank]:  # somebody has truncated it
                self._read[rank], self._open_line[rank] = 0, b""
            if size == self._read[rank] and not (final and self._open_line[rank]):
                continue
            data = os.pread(fd, size - self._read[rank], self._read[rank])
            self._read[rank] += len(data)
            lines = (self._open_line[rank] + data).split(b"\n")
            self._open_line[rank] = lines.pop()
            if final and self._open_line[rank]:
                lines.append(self._open_line[rank])
                self._open_line[rank] = b""
            if self._out is not None:
                for line in lines:
                    text = printable(line).encode(self._encoding, "backslashreplace").decode(self._encoding)
                    print(f"[rank {self._first_rank + rank}] {text}", file=self._out)
        if self._out is not None:
            self._out.flush()


def printable(line: bytes) -> str:
    """A line without control characters, which could change the terminal."""
    text = line.decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text.rstrip("\r"))


def console(echo: bool) -> TextIO | None:
    return sys.stdout if echo else None
