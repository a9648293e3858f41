"""ZeRO changes no arithmetic: losses and weights are those of DistributedDataParallel, bit for bit."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused
from sharded_programs import LETTERS, OPTIMIZERS, CheckpointInside, CheckpointOutside, Trained, gpt, mlp, shard, train

import simparallel as sp
from simparallel.clock.recorder import current_recorder
from simparallel.optim.owners import longest_first

MODELS = {"mlp": mlp, "gpt": gpt}
PAIR = ("replicate", "shard")


def run(ranks: int, *args: Any, **kwargs: Any) -> list[Trained]:
    """Train, or return what `DistributedDataParallel` found before, which many cases compare with."""
    return (_expected if args[1] == "DDP" else _run)(ranks, *args, **kwargs)


def _run(ranks: int, *args: Any, **kwargs: Any) -> list[Trained]:
    return list(sp.launch(train, args, kwargs, world_size=ranks, transport="inline"))


_expected = cache(_run)


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.losses == b.losses
        assert a.weights.keys() == b.weights.keys()
        for name, value in a.weights.items():
            np.testing.assert_array_equal(value, b.weights[name], err_msg=name)


def assert_close(found: list[Trained], expected: list[Trained]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.losses, b.losses, rtol=1e-5)
        for name, value in a.weights.items():
            np.testing.assert_allclose(value, b.weights[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize(("model", "ranks", "optimizer"), [("mlp", 3, "adamw"), ("gpt", 4, "momentum")])
def test_steps_equal_ddp(model, ranks, optimizer, letters):
    assert_same(run(ranks, MODELS[model], letters, optimizer), run(ranks, MODELS[model], "DDP", optimizer))


@pytest.mark.parametrize("letters", ["RPS", "SSS"])
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 1), ("mlp", 2), ("mlp", 3), ("mlp", 4), ("gpt", 3)])
def test_matrices_on_owners_equal_ddp(model, ranks, letters):
    """Each rank makes some matrices orthogonal, of which it has slices, uneven and empty ones."""
    found = run(ranks, MODELS[model], letters, "muon")
    assert_same(found, run(ranks, MODELS[model], "DDP", "muon"))
    assert {each.collectives["all_to_all"] for each in found} == {2 * (ranks > 1)}
    if (model, ranks) == ("mlp", 2):
        # The first rank owns 9 x 7, of which the other has 4 rows; this one owns 7 x 5 and 3 x 9, but for 3 rows and 1.
        assert [each.sent_bytes["all_to_all"] for each in found] == [4 * (4 * 5 + 2 * 9 + 4 * 7)] * 2


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_largest_load_of_owners(costs, ranks):
    """At most 4/3 - 1/(3 ranks) of the least possible one (Graham)."""

    def largest(owners):
        return max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks))

    best = min(map(largest, product(range(ranks), repeat=len(costs))))
    assert 3 * ranks * largest(longest_first(costs, [0] * ranks)) <= (4 * ranks - 1) * best


@pytest.mark.matrices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_all_steps_equal_ddp(model, optimizer):
    for ranks in (1, 2, 5):
        expected = run(ranks, MODELS[model], "DDP", optimizer)
        for letters in LETTERS:
            assert_same(run(ranks, MODELS[model], letters, optimizer), expected)


@pytest.mark.process
def test_processes_equal_ddp(processes):
    assert_same(*(processes.run(2, train, gpt, letters, "adam") for letters in ("SSS", "DDP")))


@pytest.mark.parametrize("letters", ["RSS", "SSS"])
@pytest.mark.parametrize("checkpoint", [CheckpointInside, CheckpointOutside])
def test_recomputed_parts(letters, checkpoint):
    found = run(3, gpt, letters, checkpoint=checkpoint)
    assert_same(found, run(3, gpt, "DDP"))
    # A part that runs again finds the parameters that its backward has gathered, and leaves them there.
    assert found[0].collectives == {"all_gather": 5 if letters == "SSS" else 3, "reduce_scatter": 3}


@pytest.mark.parametrize(
    ("letters", "synchronizes"), [("RPS", True), ("RPS", False), ("RSS", False), ("SSS", False), ("SSS", True)]
)
def test_micro_batches(letters, synchronizes):
    found = run(3, gpt, letters, "adam", micro_batches=3, synchronizes=synchronizes)
    expected = run(3, gpt, "DDP", "adam", micro_batches=3)
    waits = letters == "RPS" or not synchronizes
    # Means of each micro-batch add up in another order than those of the sum.
    (assert_same if waits else assert_close)(found, expected)
    assert found[0].collectives["reduce_scatter"] == (3 if waits else 9)
    assert found[0].collectives["all_gather"] == (15 if letters == "SSS" else 3)


def _with_dropout() -> Any:
    return sp.nn.Sequential(
        sp.nn.Linear(5, 7), sp.nn.Dropout(0.5), sp.nn.Linear(7, 9), sp.nn.Dropout(0.5), *mlp((9, 3))
    )


@pytest.mark.parametrize("letters", LETTERS)
def test_ranks_draw_the_masks_of_their_parts(letters):
    assert_same(run(3, _with_dropout, letters), run(3, _with_dropout, "DDP"))
    settings: Any = {"mesh": sp.Mesh((2, 2), PAIR), "axis": PAIR}
    assert_close(run(4, _with_dropout, letters, **settings), run(4, _with_dropout, "DDP"))


@pytest.mark.parametrize("letters", ["RPR", "RPS"])
def test_recomputed_micro_batches(letters):
    """The first run of a recomputed part decides whether its gradients wait, wherever its backward is called."""
    settings: Any = {"micro_batches": 3, "checkpoint": CheckpointOutside}
    found = run(3, gpt, letters, **settings)
    assert_same(found, run(3, gpt, "DDP", micro_batches=3))
    assert found[0].collectives["all_reduce" if letters == "RPR" else "reduce_scatter"] == 3


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (3, 2)])
def test_hybrid_sharding(letters, shape):
    ranks = shape[0] * shape[1]
    found = run(ranks, mlp, letters, "adam", mesh=sp.Mesh(shape, PAIR), axis=PAIR)
    is_one_sum = letters == "RPR" or 1 in shape
    (assert_same if is_one_sum else assert_close)(found, run(ranks, mlp, "DDP", "adam"))
    if 1 not in shape and letters == "SSS":
        assert found[0].collectives == {"all_gather": 5, "reduce_scatter": 3, "all_reduce": 3}


@pytest.mark.parametrize("letters", ["RPS", "SSS"])
def test_clipping_sees_whole_gradients(letters):
    found, expected = (run(3, gpt, each, clip=0.5) for each in (letters, "DDP"))
    assert_close(found, expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.norms, b.norms, rtol=1e-6)
        assert a.norms == found[0].norms


@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_mixed_precision_equals_ddp(letters, reduce_dtype, ranks):
    precision = sp.parallel.MixedPrecision("float16", reduce_dtype)
    found, expected = (run(ranks, mlp, each, "adam", precision=precision) for each in (letters, "DDP"))
    assert_same(found, expected)
    if ranks > 1 and letters == "SSS":
        plain = run(ranks, mlp, letters, "adam")
        assert found[0].sent_bytes["all_gather"] * 2 == plain[0].sent_bytes["all_gather"]


@pytest.mark.parametrize("letters", ["RPR", "RPS", "SSS"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_micro_batches_in_mixed_precision_equal_ddp(letters, ranks):
    """Gradients of float16 that wait for the last micro-batch add up in the dtype of the parameters."""
    settings: Any = {"precision": sp.parallel.MixedPrecision("float16"), "micro_batches": 3, "synchronizes": False}
    assert_same(run(ranks, mlp, letters, "adam", **settings), run(ranks, mlp, "DDP", "adam", **settings))


def test_one_rank_needs_no_collective():
    (found,) = run(1, gpt, "SSS", "adam")
    assert not found.collectives
    assert_same([found], run(1, gpt, "DDP", "adam"))


def _norms() -> Any:
    """Return a network whose batch norms have buffers, different ones on each rank."""
    layers = [sp.nn.Linear(5, 7), sp.nn.BatchNorm1d(7), sp.nn.Linear(7, 9), sp.nn.BatchNorm1d(9), sp.nn.Linear(9, 3)]
    for norm in layers[1::2]:
        norm.running_mean.data[...] = sp.get_rank()
    return sp.nn.Sequential(*layers)


@pytest.mark.parametrize("letters", ["RPS", "SSS"])
@pytest.mark.parametrize(("ranks", "settings"), [(3, {}), (4, {"mesh": sp.Mesh((2, 2), PAIR), "axis": PAIR})])
def test_buffers_equal_ddp(letters, ranks, settings):
    """Running statistics of the first rank, in the model and in what is saved."""
    found, expected = run(ranks, _norms, letters, **settings), run(ranks, _norms, "DDP")
    for each in found:
        for name, value in expected[0].weights.items():
            np.testing.assert_allclose(each.weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def _without_own(letters: str, drops: bool) -> Any:
    """Train a model whose parameters are all in groups of children; with `drops`, give up a micro-batch first."""
    sp.manual_seed(3)
    model, draw = mlp(), np.random.default_rng(sp.get_rank())
    if letters == "DDP":
        run: Any = sp.parallel.DistributedDataParallel(model)
    else:
        where = dict(zip(("parameter", "gradient", "state"), letters, strict=True))
        for layer in model[::2]:
            sp.parallel.fully_shard(layer, **where)
        run = sp.parallel.fully_shard(model, **where)
    step = sp.optim.Adam(model.parameters(), lr=0.01)
    for i in range(3):
        for wait in (drops, True, False):
            x, y = draw.standard_normal((4, 5)).astype(np.float32), draw.integers(0, 3, 4)
            with run.no_sync() if wait else nullcontext():
                loss = sp.functions.cross_entropy(run(x), y)
            loss.backward()
            if wait and drops:
                step.zero_grad(set_to_none=i % 2 == 0)
        step.step()
        step.zero_grad()
    return loss.item(), model.state_dict() if letters == "DDP" else run.full_state_dict()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("letters", LETTERS)
def test_root_without_parameters(letters, drops):
    """And gradients that wait are in `.grad`, where an optimizer's `zero_grad()` drops them."""
    found = sp.launch(_without_own, (letters, drops), world_size=3, transport="inline")
    expected = sp.launch(_without_own, ("DDP", drops), world_size=3, transport="inline")
    for (loss, weights), (ddp_loss, ddp_weights) in zip(found, expected, strict=True):
        np.testing.assert_allclose(loss, ddp_loss, rtol=1e-5)
        for name, value in ddp_weights.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def _gradients(letters: str, order: tuple[bool, ...], reads: bool) -> Any:
    """Return gradients of micro-batches, of which some wait; with `reads` the sums of those that wait are read."""
    sp.manual_seed(3)
    model, draw = mlp(dtype=np.float64), np.random.default_rng(sp.get_rank())
    run = sp.parallel.DistributedDataParallel(model) if letters == "DDP" else shard(model, letters)
    for waits in order:
        x, y = draw.standard_normal((4, 5)), draw.integers(0, 3, 4)
        if letters != "DDP":
            run.set_requires_gradient_sync(not waits)
        with run.no_sync() if waits and letters == "DDP" else nullcontext():
            loss = sp.functions.cross_entropy(run(x), y)
        loss.backward()
        for p in model.parameters() if reads and waits and letters != "DDP" else ():
            assert p.grad.layout.partial == ("shard",)
            assert p.grad.full_tensor().shape == p.shape
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("letters", ["RPS", "RSS", "SSS"])
def test_gradients_that_wait_join_reduced_ones(letters, reads):
    order = (False, True, True, False)
    expected = sp.launch(_gradients, ("DDP", order, False), world_size=3, transport="inline")[0]
    for found in sp.launch(_gradients, (letters, order, reads), world_size=3, transport="inline"):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-15, err_msg=name)


