"""`Event`: one operation of a device, with its wall time and its simulated time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simparallel.base.units import format_numbers
from simparallel.errors import InputError

COMPUTE, RANGE = "compute", "range"
COPY_OUT, COPY_IN = "copy out", "copy in"  # the two directions of a device's port to the other devices
CLOCKS = ("sim", "wall")
KINDS = ("forward", "backward", "optimizer", "collective", "p2p", "copy", RANGE)

Lane = tuple[int, int, str]  # (rank, device, stream)


class Event(NamedTuple):
    """One operation of a device. Times are half-open intervals."""

    rank: int
    stream: str  # "compute", "comm <group>", "send to <rank>", "copy out", "copy in"; "range" of marks
    name: str  # "MatMul", "MatMul.backward", "SGD.step", "all_reduce", ...
    kind: str  # one of KINDS
    step: int  # optimizer steps finished before it
    wall_start_ns: int  # CLOCK_MONOTONIC, comparable between ranks of a machine; on a GPU, when the operation ran
    wall_end_ns: int
    sim_start_ps: int
    sim_end_ps: int
    flops: int  # 0 for communication
    size_bytes: int  # moved in memory (compute) or payload (communication)
    sent_bytes: int  # sent from this rank by the modelled algorithm; 0 for compute
    group: tuple[int, ...]  # ranks of a communication, () for compute
    seq: int  # number of the collective in its group, of the copy in its rank, -1 for compute
    device: int = 0  # number of the device in its rank
    live_bytes: tuple[int, ...] = ()  # live at its end, by memory.CATEGORIES; () if not recorded
    step_ps: tuple[int, ...] = ()  # times of a message-based algorithm's steps, if their sum is the event's time
    algorithm: str = ""  # algorithm that a collective's time assumes: "ring", "tree", "hierarchical", …
    layer: str = ""  # path of the module that called the op, such as "body.fc1"; "" outside of modules

    @property
    def lane(self) -> Lane:
        """Rank, device and stream."""
        return self.rank, self.device, self.stream

    def span(self, clock: str) -> tuple[int, int]:
        """Return start and end: simulated [ps], or measured [ns] if the clock is "wall"."""
        if clock == "sim":
            return self.sim_start_ps, self.sim_end_ps
        return self.wall_start_ns, self.wall_end_ns


# Indices of fields in an event's row.
RANK, STREAM, KIND, STEP, WALL_START, WALL_END, DEVICE = map(
    Event._fields.index, ("rank", "stream", "kind", "step", "wall_start_ns", "wall_end_ns", "device")
)


def stream_order(stream: str) -> tuple[int, str]:
    """Return a sort key for the streams of a device: marks, then compute, then communication by name."""
    return (0 if stream.startswith(RANGE) else 1 if stream == COMPUTE else 2), stream


def check_clock(clock: str) -> None:
    """Raise InputError unless `clock` is "sim" or "wall"."""
    if clock not in CLOCKS:
        raise InputError(f"clock={clock!r} is not a clock of a trace; choose 'sim' or 'wall'.")


def lane_names(events: Iterable[Event]) -> dict[Lane, str]:
    """Return (rank, device, stream) -> display name, in the order of display: by rank, by device, then `stream_order`.

    A group's stream is named after its ranks, "comm [0, 2]". The name includes the device if the rank has several.
    """
    groups = {event.lane: event.group for event in events}
    with_devices = {rank for rank, device, _ in groups if device}
    names: dict[Lane, str] = {}
    used: dict[Lane, int] = {}
    for lane in sorted(groups, key=lambda key: (*key[:2], stream_order(key[2]))):
        rank, device, name = lane
        if name.startswith("comm ") and name.removeprefix("comm ").isdigit():
            name = f"comm [{format_numbers(groups[lane])}]"
        name = f"marks{name.removeprefix(RANGE)}" if name.startswith(RANGE) else name
        # Several groups may have the same ranks.
        used[rank, device, name] = number = used.get((rank, device, name), 0) + 1
        name += f" ({number})" if number > 1 else ""
        names[lane] = f"sim:{device} {name}" if rank in with_devices else name
    return names
