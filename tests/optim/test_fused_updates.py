"""On a GPU, an update of all parameters is one kernel, with NumPy's values; updates that users write work as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from optimizers import every_optimizer, make, optimizer_names
from stand_in.strict import launches, xp

import simparallel as sp
from simparallel import optim
from simparallel.arrays.cuda import arrays as cuda_arrays
from simparallel.backend import get_namespace, to_host
from simparallel.clock.memory import OPTIMIZER
from simparallel.clock.recorder import current_recorder

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


class ClampedLAMB(optim.LAMB):
    """An optimizer of a user that reads the parameter after an update."""

    def update(self, param: sp.Tensor, grad: Any, group: Any) -> None:
        super().update(param, grad, group)
        param.data[...] = get_namespace(param.data).clip(param.data, -0.5, 0.5)


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


@pytest.mark.parametrize("name", [*optimizer_names(), "Layerwise", "HalfSGD", "ClampedLAMB"])
def test_update_on_device_is_numpys(name: str) -> None:
    """For any sizes, dtypes and memory orders, and parameters that miss some steps: to the bit without norms."""
    kinds = {"Layerwise": Layerwise, "HalfSGD": HalfSGD, "ClampedLAMB": ClampedLAMB}
    settings = [s for other, s in every_optimizer() if other == name] or [{}]

    @example([(2, 2)] * 6, [[True] * 6] * 3, len(settings) - 1)
    @given(SHAPES, STEPS, st.integers(0, len(settings) - 1))
    def check(shapes: Any, steps: Any, chosen: int) -> None:
        def new(params: Any) -> optim.Optimizer:
            return kinds[name](params) if name in kinds else make(name, params, settings[chosen])

        found, expected = (trained(new, on_device, shapes, steps) for on_device in (xp.asarray, np.array))
        if name.endswith(tuple(KERNELS)):
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
        if name == "Muon":
            # Each matrix is made orthogonal by itself; those of 4 rows and 3 columns have another rate.
            assert [names[0], names[-1], names.count("momentum"), names.count("muon")] == ["momentum", "muon", 1, 2]
        elif name not in KERNELS:
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


def test_update_of_one_parameter_is_made_at_once() -> None:
    param = sp.Tensor(xp.ones(3), requires_grad=True)
    optimizer = optim.SGD([param], lr=0.5)
    optimizer.step()  # without a gradient
    optimizer.update(param, xp.ones(3), optimizer.param_groups[0])
    assert param.tolist() == [0.5] * 3


@pytest.mark.parametrize("name", KERNELS)
def test_groups_with_and_without_norms(name: str) -> None:
    """In one group the step of LAMB adds weight decay, in the others it does not, or has no norms."""

    def run(on_device: Any) -> list[np.ndarray]:
        params = [sp.Tensor(on_device(np.linspace(-1, 1, 5 + i)), requires_grad=True) for i in range(4)]
        settings = [{}, {"weight_decay": 0.1}, {"adapt": False}, {"adapt": False, "weight_decay": 0.1}]
        optimizer = getattr(optim, name)([{"params": [p], **s} for p, s in zip(params, settings, strict=True)], lr=0.1)
        for _ in range(3):
            optimizer([on_device(np.ones(p.shape)) for p in params])
        return [p.numpy() for p in params]

    np.testing.assert_allclose(numbers_of(run(xp.asarray)), numbers_of(run(np.array)), rtol=1e-9)


def test_steps_of_lamb_wait_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of one parameter after the other, where many would take too much memory."""
    params = [sp.Tensor(xp.ones(64), requires_grad=True) for _ in range(12)]
    optimizer, grads = optim.LAMB(params, lr=0.1), [xp.ones(64)] * 12
    optimizer(grads)  # makes the state
    with launches() as together:
        optimizer(grads)
    monkeypatch.setattr(cuda_arrays, "CHUNK_BYTES", 3 * 64 * 8)
    with launches() as in_parts:
        optimizer(grads)
    assert in_parts == 3 * together


def sharded(name: str) -> list[Any]:
    sp.manual_seed(0)
    mesh = sp.Layout((2,), ("tp",))
    layer = sp.parallel.ColumnParallelLinear(8, 12, mesh, "tp", True, True, np.float32)
    optimizer = getattr(optim, name)(layer.parameters(), lr=0.1)
    x = sp.parallel.distribute_tensor(np.arange(32, dtype=np.float32).reshape(4, 8) / 32, mesh("None", "None"))
    for _ in range(3):
        optimizer.zero_grad()
        (layer(x) ** 2).mean().backward()
        optimizer.step()
    return [p.full_tensor().numpy() for p in layer.parameters()]


@pytest.mark.parametrize("name", [*KERNELS, "Adam"])
def test_sharded_parameters_have_whole_norms(name: str) -> None:
    found, expected = (
        list(sp.launch(sharded, (name,), world_size=2, transport="inline", array=array)) for array in ("cupy", "numpy")
    )
    np.testing.assert_allclose(numbers_of(found), numbers_of(expected), rtol=1e-5, atol=1e-7)


def test_rates_of_float16_are_float32() -> None:
    """The rate of this step, 1e-8, is 0 in float16."""
    param = sp.Tensor(xp.ones(1000, "float16"), requires_grad=True)
    optimizer = optim.LARS([param], lr=1e-3, momentum=0.0)
    optimizer([xp.full(1000, 100.0, "float16")])
    np.testing.assert_allclose(optimizer.state[param]["momentum_buffer"].get(), 1e-6, rtol=1e-4)


def test_gradients_of_any_strides_are_only_read() -> None:
    param = sp.Tensor(xp.zeros((3, 4)), requires_grad=True)
    optimizer = optim.SGD([param], lr=1.0)
    one = xp.asarray(np.arange(4.0))
    for gradient in (xp.broadcast_to(one, (3, 4)), xp.asarray(np.arange(12.0).reshape(4, 3)).T):
        with launches() as names:
            optimizer([gradient])
        assert names == ["ascontiguousarray", "sgd"]
    np.testing.assert_array_equal(param.numpy(), -(np.arange(4.0) + np.arange(12.0).reshape(4, 3).T))


@pytest.mark.parametrize("on_device", [xp.asarray, np.array])
def test_error_in_a_step_keeps_earlier_updates(on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in host memory: states and parameters change together, and a later step goes on from there."""
    params = [sp.Tensor(on_device(np.ones(2)), requires_grad=True) for _ in range(2)]
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)
    remembered = optimizer._remembered

    def fail(param: sp.Tensor, group: Any) -> Any:
        if param is params[1]:
            raise MemoryError
        return remembered(param, group)

    monkeypatch.setattr(optimizer, "_remembered", fail)
    with pytest.raises(MemoryError):
        optimizer([on_device(np.ones(2))] * 2)
    assert [p.tolist() for p in params] == [[0.9, 0.9], [1.0, 1.0]]
    monkeypatch.undo()
    optimizer([on_device(np.ones(2))] * 2)
    np.testing.assert_allclose([p.numpy() for p in params], [[0.76] * 2, [0.9] * 2])


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_clip(kind: Any) -> None:
    param = sp.Tensor(xp.zeros(4, "float32"), requires_grad=True)
    param.grad = xp.full(4, 2.0, "float32")
    assert optim.clip_grad_norm_([param], kind(2)) == 4.0
    np.testing.assert_allclose(param.grad.numpy(), 1.0, rtol=1e-5)
    param.grad = xp.full(4, 2.0, "float32")
    optim.clip_grad_value_([param], kind(1))
    assert param.grad.numpy().max() == 1.0
