"""`python -m benchmarks step --array cupy`: training steps on a GPU, beside PyTorch eager on the same one, and a floor.

Events on the device measure the time around all steps of a turn, so the host's part counts where the device waits for
it. Both compute products in full float32, without TF32. The floor is the predicted time of the same
step on a device with the measured ceilings of this one, and no cost of kernel launches. The prediction comes from
a dry run with the calibration of this GPU, which has seen none of these steps. The captured step launches
forward and backward as one graph, see `captured`; it is measured after the others, and not predicted.

`python -m benchmarks step --cluster dgx-h100` needs no GPU: it prints the predictions of these steps, and of some of
transformers, for the described devices, by the type that they compute in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.bert import Bert
from benchmarks.contest import Result, measure, table
from benchmarks.step import LEARNING_RATE, TURN_S, Step, Task, chosen_tasks, mlp, our_step, tokens, torch_step
from simparallel import models
from simparallel.arrays.cuda.device import Gpu, gpu_of_rank, use_gpu
from simparallel.arrays.host.windows import scratch
from simparallel.backend import check_gpu_library, get_namespace, place, set_float32_matmul_precision
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_seconds
from simparallel.machine.cluster import ClusterSpec, describe, this_gpu_file
from simparallel.machine.device import DeviceSpec
from simparallel.predict.calibration import calibrate
from simparallel.predict.gpu_calibration import changed, gpu_fingerprint
from simparallel.predict.prediction import Prediction
from simparallel.simulate.config import read_config
from simparallel.simulate.program import decoder

# Rows and columns of the matrices that are multiplied; the vectors that are copied have 16 times as many elements.
CEILING_SIZE = 4096
CAPTURED = "simparallel, captured"
GPT = {"num_layers": 12, "num_heads": 12, "width": 768}
TASKS = (
    Task("MLP 784-512-512-10, batch 256", mlp, "mlp", 256, (784,)),
    Task("LeNet-5 28x28, batch 64", models.lenet5, "lenet", 64, (1, 28, 28)),
    Task("ResNet-50 224x224, batch 64", partial(models.resnet50, 10), "resnet50", 64, (3, 224, 224)),
    Task(
        "GPT 12 layers, d 768, T 512, batch 16",
        partial(models.gpt, 256, 512, **GPT),
        "gpt_small",
        16,
        (512, 256),
        tokens,
    ),
)
# Types of a described device; "autocast" is that of a program in mixed precision.
TYPES = ("float32", "tf32", "autocast", "bfloat16", "float8")


def _llama(
    layers: int, width: int, heads: int, kv_heads: int, inner: int, length: int, count: int, is_again: bool = False
) -> Task:
    """Return the training of a Llama on `count` sequences; if so, backward computes each block again."""
    config = {
        "model_type": "llama", "vocab_size": 32_000, "tie_word_embeddings": False, "num_hidden_layers": layers,
        "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
    }  # fmt: skip
    title = f"Llama {layers} layers, d {width}, T {length}, batch {count}" + ", recomputed" * is_again
    make = partial(decoder, read_config(config, length), is_again, np.dtype(np.float32))
    return Task(title, make, "", count, (length, 32_000), tokens)


# With AdamW; predicted alone.
BERT = Task("BERT-large, T 128, batch 32", Bert, "", 32, (128, 30_522), tokens)
TRANSFORMERS = (
    BERT,
    _llama(16, 2048, 16, 16, 5504, 2048, 1),
    _llama(16, 2048, 16, 16, 5504, 2048, 4),
    _llama(16, 2048, 16, 16, 5504, 2048, 4, is_again=True),
    _llama(6, 4096, 32, 8, 14_336, 4096, 2),
)
# A function that records an event, and one that returns the seconds between two events.
Clock = tuple[Callable[[], Any], Callable[[Any, Any], float]]


def clock_of(xp: Any) -> Clock:
    """Return (record, seconds between two records): events of the device, or the host's time of a simulated one."""
    cuda = getattr(xp, "cuda", None)
    if cuda is None:
        return time.perf_counter, lambda first, last: last - first

    def record() -> Any:
        event = cuda.Event()
        event.record()
        return event

    def elapsed_s(first: Any, last: Any) -> float:
        last.synchronize()
        return cuda.get_elapsed_time(first, last) / 1e3

    return record, elapsed_s


