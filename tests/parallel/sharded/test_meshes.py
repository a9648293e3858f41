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
from simparallel.parallel import Pipeline, fully_shard, implicit_replication

AXES = "pp", "dp", "shard", "tp"
MOST_RANKS, LENGTH, STEPS = 8, 3, 3
LETTERS = "SSS", "RPS", "RSS"


class Kind(NamedTuple):
    layers: int
    heads: int
    width: int
    head_size: int
    vocabulary: int


# Odd widths, of which an axis cuts no dim evenly.
EVEN, ODD = Kind(8, 8, 8, 1, 13), Kind(2, 3, 7, 3, 11)


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]  # of the last step; on a mesh with the index of the rank's slice
    weights: dict[str, Any]
    collectives: Counter[tuple[str, tuple[str, ...]]]  # (name, axes) of forward and backward of the last step


def _network(kind: Kind) -> Any:
    """Return a GPT-2: tied embeddings, and one product for queries, keys and values, whose rows are in heads."""
    sp.set_seed(5)
    return sp.models.Decoder(
        kind.vocabulary, kind.layers, kind.heads, kind.width, head_size=kind.head_size, num_positions=LENGTH,
        is_gated=False, has_layer_norm=True, has_qkv_bias=True, has_bias=True, is_tied=True, dtype=np.float64,
    )  # fmt: skip


def _loss(logits: Any, labels: Any) -> Any:
    return sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _batch(samples: int, vocabulary: int) -> Any:
    numbers = np.random.default_rng(samples).integers(0, vocabulary, (samples, LENGTH + 1))
    return numbers[:, :-1], numbers[:, 1:]


def _optimizers(name: str, parameters: Any) -> list[Any]:
    """Return an optimizer for all of them; beside Muon, which takes matrices, Adam for the others."""
    own = [p for p in parameters if p.ndim == 2 or name != "Muon"]
    others = [p for p in parameters if p.ndim != 2 and name == "Muon"]
    return [getattr(sp.optim, name)(own, 0.01), *([sp.optim.Adam(others, 0.01)] if others else [])]


@cache
def _alone(samples: int, kind: Kind, name: str = "Adam") -> Found:
    network = _network(kind)
    optimizers = _optimizers(name, list(network.parameters()))
    x, y = _batch(samples, kind.vocabulary)
    losses, norms = [], []
    for _ in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        loss = _loss(network(x), sp.Tensor(y))
        loss.backward()
        norms.append(sp.optim.clip_grad_norm_(network.parameters(), 0.5))
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    named = list(network.named_parameters())
    return Found(losses, norms, {n: p.grad.numpy() for n, p in named}, {n: p.numpy() for n, p in named}, Counter())


