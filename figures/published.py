"""Training steps as predicted, beside what others measured and published.

Each file in `published/` is a table of a publication, with its source and what had to be assumed. No number of the
model is fitted to them, except the share of an A100's peak that products reach to `korthikanti2022_table4.json`, the
times of one block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.machine import achieved
from simparallel.machine.cluster import PRESETS, ClusterSpec, describe
from simparallel.simulate.transformer import GPTShape, TrainingPlan
from simparallel.simulate.transformer_memory import (
    MEGATRON_ADAM,
    MIXED_ADAM,
    ModelStates,
    layer_activation_bytes,
    layers_in_flight,
)
from simparallel.simulate.transformer_time import Efficiency, StepTime, step_time

FIGURES = Path(__file__).parent
PAGE = FIGURES.parent / "docs" / "published.md"
PICTURE = FIGURES / "published.png"
NODE_SIZE = 8
GIB = 2**30
A100, H100 = PRESETS["dgx-a100"].device, PRESETS["dgx-h100"].device
A100_40GB = replace(
    A100,
    name="a100-40gb",
    memory_bandwidth_bytes_per_s=1.555e12,
    memory_bytes=40 * 10**9,
    notes="A100 40GB SXM data sheet",
)
# Attention, the first FlashAttention: 25 to 40 % of an A100's peak (Dao 2023, arXiv 2307.08691, abstract). It loses as
# much on an H100 as the second, which reaches 35 and 73 % (Shah et al. 2024, arXiv 2407.08608, abstract).
ON_A100 = Efficiency(attention=0.325)
BEST_A100 = 271.2 / 312
ON_H100 = Efficiency(attention=0.325 * 0.35 / 0.73)
# A name of the tables -> the cluster, its devices, and what they achieve.
HARDWARE = {
    "a100_80gb": ("dgx-a100", A100, ON_A100),
    "a100_40gb": ("dgx-a100", A100_40GB, ON_A100),
    "h100": ("dgx-h100", H100, ON_H100),
}
Change = Callable[[ClusterSpec, Efficiency], tuple[ClusterSpec, Efficiency]]
# What the model would be without one of its parts. NCCL plans with what links achieve, the rest of Efficiency.link.
CHANGES: dict[str, Change] = {
    "products of every shape at 64.2%": lambda cluster, efficiency: (
        replace(cluster, device=replace(cluster.device, matrix_units=None)),
        efficiency,
    ),
    "fused kernels for all": lambda cluster, efficiency: (
        replace(cluster, device=replace(cluster.device, software="fused")),
        efficiency,
    ),
    "a ring or a tree in place of NCCL's choice": lambda cluster, efficiency: (
        replace(cluster, library=None),
        replace(efficiency, link=1.0),
    ),
}
# From the paper whose block times the model uses.
CALIBRATION = "korthikanti2022"


class Row:
    """One published step: how it ran, how long it took, and what the model says.

    Attributes:
        table: name of its table, with what tells parts of it apart.
        paper: the first part of the file's name.
        plan, cluster: what ran.
        published_s: time of the step.
    """

    def __init__(self, table: dict[str, Any], row: dict[str, Any], change: Change | None = None) -> None:
        self.table = table_of(table, row)
        self.paper = table["name"].partition("_")[0]
        self.model = row["model"]
        preset, device, efficiency = HARDWARE[row["hardware"]]
        gpus = row["gpus"]
        cluster = describe(gpus, preset, nodes=max(1, gpus // NODE_SIZE))
        cluster = replace(cluster, device=replace(device, software=table.get("kernels", "fused")))
        self.cluster, self.efficiency = change(cluster, efficiency) if change else (cluster, efficiency)
        self.states = ModelStates(2, row.get("gradient_bytes", MIXED_ADAM.gradient), 12)
        replicas = gpus // (row.get("tensor", 1) * row.get("pipeline", 1))
        if "global_batch" in row:
            row = row | {"num_micro_batches": row["global_batch"] // (replicas * row["micro_batch"])}
        self.plan = plan_of(table, row, data=replicas)
        self.published_s = self._time_s(row)

    def _time_s(self, row: dict[str, Any]) -> float:
        """Return the time from what was published: time, tokens, or flops by the publication's own formula."""
        plan = self.plan
        if "step_s" in row:
            return row["step_s"]
        if "tokens_per_s" in row:
            return plan.global_batch * plan.shape.length / row["tokens_per_s"]
        if "hardware_tflops_per_gpu" in row:
            return self.peak_s * self.cluster.device.peak(2) / (row["hardware_tflops_per_gpu"] * 1e12)
        peaks = plan.world_size * self.cluster.device.peak(2)
        return plan.shape.flops(plan.global_batch) / (row["model_flops_percent"] / 100 * peaks)

    @property
    def peak_s(self) -> float:
        """The time at peak, recomputation included: over a utilisation, it is a guess."""
        plan = self.plan
        return plan.shape.flops(plan.global_batch, plan.recompute) / (plan.world_size * self.cluster.device.peak(2))

    @cached_property
    def predicted(self) -> StepTime:
        return step_time(self.plan, self.cluster, self.efficiency, self.states)

    @property
    def error(self) -> float:
        """The predicted time over the published one, less 1."""
        return self.predicted.step_s / self.published_s - 1


