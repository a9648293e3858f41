"""DistributedDataParallel: the single-device result, on any number of ranks, with any buckets."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.clock.event import COMPUTE
from simparallel.errors import (
    CollectiveMismatchError,
    InputError,
    NonFiniteLossError,
    RunFailedError,
    UnusedParameterError,
)
from simparallel.nn import Linear, Module, ReLU, Sequential, Tanh
from simparallel.parallel.ddp.buckets import make_buckets
from simparallel.parallel.ddp.distributed import MIB, DistributedDataParallel
from simparallel.parallel.ddp.shared_buffers import max_difference_between_ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 4  # of each rank: a power of two, so that dividing by it is exact


# --- models and training ----------------------------------------------------------------------------


def plain() -> Module:
    return Sequential(Linear(3, 5, dtype=np.float64), ReLU(), Linear(5, 3, dtype=np.float64))


def frozen() -> Module:
    model = plain()
    next(model.parameters()).requires_grad_(False)
    return model


class Tied(Module):
    """One weight, used twice; its gradient is complete only after both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(3, 3, dtype=np.float64)
        self.second = Linear(3, 3, dtype=np.float64)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> sp.Tensor:
        return self.second(self.first(x))


class Mixed(Module):
    """A float32 layer between float64 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Linear(3, 3, dtype=np.float64)
        self.narrow = Linear(3, 3, dtype=np.float32)
        self.last = Linear(3, 3, dtype=np.float64)

    def forward(self, x: Any) -> sp.Tensor:
        y = self.last(self.wide(x))
        return y + self.narrow(np.asarray(x, np.float32))


MODELS = {"plain": plain, "frozen": frozen, "tied": Tied, "mixed": Mixed}


def set_integers(model: Module, seed: int) -> Module:
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.data[...] = rng.integers(-3, 4, parameter.shape)
    return model


def batch(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return rng.integers(-2, 3, (size * ROWS, 3)).astype(float), rng.integers(-2, 3, (size * ROWS, 3)).astype(float)


def rows_of(rank: int) -> slice:
    return slice(rank * ROWS, (rank + 1) * ROWS)


def weighted(model: Any, x: np.ndarray, c: np.ndarray, scale: float) -> sp.Tensor:
    """Return a loss linear in the outputs: with integers every gradient is exact."""
    return (model(x) * (c * scale)).sum()


def train_single(name: str, size: int, num_steps: int) -> list[np.ndarray]:
    model = set_integers(MODELS[name](), 0)
    optimizer = sp.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0**-3)
    for step in range(num_steps):
        x, c = batch(step, size)
        optimizer.zero_grad()
        weighted(model, x, c, 1 / ROWS).backward()
        optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def train(name: str, cap_mb: float, num_steps: int) -> list[np.ndarray]:
    """Train on a part of the batch; ranks begin with different weights, and rank 0's are broadcast."""
    rank, size = sp.get_rank(), sp.get_world_size()
    model = DistributedDataParallel(set_integers(MODELS[name](), rank), bucket_cap_mb=cap_mb)
    optimizer = sp.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0**-3)
    for step in range(num_steps):
        x, c = batch(step, size)
        optimizer.zero_grad()
        # `size` times: the mean over ranks is then the sum over the batch, with no rounding.
        weighted(model, x[rows_of(rank)], c[rows_of(rank)], size / ROWS).backward()
        optimizer.step()
    assert max_difference_between_ranks(model) == 0
    return [np.array(parameter.data) for parameter in model.parameters()]


def test_equals_one_device_exactly(world):
    sizes = (1, 2, 3, 4, 5) if world.transport == "inline" else (1, 2, 4)
    caps = st.one_of(st.floats(1 / MIB, 300 / MIB), st.just(25.0))
    cases = st.tuples(st.sampled_from(sizes), st.sampled_from(sorted(MODELS)), caps)

    def body(case):
        size, name, cap_mb = case
        expected = train_single(name, size, 2)
        for parameters in world.run(size, train, name, cap_mb, 2):
            assert len(parameters) == len(expected)
            for got, wanted in zip(parameters, expected, strict=True):
                assert np.array_equal(got, wanted)

    world.check(cases, body)


def test_equals_one_device_within_rounding(world):
    """Random weights and a mean over the whole batch: 1e-12 of the largest weight after 5 steps."""

    def program(num_ranks):
        sp.manual_seed(3)
        model: Any = Sequential(Linear(3, 7, dtype=np.float64), Tanh(), Linear(7, 3, dtype=np.float64))
        rank, rows = sp.get_rank(), slice(None)
        if sp.get_world_size() > 1:
            model, rows = DistributedDataParallel(model), rows_of(rank)
        optimizer = sp.optim.Adam(model.parameters(), lr=0.01)
        for step in range(5):
            x, c = batch(step, num_ranks)
            optimizer.zero_grad()
            sp.functions.mean(model(x[rows]) * c[rows]).backward()
            optimizer.step()
        return [np.array(parameter.data) for parameter in model.parameters()]

    with World("inline") as single:
        (expected,) = single.run(1, program, 3)
    results = world.run(3, program, 3)
    for got in results:
        for a, b, first in zip(got, expected, results[0], strict=True):
            assert a.tobytes() == first.tobytes()  # all roundings are common to all ranks
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * abs(b).max())