def torch_clock() -> Clock:
    """Return the same for PyTorch."""
    import torch

    def record() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(first: Any, last: Any) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    return record, elapsed_s


def repeated(clock: Clock, step: Step, count: int) -> float:
    """Return the seconds that `count` steps take on the device."""
    record, elapsed_s = clock
    first = record()
    for _ in range(count):
        step()
    return elapsed_s(first, record())


def ceilings(xp: Any, repeats: int = 10) -> DeviceSpec:
    """Return a device with the best rates of float32 products and of memory, of `repeats` each, and no launch cost."""
    clock, size = clock_of(xp), CEILING_SIZE
    a, c = xp.ones((size, size), "float32"), xp.empty((size, size), "float32")
    x, y = xp.ones(16 * size * size, "float32"), xp.empty(16 * size * size, "float32")
    product_s, copy_s = (
        min(repeated(clock, work, 1) for _ in range(repeats))
        for work in (lambda: xp.matmul(a, a, out=c), lambda: xp.add(x, 1, out=y))
    )
    return DeviceSpec("this GPU", {4: 2 * size**3 / product_s}, 2 * x.nbytes / copy_s, 10**18, 0.0)


def floor_s(task: Task, device: DeviceSpec) -> float:
    """Return the predicted time [s] of a step on a device."""
    return predicted(task, replace(describe(1), device=device), steps=1).makespan_s


def predicted(
    task: Task, cluster: ClusterSpec, optimizer_type: Callable[..., Any] = sp.optim.SGD, steps: int = 3
) -> Prediction:
    """Return the prediction of steps of a task on a cluster of one rank."""

    def program() -> None:
        step = our_step(task.ours(), task.batch(task.batch_size, *task.shape), optimizer_type)
        for _ in range(steps):
            step()

    return sp.dry_run(program, cluster=cluster, unknown=0.0)


def tell_described(cluster: str, names: list[str] | None = None) -> None:
    """Print the predicted steps on described devices, by the type that they compute in."""
    rows: list[tuple[str, ...]] = [("training step", "type", "predicted", "allocated")]
    for task in chosen_tasks(names, (*TASKS, *TRANSFORMERS)):
        optimizer_type = sp.optim.AdamW if task in TRANSFORMERS else sp.optim.SGD
        for dtype in ("bfloat16",) if task in TRANSFORMERS[1:] else TYPES:
            ours, spec = task.ours, describe(1, cluster, dtype="float32" if dtype == "autocast" else dtype)
            if dtype == "autocast":
                ours = partial(_mixed, ours)
            found = predicted(replace(task, ours=ours), spec, optimizer_type)
            rows.append((task.title, dtype, format_seconds(found.step_time_s), format_bytes(found.software_bytes)))
    print(*aligned(rows, "<<>>"), sep="\n")


def _mixed(make: Callable[[], Any]) -> Any:
    """Return a model in mixed precision, as `torch.autocast` computes: its parameters stay float32."""
    return sp.nn.auto_mixed_precision(make(), "O2")


def calibrated(anew: bool, tell: Callable[[str], object]) -> ClusterSpec:
    """Return the calibration of the first GPU: the stored one if it fits, else a new one, which is stored.

    Args:
        anew: measure in any case.
        tell: called with lines about the progress.
    """
    gpu = gpu_of_rank(0)
    with use_gpu(gpu):
        spec = ClusterSpec.load(this_gpu_file()) if this_gpu_file().exists() else None
        why = "there is no calibration" if spec is None else changed(spec, gpu_fingerprint(gpu))
    if spec is not None and not why and not anew:
        return spec
    tell(f"calibrating the GPU, two minutes or more: {why or 'asked for'}")
    return calibrate(array="cupy", tell=tell)


def on_gpu(task: Task, *, is_captured: bool = False) -> Step:
    """Return our step of a task on the GPU; if captured, forward and backward are one launch of a graph."""
    batch = tuple(place(np.ascontiguousarray(array), 0) for array in task.batch(task.batch_size, *task.shape))
    net = task.ours().to("cuda:0")
    if not is_captured:
        return our_step(net, batch)
    optimizer = sp.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    inputs, labels = batch[0], batch[1].reshape(-1)

    @sp.captured
    def loss_of(inputs: Any, labels: Any) -> Any:
        logits = net(sp.Tensor(inputs))
        loss = sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), sp.Tensor(labels))
        loss.backward()
        return loss

    def step() -> None:
        optimizer.zero_grad()
        loss_of(inputs, labels)
        optimizer.step()

    return step


