"""The log files of a run, and copying their lines to the console as they are written."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from simparallel.base.names import printable
from simparallel.runtime import log_folder

AnyBytes = TypeVar("AnyBytes", bytes, bytearray)
READ_BYTES = 1 << 20
Apart = Callable[[], contextlib.AbstractContextManager[object]]


class LogFiles:
    """One file for the host and one for each rank, open from before the processes start.

    Args:
        log_dir: directory for `scheduler.log`, `worker_N.log` and links to them; None keeps them in
            unnamed files that vanish with the run.
        nodes: the ranks of each node. With several nodes, each has its own folder of links.
        links: name of each rank's link, with "{rank}" in it.
        files: names of further files that a run writes there. An earlier run's are removed with its logs.
        ranks_log_here: False if each rank opens its own log, and links it, perhaps on another machine.

    Attributes:
        ranks: the ranks whose logs are open, ascending.
        fds: the open descriptors: `scheduler.log`, then each rank's log in order.

    Raises:
        InputError: the directory cannot be made or written, has files of the user with such names, or is in use by
            another run.
        OSError: the unnamed files cannot be made.
    """

    def __init__(
        self,
        log_dir: str | Path | None,
        nodes: Sequence[Sequence[int]],
        links: str = log_folder.RANK_LINKS,
        files: Sequence[str] = (),
        ranks_log_here: bool = True,
    ) -> None:
        self.log_dir = None if log_dir is None else str(log_dir)
        self.ranks = sorted(rank for node in nodes for rank in node if ranks_log_here)
        self.fds: list[int] = []
        self._owner = os.getpid()
        try:
            if self.log_dir is not None:
                # Before anything is removed.
                log_folder.check_log_dir(Path(self.log_dir), nodes, links, files)
            self.fds.append(self._open(log_folder.SCHEDULER_LOG))
            if self.log_dir is not None:
                # Only the holder of the lock may remove the files of an earlier run.
                self._take()
                log_folder.forget_former_run(Path(self.log_dir))
                os.ftruncate(self.host_fd, 0)
            for rank in self.ranks:
                self.fds.append(self._open(f"worker_{rank}.log"))
                os.ftruncate(self.fds[-1], 0)
            self._head = b"" if self.log_dir is None else log_folder.head(files).encode()
            os.write(self.host_fd, self._head)
            if self.log_dir is not None and ranks_log_here:
                log_folder.link_logs(Path(self.log_dir), nodes, links)
        except OSError as error:
            self.close()
            if self.log_dir is None:
                raise
            raise log_folder.unusable(self.log_dir, error) from error

    def _take(self) -> None:
        """Lock the directory until every process that holds `scheduler.log` (this one, the host) has closed it."""
        # Windows has none, and no device processes.
        import fcntl

        try:
            fcntl.flock(self.host_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise log_folder.unusable(str(self.log_dir), "another run is writing its logs there") from None
        except OSError:
            # A file system without locks.
            return

    @property
    def host_fd(self) -> int:
        return self.fds[0]

    @property
    def rank_fds(self) -> dict[int, int]:
        """Rank -> descriptor of its log."""
        return dict(zip(self.ranks, self.fds[1:], strict=True))

    def output_of(self, rank: int | None = None) -> str:
        """Return the first 4000 bytes of the output of a rank, or of the host."""
        fd, start = (self.host_fd, len(self._head)) if rank is None else (self.rank_fds[rank], 0)
        return os.pread(fd, 4000, start).decode(errors="replace").strip()

    def _open(self, name: str) -> int:
        # Without a name, the kernel frees the file with its last descriptor.
        if self.log_dir is None:
            fd, path = tempfile.mkstemp(prefix="simparallel-")
            os.unlink(path)
            return fd
        # O_APPEND: a rank and its child processes write to the same file without overwriting each other.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(os.path.join(self.log_dir, name), flags, 0o600)

    def close(self) -> None:
        if self.fds and self.log_dir is not None and os.getpid() == self._owner:
            import fcntl

            # Closing would not unlock if a process that was forked from this one still holds the file.
            with contextlib.suppress(OSError):
                fcntl.flock(self.host_fd, fcntl.LOCK_UN)
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Tail:
    """A follower of the ranks' logs: it copies new lines to the console, with `[rank N]` before each.

    Args:
        fds: rank -> descriptor of its log.
        out: the console; None prints nothing.
        apart: returns a context manager inside which lines are printed; it may hide a progress bar meanwhile.
        echo: whether lines are printed, or the ranks whose lines are.
    """

    def __init__(
        self,
        fds: Mapping[int, int],
        out: TextIO | None,
        apart: Apart = contextlib.nullcontext,
        echo: bool | Collection[int] = True,
    ) -> None:
        self._apart = apart
        self._echo = echo
        self._fds = fds
        self._out = out
        self._read = {rank: os.fstat(fd).st_size for rank, fd in fds.items()}
        # A long line comes in many parts: appending to a bytearray does not copy what is there.
        self._open_line = {rank: bytearray() for rank in fds}
        self._encoding = getattr(out, "encoding", None) or "utf-8"

    def show(self, *, final: bool = False) -> None:
        """Print the complete lines written since the last call; with `final` also an unfinished one."""
        for rank, fd in self._fds.items():
            size = os.fstat(fd).st_size
            # The user may have truncated the log.
            if size < self._read[rank]:
                self._read[rank], self._open_line[rank] = 0, bytearray()
            while self._read[rank] < size:
                data = os.pread(fd, min(size - self._read[rank], READ_BYTES), self._read[rank])
                if not data:
                    break
                self._read[rank] += len(data)
                *lines, rest = data.split(b"\n")
                if lines:
                    lines[0] = bytes(self._open_line[rank] + lines[0])
                    self._open_line[rank] = bytearray()
                self._open_line[rank] += rest
                if b"\r" in rest:
                    # A progress bar may rewrite its line thousands of times: keep the last version only.
                    self._open_line[rank] = last_turn(self._open_line[rank])
                self._print(rank, lines)
            if final and self._open_line[rank]:
                self._print(rank, [bytes(self._open_line[rank])])
                self._open_line[rank] = bytearray()
        if self._out is not None:
            self._out.flush()

    def _print(self, rank: int, lines: list[bytes]) -> None:
        is_shown = self._echo if isinstance(self._echo, bool) else rank in self._echo
        if self._out is None or not lines or not is_shown:
            return
        with self._apart():
            for line in lines:
                text = shown(line).encode(self._encoding, "backslashreplace").decode(self._encoding)
                print(f"[rank {rank}] {text}", file=self._out)
            self._out.flush()


def last_turn(line: AnyBytes) -> AnyBytes:
    """Return the text after the last carriage return that has text behind it: all that a terminal would show."""
    text = line.rstrip(b"\r")
    start = text.rfind(b"\r") + 1
    # Of the carriage returns behind it one is enough.
    return line[start : len(text) + 1]


def shown(line: bytes) -> str:
    """Return a line as a terminal would show it, with control characters escaped.

    A carriage return starts the line again, as progress bars do.
    """
    return printable(last_turn(line).rstrip(b"\r").decode("utf-8", errors="backslashreplace"))


def console() -> TextIO | None:
    """Return standard output; None if it is closed."""
    return None if sys.stdout is None or getattr(sys.stdout, "closed", False) else sys.stdout
