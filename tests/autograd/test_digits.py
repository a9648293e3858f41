"""Gradients keep their digits: in float16, over many rows, at a saturated softmax, beside infinite ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from simparallel.arrays.seam import kernels_of
from simparallel.autograd import Tensor, functions as F
from simparallel.errors import OutOfRangeError

HALF = np.dtype(np.float16)


def gradient(function, x, dy=None):
    """Return the gradient of a leaf x under the cotangent dy (ones by default)."""
    leaf = Tensor(np.asarray(x), requires_grad=True)
    y = function(leaf)
    y.backward(np.ones(y.shape, y.dtype) if dy is None else dy, check_finite=False)
    return leaf.grad.numpy()


# Each use of a leaf (3,) by n rows: its gradient is n. NumPy adds up one column pairwise, several row by row.
USED_BY_ROWS = {
    "linear": lambda n, dtype: lambda b: F.linear(np.ones((n, 2), dtype), np.ones((3, 2), dtype), b),
    "linear of images": lambda n, dtype: lambda b: F.linear(np.ones((1, n, 2), dtype), np.ones((3, 2), dtype), b),
    "add": lambda n, dtype: lambda b: np.ones((n, 3), dtype) + b,
    "mul": lambda n, dtype: lambda b: np.ones((n, 1, 3), dtype) * b,
    "expand": lambda n, dtype: lambda b: b.expand(n, 3),
    "tile": lambda n, dtype: lambda b: b.tile(n, 1),
    "embedding": lambda n, dtype: lambda b: F.embedding(np.zeros(n, np.int64), b.reshape(1, 3)),
    "take": lambda n, dtype: lambda b: b.reshape(1, 3).take(np.zeros(n, np.int64), 0),
    "conv2d": lambda n, dtype: lambda b: F.conv2d(np.ones((n, 1, 1, 1), dtype), np.ones((3, 1, 1, 1), dtype), b),
    "layer_norm": lambda n, dtype: lambda b: F.layer_norm(np.ones((n, 3), dtype), np.ones(3, dtype), b),
    "batch_norm": lambda n, dtype: lambda b: F.batch_norm(np.ones((n, 3), dtype), np.ones(3, dtype), b),
}


@pytest.mark.parametrize("use", USED_BY_ROWS)
@settings(max_examples=10)
@given(n=st.integers(2, 30_000))
@example(n=30_000)
def test_float16_gradients_of_many_rows_add_up(use, n):
    """Summed in float16 they would end at 2048."""
    found = gradient(USED_BY_ROWS[use](n, HALF), np.ones(3, HALF))

    assert (found.dtype, found.tolist()) == (HALF, 3 * [float(np.float16(n))])


@pytest.mark.parametrize("use", sorted(set(USED_BY_ROWS) - {"embedding", "take", "tile"}))
def test_float32_gradients_of_many_rows_are_accurate(use):
    """Added one row after another, 65,536 rows of 0.1 are 6e-4 off."""
    n, tenth = 65_536, np.float32(0.1)
    function = USED_BY_ROWS[use](n, np.float32)
    shape = function(Tensor(np.ones(3, np.float32))).shape
    found = gradient(function, np.ones(3, np.float32), np.full(shape, tenth))

    np.testing.assert_allclose(found, np.full(3, n * float(tenth)), rtol=2e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@given(shape=st.tuples(st.integers(0, 2000), st.integers(0, 5)), in_columns=st.booleans())
def test_sum_of_rows_matches_numpy(dtype, shape, in_columns):
    x = (np.arange(shape[0] * shape[1], dtype=dtype) % 7 - 3).reshape(shape)
    x = np.asfortranarray(x) if in_columns else x
    out = np.full(shape[1], 7, dtype)

    np.testing.assert_array_equal(kernels_of[np].sum_rows(x), x.sum(0))
    assert kernels_of[np].sum_rows(x, out) is out
    np.testing.assert_array_equal(out, x.sum(0))


@given(data=st.data())
def test_unbroadcast_is_the_transpose_of_broadcasting(data):
    whole = data.draw(st.lists(st.integers(0, 3), max_size=4).map(tuple))
    start = data.draw(st.integers(0, len(whole)))
    shape = tuple(data.draw(st.sampled_from((size, 1))) for size in whole[start:])
    dy = np.arange(np.prod(whole, dtype=int), dtype=np.float64).reshape(whole)
    x = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)

    found = kernels_of[np].unbroadcast(dy, shape)
    assert found.shape == shape
    assert (found * x).sum() == (dy * np.broadcast_to(x, whole)).sum()


# --- means over more elements than float16 can count ------------------------------------------------

COUNT = 70_000
MEANS = {
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.reshape(1, 1, 100, COUNT // 100), 1),
    "cross_entropy": lambda x: F.cross_entropy(x.reshape(-1, 1).expand(-1, 2) * np.array([1, 0], x.dtype),
                                               np.zeros(COUNT, np.int64)),
    "nll_loss": lambda x: F.nll_loss(x.reshape(-1, 1), np.zeros(COUNT, np.int64)),
    "softmax_cross_entropy_with_logits": lambda x: F.softmax_cross_entropy_with_logits(
        F.stack([x, -x], 1), np.stack([np.ones(COUNT, x.dtype), np.zeros(COUNT, x.dtype)], 1)
    ),
    "mse_loss": lambda x: F.mse_loss(x, np.zeros(COUNT, x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_float16_mean_of_many_elements_has_gradient(name):
    """float16 ends at 65504: divided by an infinite count, all gradients would be 0."""
    x = np.linspace(-2, 2, COUNT).astype(HALF)
    scaled = {dtype: gradient(lambda leaf: MEANS[name](leaf) * 4096.0, x.astype(dtype)) for dtype in (HALF, "f4")}

    assert scaled[HALF].dtype == HALF
    assert abs(scaled["f4"]).max() > 0.01
    np.testing.assert_allclose(scaled[HALF], scaled["f4"], rtol=3e-3, atol=2e-4)


# --- where functions saturate ------------------------------------------------------------------------


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_float16_gradient_matches_float32(approximate):
    """For every finite float16, GELU's gradient is the float32 gradient, rounded."""
    x = np.arange(2**16, dtype=np.uint16).view(HALF)
    x = x[np.isfinite(x)]
    found, expected = (gradient(lambda leaf: F.gelu(leaf, approximate), x.astype(d)) for d in (HALF, "f4"))

    np.testing.assert_array_equal(found, expected.astype(HALF))
    assert np.isfinite(found).all()


