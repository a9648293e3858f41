"""Operands beside a tensor: numbers, lists, other dtypes, masks, dims, sizes."""

from __future__ import annotations

import gc
import operator
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.autograd import Tensor, functions as F
from simparallel.clock.memory import BUFFERS
from simparallel.clock.recorder import current_recorder
from simparallel.errors import DTypeError, InputError, LabelError, OutOfRangeError, ShapeError
from simparallel.layout.layout import Layout
from simparallel.parallel import distribute_tensor
from simparallel.testing import check_gradients
from simparallel.testing.strategies import arrays, matmul_operands, shapes

INTEGERS = ("uint8", "int8", "int32", "int64")
FLOATS = ("float16", "float32", "float64")
ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.mod, operator.floordiv, F.maximum)
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


def ones(dtype):
    return Tensor(np.ones(2, dtype))


# --- dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_integers", INTEGERS)
@pytest.mark.parametrize("of_floats", FLOATS)
def test_float_dtype_wins_over_integers(of_floats, of_integers):
    """A floating-point tensor keeps its dtype beside integers of any size."""
    x, n = ones(of_floats), ones(of_integers)
    results = [f(*pair) for pair in ((x, n), (n, x)) for f in (*ARITHMETIC, operator.truediv, operator.pow)]
    results += [F.where(x > 0, x, n), F.matmul(x, n), x * np.ones(2, of_integers), x.clip(n, 3 * n)]

    assert {y.dtype for y in results} == {np.dtype(of_floats)}
    assert (n / n).dtype == (n / 2).dtype == (n * 0.5).dtype == (n**0.5).dtype == n.clip(0.5).dtype == "float32"


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS, *FLOATS])
@pytest.mark.parametrize("number", [True, 2, 0.5])
def test_numpy_scalars_act_as_python_numbers(dtype, number):
    """NumPy's scalars and lists behave as Python's numbers."""
    x = ones(dtype)
    scalars = [np.array(number, kind)[()] for kind in ("bool", "int64", "float64")]
    scalar = next(s for s in scalars if s.dtype.kind == np.asarray(number).dtype.kind)
    for function in (operator.add, operator.mul, operator.truediv):
        expected = function(x, number)

        for y in (function(x, scalar), function(scalar, x), F.where(x > 0, expected, scalar)):
            assert y.dtype == expected.dtype
        if x.dtype.kind == "f":  # beside integers, a list is an array of int64
            np.testing.assert_array_equal(function(x, [0.1, number]).numpy()[:1], function(x, 0.1).numpy()[:1])
            assert function(x, [number, number]).dtype == x.dtype
    if x.dtype.kind != "b":
        assert (x**scalar).dtype == (x**number).dtype
        assert x.clip(scalar).dtype == x.clip(number).dtype


