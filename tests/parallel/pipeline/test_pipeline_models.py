"""Pipelines of models that are no Sequential: code between children, skips, tied weights, masks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError, RunFailedError, UnknownValueError
from simparallel.models import gpt
from simparallel.parallel import Pipeline
from simparallel.parallel.operator.interpreter import implicit_replication
from simparallel.parallel.pipeline.split_backward import input_gradient

TOKENS, LENGTH = 12, 5


def _tokens(samples):
    numbers = np.random.default_rng(3).integers(0, TOKENS, (samples, LENGTH + 1))
    return numbers[:, :-1], numbers[:, 1:]


def _cross_entropy(logits, labels):
    return sp.functions.cross_entropy(logits.reshape(-1, TOKENS), labels.reshape(-1))


def _gpt():
    sp.set_seed(5)
    network = gpt(TOKENS, LENGTH, num_layers=4, num_heads=2, width=8)
    for parameter in network.parameters():
        parameter.data = parameter.data.astype(np.float64)
    return network


def _alone(network, loss_fn, inputs, labels, steps=1):
    for _ in range(steps):
        loss = loss_fn(network(*inputs), sp.Tensor(labels))
        loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in network.named_parameters()}


def _train(make, loss_fn, inputs, labels, steps=1, microbatches=4, **settings):
    network = make()
    pipeline = Pipeline(network, loss_fn, microbatches, **settings)
    for _ in range(steps):
        loss = pipeline.step(tuple(inputs), labels)
    gradients = {name: p.grad.numpy() for name, p in pipeline.named_parameters() if p.grad is not None}
    return loss.item(), gradients, pipeline.stages, pipeline.predict(*inputs).numpy() if network.training else None


def _check(make, loss_fn, inputs, labels, world_size=4, steps=1, world=None, **settings):
    loss, gradients = _alone(make(), loss_fn, inputs, labels, steps)
    train = partial(_train, make, loss_fn, inputs, labels, steps, **settings)
    results = world.run(world_size, train) if world else sp.launch(train, world_size=world_size, transport="inline")
    found = set()
    for other, own, _, _ in results:
        assert other == pytest.approx(loss, rel=1e-9)
        found |= own.keys()
        for name, gradient in own.items():
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-7, atol=1e-11, err_msg=name)
    assert found == gradients.keys()
    return results


GPT_STAGES = [["tokens", "positions", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "tokens.weight"]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "dualpipe"])
def test_gpt_with_tied_embeddings(schedule):
    x, labels = _tokens(9)
    results = _check(_gpt, _cross_entropy, [x], labels, schedule=schedule, stages=GPT_STAGES, steps=2, microbatches=8)
    owners = {rank for rank, (_, own, _, _) in enumerate(results) if "tokens.weight" in own}
    assert owners == {0, 3}
    for _, _, _, predicted in results:
        np.testing.assert_allclose(predicted, _gpt()(x).numpy(), rtol=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_an_example_gives_stages(schedule):
    """A run without data finds the order of the calls, and that the last stage uses the token table."""
    x, labels = _tokens(8)
    results = _check(_gpt, _cross_entropy, [x], labels, 2, schedule=schedule, example=(x[:2], labels[:2]))
    stages = results[0][2]
    assert [name for stage in stages for name in stage][:2] == ["tokens", "positions"]
    assert "tokens.weight" in stages[-1]


@pytest.mark.process
def test_gpt_on_processes(processes):
    x, labels = _tokens(8)
    _check(_gpt, _cross_entropy, [x], labels, schedule="1f1b", stages=GPT_STAGES, world=processes)


def test_losses_of_the_micro_batches():
    x, labels = _tokens(9)

    def program():
        pipeline = Pipeline(_gpt(), _cross_entropy, 4, stages=GPT_STAGES)
        pipeline.step(x, labels)
        return [loss.item() for loss in pipeline.losses]

    *others, found = sp.launch(program, world_size=4, transport="inline")
    parts = [slice(9 * m // 4, 9 * (m + 1) // 4) for m in range(4)]
    np.testing.assert_allclose(found, [_alone(_gpt(), _cross_entropy, [x[s]], labels[s])[0] for s in parts])
    assert others == [[]] * 3


CUTS = {
    "*.up.weight": ("tp", "None"), "*.up.bias": ("tp",), "*.down.weight": ("None", "tp"),
    "*.out.weight": ("None", "tp"), "tokens.weight": ("tp", "None"),
}  # fmt: skip


def _train_on_a_mesh(shape, axes, schedule, samples, steps, stages, has_results=True):
    """Train on a mesh; return the whole of each gradient and weight of this rank's stages."""
    mesh = sp.Mesh(shape, axes)
    x, labels = _tokens(samples)
    network = _gpt()
    if "tp" in axes:
        layout = sp.Layout((mesh.axis_size("tp"),), ("tp",), mesh.group("tp", sp.get_rank()))
        sp.distribute_module(network, layout, CUTS)
    pipeline = Pipeline(network, _cross_entropy, 4, schedule, stages, mesh=mesh)
    part = slice(samples // pipeline.replicas * pipeline.replica, samples // pipeline.replicas * (pipeline.replica + 1))
    optimizer = sp.optim.Adam(pipeline.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(x[part], labels[part])
        optimizer.step()
    if not has_results:
        return None
    predicted = pipeline.predict(x[part]).numpy()
    own = {}
    # The ranks of a stage have the same parameters, and gather each of them together.
    with implicit_replication(pipeline._stage_ranks):
        for name, p in pipeline.named_parameters():
            own[name] = p.grad.full_tensor().numpy(), p.full_tensor().numpy()
    return loss.item(), own, predicted, part


def _check_mesh(results, samples, steps):
    x, labels = _tokens(samples)
    network = _gpt()
    optimizer = sp.optim.Adam(network.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _cross_entropy(network(x), sp.Tensor(labels))
        loss.backward()
        optimizer.step()
    alone = {name: (p.grad.numpy(), p.numpy()) for name, p in network.named_parameters()}
    outputs = network(x).numpy()
    found = set()
    for other, own, predicted, part in results:
        assert other == pytest.approx(loss.item(), rel=1e-9)
        np.testing.assert_allclose(predicted, outputs[part], rtol=1e-6)
        found |= own.keys()
        for name, both in own.items():
            for value, expected in zip(both, alone[name], strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9, err_msg=name)
    assert found == alone.keys()


TWO_STAGES = [["tokens", "positions", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "norm", "tokens.weight"]]
MESHES = [
    ((2, 2, 2), ("dp", "pp", "tp"), "1f1b", TWO_STAGES),
    ((2, 2, 2), ("tp", "dp", "pp"), "zb_h1", TWO_STAGES),
    ((2, 2), ("pp", "tp"), "zbv", GPT_STAGES),
    ((2, 2), ("dp", "pp"), "interleaved_1f1b", GPT_STAGES),
]


@pytest.mark.parametrize("mesh", MESHES, ids=["dp-pp-tp", "tp-dp-pp", "pp-tp", "dp-pp"])
def test_gpt_on_a_mesh(mesh):
    """Data, pipeline and tensor parallelism at once, with tied embeddings cut over the vocabulary: one device's."""
    shape, axes, schedule, stages = mesh
    arguments = shape, axes, schedule, 16, 3, stages
    results = sp.launch(_train_on_a_mesh, arguments, world_size=int(np.prod(shape)), transport="inline")
    _check_mesh(results, 16, 3)


@pytest.mark.process
@pytest.mark.parametrize("mesh", MESHES[2:], ids=["pp-tp", "dp-pp"])
def test_gpt_on_a_mesh_of_processes(mesh, processes):
    shape, axes, schedule, stages = mesh
    _check_mesh(processes.run(4, _train_on_a_mesh, shape, axes, schedule, 16, 2, stages), 16, 2)


def test_a_dry_run_of_a_mesh_has_the_same_events():
    arguments = (*MESHES[0][:3], 16, 1, TWO_STAGES, False)
    real = sp.launch(_train_on_a_mesh, arguments, world_size=8, transport="inline", record="full")
    dry = sp.dry_run(_train_on_a_mesh, arguments, world_size=8, fold=False)
    rows = [
        sorted((e.rank, e.stream, e.name, e.kind, e.sim_start_ps, e.sim_end_ps, e.size_bytes) for e in run.trace.events)
        for run in (real, dry)
    ]
    assert rows[0] == rows[1]


class Skips(nn.Module):
    """Values of the first stage go to all others; a child is called with two values of different stages."""

    def __init__(self) -> None:
        super().__init__()
        # Not in the order of the calls.
        self.last = Product()
        self.a, self.b, self.c = (nn.Linear(4, 4, dtype=np.float64) for _ in range(3))

    def forward(self, x, scale):
        a = self.a(x) * scale
        b = self.b(a).tanh()
        c = self.c(b) + a
        return self.last(c * b, factor=a) + x.sum(-1, keepdims=True)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, dtype=np.float64)

    def forward(self, x, *, factor):
        return self.layer(x * factor)


def _skips():
    sp.set_seed(2)
    return Skips()


def _square(y, labels):
    return ((y - labels) ** 2).sum(-1).mean()


def _numbers(samples):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((samples, 4)), rng.standard_normal((samples, 1))], rng.standard_normal((samples, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "chimera"])
def test_values_skip_stages(schedule):
    inputs, labels = _numbers(10)
    _check(_skips, _square, inputs, labels, schedule=schedule, stages=[["a"], ["b"], ["c"], ["last"]], steps=2)


def test_an_example_gives_the_order_of_the_calls():
    inputs, labels = _numbers(10)
    results = _check(_skips, _square, inputs, labels, example=(tuple(x[:2] for x in inputs), labels[:2]))
    assert results[0][2] == (("a",), ("b",), ("c",), ("last",))


def _masked():
    sp.set_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4, dtype=np.float64), nn.Dropout(0.4))]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("samples", [8, 11])
