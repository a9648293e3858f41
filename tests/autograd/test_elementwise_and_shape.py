"""Elementwise, extremum, joining and indexing ops: edges, cut dims, functions, errors."""

from __future__ import annotations

import math
import threading
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, strategies as st
from op_records import op_calls
from refusals import refused

from simparallel.arrays.host.erf import erf
from simparallel.arrays.seam import kernels_of
from simparallel.autograd import GELU, ArgMax, Context, Max, Min, Op, Spec, Tensor, Var, functions as F
from simparallel.errors import DTypeError, InputError, OutOfRangeError, ShapeError
from simparallel.testing import check_gradients
from simparallel.testing.strategies import arrays


def leaf(values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


def gradient(fn, x):
    y = fn(x)
    y.backward(np.ones(y.shape))
    return x.grad.numpy().tolist()


# --- dtypes ------------------------------------------------------------------------------------------


@given(st.data())
def test_integer_results_have_inferred_dtype(data):
    names = ["Abs", "ArgMax", "Cast", "Clip", "Concat", "GELU", "Index", "Less", "Max", "Maximum", "Min"]
    for name in [*names, "Pad", "SiLU", "Slice", "Sqrt", "Stack", "Tile", "Var", "Where"]:
        dtype = data.draw(st.sampled_from((np.int8, np.int32, np.int64)))
        op, inputs = data.draw(op_calls(name, dtype, exact=True))
        y = op(*(Tensor(array) for array in inputs))

        assert op.infer(*(Spec(array.shape, array.dtype) for array in inputs)) == Spec(y.shape, y.dtype)


@pytest.mark.parametrize("name", ["ReLU", "Max", "Min", "ArgMax", "Var", "Abs", "Equal", "Maximum", "Sum"])
def test_bool_results_have_inferred_dtype(name):
    x = np.array([True, False])
    op = Op.registry[name]()
    inputs = [x, x] if name in ("Equal", "Maximum") else [x]
    y = op(*map(Tensor, inputs))

    assert op.infer(*(Spec(a.shape, a.dtype) for a in inputs)).dtype == y.dtype


def test_numbers_keep_the_dtype_of_the_tensor():
    x = Tensor(np.ones(2, np.float16))
    results = [x**2, x**0.5, 2**x, F.maximum(x, 0), F.where(x > 0, x, 0.0), x.clip(0, 1), abs(x), x.var()]

    assert {y.dtype for y in results} == {np.dtype(np.float16)}
    assert (Tensor([1, 2]) ** 2).dtype == np.int64
    assert [Tensor([1, 2]).clip(0, 1).dtype, Tensor([1, 2]).clip(0.0, 1.0).dtype] == [np.int64, np.float32]


def test_float16_is_summed_in_float32():
    x = Tensor(np.full(4096, 1.0, np.float16) * np.float16(0.1))

    assert x.sum().item() == pytest.approx(4096 * float(np.float16(0.1)), rel=1e-3)
    assert Tensor(np.array([200, -200] * 8, np.float16)).var(correction=0).item() == 40000
    assert Tensor(np.full(100, 200, np.float16)).var().item() == 0.0


def test_casts_pass_gradients_between_floats_only():
    x = leaf([1.5, -2.5], np.float32)

    assert gradient(lambda x: x.astype(np.float64) * 3, x) == [3.0, 3.0]
    assert not x.astype("int64").requires_grad
    assert x.astype(np.float32) is x
    assert x.to("int32").numpy().tolist() == [1, -2]


# --- functions of one number ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(np.float64, 1e-15), (np.float32, 5e-7), (np.float16, 5e-4)])
def test_erf_matches_math(dtype, limit):
    x = np.concatenate([np.linspace(-7, 7, 4001), np.linspace(-1, 1, 2001), [0.46875, np.inf, -np.inf]])
    x = x.astype(dtype)

    assert max(abs(erf(np, x) - [math.erf(float(v)) for v in x])) < limit
    assert np.isnan(erf(np, np.array([np.nan], dtype)))[0]


def test_smooth_activations_of_huge_numbers():
    x = np.array([-1e30, -1e3, 0.0, 1e3, 1e30])

    for fn in (F.gelu, F.silu, lambda x: F.gelu(x, "tanh")):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(fn(x).numpy(), np.maximum(x, 0))


def test_power_edge_cases():
    assert gradient(lambda x: x**0, leaf([0.0, 2.0])) == [0.0, 0.0]
    assert gradient(lambda x: x**1, leaf([0.0, 2.0])) == [1.0, 1.0]
    assert gradient(lambda x: x**2, leaf([0.0, -3.0])) == [0.0, -6.0]
    assert gradient(lambda x: x ** Tensor(np.array([0.0, 2.0])), leaf([0.0, -3.0])) == [0.0, -6.0]
    assert gradient(lambda b: 0.0**b, leaf([1.0, 2.0])) == [0.0, 0.0]
    assert math.isnan(gradient(lambda b: Tensor(np.array([-2.0])) ** b, leaf([2.0]))[0])


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: F.maximum(x, Tensor(np.ones(3))), [0.0, 0.5, 1.0]),
        (lambda x: F.minimum(x, Tensor(np.ones(3))), [1.0, 0.5, 0.0]),
        (lambda x: x.clip(1, 1.5), [0.0, 1.0, 0.0]),
        (lambda x: (x - 1).abs(), [-1.0, 0.0, 1.0]),
        (lambda x: x * 0 + x.max(), [0.0, 0.0, 3.0]),
        (lambda x: Tensor(np.zeros(())) + (x * 0 + 1 * x.clip(None, 1)).max(), [0.0, 0.5, 0.0]),
    ],
)
def test_gradients_where_there_is_a_tie_or_a_kink(fn, expected):
    assert gradient(fn, leaf([0.0, 1.0, 2.0])) == expected


