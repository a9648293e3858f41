"""Plans of a GPT on eight described a100 in time and memory: known ones, their neighbours, and the Pareto front."""

from fnmatch import fnmatch
from typing import Any

import numpy as np

import simparallel as sp
from simparallel.machine.cluster import describe
from simparallel.search.following import data_parallel, follow
from simparallel.search.model_steps import MODELS, ModelStep
from simparallel.search.planner import pareto_plans
from simparallel.search.replay import replay
from simparallel.search.space import Space

MODEL, BATCH_SIZE, CLUSTER, DEVICES = "gpt", 16, "a100", 8
NEIGHBOURS = 400
# Strategies of Megatron's pairs of layers on d x t devices; all other ops follow their inputs.
PAIRS: dict[str, dict[str, Any]] = {
    "mlp": {
        "Reshape": lambda d, t: ((d, 1),),
        "1.Linear": lambda d, t: ((d, 1), (t, 1), (t,)),
        "3.Linear": lambda d, t: ((d, t), (1, t), (1,)),
    },
    "gpt": {
        "tokens.Embedding": lambda d, t: ((d, 1), (1, 1)),
        "*.up.Linear": lambda d, t: ((d, 1, 1), (t, 1), (t,)),
        "*.down.Linear": lambda d, t: ((d, 1, t), (1, t), (1,)),
    },
}


def pairs(space: Space, model: str, data: int, tensor: int) -> tuple[int, ...]:
    """Return the choices of data x tensor parallelism."""
    given = {}
    for number, (node, choices) in enumerate(zip(space.graph.nodes, space.choices, strict=True)):
        for pattern, cuts in PAIRS[model].items():
            if fnmatch(node.name, pattern):
                strategies = [choice.strategy for choice in choices]
                given[number] = strategies.index((cuts(data, tensor), None))
    return follow(space, given)


def draw(ax: Any = None, model: str = MODEL, batch_size: int = BATCH_SIZE) -> Any:
    step, cluster = ModelStep(MODELS[model]), describe(DEVICES, CLUSTER)
    graph, *split = step.graphs(batch_size, DEVICES)
    space = Space(graph, cluster)

    def place(choice: Any) -> tuple[float, float]:
        return replay(space, choice).step_ps / 1e12, space.peak_bytes(choice)

    known = {"data parallel": data_parallel(space), "every device computes all": (0,) * len(space.choices)}
    known |= {f"{d} x data, {t} x tensor": pairs(space, model, d, t) for d, t in ((2, 4), (4, 2))}
    # Plans of random strategies only would be far off the picture.
    generator, near = np.random.default_rng(0), []
    for number in range(NEIGHBOURS):
        choice = list(tuple(known.values())[number % len(known)])
        count = min(int(generator.integers(1, 12)), len(choice))
        for op in generator.choice(len(choice), count, replace=False):
            choice[op] = int(generator.integers(len(space.choices[op])))
        near.append(place(choice))
    front: dict[str, list[tuple[float, float]]] = {}
    for plan in pareto_plans(graph, cluster, split=split):
        kind = "Pareto front" + ", recomputing" * bool(plan.recomputed)
        kind = "Pareto front, micro-batches" if plan.num_micro_batches > 1 else kind
        front.setdefault(kind, []).append((plan.step_time_ps / 1e12, plan.memory_bytes))
    return sp.view.plot_search_landscape(
        front, {name: place(choice) for name, choice in known.items()}, near, ax=ax,
        title=f"Plans of the {model} model on eight a100 of one server",
        tried_label="a known plan, up to 11 ops changed",
    )  # fmt: skip
