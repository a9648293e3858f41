"""A training step on a GPU waits for it once, to read the loss; checks of labels and indices come with that read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optimizers import suited
from stand_in.strict import has_checks, host_waits, xp

import simparallel as sp
from simparallel import nn, optim
from simparallel.backend import STAND_IN
from simparallel.errors import LabelError, OutOfRangeError, RunFailedError

BATCH, CLASSES = 5, 4
CHECKED = ["get"]
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
    optimizer = kind(suited(name, list(network.parameters())), **NEEDED.get(name, {"lr": 0.1}))
    assert waits_of_a_step(network, optimizer, lambda: None) == CHECKED


@pytest.mark.parametrize("make", [mlp, cnn])
def test_network_waits_for_nothing(make: Callable[[], nn.Module]) -> None:
    network = on_device(make())
    assert waits_of_a_step(network, optim.Adam(network.parameters()), lambda: None) == CHECKED


def test_unchecked_loss_is_not_waited_for() -> None:
    network = on_device(mlp())
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    assert waits_of_a_step(network, optimizer, lambda: None, check_finite=False) == []


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
        x.sum().item(), (x + 1).tolist(), (x + 1).get(), bool(x[1] + 1), int(x[1] + 1), float(x[1] + 1)
        x[x > 1], xp.nonzero(x + 1)
        x.sum().item(), x.get(), x.tolist()  # the last two have nothing to wait for
    assert waits == ["item", "tolist", "get", "bool", "int", "float", "mask", "nonzero", "item"]
    (x + 1).get()
    assert len(waits) == 9


WRONG: dict[str, Callable[[Any], sp.Tensor]] = {
    "label": lambda x: sp.functions.cross_entropy(x, sp.Tensor(xp.asarray([0, 9]))),
    "id": lambda x: sp.functions.embedding(sp.Tensor(xp.asarray([0, -1])), x).sum(),
    "position": lambda x: sp.functions.gather(x, 1, sp.Tensor(xp.asarray([[0], [4]]))).sum(),
    "index": lambda x: x[sp.Tensor(xp.asarray([0, 2]))].sum(),
}


def leaf() -> sp.Tensor:
    return sp.Tensor(xp.ones((2, CLASSES), "float32"), requires_grad=True)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_integers_are_refused_before_gradients(case: str) -> None:
    x = leaf()
    with pytest.raises((LabelError, OutOfRangeError)):
        WRONG[case](x).backward()
    assert x.grad is None
    (x * 2).sum().backward()  # nothing is left behind
    assert x.grad is not None


@pytest.mark.parametrize("read", [sp.Tensor.item, sp.Tensor.numpy, repr, lambda loss: sp.functions.sum(loss).item()])
def test_any_read_refuses_wrong_labels(read: Callable[[sp.Tensor], Any]) -> None:
    loss = WRONG["label"](leaf())
    with pytest.raises(LabelError, match="label 9 at position 1"):
        read(loss)
    read(loss)


def test_many_checks_are_read_in_between() -> None:
    with pytest.raises(LabelError):
        print([WRONG["label"](leaf()).shape for _ in range(100)])
    assert not has_checks()


def forget() -> None:
    WRONG["label"](leaf())


def fail() -> None:
    WRONG["label"](leaf())
    raise KeyError("another error")


@pytest.mark.parametrize("transport", ["inline", "shm"])
def test_run_that_reads_nothing_ends_with_the_error(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAND_IN, "stand_in.strict")
    with pytest.raises(RunFailedError, match="LabelError"):
        sp.launch(forget, world_size=2, transport=transport, array="cupy")
    with pytest.raises(RunFailedError, match="another error"):
        sp.launch(fail, world_size=2, transport=transport, array="cupy")


def leave_by_hand() -> None:
    sp.functions.cross_entropy(sp.Tensor(xp.ones((2, 4))), sp.Tensor(xp.asarray([0, 9])))


def read_by_hand() -> float:
    return float(xp.ones(3).sum())


@pytest.mark.parametrize("transport", ["inline", "shm"])
def test_checks_belong_to_a_run(transport: str) -> None:
    """Also in runs whose arrays are in host memory, but for those that a program moves by hand; ranks are warm."""
    with sp.Cluster(world_size=2, transport=transport) as cluster:
        with pytest.raises(RunFailedError, match="LabelError"):
            cluster.run(leave_by_hand)
        with pytest.raises(RunFailedError, match="another error"):
            cluster.run(fail)
        assert list(cluster.run(read_by_hand)) == [3.0, 3.0]


def test_small_integers_are_labels_of_many_classes() -> None:
    logits = sp.Tensor(xp.ones((2, 300), "float32"), requires_grad=True)
    sp.functions.cross_entropy(logits, sp.Tensor(xp.asarray(np.array([0, 200], np.uint8)))).backward()
    assert np.count_nonzero(logits.grad.numpy() < 0) == 2


def test_complex_arrays_may_be_infinite() -> None:
    assert not optim.all_finite([np.array([1 + 1j * np.nan])])
    assert optim.all_finite([np.array([1 + 1j]), np.arange(3), np.float32(2)])
    assert not optim.all_finite([np.float64("inf")])


def test_stand_in_refuses_unchecked_indices() -> None:
    """Red control: CuPy wraps them around without a word, so an op has to check them."""
    with pytest.raises(IndexError):
        xp.ones(3)[xp.asarray([3])]