def test_max_min_split_gradient_and_propagate_nan():
    """Equal extremes share the gradient; a NaN is the extreme."""
    assert gradient(lambda x: x.max(), leaf([3.0, 1.0, 3.0, 3.0])) == [1 / 3, 0.0, 1 / 3, 1 / 3]
    assert gradient(lambda x: x.min(1), leaf([[1.0, 1.0], [2.0, 1.0]])) == [[0.5, 0.5], [0.0, 1.0]]
    x = leaf([1.0, np.nan, 2.0, np.nan])
    assert math.isnan(x.max().item())
    assert x.argmax().item() == 1
    assert Tensor(np.array([-128, 127], np.int8)).min().item() == -128
    assert Tensor([1, 3, 3]).argmax().item() == 1


# --- cut dims --------------------------------------------------------------------------------------------


class CutContext(Context):
    """The context of one of several ranks (threads), among which one dim is cut."""

    def __init__(self, plan, rank, dim, sizes, board, barrier):
        super().__init__(kernels_of[np], (True,), plan)
        self.mine = rank, dim, sizes, board, barrier

    def _exchange(self, dims, x, combine):
        rank, dim, _, board, barrier = self.mine
        if dim not in dims.split():
            return x
        board[rank] = x
        barrier.wait()
        result = reduce(combine, board)
        barrier.wait()
        return result

    def sum_over(self, dims, x, group_size=None):
        return self._exchange(dims, x, np.add)

    def max_over(self, dims, x):
        return self._exchange(dims, x, np.maximum)

    def min_over(self, dims, x):
        return self._exchange(dims, x, np.minimum)

    def offset(self, dim):
        rank, cut, sizes, *_ = self.mine
        return rank * self.plan.sizes[dim] if dim == cut else 0

    def size(self, dim):
        return self.mine[2][dim]


