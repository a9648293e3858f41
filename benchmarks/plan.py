"""How long searches for a plan take: ResNet-50, a long chain and a GPT, each in a fresh process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contest import printed_apart
from simparallel import models
from simparallel.autograd import Tensor
from simparallel.base.units import format_seconds
from simparallel.machine.cluster import describe
from simparallel.nn import Linear, Module
from simparallel.search.graph import Graph
from simparallel.search.model_steps import MODELS, KnownModel, ModelStep
from simparallel.search.planner import plan_graph
from simparallel.search.space import Space

CLUSTER = "dgx-h100"
CHAIN_OPS, CHAIN_WIDTH = 1000, 1024


class Chain(Module):
    """Linear layers and ReLU in turn."""

    def __init__(self) -> None:
        super().__init__()
        # Without biases: a layer is one op with one parameter.
        self.layers = [Linear(CHAIN_WIDTH, CHAIN_WIDTH, bias=False) for _ in range(CHAIN_OPS // 2)]
        for number, layer in enumerate(self.layers):
            self.add_module(str(number), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.relu())
        return x


CHAIN = KnownModel(Chain, (CHAIN_WIDTH,))
# GPT-2 medium.
LARGE_GPT = KnownModel(partial(models.gpt, 50304, 1024, num_layers=24, num_heads=16, width=1024), (1024,), 50304, 1)


class Case(NamedTuple):
    """A search, and the time [s] that it should take at most."""

    known: KnownModel
    device_num: int
    target_s: float


CASES = {
    "ResNet-50, 8": Case(MODELS["resnet50"], 8, 2.0),
    "chain of 1,000 ops, 64": Case(CHAIN, 64, 2.0),
    "ResNet-50, 1,024": Case(MODELS["resnet50"], 1024, 10.0),
    "GPT of 24 layers, 1,024": Case(LARGE_GPT, 1024, 10.0),
}


def captured(case: Case) -> tuple[ModelStep, Graph]:
    """Return the training step of a case, to keep its optimizer alive, and its graph."""
    step = ModelStep(case.known)
    return step, step.graph(case.known.batch * case.device_num, case.device_num)


def measure(name: str) -> dict[str, Any]:
    """Search for one plan in this process; return its numbers."""
    import resource

    case = CASES[name]
    cluster = describe(case.device_num, CLUSTER)
    start_s = time.perf_counter()
    step, graph = captured(case)
    captured_s = time.perf_counter()
    plan = plan_graph(graph, cluster)
    end_s = time.perf_counter()
    # Counted afterwards, so that the times are those of a user.
    space = Space(graph, cluster)
    return {
        "seconds": end_s - start_s,
        "capture_s": captured_s - start_s,
        "target_s": case.target_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ops": len(graph.nodes),
        "candidates": sum(map(len, space.choices)),
        "gap": plan.gap,
        "method": plan.method,
        "step_time_s": plan.step_time_s,
        "data_parallel_s": (plan.data_parallel_ps or 0) / 1e12,
    }


def in_a_fresh_process(name: str) -> dict[str, Any]:
    """Measure a case in a process of its own, without caches of an earlier search."""
    found: dict[str, Any] = json.loads(printed_apart(f"from benchmarks import plan; plan.tell({name!r})"))
    return found


def main(
    rounds: int = 3, as_json: bool = False, measured: Callable[[str], dict[str, Any]] = in_a_fresh_process
) -> None:
    """Search for the plan of each case in fresh processes, in turn, and print the median times.

    Args:
        rounds: searches of each case.
        as_json: print JSON, not a table.
        measured: returns the numbers of a case.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, results in found.items():
            results.append(measured(name))
    # A search gives the same plan each time; only times and memory vary.
    varying = ("seconds", "capture_s", "peak_bytes")
    middle = {
        name: {**results[0], **{key: median(result[key] for result in results) for key in varying}}
        for name, results in found.items()
    }
    print(json.dumps(middle, indent=1) if as_json else table(middle))


def table(middle: dict[str, dict[str, Any]]) -> str:
    """Return the numbers of all cases as text."""
    head = ("program, devices", "ops", "candidates", "captured in", "planned in", "target", "gap", "step",
            "data parallel", "method")  # fmt: skip
    rows = [
        (name, f"{one['ops']:,}", f"{one['candidates']:,}",
         *(format_seconds(one[key]) for key in ("capture_s", "seconds", "target_s")),
         f"{one['gap']:.2%}", *(format_seconds(one[key]) for key in ("step_time_s", "data_parallel_s")), one["method"])
        for name, one in middle.items()
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:], strict=False)),
                   row[-1]])
        for row in (head, *rows)
    ]  # fmt: skip
    planned = "planned in: capture, prices and search, median of fresh processes"
    return "\n".join([*lines, f"{planned}; gap: how far the cost may be above the optimum"])


def tell(name: str) -> None:
    print(json.dumps(measure(name)))
