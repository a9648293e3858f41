"""Adasum in training: of gradients in buckets, of optimizer deltas, on nodes, with loss scales."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError, RunFailedError, StateDictError
from simparallel.optim import DynamicLossScaleManager, FixedLossScaleManager
from simparallel.parallel import AdasumOptimizer, DistributedDataParallel, DistributedGradScaler, Nodes
from simparallel.parallel.ddp import comm_hooks
from simparallel.parallel.ddp.adasum import shares

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # devices need not import Hypothesis

LR = 0.1
TOLERANCE = 1e-12


def make_model() -> sp.nn.Module:
    """Make a model of five layers of different sizes, in float64."""
    sp.manual_seed(1)
    model = sp.nn.Sequential(
        sp.nn.Linear(6, 8), sp.nn.Tanh(), sp.nn.Linear(8, 4), sp.nn.Tanh(), sp.nn.Linear(4, 3, bias=False)
    )
    for param in model.parameters():
        param.data = param.data.astype(np.float64)
    return model


def batch(rank: int, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(5, 6)), rng.integers(0, 3, 5)


def loss_of(model: Any, rank: int, step: int = 0) -> sp.Tensor:
    x, labels = batch(rank, step)
    return sp.functions.cross_entropy(model(sp.Tensor(x)), labels)


def gradients(rank: int, step: int = 0, model: Any = None) -> list[np.ndarray]:
    """Return the gradients of a single rank."""
    model = model or make_model()
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return [param.grad.numpy().copy() for param in model.parameters()]


def weights(model: Any) -> list[np.ndarray]:
    return [param.numpy().copy() for param in model.parameters()]


def assert_close(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def hierarchical(nodes: Any, of_rank: Callable[[int], list[np.ndarray]]) -> list[np.ndarray]:
    """Compute the oracle: means inside nodes, Adasum of the means."""
    return sp.adasum([[sum(layer) / len(layer) for layer in zip(*map(of_rank, node), strict=True)] for node in nodes])


# --- gradients -----------------------------------------------------------------------------------------


def with_hook(nodes: Any, cap_mb: float) -> Any:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=cap_mb)
    model.register_comm_hook(nodes and Nodes(nodes), comm_hooks.adasum_hook)
    loss_of(model, sp.get_rank()).backward()
    return [param.grad.numpy().copy() for param in model.parameters()]


@pytest.mark.parametrize("cap_mb", [1e-9, 3e-4, 25.0])
@pytest.mark.parametrize(
    ("count", "nodes"), [(4, None), (3, None), (4, [[0, 1], [2, 3]]), (4, [[3, 0], [2, 1]]), (2, [[0], [1]])]
)
def test_hook_sums_each_parameter_by_itself(inline, count, nodes, cap_mb):
    """Each parameter is one layer, whatever the buckets."""
    if nodes is None:
        expected = sp.adasum([gradients(rank) for rank in range(count)])
    else:
        expected = hierarchical(nodes, gradients)
    results = inline.run(count, with_hook, nodes, cap_mb)
    for result in results:
        assert_close(result, expected)
    assert len({b"".join(g.tobytes() for g in result) for result in results}) == 1


def with_unused() -> Any:
    sp.manual_seed(0)
    first, second = sp.nn.Linear(3, 2), sp.nn.Linear(3, 2)
    model = DistributedDataParallel(_Either(first, second), find_unused_parameters=True)
    model.register_comm_hook(None, comm_hooks.adasum_hook)
    model(sp.Tensor(np.ones((1, 3), np.float32)), sp.get_rank() == 0).sum().backward()
    return [param.grad.numpy().tolist() for param in model.parameters()]


class _Either(sp.nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Any, with_second: bool) -> Any:
        return self.first(x) + self.second(x) if with_second else self.first(x)


def test_gradient_of_one_rank_is_not_divided(inline):
    """A parameter that only one rank uses keeps its whole gradient; a mean would halve it."""
    ones = [np.ones((2, 3)).tolist(), [1.0, 1.0]]
    assert inline.run(2, with_unused) == [ones + ones] * 2  # a mean would halve them


# --- deltas --------------------------------------------------------------------------------------------

SHAPES = [(3, 4), (5,), (1,), ()]
OPTIMIZERS = {
    "sgd": lambda params: sp.optim.SGD(params, lr=LR),
    "momentum": lambda params: sp.optim.Momentum(params, LR, 0.9),
    "adam": lambda params: sp.optim.Adam(params, lr=LR),
}


def locally(optimizer: str, steps: int, local_steps: int, nodes: Any = None) -> Any:
    """Train; return the weights after each step, and this rank's optimizer state."""
    model = make_model()
    wrapped = AdasumOptimizer(OPTIMIZERS[optimizer](model.parameters()), local_steps=local_steps, nodes=nodes)
    seen = []
    for step in range(steps):
        wrapped.zero_grad()
        loss_of(model, sp.get_rank(), step).backward()
        wrapped.step()
        seen.append(weights(model))
    return seen, wrapped.optimizer.state_dict()["state"]


