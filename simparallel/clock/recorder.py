"""The recorder of one device: its two clocks, its memory, its events and marks.

Every event carries wall time (measured on this machine) and simulated time (modelled for the
described device). The simulated clock is a set of streams: one for compute, one for each
communication group, as NCCL and HCCL serialise per communicator. An operation advances its
stream; waiting for a collective joins the compute stream with that collective's end.

On a GPU the Python interpreter has a clock of its own: it returns from an operation once it has
started it. It is ahead of a device that has much to do, and the time that it takes is hidden; a
device with little to do waits for it. It stops where it reads values, until the device has done
all before.

A rank may have several devices, each with its own streams and memory. They run side by side; a
device that needs data of another one waits for a copy. But one interpreter starts the operations
of all of them, one after the other, and each start takes time.

Simulated time is integer picoseconds, so equal programs give equal timelines, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from time import perf_counter_ns
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simparallel.backend import Array, has_data, is_array
from simparallel.base.attributes import setting
from simparallel.clock.event import COMPUTE, COPY_IN, COPY_OUT, RANGE, Event
from simparallel.clock.launcher import Launcher
from simparallel.clock.memory import ACTIVATIONS, MemoryAccount, NullAccount
from simparallel.clock.recording import EVENTS_PER_RANK, EVENTS_PER_RUN, Recorded, Recording, check_record
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, describe, picoseconds, with_device
from simparallel.machine.device import COPY, ISSUE, READ, DeviceWork
from simparallel.machine.devices import FIRST, SIM, Device
from simparallel.rank_local import RankLocal

if TYPE_CHECKING:
    from simparallel.autograd.op import Context, Op, Plan

# The types of most values that ops keep for backward; a lookup here costs less than a call of `is_array`.
_NO_ARRAYS = frozenset((tuple, bool, int, float, str, np.dtype, NoneType))


class WorkPrice(NamedTuple):
    """The price of an operation on a device.

    Attributes:
        device_ps: its time on the device.
        host_ps: the time that the interpreter takes to start it.
        at_peak_ps: the time that its flops take at the peak.
        work: the operation.
    """

    device_ps: int
    host_ps: int = 0
    at_peak_ps: int = 0
    work: DeviceWork = DeviceWork()

    @property
    def measured(self) -> tuple[str, int, int, int]:
        """Name, flops, bytes and results, on which measured times depend."""
        return *self.work[:3], self.work.results


class NullObserver:
    """The observer outside of a run, with the methods of `Recorder` that ops and optimizers call; it notes nothing."""

    memory: MemoryAccount = NullAccount()

    def begin(self, name: str, plan: Plan | None = None) -> int:
        return 0

    def end_forward(self, op: Op, ctx: Context, inputs: Sequence[Array], y: Array, start_ns: int) -> None:
        pass

    def end_backward(self, op: Op, ctx: Context, start_ns: int) -> None:
        pass

    def end_step(self, name: str, start_ns: int, work: dict[Device | None, list[int]]) -> None:
        pass

    def abandon(self) -> None:
        pass

    def read(self, device: Device | None = None, *, is_check: bool = False) -> None:
        pass


class _Called(RankLocal):
    layer = ""


# The module that this rank runs, by its path; modules set it around their forward.
CALLED = _Called()


class Recorder:
    """The clocks, the memory and the events of one device of a rank: the observer of what it computes.

    Ops tell it before and after they compute. A rank has a recorder for each device: the first one is the current one,
    `of(device)` gives the others. They share events, steps and metrics. Not thread-safe: one device, one thread at a
    time.

    Args:
        rank: global rank of the device.
        cluster: the described hardware that prices operations.
        record: "summary" keeps the events of some steps and exact totals of all, "full" keeps all events, each
            with the live bytes after it, "off" keeps the clocks only. True means "full", False "off".
        memory_bytes: capacity of the memory of each device; None for no limit.

    Attributes:
        device: the device, by name.
        num_devices: number of devices of the rank; None if the program creates them by naming them.
    """

    # The wall time [ns]. Not a method, so that steps without a GPU run no extra Python.
    now_ns: Callable[[], int] = staticmethod(perf_counter_ns)

    def __init__(
        self, rank: int, cluster: ClusterSpec, *, record: bool | str = "summary", memory_bytes: int | None = None
    ) -> None:
        self.rank = rank
        self.cluster = cluster
        self.device = FIRST
        # Empty while there is one device, so that a recorder does not refer to itself.
        self._devices: dict[Device, Recorder] = {}
        self.num_devices = cluster.devices_per_rank
        self.step = 0
        self.memory = MemoryAccount(memory_bytes, f"rank {rank}")
        self.clock_ps: dict[str, int] = {COMPUTE: 0}
        # Number of the device in the rank.
        self._number = 0
        # Copies so far; a list, because all devices of the rank share the number.
        self._copies = [0]
        record = check_record(record)
        most = max(EVENTS_PER_RANK, EVENTS_PER_RUN // cluster.world_size)
        self._recording = Recording(most if record == "summary" else None)
        self._jitter = cluster.jitter_of(rank)
        # Plain tuples in Event's field order; building an Event each time costs twice as much.
        self._rows: list[tuple[Any, ...]] | None = None if record == "off" else self._recording.rows
        self._limit = self._recording.limit
        # Only in "full": it costs as much as the rest of an event.
        self._notes_memory = record == "full"
        # Number of open marks, see `record_function`.
        self.depth = 0
        # (step, name, value), see `log`.
        self.metrics: list[tuple[int, str, float]] = []
        # (op, shapes, ...) -> its price. The caller that makes a key stores it.
        self.prices: dict[Any, WorkPrice] = {}
        # Called with each communication: name, kind, stream, size_bytes, sent_bytes, group, seq; see `CommCounter`.
        self.listener: Callable[[str, str, str, int, int, tuple[int, ...], int], None] | None = None
        # (array of a new tensor, whether it requires a gradient) -> the array in its place; None for itself.
        self.home: Callable[[Array, bool], Array] | None = None
        self.launcher: Launcher | None = None
        self._set_launcher()

    def _set_launcher(self) -> None:
        """Make a launcher if the described device has an interpreter, or if there are several devices."""
        has_launcher = self.cluster.device.has_interpreter or bool(self._devices)
        if has_launcher is not (self.launcher is not None):
            self.launcher = self.new_launcher(self.moment()) if has_launcher else None

    # --- the other devices of the rank -----------------------------------------------------------

    @property
    def devices(self) -> dict[Device, Recorder]:
        """All devices of the rank that have been named so far."""
        return self._devices or {self.device: self}

    def of(self, device: Device) -> Recorder:
        """Return the recorder of a device of this rank; the first call for a device creates it.

        Raises:
            InputError: the rank has no such device.
        """
        if device is self.device:
            return self
        found = self._devices.get(device)
        return self._add(device) if found is None else found

    def own(self, device: Device) -> Device:
        """Return the device of this rank that `device` names.

        In a run of several ranks each rank has one device, unless `devices_per_rank` states more. The local rank names
        this device, too: `device("sim", get_local_rank())` is sim:0 of the rank.

        Raises:
            InputError: `device` belongs to another rank.
        """
        if device.index == 0 or device.type != SIM or self.num_devices or self.cluster.world_size == 1:
            return device
        local = self.local_rank
        if device.index == local:
            return FIRST
        raise InputError(
            f"rank {self.rank} has one device, sim:0, which is also sim:{local} as number {local} of its node; "
            f"{device} is not its own. For several devices per rank pass devices_per_rank= (launch, Cluster, init)."
        )

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.cluster.nodes[self.cluster.node_of(self.rank)].index(self.rank)

    def _add(self, device: Device) -> Recorder:
        count = self.num_devices
        if device.type != SIM or (count is not None and device.index >= count):
            known = f"{count} devices, sim:0 to sim:{count - 1}" if count else "simulated devices only"
            raise InputError(
                f"rank {self.rank} has {known}: there is no {device}. Give the ranks more devices (devices_per_rank= "
                "of launch, Cluster or init), or use another device."
            )
        if not self._devices:
            self._devices[FIRST] = self
            # An interpreter without a clock so far has launched everything: it starts at the first device's time.
            self._set_launcher()
        # A shallow copy shares recording, prices and metrics; memory and clocks are the device's own.
        first = self._devices[FIRST]
        other = copy.copy(first)
        other.device, other._number = device, device.index
        other.memory = MemoryAccount(first.memory.limit_bytes, f"rank {self.rank}, {device}")
        other.clock_ps = {COMPUTE: 0}
        other._jitter = self.cluster.jitter_of(self.rank, device.index)
        self._devices[device] = other
        return other

    def set_num_devices(self, count: int) -> None:
        """Set the number of devices of the rank.

        Raises:
            InputError: not an integer of 1 or more, or a device beyond that number is in use.
        """
        used = max(device.index for device in self.devices) + 1
        if isinstance(count, bool) or not isinstance(count, int) or count < used:
            raise InputError(f"devices_per_rank={count!r} must be an integer of {used} or more.")
        for recorder in self.devices.values():
            recorder.num_devices = count

    @contextmanager
    def threads(self, devices: Sequence[Device]) -> Iterator[None]:
        """Price the block as if one thread per device shared the interpreter evenly.

        The real schedule of the threads has no effect, so that simulated time is the same on every run.
        """
        recorders = [self.of(device) for device in devices]
        common = recorders[0].launcher
        # A single device has no launcher.
        if common is None:
            yield
            return
        # Taking turns, each of n threads starts an operation every n launch times.
        for recorder in recorders:
            recorder.launcher = recorder.new_launcher(common.moment(), common.turns * len(recorders))
        try:
            yield
        finally:
            for recorder in recorders:
                assert recorder.launcher is not None
                common.wait(recorder.launcher.moment())
                recorder.launcher = common

    # --- the interpreter ---------------------------------------------------------------------------

    def read(self, device: Device | None = None, *, is_check: bool = False) -> None:
        """Let the interpreter wait for a device of this rank, the first one for None, and read a value of it.

        Args:
            device: the device.
            is_check: whether the value is that of a loss before its backward, which other frameworks do not look at.
        """
        if self.launcher is None:
            return  # no other device has been used, and reading a tensor must not create one
        described = self.cluster.device
        if is_check and described.software != "plain":
            return
        self.launcher.wait((self if device is None else self.of(device)).moment())
        if READ in described.host_costs:
            self.launcher.spend(self._start_ps(DeviceWork(READ, results=1)))

    def copy_in(self, size_bytes: int) -> None:
        """Let the interpreter copy a host array to the device; the time of copies is that of calibrations alone."""
        if self.launcher is not None and COPY in self.cluster.device.host_costs:
            self.launcher.spend(self._start_ps(DeviceWork(COPY, 0, size_bytes, results=1)))

    def issue(self) -> int:
        """Start a communication; return the moment at which it can begin, as far as this rank is concerned."""
        if self.launcher is None or not self.cluster.device.has_interpreter:
            return self.moment()
        return self.latest(self.moment(), self.launcher.launch(self.issue_ps))

    def latest(self, *moments: int) -> int:
        """Return the moment at which all of these have passed."""
        return max(moments)

    @property
    def issue_ps(self) -> int:
        """The time that the interpreter takes to start a communication, or a graph of operations [ps]."""
        return self._start_ps(ISSUE)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Start the operations of the block together, in the time of one start: those of a captured step."""
        if self.launcher is None or not self.cluster.device.has_interpreter:
            yield
            return
        self.launcher.launch(self.issue_ps)
        with setting(self.launcher, turns=0):
            yield

    def _start_ps(self, work: DeviceWork) -> int:
        """Return the time that the interpreter takes to start an operation [ps], see `DeviceSpec.host_s`."""
        device = self.cluster.device
        host_s = device.host_s(work) if device.has_interpreter else device.launch_s
        return picoseconds(host_s * self.cluster.device_factor(self.rank))

    # --- events ----------------------------------------------------------------------------------

    @property
    def now_ps(self) -> int:
        """Simulated time of the compute stream [ps]."""
        return self.clock_ps[COMPUTE]

    def moment(self, stream: str = COMPUTE) -> int:
        """Return when a stream is free [ps], for what comes after it or waits for it.

        In a dry run, the time also knows the last action of the stream.
        """
        return self.clock_ps.get(stream, 0)

    def reply(self, op: str, at_ps: int, channel: tuple[int, int], seq: int) -> int:
        """Return the time of the reply to a message, which takes no time and has no event; dry runs note it.

        Args:
            op: "send" or "recv".
            at_ps: when the message was received, as `communicate` returned it; for "recv", as the reply says.
            channel: ranks that send and receive the reply.
            seq: number of the reply, the same on both ranks.
        """
        return at_ps

    def new_launcher(self, now_ps: int, turns: int = 1) -> Launcher:
        """Make a launcher for this device, see `Launcher`, which is free from `now_ps` on."""
        return Launcher(now_ps, turns)

    def price(self, work: DeviceWork) -> WorkPrice:
        """Return the price of work on this rank's device."""
        device = self.cluster.device
        duration_ps = picoseconds(device.device_s(work) * self.cluster.device_factor(self.rank))
        at_peak_ps = picoseconds(work.flops / device.peak(work.itemsize, work.is_product))
        return WorkPrice(duration_ps, self._start_ps(work), at_peak_ps, work)

    def price_of(self, op: Op, plan: Plan, needs: tuple[bool, ...] | None = None) -> WorkPrice:
        """Return the price of an op's forward, or with `needs` of its backward for these gradients."""
        device = self.cluster.device
        return self.price(op.cost(plan, device.software, needs, self.cluster.dtype, device.memory_format))

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: WorkPrice, layer: str = ""
    ) -> None:
        """Advance the compute stream by `price` and record the event."""
        duration_ps, host_ps, _, work = price
        if self._jitter is not None:
            duration_ps = round(duration_ps * next(self._jitter))
        # The operation starts once the stream is free and the interpreter has reached it.
        start_ps = self.clock_ps[COMPUTE]
        if self.launcher is not None:
            if name in self.cluster.device.host_waits:
                self.launcher.wait(self.moment())
            start_ps = max(start_ps, self.launcher.launch(host_ps))
        end_ps = start_ps + duration_ps
        self.clock_ps[COMPUTE] = end_ps
        rows = self._rows
        if rows is not None:
            rows.append((
                self.rank, COMPUTE, name, kind, self.step, wall_start_ns, wall_end_ns, start_ps, end_ps, work.flops,
                work.size_bytes, 0, (), -1, self._number,
                tuple(self.memory.live.values()) if self._notes_memory else (), (), "", layer,
            ))  # fmt: skip
            if len(rows) >= self._limit:
                self._recording.thin(self.step)

    def begin(self, name: str, plan: Plan | None = None) -> int:
        """Begin a computation.

        Args:
            name: for the error.
            plan: the plan of an op that will allocate its output; None for any other computation.

        Returns:
            The wall time [ns].

        Raises:
            DeviceOutOfMemoryError: the device has no room for the output.
        """
        if plan is not None and self.memory.limit_bytes is not None:
            self.memory.make_room(plan.output.size_bytes, name)
        return perf_counter_ns()

    def abandon(self) -> None:
        """End a computation that has failed, without an event."""

    def end_forward(self, op: Op, ctx: Context, inputs: Sequence[Array], y: Array, start_ns: int) -> None:
        """Note the forward of an op; count y, and the arrays that the op keeps for backward, until they are freed."""
        plan = ctx.plan
        for value in (y, *ctx.__dict__.values()):
            kind = type(value)
            if kind is np.ndarray or (kind not in _NO_ARRAYS and is_array(value)):
                self.memory.hold(value, ACTIVATIONS)
        price = self.prices.get(plan)
        if price is None:
            price = self.prices[plan] = self.price_of(op, plan)
        # The ops of a backward run outside of their modules.
        ctx.layer = layer = CALLED.layer
        self.compute(op.name, "forward", start_ns, perf_counter_ns(), price, layer)

    def end_backward(self, op: Op, ctx: Context, start_ns: int) -> None:
        """Note the backward of an op."""
        plan, key = ctx.plan, (ctx.plan, ctx.needs)
        price = self.prices.get(key)
        if price is None:
            price = self.prices[key] = self.price_of(op, plan, ctx.needs)
        self.compute(op.backward_name, "backward", start_ns, perf_counter_ns(), price, ctx.layer)

    def end_step(self, name: str, start_ns: int, work: dict[Device | None, list[int]]) -> None:
        """Note a step of an optimizer, as one fused kernel on each device, and count the step.

        Args:
            name: name of the event.
            start_ns: wall time at which the step began [ns].
            work: device, or None for the first -> flops, bytes, bytes of the widest item, which sets the peak rate, and
                number of changed tensors.
        """
        for device, numbers in (work or {None: [0, 0, 4, 0]}).items():
            recorder = self if device in (None, self.device) else self.of(device)
            recorder.work(name, "optimizer", start_ns, *numbers)
        self.next_step()

    def work(self, name: str, kind: str, wall_start_ns: int, *work: int) -> None:
        """Record work that ends now. `work`: flops, bytes and so on, as for `price`; the price is cached."""
        key: tuple[Any, ...] = name, *work
        price = self.prices.get(key)
        if price is None:
            found = DeviceWork(*key)
            price = self.prices[key] = self.price(self.cluster.update(found) if kind == "optimizer" else found)
        self.compute(name, kind, wall_start_ns, perf_counter_ns(), price)

    def copy_to(self, other: Recorder, name: str, wall_start_ns: int, wall_end_ns: int, size_bytes: int) -> None:
        """Record a copy to another device of the rank, as an event on both; the other device waits for it.

        The copy begins once this device has finished its work so far and both ports are free. This
        device continues meanwhile.
        """
        assert self.launcher is not None
        # One copy at a time through each port and direction.
        launched_ps = self.launcher.launch(self._start_ps(DeviceWork(name, 0, size_bytes)))
        after = self.moment(), self.moment(COPY_OUT), other.moment(COPY_IN), launched_ps
        start_ps = max(after)
        cost = self.cluster.copy(size_bytes)
        end_ps = start_ps + cost.time_ps
        number, self._copies[0] = self._copies[0], self._copies[0] + 1
        self.communicate(
            f"{name} to {other.device}", "copy", COPY_OUT, wall_start_ns, wall_end_ns, start_ps, end_ps,
            size_bytes, cost.sent_bytes, (self.rank,), number, after=after,
        )  # fmt: skip
        end_ps = other.communicate(
            f"{name} from {self.device}", "copy", COPY_IN, wall_start_ns, wall_end_ns, start_ps, end_ps,
            size_bytes, 0, (self.rank,), number, after=after,
        )  # fmt: skip
        other.join(end_ps)

    def communicate(
        self,
        name: str,
        kind: str,
        stream: str,
        wall_start_ns: int,
        wall_end_ns: int,
        sim_start_ps: int,
        sim_end_ps: int,
        size_bytes: int,
        sent_bytes: int,
        group: tuple[int, ...],
        seq: int,
        step_ps: tuple[int, ...] = (),
        algorithm: str = "",
        after: tuple[int, ...] = (),
    ) -> int:
        """Set the clock of `stream` to the end of a communication and record the event.

        Args:
            after: moments before which it cannot start, other than those of other ranks; dry runs note them.

        Returns:
            `sim_end_ps`, for `join`.
        """
        self.clock_ps[stream] = sim_end_ps
        if self.listener is not None:
            self.listener(name, kind, stream, size_bytes, sent_bytes, group, seq)
        rows = self._rows
        if rows is not None:
            rows.append((
                self.rank, stream, name, kind, self.step, wall_start_ns, wall_end_ns, sim_start_ps, sim_end_ps, 0,
                size_bytes, sent_bytes, group, seq, self._number, (), step_ps, algorithm,
            ))  # fmt: skip
            if len(rows) >= self._limit:
                self._recording.thin(self.step)
        return sim_end_ps

    def mark(self, name: str, depth: int, step: int, wall_start_ns: int, sim_start_ps: int) -> None:
        """Record a mark that ends now, inside of `depth` other marks."""
        rows = self._rows
        if rows is not None:
            stream = RANGE if depth == 0 else f"{RANGE} {depth + 1}"
            rows.append((
                self.rank, stream, name, RANGE, step, wall_start_ns, self.now_ns(), sim_start_ps, self.now_ps, 0, 0,
                0, (), -1, self._number, (), (),
            ))  # fmt: skip

    def join(self, until_ps: int, busy_ps: int = 0) -> None:
        """Let the compute stream wait until `until_ps`.

        Args:
            until_ps: end of a communication, as `communicate` returned it, or a moment of another device.
            busy_ps: the time that it keeps a core busy. Where the ranks' cores do the communicating, nothing overlaps.
        """
        now_ps = self.clock_ps[COMPUTE]
        if busy_ps and self.cluster.sharing is not None:
            until_ps = max(until_ps, now_ps + busy_ps)
        if until_ps > now_ps:
            self.clock_ps[COMPUTE] = until_ps

    def next_step(self) -> None:
        """Count a finished optimizer step; later events carry the next number."""
        for recorder in self._devices.values() or (self,):
            recorder.step += 1

    def log(self, **values: Any) -> None:
        """Record numbers of the current step, such as a loss."""
        numbers = {name: v.item() if hasattr(v, "item") else v for name, v in values.items()}
        self.metrics += [(self.step, name, float(v) if has_data(v) else v) for name, v in numbers.items()]

    @property
    def is_recording(self) -> bool:
        """Whether events are kept."""
        return self._rows is not None

    @property
    def takes_marks(self) -> bool:
        """Whether `record_function` marks are kept."""
        return self._rows is not None

    @property
    def events(self) -> list[Event]:
        """The kept events of all devices of the rank."""
        return [Event(*row) for row in self._recording.rows]

    def recorded(self) -> Recorded:
        """Return the kept events of all devices of the rank, and the totals of all events if some were dropped."""
        return self._recording.recorded()

    def settle(self) -> None:
        """Wait for the operations that have been started, so that their times are known. On a host there are none."""

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the memory of the first device from now on.

        Raises:
            DeviceOutOfMemoryError: the device already holds more; the limit is unchanged.
        """
        self.memory.limit_to(limit_bytes)

    def memory_summary(self) -> dict[str, Any]:
        """Return the memory summary of the first device, with name -> summary of every device under "devices"."""
        each = {str(device): recorder.memory.summary() for device, recorder in self.devices.items()}
        return {**self.memory.summary(), "devices": each}


class _CurrentRecorder(RankLocal):
    recorder: Recorder | None = None


_current = _CurrentRecorder()
_NOTHING = NullObserver()


def current_recorder() -> Recorder | None:
    """Return the recorder of the rank that this thread runs, or None outside of a run."""
    return _current.recorder


def observer_of(device: Device | None) -> Recorder | NullObserver:
    """Return the observer of a device of this thread's rank: its recorder, or outside of a run one that notes nothing.

    Args:
        device: None for the first device.

    Raises:
        InputError: the rank has no such device.
    """
    recorder = _current.recorder
    if recorder is None:
        return _NOTHING
    return recorder if device is None or device is FIRST else recorder.of(device)


def describe_device(preset: str | DeviceSpec) -> None:
    """Price this rank's further work on a preset device, unless the run was started with a described one."""
    recorder = current_recorder()
    if recorder is None:
        set_recorder(recorder := Recorder(0, describe(1)))
    if recorder.cluster.is_assumed:
        cluster = with_device(recorder.cluster, preset)
        for each in recorder.devices.values():
            each.cluster = cluster
        recorder._set_launcher()
        # All devices of the rank share this dict; its prices are for the old device.
        recorder.prices.clear()


