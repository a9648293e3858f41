"""The cost of collectives: `PRICES` in latency steps and shares of the vector, `TIMES` in seconds on described links.

The model is Hockney's: a step costs latency + bytes / bandwidth of its largest message, every rank
has one full-duplex port, and steps follow each other. Arithmetic on received data (γ) is not
priced. Formulas: Chan, Heimlich, Purkayastha, van de Geijn 2007, "Collective communication:
theory, practice, and experience"; Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH". The algorithms themselves are in `comm/algorithms/`.

"Vector" is the whole buffer: the input of all_reduce and reduce_scatter, the output of all_gather
and gather, the list of scatter, one rank's input of all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import inf
from operator import itemgetter
from typing import NamedTuple

from simparallel.hardware.links import Link, LinkSpec


class Price(NamedTuple):
    """The price of one collective for one rank.

    Attributes:
        steps: number of consecutive steps, each with the latency of a message.
        share: the largest message of each step, summed over the steps, in vectors.
        sent: bytes sent by this rank, in vectors.
    """

    steps: int
    share: float
    sent: float


# (p ranks, number of the asking rank) -> price. Numbers count from the root on, cyclically; without a root from the
# first rank.
Formula = Callable[[int, int], Price]


def _then(first: Formula, second: Formula) -> Formula:
    def both(p: int, number: int) -> Price:
        a, b = first(p, number), second(p, number)
        return Price(a.steps + b.steps, a.share + b.share, a.sent + b.sent)

    return both


def _round(p: int, number: int) -> Price:
    """Price one round of a ring, or a pairwise exchange: each rank sends one chunk in every step."""
    return Price(p - 1, (p - 1) / p, (p - 1) / p)


def _gather(p: int, number: int) -> Price:
    # The root receives one part in each step: its port is the bottleneck.
    return Price(p - 1, (p - 1) / p, 1 / p if number else 0.0)


def _scatter(p: int, number: int) -> Price:
    return Price(p - 1, (p - 1) / p, 0.0 if number else (p - 1) / p)


def _barrier(p: int, number: int) -> Price:
    """Price a dissemination barrier: the latency of ceil(log2 p) steps."""
    return Price(_depth(p), 0.0, 0.0)


def _endless_broadcast(p: int, number: int) -> Price:
    """Price a pipelined chain in the limit of many chunks: latency of all hops, and one passage of the vector."""
    return Price(p - 1, 1.0, 1.0 if number < p - 1 else 0.0)


def _endless_reduce(p: int, number: int) -> Price:
    return Price(p - 1, 1.0, 1.0 if number else 0.0)


def _chain_broadcast(p: int, number: int) -> Price:
    """Price a chain that is pipelined with p chunks."""
    return Price(2 * p - 2, (2 * p - 2) / p, 1.0 if number < p - 1 else 0.0)


def _naive_broadcast(p: int, number: int) -> Price:
    # The root sends the whole vector to one rank after the other.
    return Price(p - 1, p - 1, 0.0 if number else p - 1)


def _naive_reduce(p: int, number: int) -> Price:
    return Price(p - 1, p - 1, 1.0 if number else 0.0)


def _depth(p: int) -> int:
    return (p - 1).bit_length()


def _tree_broadcast(p: int, number: int) -> Price:
    """Price a binomial tree: rank n sends to n + 2^i for each 2^i below the lowest set bit of n, rank 0 for each i."""
    told = [i for i in range(_depth(p)) if number % 2 ** (i + 1) == 0 and number + 2**i < p]
    return Price(_depth(p), _depth(p), len(told))


def _tree_reduce(p: int, number: int) -> Price:
    return Price(_depth(p), _depth(p), 1.0 if number else 0.0)


def _scan(p: int, number: int) -> Price:
    """Price a scan: in step i, rank r sends its partial result to rank r + 2^i (Hillis and Steele 1986)."""
    return Price(_depth(p), _depth(p), sum(number + 2**i < p for i in range(_depth(p))))


def _core(p: int) -> tuple[int, int]:
    """Return q, the largest power of two <= p, and p - q: q ranks halve and double, the others are folded into them."""
    core = 2 ** (p.bit_length() - 1)
    return core, p - core


def _core_all_reduce(p: int, number: int) -> Price:
    # The first 2 * extra ranks form pairs. The even rank of a pair sends its vector to the odd one, sits out, and
    # receives the result at the end: one step of a whole vector before, and one after.
    core, extra = _core(p)
    share, folds, pairs = 2 * (core - 1) / core, int(extra > 0), number < 2 * extra
    sent = 1.0 if pairs and number % 2 == 0 else share + pairs
    return Price(2 * _depth(core) + 2 * folds, share + 2 * folds, sent)


def _core_exchange(p: int) -> Price:
    """Return steps and share of a reduce_scatter or all_gather; the first `extra` ranks of the core have two parts."""
    core, extra = _core(p)
    folds = int(extra > 0)
    # A block of 2^i ranks in the core holds 2^i parts, and one more for each folded rank among them.
    parts = sum(2**i + min(2**i, extra) for i in range(_depth(core)))
    return Price(_depth(core) + 2 * folds, (parts + folds * (p + 1)) / p, 0.0)


def _halving(p: int, number: int) -> Price:
    is_folded = number < 2 * _core(p)[1] and number % 2 == 0
    return _core_exchange(p)._replace(sent=1.0 if is_folded else (p - 1) / p)


def _doubling(p: int, number: int) -> Price:
    core, extra = _core(p)
    pairs = number < 2 * extra
    if pairs and number % 2 == 0:
        return _core_exchange(p)._replace(sent=1 / p)
    # Position in the core; in step i the rank sends the block of 2^i positions that it has collected.
    own = number // 2 if pairs else number - extra
    blocks = [(own >> i << i, (own >> i << i) + 2**i) for i in range(_depth(core))]
    parts = sum(end + min(end, extra) - start - min(start, extra) for start, end in blocks)
    return _core_exchange(p)._replace(sent=parts / p + pairs)


def _adasum_halving(p: int, number: int) -> Price:
    """Price halving and doubling, with an all-reduce of a few numbers over 2^(j+1) ranks at level j: latency only."""
    levels = _depth(p)
    # The all-reduce at level j takes j + 1 steps: levels * (levels + 1) / 2 in all.
    share = 2 * (p - 1) / p
    return Price(2 * levels + levels * (levels + 1) // 2, share, share)


def _adasum_ring(p: int, number: int) -> Price:
    """Price a ring that passes one whole layer from rank to rank, twice round."""
    return Price(2 * (p - 1), 2 * (p - 1), 2 * (p - 1) / p)


PRICES: dict[str, dict[str, Formula]] = {
    # `direct` sends no messages: ranks read each other's memory. It is priced with the bytes of a ring; of a chain for
    # broadcast and reduce, of one message per rank for gather and scatter, of the published algorithms for scans and
    # Adasum. Where `TIMES` has the collective, its time is the best of several algorithms, see `best_time`.
    "direct": {
        "all_reduce": _then(_round, _round), "reduce_scatter": _round, "all_gather": _round, "all_to_all": _round,
        "gather": _gather, "scatter": _scatter, "broadcast": _endless_broadcast, "reduce": _endless_reduce,
        "barrier": _barrier, "new_group": _barrier, "adasum": _adasum_halving, "scan": _scan, "exscan": _scan,
    },
    "naive": {
        "all_reduce": _then(_naive_reduce, _naive_broadcast), "broadcast": _naive_broadcast,
        "reduce": _naive_reduce, "gather": _gather, "scatter": _scatter, "all_to_all": _round,
        "adasum": _then(_naive_reduce, _naive_broadcast),
    },
    "ring": {
        "all_reduce": _then(_round, _round), "reduce_scatter": _round, "all_gather": _round,
        "broadcast": _chain_broadcast, "adasum": _adasum_ring,
    },
    "tree": {
        "all_reduce": _then(_tree_reduce, _tree_broadcast), "broadcast": _tree_broadcast, "reduce": _tree_reduce,
        "adasum": _then(_tree_reduce, _tree_broadcast),
    },
    "halving_doubling": {
        "all_reduce": _core_all_reduce, "reduce_scatter": _halving, "all_gather": _doubling,
        "adasum": _adasum_halving,
    },
}  # fmt: skip


# --- the algorithms of libraries ---------------------------------------------------------------------
#
# NCCL and HCCL implement a ring, a tree and phases by levels of the network, and use the fastest for the size. The
# models follow NCCL's tuner (nccl, src/graph/tuning.cc) without its measured factors: latencies add up along the
# path of a chunk, each device drives a port of its own (with n devices per node, a ring is n rings with a part each),
# and the double binary tree of Sanders, Speck, Träff 2009 uses all ports in both directions.


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
    factor: float = 1.0


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
    return lambda at, size: passages * (at.round_s(_depth) + at.passing_s(size, far=True))


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


_binomial = _root_time(lambda at: at.round_s(_depth))
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
    return _depth(at.ranks) * link.latency_s + sent * size / link.bandwidth_bytes_per_s


@lru_cache(maxsize=1024)
def _bits_below(count: int) -> int:
    return sum(number.bit_count() for number in range(count))


def _dissemination(at: Spread, size: float) -> float:
    return _depth(at.ranks) * at.slowest.latency_s


def _in_levels(at: Spread, size: float) -> float:
    """Return the time of a barrier up trees, by dissemination at the highest level, and down the trees."""
    return 2 * at.round_s(_depth) - _depth(at.levels[-1].parts) * at.far[-1].latency_s


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


@lru_cache(maxsize=4096)
def price(algorithm: str, op: str, num_ranks: int, number: int) -> Price:
    """Return the price of `op` by `algorithm`, cached; zero for one rank."""
    return PRICES[algorithm][op](num_ranks, number) if num_ranks > 1 else Price(0, 0.0, 0.0)