def _stages(count: int, layers: int) -> list[list[str]]:
    """Return stages of as many blocks each, or one more; the last one also uses the token table."""
    stages: list[list[str]] = [[] for _ in range(count)]
    for i in range(layers):
        stages[i * count // layers].append(f"blocks.{i}")
    stages[0][:0] = ["tokens", "positions"]
    stages[-1] += ["norm", "tokens.weight"]
    return stages


def _axes_of(mesh: Any, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the axes along which these ranks differ."""
    places = [mesh.coordinate(rank) for rank in ranks]
    return tuple(name for name, along in zip(AXES, zip(*places, strict=True), strict=True) if len(set(along)) > 1)


def _train(sizes: tuple[int, ...], letters: str, axis: Any, kind: Kind, name: str = "Adam") -> Found:
    mesh, rank = sp.Mesh(sizes, AXES), sp.get_rank()
    pp, dp, shard, tp = sizes
    network: Any = _network(kind)
    if tp > 1:
        sp.distribute_module(network, sp.Layout.of_mesh(mesh.part(("tp",), rank)), network.cuts("tp"))
    settings: Any = dict(zip(("parameter", "gradient", "state"), letters, strict=False), mesh=mesh, axis=axis)
    if letters == "DDP":
        groups = [sp.new_group(ranks) for ranks in mesh.groups(("dp", "shard"))]
        own_group = next(group for group in groups if group.rank is not None)
        network = sp.parallel.DistributedDataParallel(network, process_group=own_group)
    elif letters:
        for block in network.blocks:
            fully_shard(block, **settings)
        # Outside of a pipeline, one group has the rest.
        fully_shard(network.norm if pp > 1 else network, **settings)
    replicas = dp * shard
    x, y = _batch(2 * replicas, kind.vocabulary)
    number = mesh.group(("dp", "shard"), rank).index(rank)
    x, y = x[2 * number : 2 * number + 2], y[2 * number : 2 * number + 2]
    if pp > 1:
        pipeline = Pipeline(network, _loss, 2, mesh=mesh, stages=_stages(pp, kind.layers))
        run, parameters = lambda: pipeline.step(x, y), pipeline.parameters()
        clip: Any = pipeline.clip_grad_norm_
        named = list(pipeline.named_parameters())
    else:
        parameters = list(network.parameters())
        named = [(name.removeprefix("module."), p) for name, p in network.named_parameters()]

        def clip(limit: float) -> float:
            return sp.optim.clip_grad_norm_(parameters, limit)

        def run() -> Any:
            with implicit_replication(mesh.group("tp", rank)):
                loss = _loss(network(x), sp.Tensor(y))
                loss.backward()
                return loss.full_tensor()

    optimizers = _optimizers(name, parameters)
    losses, norms = [], []
    recorder, counts = current_recorder(), Counter[Any]()
    assert recorder is not None
    for _ in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        begin = len(recorder.events)
        loss = run()
        events = [e for e in recorder.events[begin:] if e.kind == "collective" and len(e.group) > 1]
        counts = Counter((e.name, _axes_of(mesh, e.group)) for e in events)
        losses.append(loss.item() if pp > 1 else sp.all_reduce(loss.data.copy(), "mean").item())
        norms.append(clip(0.5))
        for each in optimizers:
            each.step()
    if pp > 1:
        # Of the loss, over all ranks.
        counts -= Counter([("all_reduce", _axes_of(mesh, mesh.ranks))])

    def own_part(x: Any, shape: tuple[int, ...]) -> Any:
        place = x.placement
        return (... if place is None else place.layout.slices(rank, shape)), x.data.copy()

    gradients = {name: own_part(p.grad, p.shape) for name, p in named}
    return Found(losses, norms, gradients, {name: own_part(p, p.shape) for name, p in named}, counts)


def _check(
    sizes: tuple[int, ...], letters: str, axis: Any, kind: Kind, name: str = "Adam", transport: str = "inline"
) -> None:
    found = sp.launch(_train, (sizes, letters, axis, kind, name), world_size=prod(sizes), transport=transport)
    expected = _alone(2 * sizes[1] * sizes[2], kind, name)
    covered = {name: np.zeros(value.shape, bool) for name, value in expected.gradients.items()}
    for each in found:
        np.testing.assert_allclose(each.losses, expected.losses, rtol=1e-10)
        np.testing.assert_allclose(each.norms, expected.norms, rtol=1e-10)
        for own, of_one in ((each.gradients, expected.gradients), (each.weights, expected.weights)):
            for name, (index, value) in own.items():
                np.testing.assert_allclose(value, of_one[name][index], rtol=1e-8, atol=1e-13, err_msg=name)
                covered[name][index] = True
    assert all(np.all(parts) for parts in covered.values())


MESHES = [sizes for sizes in product(range(1, MOST_RANKS + 1), repeat=4) if 1 < prod(sizes) <= MOST_RANKS]
CASES = [(sizes, EVEN) for sizes in MESHES] + [(sizes, ODD) for sizes in MESHES if sizes[0] == 1]


def _param(sizes: tuple[int, ...], kind: Kind) -> Any:
    is_cheap = prod(sizes) <= 4 and (kind is EVEN or sizes == (1, 1, 2, 2))
    name = "-".join(map(str, sizes)) + "-odd" * (kind is ODD)
    return pytest.param(sizes, kind, id=name, marks=() if is_cheap else pytest.mark.matrices)


@pytest.mark.parametrize(("sizes", "kind"), [_param(*case) for case in CASES])
def test_every_mesh_equals_one_rank(sizes, kind):
    number = MESHES.index(sizes) + (kind is ODD)
    # In a pipeline a group sums along "dp", too, or leaves that to the pipeline.
    axis = ("dp", "shard") if number % 2 or sizes[0] == 1 else "shard"
    _check(sizes, LETTERS[number % len(LETTERS)], axis, kind)


@pytest.mark.parametrize("name", ["Muon", "LAMB", "LARS"])
@pytest.mark.parametrize(
    ("sizes", "letters", "kind"),
    [
        ((1, 1, 2, 2), "SSS", ODD), ((1, 1, 4, 1), "RPS", ODD), ((1, 2, 2, 1), "RSS", ODD), ((1, 1, 1, 3), "", ODD),
        ((2, 1, 2, 1), "SSS", EVEN), ((2, 1, 1, 2), "", EVEN),
    ],
    ids=str,
)  # fmt: skip
def test_optimizers_that_read_whole_tensors(name, sizes, letters, kind):
    """Also where the ranks of other stages have other parameters."""
    _check(sizes, letters, ("dp", "shard"), kind, name)


def test_list_of_meshes_is_whole(capsys):
    """The number of meshes of n ranks is that of ordered products of four factors: for p^k, (k + 3 over 3)."""
    counts = [len([sizes for sizes in MESHES if prod(sizes) == ranks]) for ranks in range(2, MOST_RANKS + 1)]
    assert counts == [4, 4, 10, 4, 16, 4, 20]
    with capsys.disabled():
        print(f" {len(MESHES)} meshes, {len(CASES)} cases ", end="")


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [((1, 1, 2, 2), ODD), pytest.param((2, 1, 2, 2), EVEN, marks=pytest.mark.matrices)],
    ids=["shard-tp", "pp-shard-tp"],
)
def test_collectives_are_those_of_each_group(sizes, kind):
    """Tensor parallelism needs as many as without data parallelism, and that as many as without tensor parallelism."""

    def counts(sizes: tuple[int, ...]) -> Any:
        found = sp.launch(_train, (sizes, "SSS", "shard", kind), world_size=prod(sizes), transport="inline")
        return {sp.Mesh(sizes, AXES).coordinate(rank): each.collectives for rank, each in enumerate(found)}

    pp, dp, shard, tp = sizes
    both, of_data, of_stages = counts(sizes), counts((pp, dp, shard, 1)), counts((pp, 1, 1, tp))
    for place, found in both.items():
        data, stages = of_data[*place[:3], 0], of_stages[place[0], 0, 0, place[3]]
        assert {key: n for key, n in found.items() if "tp" not in key[1]} == data
        assert {key: n for key, n in found.items() if key[1] == ("tp",)} == {
            k: n for k, n in stages.items() if k[1] == ("tp",)
        }
        if pp == 1:
            assert data == {
                ("all_gather", ("shard",)): 2 * kind.layers + 1,
                ("reduce_scatter", ("shard",)): kind.layers + 1,
            }


def _resumed(sizes: tuple[int, ...], folder: Any, restores: bool) -> dict[str, Any]:
    """Train on the same batch on all ranks: save after two steps, or restore, and train one more."""
    mesh, rank = sp.Mesh(sizes, AXES), sp.get_rank()
    network: Any = _network(ODD)
    if restores:
        for p in network.parameters():
            p.data[...] = 0
    sp.distribute_module(network, sp.Layout.of_mesh(mesh.part(("tp",), rank)), network.cuts("tp"))
    for part in (*network.blocks, network):
        fully_shard(part, mesh, ("dp", "shard"))
    optimizer, manager = sp.optim.Adam(network.parameters(), 0.01), sp.train.CheckpointManager(folder)
    x, y = _batch(2, ODD.vocabulary)

    def step() -> None:
        optimizer.zero_grad()
        with implicit_replication(mesh.group("tp", rank)):
            _loss(network(x), sp.Tensor(y)).backward()
        optimizer.step()

    if restores:
        manager.restore(model=network, optimizer=optimizer)
    else:
        step(), step()
        manager.save(2, model=network, optimizer=optimizer)
    step()
    whole: dict[str, Any] = network.full_state_dict()
    return whole


@pytest.mark.parametrize(
    ("saved", "restored"), [((1, 1, 2, 2), (1, 1, 1, 3)), ((1, 2, 1, 2), (1, 1, 2, 2)), ((1, 1, 1, 1), (1, 1, 2, 2))]
)
def test_checkpoints_go_from_mesh_to_mesh(tmp_path, saved, restored):
    """Slices of slices are saved as parts of the whole tensors, and so is the state of the optimizer."""
    expected = sp.launch(_resumed, (saved, tmp_path, False), world_size=prod(saved), transport="inline")[0]
    for found in sp.launch(_resumed, (restored, tmp_path, True), world_size=prod(restored), transport="inline"):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("name", ["Adam", "Muon"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 2, 2), pytest.param((2, 1, 2, 2), marks=pytest.mark.matrices)], ids=["shard-tp", "pp-shard-tp"]
)
def test_dry_run_of_a_mesh_has_the_same_events(sizes, name):
    """Values that cross stages have layouts there by plans alone; ranks that are alike run once."""
    arguments = sizes, "SSS", "shard", ODD, name
    real = sp.launch(_train, arguments, world_size=prod(sizes), transport="inline", record="full")
    dry = sp.dry_run(_train, arguments, world_size=prod(sizes))
    found = [
        sorted((e.rank, e.stream, e.name, e.kind, e.sim_start_ps, e.sim_end_ps, e.size_bytes) for e in run.trace.events)
        for run in (real, dry)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("sizes", [(1, 2, 1, 2), (1, 3, 1, 1)], ids=str)
def test_data_parallelism_beside_cut_layers(sizes):
    """`DistributedDataParallel` averages slices, and a norm counts the copies of each slice once."""
    _check(sizes, "DDP", "shard", ODD)


@pytest.mark.process
def test_mesh_of_processes():
    _check((1, 1, 2, 2), "SSS", "shard", ODD, transport="shm")