def set_recorder(recorder: Recorder | None) -> None:
    """Make `recorder` this thread's current one from now on."""
    _current.recorder = recorder


@contextmanager
def use_recorder(recorder: Recorder | None) -> Iterator[Recorder | None]:
    """Make `recorder` this thread's current one inside the block."""
    before = current_recorder()
    set_recorder(recorder)
    try:
        yield recorder
    finally:
        set_recorder(before)


class record_function(ContextDecorator):  # PyTorch's name
    """Mark a part of the program in the trace: `with sp.record_function("micro-batch 3"): ...`.

    Marks have a lane above the compute lane of the rank's first device; a mark inside another one has the next lane
    below. They begin and end at the time of the compute stream. Without a run, or with record="off", nothing happens.
    Named as `torch.profiler.record_function`; also a decorator.

    Args:
        name: the text of the mark.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def _recreate_cm(self) -> record_function:
        # Each call of a decorated function is a mark of its own.
        return record_function(self.name)

    def __enter__(self) -> record_function:
        recorder = self._recorder = current_recorder()
        if recorder is not None and recorder.takes_marks:
            self._begin = recorder.depth, recorder.step, recorder.begin(self.name), recorder.now_ps
            recorder.depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        recorder = self._recorder
        if recorder is not None and recorder.takes_marks:
            recorder.depth = self._begin[0]
            recorder.mark(self.name, *self._begin)