def test_two_backwards_add_up(world):
    """Without zero_grad, `.grad` is the mean over ranks of the sum of both losses' gradients."""

    def program():
        rank, size = sp.get_rank(), sp.get_world_size()
        model = DistributedDataParallel(set_integers(plain(), 0), bucket_cap_mb=100 / MIB)
        for step in range(2):
            x, c = batch(step, size)
            weighted(model, x[rows_of(rank)], c[rows_of(rank)], size / ROWS).backward()
        return [np.array(parameter.grad.data) for parameter in model.parameters()]

    for size in (1, 2, 3):
        single = set_integers(plain(), 0)
        for step in range(2):
            weighted(single, *batch(step, size), 1 / ROWS).backward()
        for gradients in world.run(size, program):
            for got, parameter in zip(gradients, single.parameters(), strict=True):
                assert np.array_equal(got, parameter.grad.data)


def test_gradients_are_views_of_buckets(world):
    def program():
        model = DistributedDataParallel(set_integers(plain(), 0), bucket_cap_mb=100 / MIB)
        optimizer = sp.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            x, c = batch(step, 1)
            weighted(model, x, c, 1.0).backward()
            optimizer.step()
            for bucket in model._reducer.buckets:
                for parameter, view in zip(bucket.tensors, bucket.views, strict=True):
                    assert parameter.grad.data is view
                    assert view.base is not None
                    assert np.shares_memory(view, bucket.flat)
        return [bucket.flat.size for bucket in model._reducer.buckets], repr(model).count("bytes")

    # Reversed: bias (3) and weight (3, 5), then bias (5) and weight (5, 3), 8 bytes each, 100 at most.
    assert list(world.run(2, program)) == [([3, 15, 5, 15], 1)] * 2


def test_groups_train_by_themselves(world):
    def program():
        rank = sp.get_rank()
        groups = [sp.new_group([2, 0]), sp.new_group([1])]
        group = groups[rank % 2]
        model = DistributedDataParallel(set_integers(plain(), rank), group=group)
        weighted(model, *batch(rank, 1), 1.0).backward()
        return [np.array(p.data) for p in model.parameters()], [np.array(p.grad.data) for p in model.parameters()]

    results = world.run(3, program)
    for members in ((2, 0), (1,)):
        model = set_integers(plain(), members[0])  # the first one's weights win
        for rank in members:
            weighted(model, *batch(rank, 1), 1.0).backward()
        for rank in members:
            for got, parameter in zip(results[rank][0], model.parameters(), strict=True):
                assert np.array_equal(got, parameter.data)
            for got, parameter in zip(results[rank][1], model.parameters(), strict=True):
                assert np.array_equal(got, parameter.grad.data / len(members))


# --- buckets ----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(("float64", "float32", "float16"))), min_size=1, max_size=12
    ),
    st.integers(1, 500),
)
def test_buckets_are_a_partition_in_reverse_order(parameters, cap_bytes):
    tensors = [sp.Tensor(np.zeros(size, dtype), requires_grad=True) for size, dtype in parameters]
    buckets = make_buckets(tensors, cap_bytes, SimpleNamespace(empty=np.empty))
    assert [id(t) for bucket in buckets for t in bucket.tensors] == [id(t) for t in reversed(tensors)]
    for bucket in buckets:
        assert {t.dtype for t in bucket.tensors} == {bucket.flat.dtype}
        assert bucket.flat.nbytes <= cap_bytes or len(bucket.tensors) == 1
        for i, view in enumerate(bucket.views):
            view[...] = i
        assert bucket.flat.tolist() == [i for i, t in enumerate(bucket.tensors) for _ in range(t.size)]
    for one, two in zip(buckets, buckets[1:], strict=False):  # no border without a reason
        first = two.tensors[0]
        assert one.flat.dtype != first.dtype or one.flat.nbytes + first.data.nbytes > cap_bytes


@pytest.mark.parametrize("cap_mb", [0, -1, float("nan")])
def test_bad_caps_are_refused(cap_mb):
    with refused(InputError):
        DistributedDataParallel(plain(), bucket_cap_mb=cap_mb)


def test_model_without_parameters_is_refused():
    with refused(InputError):
        DistributedDataParallel(plain().requires_grad_(False))


