"""Functions that are built of several ops, beside PyTorch's: values and gradients."""

# ruff: noqa: B023 (functions made in loops are called at once)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import functions as F
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.testing.strategies import FLOATS, arrays

torch = pytest.importorskip("torch")
TF = torch.nn.functional


def same(ours: Any, theirs: Any, *inputs: np.ndarray) -> None:
    """Compare values and gradients of two functions, to rounding."""
    mine = [sp.Tensor(x.copy(), requires_grad=x.dtype.kind == "f") for x in inputs]
    other = [torch.tensor(x, requires_grad=x.dtype.kind == "f") for x in inputs]
    y, expected = ours(*mine), theirs(*other)
    assert y.shape == tuple(expected.shape)
    assert str(y.dtype) == str(expected.dtype).removeprefix("torch.")
    np.testing.assert_allclose(y.numpy(), expected.detach().numpy(), rtol=1e-12, atol=1e-12)
    if not y.requires_grad:
        return
    dy = np.arange(1.0, y.numpy().size + 1).reshape(y.shape) % 7 - 2
    y.backward(dy)
    expected.backward(torch.tensor(dy))
    for a, b in zip(mine, other, strict=True):
        if b.grad is not None:
            np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-10, atol=1e-12)


def images(draw: Any, *shape: int) -> np.ndarray:
    return draw(arrays(shape, values=FLOATS))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
@given(data=st.data())
def test_padding(mode: str, data: Any) -> None:
    """Negative widths crop. PyTorch's "circular" leaves elements unset where too little is left; we refuse."""
    x = images(data.draw, 2, 2, data.draw(st.integers(3, 5)), data.draw(st.integers(5, 6)))
    pad = data.draw(st.lists(st.integers(-2, 2), min_size=4, max_size=4))
    sides = [(x.shape[3], pad[:2]), (x.shape[2], pad[2:])]
    if any(size + sum(w) < 0 for size, w in sides) or (
        mode == "circular" and any(size < max(0, *w) - sum(min(0, n) for n in w) for size, w in sides)
    ):
        with refused(ShapeError):
            F.pad(x, pad, mode)
    else:
        same(lambda x: F.pad(x, pad, mode), lambda x: TF.pad(x, pad, mode), x)


@pytest.mark.parametrize("mode", ["nearest", "linear", "bilinear"])
@given(data=st.data())
def test_interpolation(mode: str, data: Any) -> None:
    dims = {"nearest": data.draw(st.integers(1, 2)), "linear": 1, "bilinear": 2}[mode]
    x = images(data.draw, 2, 1, *(data.draw(st.integers(1, 5)) for _ in range(dims)))
    if data.draw(st.booleans()):
        how: dict[str, Any] = {"size": [data.draw(st.integers(1, 7)) for _ in range(dims)]}
    else:
        # With mode "nearest" and 2.3, PyTorch's backward takes other pixels than its forward.
        factors = (1.0, 1.5, 2.0, 2.5 if mode == "nearest" else 2.3, 3.0)
        how = {"scale_factor": [data.draw(st.sampled_from(factors)) for _ in range(dims)]}
        how["recompute_scale_factor"] = data.draw(st.booleans())
    if mode != "nearest":
        how["align_corners"] = data.draw(st.booleans())
    same(lambda x: F.interpolate(x, mode=mode, **how), lambda x: TF.interpolate(x, mode=mode, **how), x)


@given(st.data())
def test_interpolation_of_uint8_has_torchs_bits(data: Any) -> None:
    """PyTorch has no linear mode for uint8: compare with an image of one row."""
    height, width = (data.draw(st.integers(1, 7)) for _ in range(2))
    x = data.draw(
        arrays((2, data.draw(st.sampled_from((1, 2, 4))), height, width), np.uint8, values=(0, 1, 6, 55, 255))
    )
    size = [data.draw(st.integers(1, 11)) for _ in range(2)]
    corners = data.draw(st.booleans())
    for how in ({"mode": "nearest"}, {"mode": "bilinear", "align_corners": corners}):
        same(lambda x: F.interpolate(x, size, **how), lambda x: TF.interpolate(x, size, **how), x)
    how["size"] = [1, size[1]]
    row = F.interpolate(x[:, :, 0], size[1], mode="linear", align_corners=corners)
    np.testing.assert_array_equal(row.numpy(), TF.interpolate(torch.tensor(x[:, :, :1]), **how)[:, :, 0].numpy())


