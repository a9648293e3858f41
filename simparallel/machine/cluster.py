"""The described hardware: devices, the links between them, and the cost of work on them.

A `DeviceSpec` and a `LinkSpec` convert flops and bytes to simulated picoseconds. Every price is rounded once, in
`picoseconds`, so that sums of prices are exact and a timeline is the same on every run. `describe` makes a
`ClusterSpec` from a preset, a file or numbers of your own; `ClusterSpec.table` says where each number comes from.

Models: an operation takes launch cost + max(flops / rate, bytes / bandwidth) (a roofline), and a small one reaches a
fraction of both where the device says so; communication follows Hockney, latency + bytes / bandwidth per step of an
algorithm (`algorithms`). A collective takes the time of the algorithm that a library would choose: ring, tree, all
links of a full mesh at once, or phases inside and between the tiers of the network; or of what NCCL chooses (`Nccl`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from simparallel.base.hints import answer_unknown_names
from simparallel.base.names import did_you_mean
from simparallel.base.units import format_number_of
from simparallel.errors import ClusterError
from simparallel.machine.busbw import expected_busbw
from simparallel.machine.device import PS_PER_S, Curve, DeviceSpec, picoseconds
from simparallel.machine.hostfile import read_host_file
from simparallel.machine.jitter import Jitter
from simparallel.machine.links import Link, LinkSpec, Segment, Tier
from simparallel.machine.nccl import Nccl
from simparallel.machine.presets import DEFAULT_DEVICE, PRESETS, THIS_GPU, Preset, this_gpu_file, this_host_file
from simparallel.machine.spec import ClusterSpec, LinkUse, Traffic

__all__ = [
    "DEFAULT_DEVICE", "PRESETS", "PS_PER_S", "ClusterSpec", "Curve", "DeviceSpec", "Jitter", "Link", "LinkSpec",
    "LinkUse", "Nccl", "Preset", "Segment", "Tier", "Traffic", "describe", "expected_busbw", "load_cluster",
    "picoseconds", "read_host_file", "this_gpu_file", "this_host_file", "with_device",
]  # fmt: skip


def load_cluster(name: str | os.PathLike[str], world_size: int | None = None) -> ClusterSpec:
    """Return the cluster of a preset, or of a JSON file that `ClusterSpec.save` wrote.

    Args:
        name: name of a preset, or path of a file: with a directory, or with the suffix .json.
        world_size: number of ranks; None for all of the file, or for one node of the preset.

    Raises:
        ClusterError: unknown preset, a bad file (facts: `path`, `line`, `key`), or more ranks than the file describes.
    """
    text = os.fspath(name)
    if is_file_name(text):
        spec = ClusterSpec.load(text)
        return spec if world_size is None else spec.with_ranks(world_size)
    if text == THIS_GPU:
        return describe(world_size or 1, text)
    return describe(PRESETS[_known(text)].node_size or 1 if world_size is None else world_size, text)


def is_file_name(name: str) -> bool:
    """Return whether a name is the path of a description and not a preset."""
    return name.endswith(".json") or os.path.basename(name) != name


def _known(name: str) -> str:
    if name not in PRESETS:
        raise ClusterError(
            f"{name!r} is not a preset of hardware; choose from {', '.join(sorted(PRESETS))}, or name a .json file."
            + did_you_mean(name, PRESETS),
            key="device",
        )
    return name


def describe(
    world_size: int,
    device: str | DeviceSpec | ClusterSpec | None = None,
    link: LinkSpec | None = None,
    nodes: int | Sequence[Sequence[int]] = 1,
    node_link: LinkSpec | None = None,
    devices_per_rank: int | None = None,
    device_ids: Sequence[int] = (),
    dtype: str | None = None,
) -> ClusterSpec:
    """Describe a cluster of ranks with devices of one kind: a preset, a file, or a `DeviceSpec` of your own.

    Args:
        world_size: number of ranks.
        device: name of a preset, path of a .json file, a `DeviceSpec`, or a whole `ClusterSpec`; None assumes an a100.
            "this-host" is what `simparallel calibrate` has measured, or a guess; "this-gpu" is what
            `simparallel calibrate --array cupy` has measured, for one rank.
        link: the links inside a node; by default the preset's. Required for several devices of your own.
        nodes: number of nodes, with equally many consecutive ranks on each; or the ranks of each node. With one node,
            ranks fill nodes of the preset's size; a file or a `ClusterSpec` keeps its own nodes.
        node_link: the links between nodes; by default the preset's. Required for devices of your own on several nodes.
        devices_per_rank: see `ClusterSpec`.
        device_ids: number of each rank's device on its node, such as those of a rank table; by default its position.
        dtype: what the devices compute in, see `ClusterSpec`; None for "float32", or for that of a file or a
            `ClusterSpec`.

    Raises:
        ClusterError: unknown preset, bad file, `world_size` or `devices_per_rank` below 1, more ranks than a file
            describes or more on a node than the preset has, a number of nodes that does not divide `world_size`, nodes
            that are not a partition of the ranks, missing links, or "this-gpu" without a calibration or for more ranks.
    """
    is_assumed = device is None and link is None and node_link is None
    device = DEFAULT_DEVICE if device is None else device
    if device == "this-host" and this_host_file().exists():
        # One machine, whatever number of ranks it runs.
        spec = replace(ClusterSpec.load(this_host_file()), world_size=world_size, nodes=(), tiers=(), device_ids=())
    elif device == THIS_GPU:
        spec = _this_gpu(world_size, devices_per_rank)
    elif isinstance(device, ClusterSpec) or (isinstance(device, str) and is_file_name(device)):
        spec = (device if isinstance(device, ClusterSpec) else ClusterSpec.load(device)).with_ranks(world_size)
    else:
        spec = _of_preset(world_size, device, link, nodes, node_link, devices_per_rank, device_ids, is_assumed)
        return replace(spec, dtype=dtype) if dtype else spec
    given = {
        "link": link, "nodes": () if nodes == 1 else nodes, "node_link": node_link, "device_ids": device_ids,
        "devices_per_rank": devices_per_rank, "dtype": dtype,
    }  # fmt: skip
    return replace(spec, **{name: value for name, value in given.items() if value})  # type: ignore[arg-type]


def _this_gpu(world_size: int, devices_per_rank: int | None) -> ClusterSpec:
    """Return the calibration of this machine's GPU."""
    if not this_gpu_file().exists():
        raise ClusterError(
            f"{THIS_GPU}: there is no calibration {this_gpu_file()}; run simparallel calibrate --array cupy on a "
            "machine with a GPU, or use a preset.",
            key="device",
        )
    if world_size != 1 or (devices_per_rank or 1) != 1:
        raise ClusterError(
            f"{THIS_GPU}: {world_size} ranks of {devices_per_rank or 1} devices, and the calibration covers one rank "
            "with one device: nothing was measured between GPUs. Predict one rank, or use a preset.",
            key="world_size",
        )
    return ClusterSpec.load(this_gpu_file())


