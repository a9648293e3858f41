"""How long the collectives of a library take on any described links.

The library implements a ring, a tree and phases by levels of the network, and uses the fastest for the size: latencies
add up along the path of a chunk, each device drives a port of its own (with n devices per node, a ring is n rings with
a part each), and the double binary tree of Sanders, Speck, Träff 2009 uses all ports in both directions. Clusters with
NCCL have its own choices and times instead (`nccl.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf
from operator import itemgetter
from typing import NamedTuple

from simparallel.algorithms.algorithm import depth
from simparallel.machine.links import Link, LinkSpec


class Level(NamedTuple):
    """A tier of the network at which parts of a group meet. A part is a member, or a unit of the level below.

    Attributes:
        link: the described links.
        units: number of units that have members.
        parts: largest number of parts of a unit.
        wired: smallest number of parts of a unit that has more than one.
        fewest, most: smallest and largest number of members of a unit.
        ports: smallest number of ports that carry a part's traffic to the others, as far as oversubscription lets them.
        share: smallest number of such ports per member of a part.
        in_node: whether the tier is inside of nodes.
        factor: how much slower than described the links are.
    """

    link: LinkSpec
    units: int
    parts: int
    wired: int
    fewest: int
    most: int
    ports: float
    share: float
    in_node: bool = True
    factor: float = 1.0

    @property
    def peak_gbps(self) -> float:
        """What a port or link carries at most, of all sizes [GB/s]; a mesh has links to all others."""
        peak = max(segment.bandwidth_bytes_per_s for segment in self.link.all_segments)
        return peak / 1e9 * {"switch": 1, "ring": min(2, self.wired - 1), "mesh": self.wired - 1}[self.link.topology]


class Spread(NamedTuple):
    """The distribution of a group over the tiers of a network.

    Attributes:
        ranks: number of members.
        levels: the tiers at which they meet, from the inside out; none for one member.
        near, far: the link of each level between neighbours, and between any two parts.
    """

    ranks: int
    levels: tuple[Level, ...]
    near: tuple[Link, ...] = ()
    far: tuple[Link, ...] = ()

    def of_size(self, size_bytes: float) -> Spread:
        """Return a copy with the links that vectors of this size use."""
        links = [level.link.between(level.wired, size_bytes, level.factor) for level in self.levels]
        return self._replace(near=tuple(near for near, _ in links), far=tuple(far for _, far in links))

    def passing_s(self, size_bytes: float, *, far: bool = False) -> float:
        """Return the time [s] for `size_bytes` to flow through every member's port.

        Traffic between the parts of a level is divided among the ports of a part's members.
        """
        # All levels carry the stream at once, so the slowest one counts.
        links = self.far if far else self.near
        each = zip(self.levels, links, strict=True)
        return max((size_bytes / link.bandwidth_bytes_per_s / level.ports for level, link in each), default=0.0)

    def round_s(self, hops: Callable[[int], int]) -> float:
        """Return the latency [s] of a path with hops(n) steps among the n parts of a unit, summed over the levels."""
        return sum(hops(level.parts) * link.latency_s for level, link in zip(self.levels, self.far, strict=True))

    def chain_s(self) -> float:
        """Return the latency [s] of a path through all members."""
        parts = (self.ranks, *(level.units for level in self.levels))
        return sum((parts[i] - level.units) * self.near[i].latency_s for i, level in enumerate(self.levels))

    @property
    def nodes(self) -> int:
        """Number of nodes that have members."""
        return next((level.units for level in reversed(self.levels) if level.in_node), self.ranks)

    @property
    def inside(self) -> float:
        """What the links of a member inside its node carry at most [GB/s]; infinite for one member on each node."""
        return min((level.peak_gbps * level.share for level in self.levels if level.in_node), default=inf)

    @property
    def between(self) -> float:
        """What a port of a node carries at most [GB/s]; infinite on one node."""
        return min((level.peak_gbps for level in self.levels if not level.in_node), default=inf)

    @property
    def ports(self) -> float:
        """Smallest number of ports of a node, as far as oversubscription lets them; 0 on one node."""
        return min((level.ports for level in self.levels if not level.in_node), default=0.0)

    @property
    def has_switch(self) -> bool:
        """Whether a single switch joins the members on a node."""
        return [level.link.topology for level in self.levels if level.in_node] == ["switch"]

    @property
    def slowdown(self) -> float:
        """How much slower than described the slowest link is."""
        return max((level.factor for level in self.levels), default=1.0)

    @property
    def slowest(self) -> Link:
        """The largest latency of its links, and the smallest bandwidth per member."""
        each = [link.bandwidth_bytes_per_s * level.share for level, link in zip(self.levels, self.far, strict=True)]
        return Link(max(link.latency_s for link in self.far), min(each))

    def step(self, size_bytes: float) -> Link:
        """Return the slowest link of a step in which each member sends one message."""
        links = [(level, *level.link.step(size_bytes)) for level in self.levels]
        bandwidths = [bandwidth * level.share / level.factor for level, _, bandwidth in links]
        return Link(max(latency_s * level.factor for level, latency_s, _ in links), min(bandwidths))

    def sizes_from(self, size_bytes: float) -> list[float]:
        """Return the size, and all larger ones at which a segment of a link begins."""
        starts = {start for level in self.levels for start in level.link.starts}
        return [size_bytes, *sorted(start for start in starts if start > size_bytes)]

    def split(self, count: int) -> tuple[Spread, Spread] | None:
        """Return the group's part in one unit of the `count` lowest levels, and one rail across these units.

        A rail is the members at the same position of each unit. None unless the units are equal.
        """
        inner, outer = self.levels[:count], self.levels[count:]
        units, size = inner[-1].units, inner[-1].most
        if any(level.fewest != level.most or level.units % units for level in inner):
            return None
        rails = tuple(
            level._replace(ports=level.ports / size, fewest=level.fewest // size, most=level.most // size)
            for level in outer
        )
        inside = tuple(level._replace(units=level.units // units) for level in inner)
        return Spread(size, inside), Spread(units, rails)


# (group, size of the vector [bytes]) -> time [s]
Time = Callable[[Spread, float], float]


def _ring_time(passages: int) -> Time:
    # In a passage round the ring, all chunks but a rank's own flow through its port; the latency is that of all hops.
    def time(at: Spread, size: float) -> float:
        return passages * (at.chain_s() + at.passing_s(size * (at.ranks - 1) / at.ranks))

    return time


def _mesh_time(passages: int) -> Time:
    """Return the model of exchanges with all other members at once, one per passage; infinite without a full mesh."""

    def time(at: Spread, size: float) -> float:
        if len(at.levels) > 1 or at.levels[0].link.topology != "mesh":
            return inf
        return passages * (at.near[0].latency_s + at.passing_s(size * (at.ranks - 1) / at.ranks))

    return time


def _mesh_barrier(at: Spread, size: float) -> float:
    return _mesh_time(1)(at, 0.0)


def _chain_time(at: Spread, size: float) -> float:
    return at.chain_s() + at.passing_s(size)


def _tree_time(passages: int) -> Time:
    """Return the model of two binary trees, each with half of the vector, in the limit of many chunks."""
    return lambda at, size: passages * (at.round_s(depth) + at.passing_s(size, far=True))


def _root_time(hops: Callable[[Spread], float]) -> Time:
    """Return the model of moving all members' parts to or from one member, whose ports are the bottleneck."""

    def time(at: Spread, size: float) -> float:
        below = (1, *(level.most for level in at.levels))
        # Through the ports of each level go the parts of all members outside of the root's unit below that level.
        return hops(at) + sum(
            (at.ranks - below[i]) / at.ranks * size / at.near[i].bandwidth_bytes_per_s / level.ports
            for i, level in enumerate(at.levels)
        )

    return time


