"""On a GPU, small parameters are joined for an update: the values are those of one by one, with few kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import simparallel as sp
from simparallel import optim
from simparallel.backend import to_host
from simparallel.hardware.memory import OPTIMIZER
from simparallel.hardware.recorder import current_recorder
from simparallel.optim import optimizer as module
from simparallel.testing.strict import launches, xp

JOINING = {
    "SGD": {"lr": 0.5, "momentum": 0.5},
    "Momentum": {"learning_rate": 0.5, "momentum": 0.5, "loss_scale": 4.0},
    "Adam": {"amsgrad": True, "maximize": True},
    "AdamW": {},
    "Adamax": {"weight_decay": 0.5},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "Adadelta": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
}
SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=12)
STEPS = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), max_size=4)
DTYPES = "float32", "float16", "float64"


class Layerwise(optim.Adam):
    """An optimizer of a user, who knows nothing of joined parameters."""

    def update(self, param: sp.Tensor, grad: Any, group: Any) -> None:
        param.data -= grad / grad.size


class Half:
    """A mixin of a user: gradients depend on the size of a parameter."""

    def update(self, param: sp.Tensor, grad: Any, group: Any) -> None:
        super().update(param, grad / grad.size, group)  # type: ignore[misc]


class HalfSGD(Half, optim.SGD):
    pass


def trained(kind: Any, settings: dict[str, Any], on_device: Any, shapes: Any, steps: Any) -> list[Any]:
    """Return parameters and states after steps in which some parameters have no gradient.

    The last step is made by an optimizer that has loaded the state, with another weight decay.
    """
    rng = np.random.default_rng(0)

    def integers(shape: Any, number: int) -> np.ndarray:
        return rng.integers(-4, 5, shape).astype(DTYPES[number // 2 % 3])

    params = [sp.Tensor(on_device(integers(shape, i)), requires_grad=True) for i, shape in enumerate(shapes)]
    groups = [{"params": params[::2]}, *([{"params": params[1::2]}] if params[1:] else [])]
    order = [*range(len(params))[::2], *range(len(params))[1::2]]
    optimizer = kind(groups, **settings)
    for number, has_gradient in enumerate(steps):
        if number == len(steps) - 1:
            state = optimizer.state_dict()
            optimizer = kind(groups, **settings)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["weight_decay"] = 0.25
        grads = [on_device(integers(params[i].shape, i)) for i in order]
        optimizer([grad if has_gradient[i] else None for grad, i in zip(grads, order, strict=True)])
    return [[p.numpy() for p in params], optimizer.state_dict()["state"]]


@pytest.mark.parametrize("name", JOINING)
@pytest.mark.parametrize("most", [2, 3, 64])
def test_joined_update_is_one_by_one(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """To the bit: for any sizes and dtypes, and parameters that miss some steps."""
    monkeypatch.setattr(module, "LEAST_JOINED", 2)
    monkeypatch.setattr(module, "MOST_JOINED", most)
    joined: list[set[Any]] = []
    together = optim.Optimizer._update_joined

    def spy(self: Any, bundle: Any, group: Any) -> None:
        joined.append({param.dtype for param, _ in bundle})
        assert 2 <= len(bundle) <= most
        together(self, bundle, group)

    monkeypatch.setattr(optim.Optimizer, "_update_joined", spy)
    kind, settings = getattr(optim, name), JOINING[name]

    @example([(2, 2)] * 12, [[True] * 12] * 3)
    @given(SHAPES, STEPS)
    def check(shapes: Any, steps: Any) -> None:
        found, expected = (trained(kind, settings, on_device, shapes, steps) for on_device in (xp.asarray, np.array))
        np.testing.assert_equal(found, expected)

    check()
    assert set.union(*joined) == set(map(np.dtype, DTYPES))


def test_different_states_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter has the mean gradient of a centered step, the second one a momentum."""
    monkeypatch.setattr(module, "LEAST_JOINED", 2)

    def run(on_device: Any) -> list[np.ndarray]:
        params = [sp.Tensor(on_device(np.ones(3)), requires_grad=True) for _ in range(2)]
        optimizer = optim.RMSprop(params, centered=True)
        optimizer([on_device(np.ones(3)), None])
        optimizer.param_groups[0].update(centered=False, momentum=0.5)
        optimizer([None, on_device(np.ones(3))])
        optimizer([on_device(np.ones(3))] * 2)
        return [param.numpy() for param in params]

    np.testing.assert_equal(run(xp.asarray), run(np.array))


