"""`ClusterSpec`: ranks, their devices, the tiers of links between them, and what work and communication cost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from simparallel.algorithms import names, price, priced
from simparallel.base.checks import is_integer
from simparallel.base.units import format_number_of, format_numbers, format_type_of
from simparallel.errors import ClusterError
from simparallel.machine import hccl
from simparallel.machine.description import load, save, table
from simparallel.machine.device import DTYPES, Curve, DeviceSpec, DeviceWork, picoseconds
from simparallel.machine.jitter import Jitter
from simparallel.machine.library_times import TIMES, Level, Spread, best_time, stepwise_time
from simparallel.machine.links import Groups, Link, LinkSpec, Tier
from simparallel.machine.nccl import Nccl
from simparallel.machine.numbers import check_number

# A spec holds lists of ranks, which take 0.1 GB for so many.
MAX_RANKS = 1 << 20
# Prices of messages that a cluster keeps.
MAX_MESSAGES = 1 << 16
RULES = ("", "hccl", "hccl-a2")


@dataclass(frozen=True)
class Traffic:
    """The cost of one communication for a rank: time [ps], bytes sent, and the algorithm that was priced.

    Attributes:
        time_ps: simulated picoseconds.
        sent_bytes: bytes that the rank sends.
        algorithm: name of the priced algorithm, or "".
    """

    time_ps: int
    sent_bytes: int
    algorithm: str = field(default="", compare=False)


class LinkUse(NamedTuple):
    """The use of a link by a communication; other groups may use the link, too.

    Attributes:
        name: the same for all groups that use it.
        capacity_bytes_per_s: its bandwidth.
        share: bytes on the link per byte that flows through a port of every member (of a message: per byte).
            Alone, a communication flows at the smallest capacity / share of its links.
    """

    name: str
    capacity_bytes_per_s: float
    share: float


class _Placed(NamedTuple):
    """A tier with the place of every rank; a part is a unit of the tier below. All arrays are int64, shape (ranks,).

    Attributes:
        unit: number of the rank's unit.
        part, part_name: number of its part, and the name of the tier of which parts are units; "rank" at the lowest.
        position, part_size: its position in the part, and the number of ranks there.
        joins_nodes: whether units are nodes or larger.
    """

    name: str
    link: LinkSpec
    unit: np.ndarray
    part: np.ndarray
    part_name: str
    position: np.ndarray
    part_size: np.ndarray
    joins_nodes: bool

    def num_ports(self, ranks: np.ndarray) -> np.ndarray:
        """Return the number of ports of each rank's part."""
        size = self.part_size[ranks]
        return size if self.link.ports is None else np.minimum(self.link.ports, size)

    def port(self, ranks: np.ndarray) -> np.ndarray:
        """Return the number of the port of its part that each rank uses."""
        return self.position[ranks] * self.num_ports(ranks) // self.part_size[ranks]


class _Meeting(NamedTuple):
    """A tier at which parts of a group meet; all arrays are int64.

    Attributes:
        part, unit: numbers of each member's part and unit, counted from 0 in the group, shape (members,).
        first: a member of each part.
        parts_of: number of parts of each unit.
        ports: (part, port) of all ports that the members use, shape (2, ports).
    """

    tier: _Placed
    part: np.ndarray
    unit: np.ndarray
    first: np.ndarray
    parts_of: np.ndarray
    ports: np.ndarray


