"""The collectives of NCCL: which algorithm and protocol its tuner chooses, and how long the choice takes.

The model and all numbers of this file are those of NVIDIA/nccl @5067397, unless a comment names another source:
src/graph/tuning.cc (latencies, bandwidths, the choice), src/graph/search.cc (channels and their speeds). None is fitted
to measured collectives. Latencies are in microseconds and bandwidths in GB/s, 10^9 bytes, as there.

The time of an algorithm with a protocol is its latency + bytes / its bandwidth; the smallest time is chosen. What the
choice takes differs from that plan in three things: older GPUs take longer for each step, switches that reduce (NVLS)
send at another rate, and a vector passes them in three stages, the first and the last of which copy it. A collective
runs on the devices; the time in which a host starts it is that of its interpreter (`DeviceSpec.op_start_s`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import inf
from typing import NamedTuple

from simparallel.machine import library_times
from simparallel.machine.library_times import Spread
from simparallel.machine.numbers import check_known, check_number, check_sources

GPUS, CPUS = ("volta", "ampere", "hopper", "blackwell"), ("intel", "amd", "arm")
PROTOCOLS = LL, LL128, SIMPLE = "LL", "LL128", "Simple"
# The names that NCCL_ALGO takes; "nvls" and "nvlstree" reduce in the switches of NVLink, "pat" needs a node per rank.
ALGORITHMS = ("tree", "ring", "nvls", "nvlstree", "pat")
_OFFERED = {"all_reduce": ("tree", "ring", "nvls", "nvlstree"), "broadcast": ("ring",), "reduce": ("ring",)}
_OFFERED |= dict.fromkeys(("all_gather", "reduce_scatter"), ("ring", "nvls", "pat"))

# For each protocol.
_BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
_NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (inf, inf, 25.0), "nvlstree": (inf, inf, 25.0)}
_PCIE = {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)}
_NETWORK = {
    "tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvlstree": (inf, inf, 20.9), "pat": (inf, inf, 14.0)
}  # fmt: skip
# The processor starts every step of a ring between nodes.
_PER_STEP = {"intel": 1.0, "amd": 2.0, "arm": 1.0}

# Limits on 1, 2 and more nodes: of a channel, and of LL in all. Those of LL depend on the processors from 2 nodes on.
_TREE = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
_TREE_LL128 = {
    "volta": (20.0, 20.0, 20.0), "ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
_RING_LL128 = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
_NVLSTREE = {"hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0)}
_LL_GPU = {"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
_LL_CPU = {"intel": (39.0, 20.4), "amd": (22.5, 19.0), "arm": (39.0, 20.4)}
_NVLS_SHARE = {"hopper": 0.85, "blackwell": 0.74}
_NVLS_ARITY = 32
# Channels on 1, 2 and more nodes (src/transport/nvls.cc). In a round, each moves a chunk for each head. Smaller vectors
# have smaller chunks: (least number of rounds, bytes of a chunk) (src/enqueue.cc, calcCollChunking).
_NVLS_CHANNELS = {"hopper": (16, 16, 16), "blackwell": (24, 32, 24)}
_NVLS_CHUNKS = {
    "nvls": ((64, 131072), (8, 65536), (2, 32768), (0, 16384)), "nvlstree": ((4, 131072), (1, 65536), (0, 32768))
}  # fmt: skip
# Logs of H100 meet the latencies. Those of older GPUs are longer by their clocks, at which data sheets state the peaks
# of products: 1.53 and 1.41 GHz in place of 1.83. With PCIe, they are the links'.
_SLOWER = {"volta": 1.83 / 1.53, "ampere": 1.83 / 1.41}

# What a tree reaches of its bandwidth, from 64 bytes on for each power of two.
_TREE_BY_SIZE = {
    LL: (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    LL128: (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    SIMPLE: (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}
_FROM = 64

# The speeds of a channel among which the search for channels chooses: within a node, between nodes.
_SPEEDS = {
    "ampere": (
        (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
        (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    ),
    "hopper": (
        (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
        (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    ),
    "blackwell": (
        (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
        (96.0, 86.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24,
         0.12),
    ),
}  # fmt: skip
_SPEEDS["volta"] = _SPEEDS["ampere"]


@dataclass(frozen=True)
class Nccl:
    """NCCL on a kind of machine.

    Args:
        gpus: the generation of the GPUs: "volta", "ampere", "hopper" or "blackwell".
        cpus: the processors: "intel", "amd" or "arm".
        is_pcie: whether the links inside a node are PCIe.
        network_latency_s: what the network's plugin reports: 0 for InfiniBand, 75e-6 for EFA of p4d, p4de and p5.
        algorithms, protocols: those that may be chosen, as in the variables NCCL_ALGO and NCCL_PROTO; a collective that
            has none of them chooses among all.
        sources: see `LinkSpec`.

    Raises:
        ClusterError: an unknown name, or a number out of range. Fact: `key`, the field.
    """

    gpus: str
    cpus: str
    is_pcie: bool = False
    network_latency_s: float = 0.0
    algorithms: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for key in ("algorithms", "protocols"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        for key, values, known in (
            ("gpus", (self.gpus,), GPUS),
            ("cpus", (self.cpus,), CPUS),
            ("algorithms", self.algorithms, ALGORITHMS),
            ("protocols", self.protocols, PROTOCOLS),
        ):
            for value in values:
                check_known("nccl", key, value, known)
        check_number("nccl", "network_latency_s", self.network_latency_s)
        check_sources("nccl", self.sources, [each.name for each in fields(self) if each.name != "sources"])

    def has(self, op: str, algorithm: str) -> bool:
        """Return whether NCCL has an algorithm for a collective."""
        return algorithm in _OFFERED.get(op, ())

    def best_time(self, op: str, size_bytes: float, at: Spread) -> tuple[float, str]:
        """Return (seconds, algorithm) of what NCCL chooses for a collective on a vector; one rank takes no time.

        A barrier is an all_reduce of one element, as in torch.distributed. Collectives that NCCL makes of messages have
        the models of `library_times`. A vector takes no more time than a larger one, whose tree may be better.
        """
        if at.ranks == 1:
            return 0.0, ""
        rows = _rows(self, "all_reduce" if op == "barrier" else op, at)
        if not rows:
            return library_times.best_time(op, size_bytes, at)
        steps = (_FROM << i for i in range(len(_TREE_BY_SIZE[LL])))
        sizes = [size_bytes, next((step for step in steps if step > size_bytes), size_bytes)]
        chosen = [(min(rows, key=lambda row: row.planned_us(size)), size) for size in sizes]
        time_us, name = min((row.time_us(size), row.name) for row, size in chosen)
        return time_us * 1e-6 * at.slowdown, name


class ChannelSearch(NamedTuple):
    """The channels of an algorithm.

    Attributes:
        width: how many there are.
        inside, between: GB/s of each, within a node and between nodes.
    """

    width: int
    inside: float
    between: float


class TunerEntry(NamedTuple):
    """An algorithm with a protocol, for one collective of one group.

    Attributes:
        name: both names.
        protocol: the protocol.
        latency_us: microseconds of a call without bytes, as the tuner plans, and what they are.
        rates: GB/s of the vector, as the tuner plans, and on the wire.
        by_size: fraction of these for each power of two from 64 bytes on.
        plateau: (bytes, factor): from these bytes on, the latency is so many times larger.
        rounds: (bytes, bytes): from these bytes of a vector on, so many pass the switches at a time.
    """

    name: str
    protocol: str
    latency_us: tuple[float, float]
    rates: tuple[float, float]
    by_size: tuple[float, ...] = ()
    plateau: tuple[int, float] = (0, 1.0)
    rounds: tuple[tuple[int, int], ...] = ()

    def planned_us(self, size_bytes: float) -> float:
        """Return the time [us] of a vector, as the tuner plans."""
        return self._sum_us(size_bytes, 0)

    def time_us(self, size_bytes: float) -> float:
        """Return the time [us] of a vector.

        A round is copied to a buffer, passes the switches, and is copied out. Rounds overlap, except for the copies
        before the first and after the last passage.
        """
        round_bytes = next((each for start, each in self.rounds if size_bytes >= start), 0)
        return self._sum_us(size_bytes, 1) + 2 * min(size_bytes, round_bytes) / 1e3 / self.rates[1]

    def _sum_us(self, size_bytes: float, which: int) -> float:
        index = int(size_bytes // _FROM).bit_length() - 1
        rate = self.rates[which] * (self.by_size[index] if 0 <= index < len(self.by_size) else 1.0)
        latency_us = self.latency_us[which] * (self.plateau[1] if size_bytes >= self.plateau[0] else 1.0)
        return latency_us + size_bytes / 1e3 / rate


def _below(speeds: tuple[float, ...], limit: float) -> float:
    return next((speed for speed in speeds if speed <= limit), limit)


def channels(nccl: Nccl, at: Spread) -> dict[str, ChannelSearch]:
    """Return the channels of each algorithm that a group can use, as the search of NCCL finds them.

    The search takes the fastest speed of its list of which a GPU's links carry a whole number of channels, or a lower
    one, down to half, with which more of the links are used; between nodes each network port has a channel. It doubles
    few fast channels.
    """
    inside, between, ports = at.inside, at.between, max(1, round(at.ports))
    within, across = _SPEEDS[nccl.gpus]
    several, members = at.nodes > 1, at.ranks // at.nodes
    if several:
        count = ports
        speed = _below(across, min(between * at.ports / count, inside / count if members > 1 else inf))
    else:
        first = _below(within, inside)
        speed = max((s for s in (first, *within) if 0.49 * first < s <= first), key=lambda s: inside // s * s)
        count = int(inside // speed)
    few = nccl.gpus in ("volta", "ampere") and not nccl.is_pcie or speed >= 50 or count <= 4
    scale = 2 if speed >= 25 and few else 1
    count, speed = count * scale, speed / scale
    rings = ChannelSearch(count, speed, speed if several else 0.0)
    # Trees of two nodes and switches may use faster channels within a node than between nodes.
    faster = min(2 * speed, inside / count if members > 1 else inf)
    trees = rings._replace(inside=max(speed, _below(across, faster))) if several else rings
    found = {"tree": trees, "ring": rings}
    if several and members == 1:
        found["pat"] = rings
    heads = min(_NVLS_ARITY, members, ports if several else members)
    if nccl.gpus in _NVLS_SHARE and at.has_switch and not nccl.is_pcie and heads > 1:
        # A GPU carries the traffic of every head, and as a head its own twice.
        speed = _below(across if several else within, inside / (heads + 1))
        out = _below(across, min(between * at.ports / heads, 2 * speed)) if several else 0.0
        found["nvlstree" if several else "nvls"] = ChannelSearch(heads, speed, out)
    return found


@lru_cache(maxsize=4096)
def _rows(nccl: Nccl, op: str, at: Spread) -> tuple[TunerEntry, ...]:
    """Return the algorithms and protocols that NCCL has for a collective; none if it makes it of messages."""
    found = channels(nccl, at)
    allowed = [name for name in _OFFERED.get(op, ()) if name in found]
    allowed = [name for name in allowed if name in nccl.algorithms] or allowed
    rows = [_row(nccl, op, at, name, protocol, found[name]) for name in allowed for protocol in range(3)]
    rows = [row for row in rows if row.latency_us[0] < inf]
    return tuple(row for row in rows if row.protocol in nccl.protocols) or tuple(rows)


def _row(nccl: Nccl, op: str, at: Spread, name: str, protocol: int, found: ChannelSearch) -> TunerEntry:
    n, k = at.ranks, at.nodes
    simple, is_sum = PROTOCOLS[protocol] == SIMPLE, op == "all_reduce"
    slower = 1.0 if nccl.is_pcie else _SLOWER.get(nccl.gpus, 1.0)
    latency, longer = (_latency(nccl, op, at, name, protocol, each) for each in (1.0, slower))
    if PROTOCOLS[protocol] == LL128 and nccl.is_pcie:
        latency = inf
    planned = _bandwidth(nccl, is_sum, at, name, protocol, found)
    steps = 2 * (n - 1) if is_sum else n - 1 if op in ("all_gather", "reduce_scatter") else n
    if name == "tree":
        planned /= 2
    elif is_sum or name == "ring":
        planned *= n / steps
    # A switch that reduces takes a vector from each GPU and returns it; a GPU's links carry 1 + 1/n of it each way.
    members = n // k
    wire = (
        at.inside * _NVLS_SHARE.get(nccl.gpus, 1.0) / (1 + 1 / members) if name.startswith("nvls") and is_sum else inf
    )
    reached = wire if name == "nvls" and is_sum else min(planned, wire)
    by_size = _TREE_BY_SIZE[PROTOCOLS[protocol]] if name == "tree" else ()
    if name == "nvlstree" and nccl.gpus == "blackwell" and nccl.cpus != "arm":
        by_size = _TREE_BY_SIZE[SIMPLE]
    plateau = 0, 1.0
    if name == "ring" and simple and is_sum and k > 1:
        # Each channel is used twice.
        plateau = 64 * 2 * found.width * n, 1.9 if nccl.gpus == "volta" else 1.4
    rounds: tuple[tuple[int, int], ...] = ()
    if name in _NVLS_CHUNKS and is_sum:
        heads = found.width * _NVLS_CHANNELS[nccl.gpus][min(k, 3) - 1]
        most = 65536 if name == "nvlstree" and (k >= 4 or nccl.gpus == "blackwell") else 131072
        rounds = tuple((count * heads * each, heads * each) for count, each in _NVLS_CHUNKS[name] if each <= most)
    label = {"nvls": "NVLS", "nvlstree": "NVLSTree"}.get(name) or f"{name} {PROTOCOLS[protocol]}"
    return TunerEntry(label, PROTOCOLS[protocol], (latency, longer), (planned, reached), by_size, plateau, rounds)


def _latency(nccl: Nccl, op: str, at: Spread, name: str, protocol: int, slower: float) -> float:
    """Return the latency [us]; infinite if the algorithm does not have the protocol.

    Each step of a GPU takes `slower` times as long as in the tables; the network's own latency does not.
    """
    n, k, simple = at.ranks, at.nodes, PROTOCOLS[protocol] == SIMPLE
    base = slower * _BASE.get(name, (0.0,) * 3)[protocol]
    inside = slower * (_PCIE if nccl.is_pcie else _NVLINK).get(name, (0.0,) * 3)[protocol]
    # With one GPU on each node, nothing hides the network.
    between = slower * _NETWORK["tree" if n == k else name][protocol] if k > 1 else 0.0
    if op in ("broadcast", "reduce"):
        return base + (between if k > 1 else inside)
    # A flush of received bytes takes as long again.
    between += nccl.network_latency_s * 1e6 * (2 if simple else 1)
    doubling = k.bit_length() - 1
    if name == "tree":
        return base + 2 * ((n // k - 1) * inside + doubling * between)
    if name == "nvls":
        return inside
    if name == "nvlstree":
        return base + inside + 2 * doubling * between
    if name == "pat":
        return base + doubling * between / 3.5 + slower * 2.8 * n if simple else inf
    passages = 2 if op == "all_reduce" else 1
    if k > 1:
        inside = max(inside, slower * _PER_STEP[nccl.cpus] * (3 if simple else 1))
    outer = passages * (k - 1)
    return base + (passages * (n - 1) - outer) * inside + outer * between


def _bandwidth(nccl: Nccl, is_sum: bool, at: Spread, name: str, protocol: int, found: ChannelSearch) -> float:
    """Return what all channels carry [GB/s]."""
    k, number = at.nodes, min(at.nodes, 3) - 1
    count, inside, between = found
    speed, members = inside if k <= 2 else between, at.ranks // k
    if name.startswith("nvls"):
        inside *= _NVLS_SHARE[nccl.gpus] * (count - 1) / count * (2 if is_sum else (members - 1) / members)
        # On two nodes each sends half.
        limits = (between * (2 if k == 2 else 1), _NVLSTREE[nccl.gpus][number]) if name == "nvlstree" else ()
        return count * min(inside, *limits, inf)
    total = count * speed
    ll = _LL_GPU[nccl.gpus] if k == 1 else _LL_CPU[nccl.cpus][number - 1]
    if name == "pat":
        return 0.75 * total
    if name == "ring":
        return (min(ll, 0.5 * total), min(0.92 * total, count * _RING_LL128[nccl.gpus]), total)[protocol]
    total = min(0.92 * total, count * _TREE[nccl.gpus][number])
    rest = (
        min(total / 3.8, ll),
        min(total * (7 / 9 if k == 1 else 120 / 128), count * _TREE_LL128[nccl.gpus][number]),
        total,
    )[protocol]
    # With one GPU on each node, all its links carry the same pattern.
    return rest * (0.85 if members == 1 and k > 1 else 1.0)
