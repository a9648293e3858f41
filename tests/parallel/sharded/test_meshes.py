"""Data, sharded, tensor and pipeline parallelism in one program: every mesh trains as one rank does."""

from __future__ import annotations

import errno
import random
from collections import Counter
from contextlib import nullcontext
from functools import cache
from itertools import product
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np
import pytest
from crashing_files import HookedFiles, Killed, dies_at, fails_at

import simparallel as sp
from simparallel.clock.recorder import current_recorder
from simparallel.errors import CheckpointError, RunFailedError
from simparallel.parallel import Pipeline, fully_shard, implicit_replication

AXES = "pp", "dp", "shard", "tp"
MOST_RANKS, LENGTH = 8, 3
# The loss of the second step has the update of the first one. Of runs that go on from a checkpoint, three.
STEPS, LONG = 2, 3
LETTERS = "SSS", "RPS", "RSS"


class Kind(NamedTuple):
    layers: int
    heads: int
    width: int
    head_size: int
    vocabulary: int
    recompute: bool = False
    schedule: str = "1f1b"


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
        recompute=kind.recompute,
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


class Prepared(NamedTuple):
    model: Any
    parameters: Any
    named: list[tuple[str, Any]]
    clip: Any
    run: Any  # (tokens, labels) of the rank's replica -> loss
    replica: int


def _prepared(sizes: tuple[int, ...], letters: str, axis: Any, kind: Kind) -> Prepared:
    mesh, rank = sp.Mesh(sizes, AXES), sp.get_rank()
    pp, _, _, tp = sizes
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
    replica = mesh.group(("dp", "shard"), rank).index(rank)
    if pp > 1:
        pipeline = Pipeline(network, _loss, 2, kind.schedule, mesh=mesh, stages=_stages(pp, kind.layers))
        named = list(pipeline.named_parameters())
        return Prepared(pipeline, pipeline.parameters(), named, pipeline.clip_grad_norm_, pipeline.step, replica)
    parameters = list(network.parameters())

    def clip(limit: float) -> float:
        return sp.optim.clip_grad_norm_(parameters, limit)

    def run(x: Any, y: Any) -> Any:
        with implicit_replication(mesh.group("tp", rank)):
            loss = _loss(network(x), sp.Tensor(y))
            loss.backward()
            return loss.full_tensor()

    named = [(name.removeprefix("module."), p) for name, p in network.named_parameters()]
    return Prepared(network, parameters, named, clip, run, replica)


def _own_part(x: Any, shape: tuple[int, ...]) -> Any:
    place = x.placement
    return (... if place is None else place.layout.slices(sp.get_rank(), shape)), x.data.copy()


def _train(sizes: tuple[int, ...], letters: str, axis: Any, kind: Kind, name: str = "Adam") -> Found:
    mesh, (pp, dp, shard, _) = sp.Mesh(sizes, AXES), sizes
    prepared = _prepared(sizes, letters, axis, kind)
    x, y = _batch(2 * dp * shard, kind.vocabulary)
    part = slice(2 * prepared.replica, 2 * prepared.replica + 2)
    optimizers = _optimizers(name, prepared.parameters)
    losses, norms = [], []
    recorder, counts = current_recorder(), Counter[Any]()
    assert recorder is not None
    for _ in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        begin = len(recorder.events)
        loss = prepared.run(x[part], y[part])
        events = [e for e in recorder.events[begin:] if e.kind == "collective" and len(e.group) > 1]
        counts = Counter((e.name, _axes_of(mesh, e.group)) for e in events)
        losses.append(loss.item() if pp > 1 else sp.all_reduce(loss.data.copy(), "mean").item())
        norms.append(prepared.clip(0.5))
        for each in optimizers:
            each.step()
    if pp > 1:
        # Of the loss, over all ranks.
        counts -= Counter([("all_reduce", _axes_of(mesh, mesh.ranks))])
    gradients = {name: _own_part(p.grad, p.shape) for name, p in prepared.named}
    return Found(losses, norms, gradients, {name: _own_part(p, p.shape) for name, p in prepared.named}, counts)


def _check(sizes: tuple[int, ...], letters: str, axis: Any, kind: Kind, name: str = "Adam", world: Any = None) -> None:
    arguments = sizes, letters, axis, kind, name
    if world is None:
        found = sp.launch(_train, arguments, world_size=prod(sizes), transport="inline")
    else:
        found = world.run(prod(sizes), _train, *arguments)
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
# Of a pipeline, two blocks for each stage, as far as there are as many.
CASES = [(sizes, EVEN._replace(layers=min(EVEN.layers, 2 * sizes[0]))) for sizes in MESHES]
CASES += [(sizes, ODD) for sizes in MESHES if sizes[0] == 1]


