"""Read rank tables of both published forms; errors name path and line.

    1.0    server_list[].device[].{device_id, device_ip, rank_id}                    (MindSpore 1.x, HCCL)
    lab    group_list[].instance_list[].{devices[].{device_id, device_ip}, rank_id, server_id}    (MindSpore 0.x)

Numbers may be texts, as in published tables. Masked addresses (10.*.*.*) are accepted with a warning. They hide
which servers are the same, so in the lab form a repeated device number starts a new server.
"""

from __future__ import annotations

import ipaddress
import os
import warnings
from collections.abc import Iterator
from typing import NoReturn

from simparallel.errors import RankTableError
from simparallel.machine.hccl import flaw_of
from simparallel.machine.ranktable.jsontext import JsonError, JsonNode, parse, read_file, shown
from simparallel.machine.ranktable.table import MAX_DEVICES, RankDevice, RankTable, Server, hides, in_order

MAX_WARNINGS = 20
_LAB_KEYS = (
    "board_id", "chip_info", "deploy_mode", "group_count", "group_list", "para_plane_nic_location",
    "para_plane_nic_name", "para_plane_nic_num", "status",
)  # fmt: skip


class RankTableWarning(UserWarning):
    """A rank table has irregularities that were tolerated."""


def read_rank_table(path: str | os.PathLike[str], *, strict: bool = False) -> RankTable:
    """Read the table in the file `path`; tolerated irregularities become a `RankTableWarning`.

    Args:
        path: a regular file of at most 512 KiB.
        strict: raise an error instead of each warning.

    Raises:
        RankTableError: the file cannot be read, or breaks a rule. Facts: `path`, `line` (None for the whole file).
    """
    table = load(path, strict=strict)
    if table.warnings:
        warnings.warn("\n".join(table.warnings), RankTableWarning, stacklevel=3)
    return table


def load(path: str | os.PathLike[str], *, strict: bool = False) -> RankTable:
    """Read a table like `read_rank_table`, but leave the warnings in its `.warnings`."""
    name = os.fspath(path)
    return parse_rank_table(read_file(name, RankTableError), name, strict=strict)


def parse_rank_table(data: bytes | str, path: str = "rank_table.json", *, strict: bool = False) -> RankTable:
    """Parse the table in `data`; `path` is for messages.

    Raises:
        RankTableError: the table breaks a rule.
    """
    reader = _TableReader(path, strict)
    try:
        root = parse(
            data.encode(errors="replace") if isinstance(data, str) else data,
            lambda line, text: reader.warn(JsonNode(None, line), text),
        )
    except JsonError as error:
        reader.fail(JsonNode(None, error.line), str(error))
    servers, form = reader.table(root)
    more = reader.num_notes - len(reader.notes)
    warnings = (*reader.notes, *[f"{path}: and {more} more warnings"] * (more > 0))
    return RankTable(in_order(servers), form, path, warnings)


