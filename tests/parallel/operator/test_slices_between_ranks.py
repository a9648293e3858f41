"""Only ranks with equal slices may average gradients, copy weights or sum deltas; others are refused in time."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError, RunFailedError
from simparallel.nn import Linear, Module, ReLU, Sequential
from simparallel.parallel import (
    AdasumOptimizer,
    AutoParallel,
    ColumnParallelLinear,
    DistributedDataParallel,
    DistributedGradReducer,
    RowParallelLinear,
    distribute_module,
    distribute_tensor,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = np.random.default_rng(0).standard_normal((8, 4))


def plain() -> Module:
    return Sequential(Linear(4, 8, dtype=np.float64), ReLU(), Linear(8, 4, dtype=np.float64))


class Columns(Module):
    """One product; its strategy cuts the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = sp.nn.Parameter(np.ones((4, 8)))
        self.product = sp.ops.MatMul().shard(((1, 1), (1, sp.get_world_size())))

    def forward(self, x):
        return self.product(x, self.weight)


def cut(layout: sp.Layout) -> Module:
    up = ColumnParallelLinear(4, 8, layout, "tp", dtype=np.float64)
    return Sequential(up, ReLU(), RowParallelLinear(8, 4, layout, "tp", dtype=np.float64))


def failure(world: World, size: int, program) -> str:
    """Return the text of the error that a program raises on every rank, and check that the weights are unchanged."""

    def watched():
        sp.manual_seed(0)
        model = cut(sp.Layout((size,), ("tp",)))
        before = [parameter.data.copy() for parameter in model.parameters()]
        with refused(InputError) as caught:
            program(model)
        for parameter, then in zip(model.parameters(), before, strict=True):
            assert np.array_equal(parameter.data, then)
        return str(caught.value)

    texts = world.run(size, watched)
    assert len(set(texts)) == 1
    return texts[0]


SHARERS = {
    "DistributedDataParallel": DistributedDataParallel,
    "AdasumOptimizer": lambda model: AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("name", SHARERS)
def test_ranks_with_other_slices_are_refused(inline, name):
    text = failure(inline, 2, SHARERS[name])
    assert text.startswith(name)
    assert "rank 0 holds [0:4, 0:4], rank 1 [4:8, 0:4]" in text
    assert "No two ranks" in text


@given(dp=st.integers(1, 3), tp=st.integers(1, 3), name=st.sampled_from(sorted(SHARERS)))
def test_ranks_with_equal_slices_are_suggested(dp, tp, name):
    """All ranks only where nothing is cut; the groups in the message are the ones that work."""

    def program():
        layout = sp.Layout((dp, tp), ("dp", "tp"))
        model = distribute_module(Sequential(Linear(4, 6)), layout, {"0.weight": ("tp", "None"), "0.bias": ("tp",)})
        try:
            SHARERS[name](model)
        except InputError as error:
            return str(error)
        return ""

    groups = [[i * tp + j for i in range(dp)] for j in range(tp)]
    with World("inline") as world:
        for text in world.run(dp * tp, program):
            if tp == 1:
                assert text == ""
            elif dp == 1:
                assert "No two ranks" in text
            else:
                assert " or ".join(map(str, groups)) in text


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_group_of_equal_slices_equals_one_device(transport):
    """One mesh axis cuts the batch, the other the weights; DDP runs between ranks of equal slices."""

    def program():
        sp.manual_seed(0)
        layout = sp.Layout((2, 2), ("dp", "tp"))
        model = cut(layout)
        groups = [sp.new_group([0, 2]), sp.new_group([1, 3])]
        wrapped = DistributedDataParallel(model, process_group=groups[sp.get_rank() % 2])
        optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (wrapped(distribute_tensor(X, layout("dp", "None"))) ** 2).mean().backward()
            optimizer.step()
        return [np.array(parameter.data) for parameter in model.parameters()]

    sp.manual_seed(0)
    model = plain()
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(X) ** 2).mean().backward()
        optimizer.step()
    up, bias, down, last = (parameter.data for parameter in model.parameters())
    with World(transport) as world:
        for rank, got in enumerate(world.run(4, program)):
            half = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
            for a, b in zip(got, (up[half], bias[half], down[:, half], last), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_wrapped_parameters_cannot_be_cut_later(inline):
    def in_auto_parallel():
        model = Columns()
        wrapped = DistributedDataParallel(model)
        before = [parameter.data.copy() for parameter in model.parameters()]
        step = AutoParallel(lambda x: wrapped(x).sum())
        with refused(InputError):
            step(X)
        for parameter, then in zip(model.parameters(), before, strict=True):
            assert np.array_equal(parameter.data, then)

    def by_name():
        model = plain()
        DistributedDataParallel(model)
        layout = sp.Layout((2,), ("tp",))
        with refused(InputError):
            distribute_module(model, layout, {"2.weight": ("None", "tp")})
        assert all(parameter.placement is None for parameter in model.parameters())

    inline.run(2, in_auto_parallel)
    inline.run(2, by_name)


def test_auto_parallel_without_cuts_may_be_wrapped(inline):
    def program():
        sp.manual_seed(0)
        model = plain()
        wrapped = DistributedDataParallel(model)
        AutoParallel(lambda x: (wrapped(x) ** 2).mean().backward())(X)
        return [parameter.grad.data for parameter in model.parameters()]

    sp.manual_seed(0)
    model = plain()
    (model(X) ** 2).mean().backward()
    for got in inline.run(2, program):
        for a, parameter in zip(got, model.parameters(), strict=True):
            np.testing.assert_allclose(a, parameter.grad.data, rtol=0, atol=1e-12)


def test_grad_reducer_refuses_cut_gradients(inline):
    def program(model):
        layout = sp.Layout((2,), ("tp",))
        (model(distribute_tensor(X, layout("None", "None"))) ** 2).mean().backward()
        parameters = list(model.parameters())
        DistributedGradReducer(parameters, mean=True)([parameter.grad for parameter in parameters])

    assert "parameter 0 of shape (8, 4) is sharded" in failure(inline, 2, program)


def test_adasum_finds_different_models(inline):
    with refused(RunFailedError):
        inline.run(2, lambda: SHARERS["AdasumOptimizer"](Linear(3, 2 + sp.get_rank())))
