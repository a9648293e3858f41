"""Published and assumed numbers of well-known hardware: the only file with figures of products.

Peaks are those of dense matrices. "assumed" marks each number that neither a data sheet nor a measurement gives, even
one that others report; the text after it, if any, says where it is from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from simparallel.machine.device import Curve, DeviceSpec
from simparallel.machine.links import LinkSpec
from simparallel.machine.products import A100_UNITS, ASCEND_910_UNITS, ASCEND_910B_UNITS, H100_UNITS, MatrixUnits


class Preset(NamedTuple):
    """A kind of machine.

    Attributes:
        device, link, node_link: as in `ClusterSpec`; `link` joins the islands of a node if it has any.
        node_size: devices of a node; None for any number.
        island_size, island_link: devices of each island of a node, and the links between them.
        rules: see `ClusterSpec`.
        sharing: see `ClusterSpec`.
    """

    device: DeviceSpec
    link: LinkSpec
    node_link: LinkSpec
    node_size: int | None = None
    island_size: int | None = None
    island_link: LinkSpec | None = None
    rules: str = ""
    sharing: Curve | None = None


_CALCULON = "assumed: the steps of Calculon for an A100, joined (calculon-ai/calculon @caa4b11)"
# Fractions by bytes moved.
_MEMORY = Curve(((1e5, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9)))
_MIB = 1 << 20
# What the users of accelerators run.
_SOFTWARE = "eager"
_KERNELS = "assumed: published times of kernels, see simparallel/machine/products.py"
# The numbers of a device that data sheets have.
_OF_SHEETS = "peak_flops_per_s", "memory_bandwidth_bytes_per_s", "memory_bytes"


def _efficient(device: DeviceSpec, vector_flops_per_s: dict[int, float], source: str) -> DeviceSpec:
    """Return the device with peaks for operations other than products, and with the efficiency of memory by size."""
    sources = {"vector_flops_per_s": source, "memory_efficiency": _CALCULON}
    return replace(
        device, vector_flops_per_s=vector_flops_per_s, memory_efficiency=_MEMORY, sources=device.sources | sources
    )


def _nvlink(bandwidth: float, links: str, sheet: str) -> LinkSpec:
    """Return the links of an NVSwitch: NCCL's protocols LL, LL128 and Simple."""
    return LinkSpec(
        2.5e-6,
        bandwidth / 2,
        segments=((_MIB, 3e-6, 0.92 * bandwidth), (24 * _MIB, 4e-6, bandwidth)),  # type: ignore[arg-type]
        notes=sheet,
        sources={
            "latency_s": "assumed: NCCL's tuner, latencies of LL spread over the steps of a tree of 8",
            "bandwidth_bytes_per_s": f"assumed: LL has half of {links} (NVIDIA/nccl @5067397, tuning.cc)",
            "segments": f"assumed: LL128 and Simple, {links}, their latencies and limits as in NCCL's tuner",
        },
    )


def _link(latency_s: float, bandwidth: float, source: str, **fields: Any) -> LinkSpec:
    """Return links with the source of their bandwidth; the latency is assumed."""
    sources = {"latency_s": "assumed", "bandwidth_bytes_per_s": source} | fields.pop("sources", {})
    return LinkSpec(latency_s, bandwidth, sources=sources, **fields)


def _device(name: str, sheets: Sequence[str], matrix_units: MatrixUnits, **numbers: Any) -> DeviceSpec:
    """Return a device with the sources of its peaks, its bandwidth and its memory; the launch is assumed."""
    sources = dict(zip(_OF_SHEETS, sheets, strict=True)) | {"launch_s": "assumed", "matrix_units": _KERNELS}
    return DeviceSpec(name, software=_SOFTWARE, matrix_units=matrix_units, sources=sources, **numbers)


def _hopper(name: str, memory_bandwidth: float, memory_bytes: int) -> DeviceSpec:
    sheet = f"data sheet: NVIDIA {name.upper()} Tensor Core GPU, SXM"
    device = _device(
        name,
        (f"{sheet}; dense, without TF32", sheet, sheet),
        H100_UNITS,
        peak_flops_per_s={1: 1978.9e12, 2: 989.4e12, 4: 66.9e12, 8: 33.5e12},
        memory_bandwidth_bytes_per_s=memory_bandwidth,
        memory_bytes=memory_bytes,
        launch_s=5e-6,
    )
    vector = {2: 133.8e12, 4: 66.9e12, 8: 33.5e12}
    return _efficient(device, vector, "data sheet: NVIDIA H100 architecture white paper, SXM5")