def test_linear_interpolation_of_integers_is_refused() -> None:
    for dtype in ("int8", "int64", "bool"):
        with refused(DTypeError):
            F.interpolate(np.ones((1, 1, 3), dtype), 2, mode="linear")
        assert F.interpolate(np.ones((1, 1, 3), dtype), 2).dtype == dtype


@given(st.data())
def test_picking_and_placing_along_a_dim(data: Any) -> None:
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(2))
    dim = data.draw(st.integers(-2, 1))
    x = images(data.draw, *shape)
    other, across = list(shape), 1 - dim % 2
    other[dim] = data.draw(st.integers(0, 4))
    if data.draw(st.booleans()):
        other[across] = data.draw(st.integers(0, shape[across]))  # the index may be shorter
    index = data.draw(arrays(tuple(other), np.int64, values=tuple(range(shape[dim]))))
    same(lambda x: F.gather(x, dim, index), lambda x: torch.gather(x, dim, torch.tensor(index)), x)
    if other[across] == shape[across]:
        src = images(data.draw, *other)
        theirs = torch.tensor(index)
        same(lambda x, s: x.scatter_add(dim, index, s), lambda x, s: x.scatter_add(dim, theirs, s), x, src)
        same(lambda x: x.scatter(dim, index, 5.0), lambda x: x.scatter(dim, theirs, 5.0), x)


@given(st.data())
def test_topk_and_sort(data: Any) -> None:
    shape = data.draw(st.sampled_from(((), (3,), (2, 4))))
    size = int(np.prod(shape))
    order = np.random.Generator(np.random.Philox(data.draw(st.integers(0, 255)))).permutation(size)
    x = (order * 0.5).reshape(shape)
    dim, up = data.draw(st.sampled_from((-1, 0))), data.draw(st.booleans())
    k = data.draw(st.integers(0, shape[dim] if shape else 1)) if shape else 1
    for i in range(2):
        same(lambda x: F.topk(x, k, dim, up)[i], lambda x: torch.topk(x, k, dim, up)[i], x)
        same(lambda x: x.sort(dim, up)[i], lambda x: x.sort(dim, up)[i], x)


