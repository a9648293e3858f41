"""Traces in the format of `torch.profiler`, one file per rank, for tools that read it.

Each operation is a launch and a kernel on a numbered stream, each step a `ProfilerStep#n`, each mark an annotation.
Tools such as HolisticTraceAnalysis recognise communication by names such as "ncclKernel:…", and copies by "Memcpy".
Here such a name shows the kind of a kernel, not the library that ran it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from simparallel.clock.event import COMPUTE, RANGE, Event, stream_order
from simparallel.machine.cluster import ClusterSpec

PS_PER_US = 10**6
# Launches, marks and steps are on a thread of the process, as in torch.profiler's files.
_CPU_TID = 1


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.pt.trace.json"


def dumps(events: Sequence[Event], cluster: ClusterSpec, rank: int) -> bytes:
    """Return the text of one rank's file, in simulated time; `events` are the rank's own."""
    # Kernels have their device number as pid. Ranks have few devices, so this number is usually free.
    pid = cluster.world_size + rank
    rows = [
        _row("process_name", "M", pid, 0, args={"name": f"rank {rank}"}),
        *(_kernels(events, pid)),
        *(_annotations(events, pid)),
    ]
    spec = cluster.device
    # The fields of torch.profiler that tools read; the device is the described one.
    properties = {"id": 0, "name": spec.name, "totalGlobalMem": spec.memory_bytes}
    head = {
        "schemaVersion": 1,
        "deviceProperties": [properties],
        "distributedInfo": {"backend": "simparallel", "rank": rank, "world_size": cluster.world_size},
        "displayTimeUnit": "ns",
    }
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'.encode()


def _row(name: str, phase: str, pid: int, tid: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, **more}


def _kernels(events: Iterable[Event], pid: int) -> Iterable[dict[str, Any]]:
    """Yield each operation as a launch and a kernel; launches take no time, since kernel times include their cost."""
    found = sorted((e for e in events if e.kind != RANGE), key=lambda e: (e.sim_start_ps, e.sim_end_ps))
    lanes = sorted({(e.device, e.stream) for e in found}, key=lambda lane: (lane[0], stream_order(lane[1])))
    # The profiler numbers CUDA streams from 7 on.
    streams = {lane: 7 + number for number, lane in enumerate(lanes)}
    for number, event in enumerate(found):
        stream = streams[event.device, event.stream]
        args = {"device": event.device, "stream": stream, "correlation": number + 1, "flops": event.flops,
                "bytes": event.size_bytes, "step": event.step, "stream name": event.stream}  # fmt: skip
        if event.group:
            args |= {"Process Group Ranks": list(event.group), "seq": event.seq}
        # The correlation id connects a launch and its kernel.
        launch = {"ts": event.sim_start_ps / PS_PER_US, "dur": 0.0, "args": {"correlation": number + 1}}
        yield _row("cudaLaunchKernel", "X", pid, _CPU_TID, cat="cuda_runtime", **launch)
        yield _row(_name(event), "X", event.device, stream, cat="kernel", args=args, **_times(event))


def _name(event: Event) -> str:
    if event.kind == "copy":
        return f"Memcpy DtoD ({event.name})"
    # Everything outside of the compute stream communicates.
    return event.name if event.stream == COMPUTE else f"ncclKernel:{event.name}"


def _annotations(events: Iterable[Event], pid: int) -> Iterable[dict[str, Any]]:
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.kind == RANGE:
            yield _row(event.name, "X", pid, _CPU_TID, cat="user_annotation", args={}, **_times(event))
            continue
        start, end = spans.get(event.step, (event.sim_start_ps, event.sim_end_ps))
        spans[event.step] = min(start, event.sim_start_ps), max(end, event.sim_end_ps)
    for step, (start, end) in sorted(spans.items()):
        # Cut off communication that runs into the next step.
        until = min(end, spans.get(step + 1, (end, end))[0])
        times = {"ts": start / PS_PER_US, "dur": max(0, until - start) / PS_PER_US}
        yield _row(f"ProfilerStep#{step}", "X", pid, _CPU_TID, cat="user_annotation", args={}, **times)


def _times(event: Event) -> dict[str, float]:
    return {"ts": event.sim_start_ps / PS_PER_US, "dur": (event.sim_end_ps - event.sim_start_ps) / PS_PER_US}
