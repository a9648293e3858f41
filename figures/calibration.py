"""Steps of training programs on this machine, predicted beside measured.

Run `simparallel calibrate` first. Measures by turns, and writes `docs/calibration.md` and its picture. None of these
programs is one of those that the calibration was fitted to (`simparallel/predict/measuring.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import simparallel as sp
from simparallel import functions as F, models
from simparallel.base.units import format_seconds
from simparallel.machine.cluster import describe, this_host_file
from simparallel.parallel import distribute_module, distribute_tensor, implicit_replication
from simparallel.predict.calibration import table as calibration_table
from simparallel.predict.measuring import Sample, op_samples

FIGURES = Path(__file__).parent
PAGE = FIGURES.parent / "docs" / "calibration.md"
PICTURE = FIGURES / "calibration.png"
MEASURED = "5 minutes, and `simparallel calibrate` before it"
STEPS, ROUNDS = 12, 5  # the first two steps do not count


class Network(NamedTuple):
    """A network, the shape of a sample, and the cuts of its tensor-parallel form; `below` bounds integers."""

    make: Callable[[], Any]
    shape: tuple[int, ...]
    cuts: dict[str, tuple[str, ...]] | None = None
    below: int = 0


_COLUMNS, _ROWS = ("tp", "None"), ("None", "tp")
NETWORKS = {
    "MLP": Network(models.mlp, (784,), {"1.weight": _COLUMNS, "1.bias": ("tp",), "3.weight": _ROWS}),
    "LeNet-5": Network(models.lenet5, (1, 28, 28)),
    "ResNet-18": Network(partial(models.resnet18, 10, "cifar"), (3, 32, 32)),
    "GPT": Network(models.gpt, (64,), {"*.up.weight": _COLUMNS, "*.up.bias": ("tp",), "*.down.weight": _ROWS}, 256),
}


class Row(NamedTuple):
    """A program: a network, samples of each data-parallel rank, and the parallel sizes."""

    network: str
    batch_size: int
    data: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @property
    def form(self) -> str:
        forms = {(False, False): "one device", (True, False): "data", (False, True): "tensor"}
        return forms.get((self.data > 1, self.tensor > 1), "mixed")


ROWS = (
    *(Row("MLP", batch_size) for batch_size in (32, 256)),
    *(Row("LeNet-5", batch_size) for batch_size in (16, 64)),
    *(Row("ResNet-18", batch_size) for batch_size in (2, 5, 8)),
    *(Row("GPT", batch_size) for batch_size in (4, 16)),
    *(
        Row(network, batch_size, data)
        for network, batch_size in (("MLP", 64), ("LeNet-5", 32), ("ResNet-18", 2), ("GPT", 4))
        for data in (2, 4, 8)
    ),
    *(
        Row(network, batch_size, 1, tensor)
        for network, batch_size in (("MLP", 128), ("GPT", 8))
        for tensor in (2, 4, 8)
    ),
    *(
        Row(network, batch_size, data, tensor)
        for network, batch_size in (("MLP", 64), ("GPT", 4))
        for data, tensor in ((2, 2), (2, 4), (4, 2))
    ),
)  # fmt: skip


def train(row: Row, steps: int = STEPS) -> list[float]:
    """Train; return the time [s] of each step after the first two."""
    network = NETWORKS[row.network]
    generator = np.random.default_rng(0)
    sp.manual_seed(0)
    net = network.make()
    whole = (row.batch_size * (row.data if row.tensor > 1 else 1), *network.shape)
    if network.below:
        inputs = generator.integers(0, network.below, whole)
        labels = inputs.reshape(-1)
    else:
        inputs = generator.standard_normal(whole, dtype=np.float32)
        labels = generator.integers(0, 10, whole[0])
    if row.tensor > 1:
        layout = sp.Layout((row.data, row.tensor), ("dp", "tp"))
        net = distribute_module(net, layout, network.cuts)
        inputs = distribute_tensor(inputs, layout("dp", *["None"] * (inputs.ndim - 1)))
        labels = distribute_tensor(labels, layout("dp"))
    else:
        net = sp.parallel.DistributedDataParallel(net) if row.data > 1 else net
        inputs, labels = sp.Tensor(inputs), sp.Tensor(labels)
    optimizer = sp.optim.SGD(net.parameters(), lr=1e-4)
    times = []
    with implicit_replication():
        for _ in range(steps):
            start = time.perf_counter()
            logits = net(inputs)
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
    return times[2:]


class Result(NamedTuple):
    """A row with its measured and predicted time of a step.

    Attributes:
        measured_s: median of the steps of the quietest round.
        deviation_s: median absolute deviation of these steps.
        noise: how much longer the next quiet round took, in measured times.
        usual_s: median of the steps of all rounds.
        flops: of all ranks in a step.
    """

    row: Row
    measured_s: float
    deviation_s: float
    noise: float
    usual_s: float
    flops: int
    predicted_s: float
    interval_s: tuple[float, float, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def measure() -> list[Result]:
    """Measure each row, by turns, and predict it."""
    times: dict[Row, list[list[float]]] = {row: [] for row in ROWS}
    with ExitStack() as stack:
        clusters = {count: stack.enter_context(sp.Cluster(count, blas_threads=1)) for count in (1, 2, 4, 8)}
        for _ in range(ROUNDS):
            for row in ROWS:
                # Rank 0's steps: the collectives of each step keep the ranks together.
                times[row].append(clusters[row.ranks].run(train, row)[0])
    results = [result(row, rounds) for row, rounds in times.items()]
    for each in results:
        print(each.row, f"{each.measured_s * 1e3:.2f} ms", f"{each.error:+.1%}", f"noise {each.noise:.1%}", flush=True)
    return results


def result(row: Row, rounds: list[list[float]]) -> Result:
    prediction = sp.dry_run(train, (row, 4), world_size=row.ranks, cluster="this-host")
    quietest, following = sorted(rounds, key=np.median)[:2]
    measured_s = float(np.median(quietest))
    deviation_s = float(np.median(np.abs(np.subtract(quietest, measured_s))))
    own = [event for event in prediction.trace.events if event.rank == prediction.stands_for[0]]
    flops = row.ranks * sum(event.flops for event in own if event.step == own[-1].step)
    assert prediction.interval_s is not None
    return Result(
        row, measured_s, deviation_s, float(np.median(following)) / measured_s - 1, float(np.median(rounds)), flops,
        prediction.step_time_s, prediction.interval_s,
    )  # fmt: skip


def sampled(row: Row) -> list[Sample]:
    """Train on one rank; return the measured operations of a step."""
    return op_samples(partial(train, row))


def whole_s(samples: list[Sample]) -> float:
    return sum(sample.time_s for sample in samples)


def profile() -> str:
    """Return a table of the operations that err most, in the largest program of each network on one device."""
    costs = describe(1, "this-host").device.op_costs
    largest = {row.network: row for row in ROWS if row.ranks == 1}
    lines = ["| network | operation | times | measured | predicted | of the step |", "|---|---|---|---|---|---|"]
    with sp.Cluster(1, blas_threads=1) as cluster:
        for name, row in largest.items():
            # The quietest round, as for the programs.
            samples = min((cluster.run(sampled, row)[0] for _ in range(ROUNDS)), key=whole_s)
            step_s, by_name = whole_s(samples), {}
            for sample in samples:
                by_name.setdefault(sample.name, []).append((sample.time_s, costs[sample.name].time_s(*sample[1:4])))
            sums = {op: (len(each), *map(sum, zip(*each, strict=True))) for op, each in by_name.items()}
            for op, (count, measured_s, predicted_s) in sorted(sums.items(), key=lambda x: -abs(x[1][1] - x[1][2]))[:3]:
                lines.append(
                    f"| {name} | {op} | {count} | {format_seconds(measured_s)} | {format_seconds(predicted_s)} | "
                    f"{(predicted_s - measured_s) / step_s:+.1%} |"
                )
    return "\n".join(lines)


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation of numbers that all differ."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(ranks)[0, 1])


def correlation(results: list[Result]) -> float:
    return rank_correlation([each.measured_s for each in results], [each.predicted_s for each in results])


def summary(results: list[Result]) -> str:
    """Return a table of errors: of all programs, by network, and by form."""
    groups = {"all": results}
    groups |= {name: [each for each in results if each.row.network == name] for name in NETWORKS}
    forms = dict.fromkeys(each.row.form for each in results)
    groups |= {form: [each for each in results if each.row.form == form] for form in forms}
    lines = ["| programs | rows | median error | 90th percentile | rank correlation |", "|---|---|---|---|---|"]
    for name, found in groups.items():
        errors = [abs(each.error) for each in found]
        lines.append(
            f"| {name} | {len(found)} | {np.median(errors):.1%} | {np.quantile(errors, 0.9):.1%} | "
            f"{correlation(found):.2f} |"
        )
    return "\n".join(lines)


def rows_table(results: list[Result]) -> str:
    lines = [
        "| network | samples | data | tensor | measured | deviation | noise | usual | predicted | p10 to p90 | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        row, (low_s, _, high_s) = each.row, each.interval_s
        shown = each.measured_s, each.deviation_s, each.usual_s, each.predicted_s, low_s, high_s
        times = [format_seconds(time_s) for time_s in shown]
        lines.append(
            f"| {row.network} | {row.batch_size} | {row.data} | {row.tensor} | {times[0]} | {times[1]} | "
            f"{each.noise:.0%} | {times[2]} | {times[3]} | {times[4]} to {times[5]} | {each.error:+.1%} |"
        )
    return "\n".join(lines)


def guess_error(results: list[Result]) -> float:
    """Return the median error of the guess that every program does as many flops a second."""
    rate = float(np.median([each.flops / each.measured_s for each in results]))
    return float(np.median([abs(each.flops / rate / each.measured_s - 1) for each in results]))


def draw_results(results: list[Result]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.6), layout="constrained")
    ends = np.array([0.6 * min(r.measured_s for r in results), 1.6 * max(r.measured_s for r in results)])
    for width, shade in ((0.2, "0.93"), (0.1, "0.85")):
        axes.fill_between(ends, ends * (1 - width), ends * (1 + width), color=shade, lw=0, label=f"within {width:.0%}")
    axes.plot(ends, ends, color="0.5", lw=0.8)
    marks = {"one device": "o", "data": "s", "tensor": "^", "mixed": "D"}
    colors = dict(zip(NETWORKS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True))
    for name, color in colors.items():
        for form, mark in marks.items():
            found = [each for each in results if (each.row.network, each.row.form) == (name, form)]
            if found:
                axes.scatter(
                    [each.measured_s for each in found], [each.predicted_s for each in found],
                    marker=mark, color=color, s=34, edgecolor="white", lw=0.6, label=f"{name}, {form}", zorder=3,
                )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured time of a step [s]", ylabel="predicted time of a step [s]")
    axes.set_title("Steps on this machine, predicted after simparallel calibrate", loc="left", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    for suffix in (".png", ".svg"):
        sp.view.save_figure(figure, PICTURE.with_suffix(suffix), dpi=130)


def page(results: list[Result]) -> str:
    unquiet = [abs(each.predicted_s / each.usual_s - 1) for each in results]
    return TEMPLATE.format(
        count=len(results),
        rounds=ROUNDS,
        steps=STEPS - 2,
        calibration=calibration_table(describe(1, "this-host")),
        summary=summary(results),
        rows=rows_table(results),
        profile=profile(),
        reached=reached(results),
        guess=guess_error(results),
        noise=float(np.median([each.noise for each in results])),
        noisy=float(np.quantile([each.noise for each in results], 0.9)),
        slower=float(np.median([each.usual_s / each.measured_s for each in results])) - 1,
        usual=float(np.median(unquiet)),
        usual_most=float(np.quantile(unquiet, 0.9)),
        inside=sum(each.interval_s[0] <= each.measured_s <= each.interval_s[2] for each in results),
    )


def reached(results: list[Result]) -> str:
    """Say whether the aim was reached."""
    errors = [abs(each.error) for each in results]
    middle, most, order = float(np.median(errors)), float(np.quantile(errors, 0.9)), correlation(results)
    return "\n".join(
        f"* {name}: {value}, {'reached' if is_reached else 'missed'}."
        for name, value, is_reached in (
            ("Median error, at most 10%", f"{middle:.1%}", middle <= 0.1),
            ("90th percentile, at most 20%", f"{most:.1%}", most <= 0.2),
            ("Rank correlation, at least 0.9", f"{order:.2f}", order >= 0.9),
        )
    )


TEMPLATE = """# Runs on this machine, predicted

