"""The protocol between a peer's ranks and the driver, in JSON lines: each rank gets commands from its own FIFO,
rank 0 answers on its standard output.

    rank 0 -> driver   {"ready": "MPICH 5.0.2"}
    driver -> all      {"op": "all_reduce", "elements": 256, "count": 1000, "check": false}
    rank 0 -> driver   {"times_s": [...], "right": true}   or   {"error": "..."}

The driver and `AbstractPeer.turn` agree on the contents of a command besides "count".

Between two commands every rank sleeps in a read. No rank waits inside a collective, where peers spin
and would take the cores from the contender under measurement. When the driver ends, for any
reason, the FIFOs end, and so do the ranks. (Standard input would not do: not every launcher forwards
its end.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exchange import Call, Exchange, private, turn  # type: ignore[import-not-found]


class AbstractPeer:
    """One rank of a peer.

    Attributes:
        rank, ranks: this rank, and the number of ranks.
        version: name and version of the library.
    """

    rank: int
    ranks: int
    version: str

    def turn(self, command: dict[str, Any]) -> tuple[float, bool]:
        """Run a command, by default exchanges: (seconds, whether the result was right)."""
        exchange = Exchange(command["op"], self.rank, self.ranks, command["elements"], private)
        exchange_once = self.call(exchange)

        def call() -> Any:
            exchange_once()
            return exchange.received

        return turn(exchange, call, self.barrier, command["count"], command["check"])

    def call(self, exchange: Exchange) -> Call:
        """Return a function that does this exchange once, between its arrays."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when every rank has called it."""
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, None elsewhere."""
        raise NotImplementedError


def serve(peer: AbstractPeer, directory: str) -> None:
    """Answer the driver's commands until the FIFO ends.

    Args:
        peer: this rank.
        directory: holds a FIFO for each rank.
    """
    with open(Path(directory, f"rank{peer.rank}"), encoding="utf-8") as commands:
        peer.barrier()
        if peer.rank == 0:
            _answer({"ready": peer.version})
        for line in commands:
            _obey(peer, json.loads(line))


def _obey(peer: AbstractPeer, command: dict[str, Any]) -> None:
    try:
        mine = peer.turn(command)
    except Exception as error:
        # Whatever the library raises, the driver reports it.
        _answer({"error": f"{type(error).__name__}: {error}"})
        raise
    results = peer.gather(mine)
    if results is not None:
        times, right = zip(*results, strict=True)
        _answer({"times_s": list(times), "right": all(right)})


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