def run_cut(op, x, axis, cut):
    """Return (outputs, gradients) of every rank for a cotangent of ones."""
    slices = np.split(x, cut, axis)
    sizes = {f"d{i}": size for i, size in enumerate(x.shape)}
    board, barrier, results = [None] * cut, threading.Barrier(cut, timeout=10), [None] * cut

    def rank(i):
        plan = op._plan([slices[i]])
        ctx = CutContext(plan, i, f"d{axis}", sizes, board, barrier)
        y = op.forward(ctx, slices[i])
        differentiable = not isinstance(op, ArgMax)
        results[i] = y, op.backward(ctx, np.ones(y.shape))[0] if differentiable else None

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(cut)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return zip(*results, strict=True)


@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1), (1, 2)])
@pytest.mark.parametrize("make", [Max, Min, Var, ArgMax])
@given(data=st.data())
def test_cut_dim_is_completed_by_the_op(make, dim, data):
    if make is ArgMax and isinstance(dim, tuple):
        dim = dim[0]
    x = data.draw(arrays((4, 6, 2)))
    axis, cut = data.draw(st.sampled_from([(0, 2), (1, 3), (2, 2), (1, 1)]))
    op = make(dim)
    whole = Tensor(x, requires_grad=True)
    expected = op(whole)
    outputs, grads = run_cut(op, x, axis, cut)
    reduced = dim is None or axis in (dim if isinstance(dim, tuple) else (dim,))
    dropped = 0 if dim is None else sum(d < axis for d in (dim if isinstance(dim, tuple) else (dim,)))

    if reduced:
        for y in outputs:  # whole on every rank
            np.testing.assert_allclose(y, expected.numpy(), rtol=1e-14)
    else:
        np.testing.assert_allclose(np.concatenate(outputs, axis - dropped), expected.numpy(), rtol=1e-14)
    if make is not ArgMax:
        expected.backward(np.ones(expected.shape))
        np.testing.assert_allclose(np.concatenate(grads, axis), whole.grad.numpy(), rtol=1e-14, atol=1e-15)


def test_variance_far_from_zero_is_accurate():
    x = 1e8 + np.array([0.0, 1.0, 2.0])

    assert Tensor(x).var().item() == 1.0
    assert Tensor(x).var(correction=0).item() == pytest.approx(2 / 3)


# --- indexing ----------------------------------------------------------------------------------------------

