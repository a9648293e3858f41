"""Every optimizer of `sp.optim`, clipping and loss scaling give NumPy's values on device arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_backends import ArrayBackend
from optimizers import every_optimizer, make, suited
from stand_in import strict

import simparallel as sp
from simparallel import optim
from simparallel.backend import to_host


def parameters(on_device: Any, dtype: str) -> list[sp.Tensor]:
    """Return a matrix in C order, one that is not contiguous, a vector, and one without elements."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(dtype) for shape in ((3, 4), (5, 2), (700,), (0, 3))]
    arrays = [on_device(value) for value in values]
    arrays[1] = arrays[1].T
    return [sp.Tensor(array, requires_grad=True) for array in arrays]


def gradients(on_device: Any, params: list[sp.Tensor], step: int) -> list[Any]:
    rng = np.random.default_rng([1, step])
    return [on_device(rng.standard_normal(p.shape).astype(p.dtype)) for p in params]


def stepped(on_device: Any, name: str, settings: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Take two steps, save, load into another optimizer, and take a third."""
    params = suited(name, parameters(on_device, dtype))
    optimizer = make(name, params, settings)
    norms = []
    for step in range(3):
        if step == 2:
            state = optimizer.state_dict()
            optimizer = make(name, params, settings)
            optimizer.load_state_dict(state)
        for p, gradient in zip(params, gradients(on_device, params, step), strict=True):
            p.grad = gradient
        for norm_type in (1.0, 2.0, float("inf")):
            norms.append(optim.clip_grad_norm_(params, 20.0, norm_type))
        optim.clip_grad_value_(params, 1.5)
        optimizer.step()
    assert all(type(array) is type(params[0].data) for array in (p.data for p in params))
    return {"values": [p.numpy() for p in params], "state": optimizer.state_dict(), "norms": norms}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("name", "settings"), every_optimizer(), ids=str)
def test_optimizer_on_device_equals_numpy(arrays: Any, name: str, settings: dict[str, Any], dtype: str) -> None:
    found, expected = (stepped(on_device, name, settings, dtype) for on_device in (arrays.on_device, np.array))
    # A GPU adds the norms up in float64.
    ArrayBackend(arrays.name, 10, is_exact=False).assert_all_equal(found, expected)


@pytest.mark.parametrize(("name", "settings"), every_optimizer(), ids=str)
def test_flops_are_the_operations(name: str, settings: dict[str, Any]) -> None:
    """Without norms, each operation passes over all elements."""
    more: dict[str, Any] = {"adapt": False} if name in ("LAMB", "LARS") else {}
    # The products are priced apart; without them a matrix is divided by its norm.
    norm = ["mul", "sum", "sqrt", "maximum", "true_divide"] if name == "Muon" else []
    if norm:
        more = {"ns_steps": 0}
    param = sp.Tensor(strict.xp.ones((3, 4)), requires_grad=True)
    optimizer = make(name, [param], {**settings, **more})
    gradient = strict.xp.ones((3, 4))
    # The first steps of RAdam have no denominator.
    for _ in range(7):
        with strict.operations() as operations, strict.launches() as kernels:
            optimizer([gradient])
    assert optimizer.work(optimizer.param_groups[0])[0] == len(operations) - len(norm)
    assert len(kernels) == (2 if name in ("LAMB", "Muon") else 1) + len(norm)


def test_gradients_given_as_a_list(arrays: Any) -> None:
    """MindSpore's way to step."""

    def run(on_device: Any) -> list[np.ndarray]:
        params = parameters(on_device, "float32")
        optimizer = optim.Adam(params)
        for step in range(2):
            optimizer(gradients(on_device, params, step))
        return [p.numpy() for p in params]

    arrays.after(10).assert_all_equal(run(arrays.on_device), run(np.array))


def test_finiteness_of_device_arrays(arrays: Any) -> None:
    good, bad = (arrays.on_device(np.array([1.0, value], np.float16)) for value in (2.0, np.inf))
    assert optim.all_finite([good, sp.Tensor(good)])
    assert not optim.all_finite([good, bad])


def scaling_names() -> list[str]:
    return [name for name in optim.__all__ if "LossScale" in name and name != "LossScaleManager"]


@pytest.mark.parametrize("manager", [None, *scaling_names()])
def test_loss_scaling_on_device_equals_numpy(arrays: Any, manager: str | None) -> None:
    """The second step overflows float16, and is skipped."""

    def run(on_device: Any) -> list[Any]:
        (w, *_) = parameters(on_device, "float16")
        optimizer = optim.SGD([w], lr=0.1)
        made = None if manager is None else getattr(optim, manager)(4.0)
        scaler = optim.GradScaler(init_scale=4.0, growth_interval=1) if made is None else optim.GradScaler(made)
        history = []
        for step in range(3):
            x = sp.Tensor(on_device(np.full((4, 3), 6e4 if step == 1 else 0.5, np.float16)))
            scaler.scale((x @ w).mean()).backward(check_finite=False)
            scaler.unscale_(optimizer)
            optim.clip_grad_norm_([w], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history += [w.numpy().copy(), scaler.get_scale()]
        return history

    with np.errstate(over="ignore", invalid="ignore"):
        found, expected = run(arrays.on_device), run(np.array)
    arrays.after(3).assert_all_equal(found, expected)


def test_state_stays_on_the_device(arrays: Any) -> None:
    (w, *_) = parameters(arrays.on_device, "float32")
    optimizer = optim.Adam([w])
    w.grad = arrays.on_device(np.ones((3, 4), np.float32))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    moments = [value for value in optimizer.state[w].values() if hasattr(value, "shape")]
    assert moments
    assert all(type(moment) is arrays.type for moment in moments)
    assert all(type(to_host(moment)) is np.ndarray for moment in moments)
