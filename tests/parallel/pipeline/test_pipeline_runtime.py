"""Pipelines train as one device does, whatever their schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused
from test_pipeline_schedules import schedules

import simparallel as sp
from simparallel import nn
from simparallel.errors import InputError, RunFailedError, ScheduleError, ShapeError
from simparallel.parallel import Pipeline
from simparallel.parallel.pipeline.stages import balanced

WIDTH = 3


class Scaled(nn.Module):
    """Adds a weight that is used twice to a normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH, dtype=np.float64), nn.Parameter(np.ones(WIDTH))

    def forward(self, x):
        return self.norm(x) * self.weight + self.weight


def _make(parts, *, integers=True, tied=False):
    sp.set_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=np.float64) for _ in range(parts)]
    if tied:
        layers[-1] = layers[0]
    if not integers:
        layers[1:-1] = [layer if i % 3 else Scaled() for i, layer in enumerate(layers[1:-1])]
    network = nn.Sequential(*layers)
    if integers:
        for parameter in network.parameters():
            parameter.data[...] = np.round(parameter.data)
    return network


def _loss(y, labels):
    return ((y - labels) ** 2).sum(-1).mean()


def _data(samples):
    x = np.arange(samples * WIDTH).reshape(samples, WIDTH)
    return (x % 5 - 2).astype(np.float64), (x % 3).astype(np.float64)


def _alone(network, samples):
    x, labels = _data(samples)
    loss = _loss(network(sp.Tensor(x)), sp.Tensor(labels))
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in network.named_parameters()}


def _train(schedule, samples, steps=1, stages=None, **made):
    network = _make(schedule.num_stages if stages is None else sum(map(len, stages)), **made)
    pipeline = Pipeline(network, _loss, schedule.microbatches, schedule, stages)
    losses = [pipeline.step(*_data(samples)) for _ in range(steps)]
    if not sp.backend.has_data(losses[0].data):
        return None
    gradients = {name: p.grad.numpy() for name, p in pipeline.named_parameters()}
    return [loss.item() for loss in losses], gradients, pipeline.predict(_data(samples)[0]).numpy()


def _check(results, network, samples, *, rtol=1e-10, steps=1):
    loss, gradients = _alone(network, samples)
    outputs = network(sp.Tensor(_data(samples)[0])).numpy()
    found = set()
    for losses, own, predicted in results:
        np.testing.assert_allclose(losses, [loss] * steps, rtol=1e-10)
        np.testing.assert_allclose(predicted, outputs, rtol=1e-10)
        found |= own.keys()
        for name, gradient in own.items():
            # Without a `zero_grad`, steps add up.
            np.testing.assert_allclose(gradient, steps * gradients[name], rtol=rtol, atol=1e-12)
    assert found == gradients.keys()


def _is_run(schedule):
    return schedule.name not in ("pipedream", "pipedream_2bw") and schedule.num_stages <= 24


@pytest.mark.matrices
@settings(max_examples=2 * settings.default.max_examples)
@given(schedules().filter(_is_run), st.integers(0, 5))
def test_gradients_are_those_of_one_device(schedule, more):
    samples = schedule.microbatches + more
    parts = schedule.num_stages // (2 if schedule.placement == "bidirectional" else 1)
    results = sp.launch(
        _train, (schedule, samples, 2), {"stages": [[str(i)] for i in range(parts)], "integers": False},
        world_size=schedule.ranks, transport="inline",
    )  # fmt: skip
    _check(results, _make(parts, integers=False), samples, rtol=1e-8, steps=2)