def _of_other_values(letters: str, mesh: Any, axis: Any) -> Any:
    sp.manual_seed(sp.get_rank())
    return shard(mlp(), letters, mesh=mesh, axis=axis)(np.ones((1, 5), np.float32)).numpy()


@pytest.mark.parametrize(("letters", "shape"), [("RPR", (1, 4)), ("RPR", (2, 2)), ("SSS", (2, 2)), ("RSS", (2, 2))])
def test_replicas_begin_equal(letters, shape):
    found = sp.launch(_of_other_values, (letters, sp.Mesh(shape, PAIR), PAIR), world_size=4, transport="inline")
    for values in found:
        np.testing.assert_array_equal(values, found[0])


def _frozen_and_tied() -> Any:
    model = gpt()
    model.positions.weight.requires_grad = False
    for p in model.blocks[0].parameters():
        p.requires_grad = False
    return model


@pytest.mark.parametrize("letters", LETTERS)
def test_frozen_parameters(letters):
    found = run(3, _frozen_and_tied, letters, "adam")
    assert_same(found, run(3, _frozen_and_tied, "DDP", "adam"))


def _integers(letters: str) -> Any:
    """Return gradients that are small integers: then all orders of a sum are equal."""
    sp.manual_seed(1)
    model = sp.nn.Sequential(*(sp.nn.Linear(6, 6, dtype=np.float64) for _ in range(3)))
    for p in model.parameters():
        p.data[...] = np.random.default_rng(p.size).integers(-2, 3, p.shape)
    run = sp.parallel.DistributedDataParallel(model) if letters == "DDP" else shard(model, letters)
    draw = np.random.default_rng(sp.get_rank())
    for _ in range(2):
        y = run(sp.Tensor(draw.integers(-3, 4, (2, 6)).astype(np.float64)))
        (y * draw.integers(-2, 3, (2, 6))).sum().backward()
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("letters", LETTERS)
def test_sums_in_any_order_are_exact(letters):
    expected = sp.launch(_integers, ("DDP",), world_size=4, transport="inline")[0]
    for found in sp.launch(_integers, (letters,), world_size=4, transport="inline"):
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name])


