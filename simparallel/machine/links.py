"""Described links: what a step between two ranks costs, and how the devices of one tier are wired."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from simparallel.base.checks import is_integer
from simparallel.errors import ClusterError
from simparallel.machine.numbers import check_known, check_number, check_sources

TOPOLOGIES = ("switch", "mesh", "ring")


# Ranks of each group. `ClusterSpec` also takes the number of groups, with equally many consecutive ranks each.
Groups = tuple[tuple[int, ...], ...]


class Link(NamedTuple):
    """What a step over a link costs: latency and, for each byte, 1 / bandwidth (Hockney).

    Attributes:
        latency_s: seconds of a message without bytes.
        bandwidth_bytes_per_s: bytes a second in one direction.
    """

    latency_s: float
    bandwidth_bytes_per_s: float


class Segment(NamedTuple):
    """The cost of sizes of at least `from_bytes`, up to the next segment.

    Attributes:
        from_bytes: the smallest size, in bytes.
        latency_s: seconds of a step, without the time of its bytes.
        bandwidth_bytes_per_s: bytes a second.
    """

    from_bytes: int
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class LinkSpec:
    """The links of one tier, such as those inside a node.

    Args:
        latency_s: latency of one step of a collective, or of one message.
        bandwidth_bytes_per_s: bandwidth per port and direction; of a mesh or ring, of the link between two devices.
        notes: anything else worth knowing.
        topology: "switch": every device has one port to all others. "mesh": a link between each two, so a group of q
            has (q - 1) of them for each device. "ring": a link to each of two neighbours; the members of a group are
            taken to be adjacent.
        ports: number of ports of each node (of each unit that this tier joins), shared evenly among its devices; None
            for one port per device (one rail each).
        oversubscription: of a switch: bandwidth of all ports of such a unit / the bandwidth that leaves it.
        segments: (from_bytes, latency_s, bandwidth_bytes_per_s) of larger sizes, ascending: other protocols, such as
            LL128 and Simple after LL. A size costs no more than any larger one.
        sources: field -> where its numbers come from: "data sheet", "measured" or "assumed", and a text after a colon.

    Raises:
        ClusterError: a number out of range, an unknown topology, sizes that do not ascend, or a source of unknown kind.
            Fact: `key`, the field.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    notes: str = ""
    topology: str = "switch"
    ports: int | None = None
    oversubscription: float = 1.0
    segments: tuple[Segment, ...] = ()
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(Segment(*each) for each in self.segments))
        check_known("link", "topology", self.topology, TOPOLOGIES)
        if self.ports is not None and (not is_integer(self.ports) or not 1 <= self.ports <= 1 << 20):
            raise ClusterError(f"link: ports={self.ports!r} must be an integer of 1 or more, or None.", key="ports")
        check_number("link", "oversubscription", self.oversubscription)
        if self.oversubscription > 1 and self.topology != "switch":
            raise ClusterError(
                f"link: oversubscription={self.oversubscription:g} belongs to a switch, not to a {self.topology}; "
                "leave it out.",
                key="oversubscription",
            )
        for number, (_, latency_s, bandwidth) in enumerate(self.all_segments):
            owner, key = (f"link: segments[{number - 1}]", "segments") if number else ("link", "")
            check_number(owner, "latency_s", latency_s, key=key)
            check_number(owner, "bandwidth_bytes_per_s", bandwidth, key=key)
        starts = self.starts
        if any(not is_integer(start) or not 0 <= start <= 1 << 60 for start in starts) or any(
            later <= start for start, later in zip(starts, starts[1:], strict=False)
        ):
            raise ClusterError(
                f"link: segments begin at {list(starts[1:])} bytes; these must be integers above 0 that ascend.",
                key="segments",
            )
        names = [each.name for each in fields(self) if each.name not in ("notes", "sources")]
        check_sources("link", self.sources, names)

    @property
    def all_segments(self) -> tuple[Segment, ...]:
        """All segments, from 0 bytes on."""
        return (Segment(0, self.latency_s, self.bandwidth_bytes_per_s), *self.segments)

    @property
    def starts(self) -> tuple[int, ...]:
        """The sizes at which the segments begin, from 0 on."""
        return tuple(segment.from_bytes for segment in self.all_segments)

    def step(self, size_bytes: float) -> Link:
        """Return latency and bandwidth of a step of an operation on `size_bytes`."""
        return Link(*self.all_segments[bisect_right(self.starts, size_bytes) - 1][1:])

    def faster(self, factor: float) -> LinkSpec:
        """Return links with `factor` times the bandwidth, for every size, and the same latencies."""
        segments = tuple(each._replace(bandwidth_bytes_per_s=each[-1] * factor) for each in self.segments)
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor, segments=segments)

    def time_s(self, size_bytes: float) -> float:
        """Return the time [s] of a message: no more than that of a larger one."""
        sizes = (size_bytes, *(start for start in self.starts if start > size_bytes))
        return min(latency_s + size / bandwidth for size in sizes for latency_s, bandwidth in (self.step(size),))

    def between(self, count: int, size_bytes: float, factor: float = 1.0) -> tuple[Link, Link]:
        """Return the links of `count` devices that communicate at once: between neighbours, and between any two.

        Args:
            count: at least 2.
            size_bytes: the size of the operation, which chooses the segment.
            factor: how much slower than described the links are.
        """
        latency_s, bandwidth = self.step(size_bytes)
        latency_s, bandwidth = latency_s * factor, bandwidth / factor
        if self.topology == "mesh":
            bandwidth *= count - 1
        if self.topology != "ring" or count == 2:
            return (Link(latency_s, bandwidth),) * 2
        # Two directions of the ring. To all others a device has count²/4 hops in all, over 2 links of each device.
        far = 2 * bandwidth * (count - 1) / (count * count // 4)
        return Link(latency_s, 2 * bandwidth), Link(latency_s * (count // 2), far)


@dataclass(frozen=True)
class Tier:
    """Groups of ranks that are nearer to each other than others: islands inside a node, or racks of nodes.

    Args:
        name: name in tables.
        link: the links between the members of a group.
        groups: the ranks of each group; or the number of groups, with equally many consecutive ranks each.
        joins_nodes: whether the groups join whole nodes, as racks do, and not devices inside a node.
    """

    name: str
    link: LinkSpec
    groups: Groups
    joins_nodes: bool = False