def test_failed_update_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [sp.Tensor(xp.ones(3), requires_grad=True) for _ in range(9)]
    optimizer = optim.Adam(params)
    optimizer([xp.ones(3)] * 9)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(optim.Adam, "_pieces", fail)
        with pytest.raises(MemoryError):
            optimizer([xp.ones(3)] * 9)
    assert set(optimizer.state) == set(params)
    assert len(optimizer.state_dict()["state"]) == 9


def test_views_are_not_joined() -> None:
    """Each parameter shares an element with the next one."""

    def run(on_device: Any) -> np.ndarray:
        buffer = on_device(np.zeros(12))
        params = [sp.Tensor(buffer[i : i + 2], requires_grad=True) for i in range(10)]
        optim.SGD(params, lr=1.0)([on_device(np.ones(2))] * 10)
        return to_host(buffer)

    np.testing.assert_equal(run(xp.asarray), run(np.array))


def launches_of(kind: Any, settings: dict[str, Any], count: int) -> int:
    params = [sp.Tensor(xp.ones(3), requires_grad=True) for _ in range(count)]
    optimizer = kind(params, **settings)
    grads = [xp.ones(3)] * count
    for _ in range(2):
        with launches() as names:
            optimizer(grads)
    return len(names)


@pytest.mark.parametrize("name", JOINING)
def test_one_more_parameter_is_copied_back(name: str) -> None:
    """With its arrays of the state; all operations are shared."""
    kind, settings = getattr(optim, name), JOINING[name]
    counts = [launches_of(kind, settings, count) for count in (9, 10, 40)]
    optimizer = kind([sp.Tensor([1.0], requires_grad=True)], **settings)
    more = 1 + len(optimizer.remembers(optimizer.param_groups[0]))
    assert counts[1:] == [counts[0] + more, counts[0] + 31 * more]


@pytest.mark.parametrize(
    ("kind", "settings"), [(optim.LAMB, {}), (optim.LARS, {}), (Layerwise, {}), (HalfSGD, {"lr": 0.5})]
)
def test_other_updates_are_not_joined(kind: Any, settings: dict[str, Any]) -> None:
    """They may depend on the norm or the size of a parameter."""
    assert not kind.is_elementwise
    counts = [launches_of(kind, settings, count) for count in (1, 2, 40)]
    assert counts[1:] == [2 * counts[0], 40 * counts[0]]


def test_update_of_an_instance_is_not_joined() -> None:
    params = [sp.Tensor(xp.ones(3), requires_grad=True) for _ in range(9)]
    optimizer = optim.SGD(params, lr=1.0)
    seen: list[sp.Tensor] = []
    optimizer.update = lambda param, grad, group: seen.append(param)  # type: ignore[method-assign]
    optimizer([xp.ones(3)] * 9)
    assert list(map(id, seen)) == list(map(id, params))


def test_every_optimizer_is_tested() -> None:
    kinds = [getattr(optim, name) for name in optim.__all__]
    optimizers = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    assert {kind.__name__ for kind in optimizers if kind.is_elementwise} == {*JOINING}


def test_state_of_joined_parameters_is_counted() -> None:
    """Also while more and more parameters get no gradient any more."""

    def program() -> list[int]:
        params = [sp.Tensor(np.ones(100, np.float32), requires_grad=True) for _ in range(12)]
        optimizer = optim.Adam(params)
        held = []
        for number in range(3):
            optimizer([p.data * 0 + 1 if i >= number else None for i, p in enumerate(params)])
            held.append(current_recorder().memory.live[OPTIMIZER])
        return held

    assert sp.launch(program, world_size=1, transport="inline", array="cupy")[0] == [12 * 2 * 400] * 3