def simulated(optimizer: str, steps: int, local_steps: int, count: int) -> list[np.ndarray]:
    """Simulate the same, one rank after the other in one process."""
    models = [make_model() for _ in range(count)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    start = weights(models[0])
    for step in range(steps):
        for rank, (model, local) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            local.step()
        if (step + 1) % local_steps == 0:
            deltas = [[w - s for w, s in zip(weights(model), start, strict=True)] for model in models]
            start = [s + d for s, d in zip(start, sp.adasum(deltas), strict=True)]
            for model in models:
                for param, array in zip(model.parameters(), start, strict=True):
                    param.data[...] = array
    return start


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("local_steps", [1, 3])
def test_deltas_are_summed_and_states_stay_local(inline, optimizer, local_steps):
    count, steps = 4, 6
    results = inline.run(count, locally, optimizer, steps, local_steps)
    expected = simulated(optimizer, steps, local_steps, count)
    for seen, _ in results:
        assert_close(seen[-1], expected)
    for step in range(steps):
        bits = {b"".join(w.tobytes() for w in seen[step]) for seen, _ in results}
        assert len(bits) == (1 if (step + 1) % local_steps == 0 else count)
    states = {repr(state) for _, state in results}
    assert len(states) == (1 if optimizer == "sgd" else count)


def by_gradients(steps: int) -> Any:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, comm_hooks.adasum_hook)
    optimizer = sp.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, sp.get_rank(), step).backward()
        optimizer.step()
    return weights(model)


