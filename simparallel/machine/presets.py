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

from simparallel.machine.achieved import MATRIX_UNITS, MEMORY_BY_SIZE, OP_START_S
from simparallel.machine.device import Curve, DeviceSpec
from simparallel.machine.links import LinkSpec
from simparallel.machine.nccl import LL, SIMPLE, Nccl
from simparallel.machine.products import MatrixUnits


class Preset(NamedTuple):
    """A kind of machine.

    Attributes:
        device, link, node_link: as in `ClusterSpec`; `link` joins the islands of a node if it has any.
        node_size: devices of a node; None for any number.
        island_size, island_link: devices of each island of a node, and the links between them.
        rules, sharing, library: see `ClusterSpec`.
    """

    device: DeviceSpec
    link: LinkSpec
    node_link: LinkSpec
    node_size: int | None = None
    island_size: int | None = None
    island_link: LinkSpec | None = None
    rules: str = ""
    sharing: Curve | None = None
    library: Nccl | None = None


_CALCULON = "assumed: the steps of Calculon for an A100, joined (calculon-ai/calculon @caa4b11)"
# What the users of accelerators run.
_SOFTWARE = "eager"
_KERNELS = "assumed: published times of kernels, see simparallel/machine/achieved.py"
_STARTS = "assumed: PyTorch on a host of an H100, see simparallel/machine/achieved.py"
# The numbers of a device that data sheets have.
_OF_SHEETS = "peak_flops_per_s", "memory_bandwidth_bytes_per_s", "memory_bytes"


def _efficient(device: DeviceSpec, vector_flops_per_s: dict[int, float], source: str) -> DeviceSpec:
    """Return the device with peaks for other operations than products, what units and memory achieve, and a host."""
    sources = {
        "vector_flops_per_s": source,
        "memory_efficiency": _CALCULON,
        "matrix_units": _KERNELS,
        "op_start_s": _STARTS,
    }
    return replace(
        device,
        vector_flops_per_s=vector_flops_per_s,
        memory_efficiency=Curve(MEMORY_BY_SIZE),
        op_start_s=OP_START_S,
        matrix_units=MatrixUnits(*MATRIX_UNITS[device.name]),
        sources=device.sources | sources,
    )


def _planned(links: str, gbps: float, sheet: str) -> LinkSpec:
    """Return the links of an NVSwitch with the bandwidth with which NCCL plans."""
    source = f"assumed: {links}, with which NCCL plans (NVIDIA/nccl @5067397, topo.h); data sheet: {sheet}"
    return _link(2.5e-6, gbps * 1e9, source)


def _nccl(gpus: str, cpus: str, **fields: Any) -> Nccl:
    """Return NCCL on a kind of machine; its tuner has all other numbers."""
    sources = {
        "gpus": "data sheet",
        "cpus": "data sheet",
        "network_latency_s": "assumed: aws/aws-ofi-nccl @2daf7d3, platform-aws.cpp",
        "protocols": "assumed: EFA does not keep the order of 128 bytes, on which LL128 relies",
        "is_pcie": "data sheet",
    }
    return Nccl(gpus, cpus, **fields, sources={name: sources[name] for name in ("gpus", "cpus", *fields)})


def _link(latency_s: float, bandwidth: float, source: str, **fields: Any) -> LinkSpec:
    """Return links with the source of their bandwidth; the latency is assumed."""
    sources = {"latency_s": "assumed", "bandwidth_bytes_per_s": source} | fields.pop("sources", {})
    return LinkSpec(latency_s, bandwidth, sources=sources, **fields)


def _device(name: str, sheets: Sequence[str], **numbers: Any) -> DeviceSpec:
    """Return a device with the sources of its peaks, its bandwidth and its memory; the launch is assumed."""
    sources = dict(zip(_OF_SHEETS, sheets, strict=True)) | {"launch_s": "assumed"}
    return DeviceSpec(name, software=_SOFTWARE, sources=sources, **numbers)


