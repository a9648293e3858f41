"""Every module and loss of `sp.nn`, moved to a GPU, trains as in host memory: outputs, gradients and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import simparallel as sp
from simparallel import nn
from simparallel.backend import to_host

IMAGES, ROWS, SEQUENCES = (4, 6, 7, 5), (4, 6), (3, 4, 6)


class Call(NamedTuple):
    """A module's settings, and its inputs: shapes of normal numbers, or arrays; `make` builds it of other modules."""

    settings: dict[str, Any]
    inputs: tuple[Any, ...]
    make: Callable[[], nn.Module] | None = None


def labels(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 6, shape)


def fractions(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).uniform(0.05, 0.95, shape).astype(np.float32)


def weights() -> np.ndarray:
    return np.array([1.0, 2.0, 0.5, 1.5, 0.25, 1.0], np.float32)


CALLS: dict[str, list[Call]] = {
    "AdaptiveAvgPool2d": [Call({"output_size": (3, 2)}, (IMAGES,))],
    "AvgPool2d": [Call({"kernel_size": (2, 3), "padding": 1, "count_include_pad": False}, (IMAGES,))],
    "BCELoss": [Call({"reduction": how}, (fractions(4, 6), fractions(4, 6))) for how in ("mean", "none")],
    "BCEWithLogitsLoss": [Call({"pos_weight": weights()}, (ROWS, fractions(4, 6))), Call({}, (ROWS, fractions(4, 6)))],
    "BatchNorm1d": [Call({"num_features": 6}, (ROWS,)), Call({"num_features": 4, "momentum": None}, (SEQUENCES,))],
    "BatchNorm2d": [Call({"num_features": 6}, (IMAGES,)), Call({"num_features": 6, "affine": False}, (IMAGES,))],
    "Conv1d": [Call({"in_channels": 4, "out_channels": 2, "kernel_size": 3, "padding": 1}, (SEQUENCES,))],
    "Conv2d": [
        Call({"in_channels": 6, "out_channels": 4, "kernel_size": 3, "padding": "same"}, (IMAGES,)),
        Call({"in_channels": 6, "out_channels": 4, "kernel_size": (3, 2), "stride": 2, "groups": 2}, (IMAGES,)),
        *(
            Call(
                {"in_channels": 32, "out_channels": 32, "kernel_size": 3, "padding": 1, "method": method},
                ((2, 32, 6, 6),),
            )
            for method in ("direct", "winograd")
        ),
    ],
    "ConvTranspose2d": [Call({"in_channels": 6, "out_channels": 4, "kernel_size": 3, "stride": 2}, (IMAGES,))],
    "CrossEntropyLoss": [
        Call({"weight": weights(), "label_smoothing": 0.1}, (ROWS, labels(4))),
        Call({"ignore_index": 2, "reduction": "sum"}, (ROWS, labels(4))),
        Call({}, (ROWS, fractions(4, 6))),
    ],
    "CrossEntropySmooth": [Call({"smooth_factor": 0.1, "num_classes": 6}, (ROWS, labels(4)))],
    "Dropout": [Call({"p": 0.4}, (ROWS,))],
    "Dropout2d": [Call({"p": 0.4}, (IMAGES,))],
    "Embedding": [Call({"num_embeddings": 6, "embedding_dim": 3, "padding_idx": -2}, (labels(4, 5),))],
    "Flatten": [Call({}, (IMAGES,))],
    "GELU": [Call({}, (ROWS,)), Call({"approximate": "tanh"}, (ROWS,))],
    "GRU": [Call({"input_size": 6, "hidden_size": 3, "num_layers": 2, "bidirectional": True}, (SEQUENCES,))],
    "GRUCell": [Call({"input_size": 6, "hidden_size": 3}, (ROWS,))],
    "GroupNorm": [Call({"num_groups": 2, "num_channels": 6}, (IMAGES,))],
    "HuberLoss": [Call({"delta": 0.5}, (ROWS, ROWS))],
    "Identity": [Call({}, (ROWS,))],
    "L1Loss": [Call({}, (ROWS, ROWS))],
    "LSTM": [Call({"input_size": 6, "hidden_size": 3, "num_layers": 2, "batch_first": True}, (SEQUENCES,))],
    "LSTMCell": [Call({"input_size": 6, "hidden_size": 3}, (ROWS,))],
    "LayerNorm": [Call({"normalized_shape": 6}, (SEQUENCES,)), Call({"normalized_shape": (4, 6)}, (SEQUENCES,))],
    "LeakyReLU": [Call({"negative_slope": 0.3}, (ROWS,)), Call({"inplace": True}, (ROWS,))],
    "Linear": [Call({"in_features": 6, "out_features": 3}, (ROWS,)),
               Call({"in_features": 6, "out_features": 3, "bias": False}, (SEQUENCES,))],
    "LogSoftmax": [Call({"dim": 1}, (IMAGES,))],
    "MSELoss": [Call({"reduction": how}, (ROWS, ROWS)) for how in ("mean", "sum", "none")],
    "MaxPool2d": [Call({"kernel_size": 3, "stride": 2, "padding": 1}, (IMAGES,)), Call({"kernel_size": 2}, (IMAGES,))],
    "ModuleDict": [Call({}, (), lambda: nn.ModuleDict({"a": nn.Linear(6, 6)}))],
    "ModuleList": [Call({}, (), lambda: nn.ModuleList([nn.Linear(6, 6)]))],
    "MultiheadAttention": [Call({"embed_dim": 6, "num_heads": 2, "causal": True}, (SEQUENCES,)),
                           Call({"embed_dim": 6, "num_heads": 2}, (SEQUENCES, SEQUENCES))],
    "NLLLoss": [Call({"weight": weights()}, (ROWS, labels(4))), Call({"ignore_index": 1}, (ROWS, labels(4)))],
    "RMSNorm": [Call({"normalized_shape": 6}, (SEQUENCES,))],
    "RNN": [Call({"input_size": 6, "hidden_size": 3, "nonlinearity": how}, (SEQUENCES,)) for how in ("tanh", "relu")],
    "RNNCell": [Call({"input_size": 6, "hidden_size": 3}, (ROWS,))],
    "ReLU": [Call({}, (ROWS,)), Call({"inplace": True}, (ROWS,))],
    "Sequential": [Call({}, (ROWS,), lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3)))],
    "SiLU": [Call({}, (ROWS,))],
    "Sigmoid": [Call({}, (ROWS,))],
    "SmoothL1Loss": [Call({"beta": 0.5}, (ROWS, ROWS))],
    "Softmax": [Call({"dim": 1}, (IMAGES,))],
    "SoftmaxCrossEntropyExpand": [Call({"sparse": True}, (ROWS, labels(4)))],
    "SoftmaxCrossEntropyWithLogits": [Call({}, (ROWS, fractions(4, 6)))],
    "SyncBatchNorm": [Call({"num_features": 6}, (IMAGES,))],
    "Tanh": [Call({}, (ROWS,))],
    "Transformer": [Call({"d_model": 6, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1,
                          "dim_feedforward": 8, "batch_first": True}, (SEQUENCES, SEQUENCES))],
    "TransformerDecoder": [Call({}, (SEQUENCES, SEQUENCES), lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(6, 2, 8), 2))],
    "TransformerDecoderLayer": [Call({"d_model": 6, "nhead": 2, "dim_feedforward": 8, "batch_first": True},
                                     (SEQUENCES, SEQUENCES))],
    "TransformerEncoder": [Call({}, (SEQUENCES,), lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 8), 2))],
    "TransformerEncoderLayer": [Call({"d_model": 6, "nhead": 2, "dim_feedforward": 8, "norm_first": True},
                                     (SEQUENCES,))],
    "Upsample": [Call({"scale_factor": (1.5, 2), "mode": "bilinear"}, (IMAGES,)), Call({"scale_factor": 2}, (IMAGES,))],
}  # fmt: skip


