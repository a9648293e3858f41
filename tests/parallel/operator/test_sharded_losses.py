"""Losses of scores with inner dims, (n, v, d0, ...): cut in any way, they equal the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import simparallel as sp
from simparallel import functions as F
from simparallel.autograd import Tensor
from simparallel.parallel import distribute_tensor
from simparallel.testing.strategies import layouts

MESH = {"device_matrix": (2, 2), "names": ("a", "b"), "permuted": False}


def run(loss_fn: Any, inputs: list[Any], cuts: Any = None) -> list[np.ndarray]:
    """Return the loss, and the gradient of the first input."""
    first, *rest = inputs if cuts is None else map(distribute_tensor, inputs, cuts)
    first = Tensor(first.copy(), True) if cuts is None else first.requires_grad_()
    losses = loss_fn(first, *rest).full_tensor()
    losses.backward(np.arange(1.0, losses.numel() + 1).reshape(losses.shape))
    return [losses.detach().numpy(), first.grad.full_tensor().numpy()]


FUNCTIONS = {
    "labels": F.cross_entropy,
    "probabilities": F.cross_entropy,
    "log-probabilities": F.nll_loss,
    "logits of two classes": F.binary_cross_entropy_with_logits,
    "squares": F.mse_loss,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@given(data=st.data())
def test_cut_losses_of_inner_dims_equal_the_whole(kind: str, data: Any) -> None:
    n, v = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    inner = data.draw(st.lists(st.integers(1, 4), max_size=2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = rng.normal(size=(n, v, *inner))
    target: Any = rng.random(scores.shape)
    settings: dict[str, Any] = {"reduction": data.draw(st.sampled_from(("mean", "sum", "none")))}
    if kind in ("labels", "log-probabilities"):
        target = rng.integers(0, v, (n, *inner))
        settings["ignore_index"] = data.draw(st.sampled_from((None, 0)))
    if kind in ("labels", "probabilities"):
        settings["label_smoothing"] = data.draw(st.sampled_from((0.0, 0.2)))
    weights = kind != "squares" and data.draw(st.booleans())
    name = "pos_weight" if kind == "logits of two classes" else "weight"
    inputs = [scores, target, *([rng.random(scores.shape[-1] if name == "pos_weight" else v)] if weights else [])]
    cuts = [data.draw(layouts(x.shape, **MESH)) for x in inputs]

    def loss_fn(x: Tensor, y: Any, *weight: Any) -> Tensor:
        return FUNCTIONS[kind](x, y, **settings, **({name: weight[0]} if weight else {}))

    expected = run(loss_fn, inputs)
    for found in sp.launch(run, (loss_fn, inputs, cuts), world_size=4, transport="inline"):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
