"""`simparallel demo`: train on real digits with four device processes, and again with one."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import simparallel as sp
from simparallel.base import units
from simparallel.cli import run_folder
from simparallel.errors import InputError
from simparallel.parallel import max_difference_between_ranks
from simparallel.runtime.launcher.launch import Results

logger = logging.getLogger(__name__)
# INFO records go to the merged log of all ranks.
logger.setLevel(logging.INFO)
# Two buckets for this small model, so that the timeline shows communication during backward.
BUCKET_CAP_MB = 0.034


def train(epochs: int, global_batch_size: int, label: str) -> dict[str, Any]:
    """Train the MLP 64-128-64-10 on this rank's part of the digits; the code is the same for any number of ranks."""
    # The same initial weights in both runs.
    sp.manual_seed(0)
    model = sp.nn.Sequential(
        sp.nn.Linear(64, 128), sp.nn.ReLU(), sp.nn.Linear(128, 64), sp.nn.ReLU(), sp.nn.Linear(64, 10)
    )
    ddp = sp.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    digits = sp.data.digits("train")
    sampler = sp.data.DistributedSampler(digits)
    batch_size = sp.data.per_rank_batch_size(global_batch_size)
    # Only full batches: the mean of the ranks' means is then the mean of the whole batch, as on one device.
    loader = sp.data.DataLoader(digits, batch_size, sampler=sampler, drop_last=True)
    optimizer = sp.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loss_fn = sp.nn.CrossEntropyLoss()

    num_samples, loss = 0, None
    for epoch in sp.progress(range(epochs), label):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = loss_fn(ddp(images), labels)
            sp.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_samples += len(labels)
        # Ranks that are threads have no logs of their own.
        if threading.current_thread() is threading.main_thread():
            print(f"epoch {epoch}: loss {loss:.4f} after {num_samples} samples")
    logger.info("trained on %d samples", num_samples)

    return {
        "samples": num_samples,
        "accuracy": accuracy(model),
        "difference_between_ranks": max_difference_between_ranks(model),
        "parameters": model.state_dict(),
    }


def accuracy(model: sp.nn.Module) -> float:
    """Return the share of test images that the model classifies correctly."""
    images, labels = sp.data.digits("test")[:]
    with sp.no_grad():
        logits = model(sp.Tensor(images))
    return float(np.mean(logits.numpy().argmax(axis=1) == labels))


def main(
    world_size: int = 4,
    epochs: int = 20,
    global_batch_size: int = 120,
    device: str | None = None,
    out: str | Path = "runs/demo",
) -> dict[str, Any]:
    """Train on `world_size` devices and on one, compare, print, and write everything to `out`.

    Returns:
        The numbers of `metrics.json`.

    Raises:
        InputError: the batch cannot be divided among the ranks, or is larger than the data set.
        ClusterError: no such cluster.
    """
    started = time.perf_counter()
    directory = Path(out)
    # This raises for bad numbers before anything starts.
    sp.cluster.describe(world_size, device)
    each = sp.data.per_rank_batch_size(global_batch_size, world_size)
    have = len(sp.data.digits("train"))
    # The sampler gives each rank this many samples, rounded up.
    if each > -(-have // world_size):
        raise InputError(f"a batch of {global_batch_size} samples is more than all {have} digits; use fewer.")
    print(
        f"Training an MLP 64-128-64-10 on {len(sp.data.digits('train'))} handwritten digits, "
        f"{epochs} epochs, batch {global_batch_size}."
    )
    # Two curves need two names, even with one device.
    labels = (units.format_number_of(world_size, "device"), "1 device" if world_size > 1 else "1 device, once more")
    many = sp.launch(
        train,
        (epochs, global_batch_size, labels[0]),
        world_size=world_size,
        device=device,
        log_dir=directory,
        log_files=run_folder.FILES,
        echo=False,
    )
    # The same function on one device: the reference for losses and parameters.
    # One BLAS thread, as on ranks that share the cores: for products this small, a second one only costs time.
    one = sp.launch(
        train, (epochs, global_batch_size, labels[1]), world_size=1, device=device, echo=False, blas_threads=1
    )

    numbers = compare(many, one)
    numbers["wall_time_s"] = time.perf_counter() - started
    print()
    print(many.trace.table())
    print()
    print(f"test accuracy                     {numbers['test_accuracy']:.1%}")
    print(f"test accuracy of one device       {numbers['test_accuracy_one_device']:.1%}")
    print(f"largest difference between ranks  {numbers['difference_between_ranks']:g} (bit for bit)")
    print(f"largest difference to one device  {numbers['difference_to_one_device']:.1e} (sums in another order)")
    written = run_folder.write_trace(directory, many.trace)
    written.append(many.trace.html(directory / "trace.html"))
    written += run_folder.write_losses(
        directory,
        {
            label: run_folder.mean_over_ranks(run.metrics, "loss")
            for label, run in zip(labels, (many, one), strict=True)
        },
    )
    written.append(run_folder.write_metrics(directory, many.trace, many.metrics, numbers))
    # Ranks that are threads have no logs.
    logs = [directory / "scheduler.log", *(directory / f"worker_{rank}.log" for rank in range(world_size))]
    written += [path for path in logs if path.exists()]
    print("\nwritten:", *written, sep="\n  ")
    print(
        "Open trace.html in a browser, or trace.json at https://ui.perfetto.dev; timeline.png shows two of its steps."
    )
    return numbers


def compare(many: Results, one: Results) -> dict[str, Any]:
    """Return the figures that should agree between the two runs, and their differences."""
    reference = one[0]["parameters"]
    # Rank 0 alone: `difference_between_ranks` compares it with the others.
    differences = [float(np.abs(values - reference[name]).max()) for name, values in many[0]["parameters"].items()]
    return {
        "test_accuracy": many[0]["accuracy"],
        "test_accuracy_one_device": one[0]["accuracy"],
        "difference_between_ranks": many[0]["difference_between_ranks"],
        "difference_to_one_device": max(differences),
        "samples": [result["samples"] for result in many],
    }
