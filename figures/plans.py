"""Measures plans on this machine by turns, beside what the search predicts: `python figures/plans.py`.

Run `simparallel calibrate` first. Writes `docs/plans.md` and its pictures: predicted beside measured times, plans in
time and memory with the Pareto front, and the timelines of a real step and of its dry run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from calibration import rank_correlation

import simparallel as sp
from simparallel.base.units import format_bytes, format_seconds
from simparallel.hardware.cluster import describe
from simparallel.search.model_steps import MODELS, ModelStep
from simparallel.search.plan import Plan
from simparallel.search.planner import data_parallel, follow, pareto_plans, plan_graph, planned
from simparallel.search.replay import replay
from simparallel.search.space import Space

FIGURES = Path(__file__).parent
PAGE = FIGURES.parent / "docs" / "plans.md"
STEPS, ROUNDS = 12, 9  # the first two steps do not count
BATCHES = {"mlp": 256, "gpt": 16}
RANKS = 2, 4, 8
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


class Row(NamedTuple):
    """A plan: the model, the number of ranks, and the kind of plan."""

    model: str
    ranks: int
    kind: str


class Result(NamedTuple):
    """A row, the median times of a step in each round, and the predicted time and memory."""

    row: Row
    rounds_s: tuple[float, ...]
    predicted_s: float
    peak_bytes: int
    is_chosen: bool

    @property
    def measured_s(self) -> float:
        """Of the quietest round."""
        return min(self.rounds_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


# --- plans ----------------------------------------------------------------------------------------


def space_of(model: str, ranks: int) -> tuple[Space, ModelStep]:
    """Return the choices of a model on some ranks of this machine; the step has to be kept."""
    step = ModelStep(MODELS[model])
    return Space(step.graph(BATCHES[model], ranks), describe(ranks, "this-host")), step


def pairs(space: Space, model: str, data: int, tensor: int) -> tuple[int, ...]:
    """Return the choices of data x tensor parallelism."""
    given = {}
    for number, (node, choices) in enumerate(zip(space.graph.nodes, space.choices, strict=True)):
        for pattern, cuts in PAIRS[model].items():
            if fnmatch(node.name, pattern):
                strategies = [choice.strategy for choice in choices]
                given[number] = strategies.index((cuts(data, tensor), None))
    return follow(space, given)


def plans_of(model: str, ranks: int) -> tuple[dict[str, Plan], str]:
    """Return plans by their kind, and the kind of the one that the search chooses."""
    space, step = space_of(model, ranks)
    kinds = {"data": data_parallel(space), "every device all": (0,) * len(space.choices)}
    sizes = [(ranks // tensor, tensor) for tensor in RANKS if ranks % tensor == 0]
    kinds |= {f"{d} x {t}" if d > 1 else "tensor": pairs(space, model, d, t) for d, t in sizes}
    plans = {kind: Plan(ranks, planned(space, choice)) for kind, choice in kinds.items()}
    chosen = plan_graph(step.graph(BATCHES[model], ranks), describe(ranks, "this-host"))
    same = [kind for kind, plan in plans.items() if not plan.diff(chosen)]
    if not same:
        plans["searched"] = chosen
    return plans, same[0] if same else "searched"


# --- measuring ------------------------------------------------------------------------------------


def train(model: str, plan: Plan, steps: int = STEPS) -> list[float]:
    """Train by a plan; return the time [s] of each step after the first two."""
    sp.manual_seed(0)
    step = ModelStep(MODELS[model])
    known, generator = step.known, np.random.default_rng(0)
    shape = (BATCHES[model], *known.sample)
    if known.vocabulary is None:
        inputs: Any = generator.standard_normal(shape, dtype=np.float32)
        labels = generator.integers(0, 10, shape[0])
    else:
        inputs = generator.integers(0, known.vocabulary, shape)
        labels = inputs.reshape(-1)
    # Its own function, as `AutoParallel` takes a Module or a function.
    parallel = sp.AutoParallel(lambda x, y: step(x, y), "auto", dataset_strategy="full_batch", plan=plan)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        parallel(inputs, labels)
        times.append(time.perf_counter() - start)
    return times[2:]


def measure() -> list[Result]:
    """Measure each plan, by turns, and predict it."""
    rows: dict[Row, Plan] = {}
    chosen = set()
    for model in BATCHES:
        for ranks in RANKS:
            plans, best = plans_of(model, ranks)
            rows |= {Row(model, ranks, kind): plan for kind, plan in plans.items()}
            chosen.add(Row(model, ranks, best))
    times: dict[Row, list[float]] = {row: [] for row in rows}
    with ExitStack() as stack:
        clusters = {count: stack.enter_context(sp.Cluster(count, blas_threads=1)) for count in RANKS}
        for _ in range(ROUNDS):
            for row, plan in rows.items():
                # The slowest rank: a plan without collectives does not keep the ranks together.
                each = clusters[row.ranks].run(train, row.model, plan)
                times[row].append(max(float(np.median(steps)) for steps in each))
    results = []
    for row, plan in rows.items():
        dry = sp.dry_run(train, (row.model, plan, 4), world_size=row.ranks, cluster="this-host")
        results.append(Result(row, tuple(times[row]), dry.step_time_s, dry.peak_bytes, row in chosen))
        print(results[-1].row, format_seconds(results[-1].measured_s), f"{results[-1].error:+.1%}", flush=True)
    return results


# --- pictures -------------------------------------------------------------------------------------


def draw(results: list[Result]) -> None:
    """Draw predicted beside measured times, and the landscape of plans."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12.4, 5.4), layout="constrained")
    ends = np.array([0.7 * min(r.measured_s for r in results), 1.4 * max(r.measured_s for r in results)]) * 1e3
    left.fill_between(ends, ends * 0.9, ends * 1.1, color="0.88", lw=0, label="within 10%")
    left.plot(ends, ends, color="0.5", lw=0.8)
    marks = dict(zip(RANKS, "os^", strict=True))
    for model, color in zip(BATCHES, ("#0072B2", "#CC79A7"), strict=True):
        for ranks, mark in marks.items():
            found = [each for each in results if each.row[:2] == (model, ranks)]
            for each in found:
                left.scatter(
                    each.measured_s * 1e3, each.predicted_s * 1e3, marker=mark, s=90 if each.is_chosen else 36,
                    color=color, edgecolor="black" if each.is_chosen else "white", lw=1.4 if each.is_chosen else 0.6,
                    zorder=3, label=f"{model}, {ranks} ranks" if each is found[0] else None,
                )  # fmt: skip
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set(xlabel="measured time of a step [ms]", ylabel="predicted time of a step [ms]")
    left.set_title(f"{len(results)} plans on this machine (outlined: chosen)", loc="left", fontsize=11)
    left.legend(fontsize=8, frameon=False, loc="upper left")
    landscape(right)
    figure.savefig(FIGURES / "plans.png", dpi=120)