def module_names() -> list[str]:
    """Return all classes of modules in `sp.nn`, so that a new one is tested, or missed here."""
    kinds = {name: getattr(nn, name) for name in nn.__all__}
    return [
        name
        for name, kind in sorted(kinds.items())
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind is not nn.Module
    ]


def made(name: str, call: Call) -> nn.Module:
    sp.manual_seed(0)
    return call.make() if call.make is not None else getattr(nn, name)(**call.settings)


def given(call: Call) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(value).astype(np.float32) if isinstance(value, tuple) else value for value in call.inputs
    ]


def flat(value: Any) -> list[Any]:
    """Return the Tensors of an output: recurrent layers give nested tuples."""
    return [value] if isinstance(value, sp.Tensor) else [one for part in value for one in flat(part)]


def trained(module: nn.Module, inputs: list[Any]) -> dict[str, Any]:
    """Run two training steps and an evaluation; return all values on the way."""
    sp.manual_seed(1)
    found: dict[str, Any] = {"outputs": [], "gradients": []}
    trains = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = sp.optim.SGD(trains, lr=0.1, momentum=0.5) if trains else None
    for _ in range(2):
        xs = [sp.Tensor(x, requires_grad=x.dtype.kind == "f") for x in inputs]
        ys = flat(module(*((x * 1 for x in xs) if hasattr(module, "inplace") else xs)))
        (sum(((y**2).sum() for y in ys[1:]), (ys[0] ** 2).sum())).backward()
        found["outputs"] += [y.numpy() for y in ys]
        found["gradients"] += [x.grad.numpy() for x in (*xs, *trains) if x.grad is not None]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    module.eval()
    with sp.no_grad():
        found["evaluated"] = [y.numpy() for y in flat(module(*map(sp.Tensor, inputs)))]
    return found | {"state": module.state_dict()}


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name in module_names() for i in range(len(CALLS.get(name, [None])))]
)
def test_module_on_device_equals_numpy(arrays: Any, name: str, number: int) -> None:
    """Under the same seed, so dropout masks are the same, too."""
    assert name in CALLS, f"a new module: say in CALLS how sp.nn.{name} is called"
    call = CALLS[name][number]
    ours, theirs = made(name, call).to("cuda:0"), made(name, call)
    arrays.assert_all_equal(ours.state_dict(), theirs.state_dict())
    tensors = [*ours.parameters(), *ours.buffers()]
    assert all(type(tensor.data) is arrays.type and tensor.device == "cuda:0" for tensor in tensors)
    if call.inputs:
        found = trained(ours, [arrays.on_device(x) for x in given(call)])
        # Gradients of images are one product on a GPU, and sums over the taps of the kernel in host memory.
        near = arrays.reordered(10) if name.startswith("Conv") else arrays.after(10)
        near.assert_all_equal(found, trained(theirs, given(call)), name)
    assert all(type(tensor.data) is arrays.type for tensor in tensors)
    state = ours.state_dict()
    assert all(type(value) is np.ndarray for value in state.values())
    again = made(name, call).to("cuda:0")
    again.load_state_dict(state)
    for one, other in zip(again.state_dict().values(), state.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    back = again.to("cpu")
    assert all(type(tensor.data) is np.ndarray for tensor in (*back.parameters(), *back.buffers()))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_mixed_precision_on_device_equals_numpy(arrays: Any, level: str) -> None:
    def model() -> nn.Module:
        sp.manual_seed(0)
        layers = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(60, 3)
        return nn.auto_mixed_precision(nn.Sequential(*layers), level)

    (x,) = given(Call({}, (IMAGES,)))
    found, expected = trained(model().to("cuda:0"), [arrays.on_device(x)]), trained(model(), [x])
    arrays.reordered(10).assert_all_equal(found, expected)


def test_recomputation_on_device_equals_numpy(arrays: Any) -> None:
    """Dropout masks are drawn again, the same."""

    def gradients(on_device: bool) -> list[np.ndarray]:
        sp.manual_seed(0)
        part = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6))
        (x,) = given(Call({}, (ROWS,)))
        x = sp.Tensor(arrays.on_device(x) if on_device else x, requires_grad=True)
        y = nn.checkpoint(part.to("cuda:0") if on_device else part, x)
        (y * y).sum().backward()
        return [tensor.grad.numpy() for tensor in (x, *part.parameters())]

    arrays.assert_all_equal(gradients(True), gradients(False))


@pytest.mark.parametrize("name", nn.init._NAMED)
def test_initial_weights_on_device_are_numpys_bits(arrays: Any, name: str) -> None:
    """Random numbers are made on the host, so a GPU has the same bits."""
    sp.manual_seed(5)
    expected = to_host(nn.initializer(name, [4, 4]).data)
    sp.manual_seed(5)
    found = nn.initializer(name, [4, 4]).to("cuda:0")
    np.testing.assert_array_equal(to_host(found.data), expected)
