"""How a peer's ranks speak with the driver: JSON lines over the pipes of rank 0.

    rank 0 -> driver   {"ready": "MPICH 5.0.2"}
    driver -> rank 0   {"op": "all_reduce", "elements": 256, "count": 1000, "check": false}
    rank 0 -> driver   {"times_s": [...], "right": true}   or   {"error": "..."}

Between two commands every rank sleeps in a read: rank 0 of its input, the others of a FIFO into
which rank 0 copies the line. Nobody waits inside a collective, where peers spin and would take
the cores from whoever is measured meanwhile. The end of the input ends them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from exchange import Call, Exchange, private, turn  # type: ignore[import-not-found]


class AbstractPeer:
    """One rank of a peer.

    Attributes:
        rank, ranks: who we are.
        version: name and version of the library.
    """

    rank: int
    ranks: int
    version: str

    def call(self, exchange: Exchange) -> Call:
        """A function that does this exchange once and returns what this rank got."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when every rank has called it."""
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, None elsewhere."""
        raise NotImplementedError


def serve(peer: AbstractPeer, directory: str) -> None:
    """Answer the driver's commands until its pipe ends.

    Args:
        peer: this rank.
        directory: holds a FIFO for each rank but the first.
    """
    for line in _commands(peer, directory):
        command = json.loads(line)
        exchange = Exchange(command["op"], peer.rank, peer.ranks, command["elements"], private)
        try:
            call = peer.call(exchange)
            mine = turn(exchange, call, peer.barrier, command["count"], command["check"])
        except Exception as error:  # what the library raises; the driver tells it
            _answer({"error": f"{type(error).__name__}: {error}"})
            raise
        results = peer.gather(mine)
        if results is not None:
            times, right = zip(*results, strict=True)
            _answer({"times_s": list(times), "right": all(right)})


def _commands(peer: AbstractPeer, directory: str) -> Iterator[str]:
    """Lines from the driver, on every rank."""
    fifos = [Path(directory, f"rank{rank}") for rank in range(1, peer.ranks)]
    if peer.rank:
        with open(fifos[peer.rank - 1]) as lines:
            yield from lines
        return
    others: list[TextIO] = [open(fifo, "w") for fifo in fifos]  # noqa: SIM115 (closed below)
    try:
        _answer({"ready": peer.version})
        for line in iter(sys.stdin.readline, ""):
            for other in others:
                other.write(line)
                other.flush()
            yield line
    finally:
        for other in others:
            other.close()


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