def _one_by_one_s(at: Spread) -> float:
    below = (1, *(level.most for level in at.levels))
    return sum((below[i + 1] - below[i]) * link.latency_s for i, link in enumerate(at.far))


_binomial = _root_time(lambda at: at.round_s(depth))
_one_by_one = _root_time(_one_by_one_s)


def _tree_and_root(at: Spread, size: float) -> float:
    """Return the time of a tree reduction and a scatter, or of a gather and a tree broadcast."""
    return _binomial(at, size) + _tree_time(1)(at, size)


def _pairwise(at: Spread, size: float) -> float:
    # The peers that a member of the smallest unit meets at each level; it has the most traffic to others.
    below, part, total = 1, size / at.ranks, 0.0
    for level, link in zip(at.levels, at.far, strict=True):
        peers, below = level.fewest - below, level.fewest
        total += peers * (link.latency_s + part / (link.bandwidth_bytes_per_s * level.share))
    return total


def _bruck(at: Spread, size: float) -> float:
    """Return the time of Bruck's algorithm (Bruck et al. 1997): step i sends the parts whose number has bit i.

    All traffic is priced on the slowest link.
    """
    link = at.slowest
    # A part is sent once for every bit of its number.
    sent = _bits_below(at.ranks) / at.ranks
    return depth(at.ranks) * link.latency_s + sent * size / link.bandwidth_bytes_per_s


