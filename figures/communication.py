"""Which rank sends how many bytes to which: four ways to train the same GPT on eight devices in two nodes."""

from typing import Any

import numpy as np

import simparallel as sp

CLUSTER = {"world_size": 8, "nodes": 2, "node_link": sp.cluster.LinkSpec(5e-6, 25e9, notes="200 Gb/s; assumed")}
BATCH_SIZE, LENGTH = 16, 64
COLUMNS, ROWS = ("tp", "None"), ("None", "tp")
CUTS = {"*.up.weight": COLUMNS, "*.up.bias": ("tp",), "*.down.weight": ROWS}


def loss(logits: Any, labels: Any) -> Any:
    return sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def train(net: Any, tokens: Any) -> None:
    """Two steps on a batch whose labels are its tokens; before the first one, ranks also compare their models."""
    optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(net(tokens), tokens).backward()
        optimizer.step()


def model() -> sp.nn.Module:
    sp.manual_seed(0)
    return sp.models.gpt(num_layers=8)


def data_parallel() -> None:
    own = BATCH_SIZE // sp.get_world_size()
    train(sp.parallel.DistributedDataParallel(model()), sp.Tensor(np.zeros((own, LENGTH), int)))


def tensor_parallel() -> None:
    layout = sp.Layout((2, 4), ("dp", "tp"))
    net = sp.distribute_module(model(), layout, CUTS)
    with sp.parallel.implicit_replication():
        train(net, sp.distribute_tensor(np.zeros((BATCH_SIZE, LENGTH), int), layout("dp", "None")))


def pipeline() -> None:
    tokens = np.zeros((BATCH_SIZE, LENGTH), int)
    # The example shows where the model uses its tied table.
    part = tokens[: BATCH_SIZE // 8]
    pipe = sp.parallel.Pipeline(model(), loss, microbatches=8, example=(part, part))
    optimizer = sp.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipe.step(tokens, tokens)
        optimizer.step()


PANELS = (
    ("Data parallel, ring", data_parallel, "direct"),
    ("Data parallel, halving and doubling", data_parallel, "halving_doubling"),
    ("Two replicas of four tensor-parallel ranks", tensor_parallel, "direct"),
    ("Pipeline of eight stages", pipeline, "direct"),
)


def draw() -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12.5, 10.4), layout="constrained")
    for ax, (title, program, algorithm) in zip(axes.flat, PANELS, strict=True):
        trace = sp.dry_run(program, fold=False, algorithm=algorithm, **CLUSTER).trace
        matrix = trace.select(steps=1).communication_matrix()
        sp.view.plot_communication_matrix(matrix, trace.cluster.nodes, ax=ax, title=title)
    figure.supxlabel("bytes of one step, as counted; dashed: the ranks of a node", fontsize=12)
    return figure