def _gpu(
    name: str, sheet: str, tflops: Sequence[float], terabytes_per_s: float, gigabytes: int,
    vector: Sequence[float] = (), vector_sheet: str = "", launch_s: float = 5e-6,
) -> DeviceSpec:  # fmt: skip
    """Return a device with efficiencies by size; `tflops` are dense peaks of 1, 2, 3 (TF32), 4 and 8 bytes, 0 for none.

    `vector` has those of other operations for 2, 4 and 8 bytes: by default the peak of 4 bytes for 2 bytes, too.
    """
    peaks = {size: float(round(peak * 1e12)) for size, peak in zip((1, 2, 3, 4, 8), tflops, strict=True) if peak}
    device = _device(
        name,
        [sheet] * 3,
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=terabytes_per_s * 1e12,
        memory_bytes=gigabytes * 10**9,
        launch_s=launch_s,
    )
    each = zip((2, 4, 8), vector or (tflops[3], tflops[3], tflops[4]), strict=False)
    return _efficient(device, {size: float(round(peak * 1e12)) for size, peak in each if peak}, vector_sheet or sheet)


def _hopper(name: str, terabytes_per_s: float, gigabytes: int) -> DeviceSpec:
    sheet = f"data sheet: NVIDIA {name.upper()} Tensor Core GPU, SXM"
    device = _gpu(
        name, sheet, (1978.9, 989.4, 494.7, 66.9, 33.5), terabytes_per_s, gigabytes, (133.8, 66.9, 33.5),
        "data sheet: NVIDIA H100 architecture white paper, SXM5",
    )  # fmt: skip
    return replace(device, sources=device.sources | {"peak_flops_per_s": f"{sheet}; dense"})