@pytest.mark.filterwarnings("ignore:overflow")  # overflow of the square
@given(st.floats(-(2.0**63), 2.0**63, width=32))
def test_gelu_slope_is_0_or_1_far_from_0(x):
    slope = gradient(lambda leaf: F.gelu(leaf, "tanh"), np.array([x], np.float32)).item()

    assert abs(x) < 10 or slope == (x > 0)


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
def test_attention_gradients_at_saturated_softmax(size):
    """In self-attention where nearly every query attends to itself alone, the small rest of dp - D must be right."""
    rng = np.random.default_rng(1)
    x, dy = size * rng.standard_normal((4, 16, 32)), rng.standard_normal((4, 16, 32))

    def found(dtype):
        own = x.astype(np.float32).astype(dtype)
        return gradient(lambda leaf: F.scaled_dot_product_attention(leaf, leaf, leaf), own, dy.astype(dtype))

    expected = found(np.float64)
    assert abs(found(np.float32) - expected).max() < 1e-6 * abs(expected).max()


@given(st.integers(1, 8), st.integers(0, 99))
def test_attention_to_one_key_has_no_score_gradient(num_keys, seed):
    """A query that attends to one key alone has a gradient of exactly 0."""
    rng = np.random.default_rng(seed)
    k = 120 * np.arange(num_keys, dtype=np.float32)[:, None]  # e ** -120 is 0 in float32
    v, dy = (rng.standard_normal((num_keys, 16)).astype(np.float32) for _ in range(2))
    q = np.ones((num_keys, 1), np.float32)

    assert not gradient(lambda leaf: F.scaled_dot_product_attention(leaf, k, v), q, dy).any()


# --- infinite gradients --------------------------------------------------------------------------------

CHOICES = {
    "relu": F.relu,
    "clip": lambda x: x.clip(0),
    "maximum": lambda x: F.maximum(x, 0.0),
    "where": lambda x: F.where(x > 0, x, 0.0),
    "where the other": lambda x: F.where(x <= 0, 0.0, x),
    "max_pool2d": lambda x: F.max_pool2d(x.reshape(1, 1, 1, -1), (1, 2)),
    "max_pool2d in strides": lambda x: F.max_pool2d(x.reshape(1, 1, 1, -1), (1, 2), 1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("choose", CHOICES)
@given(data=st.data())
def test_unselected_elements_get_zero_gradient(choose, dtype, data):
    """An infinite or NaN gradient reaches the selected elements only, not as 0 * inf = NaN the others."""
    x = np.array(data.draw(st.lists(st.sampled_from((-2.0, -1.0, 1.0, 2.0)), min_size=2, max_size=6)), dtype)
    finite = gradient(CHOICES[choose], x)
    found = gradient(
        CHOICES[choose],
        x,
        np.full(CHOICES[choose](Tensor(x)).shape, data.draw(st.sampled_from((np.inf, -np.inf, np.nan))), dtype),
    )

    np.testing.assert_array_equal(found[finite == 0], 0)
    assert not np.isfinite(found[finite != 0]).any()


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_sqrt_of_relu_has_no_gradient_below_0():
    assert gradient(lambda x: F.relu(x).sqrt(), np.array([-1.0, 4.0])).tolist() == [0.0, 0.25]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64, np.complex128])
@given(data=st.data())
def test_masked_matches_where(dtype, data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    x = np.broadcast_to(np.array(data.draw(st.sampled_from((1.5, -np.inf, np.nan))), dtype), shape)
    keep = np.random.default_rng(data.draw(st.integers(0, 9))).random(shape) < 0.5

    np.testing.assert_array_equal(kernels_of[np].masked(x, keep), np.where(keep, x, 0))
    np.testing.assert_array_equal(kernels_of[np].masked(x.T, keep.T), np.where(keep, x, 0).T)


# --- padding rows ---------------------------------------------------------------------------------------


@given(rows=st.integers(1, 4), padding=st.integers(-9, 9))
def test_padding_idx_must_be_a_row(rows, padding):
    table = np.ones((rows, 2))
    if not -rows <= padding < rows:
        with pytest.raises(OutOfRangeError, match=f"padding_idx={padding} .* {rows} rows"):
            F.embedding(np.arange(rows), table, padding)
        return
    found = gradient(lambda leaf: F.embedding(np.arange(rows), leaf, padding), table)

    assert np.flatnonzero(found[:, 0] == 0).tolist() == [padding % rows]