# --- time -------------------------------------------------------------------------------------------


def test_buckets_overlap_with_backward(world):
    def program():
        layers = [Linear(64, 64, dtype=np.float64) for _ in range(4)]
        model = DistributedDataParallel(Sequential(*layers), bucket_cap_mb=40_000 / MIB)
        model(np.ones((8, 64))).sum().backward()
        return len(model._reducer.buckets)

    results = world.run(2, program)
    assert list(results) == [4, 4]
    for rank in range(2):
        own = [event for event in results.trace.events if event.rank == rank]
        backward = [event for event in own if event.kind == "backward" and event.stream == COMPUTE]
        buckets = [event for event in own if event.name == "all_reduce"]
        assert len(buckets) == 4
        assert buckets[0].sim_start_ps < buckets[1].sim_start_ps
        assert buckets[0].sim_start_ps < max(event.sim_end_ps for event in backward)
        assert buckets[-1].sim_start_ps >= max(event.sim_end_ps for event in backward)


# --- failures ---------------------------------------------------------------------------------------


def failure(world: World, size: int, program: Any) -> RunFailedError:
    with refused(RunFailedError) as caught:
        world.run(size, program)
    return caught.value


def other_size() -> Module:
    return Sequential(Linear(3, 5 + sp.get_rank(), dtype=np.float64))


def other_dtype() -> Module:
    return Sequential(Linear(3, 5, dtype=(np.float64, np.float32)[sp.get_rank() // 2]))


def other_number() -> Module:
    return Sequential(*(Linear(3, 3, dtype=np.float64) for _ in range(2 + (sp.get_rank() == 2))))


def other_frozen() -> Module:
    model = Sequential(Linear(3, 3, dtype=np.float64), Linear(3, 3, dtype=np.float64))
    list(model.children())[sp.get_rank() == 2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (other_size, r"0\.weight.*\(5, 3\).*\(6, 3\)"), (other_dtype, "float64.*float32"),
        (other_number, "4 and 6 parameters"), (other_frozen, r"0\.weight.*frozen.*trained"),
    ],
)  # fmt: skip
def test_models_that_differ(world, make, match):
    error = failure(world, 3, lambda: DistributedDataParallel(make()))
    assert isinstance(error.__cause__, CollectiveMismatchError)
    assert set(error.reports) == {0, 1, 2}
    assert re.search(match, str(error.__cause__))


def test_unused_parameter_is_named(world):
    class Half(Module):
        def __init__(self):
            super().__init__()
            self.used = Linear(3, 3, dtype=np.float64)
            self.idle = Linear(3, 3, dtype=np.float64)

        def forward(self, x):
            return self.used(x)

    def program():
        DistributedDataParallel(Half())(np.ones((2, 3))).sum().backward()

    error = failure(world, 2, program)
    assert isinstance(error.__cause__, UnusedParameterError)
    assert sorted(error.__cause__.names) == ["idle.bias", "idle.weight"]


def test_nonfinite_loss(world):
    def program():
        model = DistributedDataParallel(set_integers(plain(), 0))
        optimizer = sp.optim.SGD(model.parameters(), lr=2.0**-3)
        for step in range(4):
            x, c = batch(step, 1)
            if (sp.get_rank(), step) == (1, 2):
                c[0] = np.nan
            optimizer.zero_grad()
            weighted(model, x, c, 1.0).backward()
            optimizer.step()

    error = failure(world, 3, program)
    assert isinstance(error.__cause__, NonFiniteLossError)
    assert (error.rank, error.__cause__.rank, error.__cause__.step) == (1, 1, 2)
    assert set(error.reports) == {0, 1, 2}
    for rank in (0, 2):
        assert error.reports[rank]["secondary"]
        assert "rank 1 failed with" in error.reports[rank]["summary"]
        assert "NonFiniteLossError" in error.reports[rank]["summary"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dropout_masks_match_the_whole_batch(world_size):
    """Each rank's mask is its part of one device's mask for the whole batch."""

    def program(rows):
        sp.manual_seed(5)
        model = sp.nn.Sequential(sp.nn.Linear(4, 4, bias=False), sp.nn.Dropout(0.5))
        model[0].weight.data[...] = np.eye(4)
        ddp = sp.parallel.DistributedDataParallel(model)
        x = np.ones((rows, 4), np.float32)
        return [ddp(sp.Tensor(x)).numpy() for _ in range(3)]

    (whole,) = sp.launch(program, (12,), world_size=1, transport="inline")
    parts = sp.launch(program, (12 // world_size,), world_size=world_size, transport="inline")
    for call in range(3):
        assert np.array_equal(np.concatenate([part[call] for part in parts]), whole[call])
    assert not np.array_equal(whole[0], whole[1])
