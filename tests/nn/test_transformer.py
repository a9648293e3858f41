"""Transformer layers and stacks beside PyTorch's, with PyTorch's weights and masks: 1e-12 in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.autograd import Tensor
from simparallel.errors import InputError, ShapeError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

D, HEADS, T, S, N = 6, 2, 4, 5, 3
RNG = np.random.default_rng(5)
PADDING = np.arange(S) >= np.array([[5], [3], [4]])  # True is padding


def translated(state: dict[str, np.ndarray]) -> dict[str, Any]:
    """Translate PyTorch's names: its queries, keys and values have one matrix."""
    out: dict[str, Any] = {}
    for name, value in state.items():
        head, _, last = name.rpartition("_proj.")
        if head.endswith((".q", ".k", ".v")):
            out.setdefault(f"{head[:-2]}.in_proj_{last}", []).append(value)
        else:
            out[name] = value
    return {name: torch.from_numpy(np.concatenate(v) if isinstance(v, list) else v) for name, v in out.items()}


def pair(name: str, **settings: Any) -> tuple[nn.Module, Any]:
    settings = {"dim_feedforward": 7, "dropout": 0.0, **settings}
    here = getattr(nn, name)(D, HEADS, **settings, dtype=np.float64)
    there = getattr(torch.nn, name)(D, HEADS, **settings, dtype=torch.float64)
    for parameter in here.parameters():
        parameter.set_data(RNG.normal(size=parameter.shape) * 0.5)
    there.load_state_dict(translated(here.state_dict()))
    return here, there


def compare(here: Any, there: Any, inputs: list[np.ndarray], **masks: Any) -> None:
    ours = [Tensor(x.copy(), requires_grad=True) for x in inputs]
    theirs = [torch.from_numpy(x.copy()).requires_grad_() for x in inputs]
    y = here(*ours, **masks)
    z = there(*theirs, **{k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in masks.items()})
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-11, atol=1e-12)
    (y * y).sum().backward()
    (z * z).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-9, atol=1e-10)
    theirs_by_name = {name: parameter.grad for name, parameter in there.named_parameters()}
    gradients = {name: parameter.grad.numpy() for name, parameter in here.named_parameters()}
    for name, gradient in translated(gradients).items():
        np.testing.assert_allclose(gradient.numpy(), theirs_by_name[name].numpy(), rtol=1e-9, atol=1e-10)


