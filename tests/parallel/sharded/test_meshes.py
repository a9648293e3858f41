"""Data, sharded, tensor and pipeline parallelism in one program: every mesh trains as one rank does."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest

import simparallel as sp
from simparallel.clock.recorder import current_recorder
from simparallel.models import gpt
from simparallel.parallel import Pipeline, fully_shard, implicit_replication

AXES = "pp", "dp", "shard", "tp"
MOST_RANKS, LAYERS, HEADS, LENGTH, STEPS = 8, 8, 8, 3, 3
CUTS: dict[str, Any] = {
    "*.up.weight": ("tp", "None"), "*.up.bias": ("tp",), "*.down.weight": ("None", "tp"),
    "*.out.weight": ("None", "tp"), "tokens.weight": ("tp", "None"),
}  # fmt: skip
# Sharded along "shard" alone, or replicated along "dp" by the group, too.
LETTERS = ("SSS", "RPS", "RSS", "SSS")


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]  # of the last step
    weights: dict[str, Any]
    collectives: Counter[tuple[str, tuple[str, ...]]]  # (name, axes) of forward and backward of the last step


def _network(width: int, vocabulary: int) -> Any:
    sp.set_seed(5)
    network = gpt(vocabulary, LENGTH, num_layers=LAYERS, num_heads=HEADS, width=width)
    for p in network.parameters():
        p.data = p.data.astype(np.float64)
    return network


def _loss(logits: Any, labels: Any) -> Any:
    return sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _batch(samples: int, vocabulary: int) -> Any:
    numbers = np.random.default_rng(samples).integers(0, vocabulary, (samples, LENGTH + 1))
    return numbers[:, :-1], numbers[:, 1:]


@cache
def _alone(samples: int, width: int, vocabulary: int) -> Found:
    network = _network(width, vocabulary)
    optimizer = sp.optim.Adam(network.parameters(), 0.01)
    x, y = _batch(samples, vocabulary)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(network(x), sp.Tensor(y))
        loss.backward()
        norms.append(sp.optim.clip_grad_norm_(network.parameters(), 0.5))
        optimizer.step()
        losses.append(loss.item())
    named = list(network.named_parameters())
    return Found(losses, norms, {n: p.grad.numpy() for n, p in named}, {n: p.numpy() for n, p in named}, Counter())


def _stages(count: int) -> list[list[str]]:
    """Return stages of as many blocks each, the first ones of one more; the last one also uses the token table."""
    stages: list[list[str]] = [[] for _ in range(count)]
    for i in range(LAYERS):
        stages[i * count // LAYERS].append(f"blocks.{i}")
    stages[0][:0] = ["tokens", "positions"]
    stages[-1] += ["norm"] if count == 1 else ["norm", "tokens.weight"]
    return stages


def _axes_of(mesh: Any, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the axes along which these ranks differ."""
    places = [mesh.coordinate(rank) for rank in ranks]
    return tuple(name for name, along in zip(AXES, zip(*places, strict=True), strict=True) if len(set(along)) > 1)


def _train(sizes: tuple[int, ...], letters: str, axis: Any, width: int, vocabulary: int) -> Found:
    mesh, rank = sp.Mesh(sizes, AXES), sp.get_rank()
    pp, dp, shard, tp = sizes
    network: Any = _network(width, vocabulary)
    if tp > 1:
        sp.distribute_module(network, sp.Layout.of_mesh(mesh.part(("tp",), rank)), CUTS)
    settings: Any = dict(zip(("parameter", "gradient", "state"), letters, strict=False), mesh=mesh, axis=axis)
    if letters:
        for block in network.blocks:
            fully_shard(block, **settings)
        # Outside of a pipeline, one group has the rest.
        fully_shard(network.norm if pp > 1 else network, **settings)
    replicas = dp * shard
    x, y = _batch(2 * replicas, vocabulary)
    number = mesh.group(("dp", "shard"), rank).index(rank)
    x, y = x[2 * number : 2 * number + 2], y[2 * number : 2 * number + 2]
    if pp > 1:
        pipeline = Pipeline(network, _loss, 2, mesh=mesh, stages=_stages(pp))
        run, parameters = lambda: pipeline.step(x, y), pipeline.parameters()
        clip: Any = pipeline.clip_grad_norm_
        named = list(pipeline.named_parameters())
    else:
        parameters, named = list(network.parameters()), list(network.named_parameters())

        def clip(limit: float) -> float:
            return sp.optim.clip_grad_norm_(parameters, limit)

        def run() -> Any:
            with implicit_replication(mesh.group("tp", rank)):
                loss = _loss(network(x), sp.Tensor(y))
                loss.backward()
                mean = loss.full_tensor().data
            return sp.Tensor(sp.all_reduce(mean.copy(), "mean"))

    optimizer = sp.optim.Adam(parameters, 0.01)
    losses, norms = [], []
    recorder, begin = current_recorder(), 0
    assert recorder is not None
    for _ in range(STEPS):
        optimizer.zero_grad()
        begin = len(recorder.events)
        losses.append(run().item())
        counts = Counter(
            (e.name, _axes_of(mesh, e.group))
            for e in recorder.events[begin:]
            if e.kind == "collective" and len(e.group) > 1
        )
        norms.append(clip(0.5))
        optimizer.step()

    def whole(x: Any) -> Any:
        with implicit_replication(mesh.group("tp", rank)):
            return x.full_tensor().numpy().copy()

    return Found(losses, norms, {n: whole(p.grad) for n, p in named}, {n: whole(p) for n, p in named}, counts)


def _meshes() -> list[tuple[int, ...]]:
    return [sizes for sizes in product(range(1, MOST_RANKS + 1), repeat=4) if 1 < prod(sizes) <= MOST_RANKS]


MESHES = _meshes()


def _check(sizes: tuple[int, ...], letters: str, axis: Any, width: int, vocabulary: int) -> None:
    arguments = sizes, letters, axis, width, vocabulary
    found = sp.launch(_train, arguments, world_size=prod(sizes), transport="inline")
    expected = _alone(2 * sizes[1] * sizes[2], width, vocabulary)
    names = set()
    for each in found:
        np.testing.assert_allclose(each.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(each.norms, expected.norms, rtol=1e-10)
        names |= each.gradients.keys()
        for own, of_one in ((each.gradients, expected.gradients), (each.weights, expected.weights)):
            for name, value in own.items():
                np.testing.assert_allclose(value, of_one[name], rtol=1e-8, atol=1e-12, err_msg=name)
    assert names == expected.gradients.keys()


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_every_mesh_equals_one_rank(sizes):
    number = MESHES.index(sizes)
    axis = ("dp", "shard") if number % 2 or sizes[0] == 1 else "shard"
    _check(sizes, LETTERS[number % 4], axis, 8, 13)