def of_arrays(seed: int, lr: float, exponent: int) -> Any:
    """Return this rank's (weights before, gradients, weights after an SGD step whose deltas were summed)."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, sp.get_rank()])
    params = [sp.Tensor(shared.normal(size=shape), requires_grad=True) for shape in SHAPES]
    before = [param.numpy().copy() for param in params]
    grads = [np.asarray(own.normal(size=shape) * 2.0**exponent) for shape in SHAPES]
    AdasumOptimizer(sp.optim.SGD(params, lr=lr))(grads)
    return before, grads, [param.numpy().copy() for param in params]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_p25_sgd_delta_step_equals_gradient_adasum(inline, count):
    """P25: for SGD, a step with Adasum of the deltas is the step with Adasum of the gradients."""

    def check(case: Any) -> None:
        seed, lr, exponent = case
        results = inline.run(count, of_arrays, seed, lr, exponent)
        own = [grads for _, grads, _ in results]
        for before, _, after in results:
            for w, t, gs, found in zip(before, sp.adasum(own), zip(*own, strict=True), after, strict=True):
                # Relative to the summands: the sum may be small where the gradients point away from each other.
                size = np.linalg.norm(w) + lr * max(map(np.linalg.norm, gs))
                assert np.linalg.norm(found - (w - lr * t)) <= 1e-14 * size

    inline.check(st.tuples(st.integers(0, 2**20), st.floats(1e-3, 1.0), st.integers(-6, 6)), check, parts=4)


def test_p25_deltas_equal_gradients_for_sgd_only(world):
    """P25: deltas and gradients give the same step for SGD, and different ones with momentum."""
    gradient_version = world.run(2, by_gradients, 2)[0]
    assert_close(world.run(2, locally, "sgd", 2, 1)[0][0][-1], gradient_version)
    other = world.run(2, locally, "momentum", 2, 1)[0][0][-1]
    assert max(np.abs(a - b).max() for a, b in zip(other, gradient_version, strict=True)) > 1e-3


# --- nodes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[2, 0], [1, 3]], [[0], [1], [2], [3]]])
def test_node_works_as_one_worker(inline, nodes):
    seen = [seen[0] for seen, _ in inline.run(4, locally, "sgd", 1, 1, nodes)]
    start = weights(make_model())
    expected = [w - LR * g for w, g in zip(start, hierarchical(nodes, gradients), strict=True)]
    for result in seen:
        assert_close(result, expected)


def on_one_node(count: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = locally("sgd", 1, 1, [list(range(count))])[0][0]
    return seen, [str(warning.message) for warning in caught]


def test_one_node_is_the_mean_and_is_reported(inline):
    results = inline.run(2, on_one_node, 2)
    mean = [sum(g) / 2 for g in zip(gradients(0), gradients(1), strict=True)]
    expected = [w - LR * g for w, g in zip(weights(make_model()), mean, strict=True)]
    for seen, _ in results:
        assert_close(seen, expected)
    told = [text for _, texts in results for text in texts]
    assert len(told) == 1
    assert "plain MEAN" in told[0]


def described() -> Any:
    nodes = Nodes()
    return nodes.nodes, nodes.node.ranks, nodes.across.ranks


def test_nodes_come_from_the_run():
    with sp.Cluster(4, nodes=2, transport="inline", echo=False) as cluster:
        assert cluster.run(described)[3] == (((0, 1), (2, 3)), (2, 3), (1, 3))


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0, 1, 2], [3]], [[0, 1], [1, 2]], [[0, 1], [2, 3], []], []])
def test_bad_nodes(inline, nodes):
    with refused(RunFailedError) as caught:
        inline.run(4, locally, "sgd", 1, 1, nodes)
    assert isinstance(caught.value.__cause__, InputError)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 6))
def test_shares_are_whole_layers_and_about_even(layers, count):
    parts = shares(layers, count)
    assert len(parts) == count
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(layers)))
    sizes = [sum(layers[part]) for part in parts]
    assert max(sizes) <= sum(layers) / count + max(layers, default=0)


def with_a_closure() -> Any:
    model = make_model()
    optimizer = AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=LR))

    def closure() -> Any:
        loss = loss_of(model, sp.get_rank())
        loss.backward()
        return loss

    return float(optimizer.step(closure)), loss_of(make_model(), sp.get_rank()).item(), weights(model)


def test_closure_gives_the_gradients_of_the_step(inline):
    expected = simulated("sgd", 1, 1, 2)
    for loss, plain, result in inline.run(2, with_a_closure):
        assert loss == plain
        assert_close(result, expected)


# --- loss scales ---------------------------------------------------------------------------------------


def scaled(overflows_on: int | None) -> Any:
    model = make_model()
    optimizer = AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=LR))
    scaler = DistributedGradScaler(DynamicLossScaleManager(2.0**10))
    scaler.scale(loss_of(model, sp.get_rank())).backward()
    if sp.get_rank() == overflows_on:
        next(model.parameters()).grad.data[0, 0] = np.inf
    stepped = scaler.step(optimizer)
    scaler.update()
    return stepped, scaler.get_scale(), weights(model)


def test_common_loss_scale_has_no_effect(inline):
    expected = simulated("sgd", 1, 1, 2)
    for stepped, scale, result in inline.run(2, scaled, None):
        assert (stepped, scale) == (True, 2.0**10)
        assert_close(result, expected)


@pytest.mark.parametrize("rank", [0, 2])
def test_overflow_on_one_rank_skips_all_steps(world, rank):
    start = weights(make_model())
    for stepped, scale, result in world.run(3, scaled, rank):
        assert (stepped, scale) == (False, 2.0**9)
        assert all((a == b).all() for a, b in zip(result, start, strict=True))


def with_other_scales() -> None:
    DistributedGradScaler(FixedLossScaleManager(2.0 ** sp.get_rank()))


def test_other_scales_are_refused(inline):
    with refused(RunFailedError):
        inline.run(2, with_other_scales)


# --- saving, refusals ----------------------------------------------------------------------------------


def resumed(stop: int) -> Any:
    """Train 5 steps with an exchange every 3; if `stop`, save after that many and load into new objects."""
    model = make_model()
    optimizer = AdasumOptimizer(sp.optim.Momentum(model.parameters(), LR, 0.9), local_steps=3)
    for step in range(5):
        if step == stop:
            saved, state = model.state_dict(), optimizer.state_dict()
            model = make_model()
            model.load_state_dict(saved)
            optimizer = AdasumOptimizer(sp.optim.Momentum(model.parameters(), LR, 0.9), local_steps=3, init_sync=False)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model, sp.get_rank(), step).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_resumes_from_saved_state(inline, stop):
    for whole, again in zip(inline.run(2, resumed, 0), inline.run(2, resumed, stop), strict=True):
        assert all((a == b).all() for a, b in zip(whole, again, strict=True))


def test_bad_states_and_settings_are_refused():
    model = make_model()
    optimizer = sp.optim.SGD(model.parameters(), lr=LR)
    for bad in (0, True, 1.5):
        with refused(InputError):
            AdasumOptimizer(optimizer, local_steps=bad)
    wrapped = AdasumOptimizer(optimizer)
    with refused(StateDictError):
        wrapped.load_state_dict(optimizer.state_dict())
    assert wrapped.param_groups is optimizer.param_groups
    assert "5 parameters one by one" in repr(wrapped)
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing


def test_alone_equals_the_wrapped_optimizer():
    ours, plain = make_model(), make_model()
    for optimizer, model in (
        (AdasumOptimizer(sp.optim.Adam(ours.parameters(), lr=LR)), ours),
        (sp.optim.Adam(plain.parameters(), lr=LR), plain),
    ):
        loss_of(model, 0).backward()
        optimizer.step()
    assert all((a == b).all() for a, b in zip(weights(ours), weights(plain), strict=True))