def landscape(ax: Any, count: int = 400) -> None:
    """Draw plans of the GPT on eight described devices in time and memory: known ones, their neighbours, the front."""
    step, cluster = ModelStep(MODELS["gpt"]), describe(8, "dgx-h100")
    graph, *split = step.graphs(BATCHES["gpt"], 8)
    space = Space(graph, cluster)
    problem = space.problem()
    generator = np.random.default_rng(0)

    def place(choice: Any) -> tuple[float, float]:
        return replay(space, choice).step_ps / 1e9, problem.memory_bytes(choice) / 1e6

    known = {"data": data_parallel(space), "every device all": (0,) * len(space.choices)}
    known |= {"2 x 4": pairs(space, "gpt", 2, 4), "4 x 2": pairs(space, "gpt", 4, 2)}
    # Plans of random strategies only would be far off the picture.
    near = []
    for number in range(count):
        choice = list(tuple(known.values())[number % len(known)])
        for op in generator.choice(len(choice), int(generator.integers(1, 12)), replace=False):
            choice[op] = int(generator.integers(len(space.choices[op])))
        near.append(place(choice))
    ax.scatter(*zip(*near, strict=True), s=9, color="0.75", label="known plans with some random strategies")
    front = [(p.step_time_ps / 1e9, p.memory_bytes / 1e6, p) for p in pareto_plans(graph, cluster, split=split)]
    ax.plot(*zip(*((t, m) for t, m, _ in front), strict=True), "-", lw=1, color="#D55E00")
    kinds = {
        "front": lambda p: p.num_micro_batches == 1 and not p.recomputed,
        "front, recomputing": lambda p: p.num_micro_batches == 1 and p.recomputed,
        "front, micro-batches": lambda p: p.num_micro_batches > 1,
    }
    for (name, is_kind), mark in zip(kinds.items(), "osD", strict=True):
        found = [(t, m) for t, m, plan in front if is_kind(plan)]
        if found:
            ax.scatter(*zip(*found, strict=True), s=26, marker=mark, color="#D55E00", zorder=3, label=name)
    for (name, choice), color in zip(known.items(), ("#0072B2", "#009E73", "#E69F00", "#CC79A7"), strict=True):
        ax.scatter(*place(choice), s=60, color=color, edgecolor="black", zorder=4, label=name)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="predicted time of a step [ms]", ylabel="memory of a device, as modelled [MB]")
    ax.set_title("Plans of the GPT on eight h100 in one server", loc="left", fontsize=11)
    ax.legend(fontsize=8, frameon=False)


