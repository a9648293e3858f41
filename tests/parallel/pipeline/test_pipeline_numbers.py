"""Numbers of a pipeline as a whole: norms, overflows, weights of tokens, checkpoints, versions of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.errors import CheckpointError, InputError, RunFailedError
from simparallel.optim import SGD, Adam, GradScaler, clip_grad_norm_
from simparallel.parallel import Pipeline
from simparallel.train import CheckpointManager

WIDTH = 4


def _make():
    sp.set_seed(4)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=np.float64) for _ in range(4)]
    return nn.Sequential(*layers[:3], layers[0])


def _square(y, labels):
    return ((y - labels) ** 2).sum(-1).mean()


def _data(samples=12):
    rng = np.random.default_rng(0)
    return rng.standard_normal((samples, WIDTH)), rng.standard_normal((samples, WIDTH))


STAGES = [["0"], ["1"], ["2"], ["3"]]
MESHES = {"pp": (((4,), ("pp",)), STAGES), "dp-pp-tp": (((2, 2, 2), ("dp", "pp", "tp")), [["0", "1"], ["2", "3"]])}


def _pipeline(mesh, stages, **settings):
    mesh, network = sp.Mesh(*mesh), _make()
    if "tp" in mesh.axis_names:
        layout = sp.Layout((2,), ("tp",), mesh.group("tp", sp.get_rank()))
        # A stage without a cut parameter, and one with.
        sp.distribute_module(network, layout, {"1.weight": ("tp", "None"), "1.bias": ("tp",)})
    return Pipeline(network, _square, 4, stages=stages, mesh=mesh, **settings)


def _part(pipeline, x):
    size = len(x) // pipeline.replicas
    return x[size * pipeline.replica : size * (pipeline.replica + 1)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_norm_of_all_stages(mesh, norm_type):
    """Tied weights, replicas and uncut parameters count once, slices together."""

    def program():
        pipeline = _pipeline(*MESHES[mesh])
        pipeline.step(*(_part(pipeline, x) for x in _data()))
        return pipeline.clip_grad_norm_(0.1, norm_type), pipeline.clip_grad_norm_(math.inf, norm_type)

    network = _make()
    x, labels = map(sp.Tensor, _data())
    _square(network(x), labels).backward()
    expected = (
        clip_grad_norm_(network.parameters(), 0.1, norm_type),
        clip_grad_norm_(network.parameters(), math.inf, norm_type),
    )
    world_size = math.prod(MESHES[mesh][0][0])
    for found in sp.launch(program, world_size=world_size, transport="inline"):
        assert list(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_a_norm_that_is_not_finite(norm_type):
    """One element of one stage, beside finite gradients."""

    def program():
        pipeline = _pipeline(*MESHES["pp"])
        pipeline.step(*_data())
        if sp.get_rank() == 1:
            pipeline.parameters()[1].grad.data[0] = math.nan
        return pipeline.clip_grad_norm_(math.inf, norm_type)

    assert all(map(math.isnan, sp.launch(program, world_size=4, transport="inline")))


@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_skip_a_step_that_overflows(mesh):
    def program():
        pipeline = _pipeline(*MESHES[mesh])
        scaler = GradScaler(init_scale=8.0, reduce_overflow=pipeline.any_rank)
        loss_fn, pipeline.loss_fn = pipeline.loss_fn, lambda y, labels: scaler.scale(loss_fn(y, labels))
        optimizer = SGD(pipeline.parameters(), 0.1)
        stepped = []
        for factor in (1.0, math.nan, 1.0):
            x, labels = (_part(pipeline, x) for x in _data())
            optimizer.zero_grad()
            pipeline.step(x, labels * factor)
            # One rank alone has a gradient that is not finite.
            if math.isnan(factor) and sp.get_rank():
                for parameter in pipeline.parameters():
                    parameter.grad.data[...] = 0
            stepped.append(scaler.step(optimizer))
            scaler.update()
        return stepped, scaler.get_scale()

    world_size = math.prod(MESHES[mesh][0][0])
    for found in sp.launch(program, world_size=world_size, transport="inline"):
        assert found == ([True, False, True], 4.0)


IGNORED = -1


def _token_loss(logits, labels):
    return sp.functions.cross_entropy(logits, labels, ignore_index=IGNORED)


@pytest.mark.parametrize("axes", [((2,), ("pp",)), ((2, 2), ("dp", "pp"))])
def test_weights_of_tokens(axes):
    """With padding, the mean over the tokens of the whole batch."""
    rng = np.random.default_rng(2)
    x, labels = rng.standard_normal((16, WIDTH)), rng.integers(0, WIDTH, 16)
    labels[[1, 2, 3, 9, 12]] = IGNORED

    def count(labels):
        return (labels.data != IGNORED).sum()

    def program():
        pipeline = Pipeline(
            _make(), _token_loss, 4, stages=[["0", "1"], ["2", "3"]], mesh=sp.Mesh(*axes), weight_fn=count
        )
        loss = pipeline.step(_part(pipeline, x), _part(pipeline, labels))
        return loss.item(), {name: p.grad.numpy() for name, p in pipeline.named_parameters()}

    network = _make()
    loss = _token_loss(network(sp.Tensor(x)), sp.Tensor(labels))
    loss.backward()
    alone = {name: p.grad.numpy() for name, p in network.named_parameters()}
    for found, own in sp.launch(program, world_size=math.prod(axes[0]), transport="inline"):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in own.items():
            np.testing.assert_allclose(gradient, alone[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_weights_without_a_mean_are_refused(weight):
    def program():
        pipeline = Pipeline(_make(), _token_loss, 4, weight_fn=lambda labels: weight)
        x, labels = np.ones((16, WIDTH)), np.zeros(16, int)
        with refused(InputError):
            pipeline.step(x, labels)

    sp.launch(program, world_size=1, transport="inline")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_loads_into_any_cut(mesh):
    """Two steps on one cut, saved by the names of the model, one more on another: three steps of one device."""

    def train(pipeline, steps):
        optimizer = SGD(pipeline.parameters(), 0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            pipeline.step(*(_part(pipeline, x) for x in _data()))
            optimizer.step()
        return pipeline.state_dict()

    def first():
        return train(_pipeline(*MESHES[mesh]), 2)

    def second(state, others):
        pipeline = _pipeline(*others, schedule="zb_h1")
        pipeline.load_state_dict(state)
        return train(pipeline, 1)

    alone = _make()
    optimizer = SGD(alone.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        _square(alone(sp.Tensor(_data()[0])), sp.Tensor(_data()[1])).backward()
        optimizer.step()
    states = sp.launch(first, world_size=math.prod(MESHES[mesh][0][0]), transport="inline")
    for others in (((2,), ("pp",)), [["0"], ["1", "2", "3"]]), (((2, 2), ("tp", "pp")), [["0", "1", "2"], ["3"]]):
        results = sp.launch(second, (states[0], others), world_size=math.prod(others[0][0]), transport="inline")
        for found in results:
            assert found.keys() == alone.state_dict().keys()
            for name, value in alone.state_dict().items():
                np.testing.assert_allclose(found[name], value, rtol=1e-9)


def _groups(parameters):
    """Return groups of weights and of biases."""
    return [{"params": [p for p in parameters if p.ndim == n], "lr": 0.01 * n} for n in (2, 1)]


def _save_by_stages(folder, make_groups):
    pipeline = Pipeline(nn.Sequential(*_layers(4)), _square, 4)
    optimizer = Adam(make_groups(pipeline.parameters()), 0.01)
    pipeline.step(*_data(8))
    optimizer.step()
    CheckpointManager(folder).save(1, model=pipeline, optimizer=optimizer)
    return pipeline.state_dict()


def test_groups_have_the_numbers_of_one_device(tmp_path):
    state = sp.launch(_save_by_stages, (tmp_path, _groups), world_size=2, transport="inline")[0]
    network = nn.Sequential(*_layers(4))
    optimizer, alone = (Adam(_groups(list(network.parameters())), 0.01) for _ in range(2))
    _square(network(sp.Tensor(_data(8)[0])), sp.Tensor(_data(8)[1])).backward()
    alone.step()
    CheckpointManager(tmp_path).restore(model=network, optimizer=optimizer)
    for name, value in network.state_dict().items():
        np.testing.assert_array_equal(value, state[name])
    found, expected = optimizer.state_dict(), alone.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        assert found["state"][number].keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_allclose(found["state"][number][name], value, rtol=1e-9, atol=1e-12)


OTHER_GROUPS = {
    "uneven": lambda parameters: _groups(parameters)[sp.get_rank() :],
    "foreign": lambda parameters: [nn.Parameter(np.ones(3))],
}


@pytest.mark.parametrize("name", OTHER_GROUPS)
def test_groups_of_stages_that_do_not_fit_are_refused(tmp_path, name):
    with refused(RunFailedError):
        sp.launch(_save_by_stages, (tmp_path, OTHER_GROUPS[name]), world_size=2, transport="inline", echo=False)
    assert CheckpointManager(tmp_path).latest() is None


def test_groups_of_another_pipeline_are_refused(tmp_path):
    sp.launch(_save_by_stages, (tmp_path, list), world_size=2, transport="inline")

    def program():
        pipeline = Pipeline(nn.Sequential(*_layers(4)), _square, 4)
        before, optimizer = pipeline.state_dict(), Adam(_groups(pipeline.parameters()), 0.01)
        with refused(CheckpointError):
            CheckpointManager(tmp_path).restore(model=pipeline, optimizer=optimizer)
        return before, pipeline.state_dict()

    for before, after in sp.launch(program, world_size=2, transport="inline"):
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)


def _layers(ranks):
    sp.set_seed(4)
    return [nn.Linear(WIDTH, WIDTH, dtype=np.float64) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pipedream_keeps_versions(ranks):
    """Forward k of stage r reads version max(0, k - (P - 1 - r)), and its backward the same one."""
    count, (x, labels) = 8, _data(8)

    def program():
        pipeline = Pipeline(nn.Sequential(*_layers(ranks)), _square, count, "pipedream")
        optimizer = SGD(pipeline.parameters(), 0.1)
        loss = pipeline.step(x, labels, optimizer).item()
        return loss, {name: p.numpy() for name, p in pipeline.named_parameters()}

    versions = [[[p.numpy() for p in layer.parameters()]] for layer in _layers(ranks)]
    losses = []
    for k in range(count):
        network = nn.Sequential(*_layers(ranks))
        for r, layer in enumerate(network):
            for parameter, value in zip(layer.parameters(), versions[r][max(0, k - (ranks - 1 - r))], strict=True):
                parameter.data = value
        loss = _square(network(sp.Tensor(x[k : k + 1])), sp.Tensor(labels[k : k + 1]))
        loss.backward()
        losses.append(loss.item())
        for r, layer in enumerate(network):
            versions[r].append(
                [v - 0.1 * p.grad.numpy() for v, p in zip(versions[r][k], layer.parameters(), strict=True)]
            )
    for rank, (loss, own) in enumerate(sp.launch(program, world_size=ranks, transport="inline")):
        assert loss == pytest.approx(np.mean(losses), rel=1e-12)
        for value, expected in zip(own.values(), versions[rank][count], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pipedream_2bw_is_one_step_late(ranks):
    """w(t + 1) = w(t) - lr * gradient at w(t - 1)."""
    x, labels = _data(8)

    def program():
        pipeline = Pipeline(nn.Sequential(*_layers(ranks)), _square, 4, "pipedream_2bw")
        optimizer = SGD(pipeline.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            pipeline.step(x, labels)
            optimizer.step()
        return {name: p.numpy() for name, p in pipeline.named_parameters()}

    before = now = [p.numpy() for layer in _layers(ranks) for p in layer.parameters()]
    for _ in range(4):
        network = nn.Sequential(*_layers(ranks))
        for parameter, value in zip(network.parameters(), before, strict=True):
            parameter.data = value
        _square(network(sp.Tensor(x)), sp.Tensor(labels)).backward()
        before, now = now, [v - 0.1 * p.grad.numpy() for v, p in zip(now, network.parameters(), strict=True)]
    found = {}
    for own in sp.launch(program, world_size=ranks, transport="inline"):
        found |= own
    for value, expected in zip(found.values(), now, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-10)


def test_pipedream_refusals():
    x, labels = _data(4)
    network = nn.Sequential(*_layers(1))
    with refused(InputError):
        Pipeline(network, _square, 4, "pipedream").step(x, labels)
    with refused(InputError):
        Pipeline(network, _square, 4, "1f1b").step(x, labels, SGD(network.parameters(), 0.1))
    sp.launch(_tied, world_size=2, transport="inline")


def _tied():
    with refused(InputError):
        Pipeline(_make(), _square, 4, "pipedream", [["0", "1"], ["2", "3"]])