def _of_preset(
    world_size: int,
    device: str | DeviceSpec,
    link: LinkSpec | None,
    nodes: int | Sequence[Sequence[int]],
    node_link: LinkSpec | None,
    devices_per_rank: int | None,
    device_ids: Sequence[int],
    is_assumed: bool,
) -> ClusterSpec:
    """Describe ranks that fill nodes of a preset, or have devices of the caller's own."""
    if isinstance(device, str):
        preset = PRESETS[_known(device)]
    else:
        # The links of a preset are known, so a spec that equals one needs none; other devices must state theirs.
        found = [preset for preset in PRESETS.values() if preset.device == device]
        preset = found[0] if found else PRESETS[DEFAULT_DEVICE]._replace(device=device)
        if not found:
            num_nodes = nodes if isinstance(nodes, int) else len(nodes)
            has_many = world_size > 1 or (devices_per_rank or 1) > 1
            given = {"link": link or not has_many, "node_link": node_link or num_nodes < 2}
            for argument in (name for name, is_given in given.items() if not is_given):
                raise ClusterError(
                    f"device {device.name!r} is no preset, so its links are not known: pass "
                    f"{argument}=LinkSpec(latency_s, bandwidth_bytes_per_s)."
                )
    # Checks the numbers, and that the nodes are a partition of the ranks.
    plain = ClusterSpec(
        world_size,
        preset.device,
        link or preset.link,
        nodes=nodes,  # type: ignore[arg-type]
        devices_per_rank=devices_per_rank,
        is_assumed=is_assumed,
        device_ids=tuple(device_ids),
    )
    groups, size = plain.nodes, preset.node_size or world_size
    if len(groups) == 1:
        groups = tuple(groups[0][first : first + size] for first in range(0, world_size, size))
    crowded = next((number for number, node in enumerate(groups) if len(node) > size), None)
    if crowded is not None:
        raise ClusterError(
            f"nodes: node {crowded} has {len(groups[crowded])} ranks, and a node of {device!r} has {size} devices; "
            f"leave nodes out for nodes of {size}.",
            key="nodes",
        )
    many = f" on {len(groups)} nodes" if len(groups) > 1 else ""
    each = f"{format_number_of(world_size, 'rank')} x {devices_per_rank}" if devices_per_rank else f"{world_size} x"
    plain = replace(
        plain, name=f"{each} {preset.device.name}{many}", nodes=groups,
        node_link=(node_link or preset.node_link) if many else None, sharing=preset.sharing,
    )  # fmt: skip
    if preset.island_size and preset.island_link:
        islands: dict[tuple[int, int], list[int]] = {}
        for node, ranks in enumerate(groups):
            for position, rank in enumerate(ranks):
                number = plain.device_ids[rank] if device_ids else position
                islands.setdefault((node, number // preset.island_size), []).append(rank)
        tier = Tier("island", preset.island_link, tuple(map(tuple, islands.values())))
        plain = replace(plain, tiers=(tier,))
    return replace(plain, rules=preset.rules, library=preset.library)


def with_device(cluster: ClusterSpec, preset: str | DeviceSpec) -> ClusterSpec:
    """Return a cluster with the same ranks and nodes, and this preset's devices and links; it is assumed as before."""
    nodes = cluster.nodes if len(cluster.nodes) > 1 else 1
    described = describe(cluster.world_size, preset, nodes=nodes, devices_per_rank=cluster.devices_per_rank)
    return replace(described, is_assumed=cluster.is_assumed, dtype=cluster.dtype)


answer_unknown_names(__name__)