LATER = np.triu(np.ones((S, S), bool), 1)
ENCODER_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"src_mask": LATER},
    "numbers": {"src_mask": RNG.normal(size=(S, S))},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"src_mask": LATER, "src_key_padding_mask": PADDING},
    "mixed": {"src_mask": np.where(LATER, -np.inf, 0.0), "src_key_padding_mask": np.where(PADDING, -np.inf, 0.0)},
    "heads": {"src_mask": RNG.normal(size=(N * HEADS, S, S))},
    "heads and padding": {"src_mask": RNG.random((N * HEADS, S, S)) < 0, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("masks", ENCODER_MASKS.values(), ids=ENCODER_MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_layer_matches_torch(masks: dict[str, Any], batch_first: bool) -> None:
    here, there = pair("TransformerEncoderLayer", batch_first=batch_first, norm_first=batch_first)
    compare(here, there, [RNG.normal(size=(N, S, D) if batch_first else (S, N, D))], **masks)


@pytest.mark.parametrize(
    "settings", [{"activation": "gelu"}, {"bias": False}, {"norm_first": True}, {"layer_norm_eps": 0.1}]
)
def test_settings_match_torch(settings: dict[str, Any]) -> None:
    for name, inputs in (("TransformerEncoderLayer", [(S, D)]), ("TransformerDecoderLayer", [(T, D), (S, D)])):
        here, there = pair(name, **settings)  # without a batch
        compare(here, there, [RNG.normal(size=shape) for shape in inputs])


@pytest.mark.parametrize("batch_first", [False, True])
def test_decoder_layer_matches_torch(batch_first: bool) -> None:
    here, there = pair("TransformerDecoderLayer", batch_first=batch_first)
    shapes = ((N, T, D), (N, S, D)) if batch_first else ((T, N, D), (S, N, D))
    inputs = [RNG.normal(size=shape) for shape in shapes]
    compare(here, there, inputs)
    here, there = pair("TransformerDecoderLayer", batch_first=batch_first)
    compare(here, there, inputs, tgt_mask=LATER[:T, :T], memory_key_padding_mask=PADDING)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("norm_first", [False, True])
def test_whole_transformer_matches_torch(norm_first: bool) -> None:
    here, there = pair("Transformer", num_encoder_layers=2, num_decoder_layers=2, norm_first=norm_first)
    inputs = [RNG.normal(size=(S, N, D)), RNG.normal(size=(T, N, D))]
    mask = nn.Transformer.generate_square_subsequent_mask(T, np.float64).numpy()
    compare(here, there, inputs, tgt_mask=mask, src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)


def test_causal_flag_equals_the_mask() -> None:
    layer = nn.TransformerEncoderLayer(D, HEADS, 7, dropout=0.0)
    x = RNG.normal(size=(S, N, D)).astype(np.float32)
    np.testing.assert_allclose(layer(x, is_causal=True).numpy(), layer(x, LATER).numpy(), rtol=1e-6)


def test_stacks_copy_their_layer_and_draw_other_masks() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 7, dropout=0.5), 3, nn.LayerNorm(D))
    names = [name for name, _ in stack.named_parameters()]
    assert names == [p.name for p in stack.parameters()]
    assert len(names) == 3 * 16 + 2
    first, second = (stack.layers[i].state_dict() for i in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    x = np.ones((S, N, D), np.float32)
    assert not np.array_equal(stack.layers[0](x).numpy(), stack.layers[1](x).numpy())
    stack.eval()
    assert np.array_equal(stack.layers[0](x).numpy(), stack.layers[1](x).numpy())


def test_bad_arguments_are_refused() -> None:
    with refused(InputError):
        nn.TransformerEncoderLayer(D, 4)
    with refused(InputError):
        nn.TransformerEncoderLayer(D, HEADS, activation="step")
    with refused(InputError):
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS), 0)
    layer = nn.TransformerEncoderLayer(D, HEADS, 7)
    x = np.zeros((S, N, D), np.float32)
    for wrong in (
        lambda: layer(np.zeros((S, N, D + 1))),
        lambda: layer(x, src_key_padding_mask=PADDING.T),
        lambda: layer(x, np.zeros((S, S + 1))),
    ):
        with refused(ShapeError):
            wrong()


def test_masks_on_a_device(arrays: Any) -> None:
    x, masks = RNG.normal(size=(S, N, D)), ENCODER_MASKS["numbers"] | ENCODER_MASKS["padding"]
    layer = nn.TransformerEncoderLayer(D, HEADS, 7, dropout=0.0, dtype=np.float64)
    expected = layer(x, **masks).numpy()
    for parameter in layer.parameters():
        parameter.data = arrays.on_device(parameter.numpy())
    on_device = {name: arrays.on_device(mask) for name, mask in masks.items()}
    np.testing.assert_allclose(layer(arrays.on_device(x), **on_device).numpy(), expected, rtol=1e-10)


def encoded(is_auto: bool) -> np.ndarray:
    sp.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True, dtype=np.float64)
    x = np.random.default_rng(0).normal(size=(4, 3, 8))
    return (sp.AutoParallel(layer) if is_auto else layer)(x, is_causal=True).numpy()


def test_operator_parallel_matches_one_device() -> None:
    for y in sp.launch(encoded, (True,), world_size=2, transport="inline"):
        np.testing.assert_allclose(y, encoded(False), rtol=1e-11)