_A100_SHEET = "data sheet: NVIDIA A100 80GB SXM"
_A100 = _device(
    "a100",
    [_A100_SHEET] * 3,
    peak_flops_per_s={2: 312e12, 3: 156e12, 4: 19.5e12, 8: 9.7e12},
    memory_bandwidth_bytes_per_s=2.039e12,
    memory_bytes=80 * 10**9,
    launch_s=5e-6,
)
_EFFICIENT_A100 = _efficient(
    _A100, {2: 78e12, 4: 19.5e12, 8: 9.7e12}, "data sheet: NVIDIA A100 architecture white paper"
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
    peak_flops_per_s={2: 256e12, 4: 4.1e12},
    memory_bandwidth_bytes_per_s=1.2e12,
    memory_bytes=32 * 10**9,
    launch_s=10e-6,
)
_HCCS = _link(5e-6, 30e9, "data sheet: Ascend 910, Hot Chips 31: 3 HCCS ports of 240 Gb/s")
_ROCE_100 = _link(10e-6, 12.5e9, "data sheet: Atlas 900, RoCE 100 Gb/s for each device")
_REPORTED = "assumed: reported for the 910B; no public data sheet"
_VECTOR_910 = "assumed: a sixteenth of the peak of products in float16"
_NVLINK5 = _planned("18 x 40.1 GB/s", 721.8, "NVLink 5, 900 GB/s a direction")
_NDR_B200 = _link(5e-6, 50e9, "data sheet: DGX B200 and GB200 NVL72, InfiniBand NDR 400 Gb/s for each GPU")
_NVLINK3 = _planned("12 x 20.0 GB/s", 240, "NVLink 3, 300 GB/s a direction")
_NVLINK4 = _planned("18 x 20.6 GB/s", 370.8, "NVLink 4, 450 GB/s a direction")
_MI300X_SHEET = "data sheet: AMD Instinct MI300X"
_SPARSE = "half of the peaks with sparsity"
_H20_REPORTED = "assumed: reported for the H20; no public data sheet"
_910C = "assumed: reported for CloudMatrix384 (arXiv 2506.12708)"


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
        _gpu("ascend910b", _REPORTED, (0, 376, 0, 94, 0), 1.6, 64, (23, 11.5), _VECTOR_910, 10e-6),
        _link(
            5e-6,
            56e9,
            f"{_REPORTED}; 7 HCCS links to the other devices",
            topology="mesh",
            sources={"topology": _REPORTED},
        ),
        _link(10e-6, 25e9, f"{_REPORTED}; RoCE 200 Gb/s"),
        node_size=8,
        rules="hccl-a2",
    ),
    "dgx-a100": Preset(_EFFICIENT_A100, _NVLINK3, _HDR, node_size=8, library=_nccl("ampere", "amd")),
    "dgx-h100": Preset(_hopper("h100", 3.35, 80), _NVLINK4, _NDR, node_size=8, library=_nccl("hopper", "intel")),
    "h200-8": Preset(_hopper("h200", 4.8, 141), _NVLINK4, _NDR, node_size=8, library=_nccl("hopper", "intel")),
    "b200-8": Preset(
        _gpu("b200", f"data sheet: DGX B200; {_SPARSE}", (4500, 2250, 1125, 75, 37), 8, 180),
        _NVLINK5,
        _NDR_B200,
        node_size=8,
        library=_nccl("blackwell", "intel"),
    ),
    "gb200-nvl72": Preset(
        _gpu("gb200", f"data sheet: GB200 NVL72; {_SPARSE}", (5000, 2500, 1250, 80, 40), 8, 186),
        _NVLINK5,
        _NDR_B200,
        node_size=72,
        library=_nccl("blackwell", "arm"),
    ),
    "h20-8": Preset(
        _gpu("h20", _H20_REPORTED, (296, 148, 74, 44, 1), 4, 96),
        _NVLINK4,
        _link(5e-6, 50e9, _H20_REPORTED),
        node_size=8,
        library=_nccl("hopper", "intel"),
    ),
    "l40s-8": Preset(
        _gpu("l40s", "data sheet: NVIDIA L40S", (733, 362, 183, 91.6, 1.43), 0.864, 48),
        _link(
            5e-6, 24e9, "assumed: 2 x 12 GB/s, twice NCCL's plan for PCIe 3.0 x16; data sheet: PCIe 4.0 x16, 32 GB/s"
        ),
        _link(5e-6, 12.5e9, "assumed: 100 Gb/s for each GPU"),
        node_size=8,
        library=_nccl("ampere", "amd", is_pcie=True),
    ),
    "p4de": Preset(
        _EFFICIENT_A100,
        _NVLINK3,
        _link(
            15e-6, 12.5e9, "data sheet: EC2 p4de, 4 x 100 Gb/s EFA", ports=4, sources={"ports": "data sheet: EC2 p4de"}
        ),
        node_size=8,
        library=_nccl("ampere", "intel", network_latency_s=75e-6, protocols=(LL, SIMPLE)),
    ),
    "p5": Preset(
        _hopper("h100", 3.35, 80),
        _NVLINK4,
        _link(15e-6, 50e9, "data sheet: EC2 p5, 4 x 100 Gb/s EFA for each GPU"),
        node_size=8,
        library=_nccl("hopper", "amd", network_latency_s=75e-6),
    ),
    "mi300x-8": Preset(
        _gpu("mi300x", _MI300X_SHEET, (2614.9, 1307.4, 653.7, 163.4, 163.4), 5.3, 192, (163.4, 163.4, 81.7)),
        _link(
            5e-6,
            64e9,
            f"{_MI300X_SHEET}: 7 links of 64 GB/s a direction",
            topology="mesh",
            sources={"topology": _MI300X_SHEET},
        ),
        _link(5e-6, 50e9, "assumed: 400 Gb/s for each GPU"),
        node_size=8,
    ),
    "ascend910c-384": Preset(
        _gpu("ascend910c", _910C, (0, 752, 0, 188, 0), 3.2, 128, (46, 23), _VECTOR_910, 10e-6),
        _link(5e-6, 392e9, f"{_910C}, unified bus"),
        _link(10e-6, 50e9, f"{_910C}, RoCE 400 Gb/s"),
        node_size=384,
        rules="hccl-a2",
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