def test_masks_are_those_of_one_device(schedule, samples):
    """Masks belong to the samples of the whole batch, and differ in every step."""
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((samples, 4)), rng.standard_normal((samples, 4))
    _check(_masked, _square, [x], labels, 2, schedule=schedule, steps=3)


def test_masks_of_replicas_are_those_of_one_device():
    """Also after a prediction in training mode, which draws a mask, too."""
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((12, 4)), rng.standard_normal((12, 4))

    def program():
        pipeline = Pipeline(_masked(), _square, 3, mesh=sp.Mesh((2, 2), ("pp", "dp")))
        part = slice(6 * pipeline.replica, 6 * pipeline.replica + 6)
        first = pipeline.predict(x[part]).numpy()
        return pipeline.step(x[part], labels[part]).item(), first, pipeline.predict(x[part]).numpy(), part

    network = _masked()
    first, second, third = (network(sp.Tensor(x)) for _ in range(3))
    loss = _square(second, sp.Tensor(labels)).item()
    for found, before, after, part in sp.launch(program, world_size=4, transport="inline"):
        np.testing.assert_allclose(before, first.numpy()[part], rtol=1e-9)
        assert found == pytest.approx(loss, rel=1e-9)
        np.testing.assert_allclose(after, third.numpy()[part], rtol=1e-9)