_A100_SHEET = "data sheet: NVIDIA A100 80GB SXM"
_A100 = _device(
    "a100",
    [_A100_SHEET] * 3,
    A100_UNITS,
    peak_flops_per_s={2: 312e12, 4: 19.5e12, 8: 9.7e12},
    memory_bandwidth_bytes_per_s=2.039e12,
    memory_bytes=80 * 10**9,
    launch_s=5e-6,
)
_HDR = _link(5e-6, 25e9, "data sheet: DGX A100, InfiniBand HDR 200 Gb/s for each GPU")
_NDR = _link(5e-6, 50e9, "data sheet: DGX H100, InfiniBand NDR 400 Gb/s for each GPU")
_ASCEND = _device(
    "ascend910",
    (
        "data sheet: Ascend 910, float16; float32 from 32 cores x 64 vector lanes x 2 flop x 1 GHz",
        "data sheet: Ascend 910, Hot Chips 31",
        "data sheet: Ascend 910",
    ),
    ASCEND_910_UNITS,
    peak_flops_per_s={2: 256e12, 4: 4.1e12},
    memory_bandwidth_bytes_per_s=1.2e12,
    memory_bytes=32 * 10**9,
    launch_s=10e-6,
)
_HCCS = _link(5e-6, 30e9, "data sheet: Ascend 910, Hot Chips 31: 3 HCCS ports of 240 Gb/s")
_ROCE_100 = _link(10e-6, 12.5e9, "data sheet: Atlas 900, RoCE 100 Gb/s for each device")
_REPORTED = "assumed: reported for the 910B; no public data sheet"


def _this_host() -> Preset:
    """Return guesses for the machine that this runs on: its ranks share its cores."""
    cores = os.cpu_count() or 1
    device = DeviceSpec("this-host", {4: 50e9, 8: 25e9}, 10e9, 4 * 10**9, 2e-6, notes="run `simparallel calibrate`")
    shared_memory = LinkSpec(20e-6, 4e9)
    sharing = Curve(
        ((1, 1.0), (cores, 1.0), (1 << 20, cores / (1 << 20))) if cores > 1 else ((1, 1.0), (1 << 20, 1 / (1 << 20)))
    )
    return Preset(device, shared_memory, shared_memory, sharing=sharing)


PRESETS: dict[str, Preset] = {
    # One fast switch for any number of devices: simple numbers to teach and to test with.
    "a100": Preset(_A100, _link(3e-6, 300e9, f"{_A100_SHEET}, NVLink 3: 12 links of 25 GB/s a direction"), _HDR),
    "ascend910": Preset(_ASCEND, _HCCS, _ROCE_100),
    "ascend910-8": Preset(
        _efficient(_ASCEND, {2: 8.2e12, 4: 4.1e12}, "assumed: 32 cores x 128 (float16) or 64 lanes x 2 flop x 1 GHz"),
        _link(
            10e-6,
            24e9,
            "assumed: three quarters of PCIe 4.0 x16, which joins the two HCCS rings",
            ports=2,
            sources={"ports": "assumed: two devices share a PCIe switch"},
        ),
        _ROCE_100,
        node_size=8,
        island_size=4,
        island_link=replace(
            _HCCS,
            topology="mesh",
            sources=_HCCS.sources | {"topology": "assumed: a port for each of the 3 others; Huawei's guides say ring"},
        ),
        rules="hccl",
    ),
    "ascend910b-8": Preset(
        _efficient(
            _device(
                "ascend910b",
                [_REPORTED] * 3,
                ASCEND_910B_UNITS,
                peak_flops_per_s={2: 376e12, 4: 94e12},
                memory_bandwidth_bytes_per_s=1.6e12,
                memory_bytes=64 * 10**9,
                launch_s=10e-6,
            ),
            {2: 23e12, 4: 11.5e12},
            "assumed: a sixteenth of the peak of products in float16",
        ),
        _link(
            5e-6,
            56e9,
            f"{_REPORTED}; 7 HCCS links to the other devices",
            topology="mesh",
            sources={"topology": _REPORTED},
        ),
        _link(10e-6, 25e9, f"{_REPORTED}; RoCE 200 Gb/s"),
        node_size=8,
    ),
    "dgx-a100": Preset(
        _efficient(_A100, {2: 78e12, 4: 19.5e12, 8: 9.7e12}, "data sheet: NVIDIA A100 architecture white paper"),
        _nvlink(240e9, "12 x 20.0 GB/s", "data sheet: NVLink 3, 300 GB/s a direction; NCCL plans with less"),
        _HDR,
        node_size=8,
    ),
    "dgx-h100": Preset(
        _hopper("h100", 3.35e12, 80 * 10**9),
        _nvlink(370.8e9, "18 x 20.6 GB/s", "data sheet: NVLink 4, 450 GB/s a direction; NCCL plans with less"),
        _NDR,
        node_size=8,
    ),
    "h200-8": Preset(
        _hopper("h200", 4.8e12, 141 * 10**9),
        _nvlink(370.8e9, "18 x 20.6 GB/s", "data sheet: NVLink 4, 450 GB/s a direction; NCCL plans with less"),
        _NDR,
        node_size=8,
    ),
    "this-host": _this_host(),
}
DEFAULT_DEVICE = "a100"
# The GPU of this machine, which has no numbers before it is calibrated.
THIS_GPU = "this-gpu"


def calibration_file(name: str) -> Path:
    """Return the path of a calibration that `simparallel calibrate` writes on this machine.

    Args:
        name: "this-host" or "this-gpu".
    """
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder) / "simparallel" / f"{name}.json"


def this_host_file() -> Path:
    """Return the path of this machine's calibration."""
    return calibration_file("this-host")


def this_gpu_file() -> Path:
    """Return the path of the calibration of this machine's GPU."""
    return calibration_file(THIS_GPU)