def captured_s(task: Task, xp: Any, rounds: int) -> list[float]:
    """Return the seconds of a captured step in each round, measured alone: only one of our models is in memory."""
    with use_gpu(Gpu(0)):
        turn = partial(repeated, clock_of(xp), on_gpu(task, is_captured=True))
        times_s = measure(task.title, {CAPTURED: turn}, rounds=rounds, turn_s=TURN_S).times_s[CAPTURED]
        del turn
        reserved_bytes("simparallel", xp)
    return times_s


def torch_on_gpu(task: Task) -> Step | None:
    """Return torch's step of a task; None without a torch that has a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    batch = task.batch(task.batch_size, *task.shape)
    return torch_step(task.theirs().cuda(), batch, "cuda")


def reserved_bytes(who: str, xp: Any) -> int | None:
    """Return the device memory that a library has reserved for a task, and free the unused part; None without a GPU."""
    if who == "PyTorch":
        import torch

        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peak
    if not hasattr(xp, "get_default_memory_pool"):
        return None
    pool = xp.get_default_memory_pool()
    # A pool grows only, so its size is the peak. The next task begins without the work arrays of this one.
    peak = pool.total_bytes()
    scratch.clear()
    pool.free_all_blocks()
    return int(peak)


def main(
    *, rounds: int = 7, names: list[str] | None = None, as_json: bool = False, calibrate: bool = False
) -> list[Result]:
    """Measure, print a table or JSON, return the results.

    Args:
        rounds: turns of each contender.
        names: measure only models with one of these in their titles.
        as_json: print JSON, not tables.
        calibrate: calibrate the GPU, even if the stored calibration fits.

    Raises:
        InputError: no GPU that CuPy can use, or no model has one of `names` in its title.
    """
    check_gpu_library()
    set_float32_matmul_precision("highest")
    tasks, results = chosen_tasks(names, TASKS), []
    xp = get_namespace(place(np.empty(0), 0))
    cluster = calibrated(calibrate, partial(print, file=sys.stderr, flush=True))
    device = ceilings(xp)
    reserved_bytes("simparallel", xp)
    for task in tasks:
        ours = on_gpu(task)
        turns = {"simparallel": partial(repeated, clock_of(xp), ours)}
        theirs = torch_on_gpu(task)
        if theirs is not None:
            turns["PyTorch"] = partial(repeated, torch_clock(), theirs)
        result = measure(task.title, turns, rounds=rounds, turn_s=TURN_S)
        result.extra = {"floor_s": floor_s(task, device), "predicted_s": predicted(task, cluster).step_time_s}
        # Free the arrays of the steps first: then the next task begins with empty pools.
        del ours, theirs, turns
        memory = {f"peak_bytes {who}": reserved_bytes(who, xp) for who in result.times_s}
        result.extra |= {name: value for name, value in memory.items() if value is not None}
        result.times_s[CAPTURED] = captured_s(task, xp, rounds)
        results.append(result)
        if not as_json:
            print(table([result], "simparallel"), summary(result), sep="\n", flush=True)
    if as_json:
        rows = [{"model": r.title, "median_s": {n: r.median_s(n) for n in r.times_s}, **r.extra} for r in results]
        print(json.dumps(rows, indent=1))
    if "PyTorch" not in results[0].times_s:
        print("no PyTorch with a GPU is installed, so nothing stands beside", file=sys.stderr)
    return results


def summary(result: Result) -> str:
    """Return the floor, the prediction with its error, and the memory of a result as a line."""
    floor, prediction = (float(str(result.extra[name])) for name in ("floor_s", "predicted_s"))
    median_s = result.median_s("simparallel")
    memory = [f"{n.split()[1]} {format_bytes(float(str(v)))}" for n, v in result.extra.items() if "peak" in n]
    text = f"  {median_s / floor:.1f} times the floor of {format_seconds(floor)}"
    text += f"; predicted {format_seconds(prediction)} ({prediction / median_s - 1:+.0%})"
    return f"{text}; memory {', '.join(memory)}" if memory else text
