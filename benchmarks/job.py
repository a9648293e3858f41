"""A peer's ranks as one long-lived job, controlled over FIFOs, and always cleaned up."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environments import Peer
from benchmarks.errors import BenchError
from simparallel.base.blas import THREAD_VARIABLES

START_LIMIT_S = 120.0
TURN_LIMIT_S = 60.0
END_LIMIT_S = 5.0


class Job:
    """The ranks of one peer; `peers/serve.py` describes the protocol.

    Args:
        peer: the peer; its environment must exist.
        ranks: number of ranks.
        start_limit_s, turn_limit_s: limits for an answer [s].

    Raises:
        BenchError: it does not start.
    """

    def __init__(
        self, peer: Peer, ranks: int, *, start_limit_s: float = START_LIMIT_S, turn_limit_s: float = TURN_LIMIT_S
    ) -> None:
        self.label = peer.label
        self._name = peer.name
        self._turn_limit_s = turn_limit_s
        self._rest = b""
        self._directory = tempfile.mkdtemp(prefix="simparallel-bench-")
        self._errors = open(Path(self._directory, "stderr"), "w+b")  # noqa: SIM115 (closed in close)
        self._fifos = []
        for rank in range(ranks):
            os.mkfifo(path := Path(self._directory, f"rank{rank}"))
            # O_RDWR, because O_WRONLY would wait for a reader.
            self._fifos.append(os.open(path, os.O_RDWR))
        # The peer's Python must not find the packages of this one.
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            self._process = subprocess.Popen(
                peer.command(ranks, self._directory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                # A session of its own: Ctrl-C reaches only us, and killpg can end the launcher's group.
                start_new_session=True,
                env={
                    **inherited,
                    # One thread for each rank, as on our side.
                    **dict.fromkeys(THREAD_VARIABLES, "1"),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "TMPDIR": self._directory,
                    **dict(peer.environment),
                },
            )
        except OSError as error:
            self._forget()
            raise BenchError(f"{self.label} cannot be started: {error}", peer=self._name) from error
        assert self._process.stdout is not None
        self._output = self._process.stdout
        try:
            ready = self._answer("start", start_limit_s)
        except BaseException:
            self.close()
            raise
        self.version = str(ready["ready"])

    def turn(self, op: str, elements: int, count: int, check: bool) -> float:
        """Run a turn, see `Contender.turn`."""
        command = {"op": op, "elements": elements, "count": count, "check": check}
        return self.ask(op, command, wrong=f"{op} of {elements} elements")

    def ask(self, what: str, command: dict[str, Any], wrong: str = "") -> float:
        """Return the seconds that the slowest rank took for a command.

        Args:
            what: name of the command in messages.
            command: sent to every rank.
            wrong: its name in the message about a wrong result; by default `what`.

        Raises:
            BenchError: a wrong result, or none at all.
        """
        for fifo in self._fifos:
            os.write(fifo, json.dumps(command).encode() + b"\n")
        answer = self._answer(what, self._turn_limit_s)
        if not answer["right"]:
            raise self._error(f"says that {wrong or what} gave a wrong result")
        return float(max(answer["times_s"]))

    def _answer(self, what: str, limit_s: float) -> dict[str, Any]:
        """Return the next line of JSON, skipping lines that launchers print."""
        deadline = time.monotonic() + limit_s
        output = self._output.fileno()
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                if not line.startswith(b"{"):
                    continue
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise self._error(f"failed at {what}: {answer['error']}")
                return answer
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._error(f"did not answer within {limit_s:g} s at {what}")
            data = os.read(output, 1 << 16)
            if not data:
                raise self._error(f"ended at {what}")
            # A line may arrive in parts.
            self._rest += data

    def _error(self, what: str) -> BenchError:
        self._errors.seek(0)
        # The last lines of standard error usually name the cause.
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        told = "".join(f"\n    {line}" for line in lines[-6:])
        return BenchError(f"{self.label} {what}.{told}", peer=self._name)

    def close(self) -> None:
        """End its processes, gently at first. Repeated calls are no-ops."""
        if not self._directory:
            return
        process = self._process
        while self._fifos:
            # The end of its FIFO ends every rank.
            os.close(self._fifos.pop())
        # 0: wait for ranks that end by themselves.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if number:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            try:
                process.wait(END_LIMIT_S)
                break
            except subprocess.TimeoutExpired:
                continue
        # Launchers put ranks into separate sessions, which killpg does not reach, so find them one by one.
        deadline = time.monotonic() + 0.5
        while self._left() and time.monotonic() < deadline:
            # Killed processes need a moment to disappear.
            time.sleep(0.02)
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._output.close()
        self._forget()

    def _left(self) -> list[int]:
        """Return our processes that are still alive: their command lines name our directory."""
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                if self._directory.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
            except OSError:
                continue
        return found

    def _forget(self) -> None:
        self._errors.close()
        while self._fifos:
            os.close(self._fifos.pop())
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = ""


def started(peer: Peer, ranks: int, stack: contextlib.ExitStack, tell: Callable[[str], object]) -> Job | None:
    """Start ranks of a peer that end with the stack; None without an environment, and after a line if they fail."""
    if not peer.is_ready:
        return None
    try:
        job = Job(peer, ranks)
    except BenchError as error:
        tell(f"left out with {ranks} ranks: {error}")
        return None
    stack.callback(job.close)
    return job
