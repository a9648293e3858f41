"""`python -m benchmarks.published`: dry runs of ResNet-50 and BERT-large, beside what others measured and published.

The tables are in `figures/published/`. It writes `docs/published_programs.md`, in about two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from math import log
from pathlib import Path
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.bert import Bert
from simparallel.base.dry_new import uninitialized
from simparallel.machine import achieved
from simparallel.machine.cluster import describe
from simparallel.machine.device import DeviceSpec

CHECKOUT = Path(__file__).resolve().parents[1]
TABLES, PAGE = CHECKOUT / "figures" / "published", CHECKOUT / "docs" / "published_programs.md"
# A name of the tables -> the preset, and what its device has in place of its own.
HARDWARE: dict[str, tuple[str, dict[str, Any]]] = {
    "a100_80gb": ("dgx-a100", {}),
    "a100_40gb": ("dgx-a100", {"memory_bandwidth_bytes_per_s": 1.555e12, "memory_bytes": 40 * 10**9}),
    "h100": ("dgx-h100", {}),
    "h200": ("h200-8", {}),
    "b200": ("b200-8", {}),
}
CHANNELS_LAST = {"memory_format": "channels_last"}
# Tokens of a sequence of SQuAD.
SQUAD = 384


class Run:
    """One published step.

    Attributes:
        table: name of its table.
        published_s: its time.
    """

    def __init__(self, table: dict[str, Any], row: dict[str, Any]) -> None:
        self.row, self.table = row, table["publication"]
        self.program, self.gpus = row.get("program", table["program"]), row["gpus"]
        self.published_s = self.gpus * row["batch"] * row.get("micro_batches", 1) / row["samples_per_s"]

    def _device(self) -> DeviceSpec:
        preset, changes = HARDWARE[self.row["hardware"]]
        if self.row.get("channels_last"):
            changes = changes | CHANNELS_LAST
        return replace(describe(1, preset).device, **changes)

    @property
    def as_pixels(self) -> Run:
        """The same step, predicted with images pixel by pixel."""
        return Run({"publication": self.table, "program": self.program}, self.row | {"channels_last": True})

    def step_s(self, micro_batches: int = 1) -> float:
        """Return the predicted time of a step of one micro-batch, or of a few."""
        row, is_mixed = self.row, self.row["type"] == "mixed"
        # Autocast leaves the parameters of ResNet-50 in float32; Apex trains BERT in float16.
        dtype = "tf32" if not is_mixed else "float32" if self.program == "resnet50" else "float16"
        cluster = replace(describe(self.gpus, HARDWARE[row["hardware"]][0]), device=self._device(), dtype=dtype)
        arguments = self.program, row["batch"], row.get("length", SQUAD), is_mixed, self.gpus > 1, micro_batches
        return sp.dry_run(train, arguments, cluster=cluster, world_size=self.gpus, unknown=0.0).step_time_s

    @cached_property
    def predicted_s(self) -> float:
        """The predicted time of the step; all its micro-batches but the last take the same time."""
        one, count = self.step_s(), self.row.get("micro_batches", 1)
        return one if count == 1 else one + (count - 1) * (self.step_s(2) - one)

    @property
    def error(self) -> float:
        """The logarithm of the predicted time over the published one."""
        return log(self.predicted_s / self.published_s)

    def line(self) -> list[str]:
        """Return the cells of its row."""
        row = self.row
        batch = f"{row['batch']} x {row['micro_batches']}" if "micro_batches" in row else str(row["batch"])
        where = row.get("where", f"{self.program}, length {row.get('length', SQUAD)}")
        return [
            row["hardware"], row["type"], "channels last" if row.get("channels_last") else "", str(self.gpus), batch,
            f"{self.published_s * 1e3:.4g}", f"{self.predicted_s * 1e3:.4g}", f"{self.error:+.2f}", where,
        ]  # fmt: skip


def train(program: str, batch: int, length: int, is_mixed: bool, is_parallel: bool, micro_batches: int) -> None:
    """Take two training steps; the images have no data."""
    if program == "resnet50":
        model: sp.nn.Module = sp.models.resnet50(num_classes=1000)
        if is_mixed:
            sp.nn.auto_mixed_precision(model, "O2")
        x, y = sp.Tensor(uninitialized((batch, 3, 224, 224), np.float32)), np.zeros(batch, np.int64)
        optimizer: sp.optim.Optimizer = sp.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    else:
        model = Bert(stores_scores=True, answers=program == "bert_squad")
        x, y = sp.Tensor(np.zeros((batch, length), np.int64)), np.zeros(batch * length, np.int64)
        optimizer = sp.optim.AdamW(model.parameters())
    net = sp.parallel.DistributedDataParallel(model) if is_parallel else model
    for _ in range(2):
        optimizer.zero_grad()
        for i in range(micro_batches):
            with net.no_sync() if is_parallel and i < micro_batches - 1 else nullcontext():
                logits = net(x)
                sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), sp.Tensor(y)).backward()
        optimizer.step()


def tables() -> list[dict[str, Any]]:
    """Return the tables; their rows are dicts."""
    found = [json.loads(path.read_text()) for path in sorted(TABLES.glob("*.json"))]
    return [
        table | {"rows": [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]}
        for table in found
        if "program" in table
    ]


def runs() -> list[Run]:
    """Return the rows of all tables."""
    return [Run(table, row) for table in tables() for row in table["rows"]]


def summary(rows: Sequence[Run]) -> list[str]:
    """Return the number of rows; median and 90th percentile of the error's size; bias, its mean."""
    errors = np.array([row.error for row in rows])
    sizes = np.abs(errors)
    numbers = np.median(sizes), np.quantile(sizes, 0.9)
    return [str(len(rows)), *(f"{number:.2f}" for number in numbers), f"{errors.mean():+.2f}"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


INTRODUCTION = """\
# Published steps of ResNet-50 and BERT-large beside dry runs

`sp.dry_run` predicts training steps that PyTorch's users published, on GPUs described by presets.
`python -m benchmarks.published` writes this page from the tables in `figures/published/`, where each row has its
source. No constant was fitted to these rows: those of convolutions and norms were fitted to single operations of
PyTorch 2.11 on one H100, of other sizes than those of ResNet-50 and BERT-large
(`tests/machine/h100_operations.json`). All stand, with their sources, in `simparallel/machine/achieved.py`
(sha256 `{digest}`).
[Published steps beside predictions](published.md) has those of GPTs, by closed forms.

The error is the logarithm of the predicted time over the published one; the bias is its mean.
"""
READING = """\
What to read from it:

* Lambda's images lie plane by plane, and so do NVIDIA's in TF32: without the copies and the norms of planes, steps are
  predicted at half of their time.
* Speeds of single operations were measured on an H100 alone. On a B200 steps of planes in mixed precision take a third
  longer than predicted, and so do those of BERT.
* Eight A100 of Lambda take 10 to 60 % longer for a step than one, those of NVIDIA's DGX in TF32 4 %; predicted is the
  DGX. In mixed precision, NVIDIA's eight GPUs take 20 % longer; whether they wait for images is not known.
* BERT on SQuAD stores scores of 384 x 384 for each head, and reads them in a chain of small kernels. On NVIDIA's A100,
  16 sequences in TF32 took as long as 42 in float16.
"""


def source(table: dict[str, Any]) -> str:
    """Return where a table comes from, how the copy was checked, and what had to be assumed."""
    parts = [f"{table['url']}: {table['where']}", table["software"], f"Checked: {table['checked']}"]
    return ". ".join([*parts, f"Assumed: {table['assumed']}"]) + "."


def digest() -> str:
    """Return the hash of the constants."""
    return sha256(Path(achieved.__file__).read_bytes()).hexdigest()[:16]


def page(rows: Sequence[Run]) -> str:
    """Return the text of the page."""
    groups = [(name, list(group)) for name, group in groupby(rows, lambda row: row.table)]
    body = [[name, *summary(group)] for name, group in groups]
    for program, title in (("resnet50", "ResNet-50"), ("bert", "BERT-large")):
        of_program = [row for row in rows if row.program.startswith(program)]
        body.append([f"{title}, all", *summary(of_program)])
        body.append(["of these, one GPU", *summary([row for row in of_program if row.gpus == 1])])
        if program == "resnet50":
            body.append(["all, with images pixel by pixel", *summary([row.as_pixels for row in of_program])])
    lines = [
        INTRODUCTION.format(digest=digest()),
        *markdown(("table", "rows", "median size of the error", "90th percentile", "bias"), body),
        "",
        READING,
    ]
    head = ("GPU", "type", "images", "GPUs", "batch of each", "published [ms]", "predicted [ms]", "error", "where")
    for table, (name, group) in zip(tables(), groups, strict=True):
        lines += [f"## {name}", "", source(table), "", *markdown(head, (row.line() for row in group)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    found = runs()
    PAGE.write_text(page(found))
    print(f"{PAGE}: {len(found)} rows")