@lru_cache(maxsize=1024)
def _bits_below(count: int) -> int:
    return sum(number.bit_count() for number in range(count))


def _dissemination(at: Spread, size: float) -> float:
    return depth(at.ranks) * at.slowest.latency_s


def _in_levels(at: Spread, size: float) -> float:
    """Return the time of a barrier up trees, by dissemination at the highest level, and down the trees."""
    return 2 * at.round_s(depth) - depth(at.levels[-1].parts) * at.far[-1].latency_s


def _by_levels(*phases: tuple[str, int, bool]) -> Time:
    """Return the model of consecutive collectives: (op, level, rail).

    Level 0 is inside of units, such as nodes, 1 between them; with `rail` the vector is one rail's part. The time is
    that of the best division into units, and infinite unless there are equal ones with several members each.
    """

    def time(at: Spread, size: float) -> float:
        best = inf
        for count in range(1, len(at.levels)):
            parts = at.split(count)
            if parts is not None:
                each = parts[0].ranks
                # `best_time` chooses an algorithm for each phase, on a group of its own levels.
                found = sum(best_time(op, size / each if rail else size, parts[i])[0] for op, i, rail in phases)
                best = min(best, found)
        return best

    return time


TIMES: dict[str, dict[str, Time]] = {
    "all_reduce": {
        "ring": _ring_time(2), "tree": _tree_time(2), "fullmesh": _mesh_time(2),
        "hierarchical": _by_levels(("reduce_scatter", 0, False), ("all_reduce", 1, True), ("all_gather", 0, False)),
    },
    "reduce_scatter": {
        "ring": _ring_time(1), "tree": _tree_and_root, "fullmesh": _mesh_time(1),
        "hierarchical": _by_levels(("reduce_scatter", 0, False), ("reduce_scatter", 1, True)),
    },
    "all_gather": {
        "ring": _ring_time(1), "tree": _tree_and_root, "fullmesh": _mesh_time(1),
        "hierarchical": _by_levels(("all_gather", 1, True), ("all_gather", 0, False)),
    },
    "broadcast": {
        "ring": _chain_time, "tree": _tree_time(1), "fullmesh": _mesh_time(2),
        "hierarchical": _by_levels(("scatter", 0, False), ("broadcast", 1, True), ("all_gather", 0, False)),
    },
    "reduce": {
        "ring": _chain_time, "tree": _tree_time(1), "fullmesh": _mesh_time(2),
        "hierarchical": _by_levels(("reduce_scatter", 0, False), ("reduce", 1, True), ("gather", 0, False)),
    },
    "gather": {"one by one": _one_by_one, "tree": _binomial, "fullmesh": _mesh_time(1)},
    "scatter": {"one by one": _one_by_one, "tree": _binomial, "fullmesh": _mesh_time(1)},
    "all_to_all": {
        "pairwise": _pairwise, "Bruck": _bruck, "fullmesh": _mesh_time(1),
        "hierarchical": _by_levels(("all_to_all", 0, False), ("all_to_all", 1, False)),
    },
    "barrier": {"dissemination": _dissemination, "hierarchical": _in_levels, "fullmesh": _mesh_barrier},
    "new_group": {"dissemination": _dissemination, "hierarchical": _in_levels, "fullmesh": _mesh_barrier},
}  # fmt: skip


def best_time(op: str, size_bytes: float, at: Spread) -> tuple[float, str]:
    """Return (seconds, algorithm) of the fastest algorithm for a collective on a vector; one rank takes no time.

    Phases on different levels follow each other; overlap between them is not modelled. Where the links have segments,
    a vector takes no more time than any larger one: it could be sent as that one is.
    """
    if at.ranks == 1:
        return 0.0, ""
    sizes = [(at.of_size(size), size) for size in at.sizes_from(size_bytes)]
    return min(
        ((time(each, size), name) for each, size in sizes for name, time in TIMES[op].items()), key=itemgetter(0)
    )


def stepwise_time(steps: float, share: float, size_bytes: float, at: Spread) -> float:
    """Return the time [s] of steps of messages that follow each other, each as slow as the group's slowest link.

    Args:
        steps: number of steps.
        share: the largest message of each step, summed over the steps, in vectors.
        size_bytes: size of the vector.
        at: the group.
    """
    links = ((at.step(size), size) for size in at.sizes_from(size_bytes) if at.levels)
    return min(
        (steps * link.latency_s + share * size / link.bandwidth_bytes_per_s for link, size in links), default=0.0
    )