KEYS = [
    1, -1, ..., None, slice(1, 3), slice(None, None, -2), (0, ..., 1), (None, 1, None), (slice(None), 2, 1),
    [0, 0, 1], (slice(None), [1, 2], 0), ([0, 1], slice(None), [1, 0]), (..., [1, 1]), (0, [1, 2]),
    ([[0], [1]], [0, 2]), (None, [0, 1], slice(0, 2)), (slice(0, 1), [-1, 0, -1], None), ([1], 0, 1),
    (np.array([True, False]), 1), (slice(None), np.array([True, False, True])), [], np.int64(1),
    np.arange(24).reshape(2, 3, 4) % 5 < 2, (0, slice(None), [0, 1]), np.zeros((2, 0), int),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_matches_numpy(key):
    x = np.arange(24.0).reshape(2, 3, 4)
    y = Tensor(x)[key]

    np.testing.assert_array_equal(y.numpy(), x[key])
    check_gradients(lambda x: x[key], [x])


def test_tensors_index_and_repeated_indices_add_up():
    x = leaf([1.0, 2.0, 3.0])
    y = x[Tensor([0, 2, 0, 0])]
    y.backward(np.array([1.0, 2.0, 3.0, 4.0]))

    assert x.grad.numpy().tolist() == [8.0, 0.0, 2.0]
    assert [row.shape for row in Tensor(np.ones((3, 2)))] == [(2,)] * 3
    np.testing.assert_array_equal(Tensor([[1, 2], [3, 4]]).take([[1, 0]], 1).numpy(), [[[2, 1]], [[4, 3]]])


@pytest.mark.parametrize("key", [2, -3, (0, 3), (0, 0, 0), [2], [[-3]], (..., 0, ...)], ids=str)
def test_indices_outside_are_refused(key):
    with refused(OutOfRangeError) as caught:
        Tensor(np.ones((2, 3)))[key]
    assert isinstance(caught.value, IndexError)


# --- joining, splitting, padding --------------------------------------------------------------------------


def test_split_and_chunk():
    x = Tensor(np.arange(7.0), requires_grad=True)

    assert [part.shape for part in x.split(3)] == [(3,), (3,), (1,)]
    assert [part.shape for part in F.split(x, [2, 0, 5], -1)] == [(2,), (0,), (5,)]
    assert [part.shape for part in F.chunk(np.ones((2, 6)), 3, 1)] == [(2, 2)] * 3
    np.testing.assert_array_equal(F.concat(x.split(3)).numpy(), x.numpy())
    for bad in (lambda: x.split(0), lambda: x.split([3, 3]), lambda: x.chunk(2), lambda: x.split([8, -1])):
        with refused(ShapeError):
            bad()


def test_functions_of_shapes():
    x = np.arange(6.0).reshape(1, 2, 3)
    same = np.testing.assert_array_equal

    same(F.pad(x, (1, 0, 0, 2), 7).numpy(), np.pad(x, ((0, 0), (0, 2), (1, 0)), constant_values=7))
    same(Tensor(x).expand(4, -1, 3).numpy(), np.broadcast_to(x, (4, 2, 3)))
    same(Tensor(x).tile(2, 2).numpy(), np.tile(x, (2, 2)))
    same(F.stack([x, x], -1).numpy(), np.stack([x, x], -1))
    assert [Tensor(x).squeeze().shape, Tensor(x).squeeze(0).shape] == [(2, 3), (2, 3)]
    assert [Tensor(x).unsqueeze(-1).shape, F.unsqueeze(x, (0, 2)).shape] == [(1, 2, 3, 1), (1, 1, 1, 2, 3)]


# --- a Tensor among others ----------------------------------------------------------------------------------


def test_comparisons_give_tensors():
    """Comparisons return bool Tensors, and a Tensor can still be a key of a dict."""
    x, y = leaf([1.0, 2.0, 3.0]), Tensor(np.array([3.0, 2.0, 1.0]))
    found = [x == y, x != y, x < y, x <= 2, x > y, x <= 2, np.array([1.0, 0.0, 0.0]) == x]

    assert all(isinstance(z, Tensor) and z.dtype == bool and not z.requires_grad for z in found)
    assert [int(z.numpy().sum()) for z in found] == [1, 2, 1, 2, 1, 2, 1]
    assert {x: "x", y: "y"}[x] == "x"
    assert (x == None, x != None, x == "x") == (False, True, False)  # noqa: E711
    assert x in [y, x][1:]


def test_bad_calls_are_refused():
    x, n = Tensor(np.ones((2, 3))), Tensor([1, 2])
    for error, bad in [
        (InputError, lambda: x.clip()),
        (InputError, lambda: GELU("erf")),
        (InputError, lambda: F.concat([])),
        (DTypeError, lambda: F.where(x, x, x)),
        (DTypeError, lambda: n**-1),
        (DTypeError, lambda: x.take(np.ones(1), 0)),
        (ShapeError, lambda: F.concat([x, n])),
        (ShapeError, lambda: F.concat([x, x[:, :2]])),
        (ShapeError, lambda: x.squeeze(0)),
        (ShapeError, lambda: x.expand(4, 3)),
        (ShapeError, lambda: x.expand(3)),
        (ShapeError, lambda: x.expand(-1, 2, 3)),
        (ShapeError, lambda: x[:0].max()),
        (ShapeError, lambda: x[0, :1].var()),
        (ShapeError, lambda: F.pad(x, (-9, 0))),
        (ShapeError, lambda: F.pad(x, (1,))),
        (ShapeError, lambda: Op.registry["Pad"](((-1, 0),))),
        (ShapeError, lambda: x.tile(-1)),
        (ShapeError, lambda: Op.registry["Index"]((1, 0))(x, n, n)),
    ]:
        with refused(error):
            bad()
