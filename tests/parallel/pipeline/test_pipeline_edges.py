"""Models that are hard to cut: each trains and predicts as one device does, or is refused."""

from __future__ import annotations

import contextlib
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.errors import CollectiveMismatchError, DeadlockError, InputError, RunFailedError
from simparallel.optim import SGD, AdamW
from simparallel.parallel import Pipeline
from simparallel.parallel.pipeline.split_backward import input_gradient
from simparallel.parallel.pipeline.stages import balanced


def _linear(inputs=4, outputs=4):
    return nn.Linear(inputs, outputs, dtype=np.float64)


class Model(nn.Module):
    """Four layers, with a function as its forward."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.a, self.b, self.c = _linear(), _linear(), _linear()
        self.drop, self.same, self.other = nn.Dropout(0.4), nn.Identity(), nn.Dropout(0.3)
        self.table = nn.Parameter(np.eye(4))
        self._forward = forward

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def _residual(m, x):
    h = m.a(x)
    return m.c(m.b(h)) + h.detach()


def _masked(m, x):
    h = m.a(x)
    return m.c(sp.functions.where(h > 0, m.b(h), h))


def _counted(m, x):
    h = m.a(x)
    return m.c(m.b(h) + h.astype("int64") * 1.0)


def _added(m, x):
    h = m.a(x)
    h += m.b(x)
    return m.c(h)


def _returned(m, x):
    """A child of the first stage returns the input itself, which the second one uses, too."""
    h = m.a(m.same(x))
    return m.c(m.b(x) + h)


def _dropped(m, x):
    return m.other(m.c(m.drop(m.b(m.drop(m.a(x))))))


def _moved(m, x):
    return m.c(m.b(m.a(x).to("sim:0")))


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _linear()

    def forward(self, x):
        x += 1
        return self.layer(x)


def _writing(m, x):
    return m.c(m.b(m.a(x)))


class Aux(nn.Module):
    """A result of another shape in evaluation."""

    def forward(self, x):
        return x if self.training else x.reshape(x.shape[0], 2, 2)


def _modes(m, x):
    h = m.same(m.a(x))
    return m.c(h.reshape(h.shape[0], 4)) / h.ndim


def _square(y, labels):
    return ((y - labels) ** 2).sum(-1).mean()


STAGES = [["a", "drop", "same", "table"], ["b", "c", "other"]]
FORWARDS = [_residual, _masked, _counted, _added, _returned, _dropped, _moved, _writing, _modes]


def _make(forward):
    sp.set_seed(1)
    model = Model(forward)
    if forward is _writing:
        model.b = Writing()
    if forward is _modes:
        model.same = Aux()
    return model


def _numbers():
    rng = np.random.default_rng(0)
    return rng.standard_normal((8, 4)), rng.standard_normal((8, 4))


def _loss_of(pipeline, optimizer, x, labels):
    optimizer.zero_grad()
    loss = pipeline.step(x, labels).item()
    optimizer.step()
    return loss


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_trains_as_one_device(forward, schedule):
    """Three steps, a prediction in training mode and one in evaluation."""
    x, labels = _numbers()

    def program():
        stages = [each.copy() for each in STAGES]
        if forward is _dropped:
            stages = [["a"], ["drop", "same", "table", "b", "c", "other"]]
        pipeline = Pipeline(_make(forward), _square, 2, schedule, stages)
        optimizer = SGD(pipeline.parameters(), 0.01)
        losses = [_loss_of(pipeline, optimizer, x, labels) for _ in range(3)]
        before = pipeline.predict(x).numpy()
        pipeline.model.eval()
        return losses, before, pipeline.predict(x).numpy(), pipeline.state_dict()

    model = _make(forward)
    optimizer = SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = _square(model(sp.Tensor(x)), sp.Tensor(labels))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with sp.no_grad():
        before = model(sp.Tensor(x.copy())).numpy()
        after = model.eval()(sp.Tensor(x.copy())).numpy()
    for found, first, second, state in sp.launch(program, world_size=2, transport="inline"):
        np.testing.assert_allclose(found, losses, rtol=1e-10)
        np.testing.assert_allclose(first, before, rtol=1e-8)
        np.testing.assert_allclose(second, after, rtol=1e-8)
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(state[name], value, rtol=1e-8, atol=1e-12)


def test_masks_of_a_function_are_counted():
    """`dropout` in a child: its calls count where the child is of another stage, too."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _linear()

        def forward(self, x):
            return sp.functions.dropout(self.layer(x), 0.5, self.training)

    def make():
        sp.set_seed(1)
        return nn.Sequential(Drops(), Drops(), Drops())

    x, labels = _numbers()

    def program():
        pipeline = Pipeline(make(), _square, 4, stages=[["0"], ["1", "2"]])
        return [pipeline.step(x, labels).item() for _ in range(3)]

    network = make()
    expected = [_square(network(sp.Tensor(x)), sp.Tensor(labels)).item() for _ in range(3)]
    for losses in sp.launch(program, world_size=2, transport="inline"):
        np.testing.assert_allclose(losses, expected, rtol=1e-10)