def test_einsum_with_diagonals_and_without_an_arrow() -> None:
    a, b = np.arange(9.0).reshape(3, 3), np.arange(12.0).reshape(2, 2, 3)
    for equation, inputs in {
        "ii->i": (a,),
        "ii": (a,),
        "jii->ij": (b[:, :, :2],),
        "...ii->...i": (b[:, :2, :2],),
        "ii,i->i": (a, a[0]),
        "ij,jk": (a, a),
        "...j,jk": (b, a),
        "ba": (a,),
        "iij,j->i": (b, a[1]),
    }.items():
        same(lambda *x: F.einsum(equation, *x), lambda *x: torch.einsum(equation, *x), *inputs)
    for bad in ("i->j", "i-j", "i...->i", 3):
        with refused(InputError):
            F.einsum(bad, a)  # type: ignore[arg-type]
    with refused(ShapeError):
        F.einsum("ij->i", a[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_cross_entropy_with_probabilities(reduction: str, inner: tuple[int, ...]) -> None:
    draw = np.random.Generator(np.random.Philox(1)).random
    x, p, weight = draw((3, 4, *inner)), draw((3, 4, *inner)), draw(4)
    for w, smoothing in ((None, 0.0), (weight, 0.25)):
        same(
            lambda x, p: F.cross_entropy(x, p, reduction, weight=w, label_smoothing=smoothing),
            lambda x, p: TF.cross_entropy(
                x, p, None if w is None else torch.tensor(w), reduction=reduction, label_smoothing=smoothing
            ),
            x,
            p,
        )
    with refused(InputError):
        F.cross_entropy(x, p, ignore_index=-1)


@given(st.data())
def test_division_with_rounding(data: Any) -> None:
    dtype = data.draw(st.sampled_from((np.int64, np.float64)))
    a = data.draw(arrays((6,), dtype, values=(7, -7, 6, -6, 0, 2**53 + 1 if dtype == np.int64 else 1)))
    b = data.draw(arrays((6,), dtype, values=(2, -2, 3, -3)))
    for mode in ("floor", "trunc"):
        same(
            lambda a, b: a.div(b, rounding_mode=mode),
            lambda a, b: torch.div(a.detach(), b.detach(), rounding_mode=mode),
            a,
            b,
        )
    with refused(InputError):
        F.div(a, b, rounding_mode="up")


def test_dims_of_a_tensor_without_dims() -> None:
    x = np.array(2.5)
    for dim in (0, -1):
        for name in ("sum", "prod", "mean", "amax", "argmax", "softmax", "log_softmax", "cumsum", "logsumexp"):
            function = getattr(F, name.removeprefix("a") if name == "amax" else name)
            same(lambda x: function(x, dim), lambda x: getattr(torch, name)(x, dim), x)
        same(lambda x: x.flip(dim), lambda x: x.flip(dim), x)
        same(lambda x: x.squeeze(dim), lambda x: x.squeeze(dim), x)
        with refused(ShapeError):
            F.sum(x, dim + 2)


def test_variance_by_the_older_name() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for unbiased in (True, False):
        for name in ("var", "std"):
            same(lambda x: getattr(x, name)(1, unbiased=unbiased), lambda x: getattr(x, name)(1, unbiased=unbiased), x)
            same(
                lambda x: getattr(F, name)(x, unbiased=unbiased),
                lambda x: getattr(torch, name)(x, unbiased=unbiased),
                x,
            )


def test_pooling_of_a_single_image() -> None:
    x = np.arange(32.0).reshape(2, 4, 4)
    same(
        lambda x: F.max_pool2d(x, 2, dilation=2, ceil_mode=True),
        lambda x: TF.max_pool2d(x, 2, dilation=2, ceil_mode=True),
        x,
    )
    same(lambda x: sp.nn.AvgPool2d(3, 2, 1, ceil_mode=True)(x), torch.nn.AvgPool2d(3, 2, 1, ceil_mode=True), x)
    same(lambda x: F.adaptive_avg_pool2d(x, 3), lambda x: TF.adaptive_avg_pool2d(x, 3), x)


def test_masks_fill_with_their_value() -> None:
    x = np.arange(6.0).reshape(2, 3)
    mask = np.array([True, False, True])
    same(lambda x: x.masked_fill(mask, -1), lambda x: x.masked_fill(torch.tensor(mask), -1), x)
    assert F.masked_fill(np.arange(3), mask, 7).dtype == np.int64


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_dropout(mask: str | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over many masks is attention without dropout; at p = 0 the unfused path equals the op."""
    draw = np.random.Generator(np.random.Philox(2)).standard_normal
    q, k, v = draw((2, 3, 4)), draw((2, 3, 4)), draw((2, 3, 5))
    bias = None if mask is None else np.tril(np.ones((3, 3), bool)) if mask == "bool" else draw((3, 3))
    expected = F.scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal)
    sp.set_seed(3)
    many = [F.scaled_dot_product_attention(q, k, v, bias, 0.5, is_causal=is_causal).numpy() for _ in range(400)]
    assert not np.array_equal(many[0], many[1])
    np.testing.assert_allclose(np.mean(many, axis=0), expected.numpy(), atol=0.4)
    monkeypatch.setattr("simparallel.autograd.ops.attention.dropout", lambda x, p: x)
    y = F.scaled_dot_product_attention(q, k, v, bias, 0.5, is_causal=is_causal)
    np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-12)


def test_dropout_keeps_the_mean_and_counts_calls() -> None:
    x = sp.Tensor(np.ones(4000, np.float32), requires_grad=True)
    sp.set_seed(5)
    y, z = F.dropout(x, 0.25), F.dropout(x, 0.25)
    assert abs(y.mean().item() - 1) < 0.05
    assert not np.array_equal(y.numpy(), z.numpy())
    sp.set_seed(5)
    np.testing.assert_array_equal(F.dropout(x, 0.25).numpy(), y.numpy())
    assert F.dropout(x, training=False) is x