# --- checkpoints -------------------------------------------------------------------------------------


def _trained(letters: str, folder: Any, before: int, after: int, restores: bool) -> dict[str, Any]:
    """Train `before` steps on equal batches, save or restore, and train `after` more."""
    sp.manual_seed(0 if not restores else 5)
    model = mlp()
    shard(model, letters)
    step = sp.optim.Adam(model.parameters(), lr=0.01)
    manager = sp.train.CheckpointManager(folder)
    draw = np.random.default_rng(7)
    given = [(draw.standard_normal((4, 5)).astype(np.float32), draw.integers(0, 3, 4)) for _ in range(before + after)]

    def run_steps(which: list[Any]) -> None:
        for x, y in which:
            step.zero_grad()
            sp.functions.cross_entropy(model(x), y).backward()
            step.step()

    if restores:
        manager.restore(model=model, optimizer=step)
    else:
        run_steps(given[:before])
        manager.save(before, model=model, optimizer=step)
    run_steps(given[before:])
    return model.full_state_dict()


@pytest.mark.parametrize(("letters", "others"), [("SSS", "SSS"), ("RPS", "SSS"), ("SSS", "RPR")])
@pytest.mark.parametrize(("ranks", "other_ranks"), [(3, 2), (2, 4), (1, 3)])
def test_checkpoints_between_numbers_of_ranks(tmp_path, letters, others, ranks, other_ranks):
    """Equal batches on all ranks: the mean is the gradient of each, whatever their number."""
    saved = sp.launch(_trained, (letters, tmp_path, 2, 2, False), world_size=ranks, transport="inline")[0]
    restored = sp.launch(_trained, (others, tmp_path, 2, 2, True), world_size=other_ranks, transport="inline")
    for found in restored:
        for name, value in found.items():
            np.testing.assert_allclose(value, saved[name], rtol=1e-5, atol=1e-6, err_msg=name)