@pytest.mark.parametrize("axes", [((2,), ("pp",)), ((2, 2), ("dp", "pp"))])
def test_parameters_that_change_their_state(axes):
    """Frozen when the pipeline was built, trained later; and others without a gradient keep None."""
    x, labels = _numbers()

    def make():
        sp.set_seed(1)
        model = Model(lambda m, x: m.c(m.b(m.a(x))))
        model.unused = _linear()
        for parameter in model.a.parameters():
            parameter.requires_grad = False
        return model

    def train(pipeline, model, x, labels):
        optimizer = AdamW(model.parameters() if pipeline is None else pipeline.parameters(), 0.1)
        for parameter in model.a.parameters():
            parameter.requires_grad = True
        for parameter in model.c.parameters():
            parameter.requires_grad = False
        if pipeline is None:
            _square(model(sp.Tensor(x)), sp.Tensor(labels)).backward()
        else:
            pipeline.step(x, labels)
        optimizer.step()

    def program():
        model = make()
        stages = [["a", "drop", "table"], ["same", "b", "c", "other", "unused"]]
        pipeline = Pipeline(model, _square, 2, stages=stages, mesh=sp.Mesh(*axes))
        size = 8 // pipeline.replicas
        part = slice(size * pipeline.replica, size * (pipeline.replica + 1))
        train(pipeline, model, x[part], labels[part])
        return {name: p.grad is not None for name, p in pipeline.named_parameters()}, pipeline.state_dict()

    model = make()
    train(None, model, x, labels)
    expected = {name: p.grad is not None for name, p in model.named_parameters()}
    for has, state in sp.launch(program, world_size=int(np.prod(axes[0])), transport="inline"):
        assert has == {name: expected[name] for name in has}
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(state[name], value, rtol=1e-7, atol=1e-10)


def test_states_of_parameters_that_exist_elsewhere():
    x, labels = _numbers()

    def make():
        sp.set_seed(1)
        return nn.Sequential(*[_linear() for _ in range(4)])

    state = make().state_dict()

    def program():
        with sp.no_init_parameters():
            network = make()
        pipeline = Pipeline(network, _square, 2)
        doubled = {name: 2 * value for name, value in state.items()}
        pipeline.load_state_dict(doubled)
        pipeline.step(x, labels)
        return pipeline.state_dict()

    for found in sp.launch(program, world_size=2, transport="inline"):
        for name, value in state.items():
            np.testing.assert_array_equal(found[name], 2 * value)


def test_2bw_reads_loaded_weights_and_accumulates():
    x, labels = _numbers()

    def make():
        sp.set_seed(1)
        return nn.Sequential(_linear(), _linear())

    def program():
        pipeline = Pipeline(make(), _square, 2, "pipedream_2bw")
        optimizer, start = SGD(pipeline.parameters(), 0.1), make().state_dict()
        losses = []
        for _ in range(3):
            losses.append([pipeline.step(x, labels).item() for _ in range(2)])
            optimizer.step()
            optimizer.zero_grad()
        pipeline.load_state_dict(start)
        return losses, pipeline.step(x, labels).item()

    for losses, loaded in sp.launch(program, world_size=2, transport="inline"):
        # Both steps of an accumulation read one version; the second pair still reads the first weights.
        assert [first for first, _ in losses] == [second for _, second in losses]
        assert losses[0] == losses[1] != losses[2]
        assert loaded == losses[0][0]