def table_of(table: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the name of a row's table, with the hardware, and with ZeRO-3, where only some of its rows have them."""
    parts = [table["publication"]]
    if len({other["hardware"] for other in table["rows"]}) > 1:
        parts.append(row["hardware"])
    if len({other.get("zero_stage") for other in table["rows"]}) > 1 and row["zero_stage"] == 3:
        parts.append("ZeRO-3")
    return ", ".join(parts)


def plan_of(table: dict[str, Any], row: dict[str, Any], data: int = 1) -> TrainingPlan:
    """Return the plan of a row; its model may have another length in each row."""
    sizes = table["models"][row["model"]]
    shape = GPTShape(**sizes | {"length": row.get("length") or sizes["length"]})
    return TrainingPlan(
        shape, data=data, **{field.name: row[field.name] for field in fields(TrainingPlan) if field.name in row}
    )


def read(name: str) -> dict[str, Any]:
    """Return a table: its rows are dicts, with the settings of the whole table."""
    table = json.loads((FIGURES / "published" / f"{name}.json").read_text())
    rows = [table.get("plan", {}) | dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return table | {"rows": rows, "name": name}


def tables() -> list[dict[str, Any]]:
    """Return all tables of step times."""
    found = [read(path.stem) for path in sorted((FIGURES / "published").glob("*.json"))]
    return [table for table in found if "measured" in table]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    ranks = []
    for values in map(np.asarray, (a, b)):
        ordered = np.sort(values)
        ranks.append(np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right"))
    return float(np.corrcoef(*ranks)[0, 1])


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the cells of a table's summary.

    The guess gives each row of the table the median utilisation of the table, which the model never sees. Utilisation
    counts recomputation, which makes the guess better.
    """
    published, predicted, peak = np.array([(row.published_s, row.predicted.step_s, row.peak_s) for row in rows]).T
    errors, median = np.abs(predicted / published - 1), np.median(peak / published)
    return [
        str(len(rows)),
        *(
            f"{value:.1%}"
            for value in (np.median(errors), np.quantile(errors, 0.9), errors.mean(), guess_errors(rows).mean())
        ),
        f"{1 - errors.mean() / guess_errors(rows).mean():+.2f}",
        f"{rank_correlation(published, predicted):.3f}",
        f"{rank_correlation(peak / published, peak / predicted):+.2f}",
        f"{median:.1%}",
    ]


def guess_errors(rows: Iterable[Row]) -> np.ndarray:
    """Return the errors of the guess that each row has its table's median utilisation."""
    errors = []
    for _, group in groupby(rows, lambda row: row.table):
        published, peak = np.array([(row.published_s, row.peak_s) for row in group]).T
        errors.append(np.abs(peak / np.median(peak / published) / published - 1))
    return np.concatenate(errors)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def line(row: Row) -> list[str]:
    """Return the cells of one row."""
    plan, time = row.plan, row.predicted
    return [
        row.model,
        f"{plan.shape.length:,}",
        f"{plan.tensor} x {plan.pipeline} x {plan.data}",
        f"{plan.micro_batch} x {plan.num_micro_batches}",
        str(plan.chunks),
        plan.recompute,
        str(plan.zero_stage),
        f"{row.published_s:.4g}",
        f"{time.step_s:.4g}",
        f"{row.error:+.1%}",
        f"{row.peak_s / row.published_s:.1%}",
        f"{time.hfu:.1%}",
    ]


def source(table: dict[str, Any]) -> str:
    """Return where a table comes from, how the copy was checked, and what had to be assumed."""
    parts = [f"{table['url']}: {table['where']}", table.get("software"), f"Checked: {table['checked']}"]
    parts += [f"Assumed: {table['assumed']}"] if "assumed" in table else []
    return ". ".join(filter(None, parts)) + "."


def memory_lines() -> Iterator[str]:
    """Yield the tables of memory."""
    zero, figures = read("zero2020_table1"), read("korthikanti2022_memory")
    yield "Each cell: published / ours.\n"
    yield f"**{zero['publication']}**. {source(zero)}\n"
    rows = sorted(zero["rows"], key=lambda row: (row["parameters"], row["data"]))
    body = []
    for (parameters, data), cells in groupby(rows, lambda row: (row["parameters"], row["data"])):
        both = (f"{cell['gigabytes']} / {zero_gigabytes(cell):.5g}" for cell in cells)
        body.append([f"{parameters / 1e9:g}", str(data), *both])
    yield from markdown(("parameters [10⁹]", "replicas", "ZeRO-1 [GB]", "ZeRO-2 [GB]", "ZeRO-3 [GB]"), body)
    yield f"\n**{figures['publication']}**. {source(figures)}\n"
    body = []
    for row in figures["rows"]:
        ours = korthikanti_memory(figures, row)
        body.append([row["model"], *(f"{row[name]:.4g} / {own:.4g}" for name, own in ours.items())])
    units = (name.replace("_", " ").replace("gib", "[GiB]").replace("percent", "[%]") for name in ours)
    yield from markdown(("model", *units), body)


def zero_gigabytes(row: dict[str, Any]) -> float:
    """Return the model states of a cell of ZeRO's table 1 [10^9 bytes]."""
    return float(row["parameters"] * MIXED_ADAM.bytes_per_parameter(row["zero_stage"], row["data"]) / 10**9)


def korthikanti_memory(table: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Return figure 1's bars [GiB] and figure 7's, in percent of what tensor parallelism alone stores: blocks only."""
    plan = plan_of(table, row)
    both = replace(plan, sequence_parallel=True, recompute="selective")
    cuts = {
        "sequence_parallel_percent": replace(plan, sequence_parallel=True),
        "selective_percent": replace(plan, recompute="selective"),
        "both_percent": both,
        "full_percent": replace(plan, recompute="full"),
    }
    blocks = plan.layers_per_stage * plan.layer_parameters
    sizes = {
        "states_gib": blocks * MEGATRON_ADAM.bytes_per_parameter() / GIB,
        "activations_gib": layers_in_flight(plan) * layer_activation_bytes(plan) / GIB,
        "present_work_gib": layers_in_flight(both) * layer_activation_bytes(both) / GIB,
    }
    whole = layer_activation_bytes(plan)
    percents = {name: 100 * layer_activation_bytes(cut) / whole for name, cut in cuts.items()}
    return {name: float(size) for name, size in (sizes | percents).items()}


INTRODUCTION = """\
# Published steps beside predictions

`simparallel.simulate` has closed forms for the memory and the time of a training step of a GPT. This page holds them
beside what others measured and published. `python figures/published.py` writes it from the tables in
`figures/published/`, where each has its source and what had to be assumed.

```python
from simparallel.machine.cluster import describe
from simparallel.simulate.transformer import GPTShape, TrainingPlan
from simparallel.simulate.transformer_memory import activation_bytes, state_bytes
from simparallel.simulate.transformer_time import step_time

shape = GPTShape(num_layers=96, width=12288, num_heads=96, length=2048, vocabulary=51200)
plan = TrainingPlan(shape, tensor=8, pipeline=12, data=4, num_micro_batches=384, recompute="full")
time = step_time(plan, describe(plan.world_size, "a100", nodes=48))
print(f"{shape.num_parameters / 1e9:.1f} billion parameters on {plan.world_size} GPUs: {time.step_s:.1f} s a step")
print(f"bubble {time.bubble_ps / time.step_ps:.1%}, MFU {time.mfu:.1%}, HFU {time.hfu:.1%}")
states, activations = float(state_bytes(plan)) / 2**30, float(activation_bytes(plan)) / 2**30
print(f"first stage: {states:.1f} GiB of model states, {activations:.1f} GiB of activations")
for preset in ("dgx-a100", "dgx-h100", "h200-8", "ascend910b-8"):
    time = step_time(plan, describe(plan.world_size, preset, nodes=48))
    print(f"{preset}: {time.step_s:.1f} s, MFU {time.mfu:.1%}")
```

```
174.6 billion parameters on 384 GPUs: 77.2 s a step
bubble 2.7%, MFU 36.6%, HFU 48.7%
first stage: 28.6 GiB of model states, 4.8 GiB of activations
dgx-a100: 77.3 s, MFU 36.6%
dgx-h100: 30.0 s, MFU 29.7%
h200-8: 28.8 s, MFU 31.0%
ascend910b-8: 64.1 s, MFU 36.6%
```
"""

HOW = """\
## How the time is predicted

* **Kernels** of a block take the roofline of the device: flops over what products of their shape reach, or bytes over
  bandwidth. A product is computed in tiles, in whole waves on the multiprocessors; one that fills them reaches
  {product:.1%} of an A100's peak. This one number comes from the times of one block in another table (Korthikanti et
  al. 2022, table 4); the tiles, and the shares of an H100, of attention and memory are of published tables of single
  kernels. Nothing is fitted to a step, but four of these constants were chosen after a look at the errors of steps.
  All stand, with their sources, in one file, `simparallel/machine/achieved.py` (sha256 `{digest}`).
* **Software**: Megatron-LM runs fused kernels; PyTorch's FSDP runs a kernel for each op, and the loss in float32.
* **Collectives** of tensor parallelism and between replicas are those that NCCL chooses on a DGX. Messages between
  stages and the update are added, each by its formula, and the bubble by the clock of the schedule. What overlaps is a
  setting of the plan.
* **Attention** is counted in full, as in the publications' own formulas; a fused kernel skips the masked half.

## How good it is

The *guess* says that every row of a table has the table's median utilisation (of hardware flops, which count
recomputation). It has seen the table; the model has not. *Skill* is 1 - mean error / mean error of the guess: 1 is
perfect, 0 is no better than the guess, and below 0 is worse. Ranks of step times are easy, because models and clusters
differ so much; ranks of utilisation are not.
"""

READING = """\
What to read from it:

* Where Megatron-LM ran on A100 with tensor and pipeline parallelism, the model is better than a guess that knows the
  answers.
* Figure 9 of MegaScale has three rows with nearly the same utilisation, so a guess that knows the median cannot be
  wrong. Korthikanti et al. ran the same model on as many GPUs a tenth faster: no model can be right about both.
* ZeRO-3 in table 2 of Narayanan et al. took up to three times as long as its flops and bytes need, as if its bytes
  passed one of the eight ports of a node. DeepSpeed of those months copied after each all-gather and added gradients by
  all-reduces (its issues 1173 and 1174: 0.4 s for 10 GB inside of a node with NVLink). The model has FSDP's exchanges.
* FSDP on A100 with full recomputation reached up to 79 % of the peak, more than the share that the model has from
  Megatron-LM's blocks, so those predictions are too slow.
* On H100, the first FlashAttention, which these runs had, was far from the hardware: it decides the long sequences.
* The last row takes the best product of any shape as the share of those that fill the device: steps are then a sixth
  too fast, and the skill is negative.
* The rows of Korthikanti et al. come from the paper whose block times the model uses, so they count as no test.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the text of the page."""
    digest = sha256(Path(achieved.__file__).read_bytes()).hexdigest()[:16]
    groups = {name: list(group) for name, group in groupby(rows, lambda row: row.table)}
    unseen = [row for row in rows if row.paper != CALIBRATION]
    best = unseen_rows(lambda cluster, efficiency: (cluster, replace(efficiency, product=BEST_A100)))
    parallel, ideal = ([row for row in some if row.plan.tensor > 1] for some in (unseen, best))
    head = (
        "table",
        "rows",
        "median error",
        "90th percentile",
        "mean",
        "mean of the guess",
        "skill",
        "rank correlation of times",
        "of utilisation",
        "median utilisation",
    )
    body = [[name, *summary(group)] for name, group in groups.items()]
    body.append(["all but Korthikanti et al.", *summary(unseen)])
    body += [[f"the same, {name}", *summary(unseen_rows(change))] for name, change in CHANGES.items()]
    body.append(["of these, tensor parallel", *summary(parallel)])
    body.append([f"the same, products at {BEST_A100:.1%}", *summary(ideal)])
    lines = [
        INTRODUCTION,
        HOW.format(product=A100.matrix_units.product, digest=digest),
        *markdown(head, body),
        "",
        READING,
    ]
    lines += [
        f"![Predicted against published time of a step](../figures/{PICTURE.name})",
        "",
        "## Memory",
        "",
        *memory_lines(),
    ]
    lines += ["", "## Row by row", "", "Devices are tensor x pipeline x data, micro-batches are sequences x number."]
    columns = (
        "model",
        "length",
        "devices",
        "micro-batches",
        "chunks",
        "recompute",
        "ZeRO",
        "published [s]",
        "predicted [s]",
        "error",
        "utilisation",
        "predicted",
    )
    for table in tables():
        lines += ["", f"### {table['publication']}", "", source(table)]
        for name, group in groups.items():
            if name.startswith(table["publication"]):
                lines += [
                    "",
                    *([f"{name}:", ""] if name != table["publication"] else []),
                    *markdown(columns, map(line, group)),
                ]
    return "\n".join(lines) + "\n"


def draw() -> Any:
    """Draw predicted against published times, one colour for each paper."""
    rows = all_rows()
    import matplotlib.pyplot as plt

    from simparallel.view.style import BLUE, GREEN, ORANGE, PINK, SKY, clean, head

    kinds = (
        ("narayanan2021", "a100", "Narayanan et al. 2021: Megatron-LM, A100", BLUE, "o"),
        ("megascale2024", "a100", "Jiang et al. 2024: Megatron-LM, A100", GREEN, "D"),
        ("llm", "a100", "LLM Foundry 2023: FSDP, A100", ORANGE, "."),
        ("llm", "h100", "LLM Foundry 2023: FSDP, H100", ORANGE, "x"),
        (CALIBRATION, "a100", "Korthikanti et al. 2022: source of the block times", PINK, "s"),
    )
    figure, ax = plt.subplots(figsize=(8.5, 8), layout="constrained")
    ends = np.array([0.7 * min(row.published_s for row in rows), 1.5 * max(row.published_s for row in rows)])
    ax.fill_between(ends, 0.8 * ends, 1.2 * ends, color=SKY, alpha=0.25, linewidth=0, label="within 20 %")
    ax.plot(ends, ends, color="0.4", linewidth=1, label="equal")
    for paper, device, label, color, marker in kinds:
        of_kind = [row for row in rows if row.paper == paper and row.cluster.device.name.startswith(device)]
        points = np.array([(row.published_s, row.predicted.step_s) for row in of_kind]).T
        ax.scatter(
            *points, s=32, color=color, marker=marker, label=f"{label} ({len(of_kind)} rows)", zorder=3, alpha=0.8
        )
    worst = min(rows, key=lambda row: row.error)
    ax.annotate(
        f"ZeRO-3 on {worst.plan.world_size:,} A100", (worst.published_s, worst.predicted.step_s), (10, -32),
        textcoords="offset points", ha="center", color="0.25", arrowprops={"arrowstyle": "-", "color": "0.5"},
    )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set_xlabel("published time of a training step [s]", fontsize=11)
    ax.set_ylabel("predicted time [s]", fontsize=11)
    head(ax, "Training steps: predicted against published")
    clean(ax)
    ax.legend(loc="upper left", frameon=False, fontsize=10)
    return figure


def all_rows(change: Change | None = None) -> list[Row]:
    """Return the rows of all tables of step times, with clusters and efficiencies that `change` returns."""
    return [Row(table, row, change) for table in tables() for row in table["rows"]]


def unseen_rows(change: Change | None = None) -> list[Row]:
    """Return the rows of all papers but the one whose block times the model uses."""
    return [row for row in all_rows(change) if row.paper != CALIBRATION]


if __name__ == "__main__":
    found = all_rows()
    PAGE.write_text(page(found))
    print(f"{PAGE}: {len(found)} rows")
