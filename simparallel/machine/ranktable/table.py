"""`RankTable`: the mapping of ranks to servers and devices in HCCL's rank tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from simparallel.errors import ClusterError, InputError

FORMS = ("1.0", "lab")
# A table of this size stays below `jsontext.MAX_BYTES` in either form.
MAX_DEVICES = 4096


@dataclass(frozen=True)
class RankDevice:
    """One device: its number on its server, the address of its network port, and its rank."""

    device_id: int
    device_ip: str
    rank_id: int


@dataclass(frozen=True)
class Server:
    """One server and its devices, in the order of their ranks."""

    server_id: str
    devices: tuple[RankDevice, ...]
    host_nic_ip: str = "reserve"


@dataclass(frozen=True)
class RankTable:
    """Servers and their devices.

    Args:
        servers: the servers, in the order of the file.
        form: "1.0" (`server_list`) or "lab" (`group_list`), the form of the file.
        path: path of the file.
        warnings: tolerated irregularities, each with path and line.
    """

    servers: tuple[Server, ...]
    form: str = "1.0"
    path: str = "rank_table.json"
    warnings: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(server.devices) for server in self.servers)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each server."""
        return tuple(tuple(device.rank_id for device in server.devices) for server in self.servers)

    @property
    def device_ids(self) -> tuple[int, ...]:
        """Number of each rank's device on its server, by rank."""
        devices = sorted((device for server in self.servers for device in server.devices), key=lambda d: d.rank_id)
        return tuple(device.device_id for device in devices)

    def nodes_for(self, world_size: int, nodes: int | Sequence[Sequence[int]] = 1) -> tuple[tuple[int, ...], ...]:
        """Return the `nodes` of the table, after checking the numbers of ranks and nodes that a caller asked for.

        Raises:
            ClusterError: the table has another number of devices or servers.
        """
        asked = nodes if isinstance(nodes, int) else len(nodes)
        if world_size != self.world_size or asked not in (1, len(self.servers)):
            has = f"{self.path} has {self.world_size} devices on {len(self.servers)} servers"
            raise ClusterError(
                f"{has}, but world_size={world_size} and nodes={asked} were requested; pass "
                f"world_size={self.world_size} and leave nodes out."
            )
        return self.nodes

    def describe(self) -> str:
        """Return a description with a line for each server."""
        lines = [f"{self.path}: form {self.form}, servers: {len(self.servers)}, devices: {self.world_size}"]
        for server in self.servers:
            ranks = [device.rank_id for device in server.devices]
            # Consecutive ranks, the usual case, are abbreviated.
            even = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
            text = f"{ranks[0]} … {ranks[-1]}" if even and len(ranks) > 1 else ", ".join(map(str, ranks))
            lines.append(f"  server {server.server_id}: ranks {text}")
        return "\n".join(lines)


def make_rank_table(
    num_servers: int = 1, devices_per_server: int = 8, server_ids: Sequence[str] = (), path: str = "rank_table.json"
) -> RankTable:
    """Make a table of `num_servers` with equally many devices each, ranked by server and device.

    Args:
        num_servers: at least 1.
        devices_per_server: at least 1.
        server_ids: addresses of the servers; by default 127.0.0.1, 127.0.0.2, …, which are all this machine.
        path: path for messages.

    Raises:
        InputError: a number is below 1, there are too many devices, or the numbers of addresses and servers differ.
    """
    for name, count in (("num_servers", num_servers), ("devices_per_server", devices_per_server)):
        if count < 1:
            raise InputError(f"{name}={count} must be at least 1.")
    if num_servers * devices_per_server > MAX_DEVICES:
        raise InputError(f"{num_servers * devices_per_server} devices: a table has at most {MAX_DEVICES}.")
    if server_ids and len(server_ids) != num_servers:
        raise InputError(f"{len(server_ids)} server addresses for {num_servers} servers; give one for each.")
    servers = []
    for number, server_id in enumerate(server_ids or map(_loopback, range(num_servers))):
        ranks = range(number * devices_per_server, (number + 1) * devices_per_server)
        addresses = _addresses(number * -(-devices_per_server // 4), devices_per_server)
        devices = map(RankDevice, range(devices_per_server), addresses, ranks)
        servers.append(Server(server_id, tuple(devices)))
    return RankTable(tuple(servers), path=path)


def merge_rank_tables(tables: Sequence[RankTable], path: str = "rank_table.json") -> RankTable:
    """Merge tables into one with all servers in order; ranks are renumbered from 0.

    Servers with loopback addresses are simulated ones of this machine, such as `make_rank_table` makes. They get new
    addresses, because tables made apart have the same ones.

    Args:
        tables: at least one, in any forms; the result has the form of the first.
        path: path for messages.

    Raises:
        InputError: no tables, too many devices, or two tables with the same server or device address.
    """
    if not tables:
        raise InputError("no tables to merge; name at least one.")
    total = sum(table.world_size for table in tables)
    if total > MAX_DEVICES:
        raise InputError(f"{total} devices: a table has at most {MAX_DEVICES}.")
    seen: dict[str, str] = {}
    servers: list[Server] = []
    rank = num_quads = 0
    for table in tables:
        # Compare with other tables only: servers of one table may share an address.
        own: dict[str, str] = {}
        for server in table.servers:
            devices = []
            if server.server_id.startswith("127."):
                pairs = zip(server.devices, _addresses(num_quads, len(server.devices)), strict=True)
                renamed = tuple(replace(device, device_ip=address) for device, address in pairs)
                server = replace(server, server_id=_loopback(len(servers)), devices=renamed)
                num_quads += -(-len(renamed) // 4)
            if not hides(server.server_id):
                own[f"server {server.server_id}"] = table.path
            for device in server.devices:
                if device.device_ip and "*" not in device.device_ip:
                    own[f"device_ip {device.device_ip}"] = table.path
                devices.append(replace(device, rank_id=rank))
                rank += 1
            servers.append(replace(server, devices=tuple(devices)))
        for what in own.keys() & seen.keys():
            raise InputError(f"{what} is in {seen[what]} and in {table.path}: each server may be in one table only.")
        seen |= own
    return RankTable(tuple(servers), tables[0].form, path)


def hides(server_id: str) -> bool:
    """Return whether an address may stand for several servers: a masked one, or 0.0.0.0."""
    return "*" in server_id or server_id == "0.0.0.0"


def _loopback(server: int) -> str:
    """Return the address of a simulated server, 250 to a network."""
    return f"127.0.{server // 250}.{server % 250 + 1}"


def _addresses(num_quads: int, num_devices: int) -> Iterator[str]:
    """Yield devices' addresses like those of published tables: device d is on network 192.(d % 4 + 1).

    Each four devices of a server have one number on the four networks; `num_quads` numbers are taken.
    """
    for device in range(num_devices):
        number = num_quads + device // 4
        yield f"192.{device % 4 + 1}.{27 + number // 240}.{number % 240 + 6}"


def in_order(servers: Sequence[Server]) -> tuple[Server, ...]:
    """Return the servers with their devices in order of rank."""
    return tuple(replace(server, devices=tuple(sorted(server.devices, key=lambda d: d.rank_id))) for server in servers)