@pytest.mark.parametrize("name", ["gpipe", "gpipe_reversed", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe"])
def test_integers_are_equal_to_the_bit(name):
    """Small integers, and shares of the batch that are powers of two: no sum is rounded."""
    schedule = sp.pipeline_schedule(name)
    parts = schedule.num_stages // (2 if name == "dualpipe" else 1)
    results = sp.launch(
        _train, (schedule, 64), {"stages": [[str(i)] for i in range(parts)]}, world_size=4, transport="inline"
    )
    _, gradients = _alone(_make(parts), 64)
    for _, own, _ in results:
        for name, gradient in own.items():
            np.testing.assert_array_equal(gradient, gradients[name])


@pytest.mark.process
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipe_v"])
def test_processes(name, processes):
    schedule = sp.pipeline_schedule(name)
    results = processes.run(4, _train, schedule, 19)
    _check(results, _make(schedule.num_stages), 19)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipe_v"])
def test_a_dry_run_has_the_same_events(name):
    schedule = sp.pipeline_schedule(name)
    real = sp.launch(_step, (schedule,), world_size=4, transport="inline")
    dry = sp.dry_run(_step, (schedule,), world_size=4, fold=False)
    rows = [
        sorted(
            (e.rank, e.stream, e.name, e.kind, e.sim_start_ps, e.sim_end_ps, e.size_bytes) for e in each.trace.events
        )
        for each in (real, dry)
    ]
    assert rows[0] == rows[1]


def _step(schedule):
    parts = schedule.num_stages
    pipeline = Pipeline(_make(parts), _loss, schedule.microbatches, schedule, [[str(i)] for i in range(parts)])
    pipeline.step(*_data(16))


@pytest.mark.parametrize("message", [0, 1])
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zbv", "v_half"]
)
def test_simulated_time_is_that_of_the_lists(name, message):
    """On a device whose operations all take a microsecond, a step takes what the schedule says.

    Messages take no longer: on a link they go one after the other, and lists know no such wait.
    """
    schedule = sp.pipeline_schedule(name)
    device = sp.DeviceSpec("unit", {4: 1e24, 8: 1e24}, 1e24, 1 << 40, 1e-6)
    events = sp.launch(
        _one_op, (schedule,), world_size=4, transport="inline", device=device,
        link=sp.LinkSpec(message * 1e-6 or 1e-30, 1e24),
    ).trace.events  # fmt: skip
    end_ps = max(e.sim_end_ps for e in events if e.kind == "backward")
    # A full backward is one operation, and a split one is two; the first stage has no gradient of its input.
    is_split = "B" not in "".join(schedule.actions[0])
    input_gradient = [0, *[1] * (schedule.num_stages - 1)] if is_split else 1
    assert end_ps == schedule.cost(1, input_gradient, int(is_split), message).makespan * 10**6


def _one_op(schedule):
    # One op in each stage, forward and backward; the loss is the result of the last one.
    parts = [Row() for _ in range(schedule.num_stages - 1)]
    pipeline = Pipeline(
        nn.Sequential(*parts, Total()), lambda y, labels: y, schedule.microbatches, schedule,
        [[str(i)] for i in range(schedule.num_stages)],
    )  # fmt: skip
    pipeline.step(*_data(16))


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(np.ones((WIDTH, 1)))

    def forward(self, x):
        return sp.functions.einsum("nk,kj->", x, self.weight)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipe"])
def test_tied_weights_get_the_sum(name):
    """The first and the last stage have one weight; both ranks get the gradient of both uses."""
    schedule = sp.pipeline_schedule(name)
    results = sp.launch(_train, (schedule, 16, 2), {"tied": True, "stages": [["0"], ["1"], ["2"], ["3"]]},
                        world_size=4, transport="inline")  # fmt: skip
    _check(results, _make(4, tied=True), 16, steps=2)
    owners = [rank for rank, (_, own, _) in enumerate(results) if "0.weight" in own]
    assert owners == [0, 3]


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
@pytest.mark.parametrize("tied", [False, True])
def test_replicas_share_a_batch(name, tied):
    """Two pipelines of two ranks, each with half of the batch: the gradients of the whole one."""

    def program():
        network = _make(4, tied=tied)
        pipeline = Pipeline(
            network,
            _loss,
            4,
            name,
            [["0"], ["1", "2", "3"]] if name != "zbv" else None,
            mesh=sp.Mesh((2, 2), ("dp", "pp")),
        )
        x, labels = _data(32)
        half = slice(16 * pipeline.replica, 16 * (pipeline.replica + 1))
        loss = pipeline.step(x[half], labels[half])
        predicted = pipeline.predict(x[half]).numpy()
        return loss.item(), {name: p.grad.numpy() for name, p in pipeline.named_parameters()}, predicted

    results = sp.launch(program, world_size=4, transport="inline")
    network = _make(4, tied=tied)
    loss, gradients = _alone(network, 32)
    outputs = network(sp.Tensor(_data(32)[0])).numpy()
    for rank, (found, own, predicted) in enumerate(results):
        assert found == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(predicted, outputs[16 * (rank // 2) :][:16], rtol=1e-12)
        for name, gradient in own.items():
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-10, atol=1e-12)
    assert set().union(*(own for _, own, _ in results)) == gradients.keys()


def test_optimizers_of_the_ranks_train_the_model():
    """Adam on each rank's parameters, for some steps: the weights of one device."""

    def program(is_parallel):
        network = _make(8, integers=False)
        pipeline = Pipeline(network, _loss, 4, "zbv") if is_parallel else None
        optimizer = sp.optim.Adam(pipeline.parameters() if pipeline else network.parameters(), 0.01)
        for _ in range(4):
            optimizer.zero_grad()
            if pipeline is not None:
                pipeline.step(*_data(10))
            else:
                x, labels = map(sp.Tensor, _data(10))
                _loss(network(x), labels).backward()
            optimizer.step()
        named = pipeline.named_parameters() if pipeline else network.named_parameters()
        return {name: parameter.numpy() for name, parameter in named}

    alone = program(False)
    results = sp.launch(program, (True,), world_size=4, transport="inline")
    for own in results:
        for name, weight in own.items():
            np.testing.assert_allclose(weight, alone[name], rtol=1e-9)
    assert set().union(*results) == alone.keys()


def test_frozen_stages_pass_gradients_on():
    def program():
        network = _make(4)
        for parameter in (*network[0].parameters(), *network[2].parameters()):
            parameter.requires_grad = False
        pipeline = Pipeline(network, _loss, 4, "zb_h1", [["0"], ["1"], ["2"], ["3"]])
        pipeline.step(*_data(16))
        return {name: p.grad is not None for name, p in pipeline.named_parameters()}

    results = sp.launch(program, world_size=4, transport="inline")
    has = {name: value for own in results for name, value in own.items()}
    assert has == {f"{i}.{kind}": i in (1, 3) for i in range(4) for kind in ("weight", "bias")}


@settings(max_examples=10 * settings.default.max_examples)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8), st.integers(2, 30))
def test_stages_are_balanced(sizes, count, room):
    """As brute force: the largest stage is as small as it can be; later stages have more memory, as in 1F1B."""
    costs = {str(i): size for i, size in enumerate(sizes)}

    def fits(stage, first, last):
        return (count - stage) * sum(9 - size for size in sizes[first:last]) <= room * count

    def cuts(first, stage):
        ends = range(first + 1, len(sizes) - (count - stage) + 2) if stage < count - 1 else [len(sizes)]
        for end in ends:
            if first < end and fits(stage, first, end):
                own = sum(sizes[first:end])
                yield from [own] if stage == count - 1 else (max(own, rest) for rest in cuts(end, stage + 1))

    best = min(cuts(0, 0), default=None)
    if best is None:
        with pytest.raises(InputError):
            balanced(costs, count, None, fits)
        return
    stages = balanced(costs, count, None, fits)
    assert [name for stage in stages for name in stage] == list(costs)
    assert all(stages)
    assert max(sum(sizes[int(name)] for name in stage) for stage in stages) == best
    counts = [len(stage) for stage in stages]
    assert balanced(costs, count, counts) == stages


def test_stages_share_the_memory():
    """The first stage of 1F1B holds four micro-batches, the last one holds one: the first gets fewer layers."""

    def program(limit):
        network = nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)])
        x = np.ones((256, 64), np.float32)
        pipeline = Pipeline(network, _loss, 8, example=(x, x), memory_limit=limit)
        return [len(stage) for stage in pipeline.stages]

    free, tight = (sp.launch(program, (limit,), world_size=4, transport="inline")[0] for limit in (None, "1MB"))
    assert tight[0] < free[0]
    with refused(RunFailedError) as info:
        sp.launch(program, ("100kB",), world_size=4, transport="inline", echo=False)
    assert isinstance(info.value.__cause__, InputError)


