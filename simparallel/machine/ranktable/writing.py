"""Write a rank table in either form, in the layout of published ones: a line for each device."""

from __future__ import annotations

import json

from simparallel.errors import InputError
from simparallel.machine.ranktable.table import FORMS, RankTable, Server, hides


def format_rank_table(table: RankTable, form: str = "1.0") -> str:
    """Format a table as text that `parse_rank_table` reads back as an equal table.

    Args:
        table: the table.
        form: "1.0"; or "lab", which cannot separate two servers with the same address unless it is masked.

    Raises:
        InputError: unknown form, or a table that the form cannot represent.
    """
    if form not in FORMS:
        raise InputError(f"form={form!r} is not one of {', '.join(FORMS)}.")
    return _one_zero(table) if form == "1.0" else _lab(table)


def _one_zero(table: RankTable) -> str:
    # By hand: `json.dumps` with an indent would put every value on its own line.
    servers = []
    for server in table.servers:
        devices = [
            json.dumps({"device_id": str(d.device_id), "device_ip": d.device_ip, "rank_id": str(d.rank_id)})
            for d in server.devices
        ]
        servers.append(
            f'    {{\n      "server_id": {json.dumps(server.server_id)},\n      "device": [\n        '
            + ",\n        ".join(devices)
            + f'\n      ],\n      "host_nic_ip": {json.dumps(server.host_nic_ip)}\n    }}'
        )
    return (
        f'{{\n  "version": "1.0",\n  "server_count": "{len(servers)}",\n  "server_list": [\n'
        + ",\n".join(servers)
        + '\n  ],\n  "status": "completed"\n}\n'
    )


def _lab(table: RankTable) -> str:
    _check_apart(table.servers)
    count, most = table.world_size, max(len(server.devices) for server in table.servers)
    instances = [
        json.dumps(
            {
                "devices": [{"device_id": str(d.device_id), "device_ip": d.device_ip}],
                "rank_id": str(d.rank_id),
                "server_id": server.server_id,
            }
        )
        for server in table.servers
        for d in server.devices
    ]
    nics = json.dumps([f"eth{i}" for i in range(most)])
    return (
        '{\n  "board_id": "0x0000",\n  "chip_info": "910",\n  "deploy_mode": "lab",\n  "group_count": "1",\n'
        f'  "group_list": [\n    {{\n      "device_num": "{count}",\n      "server_num": "{len(table.servers)}",\n'
        f'      "group_name": "",\n      "instance_count": "{count}",\n      "instance_list": [\n        '
        + ",\n        ".join(instances)
        + '\n      ]\n    }\n  ],\n  "para_plane_nic_location": "device",\n'
        f'  "para_plane_nic_name": {nics},\n  "para_plane_nic_num": "{most}",\n  "status": "completed"\n}}\n'
    )


def _check_apart(servers: tuple[Server, ...]) -> None:
    """Check that the lab form can represent the servers.

    It does not mark where a server begins: readers look for a new address, or a repeated device number if it is masked.
    """
    for server_id in {server.server_id for server in servers}:
        same = [server for server in servers if server.server_id == server_id]
        if len(same) == 1:
            continue
        numbers = [[device.device_id for device in server.devices] for server in same]
        apart = all(after[0] in before for before, after in zip(numbers, numbers[1:], strict=False))
        if not (hides(server_id) and apart):
            raise InputError(
                f"{len(same)} servers have the address {server_id}; form lab could not tell them apart. Give each "
                "its own address."
            )
