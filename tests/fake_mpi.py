"""The part of mpi4py that `MpiTransport` uses, between threads, for tests without an MPI library.

Messages between two ranks stay in order; messages of different pairs may arrive in any order, as with MPI.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from simparallel.comm.mpi.medium import MPI_MESSAGES
from simparallel.comm.mpi.transport import MpiTransport
from simparallel.errors import CommError
from simparallel.machine.cluster import describe
from simparallel.runtime.launcher.launch import Results
from simparallel.runtime.ranks.rank import RunSettings, play_rank
from simparallel.runtime.reports import Outcome, check_received, failure_report, raise_failure

ANY_SOURCE = -1
MODULE = SimpleNamespace(MPI=SimpleNamespace(Status=SimpleNamespace, ANY_SOURCE=ANY_SOURCE))


class Request:
    """A message that completes at the second look: until then it must be waited for."""

    def __init__(self) -> None:
        self._looks = 0

    def Test(self) -> bool:
        self._looks += 1
        return self._looks > 1


class Message:
    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def Irecv(self, buffer: np.ndarray) -> Request:
        buffer[...] = self._data
        return Request()


class Comm:
    """A communicator, as seen by one rank."""

    def __init__(self, mail: list[dict[int, deque[np.ndarray]]], rank: int) -> None:
        self.rank, self.size, self._mail = rank, len(mail), mail
        self._last = 0

    def Isend(self, buffer: np.ndarray, dst: int, tag: int) -> Request:
        self._mail[dst][self.rank].append(buffer.copy())
        return Request()

    def Improbe(self, source: int, tag: int, status: Any) -> Message | None:
        assert source == ANY_SOURCE
        for i in range(self.size):
            src = (self._last + i + 1) % self.size
            if self._mail[self.rank][src]:
                data = self._mail[self.rank][src].popleft()
                self._last = status.source = src
                status.Get_count = partial(int, data.size)
                return Message(data)
        return None


def run_on_messages(size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Results:
    """Run a function like `Cluster.run`, on threads that exchange messages."""
    mail = [{src: deque[np.ndarray]() for src in range(size)} for _ in range(size)]
    outcomes, settings = [Outcome(rank) for rank in range(size)], RunSettings(describe(size))

    def play(rank: int) -> None:
        transport = MpiTransport(Comm(mail, rank), timeout_s)
        transport.start()
        outcomes[rank], _ = play_rank(partial(fn, *args), transport, settings, medium=MPI_MESSAGES)
        assert transport.wait_for_the_others()
        try:
            check_received(transport.segment, rank, outcomes[rank].kept_messages)
        except CommError as error:
            outcomes[rank].report = outcomes[rank].report or failure_report(error)
        transport.segment.close_fd()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = Results(outcomes, settings.cluster)
    raise_failure(outcomes)
    return results