@pytest.mark.parametrize("recomputed", [False, True])
def test_masks_of_slices_are_those_of_one_device(recomputed):
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((8, 4)), rng.standard_normal((8, 4))
    make = _checkpointed if recomputed else _masked

    def program():
        mesh, network = sp.Mesh((2, 2), ("pp", "tp")), make()
        layout = sp.Layout((2,), ("tp",), mesh.group("tp", sp.get_rank()))
        sp.distribute_module(network, layout, lambda name, p: ("tp", *["None"] * (p.ndim - 1)))
        stages = [["parts.0"], ["parts.1"]] if recomputed else None
        pipeline = Pipeline(network, _square, 4, mesh=mesh, stages=stages)
        pipeline.step(x, labels)
        with implicit_replication(pipeline._stage_ranks):
            return {name: p.grad.full_tensor().numpy() for name, p in pipeline.named_parameters()}

    _, gradients = _alone(make(), _square, [x], labels)
    for own in sp.launch(program, world_size=4, transport="inline"):
        for name, gradient in own.items():
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-7, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_rank_holds_its_own_stages(schedule):
    """Parameters of other stages never exist; activations are freed, and fewer are live than with GPipe."""

    def make():
        sp.set_seed(3)
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])

    x = np.ones((8 * 64, 16), np.float32)

    def program(schedule):
        with sp.no_init_parameters():
            network = make()
        memory = current_recorder().memory
        pipeline = Pipeline(network, _square, 8, schedule)
        states = memory.summary()["live"]["parameters"]
        pipeline.step(x.copy(), x.copy())
        summary = memory.summary()
        gradients = {name: p.grad.numpy() for name, p in pipeline.named_parameters()}
        return states, summary["live"]["activations"], summary["at_peak"]["activations"], gradients

    _, alone = _alone(make(), _square, [sp.Tensor(x)], x)
    results, gpipe = (sp.launch(program, (name,), world_size=4, transport="inline") for name in (schedule, "gpipe"))
    layer_bytes = (16 + 1) * 16 * 4
    # Rank 1, which has neither the batch nor the loss, holds results of two layers.
    live_of = (
        sp.pipeline_schedule(schedule).cost().peak_live_at_weight_gradient[1] / sp.pipeline_schedule(schedule).chunks
    )
    assert gpipe[1][2] - results[1][2] >= (8 - live_of - 1) * 2 * x.nbytes // 8
    for states, live, _, gradients in results:
        assert states == 2 * layer_bytes
        assert live == 0
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, alone[name], rtol=1e-4, atol=1e-6)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, dtype=np.float64), nn.Dropout(0.4)) for _ in "ab"])

    def forward(self, x):
        for part in self.parts:
            x = nn.checkpoint(part, x)
        return x


