"""`Prediction`, the result of a dry run: time, memory and communication of every class of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import exp
from typing import TYPE_CHECKING, Any

from simparallel.base.checks import check_integer
from simparallel.base.html import table
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_seconds
from simparallel.clock.event import Event
from simparallel.clock.recording import join
from simparallel.clock.shared_links import Interference
from simparallel.comm.dry.folding import alike
from simparallel.errors import InputError
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, DeviceSpec, LinkSpec
from simparallel.predict.programs import ProgramRecorder, WorkRecorder, contended, critical_events
from simparallel.runtime.reports import Outcome
from simparallel.trace import Trace

if TYPE_CHECKING:
    from simparallel.view.timeline import Axes


class Prediction:
    """The predicted run of a program on a described cluster. Made by `dry_run`.

    Attributes:
        world_size: number of ranks.
        cluster: the described hardware.
        classes: representative -> number of ranks that it stands for, itself included.
        stands_for: the representative of each rank.
        trace: the events of the ranks that ran, as a run has them; `timeline()` and `save()` are its methods.
        memory: rank that ran -> memory of its device, as `Results.memory`.
        values: rank that ran -> the value that the program returned.
        capacity_bytes: memory of each device: the described one's, or the limit that `dry_run` was given.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome],
        cluster: ClusterSpec,
        stands_for: Sequence[int],
        again: Callable[[ClusterSpec], Prediction],
        recorders: Mapping[int, WorkRecorder],
        capacity_bytes: int,
    ) -> None:
        events, totals = join([outcome.recorded for outcome in outcomes])
        self.cluster, self.world_size = cluster, cluster.world_size
        first = alike(events, [outcome.rank for outcome in outcomes])
        self.stands_for = [first[rank] for rank in stands_for]
        # Ranks of one class may send different numbers of bytes: the root of a broadcast, and its last receiver.
        self._weights = Counter(stands_for)
        self.classes = dict(sorted(Counter(self.stands_for).items()))
        self.trace = Trace(events, cluster, name="prediction", totals=totals)
        self.memory = {outcome.rank: outcome.memory for outcome in outcomes}
        self.values = {outcome.rank: outcome.value for outcome in outcomes}
        self.capacity_bytes = capacity_bytes
        self._again, self._recorders = again, recorders

    # --- time -----------------------------------------------------------------------------------------

    @property
    def makespan_s(self) -> float:
        """Simulated time [s] of the whole program."""
        return self.trace.makespan_s

    @property
    def step_time_s(self) -> float:
        """Simulated time [s] of the last step; of the whole program if it has no optimizer steps."""
        ends = self._step_ends()
        if not ends:
            return self.makespan_s
        first = min((event.sim_start_ps for event in self.trace.events), default=0)
        return (ends[-1] - (ends[-2] if len(ends) > 1 else first)) / PS_PER_S

    @property
    def interval_s(self) -> tuple[float, float, float] | None:
        """Time [s] of the last step as (p10, p50, p90), by the errors that the calibration of the cluster has found.

        Computing has the errors of whole programs plus, where ranks share cores, those of sharing; all other time has
        those of collectives. All of them are taken at the same quantile. None if the cluster was not calibrated.
        """
        errors = self.cluster.calibration.get("residuals")
        if errors is None:
            return None
        rows = self.trace.summary()
        compute_s, exposed_s = (sum(row[key] for row in rows) for key in ("compute_time_s", "exposed_communication_s"))
        computed = compute_s / ((compute_s + exposed_s) or 1.0)
        is_shared = self.cluster.sharing is not None and self.cluster.sharing(self.world_size) < 1

        def at(name: str) -> float:
            compute = errors["program"][name] + (errors["sharing"][name] if is_shared else 0.0)
            return self.step_time_s * (computed * exp(compute) + (1 - computed) * exp(errors["collective"][name]))

        return at("p10"), at("p50"), at("p90")

    def _step_ends(self) -> list[int]:
        """Return the end [ps] of each optimizer step: that of the slowest rank."""
        ends: dict[int, int] = {}
        for event in self.trace.events:
            if event.kind == "optimizer":
                ends[event.step] = max(ends.get(event.step, 0), event.sim_end_ps)
        return [ends[step] for step in sorted(ends)]

    def summary(self) -> list[dict[str, Any]]:
        """Return a dict for each class of ranks and device, with the keys of `Trace.summary` and these:

        `ranks` (number of ranks of the class), `mfu` and `hfu` (of the device, see `utilisation`), `peak_bytes` (of the
        device's memory). compute + exposed communication + idle time is the makespan.
        """
        rows = []
        for row in self.trace.summary():
            rank = row["rank"]
            if rank in self.classes:
                device = row["device"]
                memory = self.memory[rank]["devices"][f"sim:{device}"]
                needed, again = (self._at_peak(rank, device, is_needed) for is_needed in (True, False))
                rows.append({
                    **row, "ranks": self.classes[rank], "mfu": needed, "hfu": needed + again,
                    "peak_bytes": memory["peak_bytes"],
                })  # fmt: skip
        return rows

    def utilisation(self, rank: int = 0, model_flops: int | None = None) -> float:
        """Return the share of the makespan that a rank's work takes at the peak of its device, 0 to 1.

        Each operation counts with the peak for its own dtype, of matrix products or of other operations. Of several
        devices, it is the mean. `summary` has it for each device: `hfu`, and `mfu` without recomputed work and the
        optimizer's.

        Args:
            rank: a rank; its representative is measured.
            model_flops: flops of the rank that the model needs, for the model flops utilisation (MFU, Chowdhery et al.
                2022, "PaLM", appendix B). None takes all flops done, recomputed ones included: the hardware flops
                utilisation (HFU).
        """
        flops = sum(event.flops for event in self._events_of(rank))
        devices = [device.index for device in self._recorders[self.stands_for[rank]].devices]
        shares = [self._at_peak(rank, device, is_needed) for device in devices for is_needed in (True, False)]
        done = sum(shares) / len(devices)
        return done if model_flops is None else done * model_flops / flops if flops else 0.0

    def _at_peak(self, rank: int, device: int, is_needed: bool) -> float:
        """Return the share of the makespan that work of a device takes at peak: what the model needs, or the rest."""
        at_peak_ps = self._recorders[self.stands_for[rank]].at_peak_ps[device, is_needed]
        return at_peak_ps / PS_PER_S / self.makespan_s if self.makespan_s else 0.0

    def _events_of(self, rank: int) -> list[Event]:
        check_integer("Prediction", "rank", rank, high=self.world_size - 1)
        return [event for event in self.trace.events if event.rank == self.stands_for[rank]]

    def phases(self, rank: int = 0) -> dict[str, float]:
        """Return kind of event -> its time [s] on a rank: forward, backward, optimizer, collective, p2p, copy."""
        times: Counter[str] = Counter()
        for event in self._events_of(rank):
            times[event.kind] += event.sim_end_ps - event.sim_start_ps
        return {kind: time_ps / PS_PER_S for kind, time_ps in sorted(times.items())}

    def throughput(self, samples: float) -> float:
        """Return samples (or tokens) per second, if all ranks together process `samples` of them in a step."""
        return samples / self.step_time_s if self.step_time_s else 0.0

    def sent_bytes(self, by: str = "name") -> dict[str, int]:
        """Return the bytes that all ranks together send; a rank that did not run sends what its representative does.

        Args:
            by: "name" sums for each kind of collective or message, "tier" for each tier of the network: that of the
                slowest link between the ranks of a group.
        """
        if by not in ("name", "tier"):
            raise InputError(f"sent_bytes: by={by!r} is not 'name' or 'tier'.")
        sent: Counter[str] = Counter()
        for event in self.trace.events:
            if event.sent_bytes:
                key = event.name if by == "name" else self._tier(event.group)
                sent[key] += event.sent_bytes * self._weights[event.rank]
        return dict(sorted(sent.items()))

    def _tier(self, group: tuple[int, ...]) -> str:
        links = self.cluster.links_of(group) if len(group) > 1 else ()
        return links[-1].name.partition(":")[0] if links else "device"

    # --- memory ---------------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """The largest memory peak of any device."""
        return max(device["peak_bytes"] for memory in self.memory.values() for device in memory["devices"].values())

    @property
    def software_bytes(self) -> int:
        """The largest memory peak of any device with its own software.

        Where `software` of the device is not "plain", operations keep what the kernels of today's frameworks keep
        (`Op.eager_keeps`), not what NumPy's do; so attention keeps no scores.
        """
        return max(recorder.software_peak_bytes for recorder in self._recorders.values())

    @property
    def fits(self) -> bool:
        """Whether the memory peak of every device is within its capacity."""
        return self.peak_bytes <= self.capacity_bytes

    def memory_over_time(self, rank: int = 0, ax: Axes | None = None, **settings: Any) -> Axes:
        """Draw the memory of a rank's device after each operation, by category; see `Trace.memory`."""
        return self.trace.memory(self.stands_for[rank], ax=ax, **settings)

    # --- other hardware -------------------------------------------------------------------------------

    def with_(
        self,
        *,
        device: DeviceSpec | None = None,
        link: LinkSpec | None = None,
        node_link: LinkSpec | None = None,
        cluster: ClusterSpec | None = None,
        **changes: Any,
    ) -> Prediction:
        """Predict the same program on other hardware: another device, other links, a slow rank.

        Args:
            device: in place of all devices.
            link: links inside the nodes.
            node_link: links between the nodes.
            cluster: another description of as many ranks; the other arguments change it.
            changes: other fields of `ClusterSpec`, such as stragglers={3: 1.5}.

        Cost: as the dry run, which is repeated: a program may look at its hardware.
        """
        given = {"device": device, "link": link, "node_link": node_link, **changes}
        spec = cluster or self.cluster
        if spec.world_size != self.world_size:
            raise InputError(
                f"with_: the program was predicted for {self.world_size} ranks, the cluster has {spec.world_size}."
            )
        return self._again(replace(spec, **{name: value for name, value in given.items() if value is not None}))

    def contended(self, compute: float = 1.0, communication: float = 1.0) -> Trace:
        """Return the trace with links shared by groups that communicate at once.

        The prediction itself times each collective as if it were alone. Here transfers that meet on a link share it,
        max-min fair, as in the fluid model of SimGrid (Casanova et al. 2014). A receive from any rank still gets the
        message that it got.

        Args:
            compute: factor on the time of work while its rank communicates; Galvatron assumes 1.3.
            communication: factor on the time of a communication while one of its ranks computes.

        Raises:
            InputError: ranks were folded (`dry_run(..., fold=False)` runs all).
        """
        programs = self._programs()
        if len(programs) < self.world_size:
            raise InputError(
                f"contended: {len(self.memory)} of {self.world_size} ranks were run, and all are needed. Use "
                "dry_run(..., fold=False)."
            )
        found = contended(programs, self.cluster, Interference(compute, communication))
        return Trace(chain.from_iterable(found.values()), self.cluster, name="prediction, links shared")

    def critical_path(self) -> list[Event]:
        """Return the events that the makespan consists of, in order: each waited for the one before it.

        If all ranks were run, there is no gap. Where the interpreter of a device sets the pace, the path has its
        launches ("launch", on the stream "launcher"), and where a communication keeps a core busy, "busy core". If
        ranks were folded, the path is that of the trace, see `Trace.critical_path`.
        """
        programs = self._programs()
        return self.trace.critical_path() if len(programs) < self.world_size else critical_events(programs)

    def _programs(self) -> list[ProgramRecorder]:
        """Return the recorders of all ranks in order; fewer if ranks were folded."""
        found = [self._recorders.get(rank) for rank in range(self.world_size)]
        return [recorder for recorder in found if isinstance(recorder, ProgramRecorder)]

    # --- text and pictures ----------------------------------------------------------------------------

    def timeline(self, ax: Axes | None = None, steps: int | Iterable[int] | None = None, **settings: Any) -> Axes:
        """Draw the events of one rank of each class; see `Trace.timeline`."""
        return self.trace.select(ranks=self.classes).timeline(ax=ax, steps=steps, **settings)

    def table(self) -> str:
        """Return the summary as text: one row for each class of ranks."""
        return "\n".join([self._head(), *aligned(self._rows(), ">"), *self._notes()])

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (
                str(row["ranks"]), str(row["rank"]) + (f" sim:{row['device']}" if row["device"] else ""),
                *(format_seconds(row[key]) for key in ("compute_time_s", "exposed_communication_s", "idle_time_s")),
                format_bytes(row["peak_bytes"]), f"{row['mfu']:.1%}", f"{row['hfu']:.1%}",
            )
            for row in self.summary()
        ]  # fmt: skip
        return [("ranks", "like rank", "compute", "exposed", "idle", "peak memory", "MFU", "HFU"), *rows]

    def _notes(self) -> list[str]:
        device = self.cluster.device
        notes = [
            f"{'fits' if self.fits else 'does not fit'}: {format_bytes(self.peak_bytes)} at the peak, a device has "
            f"{format_bytes(self.capacity_bytes)}",
            "exposed: communicates while it does not compute; idle: does neither; all times are modelled",
            "MFU, HFU: share of the time that the model's work, and all work, would take at the peak of its dtypes",
        ]
        return [*notes, f"{device.name}: {device.notes}"] if device.notes else notes

    def _head(self) -> str:
        count = len(self._step_ends())
        step = f"{format_seconds(self.step_time_s)} a step" if count else "no optimizer steps"
        ran = len(self.memory)
        typed = "" if self.cluster.dtype == "float32" else f" in {self.cluster.dtype}"
        folded = f"; {ran} of {self.world_size} ranks were run" if ran < self.world_size else ""
        return (
            f"{self.cluster.name}{typed}: {format_seconds(self.makespan_s)} simulated, {step}, "
            f"{len(self.classes)} {'class' if len(self.classes) == 1 else 'classes'} of ranks{folded}"
        )

    def __repr__(self) -> str:
        return f"<Prediction {self._head()}>"

    def _repr_html_(self) -> str:
        """Return the table and the timeline of one rank of each class as HTML, for notebooks."""
        trace = self.trace.select(ranks=self.classes)
        return table(self._rows(), title=self._head(), notes=self._notes()) + trace.frame()