class _TableReader:
    """The reader of one table, which collects its warnings and locates its errors."""

    def __init__(self, path: str, strict: bool) -> None:
        self.path = path
        self.strict = strict
        self.notes: list[str] = []
        self.num_notes = 0
        # Lines where ranks and addresses occur, to name both lines of a duplicate.
        self._ranks: dict[int, int] = {}
        self._addresses: dict[str, int] = {}
        # Masked addresses that were reported, each once.
        self._masked: set[str] = set()

    def fail(self, node: JsonNode, text: str, line: int = 0) -> NoReturn:
        raise RankTableError(node.located(self.path, text, line), path=self.path, line=line or node.line)

    def warn(self, node: JsonNode, text: str, line: int = 0) -> None:
        if self.strict:
            self.fail(node, text, line)
        self.num_notes += 1
        if self.num_notes <= MAX_WARNINGS:
            self.notes.append(node.located(self.path, text, line))

    # --- values ------------------------------------------------------------------------------------

    def field(self, node: JsonNode, key: str) -> JsonNode:
        if key not in node.value:
            self.fail(node, f'"{key}" is missing')
        found: JsonNode = node.value[key]
        return found

    def check_object(self, node: JsonNode, known: tuple[str, ...]) -> None:
        if not isinstance(node.value, dict):
            self.fail(node, f"must be an object, not {shown(node.value)}")
        for key, value in node.value.items():
            if key not in known:
                self.warn(node, f"unknown key {ascii(key[:40])}; left out", value.line)

    def items(self, node: JsonNode, key: str) -> list[JsonNode]:
        """Return the items of a list."""
        found = self.field(node, key)
        if not isinstance(found.value, list):
            self.fail(found, f"must be a list, not {shown(found.value)}")
        if not found.value:
            self.fail(found, "is empty")
        return found.value

    def number(self, node: JsonNode, key: str) -> int:
        found = self.field(node, key)
        value = found.value
        # Published tables write numbers as texts. Nine digits are enough, and bound the cost of `int`.
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 9:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**9:
            self.fail(found, f'must be a number such as 8 or "8", not {shown(found.value)}')
        return value

    def text(self, node: JsonNode, key: str) -> str:
        found = self.field(node, key)
        if not isinstance(found.value, str) or not found.value.isprintable() or len(found.value) > 255:
            self.fail(found, f"must be a string of at most 255 printable characters, not {shown(found.value)}")
        return found.value

    def count(self, node: JsonNode, key: str, wanted: int, what: str) -> None:
        if self.number(node, key) != wanted:
            self.fail(node.value[key], f"is {shown(node.value[key].value)}, but there are {wanted} {what}")

    # --- the two forms -----------------------------------------------------------------------------

    def table(self, root: JsonNode) -> tuple[list[Server], str]:
        if not isinstance(root.value, dict):
            self.fail(root, f"a rank table is an object, not {shown(root.value)}")
        forms = [key for key in ("server_list", "group_list") if key in root.value]
        if len(forms) != 1:
            found = "both" if forms else "neither"
            self.fail(root, f'needs either "server_list" (form 1.0) or "group_list" (form lab), has {found}')
        servers = self._one_zero(root) if forms == ["server_list"] else self._lab(root)
        status = self.field(root, "status")
        if status.value != "completed":
            self.fail(status, f'must be "completed", not {shown(status.value)}')
        # Ranks are distinct, so a number is missing if and only if one is too large.
        for number in range(len(self._ranks)):
            if number not in self._ranks:
                rank = max(self._ranks)
                text = f"rank_id {rank} of {len(self._ranks)} devices, but there is no {number}"
                self.fail(root, text, self._ranks[rank])
        flaw = flaw_of((server.server_id, (device.device_id for device in server.devices)) for server in servers)
        if flaw:
            self.warn(root, flaw)
        return servers, "1.0" if forms == ["server_list"] else "lab"

    def _one_zero(self, root: JsonNode) -> list[Server]:
        self.check_object(root, ("version", "server_count", "server_list", "status"))
        version = self.field(root, "version")
        if version.value != "1.0":
            self.warn(version, f'is {shown(version.value)}, read as "1.0"')
        servers: list[Server] = []
        seen: dict[str, int] = {}
        for node in self.items(root, "server_list"):
            self.check_object(node, ("server_id", "device", "host_nic_ip"))
            server_id = self._server_id(node)
            if server_id in seen:
                self.warn(node.value["server_id"], f"{server_id} is also in line {seen[server_id]}")
            seen[server_id] = node.value["server_id"].line
            # "reserve" is the value of published tables.
            nic = self.text(node, "host_nic_ip") if "host_nic_ip" in node.value else "reserve"
            devices: list[RankDevice] = []
            lines: dict[int, int] = {}
            for item in self.items(node, "device"):
                self.check_object(item, ("device_id", "device_ip", "rank_id"))
                devices.append(self._device(item, self._rank(item), lines))
            servers.append(Server(server_id, tuple(devices), nic))
        self.count(root, "server_count", len(servers), "servers in server_list")
        return servers

    def _lab(self, root: JsonNode) -> list[Server]:
        self.check_object(root, _LAB_KEYS)
        groups = self.items(root, "group_list")
        self.count(root, "group_count", len(groups), "groups in group_list")
        if len(groups) > 1:
            self.fail(groups[1], "a second group; only tables of one group can be read")
        group = groups[0]
        self.check_object(group, ("device_num", "server_num", "group_name", "instance_count", "instance_list"))
        # Instances are read first: the stated counts are then compared with the real ones.
        servers = self._servers(list(self._instances(group)))
        total = sum(len(server.devices) for server in servers)
        self.count(group, "instance_count", total, "instances in instance_list")
        self.count(group, "device_num", total, "devices in instance_list")
        self.count(group, "server_num", len(servers), "servers in instance_list")
        if "para_plane_nic_num" in root.value and "para_plane_nic_name" in root.value:
            number, names = self.number(root, "para_plane_nic_num"), len(self.items(root, "para_plane_nic_name"))
            if number != names:
                self.warn(root.value["para_plane_nic_num"], f"is {number}, but para_plane_nic_name has {names}")
        return servers

    def _instances(self, group: JsonNode) -> Iterator[tuple[str, RankDevice, JsonNode]]:
        for node in self.items(group, "instance_list"):
            self.check_object(node, ("devices", "rank_id", "server_id"))
            devices = self.items(node, "devices")
            if len(devices) > 1:
                self.fail(devices[1], "a rank has only one device")
            self.check_object(devices[0], ("device_id", "device_ip"))
            yield self._server_id(node), self._device(devices[0], self._rank(node), {}), devices[0]

    def _servers(self, instances: list[tuple[str, RankDevice, JsonNode]]) -> list[Server]:
        """Group instances into servers by address; with a masked address a repeated device number starts a new one."""
        # A server: its address, device number -> line, and its devices.
        groups: list[tuple[str, dict[int, int], list[RankDevice]]] = []
        # Address -> index of the newest server with it.
        last: dict[str, int] = {}
        for server_id, device, item in instances:
            number = last.get(server_id)
            # A repeated number is an error, unless the masked address may stand for several servers.
            if number is not None and device.device_id in groups[number][1]:
                if not hides(server_id):
                    line = groups[number][1][device.device_id]
                    self.fail(item, f"device_id {device.device_id} of server {server_id} is also in line {line}")
                number = None
            if number is None:
                number = last[server_id] = len(groups)
                groups.append((server_id, {}, []))
            groups[number][1][device.device_id] = item.line
            groups[number][2].append(device)
        return [Server(server_id, tuple(devices)) for server_id, _, devices in groups]

    # --- parts of both -----------------------------------------------------------------------------

    def _rank(self, node: JsonNode) -> int:
        rank = self.number(node, "rank_id")
        found = node.value["rank_id"]
        if rank in self._ranks:
            self.fail(found, f"rank {rank} is also in line {self._ranks[rank]}")
        if rank >= MAX_DEVICES:
            self.fail(found, f"rank {rank}; a table has at most {MAX_DEVICES} devices")
        self._ranks[rank] = found.line
        return rank

    def _server_id(self, node: JsonNode) -> str:
        server_id = self.text(node, "server_id")
        if not server_id:
            self.fail(node.value["server_id"], "is empty")
        if "*" in server_id and server_id not in self._masked:
            self._masked.add(server_id)
            self.warn(node.value["server_id"], f"{server_id} is masked")
        return server_id

    def _device(self, node: JsonNode, rank: int, lines: dict[int, int]) -> RankDevice:
        """Read a device; `lines` maps the device numbers of its server so far to their lines."""
        device_id, device_ip = self.number(node, "device_id"), ""
        found = node.value["device_id"]
        if device_id in lines:
            self.fail(found, f"device {device_id} of this server is also in line {lines[device_id]}")
        lines[device_id] = found.line
        if "device_ip" not in node.value:
            self.warn(node, '"device_ip" is missing')
        else:
            device_ip = self.text(node, "device_ip")
            self._check_address(device_ip, node.value["device_ip"])
        return RankDevice(device_id, device_ip, rank)

    def _check_address(self, address: str, node: JsonNode) -> None:
        if not address or "*" in address:
            self.warn(node, f"{address} is masked" if address else "is empty")
            return
        try:
            ipaddress.ip_address(address)
        except ValueError:
            self.fail(node, f"{ascii(address)} is not an IP address")
        if address in self._addresses:
            self.fail(node, f"{address} is also in line {self._addresses[address]}")
        self._addresses[address] = node.line
