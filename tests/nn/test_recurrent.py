"""RNN, LSTM and GRU beside PyTorch's, with PyTorch's weights: 1e-12 in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel import nn
from simparallel.autograd import Tensor
from simparallel.errors import DTypeError, InputError, ShapeError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("RNN", {"nonlinearity": "relu", "num_layers": 2, "bias": False}),
    ("RNN", {"bidirectional": True, "batch_first": True}),
    ("LSTM", {}),
    ("LSTM", {"num_layers": 3, "bidirectional": True}),
    ("LSTM", {"num_layers": 2, "batch_first": True, "bias": False}),
    ("GRU", {}),
    ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    ("GRU", {"bias": False}),
]


def pair(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Make the layer here and PyTorch's, with the same weights."""
    here = getattr(nn, name)(3, 5, **settings, dtype=np.float64)
    there = getattr(torch.nn, name)(3, 5, **settings, dtype=torch.float64)
    assert list(here.state_dict()) == list(there.state_dict())
    there.load_state_dict({key: torch.from_numpy(value) for key, value in here.state_dict().items()})
    return here, there


def flat(result: Any) -> list[Any]:
    return [result] if not isinstance(result, (tuple, list)) else [leaf for part in result for leaf in flat(part)]


def compare(here: nn.Module, there: Any, x: np.ndarray, states: list[np.ndarray]) -> None:
    """Compare results, and the gradients of x, of the states and of all weights."""
    ours, theirs = (
        [kind(value.copy()).requires_grad_() for value in (x, *states)]
        for kind in (Tensor, lambda value: torch.from_numpy(value))
    )
    losses, pairs = [], []
    for module, (given, *more) in ((here, ours), (there, theirs)):
        results = flat(module(given, *([tuple(more)] if len(more) > 1 else more)))
        pairs.append(results)
        losses.append(sum((result * result * (i + 1)).sum() for i, result in enumerate(results)))
        losses[-1].backward()
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-12, atol=1e-12)
    parameters = zip(here.parameters(), there.parameters(), strict=True)
    for a, b in [*zip(ours, theirs, strict=True), *parameters]:
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "settings"), LAYERS)
@pytest.mark.parametrize(("t", "n"), [(4, 2), (1, 1), (3, 0), (5, None)])
@pytest.mark.parametrize("with_state", [False, True])
def test_layers_match_torch(name, settings, t, n, with_state) -> None:
    here, there = pair(name, settings)
    rng = np.random.default_rng(1)
    batch = () if n is None else (n,)
    shape = (*batch, t, 3) if settings.get("batch_first") else (t, *batch, 3)
    count = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
    states = [rng.normal(size=(count, *batch, 5)) for _ in range(here.num_states if with_state else 0)]
    compare(here, there, rng.normal(size=shape), states)


@pytest.mark.parametrize("name", ["RNNCell", "LSTMCell", "GRUCell"])
@pytest.mark.parametrize("batch", [(), (1,), (4,)])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cells_match_torch(name, batch, with_state, bias) -> None:
    here, there = pair(name, {"bias": bias})
    rng = np.random.default_rng(2)
    states = [rng.normal(size=(*batch, 5)) for _ in range(here.num_states if with_state else 0)]
    compare(here, there, rng.normal(size=(*batch, 3)), states)


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_layers_run_on_a_device(arrays: Any, make) -> None:
    x, layer = (np.random.default_rng(3).normal(size=(4, 2, 3)), make(3, 5, 2, bidirectional=True, dtype=np.float64))
    expected = layer(x)[0].numpy()
    for parameter in layer.parameters():
        parameter.data = arrays.on_device(parameter.numpy())
    y, _ = layer(arrays.on_device(x))
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-10)
    y.sum().backward()


def test_dropout_is_between_layers() -> None:
    x = np.ones((4, 3, 2), np.float32)
    layer = nn.GRU(2, 8, num_layers=2, dropout=0.5)
    assert not np.array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())
    layer.eval()
    assert np.array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())
    single = nn.GRU(2, 8, dropout=0.5)
    assert np.array_equal(single(x)[0].numpy(), single(x)[0].numpy())


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: nn.LSTM(0, 3), InputError),
        (lambda: nn.GRU(3, 2.5), InputError),
        (lambda: nn.RNN(3, 3, nonlinearity="gelu"), InputError),
        (lambda: nn.RNN(3, 3, dropout=2), InputError),
        (lambda: nn.LSTM(3, 3, num_layers=0), InputError),
        (lambda: nn.LSTM(3, 3, dtype=np.int64), DTypeError),
        (lambda: nn.GRU(3, 5)(np.zeros((2, 4))), ShapeError),
        (lambda: nn.GRU(3, 5)(np.zeros((0, 2, 3))), ShapeError),
        (lambda: nn.GRU(3, 5)(np.zeros((2, 4, 3)), np.zeros((1, 3, 5))), ShapeError),
        (lambda: nn.LSTM(3, 5)(np.zeros((2, 4, 3)), (np.zeros((1, 4, 5)),)), ShapeError),
        (lambda: nn.LSTMCell(3, 5)(np.zeros((2, 4, 3))), ShapeError),
    ],
)
def test_bad_settings_are_refused(make, error) -> None:
    with pytest.raises(error):
        make()


def trained(is_distributed: bool) -> list[np.ndarray]:
    sp.manual_seed(4)
    net = nn.LSTM(2, 3, num_layers=2, bidirectional=True, dtype=np.float64)
    model = sp.parallel.DistributedDataParallel(net) if is_distributed else net
    optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
    data = np.random.default_rng(0).normal(size=(3, 4, 2))
    rank, world = (sp.get_rank(), 2) if is_distributed else (0, 1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(data[:, rank::world])[0] ** 2).mean().backward()
        optimizer.step()
    return [p.numpy() for p in net.parameters()]


def test_data_parallel_training_matches_one_device() -> None:
    for weights in sp.launch(trained, (True,), world_size=2, transport="inline"):
        for a, b in zip(weights, trained(False), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def sharded(is_auto: bool) -> np.ndarray:
    sp.manual_seed(4)
    net = nn.GRU(2, 4, dtype=np.float64)
    x = np.random.default_rng(0).normal(size=(3, 4, 2))
    run = sp.AutoParallel(lambda x: net(x)[0]) if is_auto else lambda x: net(x)[0]
    return run(x).numpy()


def test_operator_parallel_matches_one_device() -> None:
    for y in sp.launch(sharded, (True,), world_size=2, transport="inline"):
        np.testing.assert_allclose(y, sharded(False), rtol=1e-12)
