"""`Ledger`: the messages and bytes of each rank in each step of an algorithm.

Only algorithms on messages keep a ledger; `direct` has no messages, its ranks read shared pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simparallel.rank_local import RankLocal, per_rank


class StepTraffic(NamedTuple):
    """Messages and bytes of one rank in one step."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0

    def __add__(self, other: tuple[int, ...]) -> StepTraffic:  # type: ignore[override]
        return StepTraffic(*(a + b for a, b in zip(self, other, strict=True)))


class Entry(NamedTuple):
    """The traffic of one collective on one rank."""

    rank: int
    group: str  # name of the group, such as "world"
    seq: int  # number of the collective in its group
    op: str
    algorithm: str
    steps: tuple[StepTraffic, ...]

    @property
    def total(self) -> StepTraffic:
        return sum(self.steps, StepTraffic())


class Ledger:
    """Messages and bytes of each rank in each step of each collective that ran as messages.

    As a context manager it records the collectives that this rank begins inside the block; `Ledger.join` merges the
    ledgers of all ranks.

    Attributes:
        entries: one for each collective of each rank.

    Example:
        >>> def program():
        ...     with sp.Ledger() as ledger:
        ...         sp.all_reduce(np.ones(6), algorithm="ring")
        ...     return ledger
        >>> print(sp.Ledger.join(sp.launch(program, world_size=3)).table())
        world, collective #1: all_reduce by ring; messages and bytes sent
        step     rank 0     rank 1     rank 2
           0   1 (16 B)   1 (16 B)   1 (16 B)
           1   1 (16 B)   1 (16 B)   1 (16 B)
           2   1 (16 B)   1 (16 B)   1 (16 B)
           3   1 (16 B)   1 (16 B)   1 (16 B)
         all   4 (64 B)   4 (64 B)   4 (64 B)
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)

    @classmethod
    def join(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """Merge the ledgers of several ranks."""
        return cls(entry for ledger in ledgers for entry in ledger.entries)

    @property
    def total(self) -> StepTraffic:
        """Sum over all entries."""
        return sum((entry.total for entry in self.entries), StepTraffic())

    def table(self, *, received: bool = False) -> str:
        """Format a table for each collective, steps by ranks, of the messages sent (or received).

        A rank that is idle in a step shows `-`.
        """
        calls: dict[tuple[str, int, str, str], list[Entry]] = {}
        for entry in self.entries:
            calls.setdefault((entry.group, entry.seq, entry.op, entry.algorithm), []).append(entry)
        if not calls:
            return "no collective ran as messages"
        what = "received" if received else "sent"
        parts = []
        for (group, seq, op, algorithm), entries in calls.items():
            title = f"{group}, collective #{seq}: {op} by {algorithm}; messages and bytes {what}"
            parts.append("\n".join([title, *_rows(sorted(entries), received)]))
        return "\n\n".join(parts)

    def __enter__(self) -> Ledger:
        _open.ledgers.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        ledgers = _open.ledgers
        del ledgers[next(i for i, ledger in enumerate(ledgers) if ledger is self)]

    def __repr__(self) -> str:
        total = self.total
        return f"Ledger({len(self.entries)} entries, {total.sent_messages} messages, {total.sent_bytes} B sent)"


class _OpenLedgers(RankLocal):
    ledgers: list[Ledger] = per_rank(list)


_open = _OpenLedgers()


def open_ledgers() -> tuple[Ledger, ...]:
    """Return the ledgers whose blocks this thread's rank is in."""
    return tuple(_open.ledgers)


def _rows(entries: list[Entry], received: bool) -> list[str]:
    def cell(traffic: StepTraffic) -> str:
        count, size_bytes = traffic[2:] if received else traffic[:2]
        return f"{count} ({size_bytes} B)" if count else "-"

    columns = [[f"rank {entry.rank}", *(cell(step) for step in entry.steps), cell(entry.total)] for entry in entries]
    widths = [max(map(len, column)) for column in columns]
    names = ["step", *map(str, range(len(entries[0].steps))), "all"]
    return [
        f"{name:>4}   " + "   ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
        for name, *row in zip(names, *columns, strict=True)
    ]
