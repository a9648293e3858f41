"""`Trace`: the events of all ranks of a run, to select from, measure, draw, save and load."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from simparallel.cluster import PS_PER_S, ClusterSpec
from simparallel.errors import InputError
from simparallel.events import COMPUTE, KINDS, Event
from simparallel.files import write_atomically
from simparallel.trace import chrome, metrics
from simparallel.units import format_numbers, format_seconds

if TYPE_CHECKING:
    from simparallel.view.timeline import Axes


def _order(event: Event) -> tuple[Any, ...]:
    """By rank and device, then simulated start. The rest only makes the order the same on every run."""
    return event.rank, event.device, event.sim_start_ps, event.sim_end_ps, event.wall_start_ns, event


class Trace:
    """What every rank of a run did, and when.

    Args:
        events: of any ranks, in any order; kept sorted by rank, device and simulated start.
        cluster: the described hardware that priced them.
        name: a title for tables and pictures.

    Raises:
        InputError: an event ends before it starts, or its rank is not in the cluster.
    """

    def __init__(self, events: Iterable[Event], cluster: ClusterSpec, *, name: str = "") -> None:
        self.events: list[Event] = sorted(events, key=_order)
        self.cluster = cluster
        self.name = name
        for event in self.events:
            if event.sim_end_ps < event.sim_start_ps or event.wall_end_ns < event.wall_start_ns:
                raise InputError(f"Trace: an event ends before it starts: {event}.")
            if not 0 <= event.rank < cluster.world_size:
                raise InputError(
                    f"Trace: event {event.name!r} of rank {event.rank} does not fit a cluster of "
                    f"{cluster.world_size}; ranks are 0 to {cluster.world_size - 1}."
                )

    def __len__(self) -> int:
        return len(self.events)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return (self.events, self.cluster, self.name) == (other.events, other.cluster, other.name)

    def __repr__(self) -> str:
        return f"<Trace {self.title}: {len(self)} events of {len(self.ranks)} ranks>"

    @property
    def title(self) -> str:
        """The name and the described hardware."""
        return " · ".join(text for text in (self.name, self.cluster.name) if text)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have events, ascending."""
        return sorted({event.rank for event in self.events})

    @property
    def steps(self) -> list[int]:
        """Step numbers that have events, ascending."""
        return sorted({event.step for event in self.events})

    @property
    def makespan_s(self) -> float:
        """Simulated time [s] from the first start to the last end over all ranks."""
        return metrics.makespan_ps(self.events) / PS_PER_S

    def devices(self, rank: int) -> list[int]:
        """Devices of `rank` that have events, ascending."""
        return sorted({event.device for event in self.events if event.rank == rank})

    def streams(self, rank: int, device: int = 0) -> list[str]:
        """Streams of a device of `rank` that have events: compute first, then by name."""
        names = {event.stream for event in self.events if (event.rank, event.device) == (rank, device)}
        return sorted(names, key=lambda stream: (stream != COMPUTE, stream))

    def select(
        self,
        steps: int | Iterable[int] | None = None,
        ranks: int | Iterable[int] | None = None,
        kinds: str | Iterable[str] | None = None,
    ) -> Trace:
        """The events of these steps, ranks and kinds; None takes all. Times are unchanged.

        Args:
            steps: one step number or several.
            ranks: one rank or several.
            kinds: of "forward", "backward", "optimizer", "collective", "p2p", "copy", one or several.

        Raises:
            InputError: there is no such kind of events.
        """
        wanted_steps = None if steps is None else set(steps) if isinstance(steps, Iterable) else {steps}
        wanted_ranks = None if ranks is None else set(ranks) if isinstance(ranks, Iterable) else {ranks}
        wanted_kinds = None if kinds is None else {kinds} if isinstance(kinds, str) else set(kinds)
        for kind in sorted(wanted_kinds or ()):
            if kind not in KINDS:
                raise InputError(f"select: kind {kind!r} is none of {', '.join(KINDS)}.")
        chosen = (
            event
            for event in self.events
            if (wanted_steps is None or event.step in wanted_steps)
            and (wanted_ranks is None or event.rank in wanted_ranks)
            and (wanted_kinds is None or event.kind in wanted_kinds)
        )
        return Trace(chosen, self.cluster, name=self.name)

    def summary(self) -> list[dict[str, Any]]:
        """Where the time of each device went, a dict per rank and device, ascending.

        Keys, all times in seconds. Simulated: `compute_time_s`, `communication_time_s` (any
        communication stream busy), `exposed_communication_s` (communication while compute
        stands still), `idle_time_s` (neither); compute + exposed + idle is the makespan.
        Measured on this machine: `wall_compute_s`, `wall_communication_s` (waiting included).
        Counted: `rank`, `device`, `steps` (of the rank's optimizer), `sent_bytes` (as modelled), `flops`.
        """
        return metrics.summarize(self.events)

    def table(self) -> str:
        """`summary` as text for a terminal: 80 columns, or a few more where ranks have several devices."""
        if not self.events:
            return f"{self.title}: no events: nothing was computed or communicated, or record=False"
        head = f"{self.title}: {format_seconds(self.makespan_s)} simulated, {metrics.num_steps(self.events)} steps"
        foot = (
            "exposed: communicates while it does not compute; idle: does neither\n"
            "wall: measured on this machine; all else: modelled for the described hardware"
        )
        return "\n".join([head, metrics.format_table(self.summary()), foot])

    def save(self, path: str | os.PathLike[str], *, clock: str = "sim") -> None:
        """Write Chrome JSON, for ui.perfetto.dev and for `Trace.load`. Replaces `path` at once.

        Args:
            path: the file; missing parent directories are made.
            clock: "sim" or "wall", whose times place the slices. Both are kept in the file.

        Raises:
            InputError: `clock` is neither.
            OSError: the file cannot be written.
        """
        text = chrome.dumps(self.events, self.cluster, name=self.name, clock=clock)
        write_atomically(path, text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """The trace that `save` wrote to `path`; every event is equal to the original.

        Raises:
            InputError: there is no such file, or it is not a trace written by `save`.
        """
        try:
            with open(path, "rb") as file:
                text = file.read().decode()
            events, cluster, name = chrome.loads(text)
            return cls(events, cluster, name=name)
        except (OSError, UnicodeDecodeError, InputError) as error:
            raise InputError(f"Trace.load({os.fspath(path)!r}): {error}", path=os.fspath(path)) from error

    def timeline(
        self, ax: Axes | None = None, clock: str = "sim", steps: int | Iterable[int] | None = None
    ) -> Axes:
        """Draw a lane per rank, device and stream.

        Args:
            ax: axes to draw into; None makes a figure.
            clock: "sim" or "wall".
            steps: only these steps; None draws all.

        Returns:
            The axes; `.figure` is the figure.

        Raises:
            InputError: nothing to draw, or `clock` is neither.
        """
        from simparallel.view import plot_timeline  # drawing is optional and slow to import

        shown = self.select(steps=steps)
        if self.events and not shown.events:
            known = self.steps
            raise InputError(
                f"timeline: no events of step {steps!r}; there are steps {format_numbers(known)}. Choose of those, or "
                "leave steps= out."
            )
        return plot_timeline(shown.events, clock=clock, ax=ax, title=self.title)
