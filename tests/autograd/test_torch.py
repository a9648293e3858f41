"""Every op beside PyTorch (the extra "bench"): forward and gradients agree within stated tolerances.

Modules and optimizers are in test_torch_nn.py, whole trainings in test_torch_training.py.
"""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from op_records import TORCH, WITHOUT, op_calls, unregistered

from simparallel.autograd import Op, Tensor
from simparallel.testing.strategies import FLOATS, arrays

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

# Relative to the largest element of the result, or to 1 if that is larger: both sides round sums in
# another order.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def missing_entries():
    return sorted(set(Op.registry) ^ (set(TORCH) | set(WITHOUT)))


def assert_same(actual, expected):
    """Compare `actual`, one of our Tensors or None, with `expected` from PyTorch."""
    expected = expected.detach().numpy()
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if expected.dtype.name not in TOLERANCE:
        np.testing.assert_array_equal(actual.numpy(), expected)
        return
    tolerance = TOLERANCE[expected.dtype.name]
    scale = max(1.0, float(abs(expected).max(initial=0)))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=tolerance, atol=tolerance * scale)


def compare(op, inputs, cotangent):
    """Compare forward and the gradients of all floating-point inputs with `TORCH`.

    Args:
        op: ours, with its settings.
        inputs: arrays.
        cotangent: Spec of the result -> array.
    """
    is_float = [array.dtype.kind == "f" for array in inputs]
    leaves = [Tensor(a, requires_grad=wanted) for a, wanted in zip(inputs, is_float, strict=True)]
    their_leaves = [torch.tensor(a).requires_grad_(wanted) for a, wanted in zip(inputs, is_float, strict=True)]
    y, their_y = op(*leaves), TORCH[op.name](op, *their_leaves)

    assert_same(y, their_y)
    assert y.requires_grad == their_y.requires_grad
    if y.requires_grad:
        dy = cotangent(y)
        y.backward(dy)
        their_y.backward(torch.tensor(dy))
        for leaf, their_leaf in zip(leaves, their_leaves, strict=True):
            if leaf.requires_grad:
                assert their_leaf.grad is not None or not y.size  # PyTorch has none if no gradient flows
                assert_same(leaf.grad, torch.zeros_like(their_leaf) if y.size == 0 else their_leaf.grad)


def test_every_op_stands_beside_torch():
    assert missing_entries() == []
    assert not set(TORCH) & set(WITHOUT)


def test_op_without_torch_peer_is_found():
    """Red control, in both directions."""
    with unregistered():
        del Op.registry["Add"]

        class Forgotten(Op):
            rule = "... -> ..."

        assert missing_entries() == ["Add", "Forgotten"]


# Small integers draw ties and kinks, too: PyTorch makes the same choices there.
@pytest.mark.matrices
@pytest.mark.filterwarnings("ignore:var:UserWarning")  # PyTorch warns about reductions of no elements
@pytest.mark.filterwarnings("ignore:std:UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", sorted(TORCH))
@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_op_agrees_with_torch(name, dtype, data):
    op, inputs = data.draw(op_calls(name, np.dtype(dtype), exact=data.draw(st.booleans())))
    compare(op, inputs, lambda y: data.draw(arrays(y.shape, y.dtype, values=FLOATS)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda op, x: torch.exp(x) * (1 + 1e-10),
        lambda op, x: torch.exp(x).detach() + x - x.detach(),  # right value, gradient 1
        lambda op, x: torch.exp(x).detach(),
        lambda op, x: torch.exp(x)[None],
        lambda op, x: torch.exp(x).float(),
    ],
)
def test_wrong_result_is_found(wrong, monkeypatch):
    """Red control: the comparison sees the value, the gradient, the tape, the shape and the dtype."""
    monkeypatch.setitem(TORCH, "Exp", wrong)
    with pytest.raises(AssertionError):
        compare(Op.registry["Exp"](), [np.linspace(0.5, 1, 4)], lambda y: np.ones(y.shape))


DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
FUNCTIONS = (operator.add, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_promotion_matches_torch(dtype, function):
    """All pairs of dtypes and numbers, except quotients and powers of bools, which we refuse."""
    for other in (*DTYPES, True, 2, 2.5):
        ours, theirs = Tensor(np.ones(2, dtype)), torch.ones(2, dtype=getattr(torch, dtype))
        if not isinstance(other, str):
            pair, their_pair = (ours, other), (theirs, other)
        else:
            pair = ours, Tensor(np.ones(2, other))
            their_pair = theirs, torch.ones(2, dtype=getattr(torch, other))
        is_of_bools = dtype == "bool" and (other is True or other == "bool")
        if is_of_bools and function not in (operator.add, operator.mul, operator.truediv):
            continue
        assert function(*pair).dtype == function(*their_pair).numpy().dtype, (dtype, other)


@pytest.mark.parametrize("method", ["direct", "winograd"])
@pytest.mark.parametrize("size", [(5, 8), (13, 7)])
def test_wide_convolution_agrees_with_torch(method, size):
    """The drawn calls have few channels; these have enough for the fast float32 kernels."""
    rng = np.random.Generator(np.random.Philox(1))
    shapes = (3, 24, *size), (16, 24, 3, 3), (16,)
    inputs = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    op = Op.registry["Conv2d"](1, 1, method=method)
    compare(op, inputs, lambda y: rng.standard_normal(y.shape, dtype=np.float32))
