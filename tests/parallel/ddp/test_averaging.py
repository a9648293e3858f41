"""Ignored parameters of DistributedDataParallel, and averaging weights instead of gradients."""

from __future__ import annotations

import copy
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
    Join,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
)
from simparallel.parallel.ddp import comm_hooks
from simparallel.parallel.ddp.distributed import POST_FORWARD, PRE_FORWARD

ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model


def batch(step: int = 0) -> np.ndarray:
    return np.full((2, 2), 1.0 + step + 2 * sp.get_rank(), np.float32)


def net(*more: nn.Module) -> nn.Module:
    sp.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), *more)


# --- parameters and buffers that stay local ----------------------------------------------------------


def test_ignored_parameters_stay_local(world):
    def program() -> Any:
        model, me = net(nn.BatchNorm1d(2)), sp.get_rank()
        model[0].weight.data[...] = 1 + me
        model[1].bias.data[...] = me
        model[2].running_mean.data[...] = 10 * me
        ignore(model, ["0.weight", "2.running_mean"])
        ddp = copy.deepcopy(DistributedDataParallel(model))
        model = ddp.module
        starts = model[0].weight.numpy().copy(), model[1].bias.numpy().copy()
        for step in range(2):
            rows = np.random.default_rng([step, me]).random((4, 2), np.float32)
            (ddp(rows) ** 3).sum().backward()
        grads = [model[i].weight.grad.numpy().tolist() for i in (0, 1)]
        return (*(s.tolist() for s in starts), *grads, model[2].running_mean.numpy().tolist())

    first, second = world.run(2, program)
    assert first[0] == [[1, 1]] * 2
    assert second[0] == [[2, 2]] * 2
    assert first[1] == second[1] == [0, 0]
    assert first[2] != second[2]
    assert first[3] == second[3]
    assert first[4] != second[4]


def test_ignored_parameters_may_differ_in_shape(world):
    def program() -> Any:
        model = net()
        model.extra = nn.Linear(1 + sp.get_rank(), 1)
        model.forward = lambda x: model[1](model[0](x))
        ignore(model, [name for name, _ in model.named_parameters() if name.startswith("extra")])
        ddp = DistributedDataParallel(model)
        ddp(batch()).sum().backward()
        return model[0].weight.grad.numpy().tolist()

    first, second = world.run(2, program)
    assert first == second


def test_names_to_ignore_are_checked():
    with refused(InputError):
        ignore(net(), ["0.weight", "nothing"])
    model = net()
    ignore(model, [name for name, _ in model.named_parameters()])
    with refused(InputError):
        DistributedDataParallel(model)


# --- buffers by a hook, a static graph afterwards ----------------------------------------------------


@pytest.mark.parametrize("location", [PRE_FORWARD, POST_FORWARD])
def test_buffers_by_a_hook(world, location):
    def average(state: list[str], buffers: dict[str, sp.Tensor]) -> Any:
        state.append(",".join(buffers))
        mean = buffers["2.running_mean"]
        return [sp.all_reduce(mean, "mean", async_op=True)]

    def program() -> Any:
        ddp = DistributedDataParallel(net(nn.BatchNorm1d(2)))
        names: list[str] = []
        ddp._register_buffer_comm_hook(names, average, location)
        with Join(ddp):
            for step in range(2 + sp.get_rank()):
                ddp(batch(step)).sum().backward()
        with ddp.no_sync():
            ddp(batch())
        return names, ddp.module[2].running_mean.numpy().tolist()

    (names, first), (others, second) = world.run(2, program)
    assert names == others == ["2.running_mean,2.running_var,2.num_batches_tracked"] * 3
    assert (first == second) is False  # the last pass, without a hook, was local to each rank


def test_hooks_for_buffers_are_checked():
    ddp = DistributedDataParallel(net())
    for hook, location in ((3, 0), (print, 2)):
        with refused(InputError):
            ddp._register_buffer_comm_hook(None, hook, location)


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