# --- pipelines ---------------------------------------------------------------------------------------


def _pipeline(letters: str, ranks: tuple[int, int], schedule: str) -> dict[str, Any]:
    sp.manual_seed(3)
    model = mlp()
    mesh = sp.Mesh(ranks, ("pp", "shard"))
    settings = dict(zip(("parameter", "gradient", "state"), letters, strict=True))
    for layer in model:
        if isinstance(layer, sp.nn.Linear):
            sp.parallel.fully_shard(layer, mesh, **settings)
    pipeline = sp.parallel.Pipeline(
        model, sp.nn.CrossEntropyLoss(), microbatches=4, schedule=schedule, mesh=mesh, balance=(3, 2)
    )
    step = sp.optim.Adam(pipeline.parameters(), lr=0.01)
    draw = np.random.default_rng(sp.get_rank() % ranks[1])
    losses = []
    for _ in range(3):
        x, y = draw.standard_normal((8, 5)).astype(np.float32), draw.integers(0, 3, 8)
        losses.append(pipeline.step(x, y).item())
        step.step()
        step.zero_grad()
    return {"losses": losses, **{name: p.full_tensor().numpy() for name, p in pipeline.named_parameters()}}


def _alone(shards: int) -> dict[str, Any]:
    sp.manual_seed(3)
    model = mlp()
    step = sp.optim.Adam(model.parameters(), lr=0.01)
    draws = [np.random.default_rng(shard_number) for shard_number in range(shards)]
    losses = []
    for _ in range(3):
        pairs = [(draw.standard_normal((8, 5)).astype(np.float32), draw.integers(0, 3, 8)) for draw in draws]
        x, y = (np.concatenate(each) for each in zip(*pairs, strict=True))
        loss = sp.functions.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        step.step()
        step.zero_grad()
    return {"losses": losses, **{name: p.numpy() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("letters", ["SSS", "RPS", "RPR"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "chimera"])
def test_pipelines_of_groups(letters, schedule):
    expected = _alone(2)
    for found in sp.launch(_pipeline, (letters, (2, 2), schedule), world_size=4, transport="inline"):
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def _accumulated(letters: str, schedule: str, ranks: tuple[int, int]) -> Any:
    """Return the gradients of two equal steps, and the sizes of this rank's reductions and of its gradients."""
    sp.manual_seed(3)
    model, mesh = mlp(dtype=np.float64), sp.Mesh(ranks, ("pp", "shard"))
    if letters:
        for layer in (layer for layer in model if isinstance(layer, sp.nn.Linear)):
            sp.parallel.fully_shard(layer, mesh, **dict(zip(("parameter", "gradient", "state"), letters, strict=True)))
    pipeline = sp.parallel.Pipeline(
        model, sp.nn.CrossEntropyLoss(), microbatches=4, schedule=schedule, mesh=mesh, balance=(3, 2)
    )
    draw = np.random.default_rng(sp.get_rank() % ranks[1])
    x, y = draw.standard_normal((8, 5)), draw.integers(0, 3, 8)
    recorder = current_recorder()
    assert recorder is not None
    pipeline.step(x, y)
    start = len(recorder.events)
    pipeline.step(x, y)
    names, along = ("reduce_scatter", "all_reduce"), mesh.group("shard", sp.get_rank())
    sizes = [e.sent_bytes for e in recorder.events[start:] if e.name in names and e.group == along]
    shapes = [p.shape for p in pipeline.parameters()]
    return {name: p.grad.full_tensor().numpy() for name, p in pipeline.named_parameters()}, sizes, shapes


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe_reversed", "zb_h1", "chimera"])
def test_partial_gradients_of_a_pipeline_wait(schedule):
    """They are reduced in the last backward of a stage, sharded ones in each; then the pipeline sums both over stages
    with equal parameters. The numbers are those of a pipeline that sums afterwards."""
    ranks = 3
    expected = sp.launch(_accumulated, ("", schedule, (2, ranks)), world_size=2 * ranks, transport="inline")
    for letters in ("RPR", "RPS", "RSS"):
        found = sp.launch(_accumulated, (letters, schedule, (2, ranks)), world_size=2 * ranks, transport="inline")
        for (own, sizes, shapes), (whole, _, _) in zip(found, expected, strict=True):
            # Half of the micro-batches pass each of a rank's two stages of Chimera, which has all layers.
            count = 1 if letters[1] == "P" else 2 if schedule == "chimera" else 4
            elements = sum(math.prod(shape) for shape in shapes)
            padded = sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes)
            sent = 2 * elements if letters == "RPR" else padded
            assert len(sizes) == count * len(shapes) // 2
            assert sum(sizes) == count * sent * 8 * (ranks - 1) // ranks
            for name, value in own.items():
                np.testing.assert_allclose(value, whole[name], rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("letters", ["RPR", "RPS"])
def test_gradients_that_wait_for_another_step(letters):
    """Ranks of Chimera share all parameters: gradients of two steps are reduced, and summed over the stages, once."""

    def program() -> Any:
        sp.manual_seed(3)
        model, mesh = mlp(dtype=np.float64), sp.Mesh((2, 2), ("pp", "shard"))
        layers = [layer for layer in model if isinstance(layer, sp.nn.Linear)]
        for layer in layers:
            sp.parallel.fully_shard(layer, mesh, **dict(zip(("parameter", "gradient", "state"), letters, strict=True)))
        pipeline = sp.parallel.Pipeline(
            model, sp.nn.CrossEntropyLoss(), microbatches=4, schedule="chimera", mesh=mesh, balance=(3, 2)
        )
        draw, found = np.random.default_rng(sp.get_rank() % 2), []
        x, y = draw.standard_normal((8, 5)), draw.integers(0, 3, 8)
        for waits in (False, True):
            for layer in layers:
                layer.set_requires_gradient_sync(not waits)
            pipeline.step(x, y)
            for layer in layers:
                layer.set_requires_gradient_sync(True)
            pipeline.step(x, y)
            found.append({name: p.grad.full_tensor().numpy() for name, p in pipeline.named_parameters()})
            for p in pipeline.parameters():
                p.grad = None
        pipeline.step(x, y)
        layers[0].set_requires_gradient_sync(False)
        with refused(sp.errors.InputError):
            pipeline.step(x, y)
        return found

    for at_once, later in sp.launch(program, world_size=4, transport="inline"):
        for name, value in later.items():
            np.testing.assert_allclose(value, at_once[name], rtol=1e-12, atol=1e-15, err_msg=name)


class _Table(sp.nn.Embedding):
    """A table that looks rows up for integers, and returns scores of its rows for vectors."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.dtype.kind == "i" else sp.functions.linear(x, self.weight)


class _Tied(sp.nn.Module):
    """A network whose first and last child are one, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = _Table(13, 5, dtype=np.float64), sp.nn.Linear(5, 5, dtype=np.float64)
        self.norm, self.head = sp.nn.LayerNorm(5, dtype=np.float64), self.tokens

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.body(self.tokens(x))))


