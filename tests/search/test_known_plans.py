"""The search finds what is known to be good, for the reasons that are known."""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

import simparallel as sp
from simparallel import nn
from simparallel.layout.sharding import placement
from simparallel.machine.cluster import describe
from simparallel.search.graph import captures
from simparallel.search.planner import graph_of, plan_graph


def _plan(network, shape, labels, loss, cluster):
    """Plan a training step on a batch of this shape, of which every device has all."""
    optimizer = sp.optim.Momentum(network.parameters(), 0.1, 0.9)
    whole = sp.Layout((8,), ("rank",))
    arrays = np.broadcast_to(np.float32(0), shape), labels
    places = [placement(whole(*["None"] * a.ndim), a.shape) for a in arrays]
    args = [sp.Tensor._result(a, placement=place) for a, place in zip(arrays, places, strict=True)]
    graph, *split = captures(partial(graph_of, lambda x, y: loss(network(x), y).backward(), args, {}))
    plan = plan_graph(graph, describe(8, cluster), split=split)
    assert optimizer
    return plan


def _classes(count, *, samples=256):
    """Return the plan of a network with this many classes."""
    with sp.no_init_parameters():
        network = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, count, bias=False))
    return _plan(network, (samples, 512), np.zeros(samples, np.int64), nn.CrossEntropyLoss(), "dgx-a100")


def test_large_batches_are_data_parallel():
    with sp.no_init_parameters():
        network = sp.models.resnet18(10)
    plan = _plan(network, (1024, 3, 224, 224), np.zeros(1024, np.int64), nn.CrossEntropyLoss(), "dgx-h100")
    convolutions = [op for op in plan.ops if op.op == "Conv2d"]
    assert len(convolutions) == 20
    assert {op.in_strategy for op in convolutions} == {((8, 1, 1, 1), (1, 1, 1, 1))}


def test_very_many_classes_are_cut():
    plan = _classes(1_000_000)
    assert plan["2.Linear"].in_strategy == ((1, 1), (8, 1))
    assert plan["CrossEntropy"].in_strategy == ((1, 8), (1,))
    # Data parallelism sums a gradient of 2 GB; here nothing of that size moves.
    assert plan.step_time_ps < plan.data_parallel_ps / 3


def test_few_classes_are_not_cut():
    """The control: with few classes and many samples, the gradient is smaller than the logits."""
    plan = _classes(64, samples=1 << 14)
    rows, classes = plan["2.Linear"].in_strategy[0][0], plan["2.Linear"].in_strategy[1][0]
    assert (rows, classes) == (8, 1)


def test_transformers_are_cut_in_columns_then_rows():
    """A sample of 2,048 tokens has no batch to cut: Megatron's pairs, with the sequence cut in between.

    Dropouts between the pairs make that worth it. On GPUs whose switch adds, an all_reduce costs less than the two
    halves of a ring, and nothing is scattered.
    """
    with sp.no_init_parameters():
        network = nn.TransformerEncoderLayer(4096, 32, 16384, dropout=0.1, batch_first=True, norm_first=True)
    target = np.broadcast_to(np.float32(0), (1, 2048, 4096))
    plan = _plan(network, (1, 2048, 4096), target, lambda y, t: ((y - t) ** 2).sum(), "dgx-a100")
    (_, _, inner), (outputs, _), _ = plan["linear1.Linear"].in_strategy
    (_, _, contracted), (_, rows), _ = plan["linear2.Linear"].in_strategy
    assert inner == 1
    assert outputs > 1
    assert contracted == rows == outputs
    # The sum of the row-cut layer is scattered over the sequence.
    assert plan["linear2.Linear"].out_strategy == (1, 8, 1)
    assert plan.step_time_ps < 0.8 * plan.data_parallel_ps


def test_one_weird_trick():
    """Krizhevsky 2014 (arXiv 1404.5997): data parallelism for convolutions, model parallelism for large layers."""
    with sp.no_init_parameters():
        network = nn.Sequential(
            nn.Conv2d(3, 96, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(),
            nn.MaxPool2d(3, 2), nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096),
            nn.ReLU(), nn.Linear(4096, 1000),
        )  # fmt: skip
    plan = _plan(network, (128, 3, 224, 224), np.zeros(128, np.int64), nn.CrossEntropyLoss(), "dgx-a100")
    assert all(op.in_strategy[0] == (8, 1, 1, 1) for op in plan.ops if op.op == "Conv2d")
    large = [op for op in plan.ops if op.op == "Linear"][:2]
    assert all(op.in_strategy[0][0] == 1 and prod(op.in_strategy[1]) == 8 for op in large)
    assert plan.step_time_ps < plan.data_parallel_ps


def test_one_device():
    network = nn.Linear(4, 4)
    parallel = sp.AutoParallel(lambda x: network(x).sum().backward(), "auto")
    parallel(np.ones((4, 4), np.float32))
    assert parallel.plan.step_time_ps == parallel.plan.data_parallel_ps
    assert parallel.plan.gap == 0