@pytest.mark.parametrize("dtype", INTEGERS)
@given(number=st.integers(-(2**62), 2**62))
def test_out_of_range_integer_keeps_its_value(dtype, number):
    """An integer that the dtype cannot hold enters comparisons and sums with its own value."""
    x = np.array([0, 3, 100], dtype)
    for function in COMPARISONS:
        np.testing.assert_array_equal(function(Tensor(x), number).numpy(), function(x.astype(object), number))
    np.testing.assert_array_equal((Tensor(x) // 8 + number).numpy() - number, x // 8)


@pytest.mark.parametrize("dtype", INTEGERS)
@given(number=st.integers(-(2**70), 2**70))
def test_out_of_range_integer_in_place_is_refused(dtype, number):
    x = Tensor(np.zeros(2, dtype))
    if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
        x[0] = number
        x += np.int64(0)
        assert x[0].item() == number
        return
    with pytest.raises(DTypeError, match=f"{dtype} .* {number}"):
        x[0] = number
    with pytest.raises(DTypeError, match=f"{dtype} .* {number}"):
        x += number
    assert not x.numpy().any()


def mixed(layout):
    ids = distribute_tensor(np.arange(8).reshape(4, 2), layout)
    x = distribute_tensor(np.full((4, 2), 0.5, np.float32), layout, requires_grad=True)
    y = ids * x / np.int64(2)
    y.sum().backward()
    stays = ids.astype("float32").placement is ids.placement
    return stays, y.dtype, y.full_tensor().numpy(), x.grad.full_tensor().numpy()


@pytest.mark.parametrize("names", [("a", "b"), ("None", ("a", "b")), ("b", "None"), ("None", "None")])
def test_sharded_tensors_promote_alike(names):
    """Sharded tensors follow the same dtype promotion."""
    names = tuple("None" if isinstance(name, tuple) else name for name in names)
    layout = Layout((2, 2), ("a", "b"))(*names)
    for stays, dtype, y, gradient in sp.launch(mixed, (layout,), world_size=4, transport="inline"):
        assert (stays, dtype) == (True, np.float32)
        np.testing.assert_array_equal(y, np.arange(8, dtype=np.float32).reshape(4, 2) / 4)
        np.testing.assert_array_equal(gradient, np.arange(8, dtype=np.float32).reshape(4, 2) / 2)


def test_mixing_costs_an_op_and_equal_dtypes_none():
    def events(n):
        with sp.Cluster(1, transport="inline") as cluster:
            cluster.run(lambda: [Tensor(np.ones(2, np.float32)) * Tensor(np.ones(2, n)), None][1])
            return [event.name for event in cluster.trace.events]

    assert ("Cast" in events(np.int64), "Cast" in events(np.float32), "Cast" in events(bool)) == (True, False, False)


# --- bounds ---------------------------------------------------------------------------------------------


@given(data=st.data())
def test_clip_to_tensors_matches_numpy(data):
    """Clipping to Tensors matches NumPy and has gradients for the bounds."""
    x, low, high = (data.draw(arrays((3, 4)[i:], values=(-2, -1, 0.5, 1, 3))) + 0.1 * i for i in (0, 1, 0))
    high = high + low + 0.05
    leaves = [Tensor(a, requires_grad=True) for a in (x, low, high)]
    leaves[0].clip(*leaves[1:]).sum().backward()
    is_low, is_high = (x < low) & (low < high), np.maximum(x, low) > high

    np.testing.assert_array_equal(Tensor(x).clip(low, high).numpy(), np.minimum(np.maximum(x, low), high))
    np.testing.assert_array_equal(Tensor(x).clip(low).numpy(), np.maximum(x, low))
    np.testing.assert_array_equal(Tensor(x).clip(high=low.tolist()).numpy(), np.minimum(x, low))
    np.testing.assert_array_equal(leaves[0].grad.numpy(), ~is_high & (x >= low))
    np.testing.assert_array_equal(leaves[1].grad.numpy(), (is_low & ~is_high).sum(0))
    np.testing.assert_array_equal(leaves[2].grad.numpy(), is_high)


def test_clip_keeps_no_bound_alive():
    low = Tensor([1.0, 2.0])
    seen = weakref.ref(low)
    Tensor([0.0, 3.0]).clip(low)
    del low
    gc.collect()

    assert seen() is None


# --- operators ------------------------------------------------------------------------------------------


@given(data=st.data())
def test_bit_and_division_operators_match_numpy(data):
    values = data.draw(st.sampled_from(((True, False), (0, 1, -1, 6, -7), (5, 2, -3))))
    a, b = (data.draw(arrays((2, 3), bool if True in values[:1] else np.int64, values=values)) for _ in "ab")
    for function in (operator.and_, operator.or_, operator.xor):
        for left, right in ((Tensor(a), Tensor(b)), (Tensor(a), b), (a, Tensor(b)), (Tensor(a), b.tolist())):
            np.testing.assert_array_equal(function(left, right).numpy(), function(a, b))
        np.testing.assert_array_equal(function(True, Tensor(a)).numpy(), function(True, a))
    np.testing.assert_array_equal((~Tensor(a)).numpy(), ~a)
    if 0 not in b and a.dtype != bool:
        for function in (operator.mod, operator.floordiv):
            np.testing.assert_array_equal(function(Tensor(a), Tensor(b)).numpy(), function(a, b))
            np.testing.assert_array_equal(function(7.5, Tensor(b)).numpy(), function(7.5, b))


@given(data=st.data())
def test_matmul_of_vectors_matches_numpy(data):
    x, w = data.draw(matmul_operands())
    x = x[..., 0, :] if x.shape[-2] and data.draw(st.booleans()) and x.ndim == 2 else x
    w = w[..., 0] if w.shape[-1] and data.draw(st.booleans()) and w.ndim == 2 else w

    np.testing.assert_array_equal((Tensor(x) @ Tensor(w)).numpy(), x @ w)
    np.testing.assert_array_equal((x @ Tensor(w)).numpy(), x @ w)
    check_gradients(F.matmul, [x, w])


# --- reductions -----------------------------------------------------------------------------------------


@given(data=st.data())
def test_any_and_all_match_numpy(data):
    shape = data.draw(shapes())
    x = data.draw(arrays(shape, values=(0.0, 0.0, 1.0, np.nan)))
    x = x.astype(bool) if data.draw(st.booleans()) else x
    dim = data.draw(st.sampled_from((None, *range(-len(shape), len(shape)))))
    keepdim = data.draw(st.booleans())
    for name in ("any", "all"):
        y = getattr(Tensor(x), name)(dim, keepdim)
        expected = getattr(np, name)(x, axis=dim, keepdims=keepdim)

        np.testing.assert_array_equal(y.numpy(), expected)
        assert y.dtype == bool


NUMPYS = (np.sum, np.mean, np.max, np.min, np.var, np.std, np.argmax, np.argmin, np.any, np.all)


@pytest.mark.parametrize("function", NUMPYS)
@given(data=st.data())
def test_numpy_reductions_take_tensors(function, data):
    x = data.draw(arrays((2, 3)))
    axis = data.draw(st.sampled_from((None, 0, -1, np.int64(1))))
    more = {"keepdims": True} if data.draw(st.booleans()) else {}
    y = function(Tensor(x), axis=axis, **more)

    assert isinstance(y, Tensor)
    np.testing.assert_allclose(y.numpy(), function(x, axis=axis, **more), rtol=1e-12)


def test_logsumexp_of_infinities():
    x = np.array([[-np.inf, -np.inf], [-np.inf, 3.0], [np.inf, 0.0], [1e4, 1e4]], np.float32)
    leaf = Tensor(x[[0, 1, 3]], requires_grad=True)
    F.logsumexp(leaf, 1).backward(np.ones(3))

    np.testing.assert_allclose(F.logsumexp(x, 1).numpy(), [-np.inf, 3, np.inf, 1e4 + np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(leaf.grad.numpy(), [[0, 0], [0, 1], [0.5, 0.5]])


def test_std_of_equal_elements_has_the_gradient_0():
    leaf = Tensor(np.array([[2.0, 2.0], [1.0, 3.0]]), requires_grad=True)
    leaf.std(1).backward(np.ones(2))

    np.testing.assert_allclose(leaf.grad.numpy(), [[0, 0], [-(0.5**0.5), 0.5**0.5]])
    assert Tensor(np.array([300, -300], np.float16)).std(correction=0).item() == 300  # the variance overflows


# --- masks ----------------------------------------------------------------------------------------------


@given(data=st.data())
def test_mask_shape_must_match_covered_dims(data):
    x = np.arange(24).reshape(2, 3, 4)
    before, ndim = data.draw(st.sampled_from(((0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1))))
    shape = tuple(data.draw(st.sampled_from((size, size, 1, 5))) for size in x.shape[before : before + ndim])
    mask = data.draw(arrays(shape, bool, values=(True, False)))
    whole = (slice(None),) * before
    for items in ((*whole, mask), (*whole, Tensor(mask)), (*whole, mask, ...), (None, *whole, mask)):
        if shape == x.shape[before : before + ndim]:
            plain = tuple(item.numpy() if isinstance(item, Tensor) else item for item in items)
            np.testing.assert_array_equal(Tensor(x)[items].numpy(), x[plain])
        else:
            with pytest.raises(OutOfRangeError, match=f"{re_shape(shape)} .* \\(2, 3, 4\\)"):
                Tensor(x)[items]
    if before + ndim == 3 and shape == x.shape[before:]:
        np.testing.assert_array_equal(Tensor(x)[..., mask].numpy(), x[..., mask])


def re_shape(shape):
    return str(shape).replace("(", r"\(").replace(")", r"\)")


# --- refused operands -----------------------------------------------------------------------------------

x, n, b = Tensor(np.ones((2, 3), np.float32)), Tensor([1, 2]), Tensor([True, False])


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (InputError, lambda: x + "a"),
        (InputError, lambda: x * None),
        (InputError, lambda: x - [[1], [2, 3]]),
        (InputError, lambda: x + 10**400),
        (InputError, lambda: n + 2**70),
        (DTypeError, lambda: n ** Tensor([-1, 2])),
        (DTypeError, lambda: -b),
        (DTypeError, lambda: b - b),
        (DTypeError, lambda: ~x),
        (DTypeError, lambda: x & 1),
        (DTypeError, lambda: x.sum(1.0)),
        (DTypeError, lambda: x.sum(True)),
        (DTypeError, lambda: x.mean((0, "a"))),
        (DTypeError, lambda: F.softmax(x, 0.5)),
        (DTypeError, lambda: x.argmin(0.5)),
        (ShapeError, lambda: x.argmin(np.int64(5))),
        (DTypeError, lambda: x.reshape(2.0, 3)),
        (DTypeError, lambda: x.reshape(6.0)),
        (DTypeError, lambda: x.expand(2.0, 2, 3)),
        (DTypeError, lambda: x.tile("2")),
        (DTypeError, lambda: x.permute(True, 0)),
        (DTypeError, lambda: F.one_hot(n, 3.0)),
        (DTypeError, lambda: F.embedding(n, x, 1.0)),
        (InputError, lambda: F.cat(x)),
        (InputError, lambda: F.stack(np.ones(2))),
        (DTypeError, lambda: x["a"]),
        (DTypeError, lambda: x[1.5]),
        (DTypeError, lambda: x[0.5:]),
        (InputError, lambda: x[::0]),
        (InputError, lambda: x[True]),
        (InputError, lambda: x[np.True_]),
        (InputError, lambda: x[Tensor(np.array(False))]),
        (InputError, lambda: x.sum(1, axis=0)),
        (InputError, lambda: np.sum(x, dtype=np.float64)),
        (InputError, lambda: x.mean(ddof=1)),
        (InputError, lambda: sp.nn.CrossEntropyLoss(np.ones(3))),
        (InputError, lambda: F.cross_entropy(x, n, np.ones(3))),
        (InputError, lambda: F.mse_loss(x, x, np.ones(3))),
        (InputError, lambda: x.clip()),
        (TypeError, lambda: F.avg_pool2d(np.ones((1, 1, 4, 4)), 2, 2, 0, True)),
        (TypeError, lambda: sp.nn.AvgPool2d(2, 2, 0, True)),
    ],
)
def test_bad_operands_are_refused(error, call):
    for _ in range(2):  # a refused operand must not stay in the cache as a key, either
        with refused(error):
            call()


def test_integers_of_numpy_are_dims_and_sizes():
    one, two = np.int64(1), np.array([0, 1])
    x = np.arange(6.0).reshape(2, 3)

    assert Tensor(x).sum(one).shape == (2,)
    assert F.softmax(x, one).shape == Tensor(x).permute(np.int32(0), one).shape == Tensor(x).T.T.shape == (2, 3)
    assert Tensor(x).sum(two).item() == 15
    assert Tensor(x).argmax(one).shape == Tensor(x).argmin(np.int8(-1)).shape == (2,)
    assert Tensor(x).reshape(np.array([3, 2])).shape == Tensor(x).reshape(np.int64(3), -1).shape == (3, 2)
    assert Tensor(x).unsqueeze(one).squeeze(one).shape == F.stack([x, x], one)[:, 0].shape == (2, 3)
    assert F.max_pool2d(np.ones((1, 1, 4, 4)), np.array([2, 2]), np.int64(2)).shape == (1, 1, 2, 2)
    assert F.conv2d(np.ones((1, 1, 4, 4)), np.ones((1, 1, 2, 2)), stride=np.array([2, 1])).shape == (1, 1, 2, 3)
    assert F.one_hot([0, 1], np.int64(3)).shape == (2, 3)


def test_id_errors_differ_from_label_errors():
    for call in (
        lambda: F.embedding(np.array([5]), np.ones((5, 2))),
        lambda: F.embedding(np.array([-1]), np.ones((5, 2))),
        lambda: F.one_hot(np.array([5]), 5),
        lambda: F.cross_entropy(np.ones((1, 5)), np.array([5])),
        lambda: F.cross_entropy(np.ones((1, 5)), np.array([-1])),
    ):
        with refused(LabelError):
            call()


# --- masks of attention ---------------------------------------------------------------------------------


@given(data=st.data())
def test_attention_masks_broadcast(data):
    """A mask of padded keys, (batch, 1, 1, s), is the usual one."""
    shape = (2, 3, 4, 5)  # batch, heads, queries, keys
    kept = tuple(data.draw(st.sampled_from((size, 1))) for size in shape)[data.draw(st.integers(0, 4)) :]
    mask = data.draw(arrays(kept, values=(0.0, -1.0, 2.0)))
    q, k, v = (np.linspace(-1, 1, n).reshape(2, 3, -1, 2) for n in (48, 60, 60))
    whole = np.broadcast_to(mask, shape).copy()

    np.testing.assert_allclose(
        F.scaled_dot_product_attention(q, k, v, mask).numpy(),
        F.scaled_dot_product_attention(q, k, v, whole).numpy(),
        rtol=1e-12,
    )
    check_gradients(F.scaled_dot_product_attention, [q, k, v, mask])


def causal_masks(sizes):
    kept = []
    for size in sizes:
        q = np.ones((1, size, 2), np.float32)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        kept.append(current_recorder().memory.live[BUFFERS])
    return kept


def test_largest_causal_mask_is_cached():
    (kept,) = sp.launch(causal_masks, ([8, 8, 16, 4],), world_size=1, transport="inline")

    assert np.diff([0, *kept]).tolist() == [4 * 64, 0, 4 * (256 - 64), 4 * (16 - 256)]


def test_op_call_takes_arrays_and_lists():
    x, w = np.arange(6.0).reshape(2, 3), Tensor(np.ones((3, 2)), requires_grad=True)
    y = sp.ops.MatMul()(x, w)
    assert y.numpy().tolist() == [[3, 3], [12, 12]]
    y.sum().backward()
    assert w.grad.numpy().tolist() == [[3, 3], [5, 5], [7, 7]]
    assert sp.ops.Add()([1.0, 2.0], 3.0).numpy().tolist() == [4, 5]
    with refused(InputError):
        sp.ops.MatMul()("x", w)
