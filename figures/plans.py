"""Plans of automatic parallelism on this machine, predicted beside measured.

Run `simparallel calibrate` first. Measures by turns, and writes `docs/plans.md` and its pictures: predicted
beside measured times, plans in time and memory with the Pareto front, and the timelines of a real step and of its dry
run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import landscape
import numpy as np
from calibration import rank_correlation
from landscape import pairs

import simparallel as sp
from simparallel.base.units import format_bytes, format_seconds
from simparallel.machine.cluster import describe
from simparallel.search.model_steps import MODELS, ModelStep
from simparallel.search.plan import Plan
from simparallel.search.planner import data_parallel, plan_graph, planned
from simparallel.search.space import Space

FIGURES = Path(__file__).parent
PAGE = FIGURES.parent / "docs" / "plans.md"
MEASURED = "6 minutes, and `simparallel calibrate` before it"
STEPS, ROUNDS = 12, 9  # the first two steps do not count
BATCHES = {"mlp": 256, "gpt": 16}
RANKS = 2, 4, 8


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


def draw_results(results: list[Result]) -> None:
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
    landscape.draw(right)
    save(figure, "plans")


def save(figure: Any, name: str) -> None:
    for suffix in (".png", ".svg"):
        sp.view.save_figure(figure, FIGURES / f"{name}{suffix}", dpi=110)


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
    step, modelled = min(spans, key=spans.__getitem__), dry.select(steps=3).events
    span_ps = max(e.sim_end_ps for e in modelled) - min(e.sim_start_ps for e in modelled)
    # One scale, known before the names are fitted into the bars.
    until_s = max(spans[step] / 1e9, span_ps / 1e12)
    title = "A step of the MLP, measured on two cores"
    sp.view.plot_timeline(real.select(steps=step).events, clock="wall", ax=above, title=title, until_s=until_s)
    title = "Its dry run on this-host"
    sp.view.plot_timeline(modelled, ax=below, title=title, collapse=False, until_s=until_s)
    save(figure, "plan_timeline")


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
beside their predictions; `python -m figures plans` writes this page. The calibration has not seen these plans.

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
    draw_results(results)
    draw_timelines()
    PAGE.write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
