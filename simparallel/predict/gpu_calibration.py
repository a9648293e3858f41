"""The calibration of this machine's GPU: measured times become the `ClusterSpec` "this-gpu".

`measured_gpu` measures (`gpu_measuring`), and `calibration.calibrate` writes; all fits are functions of the measured
times alone, those of `fitting`. The interpreter's times and the GPU's are fitted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log
from statistics import median
from typing import Any

import numpy as np

from simparallel.arrays.cuda.device import Gpu, gpu_of_rank, use_gpu
from simparallel.backend import get_float32_matmul_precision, gpu_namespace
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec
from simparallel.machine.presets import THIS_GPU
from simparallel.predict import gpu_measuring
from simparallel.predict.fitting import facts, fingerprint, fit_ops, op_errors
from simparallel.predict.gpu_measuring import READ, Measurement, Sample, Timed


def describe_gpu(
    programs: Sequence[Measurement], copies: Sequence[Sample], memory_bytes: int, machine: dict[str, Any]
) -> ClusterSpec:
    """Return the description of a GPU that fits its measured times.

    Args:
        programs: the measured programs.
        copies: the times of copies from the host.
        memory_bytes: the GPU's memory.
        machine: the facts on which the times depend, see `gpu_fingerprint`.
    """
    ops = [op for program in programs for op in program.ops]
    device, host = ([*each] for each in zip(*((op.device, op.host) for op in ops), strict=True))
    on_device = [sample for sample in device if sample.name != READ]
    op_costs, host_costs = fit_ops(on_device), fit_ops([*host, *copies])
    large = [sample for sample in on_device if sample.size_bytes > 1 << 20] or on_device
    measured = "peak_flops_per_s", "memory_bandwidth_bytes_per_s", "launch_s", "op_costs", "host_costs", "host_waits"
    spec = DeviceSpec(
        THIS_GPU,
        # The rate of operations that were not measured, and the base of utilisations.
        {4: max(1.0, max(sample.flops / sample.time_s for sample in large))},
        # A quantile: matrix products move few bytes for their time, and outliers are faster.
        max(1.0, float(np.quantile([sample.size_bytes / sample.time_s for sample in large], 0.9))),
        memory_bytes,
        median(sample.time_s for sample in host),
        op_costs=op_costs,
        host_costs=host_costs,
        host_waits=tuple(sorted(_waiting(ops))),
        sources={**dict.fromkeys(measured, "measured"), "memory_bytes": "measured: by the driver"},
    )
    return ClusterSpec(
        1,
        spec,
        # Nothing uses it: `describe` refuses more ranks.
        LinkSpec(1.0, 1.0),
        name=THIS_GPU,
        calibration=facts(
            machine,
            operation=op_errors(on_device, op_costs),
            interpreter=op_errors(host, host_costs),
            program=program_errors(programs),
            sharing=(),
            collective=(),
        ),
    )


def _waiting(ops: Sequence[Timed]) -> set[str]:
    """Return the names of operations that wait in most programs."""
    found: dict[str, list[bool]] = {}
    for op in ops:
        found.setdefault(op.work[0], []).append(op.waits)
    return {name for name, waits in found.items() if name != READ and np.mean(waits) > 0.5}


def program_errors(programs: Sequence[Measurement]) -> list[float]:
    """Return the error of each program's step, predicted from all others; an operation of its own is as measured."""
    errors = []
    for number, program in enumerate(programs):
        others = [op for other, found in enumerate(programs) if other != number for op in found.ops]
        device_costs, host_costs = fit_ops(op.device for op in others), fit_ops(op.host for op in others)
        waits = _waiting(others)
        predicted = [
            op._replace(
                host_s=host_costs[op.work[0]].time_s(*op.work[1:]),
                device_s=device_costs[op.work[0]].time_s(*op.work[1:]),
                waits=op.work[0] == READ or op.work[0] in waits,
            )
            if op.work[0] in device_costs
            else op
            for op in program.ops
        ]
        errors.append(log(program.step_s / gpu_measuring.step_s(predicted)))
    return errors


def gpu_fingerprint(gpu: Gpu) -> dict[str, Any]:
    """Return the facts on which the times of this machine's GPU depend; those of the interpreter belong to them."""
    runtime, properties = gpu.cuda.runtime, gpu.cuda.runtime.getDeviceProperties(gpu.number)
    host = fingerprint()
    return {
        "gpu": properties["name"].decode(),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "cupy": gpu.xp.__version__,
        "products": get_float32_matmul_precision(),
        **{name: host[name] for name in ("cpu", "python", "numpy")},
    }


def changed(spec: ClusterSpec, now: dict[str, Any]) -> str:
    """Return the facts that have changed between a calibration and `now`; "" if it fits."""
    then = spec.calibration.get("machine", {})
    return "; ".join(
        f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value
    )


def changed_since(spec: ClusterSpec) -> str:
    """Return which facts of this machine have changed since it was calibrated; "" if none, or if `spec` is another one.

    A machine without a GPU says nothing about the calibration of one.
    """
    if not spec.calibration.get("machine"):
        return ""
    if spec.name == THIS_GPU:
        return changed(spec, gpu_fingerprint(gpu_of_rank(0))) if gpu_namespace() is not None else ""
    return changed(spec, fingerprint()) if spec.name == "this-host" else ""


def measurement_of_gpu() -> partial[ClusterSpec]:
    """Return `measured_gpu` for the first GPU; raise InputError if there is none that CuPy can use."""
    return partial(measured_gpu, gpu_of_rank(0))


def measured_gpu(gpu: Gpu, tell: Callable[[str], object]) -> ClusterSpec:
    """Measure a GPU with training programs of one rank, and return its description.

    Cost: about two minutes, estimated, and 16 GB of the GPU's memory. Programs for which it has no memory are left out.
    """
    programs = []
    with use_gpu(gpu):
        for number, program in enumerate(gpu_measuring.PROGRAMS, 1):
            tell(f"program {number} of {len(gpu_measuring.PROGRAMS)}: input {program.shape}")
            try:
                programs.append(gpu_measuring.measured(program, gpu))
            except Exception as error:
                # The error of CuPy has no base class of ours.
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                tell("left out: the GPU has too little memory")
            gpu_measuring.free_memory(gpu)
        copies, machine = gpu_measuring.copies(gpu), gpu_fingerprint(gpu)
    return describe_gpu(programs, copies, machine["memory_bytes"], machine)
