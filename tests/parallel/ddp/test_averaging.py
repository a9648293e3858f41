"""Ignored parameters of DistributedDataParallel, and averaging weights instead of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.errors import CollectiveMismatchError, InputError, RunFailedError
from simparallel.optim import SGD
from simparallel.parallel import (
    DistributedDataParallel,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
)
from simparallel.parallel.ddp import comm_hooks


def batch(step: int = 0) -> np.ndarray:
    return np.full((2, 2), 1.0 + step + 2 * sp.get_rank(), np.float32)


def net(*more: nn.Module) -> nn.Module:
    sp.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *more)


# --- weights instead of gradients -------------------------------------------------------------------


def train_locally(period: int, warmup: int, start: int, reduces: bool) -> Any:
    """Four steps of post-local SGD: return this rank's weights after each, and the number of calls of each op."""
    ddp = DistributedDataParallel(net())
    group = sp.new_group([0, 1])
    state = PostLocalSGDState(None, group if reduces else None, start, post_local_gradient_allreduce=reduces)
    ddp.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    averager = PeriodicModelAverager(period, warmup)
    optimizer = PostLocalSGDOptimizer(SGD(ddp.parameters(), 0.125), averager)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch(step)).sum().backward()
        optimizer.step()
        seen.append(ddp.module[1].bias.numpy().tolist() + ddp.module[0].weight.numpy().ravel().tolist())
    return seen, averager.step, state.iter


def test_averaging_every_step_equals_gradient_mean(world):
    """A mean of weights after one step of SGD is a step with the mean of the gradients."""
    (first, *_), (second, *_) = world.run(2, train_locally, 1, 0, 0, False)
    (expected, *_), _ = world.run(2, train_locally, 100, 99, 100, False)
    assert first == second
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-5)


def test_ranks_drift_apart_between_averages(world):
    (first, step, count), (second, *_) = world.run(2, train_locally, 2, 1, 1, False)
    assert (step, count) == (4, 4)
    equal = [a == b for a, b in zip(first, second, strict=True)]
    assert equal == [True, True, False, True]  # gradients, then weights in steps 1 and 3


def test_subgroup_continues_averaging_gradients(world):
    (first, *_), (second, *_) = world.run(2, train_locally, 100, 99, 0, True)
    assert first == second


def test_states_of_the_optimizer(world):
    def program() -> Any:
        model = net()
        first, second = (
            PostLocalSGDOptimizer(SGD(model.parameters(), 0.5, momentum=0.5), PeriodicModelAverager(3))
            for _ in range(2)
        )
        model(batch()).sum().backward()
        first.step()
        second.load_state_dict(first.state_dict())
        assert second.averager.step == 1
        assert second.param_groups[0]["lr"] == 0.5
        without = first.optim.state_dict()
        with pytest.warns(UserWarning, match="no step"):
            second.load_state_dict(without)
        return second.averager.step, "step" in without

    assert set(world.run(2, program)) == {(0, False)}


def test_average_takes_parameters_of_several_dtypes(world):
    def program() -> Any:
        xs = [sp.Tensor(np.full(3, sp.get_rank() * 2, dtype), True) for dtype in ("f4", "f8", "f2")]
        averager = PeriodicModelAverager(2, warmup_steps=1)
        for _ in range(2):
            averager.average_parameters(xs)
        averager.average_parameters([])
        return [(x.data.tolist(), x.dtype.name) for x in xs]

    names = ("float32", "float64", "float16")
    assert list(world.run(2, program)) == [[([1.0] * 3, name) for name in names]] * 2


def test_bad_settings():
    for arguments in ((0,), (1, -1), (1.0,)):
        with refused(InputError):
            PeriodicModelAverager(*arguments)
    with refused(InputError):
        PostLocalSGDState(None, None, -1)
    with refused(InputError):
        PostLocalSGDOptimizer(None, PeriodicModelAverager(1))
    with refused(InputError):
        PostLocalSGDOptimizer(SGD([sp.Tensor([1.0], True)], 1.0), None)


def test_models_that_differ_are_not_averaged(world):
    def program() -> None:
        PeriodicModelAverager(1).average_parameters([sp.Tensor(np.ones((2, 1 + sp.get_rank()), "f4"))])

    with refused(RunFailedError) as caught:
        world.run(2, program)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


def test_sharded_parameters_are_refused():
    def program() -> None:
        layout = sp.Layout((2,), ("tp",))
        PeriodicModelAverager(1).average_parameters([sp.distribute_tensor(np.ones((2, 2), "f4"), layout("tp", "None"))])

    with refused(RunFailedError):
        sp.launch(program, world_size=2, transport="inline", echo=False)
