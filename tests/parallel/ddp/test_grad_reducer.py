"""DistributedGradReducer: sums and means of gradients as values, without side effects."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import DTypeError, InputError, RunFailedError, ShapeError
from simparallel.parallel import DistributedGradReducer, broadcast_parameters

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHAPES = [(), (3,), (2, 3), (0,), (1, 4)]
DTYPES = ["float64", "float32", "float16"]


def parameters(kinds: list[tuple[tuple[int, ...], str]]) -> list[sp.Tensor]:
    return [sp.Tensor(np.zeros(shape, dtype), requires_grad=True) for shape, dtype in kinds]


def gradient(rank: int, i: int, shape: tuple[int, ...], dtype: str, holes: bool) -> np.ndarray | None:
    """Return small integers; None where this rank has no gradient."""
    if holes and (i % 3 == 1 or (rank + i) % 2 == 1):
        return None
    return np.random.default_rng(7 * i + rank).integers(-3, 4, shape).astype(dtype)


def reduce_all(kinds: list[Any], holes: bool, **settings: Any) -> list[np.ndarray | None]:
    sp.set_auto_parallel_context(gradients_mean=True)  # counts only if `mean` is not given
    reducer = DistributedGradReducer(parameters(kinds), **settings)
    rank = sp.get_rank()
    grads = [gradient(rank, i, shape, dtype, holes) for i, (shape, dtype) in enumerate(kinds)]
    given = [None if grad is None else grad.copy() for grad in grads]
    first = reducer(grads)
    second = reducer([None if grad is None else sp.Tensor(2 * grad) for grad in grads])
    for grad, before in zip(grads, given, strict=True):
        assert grad is None or np.array_equal(grad, before)
    for one, two in zip(first, second, strict=True):  # the first results are unchanged
        assert (one is None) == (two is None)
        assert one is None or np.array_equal(two.data, 2 * one.data)
    return [None if grad is None else np.array(grad.data) for grad in first]


def test_reduces_to_sum_or_mean(world):
    sizes = (1, 2, 4) if world.transport == "shm" else (1, 2, 3, 4)
    kinds = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=6)
    chosen = st.sampled_from([{}, {"mean": False}, {"mean": True}, {"mean": True, "degree": 2.0}])
    cases = st.tuples(st.sampled_from(sizes), kinds, st.booleans(), chosen)

    def body(case):
        size, kinds, holes, settings = case
        divisor = settings.get("degree", size) if settings.get("mean", True) else 1
        for results in world.run(size, lambda: reduce_all(kinds, holes, **settings)):
            for i, ((shape, dtype), got) in enumerate(zip(kinds, results, strict=True)):
                grads = [gradient(rank, i, shape, dtype, holes) for rank in range(size)]
                there = [grad for grad in grads if grad is not None]
                if not there:
                    assert got is None
                    continue
                total = np.sum(there, axis=0, dtype=np.float64) / divisor
                assert (got.shape, got.dtype) == (shape, np.dtype(dtype))
                np.testing.assert_allclose(got, total, rtol=1e-3 if dtype == "float16" else 1e-6)
                if divisor in (1, 2, 4):
                    assert np.array_equal(got, total.astype(dtype))

    world.check(cases, body, parts=2)


def test_group_reduces_by_itself(world):
    def program():
        groups = [sp.new_group([0, 2]), sp.new_group([1])]
        reducer = DistributedGradReducer(parameters([((2,), "float32")]), mean=True, group=groups[sp.get_rank() % 2])
        return reducer([np.full(2, sp.get_rank(), np.float32)])[0].numpy().tolist()

    assert list(world.run(3, program)) == [[1, 1]] * 3


def test_functional_loop_equals_one_device(world):
    """value_and_grad, reducer, optimizer(grads): the seed of data parallelism, exact on integers."""

    def program(size):
        sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False)
        net = sp.nn.Linear(3, 2, dtype=np.float64)
        for parameter in net.parameters():
            parameter.data[...] = np.arange(parameter.size).reshape(parameter.shape)
        optimizer = sp.optim.Momentum(net.trainable_params(), 2.0**-5, 0.5)
        grad_fn = sp.value_and_grad(lambda x, c: ((net(x) * c).sum(), x), None, net.trainable_params(), has_aux=True)
        reducer = DistributedGradReducer(optimizer.parameters)
        rows = slice(sp.get_rank() * 12 // size, (sp.get_rank() + 1) * 12 // size)
        for step in range(3):
            rng = np.random.default_rng(step)
            x, c = (rng.integers(-2, 3, (12, 3)).astype(float)[rows], rng.integers(-2, 3, (12, 2)).astype(float)[rows])
            (loss, _), grads = grad_fn(x, c)
            assert loss.shape == ()
            optimizer(reducer(grads))
        assert all(parameter.grad is None for parameter in net.parameters())
        moments = optimizer.state_dict()["state"].items()
        return net.state_dict() | {(i, name): value for i, state in moments for name, value in state.items()}

    (whole,) = world.run(1, program, 1)
    assert len(whole) == 4
    for size in range(2, 9) if world.transport == "inline" else (2, 4):  # 12 rows: uneven on 5, 7 and 8
        for state in world.run(size, program, size):
            assert all(np.array_equal(state[name], value) for name, value in whole.items())


def test_device_arrays_stay_on_the_device(arrays):

    def program():
        xp = arrays.xp
        params = [sp.Tensor(xp.zeros(shape, dtype=np.float32)) for shape in ((2, 3), (4,))]
        grads = [xp.full((2, 3), float(sp.get_rank()), dtype=np.float32), None]
        reduced = DistributedGradReducer(params, mean=True, degree=4)(grads)
        assert reduced[1] is None
        assert type(reduced[0].data) is arrays.type
        return reduced[0].numpy().tolist()

    assert list(sp.launch(program, world_size=3, transport="inline")) == [[[0.75] * 3] * 2] * 3


def test_one_collective_for_each_dtype():
    def program():
        kinds = [((2,), "float32"), ((3, 3), "float64"), ((5,), "float32")]
        DistributedGradReducer(parameters(kinds), mean=True)([np.zeros(*kind) for kind in kinds])

    events = sp.launch(program, world_size=2, transport="inline").trace.events
    assert [event.name for event in events if event.rank == 0] == ["all_reduce", "all_reduce"]


def test_broadcast_parameters(world):
    def program():
        group = sp.new_group([1, 0])
        tensors = [sp.Tensor(np.full(3, sp.get_rank())), sp.Tensor(np.full((), float(sp.get_rank())))]
        broadcast_parameters(tensors, group)
        return [tensor.numpy().tolist() for tensor in tensors]

    assert list(world.run(2, program)) == [[[1, 1, 1], 1.0]] * 2


def two() -> DistributedGradReducer:
    return DistributedGradReducer(parameters([((2,), "float32"), ((3,), "float32")]))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: DistributedGradReducer([]), InputError),
        (lambda: DistributedGradReducer([np.zeros(2)]), InputError),
        (lambda: DistributedGradReducer(parameters([((), "float32")]) * 2), InputError),
        (lambda: DistributedGradReducer(parameters([((), "float32")]), mean="yes"), InputError),
        (lambda: DistributedGradReducer(parameters([((), "float32")]), degree=0), InputError),
        (lambda: two()([np.zeros(2, np.float32)]), InputError),
        (lambda: two()([np.zeros(2, np.float32), 3.0]), InputError),
        (lambda: two()([np.zeros(2, np.float32), np.zeros(2, np.float32)]), ShapeError),
        (lambda: two()([np.zeros(2), np.zeros(3, np.float32)]), DTypeError),
    ],
)
def test_bad_arguments_are_refused(call, error):
    with refused(error):
        call()


def test_different_parameters_on_ranks_are_reported():
    def program():
        kinds = [((2 + sp.get_rank(),), "float32")]
        DistributedGradReducer(parameters(kinds))([np.zeros(*kinds[0])])

    with refused(RunFailedError):
        sp.launch(program, world_size=2, transport="inline")
