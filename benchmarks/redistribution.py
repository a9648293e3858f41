"""`python -m benchmarks redistribution`: the direct plan, compared with plans of fewer waits, for small tensors.

Also fits the constants by which `plan_quick_redistribution` chooses, by least squares.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np

import simparallel as sp
from simparallel.errors import InputError
from simparallel.layout.fewest_waits import estimate_s, gathering, plan_quick_redistribution
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import Redistribution, plan_redistribution, plan_with_whole_sums
from simparallel.layout.strategy import layout_of_cuts
from simparallel.parallel.operator.interpreter import sharder
from simparallel.parallel.operator.redistribute import compile_moves

# The sides of the square float32 tensors.
WIDTHS = (8, 32, 64, 128, 256)
REPEATS = 30


def cases(ranks: int) -> dict[str, tuple[Layout, Layout]]:
    """Return redistributions; most direct plans send messages, or scatter a sum before a second step."""
    half = ranks // 2
    grid = Layout((2, half), ("a", "b"))
    return {
        "2 x p/2 to columns": (layout_of_cuts((2, half), ranks), layout_of_cuts((1, ranks), ranks)),
        "2 x p/2 to p/2 x 2": (layout_of_cuts((2, half), ranks), layout_of_cuts((half, 2), ranks)),
        "a, b to b, a": (grid("a", "b"), grid("b", "a")),
        "rows to every other": (layout_of_cuts((half, 1), ranks), layout_of_cuts((half, 1), ranks, "left")),
        "rows to columns": (layout_of_cuts((ranks, 1), ranks), layout_of_cuts((1, ranks), ranks)),
        "sum to rows": (grid("a", "None").with_partial("b"), grid(("b", "a"), "None")),
        "sum over a, b to rows by a": (grid("None", "None").with_partial(("a", "b")), grid("a", "None")),
        "sum to columns": (grid("a", "None").with_partial("b"), grid("None", ("a", "b"))),
    }


def measure(rounds: int) -> list[dict[str, Any]]:
    """Measure on each rank: a row for each distinct plan."""
    own, rows = sharder(), []
    for name, (source, target) in cases(own.world_size).items():
        for width in WIDTHS:
            shape = (width, width)
            x = np.ones(source.local_shape(shape), np.float32)
            direct, whole = (plan_redistribution(source, target, shape), plan_with_whole_sums(source, target, shape))
            quick = plan_quick_redistribution(source, target, shape, 4)
            # Equal plans are measured once.
            plans = list(dict.fromkeys([direct, gathering(direct), whole, gathering(whole)]))
            # Compiled before the clock starts, as in a real step.
            moves = [compile_moves(plan, own.rank, own.groups) for plan in plans]
            times_s: list[list[float]] = [[] for _ in plans]
            for i in range(rounds):
                # Alternate the order of the plans, see `contest`.
                for j in range(len(plans))[:: 1 if i % 2 else -1]:
                    sp.barrier()
                    start = time.perf_counter()
                    for _ in range(REPEATS):
                        y = x
                        for move in moves[j]:
                            y = move(y)
                    sp.barrier()
                    times_s[j].append((time.perf_counter() - start) / REPEATS)
            for plan, times in zip(plans, times_s, strict=True):
                rows.append(
                    {
                        "ranks": own.world_size, "case": name, "tensor_bytes": 4 * width * width, "plan": str(plan),
                        "received_bytes": max(plan.received_bytes(4)), "time_s": float(np.median(times)),
                        "estimate_s": estimate_s(plan, 4), "chosen": plan == quick, "facts": _facts(plan),
                    }
                )  # fmt: skip
    return rows


def _facts(plan: Redistribution) -> tuple[float, float, float]:
    """Return averages per rank: collectives, messages, received bytes."""
    parts = [sum(map(s.exchange.num_sources, plan.ranks)) for s in plan.steps if s.kind == "messages" and s.exchange]
    collectives = sum(step.kind not in ("slice", "messages") for step in plan.steps)
    # Each message costs its sender and its receiver.
    return collectives, 2 * sum(parts) / len(plan.ranks), sum(plan.received_bytes(4)) / len(plan.ranks)


def fit(rows: list[dict[str, Any]]) -> np.ndarray:
    """Fit the seconds of a collective, a message and a byte with least relative error; ranks share the cores."""
    # With more ranks than cores, ranks wait for cores: count only the share of the time in which a rank runs.
    busy_s = [row["time_s"] * min(os.cpu_count() or 1, row["ranks"]) / row["ranks"] for row in rows]
    # Dividing each row by its time makes the errors relative.
    weighed = np.array([row["facts"] for row in rows]) / np.array(busy_s)[:, None]
    return np.linalg.lstsq(weighed, np.ones(len(rows)), rcond=None)[0]


def main(*, ranks: tuple[int, ...] = (4, 8), rounds: int = 7, as_json: bool = False) -> None:
    """Measure and print.

    Raises:
        InputError: the number of ranks is not even, or below 2.
    """
    for count in ranks:
        if count < 2 or count % 2:
            raise InputError(f"-n {count}: must be an even number of at least 2.")
    # Rank 0's times are those of all ranks, because barriers enclose the measured moves.
    rows = [row for count in ranks for row in sp.launch(measure, (rounds,), world_size=count)[0]]
    collective_s, message_s, byte_s = fit(rows)
    if as_json:
        print(json.dumps({"rows": rows, "collective_s": collective_s, "message_s": message_s, "byte_s": byte_s}))
        return
    print(f"{'ranks':>5}  {'redistribution':<26} {'tensor':>9} {'B/rank':>8} {'measured':>10} {'estimate':>9}  plan")
    for row in rows:
        print(
            f"{row['ranks']:>5}  {row['case']:<26} {row['tensor_bytes']:>7} B {row['received_bytes']:>8} "
            f"{row['time_s'] * 1e6:>7.1f} us {row['estimate_s'] * 1e6:>6.1f} us  "
            f"{'*' if row['chosen'] else ' '} {row['plan']}"
        )
    print("* chosen by plan_quick_redistribution")
    print(f"fit: COLLECTIVE_S {collective_s:.1e}  MESSAGE_S {message_s:.1e}  BYTE_S {byte_s:.1e}")
