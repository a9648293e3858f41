"""`Trace`: the events of all ranks of a run, to select from, measure, draw, save and load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from simparallel.base.files import read_text, write_atomically
from simparallel.base.html import frame as html_frame, table as html_table
from simparallel.base.names import printable
from simparallel.base.units import format_number_of, format_numbers, format_seconds
from simparallel.clock.breakdown import Totals, add_up, makespan_ps
from simparallel.clock.critical_path import critical_path
from simparallel.clock.event import KINDS, Event, stream_order
from simparallel.clock.recorder import current_recorder
from simparallel.clock.recording import join, timer_of
from simparallel.errors import InputError
from simparallel.machine.cluster import PS_PER_S, ClusterSpec
from simparallel.trace import chrome, html as page, matrix, metrics
from simparallel.trace.export import FORMATS, PER_RANK, table

if TYPE_CHECKING:
    from simparallel.view.timeline import Axes


# A notebook keeps the page in its file: 50 kB, and about 55 bytes an event.
_MOST_IN_NOTEBOOK = 5000
# The largest file that is read: some three million events.
MAX_BYTES = 1 << 30


def _order(event: Event) -> tuple[Any, ...]:
    """Return a sort key: rank, device and simulated start. The further items only make the order deterministic."""
    return event.rank, event.device, event.sim_start_ps, event.sim_end_ps, event.wall_start_ns, event


class Trace:
    """The events of all ranks of a run, with simulated and measured times.

    Args:
        events: events of any ranks, in any order; kept sorted by rank, device and simulated start.
        cluster: the described hardware that priced them.
        name: title for tables and pictures.
        totals: (rank, device) -> totals of all events of the run, if `events` are only some of them.
        timed_by: names of the GPUs whose events gave the wall times of operations; "" for the clock of the machine.

    Attributes:
        events: the events, sorted.
        cluster: the described hardware.
        name: the title.
        timed_by: see the argument.

    Raises:
        InputError: an event ends before it starts, or its rank is not in the cluster.
    """

    def __init__(
        self,
        events: Iterable[Event],
        cluster: ClusterSpec,
        *,
        name: str = "",
        totals: Mapping[tuple[int, int], Totals] | None = None,
        timed_by: str = "",
    ) -> None:
        # Sorted, so that traces of equal events are equal, in whatever order ranks delivered them.
        self.events: list[Event] = sorted(events, key=_order)
        self._totals = None if totals is None else dict(sorted(totals.items()))
        self.cluster = cluster
        self.name = name
        self.timed_by = timed_by
        for event in self.events:
            if event.sim_end_ps < event.sim_start_ps or event.wall_end_ns < event.wall_start_ns:
                raise InputError(f"Trace: an event ends before it starts: {event}.")
            if not 0 <= event.rank < cluster.world_size:
                raise InputError(
                    f"Trace: event {event.name!r} of rank {event.rank} does not fit a cluster of {cluster.world_size} "
                    f"devices; ranks are 0 to {cluster.world_size - 1}."
                )

    @classmethod
    def of_this_rank(cls) -> Trace:
        """Return the trace of the calling rank so far, for a process without a launcher that collects it.

        Raises:
            InputError: nothing is recorded, because `sp.init()` was not called.
        """
        recorder = current_recorder()
        if recorder is None:
            raise InputError("Trace.of_this_rank: nothing is recorded here; call sp.init() first.")
        recorder.settle()
        recorded = [recorder.recorded()]
        events, totals = join(recorded)
        return cls(events, recorder.cluster, totals=totals, timed_by=timer_of(recorded))

    def __len__(self) -> int:
        return len(self.events)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        mine, others = ((one.events, one.cluster, one.name, one._totals, one.timed_by) for one in (self, other))
        return mine == others

    def __repr__(self) -> str:
        return f"<Trace {self.title}: {self._counted()} of {format_number_of(len(self.ranks), 'rank')}>"

    def _counted(self) -> str:
        """Return the number of kept events, and of all if some were dropped, as text."""
        if self._totals is None:
            return format_number_of(len(self), "event")
        return f"{len(self):,} of {sum(one.num_events for one in self._totals.values()):,} events"

    @property
    def totals(self) -> dict[tuple[int, int], Totals]:
        """(rank, device) -> totals of all events of the run, including those that were not kept."""
        return add_up(self.events) if self._totals is None else self._totals

    @property
    def is_whole(self) -> bool:
        """Whether all events of the run are kept. A long run keeps those of some steps, see `record=` of `launch`."""
        return self._totals is None

    @property
    def title(self) -> str:
        """The name and the described hardware."""
        return " · ".join(text for text in (self.name, self.cluster.name) if text)

    @property
    def measured(self) -> str:
        """How wall times were measured, in words."""
        return f"measured on {self.timed_by} by its events" if self.timed_by else "measured on this machine"

    @property
    def ranks(self) -> list[int]:
        """Ranks that have events, ascending."""
        return sorted({event.rank for event in self.events})

    @property
    def steps(self) -> list[int]:
        """Step numbers that have events, ascending; a long run keeps only some steps."""
        return sorted({event.step for event in self.events})

    @property
    def makespan_s(self) -> float:
        """Simulated time [s] from the first start to the last end over all ranks."""
        return makespan_ps(self.totals) / PS_PER_S

    def devices(self, rank: int) -> list[int]:
        """Return the devices of `rank` that have events, ascending."""
        return sorted({event.device for event in self.events if event.rank == rank})

    def streams(self, rank: int, device: int = 0) -> list[str]:
        """Return the streams of a device of `rank` that have events: marks, compute, then by name."""
        names = {event.stream for event in self.events if (event.rank, event.device) == (rank, device)}
        return sorted(names, key=stream_order)

    def select(
        self,
        steps: int | Iterable[int] | None = None,
        ranks: int | Iterable[int] | None = None,
        kinds: str | Iterable[str] | None = None,
    ) -> Trace:
        """Return a trace with the events of some steps, ranks and kinds; None takes all. Times are unchanged.

        In a trace of a long run, selected steps and kinds contain only the kept events, and their totals are of these.

        Args:
            steps: one step number or several.
            ranks: one rank or several.
            kinds: one or several of "forward", "backward", "optimizer", "collective", "p2p", "copy", "range".

        Raises:
            InputError: unknown kind.
        """
        given = {"step": steps, "rank": ranks, "kind": kinds}
        wanted: dict[str, set[Any]] = {
            field: set(each) if isinstance(each, Iterable) and not isinstance(each, str) else {each}
            for field, each in given.items()
            if each is not None
        }
        for kind in sorted(wanted.get("kind", ())):
            if kind not in KINDS:
                raise InputError(f"select: kind {kind!r} is not one of {', '.join(KINDS)}.")
        chosen, totals = self.events, None
        for field, values in wanted.items():
            chosen = [event for event in chosen if getattr(event, field) in values]
        # Totals cannot be split by step or kind; a choice of ranks keeps theirs.
        if self._totals is not None and steps is None and kinds is None:
            totals = {key: one for key, one in self._totals.items() if ranks is None or key[0] in wanted["rank"]}
        return Trace(chosen, self.cluster, name=self.name, totals=totals, timed_by=self.timed_by)

    def from_zero(self) -> Trace:
        """Return a trace of the same events, the first of which starts at simulated time 0.

        Totals are those of the events.
        """
        first = min((event.sim_start_ps for event in self.events), default=0)
        moved = (
            event._replace(sim_start_ps=event.sim_start_ps - first, sim_end_ps=event.sim_end_ps - first)
            for event in self.events
        )
        return Trace(moved, self.cluster, name=self.name, timed_by=self.timed_by)

    def summary(self) -> list[dict[str, Any]]:
        """Return how each device spent its time: a dict per rank and device, ascending.

        Keys, all times in seconds. Simulated: `compute_time_s`, `communication_time_s` (any
        communication stream busy), `exposed_communication_s` (communication without concurrent
        compute), `idle_time_s` (neither); compute + exposed + idle is the makespan.
        Measured on this machine: `wall_compute_s`, `wall_communication_s` (waiting included).
        Counted: `rank`, `device`, `steps` (of the rank's optimizer), `sent_bytes` (as modelled), `flops`.
        """
        return metrics.summarize(self.totals)

    def communication_matrix(self) -> np.ndarray:
        """Return the bytes that rank i sends to rank j at [i, j], of the kept events, as modelled.

        The sum of row i is the bytes that rank i sends. The receivers are those of the algorithm whose bytes are
        counted: for a collective that ran as messages its own one, else a ring, a chain or an exchange.
        """
        return matrix.bytes_between(self.events, self.cluster.world_size)

    def table(self) -> str:
        """Return `summary` as text for a terminal: 80 columns, a few more if ranks have several devices."""
        totals = self.totals
        if not totals:
            return f'{self.title}: no events: nothing was computed or communicated, or record="off"'
        count = max(one.steps for one in totals.values())
        span_s = makespan_ps(totals) / PS_PER_S
        head = f"{self.title}: {format_seconds(span_s)} simulated, {count} steps"
        foot = "\n".join(self._notes())
        return printable("\n".join([head, metrics.format_table(metrics.summarize(totals)), foot]))

    def _notes(self) -> list[str]:
        notes = [
            "exposed: communicates while it does not compute; idle: does neither",
            f"wall: {self.measured}; all else: modelled for the described hardware",
        ]
        if self._totals is not None:
            kept = f"{self._counted()} are kept, of {format_number_of(len(self.steps), 'step')}"
            notes.append(f'of all steps; {kept} (record="full" keeps all)')
        return notes

    def save(self, path: str | os.PathLike[str], *, clock: str = "sim") -> None:
        """Write Chrome JSON, for ui.perfetto.dev and for `Trace.load`. Replaces `path` atomically.

        Args:
            path: the file; missing parent directories are created.
            clock: "sim" or "wall": the clock that places the slices. The file holds the times of both.

        Raises:
            InputError: unknown clock.
            OSError: the file cannot be written.
        """
        text = chrome.dumps(
            self.events, self.cluster, name=self.name, clock=clock, totals=self._totals, timed_by=self.timed_by
        )
        write_atomically(path, text.encode())

    def save_profiler(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write a file for each rank in the format of `torch.profiler`, for tools such as HolisticTraceAnalysis.

        Times are simulated. Operations are kernels on numbered streams; communication has names such as
        "ncclKernel:all_reduce", by which such tools recognise it. `Trace.load` does not read these files.

        HolisticTraceAnalysis leaves out the last step and rounds times to microseconds, unless it is told otherwise:
        `TraceAnalysis(trace_dir=…, include_last_profiler_step=True)` with HTA_DISABLE_NS_ROUNDING=1 in the environment
        has the overlap of `summary`.

        Args:
            directory: directory for `rank_N.pt.trace.json`; created if it is missing.

        Returns:
            The paths.

        Raises:
            OSError: a file cannot be written.
        """
        return self.export(directory, "kineto")

    def export(self, path: str | os.PathLike[str], format: str) -> list[Path]:
        """Write the trace for another tool.

        Args:
            path: a file, for "chrome" and "csv"; a directory, for "kineto" and "chakra". Missing directories are
                created.
            format: "chrome", as `save`; "kineto", as `save_profiler`; "chakra", execution traces of MLCommons as
                ASTRA-sim replays them, `trace.N.et` for rank N (needs protobuf: the extra `chakra`); or "csv", a line
                for each event.

        Returns:
            The paths of the written files.

        Raises:
            InputError: unknown format, or protobuf is not installed. Fact: `format`.
            OSError: a file cannot be written.
        """
        if format not in FORMATS:
            raise InputError(f"export: format {format!r} is not one of {', '.join(FORMATS)}.", format=format)
        if format == "chrome":
            self.save(path)
            return [Path(path)]
        if format == "csv":
            write_atomically(path, table(self.events).encode())
            return [Path(path)]
        file_name, dumps = PER_RANK[format]
        written = []
        for rank in self.ranks:
            events = [event for event in self.events if event.rank == rank]
            written.append(Path(path, file_name(rank)))
            write_atomically(written[-1], dumps(events, self.cluster, rank))
        return written

    @overload
    def html(self, path: None = None) -> str: ...

    @overload
    def html(self, path: str | os.PathLike[str]) -> Path: ...

    def html(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """Return the timeline as one HTML file, to zoom, search and walk through in a browser, or write it.

        The file needs no network and no other file. It shows a row for each stream of each rank, both clocks, the ends
        of every collective and message, the totals, the critical path, and with record="full" the memory of each
        device. Press ? on the page for the keys.

        Args:
            path: where to write it, replacing a file there atomically; missing parent directories are created.

        Returns:
            The text, or the path if one is given.

        Raises:
            OSError: the file cannot be written.

        Cost: about 10 us and 55 bytes an event, and 50 kB; 100,000 events stay smooth in a browser.
        """
        text = page.dumps(self.events, self.totals, self.title, self._notes(), self.measured)
        if path is None:
            return text
        write_atomically(path, text.encode())
        return Path(path)

    def critical_path(self) -> list[Event]:
        """Return the events of the critical path, in order: the simulated run is faster only if one of them is shorter.

        Each event waited for the one before it: on its stream, on another stream of its device, on another rank through
        a collective or a message. Where steps were not kept, or a rank's interpreter was late, there are gaps.

        Cost: about 5 us an event.
        """
        return [self.events[index] for index in critical_path(self.events)]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Load a trace that `save` wrote to `path`; every event equals the original.

        Raises:
            InputError: the file cannot be read, or was not written by `save`. Fact: `path`.
        """
        try:
            events, cluster, name, totals, timed_by = chrome.loads(read_text(path, MAX_BYTES))
            return cls(events, cluster, name=name, totals=totals, timed_by=timed_by)
        except InputError as error:
            raise InputError(f"Trace.load({os.fspath(path)!r}): {error}", path=os.fspath(path)) from error

    def timeline(
        self,
        ax: Axes | None = None,
        clock: str = "sim",
        steps: int | Iterable[int] | None = None,
        collapse: bool | None = None,
    ) -> Axes:
        """Draw a lane per rank, device and stream. The time axis starts with the first event that is shown.

        Args:
            ax: axes to draw into; None makes a figure.
            clock: "sim", "wall", or "both": modelled times above measured ones.
            steps: only these steps; None draws all kept steps.
            collapse: draw ranks with the same events at the same times as one; None does so for more than 8 ranks
                on the simulated clock.

        Returns:
            The axes; `.figure` is the figure. For both clocks the upper ones.

        Raises:
            InputError: nothing to draw, unknown clock, or both clocks in given axes.
        """
        # Drawing is optional and slow to import.
        from simparallel.view import plot_both_clocks, plot_timeline

        shown = self.select(steps=steps)
        if self.events and not shown.events:
            known = self.steps
            raise InputError(
                f"timeline: no events of step {steps!r}; there are steps {format_numbers(known)}. Choose from those, "
                "or leave steps= out."
            )
        if clock == "both":
            if ax is not None:
                raise InputError(
                    "timeline: both clocks need a figure of their own; leave ax= out, or choose one clock."
                )
            return plot_both_clocks(shown.events, f"{self.title}: modelled", self.measured, collapse=collapse)
        return plot_timeline(shown.events, clock=clock, ax=ax, title=self.title, collapse=collapse)

    def memory(
        self,
        rank: int = 0,
        device: int = 0,
        ax: Axes | None = None,
        clock: str = "sim",
        steps: int | Iterable[int] | None = None,
    ) -> Axes:
        """Draw the memory of a device after each operation: parameters, gradients, optimizer state, activations.

        Needs a run with record="full": only then events contain the live memory.

        Args:
            rank: rank of the device.
            device: number of the device in the rank.
            ax: axes to draw into; None makes a figure.
            clock: "sim" or "wall".
            steps: only these steps; None draws all kept steps.

        Returns:
            The axes; `.figure` is the figure.

        Raises:
            InputError: no event has the live memory, or unknown clock.
        """
        # Drawing is optional and slow to import.
        from simparallel.view import plot_memory

        events = [event for event in self.select(steps=steps, ranks=rank).events if event.device == device]
        where = f"rank {rank}" + f", sim:{device}" * (len(self.devices(rank)) > 1)
        return plot_memory(events, clock=clock, ax=ax, title=f"{self.title}: memory of {where}")

    def _repr_html_(self) -> str:
        """Return the summary and the timeline as HTML, for notebooks."""
        title, *_ = self.table().splitlines()
        rows = metrics.cells(metrics.summarize(self.totals))
        return html_table(rows, title=title, notes=self._notes() if rows else ()) + self.frame()

    def frame(self) -> str:
        """Return the timeline as an HTML frame for a notebook.

        Above 5,000 events it is a hint to call `html(path)`, because the frame would make the notebook large.
        """
        if not self.events:
            return ""
        if len(self) > _MOST_IN_NOTEBOOK:
            return f"<p>{len(self):,} events: <code>.html(path)</code> writes their timeline to a file.</p>"
        lanes = len({event.lane for event in self.events})
        height = 170 + 34 * lanes + 40 * len(self.ranks) * any(event.live_bytes for event in self.events)
        return html_frame(self.html(), min(height, 620), f"{self.title}: timeline")