class Head(nn.Module):
    """Uses a weight of another module without being its owner."""

    def __init__(self, other) -> None:
        super().__init__()
        self._other = [other]

    def forward(self, x):
        return x @ self._other[0].weight


class Trimmed(nn.Module):
    def forward(self, x, count):
        return x[:, : int(count.data.max())]


class Total(nn.Module):
    def forward(self, x):
        return x.sum(1, keepdims=True)


def _hidden_weight():
    model = nn.Sequential(_linear(), _linear())
    model.append(Head(model[0]))
    Pipeline(model, _square, 2, stages=[["0"], ["1", "2"]]).step(*_numbers())


def _loss_with_parameters():
    layer = _linear()
    Pipeline(nn.Sequential(_linear(), _linear()), lambda y, t: _square(layer(y), t), 2).step(*_numbers())


def _values_decide_shapes():
    x, labels = _numbers()
    model = Model(lambda m, x, count: m.c(m.b(m.same(m.a(x), count))))
    model.same, model.b, model.c = Trimmed(), Total(), _linear(1, 4)
    Pipeline(model, _square, 2, stages=STAGES).step((x, np.array([2] * 4 + [3] * 4)), labels)


def _input_with_gradient():
    x, labels = _numbers()
    Pipeline(nn.Sequential(_linear(), _linear()), _square, 2).step(sp.Tensor(x, requires_grad=True), labels)


def _raw_data():
    model = Model(lambda m, x: m.b(m.c(x)) + sp.Tensor(m.a(x).data * 2))
    Pipeline(model, _square, 2, stages=[["a", "drop", "table", "same"], ["c", "b", "other"]]).step(*_numbers())


@pytest.mark.parametrize(
    "program", [_hidden_weight, _loss_with_parameters, _values_decide_shapes, _input_with_gradient, _raw_data]
)
def test_refused_models(program):
    with refused(RunFailedError) as info:
        sp.launch(program, world_size=2, transport="inline", echo=False)
    assert isinstance(info.value.__cause__, (InputError, CollectiveMismatchError))


def test_a_recomputed_function_is_told():
    x, labels = _numbers()

    def program():
        model = Model(lambda m, x: m.c(nn.checkpoint(lambda h: m.b(h) * 2, m.a(x))))
        pipeline = Pipeline(model, _square, 2, stages=STAGES)
        with pytest.warns(UserWarning, match="keeps the activations"):
            return pipeline.step(x, labels).item()

    assert len(set(sp.launch(program, world_size=2, transport="inline"))) == 1


def _swapped():
    """Two pipelines, in another order on one rank."""
    first, second = (Pipeline(nn.Sequential(_linear(), _linear()), _mean, 2) for _ in range(2))
    for pipeline in (second, first) if sp.get_rank() else (first, second):
        pipeline.step(np.ones((4, 4)), np.zeros((4, 4)))


def _swapped_predictions():
    first, second = (Pipeline(nn.Sequential(_linear(), _linear()), _mean, 2) for _ in range(2))
    for pipeline in (second, first) if sp.get_rank() else (first, second):
        pipeline.predict(np.ones((4, 4)))


def _mean(y, labels):
    return ((y - labels) ** 2).mean()


@pytest.mark.parametrize("program", [_swapped, _swapped_predictions])
def test_messages_find_their_call(program):
    """The ranks wait for each other: no message is taken for one of another pipeline, or of another step."""
    with refused(RunFailedError) as info:
        sp.launch(program, world_size=2, transport="inline")
    assert isinstance(info.value.__cause__, DeadlockError)