def draw_timelines() -> None:
    """Draw a real step of the chosen plan of the MLP on four ranks, above its dry run."""
    from matplotlib import pyplot as plt

    plans, best = plans_of("mlp", 4)
    plan = plans[best]
    with sp.Cluster(4, blas_threads=1) as cluster:
        cluster.run(train, "mlp", plan)
        real = cluster.run(train, "mlp", plan).trace
    # The quietest step.
    spans = {}
    for number in range(2, STEPS):
        events = real.select(steps=number).events
        spans[number] = max(e.wall_end_ns for e in events) - min(e.wall_start_ns for e in events)
    dry = sp.dry_run(train, ("mlp", plan, 4), world_size=4, cluster="this-host", fold=False).trace
    figure, (above, below) = plt.subplots(2, 1, figsize=(12.4, 8.6), layout="constrained")
    real.timeline(above, "wall", steps=min(spans, key=spans.__getitem__))
    above.set_title("A measured step of the MLP on four ranks that share two cores", loc="left", fontsize=11)
    dry.timeline(below, "sim", steps=3, collapse=False)
    below.set_title("Its dry run on this-host", loc="left", fontsize=11)
    last = max(above.get_xlim()[1], below.get_xlim()[1])
    above.set_xlim(0, last)
    below.set_xlim(0, last)
    figure.savefig(FIGURES / "plan_timeline.png", dpi=110)


# --- the page -------------------------------------------------------------------------------------


def page(results: list[Result]) -> str:
    lines = [
        "| model | ranks | plan | measured | noise | predicted | error | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        first, second = sorted(each.rounds_s)[:2]
        lines.append(
            f"| {each.row.model} | {each.row.ranks} | {each.row.kind}{' (chosen)' if each.is_chosen else ''} | "
            f"{format_seconds(first)} | {second / first - 1:.0%} | {format_seconds(each.predicted_s)} | "
            f"{each.error:+.1%} | {format_bytes(each.peak_bytes)} |"
        )
    orders = ["| plans | number | rank correlation |", "|---|---|---|"]
    groups: dict[str, list[Result]] = {"all": results}
    groups |= {model: [each for each in results if each.row.model == model] for model in BATCHES}
    for name, found in groups.items():
        orders.append(f"| {name} | {len(found)} | {_correlation(found):.2f} |")
    best = ["| model | ranks | chosen | of the best measured |", "|---|---|---|---|"]
    worst = 0.0
    for model in BATCHES:
        for ranks in RANKS:
            found = [each for each in results if each.row[:2] == (model, ranks)]
            (chosen,) = (each for each in found if each.is_chosen)
            more = chosen.measured_s / min(each.measured_s for each in found) - 1
            worst = max(worst, more)
            best.append(f"| {model} | {ranks} | {chosen.row.kind} | {more:+.1%} |")
    errors = [abs(each.error) for each in results]
    return TEMPLATE.format(
        count=len(results), rounds=ROUNDS, steps=STEPS - 2, rows="\n".join(lines), orders="\n".join(orders),
        best="\n".join(best), worst=worst, middle=float(np.median(errors)), most=float(np.quantile(errors, 0.9)),
        **{f"{model}_batch": size for model, size in BATCHES.items()},
    )  # fmt: skip


def _correlation(results: list[Result]) -> float:
    return rank_correlation([each.measured_s for each in results], [each.predicted_s for each in results])


TEMPLATE = """# Plans on this machine

Plans of [automatic parallelism](auto_parallel.md), measured on the machine that `simparallel calibrate` has described,
beside their predictions; `python figures/plans.py` writes this page. The calibration has not seen these plans.

There are {count} plans of two models, each on 2, 4 and 8 ranks, measured by turns in {rounds} rounds of {steps} steps.
The measured time is the median of the quietest round, and *noise* is how much longer the next quiet one took. The ranks
share the two cores of the machine, so eight of them are no faster than two. A step of the `mlp` has {mlp_batch}
samples, and one of the `gpt` {gpt_batch}; *data* cuts the samples, *tensor* the layers in Megatron's pairs, *d x t*
both, and *every device all* nothing.

The predictions have a median error of {middle:.1%}, and a 90th percentile of {most:.1%}. Predicted and
measured times rank the plans alike:

{orders}

The plan that the search chooses takes at most {worst:.1%} longer than the best measured one:

{best}

![Predicted beside measured times, and the landscape of plans](../figures/plans.png)

On the left, all plans. On the right, plans of the GPT for eight h100, in predicted time and memory: the front has, for
each memory, the fastest plan that the model knows.

![A measured step, and its dry run](../figures/plan_timeline.png)

{rows}
"""


def main() -> None:
    results = measure()
    draw(results)
    draw_timelines()
    PAGE.write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