`simparallel calibrate` measures the machine that it runs on, and writes the description `this-host`. A dry run with
`cluster="this-host"`, or `simparallel predict --cluster this-host`, then tells how long a run takes here. This page
holds such predictions beside measured runs; `python -m figures calibration` writes it.

## Measurements

* **Operations**, forward and backward, and the steps of optimizers: in small training programs on one rank with one
  BLAS thread, from the end of the operation before, so that the interpreter's part is in it. The cost is a constant,
  and a time for each flop, each byte and each result, fitted to relative errors, of which outliers count less; the four
  nearest measured shapes correct it. *Results* are the elements of an op's output, or the tensors that an optimizer
  changes: products of equal flops and bytes are faster the longer their inner dim is.
* **Collectives** of 8 B to 64 MiB on 2, 4 and 8 ranks: latency and bandwidth in segments of sizes. Where ranks share
  the cores, a group of some ranks waits for the others as the group of all does, so it has the time of all ranks.
  The wait for ranks that still compute is measured apart, with a barrier behind each step of short training programs,
  and added.
* **Sharing**: how much slower a rank is while 1, 3 or 7 others train, too. The cores also do the communication, so it
  never overlaps with computing, even if the program starts it early.

All this is measured in five rounds, of which the quietest counts for each number: other programs on the machine can
only slow it down. So a prediction is the time of a step on a quiet machine.

