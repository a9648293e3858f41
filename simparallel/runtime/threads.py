"""Ranks as threads of this process, taking turns: for tests, and where there are no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from simparallel.cluster import ClusterSpec
from simparallel.comm.faults import Fault, faults_of
from simparallel.comm.inline import InlineTransport, Turns
from simparallel.comm.segment import ABORT_INTERRUPT, Segment
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.errors import LaunchError
from simparallel.runtime.rank import Tell, play_rank
from simparallel.runtime.reports import Outcome, failure_report, report_unreceived

ARENA_BYTES = 1 << 30  # address space, not memory


def run_threads(
    call: Callable[[], Any], cluster: ClusterSpec, *, record: str = "summary",
    memory_bytes: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S, algorithm: str = "direct",
    check: str = "full", faults: list[Fault] | None = None, tell: Tell | None = None,
) -> list[Outcome]:  # fmt: skip
    """Run `call()` as every rank of `cluster`; one outcome per rank, in order."""
    segment = Segment(cluster.world_size, arena_bytes=ARENA_BYTES)
    turns = Turns(cluster.world_size)
    transports = [
        InlineTransport(segment, rank, turns, timeout_s, check=check, faults=faults_of(faults or [], rank))
        for rank in range(cluster.world_size)
    ]
    outcomes: list[Outcome] = [Outcome(rank) for rank in range(cluster.world_size)]
    ended = [threading.Event() for _ in range(cluster.world_size)]

    def play(rank: int) -> None:
        turns.begin(rank)
        try:
            outcomes[rank], _ = play_rank(
                call, transports[rank], cluster, record=record, memory_bytes=memory_bytes,
                algorithm=algorithm, tell=tell,
            )  # fmt: skip
        except BaseException as error:  # an object of the user's, while somebody looked at it
            told = LaunchError(f"rank {rank}: {type(error).__name__} was raised while its end was noted.")
            outcomes[rank].report = report = failure_report(told)
            transports[rank].fail(report)
        finally:
            transports[rank].end()
            ended[rank].set()

    def wait() -> None:
        # `join` does not do: Python takes a thread for ended when a first one was interrupted.
        for end in ended:
            end.wait()
        for thread in threads:
            thread.join()

    threads = [threading.Thread(target=play, args=(r,), name=f"rank {r}") for r in range(cluster.world_size)]
    for thread in threads:
        thread.start()
    turns.gates[0].release()
    try:
        wait()
    except KeyboardInterrupt:
        # Ranks see it at their next wait; a rank in the middle of a computation finishes that first.
        segment.words[segment.map.abort()] = ABORT_INTERRUPT
        wait()
        raise
    finally:
        turns.transports.clear()  # else the memory would wait for the garbage collector
        segment.close_fd()
    report_unreceived(segment, outcomes)
    return outcomes