def _checkpointed():
    sp.set_seed(7)
    return Checkpointed()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2"])
def test_parts_are_recomputed(schedule):
    x = np.random.default_rng(1).standard_normal((7, 4))
    _check(_checkpointed, _square, [x], x, 2, stages=[["parts.0"], ["parts.1"]], steps=2, schedule=schedule)


class CheckpointedTwice(nn.Module):
    """Four layers, recomputed in pairs, and each of a pair once more inside of that; the first weight is tied."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4, dtype=np.float64) for _ in range(4)])
        self.parts[3].weight = self.parts[2].weight
        self.calls = 0

    def layer(self, part, x):
        self.calls += 1
        return part(x).tanh()

    def pair(self, i, x):
        return nn.checkpoint(
            partial(self.layer, self.parts[i + 1]), nn.checkpoint(partial(self.layer, self.parts[i]), x)
        )

    def forward(self, x):
        for i in (0, 2):
            x = nn.checkpoint(partial(self.pair, i), x)
        return x


def test_split_backward_recomputes_once():
    """Gradients of inputs, then those of weights: equal to those of one backward, of as many runs of each layer."""

    def run(is_split):
        sp.set_seed(3)
        network, found = CheckpointedTwice(), {}
        x = sp.Tensor(np.random.default_rng(1).standard_normal((5, 4)), requires_grad=True)
        loss = network(x).square().sum()
        if not is_split:
            loss.backward()
            return network.calls, x.grad.numpy(), [p.grad.numpy() for p in network.parameters()]

        def deliver(leaf, gradient):
            assert id(leaf) not in found
            found[id(leaf)] = gradient

        finish = input_gradient(loss, np.ones(()), [x], deliver)
        assert found.keys() == {id(x)}
        finish()
        return network.calls, found[id(x)], [found[id(p)] for p in network.parameters()]

    (calls, x, weights), (calls_split, x_split, weights_split) = run(False), run(True)
    assert calls == calls_split
    np.testing.assert_array_equal(x_split, x)
    for found, expected in zip(weights_split, weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_norms_have_the_statistics_of_micro_batches():
    """As one device that runs the micro-batches one after the other; each updates the running statistics."""

    def make():
        sp.set_seed(1)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))

    x = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)

    def program():
        network = make()
        Pipeline(network, _square, 4, stages=[["0", "1"], ["2", "3"]]).step(x, x)
        return {name: value.numpy() for name, value in network.named_buffers()}

    alone = make()
    for m in range(4):
        part = sp.Tensor(x[2 * m : 2 * m + 2])
        _square(alone(part), part).backward()
    fresh = {name: value.numpy() for name, value in make().named_buffers()}
    for rank, own in enumerate(sp.launch(program, world_size=2, transport="inline")):
        for name, value in alone.named_buffers():
            is_own = name.startswith("13"[rank])
            np.testing.assert_allclose(own[name], value.numpy() if is_own else fresh[name], rtol=1e-6)


def _refusal(kind, program):
    with refused(RunFailedError) as info:
        sp.launch(program, world_size=2, transport="inline", echo=False)
    assert isinstance(info.value.__cause__, kind)


def test_model_refusals():
    inputs, labels = _numbers(8)
    x, y = _tokens(8)
    _refusal(
        InputError, lambda: Pipeline(_skips(), _square, 2, stages=[["last", "a"], ["b", "c"]]).step((*inputs,), labels)
    )
    _refusal(
        InputError,
        lambda: Pipeline(
            _gpt(), _cross_entropy, 2,
            stages=[["tokens", "positions", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "norm"]],
        ).step(x, y),
    )  # fmt: skip
    _refusal(
        InputError,
        lambda: Pipeline(_skips(), lambda y, labels: y, 2, stages=[["a", "b"], ["c", "last"]]).step((*inputs,), labels),
    )
    _refusal(
        UnknownValueError,
        lambda: Pipeline(nn.Sequential(Deciding(), Deciding()), _square, 2).step(inputs[0], inputs[0]),
    )


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=np.float64)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2, dtype=np.float64), nn.Linear(2, 2, dtype=np.float64)
        self.offset = nn.Parameter(np.ones(4))

    def forward(self, x):
        return self.second(self.first(x + self.offset)) @ (self.first.weight * 2).T.T


def _transposed():
    sp.set_seed(1)
    return Transposed()


def test_a_tied_weight_may_be_transposed():
    """A stage uses the parameters behind its values that every rank can compute: of the inputs and of weights alone."""
    x = np.random.default_rng(1).standard_normal((8, 4))
    _check(_transposed, _square, [x], x, 2, example=(x[:2], x[:2]))
    _check(_transposed, _square, [x], x, 2, stages=[["first", "offset"], ["second", "first.weight"]])
    for stages in ([["first", "offset"], ["second"]], [["first"], ["second", "first.weight", "offset"]]):
        _refusal(InputError, lambda s=stages: Pipeline(_transposed(), _square, 2, stages=s).step(x, x))


def _features(layout):
    network = nn.Sequential(nn.Linear(4, 10, dtype=np.float64), nn.Tanh(), nn.Linear(10, 3, dtype=np.float64))
    cuts = {"0.weight": ("tp", "None"), "0.bias": ("tp",), "2.weight": ("None", "tp")}
    return sp.distribute_module(network, layout, cuts), [["0", "1"], ["2"]]


def _sequence(layout):
    block = partial(sp.parallel.ParallelTransformerBlock, 4, 2, layout, sequence_parallel=True, dtype=np.float64)
    first = sp.distribute_module(nn.Linear(4, 4, dtype=np.float64), layout)
    return nn.Sequential(first, block(), block()), [["0", "1"], ["2"]]


def _train_cut(make, sizes, inputs, labels):
    sp.set_seed(4)
    mesh, rank = sp.Mesh(sizes, ("pp", "tp")), sp.get_rank()
    network, stages = make(sp.Layout.of_mesh(mesh.part(("tp",), rank)))
    stages = stages if sizes[0] > 1 else [sum(stages, [])]
    pipeline, recorder = Pipeline(network, _square, 4, mesh=mesh, stages=stages), current_recorder()
    loss = pipeline.step(inputs, labels).item()
    # Values and gradients, without those of `predict`.
    sent = {e.size_bytes for e in recorder.events if e.name == "send"}
    predicted = pipeline.predict(inputs).numpy()
    with implicit_replication(mesh.group("tp", rank)):
        gradients = {name: p.grad.full_tensor().numpy() for name, p in pipeline.named_parameters()}
    return loss, sent, predicted, gradients


@pytest.mark.parametrize(
    ("make", "sizes_bytes"),
    # 5 positions of 10 features in 2 slices; of 4 features, 3 positions on one rank, and 2 on the other.
    [(_features, {5 * 5 * 8}), (_sequence, {3 * 4 * 8, 2 * 4 * 8})],
    ids=["features", "sequence"],
)
def test_cut_values_cross_stages_cut(make, sizes_bytes):
    """A value that the ranks of a stage have in slices goes to the next stage in slices, and so does its gradient."""
    data = np.random.default_rng(1).standard_normal((4, 5, 4)), np.zeros((4, 5, 1))
    ((loss, _, predicted, gradients),) = sp.launch(_train_cut, (make, (1, 1), *data), world_size=1, transport="inline")
    found = sp.launch(_train_cut, (make, (2, 2), *data), world_size=4, transport="inline")
    assert set.union(*(sent for _, sent, _, _ in found)) == sizes_bytes
    for other, _, output, own in found:
        assert other == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(output, predicted, rtol=1e-10)
        for name, gradient in own.items():
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-10, atol=1e-14, err_msg=name)
