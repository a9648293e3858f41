"""On a GPU, parameters are joined for an update: the values are those of one by one, with few kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import simparallel as sp
from simparallel import optim
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
SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6)


class Layerwise(optim.Adam):
    """An optimizer of a user, who knows nothing of joined parameters."""

    def update(self, param: sp.Tensor, grad: Any, group: Any) -> None:
        param.data -= grad / grad.size


def trained(kind: Any, settings: dict[str, Any], on_device: Any, shapes: Any, steps: Any) -> list[Any]:
    """Return parameters and states after steps in which some parameters have no gradient."""
    rng = np.random.default_rng(0)
    dtypes = ["float32", "float16", "float64"]
    params = [
        sp.Tensor(on_device(rng.integers(-4, 5, shape).astype(dtypes[i % 3 if i > 3 else 0])), requires_grad=True)
        for i, shape in enumerate(shapes)
    ]
    optimizer = kind([{"params": params[::2]}, *([{"params": params[1::2]}] if params[1:] else [])], **settings)
    order = [*range(len(params))[::2], *range(len(params))[1::2]]
    for has_gradient in steps:
        grads = [on_device(rng.integers(-4, 5, params[i].shape).astype(params[i].dtype)) for i in order]
        optimizer([grad if has_gradient[i] else None for grad, i in zip(grads, order, strict=True)])
    return [[p.numpy() for p in params], optimizer.state_dict()["state"]]


@pytest.mark.parametrize("name", JOINING)
@pytest.mark.parametrize("joined_bytes", [1, 48, 1 << 20])
def test_joined_update_is_one_by_one(monkeypatch: pytest.MonkeyPatch, name: str, joined_bytes: int) -> None:
    """To the bit: for any sizes and dtypes, and parameters that miss some steps."""
    monkeypatch.setattr(module, "JOINED_BYTES", joined_bytes)
    kind, settings = getattr(optim, name), JOINING[name]

    @given(
        SHAPES.flatmap(
            lambda shapes: st.tuples(
                st.just(shapes), st.lists(st.lists(st.booleans(), min_size=6, max_size=6), max_size=3)
            )
        )
    )
    def check(case: Any) -> None:
        found, expected = (trained(kind, settings, on_device, *case) for on_device in (xp.asarray, np.array))
        np.testing.assert_equal(found, expected)

    check()


def launches_of(kind: Any, settings: dict[str, Any], count: int) -> int:
    params = [sp.Tensor(xp.ones(3), requires_grad=True) for _ in range(count)]
    optimizer = kind(params, **settings)
    grads = [xp.ones(3)] * count
    for _ in range(2):
        with launches() as names:
            optimizer(grads)
    return len(names)


@pytest.mark.parametrize("name", JOINING)
def test_one_more_parameter_is_one_more_copy(name: str) -> None:
    counts = [launches_of(getattr(optim, name), JOINING[name], count) for count in (2, 3, 40)]
    assert counts[1:] == [counts[0] + 1, counts[0] + 38]


@pytest.mark.parametrize(("kind", "settings"), [(optim.LAMB, {}), (optim.LARS, {}), (Layerwise, {})])
def test_other_updates_are_not_joined(kind: Any, settings: dict[str, Any]) -> None:
    """They may depend on the norm or the size of a parameter."""
    assert not kind.is_elementwise
    counts = [launches_of(kind, settings, count) for count in (1, 2, 40)]
    assert counts[1] == 2 * counts[0]
    assert counts[2] == 40 * counts[0]


def test_every_optimizer_is_tested() -> None:
    kinds = [getattr(optim, name) for name in optim.__all__]
    optimizers = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, optim.Optimizer)]
    assert {kind.__name__ for kind in optimizers if kind.is_elementwise} == {*JOINING}


def test_state_of_joined_parameters_is_counted() -> None:
    """The account has it after every step, although its arrays are new ones."""

    def program() -> list[int]:
        params = [sp.Tensor(np.ones(100, np.float32), requires_grad=True) for _ in range(3)]
        optimizer = optim.Adam(params)
        held = []
        for _ in range(3):
            optimizer([p.data * 0 + 1 for p in params])
            held.append(current_recorder().memory.live[OPTIMIZER])
        return held

    assert sp.launch(program, world_size=1, transport="inline", array="cupy")[0] == [3 * 2 * 400] * 3
