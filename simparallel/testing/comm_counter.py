"""Count collectives and messages, and refuse implicit redistributions: on a rank, or around whole runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from simparallel.base.attributes import setting
from simparallel.base.callsite import user_line
from simparallel.base.html import table
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes
from simparallel.clock.recorder import Recorder, current_recorder
from simparallel.parallel import explicit_redistribution
from simparallel.runtime.launcher.launch import running
from simparallel.runtime.reports import Outcome

_KINDS = ("collective", "p2p")


class CountedCall(NamedTuple):
    """A collective, send or receive of one rank."""

    rank: int
    name: str  # "all_reduce", "send", ...
    size_bytes: int  # of the payload
    sent_bytes: int  # sent from this rank by the modelled algorithm
    group: tuple[int, ...]  # ranks
    seq: int  # number in its group
    stream: str
    where: str  # the user's line, "train.py:7"
    run: int  # number of the run in the block; 0 on a rank


class CommCounter:
    """Count the collectives and messages of a block: which, how many, how many bytes, and where in the program.

    On a rank the block counts the calls of this rank. Elsewhere it counts those of all ranks of the runs that begin
    inside it (`launch`, `Cluster.run`), where a collective of several ranks is one. An asynchronous call counts where
    it ends; in a backward that a DDP reduces, this is the line of `backward()`.

    Attributes:
        calls: all calls, a list of `CountedCall`.

    Example:
        >>> def program():
        ...     with sp.testing.CommCounter() as comm:
        ...         sp.all_reduce(np.ones(4, np.float32))
        ...     return comm.counts, comm.bytes
        >>> sp.launch(program, world_size=2, transport="inline")[0]
        ({'all_reduce': 1}, {'all_reduce': 16})
    """

    def __init__(self) -> None:
        self.calls: list[CountedCall] = []
        self._exit = ExitStack()
        self._runs = 0

    @property
    def counts(self) -> dict[str, int]:
        """Name -> number of calls; a collective of several ranks is one."""
        return dict(Counter(call.name for call in self._distinct()))

    @property
    def bytes(self) -> dict[str, int]:
        """Name -> bytes of all payloads; a collective counts with its largest payload."""
        found: Counter[str] = Counter()
        for call in self._distinct():
            found[call.name] += call.size_bytes
        return dict(found)

    @property
    def sent_bytes(self) -> int:
        """Bytes that all counted ranks send, by the modelled algorithms."""
        return sum(call.sent_bytes for call in self.calls)

    @property
    def places(self) -> dict[str, int]:
        """The user's line -> number of calls; a collective counts once, on the rank with the largest payload."""
        return dict(Counter(call.where for call in self._distinct()))

    def of_rank(self, rank: int) -> dict[str, int]:
        """Return name -> number of calls of one rank."""
        return dict(Counter(call.name for call in self.calls if call.rank == rank))

    def _distinct(self) -> list[CountedCall]:
        """Return the calls, with a collective of several ranks once."""
        found: dict[Any, CountedCall] = {}
        for number, call in enumerate(self.calls):
            # A message has two ends, which are two calls.
            key = (call.run, call.stream, call.group, call.seq) if call.name not in ("send", "recv") else number
            if key not in found or found[key].size_bytes < call.size_bytes:
                found[key] = call
        return list(found.values())

    # --- counting -------------------------------------------------------------------------------------

    def __enter__(self) -> CommCounter:
        recorder = current_recorder()
        self._exit.enter_context(running(self) if recorder is None else self._listening(recorder))
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

    @contextmanager
    def _listening(self, recorder: Recorder) -> Iterator[None]:
        before = recorder.listener

        def listen(
            name: str, kind: str, stream: str, size_bytes: int, sent_bytes: int, group: tuple[int, ...], seq: int
        ) -> None:
            if kind in _KINDS:
                name = name.split()[0]
                call = CountedCall(recorder.rank, name, size_bytes, sent_bytes, group, seq, stream, user_line(), 0)
                self.calls.append(call)
            if before is not None:
                before(name, kind, stream, size_bytes, sent_bytes, group, seq)

        with setting(recorder, listener=listen):
            yield

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also counts; see `launch.Around`."""
        return partial(_counted, function)

    def collect(self, outcomes: list[Outcome]) -> None:
        """Take the calls of the ranks; those of a rank that failed are lost."""
        self._runs += 1
        for outcome in outcomes:
            if outcome.report is None:
                outcome.value, calls = outcome.value
                self.calls += [call._replace(run=self._runs) for call in calls]

    # --- shown ----------------------------------------------------------------------------------------

    def _rows(self) -> list[tuple[str, str, str, str]]:
        grouped: dict[tuple[str, str], list[CountedCall]] = {}
        for call in self._distinct():
            grouped.setdefault((call.name, call.where), []).append(call)
        rows = [
            (name, str(len(calls)), format_bytes(sum(call.size_bytes for call in calls)), where)
            for (name, where), calls in grouped.items()
        ]
        return [("call", "count", "payload", "where"), *rows]

    def __str__(self) -> str:
        return "\n".join(aligned(self._rows(), "<>><"))

    def __repr__(self) -> str:
        return f"CommCounter({', '.join(f'{name}: {count}' for name, count in self.counts.items())})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a row for each collective and line."""
        return table(self._rows())


def _counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[CountedCall]]:
    with CommCounter() as counter:
        value = function(*args, **kwargs)
    return value, counter.calls


class _RedistributionBan:
    """Turn implicit redistributions into errors on all ranks, see `launch.Around`."""

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_explicit, function)

    def collect(self, outcomes: list[Outcome]) -> None:
        pass


def _explicit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with explicit_redistribution():
        return function(*args, **kwargs)


@contextmanager
def expect_no_redistribution() -> Iterator[None]:
    """Raise at the first implicit redistribution inside the block that moves data: on a rank, or around whole runs.

    Raises:
        StrategyError: names the op, its input, both layouts and the bytes. Around a run it is the cause of a
            RunFailedError.

    Example:
        >>> relu = sp.AutoParallel(sp.ops.ReLU())
        >>> with sp.testing.expect_no_redistribution():
        ...     sp.launch(lambda: relu(np.ones((4, 2))).shape, world_size=2, transport="inline")
        [(4, 2), (4, 2)]
    """
    with explicit_redistribution(), running(_RedistributionBan()):
        yield