def _train_tied(letters: str, schedule: str) -> tuple[list[float], Any]:
    sp.manual_seed(3)
    model, mesh = _Tied(), sp.Mesh((2, 2) if letters else (1, 1), ("pp", "shard"))
    if letters:
        for part in (model.tokens, model.body):
            sp.parallel.fully_shard(part, mesh, **dict(zip(("parameter", "gradient", "state"), letters, strict=True)))
    stages = [["tokens", "body"], ["norm", "head"]]
    pipeline: Any = sp.parallel.Pipeline(
        model, sp.functions.cross_entropy, 4, schedule, [sum(stages, [])[:3]] if not letters else stages, mesh=mesh
    )
    step, (x, y) = sp.optim.Adam(pipeline.parameters(), lr=0.01), np.random.default_rng(5).integers(0, 13, (2, 16))
    part = slice(*(16 * n // pipeline.replicas for n in (pipeline.replica, pipeline.replica + 1)))
    found = []
    for _ in range(3):
        step.zero_grad()
        # Gradients of several steps add up.
        found += [pipeline.step(x[part], y[part]).item() for _ in range(2)]
        found.append(pipeline.clip_grad_norm_(0.5))
        step.step()
    return found, {name: p.full_tensor().numpy() for name, p in pipeline.named_parameters()}


@pytest.mark.parametrize(("letters", "schedule"), [("SSS", "1f1b"), ("RPS", "zb_h1"), ("SSS", "chimera")])
def test_tied_table_may_be_stored_in_slices(letters, schedule):
    """A child with a name in each of two stages gathers its group in both; the pipeline sums slices of its gradient."""
    expected, weights = sp.launch(_train_tied, ("", "gpipe"), world_size=1, transport="inline")[0]
    for found, own in sp.launch(_train_tied, (letters, schedule), world_size=4, transport="inline"):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        for name, value in own.items():
            np.testing.assert_allclose(value, weights[name], rtol=1e-8, atol=1e-12, err_msg=name)


# --- whole parameters on one rank each ----------------------------------------------------------------


def _divided(optimizer: str, letters: str, saved: Any = None) -> Any:
    """Train with DistributedDataParallel; return losses, the whole state, and the elements of this rank's state."""
    sp.manual_seed(3)
    model, draw = sp.parallel.DistributedDataParallel(mlp()), np.random.default_rng(sp.get_rank())
    if letters == "ZeRO":
        make = type(OPTIMIZERS[optimizer](mlp().parameters()))
        settings = OPTIMIZERS[optimizer](mlp().parameters()).param_groups[0]
        own = {name: settings[name] for name in ("lr", "momentum", "weight_decay") if name in settings}
        step: Any = sp.parallel.ZeroRedundancyOptimizer(model.parameters(), make, **own)
    else:
        step = OPTIMIZERS[optimizer](model.parameters())
    if saved is not None:
        model.module.load_state_dict(saved[0])
        step.load_state_dict(saved[1])
    losses = []
    for _ in range(3):
        x, y = draw.standard_normal((4, 5)).astype(np.float32), draw.integers(0, 3, 4)
        step.zero_grad()
        loss = sp.functions.cross_entropy(model(x), y)
        loss.backward()
        step.step()
        losses.append(loss.item())
    if letters == "ZeRO":
        if sp.get_world_size() > 1:
            with pytest.raises(sp.errors.InputError, match="consolidate_state_dict"):
                step.state_dict()
        step.consolidate_state_dict(to=None)
    arrays = [x for state in step.state.values() for x in state.values() if hasattr(x, "size")]
    return losses, (model.module.state_dict(), step.state_dict()), sum(x.size for x in arrays)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_divided_optimizer_has_the_bits_of_the_whole(optimizer, ranks):
    """On 8 ranks two have no parameter. A state that was collected is loaded on another number of ranks."""
    runs = [sp.launch(_divided, (optimizer, kind), world_size=ranks, transport="inline") for kind in ("ZeRO", "DDP")]
    sizes = [size for _, _, size in runs[0]]
    assert sum(sizes) == runs[1][0][2]
    assert max(sizes) <= sum(sizes) / ranks + 63 * 2
    for (losses, (weights, state), _), (ddp_losses, (ddp_weights, ddp_state), _) in zip(*runs, strict=True):
        assert losses == ddp_losses
        for name, value in ddp_weights.items():
            np.testing.assert_array_equal(weights[name], value)
        assert state["state"].keys() == ddp_state["state"].keys()
        for i, values in ddp_state["state"].items():
            for name, value in values.items():
                np.testing.assert_array_equal(state["state"][i][name], value)
    again = [
        sp.launch(_divided, (optimizer, kind, each[0][1]), world_size=2, transport="inline")
        for kind, each in zip(("ZeRO", "DDP"), runs, strict=True)
    ]
    assert [losses for losses, _, _ in again[0]] == [losses for losses, _, _ in again[1]]


def test_divided_muon_has_the_bits_of_the_whole():
    def program(divides: bool) -> Any:
        sp.manual_seed(3)
        model = sp.parallel.DistributedDataParallel(mlp())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        make = partial(sp.parallel.ZeroRedundancyOptimizer, optimizer_class=sp.optim.Muon) if divides else sp.optim.Muon
        step = make(matrices, lr=0.1)
        for _ in range(3):
            model(np.eye(5, dtype=np.float32)[sp.get_rank() :]).sum().backward()
            step.step()
        return len(step.state), [p.numpy() for p in matrices]

    divided, whole = (sp.launch(program, (each,), world_size=2, transport="inline") for each in (True, False))
    assert sorted(count for count, _ in divided) == [1, 2]
    for (_, found), (_, expected) in zip(divided, whole, strict=True):
        np.testing.assert_equal(found, expected)


def test_divided_optimizer_refuses_slices():
    def program() -> None:
        model = shard(mlp(), "SSS")
        with refused(sp.errors.InputError):
            sp.parallel.ZeroRedundancyOptimizer(model.parameters(), sp.optim.Adam)

    sp.launch(program, world_size=2, transport="inline")


def _assigned(shards: bool) -> list[Any]:
    model = mlp()
    if shards:
        shard(model, "SSS")
    for p in model.parameters():
        p.data = p.data * 2
    model(np.ones((2, 5), np.float32)).sum().backward()
    return [p.grad.full_tensor().numpy() for p in model.parameters()]


def test_values_assigned_before_the_first_step():
    sp.manual_seed(3)
    expected = _assigned(shards=False)

    def run() -> list[Any]:
        sp.manual_seed(3)
        return _assigned(shards=True)

    for found in sp.launch(run, world_size=2, transport="inline"):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