Residuals are errors of what a fit has not seen: an operation without its own shape, a program without its own
operations, every third size of a collective. From them a prediction has `interval_s`, p10, p50 and p90 of the time of
a step.

```
{calibration}
```

## How good it is

{count} programs that were not used for the fit, measured by turns in {rounds} rounds of {steps} steps each, from the
third step on. The measured time is the median of the quietest round, as in the calibration; *deviation* is the median
absolute deviation of its steps, and *noise* is how much longer the next quiet round took: its median is {noise:.1%},
its 90th percentile {noisy:.1%}.

{reached}

The machine was shared, and other programs ran on it now and then. The median of the steps of all rounds, *usual*, is
longer than the measured time by {slower:.0%} in the median row. Against it, the predictions have a median error of
{usual:.1%}, and a 90th percentile of {usual_most:.1%}.

No constant is fitted to these programs, but they are not unseen: the sweep was extended with common shapes, and the
wait for late ranks, the results and the quietest rounds were added, after errors in these rows. The sweep has the
shapes of nearly all convolutions of ResNet-18 with 2 and 8 samples, and of LeNet-5's first one with 64; rows with other
sizes show more of what to expect.

The guess that every program does as many flops a second has a median error of {guess:.0%}. {inside} of {count}
measured times lie between p10 and p90.

{summary}

![Predicted against measured time of a step](../figures/calibration.png)

## Every program

*Samples* are per data-parallel rank; *data* and *tensor* are the parallel sizes, and their product is the
number of ranks.

{rows}

## Where the error is

The three operations of each network, on one device, that err most; the last column is their error in parts of the step.

{profile}
"""


def main() -> None:
    if not this_host_file().exists():
        sys.exit(f"{this_host_file()} is missing; run simparallel calibrate first.")
    results = measure()
    print(summary(results), rows_table(results), reached(results), f"guess {guess_error(results):.1%}", sep="\n\n")
    draw_results(results)
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
