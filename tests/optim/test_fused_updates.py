"""On a GPU, an update of all parameters is one kernel, with NumPy's values; updates that users write work as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from optimizers import every_optimizer, make, optimizer_names

import simparallel as sp
from simparallel import optim
from simparallel.backend import to_host
from simparallel.hardware.memory import OPTIMIZER
from simparallel.hardware.recorder import current_recorder
from simparallel.testing.strict import launches, xp

SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6)
STEPS = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), max_size=4)
# Optimizers that take norms start more kernels.
KERNELS = {"LAMB": ["lamb", "squares", "rates", "lamb_step"], "LARS": ["squares", "rates", "lars"]}
DTYPES = "float32", "float16", "float64"


class Layerwise(optim.Adam):
    """An optimizer of a user, with operations on arrays."""

    def update(self, param: sp.Tensor, grad: Any, group: Any) -> None:
        param.data -= grad / grad.size


class Half:
    """A mixin of a user: gradients depend on the size of a parameter."""

    def update(self, param: sp.Tensor, grad: Any, group: Any) -> None:
        super().update(param, grad / grad.size, group)  # type: ignore[misc]


class HalfSGD(Half, optim.SGD):
    pass


def trained(new: Any, on_device: Any, shapes: Any, steps: Any) -> list[Any]:
    """Return parameters and states after steps in which some parameters have no gradient.

    The last step is made by an optimizer that has loaded the state, with another weight decay.
    """
    rng = np.random.default_rng(0)

    def normal(shape: Any, number: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(DTYPES[number // 2 % 3])

    arrays = [on_device(normal(shape, i)) for i, shape in enumerate(shapes)]
    # Every other parameter is a transposed view.
    params = [sp.Tensor(a.T if i % 2 else a, requires_grad=True) for i, a in enumerate(arrays)]
    optimizer = new(params)
    for number, has_gradient in enumerate(steps):
        if number == len(steps) - 1:
            state = optimizer.state_dict()
            optimizer = new(params)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["weight_decay"] = 0.25
        grads = [on_device(normal(p.shape, i)) for i, p in enumerate(params)]
        optimizer([grad if has_gradient[i] else None for i, grad in enumerate(grads)])
    return [[p.numpy() for p in params], optimizer.state_dict()["state"]]


def numbers_of(value: Any) -> np.ndarray:
    """Return all numbers in nested lists, dicts and arrays."""
    if isinstance(value, (list, dict)):
        parts = list(map(numbers_of, value.values() if isinstance(value, dict) else value))
        return np.concatenate([*parts, []])
    return np.asarray(value, float).reshape(-1)


@pytest.mark.parametrize("name", [*optimizer_names(), "Layerwise", "HalfSGD"])
def test_update_on_device_is_numpys(name: str) -> None:
    """For any sizes, dtypes and memory orders, and parameters that miss some steps: to the bit without norms."""
    kinds = {"Layerwise": Layerwise, "HalfSGD": HalfSGD}
    settings = [s for other, s in every_optimizer() if other == name] or [{}]

    @example([(2, 2)] * 6, [[True] * 6] * 3, len(settings) - 1)
    @given(SHAPES, STEPS, st.integers(0, len(settings) - 1))
    def check(shapes: Any, steps: Any, chosen: int) -> None:
        def new(params: Any) -> optim.Optimizer:
            return kinds[name](params) if name in kinds else make(name, params, settings[chosen])

        found, expected = (trained(new, on_device, shapes, steps) for on_device in (xp.asarray, np.array))
        if name in KERNELS:
            np.testing.assert_allclose(numbers_of(found), numbers_of(expected), rtol=1e-3, atol=1e-6)
        else:
            np.testing.assert_equal(found, expected)

    check()


@pytest.mark.parametrize(("name", "settings"), every_optimizer(), ids=str)
def test_update_of_all_parameters_is_one_kernel(name: str, settings: dict[str, Any]) -> None:
    """For any dtype, and any number of parameters up to the limit of a kernel's arguments; more for norms."""
    for dtype in DTYPES:
        params = [sp.Tensor(xp.ones((i % 5, 3), dtype), requires_grad=True) for i in range(40)]
        optimizer = make(name, params, settings)
        grads = [xp.ones(p.shape, dtype) for p in params]
        for _ in range(2):
            with launches() as names:
                optimizer(grads)
        if name not in KERNELS:
            assert len(names) == 1
        elif dtype != "float16":  # whose norms are those of arrays of two dtypes
            assert names == KERNELS[name]


def test_update_of_an_instance_is_called() -> None:
    params = [sp.Tensor(xp.ones(3), requires_grad=True) for _ in range(9)]
    optimizer = optim.SGD(params, lr=1.0)
    seen: list[sp.Tensor] = []
    optimizer.update = lambda param, grad, group: seen.append(param)  # type: ignore[method-assign]
    optimizer([xp.ones(3)] * 9)
    assert list(map(id, seen)) == list(map(id, params))


def test_views_of_one_array_are_updated() -> None:
    """Each parameter shares an element with the next one."""

    def run(on_device: Any) -> np.ndarray:
        buffer = on_device(np.zeros(12))
        params = [sp.Tensor(buffer[i : i + 2], requires_grad=True) for i in range(10)]
        optim.SGD(params, lr=1.0)([on_device(np.ones(2))] * 10)
        return to_host(buffer)

    np.testing.assert_equal(run(xp.asarray), run(np.array))


@pytest.mark.parametrize("kind", [np.float32, np.float64, int])
def test_numbers_of_numpy_are_rates(kind: Any) -> None:
    """NumPy's numbers do not change the dtype of the arithmetic: float32 stays float32, as with Python's numbers."""

    def run(on_device: Any, lr: Any) -> np.ndarray:
        param = sp.Tensor(on_device(np.full(3, 1 / 3, np.float32)), requires_grad=True)
        optim.Adam([param], lr=lr)([on_device(np.full(3, 0.1, np.float32))])
        return param.numpy()

    expected = run(np.array, float(kind(1)))
    np.testing.assert_array_equal(run(np.array, kind(1)), expected, strict=True)
    np.testing.assert_array_equal(run(xp.asarray, kind(1)), expected, strict=True)


def test_state_on_a_device_is_counted() -> None:
    """Also while fewer and fewer parameters get a gradient."""

    def program() -> list[int]:
        params = [sp.Tensor(np.ones(100, np.float32), requires_grad=True) for _ in range(12)]
        optimizer = optim.Adam(params)
        held = []
        for number in range(3):
            optimizer([p.data * 0 + 1 if i >= number else None for i, p in enumerate(params)])
            held.append(current_recorder().memory.live[OPTIMIZER])
        return held

    assert sp.launch(program, world_size=1, transport="inline", array="cupy")[0] == [12 * 2 * 400] * 3