@dataclass(frozen=True)
class ClusterSpec:
    """The described machine: `world_size` ranks with devices of one kind, on one node or on several.

    The links between two ranks are those of the smallest group that has both: of a tier, a node, or the cluster.

    Args:
        world_size: number of ranks.
        device: the kind of all devices.
        link: the links inside a node.
        name: name in traces.
        nodes: the ranks of each node, in order, or the number of nodes with equally many consecutive ranks; empty for
            one node with all ranks.
        node_link: the links between nodes; None if they are like `link`.
        devices_per_rank: simulated devices of each rank; None creates each when the program first names it.
        is_assumed: whether the device is a default that the program may replace (`set_context`).
        dtype: what the devices compute in where the program has float32: "float32"; "tf32", for products alone;
            "bfloat16" or "float16", for all parameters, activations, gradients and states; or "float8", as "bfloat16"
            with products in FP8, whose operands are cast. Prices, and bytes that are sent or held, are those of this
            type; the values stay float32.
        tiers: further tiers: islands inside nodes, and racks of nodes, from the inside out, whose ranks are nearer to
            each other.
        device_ids: number of each rank's device on its node; empty for its position there.
        library: NCCL, whose choices price the collectives; None for the fastest algorithm on the described links.
        rules: "hccl" to refuse groups that HCCL refuses, see `check_group`; "hccl-a2" for the algorithms that it
            chooses between servers of Atlas A2; "" for none.
        stragglers: rank -> how much slower than described it computes.
        slow_links: rank, or pair of ranks -> how much slower than described its links, or the link between them, are.
        jitter: a random factor on the time of every operation; None for none.
        sharing: fraction of its speed that each device has, by the number of ranks, where these share the cores of one
            machine; None for all of it. These cores communicate, too, so that computing waits for it.
        measured: op -> number of ranks -> cost of a call on a whole vector, as that of a message; for groups on one
            node, in place of the models. Between and beyond the numbers of ranks, the time is linear in them.
        calibration: plain data about how the numbers were measured: date, machine, residuals.

    Raises:
        ClusterError: a number out of range, a type without a peak, nodes that are not a partition of the ranks, tiers
            that cut a node in two or are not nested, ranks that do not exist, or a number of devices that the rules
            refuse. Fact: `key`.
    """

    world_size: int
    device: DeviceSpec
    link: LinkSpec
    name: str = field(default="cluster")
    nodes: Groups = ()
    node_link: LinkSpec | None = None
    devices_per_rank: int | None = None
    is_assumed: bool = False
    dtype: str = "float32"
    tiers: tuple[Tier, ...] = ()
    device_ids: tuple[int, ...] = ()
    rules: str = ""
    library: Nccl | None = None
    stragglers: dict[int, float] = field(default_factory=dict)
    slow_links: dict[int | tuple[int, int], float] = field(default_factory=dict)
    jitter: Jitter | None = None
    sharing: Curve | None = None
    measured: dict[str, dict[int, LinkSpec]] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_world_size(self.world_size)
        count = self.devices_per_rank
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ClusterError(
                f"devices_per_rank={count!r}: a rank needs at least 1 device; None allows any number.",
                key="devices_per_rank",
            )
        # The dataclass is frozen, so plain assignment would fail.
        has_none = not is_integer(self.nodes) and not self.nodes
        object.__setattr__(self, "nodes", self._groups("nodes", 1 if has_none else self.nodes))
        tiers = tuple(replace(tier, groups=self._groups("tiers", tier.groups)) for tier in self.tiers)
        object.__setattr__(self, "tiers", tiers)
        if tiers:
            self._check_tiers()
        self._check_device_ids()
        self._check_dtype()
        if self.rules not in RULES:
            raise ClusterError(f"rules={self.rules!r} is not one of {', '.join(map(repr, RULES))}.", key="rules")
        for key in ("stragglers", "slow_links"):
            for where, factor in getattr(self, key).items():
                ranks = where if isinstance(where, tuple) else (where,)
                is_pair = key == "slow_links" and len(ranks) == 2 and ranks[0] != ranks[1]
                if not (is_pair or len(ranks) == 1) or not all(map(self._is_rank, ranks)):
                    pair = " or a pair of two such ranks" * (key == "slow_links")
                    raise ClusterError(f"{key}: {where!r} must be a rank of 0 … {self.world_size - 1}{pair}.", key=key)
                check_number("cluster", f"{key}[{where}]", factor, 1e-6, 1e6)
        for op, by_ranks in self.measured.items():
            if op not in TIMES or not by_ranks or not all(is_integer(count) and count > 1 for count in by_ranks):
                raise ClusterError(
                    f"measured: {op!r} with numbers of ranks {list(by_ranks)}; ops are {', '.join(TIMES)}, and numbers "
                    "of ranks are 2 or more.",
                    key="measured",
                )
        # Caches: the same groups and the same messages ask for a price in every step.
        object.__setattr__(self, "_spreads", {})
        object.__setattr__(self, "_messages", {})
        object.__setattr__(self, "_known_links", {})
        self.check_group(range(self.world_size))

    def _is_rank(self, rank: object) -> bool:
        return is_integer(rank) and 0 <= rank < self.world_size  # type: ignore[operator]

    def _groups(self, key: str, groups: int | Sequence[Sequence[int]]) -> Groups:
        """Return groups, of which each rank belongs to exactly one; a number of groups divides the ranks evenly."""
        noun = "node" if key == "nodes" else "group"
        if is_integer(groups):
            count: int = groups  # type: ignore[assignment]
            if count < 1 or self.world_size % count:
                raise ClusterError(
                    f"{key}={count}: {self.world_size} devices cannot be divided evenly; choose a divisor of "
                    f"{self.world_size}, or give the ranks of each {noun}.",
                    key=key,
                )
            size = self.world_size // count
            return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))
        found = tuple(tuple(group) for group in groups)  # type: ignore[union-attr]
        ranks = [rank for group in found for rank in group]
        if () in found or not all(map(self._is_rank, ranks)) or sorted(ranks) != list(range(self.world_size)):
            raise ClusterError(
                f"{key}={_short(found)}: each rank of 0 … {self.world_size - 1} must belong to exactly one {noun}, and "
                f"no {noun} may be empty.",
                key=key,
            )
        return found

    def _check_tiers(self) -> None:
        names = [tier.name for tier in self._placed]
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise ClusterError(f"tiers: {twice[0]!r} is the name of two tiers; rename one.", key="tiers")
        for inner, outer in pairwise(self._placed):
            # Each inner unit must lie in a single outer one, so there are as many pairs of them as inner units.
            if len(np.unique(np.stack((inner.unit, outer.unit)), axis=1)[0]) > int(inner.unit.max()) + 1:
                raise ClusterError(
                    f"tiers: a group of tier {inner.name!r} is not inside of one group of tier {outer.name!r}; "
                    "list tiers from the inside out, and set joins_nodes for those of whole nodes.",
                    key="tiers",
                )

    def _check_device_ids(self) -> None:
        ids = tuple(self.device_ids)
        object.__setattr__(self, "device_ids", ids)
        are_ids = all(is_integer(number) and number >= 0 for number in ids)
        if ids and (len(ids) != self.world_size or not are_ids):
            raise ClusterError(
                f"device_ids={_short(ids)} must be a device number of 0 or more for each of {self.world_size} ranks.",
                key="device_ids",
            )
        for node in self.nodes if ids else ():
            twice = [number for number, times in Counter(ids[rank] for rank in node).items() if times > 1]
            if twice:
                raise ClusterError(f"device_ids: two ranks of node {node} have device {twice[0]}.", key="device_ids")

    def _check_dtype(self) -> None:
        if self.dtype not in DTYPES:
            raise ClusterError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}.", key="dtype")
        if self.dtype != "float32" and self.device.op_costs:
            raise ClusterError(
                f"dtype={self.dtype!r}: {self.device.name} has costs of operations that were measured in float32; "
                "choose a preset, or a device without op_costs.",
                key="dtype",
            )
        narrow = DTYPES[self.dtype][1]
        if narrow in (1, 3) and narrow not in self.device.peak_flops_per_s:
            raise ClusterError(
                f"dtype={self.dtype!r}: {self.device.name} has no peak for it; give peak_flops_per_s an entry "
                f"{{{narrow}: …}}, or choose another dtype.",
                key="dtype",
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a description that `save` wrote, or that was written by hand: an object with the arguments as keys.

        Groups of ranks are lists of lists, or a number of groups with equally many consecutive ranks.

        Raises:
            ClusterError: the file cannot be read, or an entry is missing, unknown or out of range. Facts: `path`,
                `line` and `key` of the entry, None where there is none.
        """
        return load(cls, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the description to a JSON file, which `load` reads back as an equal one.

        Raises:
            OSError: the file cannot be written.
        """
        save(self, path)

    def table(self) -> str:
        """Return a table of all numbers, each with its source: data sheet, measured, or assumed."""
        return table(self)

    def with_ranks(self, world_size: int) -> ClusterSpec:
        """Return the part of the cluster that ranks 0 … world_size - 1 take, with the ports of these ranks.

        Raises:
            ClusterError: the cluster has fewer ranks.
        """
        _check_world_size(world_size)
        if world_size == self.world_size:
            return self
        if world_size > self.world_size:
            raise ClusterError(
                f"{self.name}: {format_number_of(world_size, 'rank')} on a cluster of {self.world_size}; use at most "
                f"{self.world_size}, or describe a larger cluster.",
                key="world_size",
            )

        def kept(groups: Groups) -> Groups:
            found = (tuple(rank for rank in group if rank < world_size) for group in groups)
            return tuple(group for group in found if group)

        def inside(where: int | tuple[int, int]) -> bool:
            return max(where if isinstance(where, tuple) else (where,)) < world_size

        return replace(
            self,
            world_size=world_size,
            name=f"{world_size} of {self.name}",
            nodes=kept(self.nodes),
            tiers=tuple(replace(tier, groups=kept(tier.groups)) for tier in self.tiers),
            device_ids=self.device_ids[:world_size],
            stragglers={rank: factor for rank, factor in self.stragglers.items() if inside(rank)},
            slow_links={where: factor for where, factor in self.slow_links.items() if inside(where)},
        )

    # --- places ------------------------------------------------------------------------------------

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {rank: number for number, node in enumerate(self.nodes) for rank in node}

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._node_of[rank]

    def device_id(self, rank: int) -> int:
        """Return the number of a rank's device on its node."""
        return self.device_ids[rank] if self.device_ids else self.nodes[self.node_of(rank)].index(rank)

    @cached_property
    def _placed(self) -> tuple[_Placed, ...]:
        """All tiers, from the inside out."""
        everyone: Groups = (tuple(range(self.world_size)),)
        inner, outer = ([tier for tier in self.tiers if tier.joins_nodes == where] for where in (False, True))
        # Without a node link, nodes make no difference.
        nodes = self.nodes if self.node_link or outer else everyone
        network = Tier("network", self.node_link or self.link, everyone, joins_nodes=True)
        tiers = [*inner, Tier("node", self.link, nodes), *outer, network]
        part_name, part = "rank", np.arange(self.world_size)
        position, part_size = np.zeros_like(part), np.ones_like(part)
        placed = []
        for tier in tiers:
            unit, place, size = np.empty_like(part), np.empty_like(part), np.empty_like(part)
            for number, group in enumerate(tier.groups):
                ranks = np.asarray(group)
                unit[ranks], place[ranks], size[ranks] = number, np.arange(len(ranks)), len(ranks)
            placed.append(_Placed(tier.name, tier.link, unit, part, part_name, position, part_size, tier.joins_nodes))
            part_name, part, position, part_size = tier.name, unit, place, size
        return tuple(placed)

    def _meetings(self, members: np.ndarray) -> Iterator[_Meeting]:
        """Yield the tiers at which parts of a group meet, from the inside out."""
        if members.min() < 0 or members.max() >= self.world_size:
            stranger = next(rank for rank in members.tolist() if not self._is_rank(rank))
            raise ClusterError(
                f"{self.name}: rank {stranger} is not one of 0 … {self.world_size - 1}; describe a larger cluster."
            )
        part = np.arange(len(members))
        for tier in self._placed:
            unit = np.unique(tier.unit[members], return_inverse=True)[1]
            first = np.unique(part, return_index=True)[1]
            parts_of = np.bincount(unit[first])
            # Otherwise every unit has a single part, which meets no other one here.
            if len(parts_of) < len(first):
                ports = np.unique(np.stack((part, tier.port(members))), axis=1)
                yield _Meeting(tier, part, unit, first, parts_of, ports)
                part = unit

    def spread(self, ranks: tuple[int, ...]) -> Spread:
        """Return the distribution of a group over the tiers; groups of equal distributions have equal prices."""
        known: dict[tuple[int, ...], Spread] = self._spreads  # type: ignore[attr-defined]
        if ranks not in known:
            members = np.asarray(ranks)
            levels = tuple(self._level(members, meeting) for meeting in self._meetings(members))
            known[ranks] = Spread(len(ranks), levels)
        return known[ranks]

    def _level(self, members: np.ndarray, meeting: _Meeting) -> Level:
        tier, part, unit, first, parts_of, used = meeting
        sizes, members_of = np.bincount(part), np.bincount(unit)
        # A part alone in its unit has no peers there.
        meets = parts_of[unit[first]] > 1
        most = tier.num_ports(members[first]) / tier.link.oversubscription
        ports = np.minimum(np.bincount(used[0]), most)[meets]
        return Level(
            tier.link,
            len(parts_of),
            int(parts_of.max()),
            int(parts_of[parts_of > 1].min()),
            int(members_of.min()),
            int(members_of.max()),
            float(ports.min()),
            float((ports / sizes[meets]).min()),
            not tier.joins_nodes,
            max((factor for _, factor in self._slow(members, meeting)), default=1.0),
        )

    def _slow(self, members: np.ndarray, meeting: _Meeting) -> Iterator[tuple[int | tuple[int, int], float]]:
        """Yield the slow links that a group uses at a tier, and their factors."""
        if not self.slow_links:
            return
        place = {rank: index for index, rank in enumerate(members.tolist())}
        _, part, unit, _, parts_of, _ = meeting
        for where, factor in self.slow_links.items():
            ends = [place[rank] for rank in (where if isinstance(where, tuple) else (where,)) if rank in place]
            if isinstance(where, tuple):
                meets = len(ends) == 2 and unit[ends[0]] == unit[ends[1]] and part[ends[0]] != part[ends[1]]
            else:
                meets = bool(ends) and parts_of[unit[ends[0]]] > 1
            if meets:
                yield where, factor

    def link_of(self, ranks: Sequence[int], size_bytes: int = 0) -> Link:
        """Return the slowest link of messages between these ranks, for a size of the operation."""
        spread = self.spread(tuple(ranks))
        return spread.step(size_bytes) if spread.levels else self.link.step(size_bytes)

    def links_of(self, ranks: Sequence[int], *, one_way: bool = False) -> tuple[LinkUse, ...]:
        """Return the links that a collective of these ranks uses, for the solver, which shares them among groups.

        Args:
            ranks: the group.
            one_way: a message from ranks[0] to ranks[1] instead.
        """
        known: dict[tuple[tuple[int, ...], bool], tuple[LinkUse, ...]] = self._known_links  # type: ignore[attr-defined]
        key = tuple(ranks), one_way
        if key not in known:
            known[key] = tuple(self._links_used(np.asarray(ranks), one_way))
        return known[key]

    def _links_used(self, members: np.ndarray, one_way: bool) -> list[LinkUse]:
        uses: list[LinkUse] = []
        for meeting in self._meetings(members):
            tier, _, unit, first, parts_of, used = meeting
            bandwidth = max(segment.bandwidth_bytes_per_s for segment in tier.link.all_segments)
            names = [f"{tier.part_name} {number}" for number in tier.part[members[first]].tolist()]
            units, counts = unit[first].tolist(), parts_of[unit[first]].tolist()
            wired, ports = int(parts_of[parts_of > 1].min()), tier.num_ports(members[first]).tolist()
            is_mesh, is_ring = (tier.link.topology == topology for topology in ("mesh", "ring"))
            # Number of links of a port that the group uses: a port of a ring has two, of which two ranks use one.
            width = wired - 1 if is_mesh else 1 + (is_ring and wired > 2)
            for i in (part for part, count in enumerate(counts) if count > 1):
                peers = [j for j in range(len(names)) if j != i and units[j] == units[i]]
                numbers = used[1][used[0] == i].tolist()
                for way in (("out", "in")[i],) if one_way else ("out", "in"):
                    # In a mesh, the links into a part are those out of its peers, which are listed there.
                    ends = [way] if not is_mesh else [f"to {names[j]}" for j in peers] if way == "out" else []
                    share = (1 + is_ring) / (width if not is_mesh else len(peers)) / len(numbers)
                    uses += [
                        LinkUse(f"{tier.name}: {names[i]} port {port} {end}", bandwidth * (1 + is_ring), share)
                        for port in numbers
                        for end in ends
                    ]
                    if tier.link.oversubscription > 1:
                        capacity = bandwidth * ports[i] / tier.link.oversubscription
                        uses.append(LinkUse(f"{tier.name}: {names[i]} uplink {way}", capacity, 1.0))
            level = self._level(members, meeting)
            uses += [
                LinkUse(f"{tier.name}: slow link {where}", bandwidth / factor, 1 / (width * level.ports))
                for where, factor in self._slow(members, meeting)
            ]
        return uses

    # --- prices ------------------------------------------------------------------------------------

    def itemsize(self, dtype: np.dtype) -> int:
        """Return the bytes that an item of this NumPy dtype has on the devices, see `dtype`."""
        return DTYPES[self.dtype][0] if dtype == np.float32 else dtype.itemsize

    def update(self, work: DeviceWork) -> DeviceWork:
        """Return the work of an optimizer on the devices, from that on the program's own floats."""
        itemsize = DTYPES[self.dtype][0]
        if work.itemsize != 4:
            return work
        return work._replace(size_bytes=work.size_bytes * itemsize // 4, itemsize=itemsize)

    def device_factor(self, rank: int) -> float:
        """Return how much slower than described a rank computes: its own factor, and the ranks it shares cores with."""
        return self.stragglers.get(rank, 1.0) / (1.0 if self.sharing is None else self.sharing(self.world_size))

    def jitter_of(self, rank: int, device: int = 0) -> Iterator[float] | None:
        """Return the random factors of the operations of a device of a rank, in order; None without jitter."""
        return None if self.jitter is None else self.jitter.factors(rank, device)

    def collective(
        self,
        op: str,
        size_bytes: int,
        ranks: tuple[int, ...],
        *,
        position: int = 0,
        root: int = 0,
        algorithm: str = "direct",
    ) -> Traffic:
        """Return the cost of a collective on a vector of `size_bytes`; see `algorithms` and `library_times`.

        Args:
            op: name of the collective.
            size_bytes: size of the whole vector.
            ranks: the group, in order.
            position: position of the asking rank in the group; the time is the same for all.
            root: position of the root, for operations that have one.
            algorithm: name of the algorithm; a step is as slow as the slowest link between the group's members.
                `direct` takes the time of the fastest algorithm that libraries choose from, and the bytes that it has
                in `algorithms/direct.py`. With NCCL, "ring" and "tree" take the time of NCCL's, where it has them.

        Raises:
            ClusterError: no model for `op` by `algorithm`, a rank that does not exist, or a group that the rules
                refuse.
        """
        known = priced(algorithm)
        if not known:
            raise ClusterError(f"no cost model for algorithm {algorithm!r}; known: {', '.join(names())}.")
        if op not in known:
            listed = ", ".join(sorted(known))
            raise ClusterError(f"no cost model for collective {op!r} by {algorithm}; known: {listed}.")
        self.check_group(ranks)
        # Formulas count ranks from the root on.
        num_ranks = len(ranks)
        steps, share, sent = price(algorithm, op, num_ranks, (position - root) % num_ranks)
        # `direct` moves data through shared memory, as no cluster does: take the time of a library instead. The other
        # algorithms really run step by step, and each step waits for the slowest link.
        if algorithm == "direct" and op in TIMES:
            is_measured = op in self.measured and num_ranks > 1 and len({*map(self.node_of, ranks)}) == 1
            if is_measured:
                # Groups that share the cores take turns, as the members of one group of all ranks do.
                count = num_ranks if self.sharing is None else self.world_size
                time_s, chosen = self._measured_s(op, size_bytes, count), "measured"
            else:
                default = hccl.best_time if self.rules == "hccl-a2" else best_time
                time_s, chosen = (self.library.best_time if self.library else default)(
                    op, size_bytes, self.spread(ranks)
                )
        elif self.library and self.library.has(op, algorithm):
            stated = replace(self.library, algorithms=(algorithm,))
            time_s, chosen = stated.best_time(op, size_bytes, self.spread(ranks))
        else:
            time_s, chosen = stepwise_time(steps, share, size_bytes, self.spread(ranks)), algorithm
        return Traffic(picoseconds(time_s), round(sent * size_bytes), chosen)

    def _measured_s(self, op: str, size_bytes: int, num_ranks: int) -> float:
        by_ranks = self.measured[op]
        below = max((count for count in by_ranks if count <= num_ranks), default=None)
        above = min((count for count in by_ranks if count >= num_ranks), default=None)
        if below is None or above is None:
            nearest: int = below or above  # type: ignore[assignment]
            return by_ranks[nearest].time_s(size_bytes) * num_ranks / nearest
        first, last = by_ranks[below].time_s(size_bytes), by_ranks[above].time_s(size_bytes)
        return first + (last - first) * (num_ranks - below) / max(above - below, 1)

    def message(self, size_bytes: int, src: int, dst: int) -> Traffic:
        """Return the cost of one message from rank `src` to rank `dst`."""
        known: dict[tuple[int, int, int], Traffic] = self._messages  # type: ignore[attr-defined]
        found = known.get((size_bytes, src, dst))
        if found is None:
            if len(known) == MAX_MESSAGES:
                known.clear()
            time_s = stepwise_time(1, 1.0, size_bytes, self.spread((src, dst))) if src != dst else 0.0
            found = Traffic(picoseconds(time_s), size_bytes if src != dst else 0)
            known[size_bytes, src, dst] = found
        return found

    def copy(self, size_bytes: int) -> Traffic:
        """Return the cost of a copy from one device of a rank to another, over the link inside a node."""
        return Traffic(picoseconds(self.link.time_s(size_bytes)), size_bytes)

    def check_group(self, ranks: Sequence[int]) -> None:
        """Check that the cluster's collective library can make a group of these ranks.

        With the rules of HCCL: 1, 2, 4 or 8 cards of each server; 2 or 4 of them inside one ring, of cards 0–3 or 4–7;
        all 8 cards of every server for a cluster of several.

        Raises:
            ClusterError: the group breaks a rule. Fact: `ranks`.
        """
        if self.rules != "hccl":
            return
        on_nodes: dict[int, list[int]] = {}
        for rank in ranks:
            on_nodes.setdefault(self.node_of(rank), []).append(rank)
        many = len(ranks) == self.world_size and len(on_nodes) > 1
        for node, members in on_nodes.items():
            cards = sorted(self.device_id(rank) for rank in members)
            if text := hccl.broken_rule(cards, many):
                raise ClusterError(
                    f"group of {format_number_of(len(ranks), 'rank')}: ranks {format_numbers(sorted(members))} are "
                    f"cards {format_numbers(cards)} of server {node}. HCCL: {text}, or a cluster without its rules.",
                    ranks=tuple(ranks),
                )


def _check_world_size(world_size: object) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise ClusterError(
            f"world_size={world_size!r} is {format_type_of(world_size)}, expected an integer of 1 or more.",
            key="world_size",
        )
    if world_size < 1:
        raise ClusterError(f"world_size={world_size}: a cluster needs at least 1 device.", key="world_size")
    if world_size > MAX_RANKS:
        raise ClusterError(
            f"world_size={min(world_size, 10**300):.3g}: a cluster has at most {MAX_RANKS} devices.", key="world_size"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
