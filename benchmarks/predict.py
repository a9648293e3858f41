"""How long predictions take: a GPT on 8 and on 16,384 devices, and ResNet-50 on 8, each in a fresh process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.contest import printed_apart
from simparallel.base.units import format_bytes, format_count, format_seconds

# GPT-2 medium's blocks: 24 layers of width 1,024, sequences of 1,024 tokens.
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 24, 1024, 16, 1024, 51_200, 8


def gpt(dp: int, tp: int) -> None:
    """Take one training step of a GPT whose weights are cut by `tp`, and whose batch is cut by `dp`."""
    layout = sp.Layout((dp, tp), ("dp", "tp"))
    parallel = sp.parallel
    tokens = parallel.VocabParallelEmbedding(VOCABULARY, WIDTH, layout)
    positions = sp.nn.Embedding(LENGTH, WIDTH)
    blocks = sp.nn.ModuleList([parallel.ParallelTransformerBlock(WIDTH, HEADS, layout) for _ in range(LAYERS)])
    norm, head = sp.nn.LayerNorm(WIDTH), parallel.ColumnParallelLinear(WIDTH, VOCABULARY, layout, bias=False)
    for whole in (positions, norm):
        sp.distribute_module(whole, layout)
    modules = (tokens, positions, blocks, norm, head)
    optimizer = sp.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-4)

    ids = sp.distribute_tensor(np.zeros((BATCH * dp, LENGTH), np.int64), layout("dp", "None"))
    labels = sp.distribute_tensor(np.zeros(BATCH * dp * LENGTH, np.int64), layout("dp"))
    x = tokens(ids) + positions(sp.distribute_tensor(np.arange(LENGTH), layout("None")))
    for block in blocks:
        x = block(x)
    logits = head(norm(x)).reshape(BATCH * dp * LENGTH, VOCABULARY)
    loss = parallel.VocabParallelCrossEntropy()(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def resnet50() -> None:
    """Take one data-parallel training step of ResNet-50 on 32 images of 224 x 224 a device."""
    model = sp.parallel.DistributedDataParallel(sp.models.resnet50(num_classes=1000))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = sp.Tensor(np.zeros((32, 3, 224, 224), np.float32)), sp.Tensor(np.zeros(32, np.int64))
    sp.functions.cross_entropy(model(x), y).backward()
    optimizer.step()


# Name -> (program, its arguments, ranks, nodes).
CASES: dict[str, tuple[Callable[..., None], tuple[int, ...], int, int]] = {
    "GPT, tensor 8": (gpt, (1, 8), 8, 1),
    "GPT, tensor 8 x data 2,048": (gpt, (2048, 8), 16_384, 2048),
    "ResNet-50, data 8": (resnet50, (), 8, 1),
}


def measure(name: str) -> dict[str, Any]:
    """Predict one case in this process; return its numbers."""
    import resource

    program, args, world_size, nodes = CASES[name]
    start_s = time.perf_counter()
    prediction = sp.dry_run(program, args, world_size=world_size, nodes=nodes)
    events = {rank: sum(event.rank == rank for event in prediction.trace.events) for rank in prediction.memory}
    return {
        "seconds": time.perf_counter() - start_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ranks": world_size,
        "ranks_run": len(prediction.memory),
        "classes": len(prediction.classes),
        "events": sum(count * events[rank] for rank, count in prediction.classes.items()),
        "step_time_s": prediction.step_time_s,
        "device_peak_bytes": prediction.peak_bytes,
    }


def main(rounds: int = 3, as_json: bool = False) -> None:
    """Measure each case in fresh processes, in turn, and print the medians."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, results in found.items():
            results.append(json.loads(printed_apart(f"from benchmarks import predict; predict.tell({name!r})")))
    middle = {
        name: {key: median(result[key] for result in results) for key in results[0]} for name, results in found.items()
    }
    if as_json:
        print(json.dumps(middle, indent=1))
        return
    head = ("program", "ranks", "run", "events", "predicted in", "memory", "step", "peak of a device")
    rows = [
        (name, f"{one['ranks']:,.0f}", f"{one['ranks_run']:.0f}", format_count(one["events"]),
         format_seconds(one["seconds"]), format_bytes(one["peak_bytes"]), format_seconds(one["step_time_s"]),
         format_bytes(one["device_peak_bytes"]))
        for name, one in middle.items()
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        )
    print("predicted in: from the call to the prediction, median of fresh processes; memory: of that process at most")


def tell(name: str) -> None:
    print(json.dumps(measure(name)))
