"""Exercises of lesson 6: described hardware."""

from __future__ import annotations

import math

from simparallel.course.exercises.exercise import Case, Values, call_case, exercise, integers
from simparallel.course.exercises.remarks import Remark
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec

_DEVICE = DeviceSpec("device", {4: 1e12}, 1e12, 10**9, 1e-6)
_MOST_DEVICES = 64


@exercise(lesson=6, layers=range(1, 6), seed=range(3), slowness=(0, 1, 3))
def step_time(layers: int, seed: int, slowness: int) -> Case:
    """Return (time of a step, exposed communication): all-reduces run beside backward, one at a time."""
    numbers = [int(abs(number)) + 1 for number in integers(2 * layers + seed)[seed:]]
    forward, backward, all_reduce = 5, numbers[:layers], [slowness * number for number in numbers[layers:]]
    computed = sent = forward
    for work, communication in zip(backward, all_reduce, strict=True):
        computed += work
        sent = max(computed, sent) + communication
    expected = {"time of the step": sent, "exposed communication": sent - computed}
    given = {"forward": forward, "backward": backward, "all_reduce": all_reduce}
    return call_case(given, expected, form=lambda times: dict(zip(expected, times, strict=True)))


@exercise(lesson=6, ranks=(2, 3, 4, 5, 8, 9, 64), size_bytes=(8, 10**4, 10**6, 10**7, 10**9), latency_us=(1, 100))
def ring_or_tree(ranks: int, size_bytes: int, latency_us: int) -> Case:
    """Return the faster all-reduce, "ring" or "tree"."""
    link = LinkSpec(latency_us * 1e-6, 100e9)
    cluster = ClusterSpec(ranks, _DEVICE, link)
    times = {
        name: cluster.collective("all_reduce", size_bytes, tuple(range(ranks)), algorithm=name).time_ps
        for name in ("ring", "tree")
    }
    fastest = min(times.values())

    def judge(expected: Values, found: Values) -> str | None:
        name = found["faster"]
        if name not in times:
            return Remark('the answer is {!r}, expected "ring" or "tree"', name)
        if times[name] == fastest:
            return None
        return Remark("{} takes {:g} µs, {} {:g} µs", name, times[name] / 1e6, expected["faster"], fastest / 1e6)

    given = {"ranks": ranks, "size_bytes": size_bytes, "latency_s": link.latency_s, "bandwidth": 100e9}
    return call_case(given, {"faster": min(times, key=lambda name: times[name])}, judge)


@exercise(lesson=6, num_parameters=(1, 100, 1000), num_states=(0, 1, 2), sample_bytes=(8, 70), memory_kb=(0, 8, 17))
def largest_batch(num_parameters: int, num_states: int, sample_bytes: int, memory_kb: int) -> Case:
    """Return the largest number of samples that fits into the memory of a device."""
    memory_bytes = memory_kb * 1000
    taken = 4 * num_parameters * (2 + num_states)
    given = {
        "memory_bytes": memory_bytes,
        "num_parameters": num_parameters,
        "num_states": num_states,
        "sample_bytes": sample_bytes,
    }
    return call_case(given, {"samples": max(0, memory_bytes - taken) // sample_bytes})


@exercise(lesson=6, samples=(8, 100, 1001), batch=(1, 4), gradient_mb=(0, 10, 100), share=(1.0, 0.5, 0.1, 0.03))
def devices_needed(samples: int, batch: int, gradient_mb: int, share: float) -> Case:
    """Return the least number of devices that finish an epoch in time, None if 64 are too few."""
    compute_s, latency_s, bandwidth, gradient_bytes = 0.25, 2**-10, 1e9, gradient_mb * 10**6
    # A limit between two possible times, so that rounding does not decide.
    limit_s = compute_s * (math.ceil(samples / batch) * share + 0.5)

    def epoch_s(devices: int) -> float:
        exchange_s = 2 * (devices - 1) * (latency_s + gradient_bytes / devices / bandwidth)
        return math.ceil(samples / (batch * devices)) * (compute_s + exchange_s)

    enough = [devices for devices in range(1, _MOST_DEVICES + 1) if epoch_s(devices) <= limit_s]
    given = {
        "samples": samples, "batch": batch, "compute_s": compute_s, "gradient_bytes": gradient_bytes,
        "latency_s": latency_s, "bandwidth": bandwidth, "limit_s": limit_s,
    }  # fmt: skip
    return call_case(given, {"devices": enough[0] if enough else None})