def test_refusals():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for arguments in (
        (_loss, _loss),
        (network, _loss, 4, "1f1b", [["0"], ["1"]]),
        (network, _loss, 4, "1f1b", [["0", "2"]]),
        (network, _loss, 4, "interleaved_1f1b", [["0", "1"], ["1"]], 2),
        (network, _loss, 4, "1f1b", [["", "0"]]),
        (network, _loss, 4, "1f1b", [["0", "1.weight"]]),
        (network, _loss, 4, "interleaved_1f1b", None, 3),
    ):
        with refused(InputError):
            Pipeline(*arguments)
    for settings_ in ({"balance": [1]}, {"balance": [2, 0]}, {"memory_limit": "1GB"}):
        with refused(InputError):
            Pipeline(network, _loss, 4, **settings_)
    for mesh in (sp.Mesh((1,), ("dp",)), sp.Mesh((1, 2), ("dp", "pp"))):
        with refused(InputError):
            Pipeline(network, _loss, mesh=mesh)
    with refused(ScheduleError):
        Pipeline(network, _loss, 8, sp.pipeline_schedule("1f1b"))
    pipeline = Pipeline(network, _loss, 4)
    with refused(ShapeError):
        pipeline.step(np.ones((3, 3)), np.ones((3, 3)))
    with refused(ShapeError):
        pipeline.step(np.ones((8, 3)), np.ones((4, 3)))