def test_messages_of_a_failed_step_are_apart():
    """The next step does not take the value that the failed one has sent; the end of the run tells it."""

    def forward(m, x):
        h = m.a(x)
        if m.training and sp.get_rank() == 1:
            raise ValueError("before it has received h")
        y = m.b(h)
        if m.training:
            raise ValueError("after it has sent h")
        return y

    def run():
        model, x = Model(forward), np.full((4, 4), 3.0)
        pipeline = Pipeline(model, _mean, 2, stages=[["a"], ["b", "c", "drop", "same", "other", "table"]])
        with contextlib.suppress(ValueError):
            pipeline.step(np.ones((4, 4)), np.zeros((4, 4)))
        model.eval()
        found = pipeline.step(x, np.zeros((4, 4)))
        pipeline.collect()
        assert np.allclose(found.item(), _mean(forward(model, sp.Tensor(x)), np.zeros((4, 4))).item())

    with refused(RunFailedError, rank=1):
        sp.launch(run, world_size=2, transport="inline")


def test_messages_of_the_program_are_apart():
    """A message of any small tag stays one of the program."""

    def run():
        rank, pipeline = sp.get_rank(), Pipeline(nn.Sequential(_linear(), _linear()), _mean, 2)
        for tag in range(12):
            sp.send(np.full((2, 4), 7.0), 1 - rank, tag)
        pipeline.predict(np.ones((2, 4)))
        pipeline.step(np.ones((4, 4)), np.zeros((4, 4)))
        return sum(sp.recv(np.zeros((2, 4)), 1 - rank, tag).sum() for tag in range(12))

    assert sp.launch(run, world_size=2, transport="inline") == [12 * 56.0] * 2


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB", "LARS", "RAdam"])
def test_stages_without_parameters(name):
    """Their optimizers do nothing, and the others train as on one device."""

    def train():
        sp.manual_seed(0)
        net = nn.Sequential(_linear(), nn.ReLU(), _linear())
        pipeline = Pipeline(net, _mean, 2)
        optimizer = getattr(sp.optim, name)([{"params": pipeline.parameters(), "lr": 0.1}])
        twin = getattr(sp.optim, name)(pipeline.parameters(), lr=1.0)
        schedule, scaler = sp.optim.StepLR(optimizer, 1), sp.optim.GradScaler(reduce_overflow=pipeline.any_rank)
        x = np.arange(16.0).reshape(4, 4)
        for _ in range(3):
            pipeline.step(x, x / 2)
            norm = pipeline.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return float(pipeline.step(x, x / 2)), norm, len(pipeline.parameters()), len(twin.parameters)

    ranks, (alone,) = (sp.launch(train, world_size=count, transport="inline") for count in (3, 1))
    assert [found[2:] for found in ranks] == [(2, 2), (0, 0), (2, 2)]
    assert all(np.allclose(found[:2], alone[:2]) for found in ranks)


@given(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=7), st.integers(0, 6))
@example([5, 0, 0, 1, 1], 2)
def test_stages_have_parameters_where_they_can(costs, number):
    """Of the stages whose largest is smallest, those are taken that have the fewest without parameters."""

    def key(starts):
        sums = [sum(costs[a:b]) for a, b in pairwise((*starts, len(costs)))]
        return max(sums), sums.count(0), starts

    count = 1 + number % len(costs)
    best = min(key((0, *cuts)) for cuts in combinations(range(1, len(costs)), count - 1))
    found = balanced({str(number): cost for number, cost in enumerate(costs)}, count)
    assert key(tuple(int(stage[0]) for stage in found)) == best
    # As many stages have parameters as there can be.
    assert best[1] == max(0, count - sum(cost > 0 for cost in costs))


def test_late_weight_gradient_does_not_repeat_hooks():
    x, w = (sp.Tensor(np.ones((n, 3)), requires_grad=True) for n in (2, 3))
    calls, found = [], {}
    h = sp.functions.linear(x, w)
    h.register_hook(lambda gradient: calls.append(gradient.shape) or gradient * 2)
    weight_gradients = input_gradient(h.sum(), np.ones(()), [x], lambda leaf, array: found.update({id(leaf): array}))
    assert found.keys() == {id(x)}
    weight_gradients()
    assert calls == [(2, 3)]
    assert (found[id(x)] == 6).all()
    assert (found[id(w)] == 4).all()