def _param(sizes: tuple[int, ...], kind: Kind) -> Any:
    is_cheap = prod(sizes) <= 4 and (kind is not ODD or sizes == (1, 1, 2, 2))
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
        ((2, 1, 2, 1), "SSS", EVEN._replace(layers=2)), ((2, 1, 1, 2), "", EVEN._replace(layers=2)),
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


class Run(NamedTuple):
    sizes: tuple[int, ...]
    letters: str
    axis: Any
    kind: Kind
    samples: int  # of a step, of all replicas together


class Kill(NamedTuple):
    """A save of one rank that dies, or fails as on a full disk, at a part of its file operations."""

    rank: int
    part: float
    dies: bool

    def files(self, target: int) -> Any:
        return dies_at(target) if self.dies else fails_at(target, errno.ENOSPC)


class Resumed(NamedTuple):
    step: int
    replica: int
    seen: list[list[int]]  # the numbers of the samples of each step
    weights: dict[str, Any]


def _continued(run: Run, folder: Any, copy: Any = None, kill: Kill | None = None, steps: int = LONG) -> Resumed:
    """Restore the last checkpoint if there is a `copy` to write of it, train up to a step, and save each one before."""
    sizes, rank = run.sizes, sp.get_rank()
    prepared = _prepared(*run[:4])
    optimizer = sp.optim.Adam(prepared.parameters, 0.01)
    x, y = _batch(LONG * run.samples, run.kind.vocabulary)
    replicas = sizes[1] * sizes[2]
    data = sp.data.TensorDataset(x, y, np.arange(len(x)))
    sampler = sp.data.DistributedSampler(data, replicas, prepared.replica, seed=4)
    loader = sp.data.DataLoader(data, run.samples // replicas, sampler=sampler)
    parts = {"model": prepared.model, "optimizer": optimizer, "sampler": loader}
    step, seen, done = 0, [], 0
    if copy is not None:
        step = sp.train.CheckpointManager(folder).restore(**parts).step
        sp.train.CheckpointManager(copy).save(step, **parts)
    for x, y, numbers in loader:
        optimizer.zero_grad()
        prepared.run(x.numpy(), y.numpy())
        optimizer.step()
        step += 1
        seen.append(numbers.numpy().tolist())
        if step == steps:
            break
        if copy is None and folder is not None:
            files = HookedFiles()
            if kill is not None and kill.rank == rank:
                files = kill.files(int(kill.part * done) if done else 1 << 40)
            sp.train.CheckpointManager(folder, files=files).save(step, **parts)
            done = getattr(files, "done", 0)
    return Resumed(
        step - len(seen), prepared.replica, seen, {name: _own_part(p, p.shape) for name, p in prepared.named}
    )


@cache
def _uninterrupted(samples: int, kind: Kind) -> Resumed:
    run = Run((1, 1, 1, 1), "", "shard", kind, samples)
    return sp.launch(_continued, (run, None), world_size=1, transport="inline")[0]


def _drawn(number: int) -> tuple[Run, Run, Kill | None]:
    """Draw the mesh that saves, the one that restores, and in each third case how the last save is killed."""
    draw = random.Random(number)
    by_ranks = [[sizes for sizes in [(1,) * 4, *MESHES] if prod(sizes) == n] for n in range(1, MOST_RANKS + 1)]
    both = [draw.choice(draw.choice(by_ranks)) for _ in range(2)]
    stages = max(sizes[0] for sizes in both)
    kind = ODD if stages == 1 else Kind(stages, 8, 8, 1, 13)
    samples = 2 * lcm(*(sizes[1] * sizes[2] for sizes in both))
    runs = []
    for sizes in both:
        # A pipeline alone has replicas, too.
        letters = draw.choice([*LETTERS, *["DDP"][: sizes[0] == 1], *[""][: sizes[0] > 1]])
        runs.append(Run(sizes, letters, draw.choice(["shard", ("dp", "shard")][sizes[0] == 1 :]), kind, samples))
    kill = Kill(draw.randrange(prod(both[0])), draw.random(), draw.random() < 0.7) if number % 3 == 2 else None
    return runs[0], runs[1], kill


def _arrays(folder: Any) -> Any:
    with sp.train.CheckpointManager(folder).open() as reader:
        groups = reader.state("optimizer")["param_groups"]
        return {name: reader.read(name) for name in reader.names()}, groups, reader.state("sampler")


def _when(number: int) -> Any:
    return () if number < 4 else pytest.mark.matrices if number < 15 else pytest.mark.soak


@pytest.mark.parametrize("number", [pytest.param(n, marks=_when(n)) for n in range(60)])
def test_checkpoints_go_from_mesh_to_mesh(tmp_path, number):
    """Two steps on a mesh, and one on another: the run of one rank, from the last save that was not killed."""
    first, second, kill = _drawn(number)
    folder, copy = tmp_path / "saved", tmp_path / "copy"
    with pytest.raises((RunFailedError, Killed, CheckpointError)) if kill else nullcontext():
        sp.launch(_continued, (first, folder, None, kill), world_size=prod(first.sizes), transport="inline", echo=False)
    steps = sp.train.CheckpointManager(folder).steps()
    assert steps in ([[1], [1, 2]] if kill else [[1, 2]])

    expected = _uninterrupted(first.samples, first.kind)
    results = sp.launch(_continued, (second, folder, copy), world_size=prod(second.sizes), transport="inline")
    (saved, groups, order), (again, groups_again, order_again) = _arrays(folder), _arrays(copy)
    assert saved.keys() == again.keys()
    assert groups == groups_again
    assert order == order_again
    for name, value in saved.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    assert {found.step for found in results} == {steps[-1]}
    for k, numbers in enumerate(expected.seen[steps[-1] :]):
        seen = {found.replica: found.seen[k] for found in results}
        assert sorted(sum(seen.values(), [])) == sorted(numbers)
        assert all(found.seen[k] == seen[found.replica] for found in results)
    for found in results:
        for name, (index, value) in found.weights.items():
            np.testing.assert_allclose(value, expected.weights[name][1][index], rtol=1e-8, atol=1e-13, err_msg=name)


def test_drawn_meshes_differ_in_each_axis():
    runs = [_drawn(number) for number in range(60)]
    for axis in range(4):
        assert len({(first.sizes[axis], second.sizes[axis]) for first, second, _ in runs}) > 6
    assert sum(kill is not None for _, _, kill in runs) == 20
    assert {run.letters for pair in runs for run in pair[:2]} == {*LETTERS, "", "DDP"}


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


@pytest.mark.parametrize("sizes", [(2, 1, 2, 1), (2, 1, 2, 2), (2, 2, 2, 1)], ids=str)
def test_replicas_of_a_pipeline_without_groups(sizes):
    """The axes "dp" and "shard" have different samples, and the pipeline sums along both."""
    _check(sizes, "", "shard", Kind(2, 2, 4, 2, 11))


def test_layouts_may_cut_along_any_other_axis():
    """An axis along which a parameter is cut is none of data parallelism, whatever its name."""

    def program() -> Any:
        mesh = sp.Mesh((2, 2), ("pp", "dp"))
        network = _network(Kind(2, 2, 4, 2, 11))
        sp.distribute_module(network, sp.Layout.of_mesh(mesh.part(("dp",), sp.get_rank())), network.cuts("dp"))
        pipeline = Pipeline(network, _loss, 2, mesh=mesh, stages=_stages(2, 2))
        return pipeline.replicas, pipeline.step(*_batch(2, 11)).item()

    expected = _alone(2, Kind(2, 2, 4, 2, 11)).losses[0]
    for replicas, loss in sp.launch(program, world_size=4, transport="inline"):
        assert (replicas, loss) == (1, pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize("sizes", [(1, 2, 1, 2), (1, 3, 1, 1)], ids=str)
def test_data_parallelism_beside_cut_layers(sizes):
    """`DistributedDataParallel` averages slices, and a norm counts the copies of each slice once."""
    _check(sizes, "DDP", "shard", ODD)


@pytest.mark.parametrize(
    "letters", ["", "SSS", *(pytest.param(letters, marks=pytest.mark.matrices) for letters in LETTERS[1:])]
)
def test_late_weight_gradients_of_recomputed_blocks(letters):
    """With ZB-H1 a recomputed block runs again once, and gradients of its weights come from that run."""
    kind = Kind(4, 2, 4, 2, 11, recompute=True, schedule="zb_h1")
    _check((2, 1, 2, 1) if letters else (2, 1, 1, 2), letters, "shard", kind)


@pytest.mark.process
def test_mesh_of_processes(processes):
    _check((1, 1, 2, 2), "SSS", "shard", ODD, world=processes)
