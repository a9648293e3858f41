"""Exercises of lesson 2: collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from simparallel.algorithms import price
from simparallel.course.exercises.exercise import (
    Case,
    Values,
    by_rank,
    call_case,
    difference,
    exercise,
    integers,
    run_ranks,
)
from simparallel.course.exercises.remarks import Remark
from simparallel.runtime.launcher.launch import Results

_MESSAGES = "messages from - to"


def sent(results: Results, item_bytes: int) -> Values:
    """Return the collectives that the ranks called, the ranks that each one sent to, and the elements sent by all."""
    events = results.trace.events
    calls = sorted({event.name for event in events if event.kind == "collective"})
    pairs = {(event.group[0], event.group[1]) for event in events if event.kind == "p2p" and event.sent_bytes}
    return {
        "collectives called": calls or ["none"],
        _MESSAGES: [f"{a} - {b}" for a, b in sorted(pairs)],
        "elements sent": sum(event.sent_bytes for event in events) // item_bytes,
    }


def _with_messages(inputs: np.ndarray, answer: Callable[..., Any]) -> Values:
    """Return the result of each rank, from its row of the inputs, and what `sent` finds."""
    results = run_ranks(answer, [(x,) for x in inputs])
    return {**by_rank(results), **sent(results, inputs.itemsize)}


def rounds(results: Results) -> int:
    """Return the number of rounds that the messages take if a rank sends or receives one in each round."""
    messages = [event for event in results.trace.events if event.kind == "p2p"]
    last = {event.rank: 0 for event in messages}
    sent_in: dict[tuple[int, ...], deque[int]] = {event.group: deque() for event in messages}
    # A message begins before it has arrived, and a rank's own messages stay in their order.
    for event in sorted(messages, key=lambda each: each.wall_start_ns if each.sent_bytes else each.wall_end_ns):
        last[event.rank] += 1
        if event.sent_bytes:
            sent_in[event.group].append(last[event.rank])
        else:
            last[event.rank] = max(last[event.rank], sent_in[event.group].popleft())
    return max(last.values(), default=0)


@exercise(lesson=2, ranks=range(1, 6), size=(*range(1, 8), 0))
def ring_all_reduce(ranks: int, size: int) -> Case:
    """Return the sum of x over all ranks. Each rank sends to the next one only, and no more than a ring needs."""
    inputs = integers(ranks, size)
    # Each of the 2 (P - 1) turns moves every chunk of the array once.
    turns = 2 * (ranks - 1) if size else 0
    ring = [f"{rank} - {(rank + 1) % ranks}" for rank in range(ranks)] if turns else []
    expected = {
        "collectives called": ["none"],
        **by_rank([inputs.sum(axis=0)] * ranks),
        _MESSAGES: ring,
        "elements sent": turns * size,
    }

    def judge(expected: Values, found: Values) -> str | None:
        if strangers := sorted(set(found.get(_MESSAGES, ())) - set(ring)):
            return Remark("a message {}, which is not to the next rank", strangers[0])
        # Some ranks have nothing to send if there are fewer elements than ranks.
        return difference({label: value for label, value in expected.items() if label != _MESSAGES}, found)

    return Case(by_rank(inputs), expected, partial(_with_messages, inputs), judge)


@exercise(lesson=2, ranks=range(1, 10), root=range(3))
def tree_broadcast(ranks: int, root: int) -> Case:
    """Fill x of every rank with x of the root, by messages in ceil(log2 P) rounds."""
    root %= ranks
    inputs = integers(ranks, 3)
    fewest = (ranks - 1).bit_length()
    expected = {"collectives called": ["none"], **by_rank([inputs[root]] * ranks), "rounds": fewest}

    def judge(expected: Values, found: Values) -> str | None:
        if found["rounds"] > fewest:
            return Remark("it takes {} rounds, and {} are enough", found["rounds"], fewest)
        return difference(expected, {**found, "rounds": fewest})

    def run(answer: Callable[..., Any]) -> Values:
        results = run_ranks(answer, [(x, root) for x in inputs])
        calls = sent(results, inputs.itemsize)["collectives called"]
        return {"collectives called": calls, **by_rank(results), "rounds": rounds(results)}

    return Case({**by_rank(inputs), "root": root}, expected, run, judge)


@exercise(lesson=2, ranks=range(1, 6), part=range(1, 4))
def all_to_all_by_messages(ranks: int, part: int) -> Case:
    """Return the chunks that all ranks have for this one, in rank order, exchanged by messages."""
    inputs = integers(ranks, ranks * part)
    outputs = inputs.reshape(ranks, ranks, part).swapaxes(0, 1).reshape(ranks, ranks * part)
    pairs = [f"{a} - {b}" for a, b in permutations(range(ranks), 2)]
    elements = {_MESSAGES: pairs, "elements sent": len(pairs) * part}
    expected = {"collectives called": ["none"], **by_rank(outputs), **elements}

    return Case(by_rank(inputs), expected, partial(_with_messages, inputs))


@exercise(lesson=2, ranks=(2, 3, 4, 6, 8, 12, 16), size_bytes=(4, 10_000, 200_000, 10**8), latency_s=(1e-6, 2e-5))
def fastest_algorithm(ranks: int, size_bytes: int, latency_s: float) -> Case:
    """Return the fastest all-reduce of "ring", "tree" and "halving_doubling", given latency and bandwidth."""
    bandwidth_bytes_per_s = 10e9
    times_us = {}
    for name in ("ring", "tree", "halving_doubling"):
        found = price(name, "all_reduce", ranks, 0)
        times_us[name] = (found.steps * latency_s + found.share * size_bytes / bandwidth_bytes_per_s) * 1e6
    given = {"ranks": ranks, "bytes": size_bytes, "latency [s]": latency_s, "bandwidth [B/s]": bandwidth_bytes_per_s}

    def judge(expected: Values, found: Values) -> str | None:
        name, fastest = found["fastest"], expected["fastest"]
        if name not in times_us:
            return Remark("{!r} is not one of {}", name, ", ".join(times_us))
        # Algorithms may be equally fast.
        if times_us[name] <= times_us[fastest] * (1 + 1e-9):
            return None
        return Remark("{} takes {:.6g} µs, {} {:.6g} µs", name, times_us[name], fastest, times_us[fastest])

    return call_case(given, {"fastest": min(times_us, key=lambda name: times_us[name])}, judge)
