"""A training step on a GPU waits for a value of it twice: for the check of the labels, and for the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel import nn, optim
from simparallel.testing.strict import host_waits, xp

BATCH, CLASSES = 5, 4
CHECKED = ["get", "get"]
NEEDED = {"Momentum": {"learning_rate": 0.1, "momentum": 0.9}}
OPTIMIZERS = [
    name
    for name in sorted(optim.__all__)
    if isinstance(kind := getattr(optim, name), type) and issubclass(kind, optim.Optimizer) and name != "Optimizer"
]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)
    return nn.Sequential(*layers)


def on_device(network: nn.Module) -> nn.Module:
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = xp.asarray(tensor.data)
    return network


def waits_of_a_step(network: nn.Module, optimizer: Any, then: Callable[[], Any], **backward: Any) -> list[str]:
    """Return the waits of the third step: the first ones make the state."""
    rng = np.random.default_rng(0)
    x = sp.Tensor(xp.asarray(rng.standard_normal((BATCH, 1, 8, 8)).astype("float32")))
    labels = sp.Tensor(xp.asarray(np.arange(BATCH) % CLASSES))
    for _ in range(3):
        with host_waits() as waits:
            loss = sp.functions.cross_entropy(network(x), labels)
            optimizer.zero_grad()
            loss.backward(**backward)
            then()
            optimizer.step()
    return waits


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_waits_for_nothing(name: str) -> None:
    network = on_device(mlp())
    kind = getattr(optim, name)
    optimizer = kind(network.parameters(), **NEEDED.get(name, {"lr": 0.1}))
    assert waits_of_a_step(network, optimizer, lambda: None) == CHECKED


@pytest.mark.parametrize("make", [mlp, cnn])
def test_network_waits_for_nothing(make: Callable[[], nn.Module]) -> None:
    network = on_device(make())
    assert waits_of_a_step(network, optim.Adam(network.parameters()), lambda: None) == CHECKED


def test_unchecked_loss_is_not_waited_for() -> None:
    network = on_device(mlp())
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    assert waits_of_a_step(network, optimizer, lambda: None, check_finite=False) == ["get"]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, np.inf])
def test_clipping_waits_once(norm_type: float) -> None:
    network = on_device(mlp())
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    waits = waits_of_a_step(network, optimizer, lambda: optim.clip_grad_norm_(network.parameters(), 1.0, norm_type))
    assert waits == [*CHECKED, "get"]


def test_look_for_overflows_waits_once() -> None:
    arrays = [xp.ones(3, "float32"), xp.ones((2, 2), "float16"), xp.ones(0, "float64")]
    with host_waits() as waits:
        assert optim.all_finite(arrays)
    assert waits == ["get"]
    arrays[1][0, 0] = np.inf
    assert not optim.all_finite(arrays)


def test_every_kind_of_wait_is_noted() -> None:
    x = xp.asarray(np.arange(3))
    with host_waits() as waits:
        x.sum().item(), x.tolist(), x.get(), bool(x[1]), int(x[1]), float(x[1]), x[x > 1], xp.nonzero(x)
    assert waits == ["item", "tolist", "get", "bool", "int", "float", "mask", "nonzero"]
    x.get()
    assert len(waits) == 8
