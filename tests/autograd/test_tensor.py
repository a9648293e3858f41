"""Tensors and the tape: the gradient of each leaf, its time and its array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.autograd import Tensor, functions as F, running_backward, value_and_grad
from simparallel.errors import AutogradError, InputError, ShapeError
from simparallel.testing import check_gradients


def leaf(*values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


# --- making and reading ------------------------------------------------------------------------------


def test_nbytes_counts_all_elements():
    for array in (np.zeros((3, 4), np.float16), np.zeros(0), np.float64(1)):
        assert Tensor(array).nbytes == array.nbytes


def test_default_dtypes():
    """Python's floats become float32; arrays keep their dtype."""
    assert Tensor(1.5).dtype == Tensor([[1.0, 2.0]]).dtype == np.float32
    assert Tensor(np.ones(2)).dtype == np.float64
    assert Tensor([1, 2]).dtype == np.int64


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_python_scalars_keep_the_dtype_of_the_tensor(dtype):
    x = Tensor(np.array([1.0, 2.0], dtype))
    results = [x + 1, 1 + x, x - 0.5, 0.5 - x, x * 2.0, True * x, x / 3, 3 / x, -x, x.mean(), x.sum() * 0.1]

    assert {y.dtype for y in results} == {np.dtype(dtype)}


def test_placement_of_other_arrays_means_nothing():
    class Placed(np.ndarray):
        placement = "on a map"

    assert Tensor(np.ones(2).view(Placed)).placement is None


def test_arrays_on_the_left_defer_to_tensor():
    x = leaf(1.0, 2.0)
    for y, expected in [
        (np.ones(2) + x, [2.0, 3.0]),
        (np.float64(3) * x, [3.0, 6.0]),
        (np.ones(2) - x, [0.0, -1.0]),
        (np.full(2, 2.0) / x, [2.0, 1.0]),
        (np.eye(2) @ x.reshape(2, 1), [[1.0], [2.0]]),
    ]:
        assert isinstance(y, Tensor)
        assert y.requires_grad
        np.testing.assert_array_equal(y.numpy(), expected)


def test_list_beside_integers_is_not_truncated():
    np.testing.assert_array_equal((Tensor([1, 2]) + [0.5, 0.5]).numpy(), [1.5, 2.5])


def test_reading_a_tensor():
    x = Tensor(np.arange(6.0).reshape(2, 3), name="x")

    assert (x.shape, x.ndim, x.size, len(x), x.is_leaf) == ((2, 3), 2, 6, 2, True)
    assert x.numpy() is x.data
    np.testing.assert_array_equal(np.asarray(x), x.data)
    np.testing.assert_array_equal(x.T.numpy(), x.data.T)
    assert (Tensor(2.5).item(), float(Tensor([2.5]))) == (2.5, 2.5)
    assert repr(leaf(1.0)) == "Tensor([1.], dtype=float64, requires_grad=True)"
    assert "name='x'" in repr(x)
    with refused(ShapeError):
        x.item()


def test_one_element_becomes_a_python_number():
    assert [int(Tensor([3])), int(Tensor(2.7)), round(Tensor(2.5)), round(Tensor(np.array(2.345)), 1)] == [3, 2, 2, 2.3]
    assert "abcd"[Tensor(2)] == "c"
    assert list(range(Tensor(np.array(2, np.uint8)))) == [0, 1]
    for bad in (Tensor(1.0), Tensor(True), Tensor([1])):
        with refused(TypeError):
            "abc"[bad]
    for size in (0, 1, 2):  # a batch of indices keeps its dim
        assert np.arange(5)[Tensor(np.arange(size))].tolist() == list(range(size))
    for convert in (int, round):
        with refused(ShapeError):
            convert(Tensor([1, 2]))
    x = Tensor([1.0, 2.0])
    assert x.asnumpy() is x.numpy() is x.data


def test_detach_shares_and_clone_copies():
    """`detach` shares memory off the tape; `clone` copies on the tape."""
    x = leaf(1.0, 2.0)
    y = x * 2
    detached, cloned = y.detach(), y.clone()

    assert detached.data is y.data
    assert not np.shares_memory(cloned.data, y.data)
    assert not detached.requires_grad
    assert not detached.clone().requires_grad
    (cloned + x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3.0, 3.0])
    assert not Tensor([1, 2]).clone().requires_grad


# --- the walk ------------------------------------------------------------------------------------------


def test_diamond_adds_both_branches():
    x = leaf(2.0, 3.0)
    middle = x * x
    (middle.exp() * 0.5 + middle.log()).sum().backward()

    np.testing.assert_allclose(x.grad.numpy(), x.data * np.exp(x.data**2) + 2 / x.data)


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99), st.integers(0, 99)), max_size=8))
def test_random_graphs_agree_with_finite_differences(steps):
    """Any wiring of small ops: each step takes two earlier values, perhaps the same twice."""

    def fn(*leaves):
        values = list(leaves)
        for symbol, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append({"+": F.add, "-": F.sub, "*": F.mul}[symbol](a, b).tanh())
        return values[-1] * values[0]

    check_gradients(fn, [np.array([0.3, -0.7]), np.array([1.1, 0.4])], rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x * x, 6.0),
        (lambda x: x + x, 2.0),
        (lambda x: x - x, 0.0),
        (lambda x: x / x, 0.0),
        (lambda x: (x + x) + x, 3.0),
    ],
)
def test_tensor_used_twice_gets_both_gradients(fn, expected):
    x = leaf(3.0)
    y = fn(x)
    y.backward()

    np.testing.assert_allclose(x.grad.numpy(), [expected], atol=1e-15)


@pytest.mark.parametrize("fn", [lambda x, y: x + y, lambda x, y: x.reshape(1, 2).reshape(2) + y, lambda x, y: -(x - y)])
def test_gradients_of_two_leaves_never_share_memory(fn):
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    seed = np.ones(2)
    fn(x, y).backward(seed)
    arrays = [x.grad.data, y.grad.data, seed, x.data, y.data]

    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_grad_argument_of_a_leaf_is_not_written_to():
    x, seed = leaf(1.0, 2.0), np.ones(2)
    x.backward(seed)
    x.backward(seed)

    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 2.0])
    np.testing.assert_array_equal(seed, [1.0, 1.0])


def test_two_backwards_accumulate():
    x = leaf(1.0, 2.0)
    for _ in range(2):
        (x * 3).sum().backward()
    first = x.grad

    np.testing.assert_array_equal(first.numpy(), [6.0, 6.0])
    (x * x).sum().backward()
    assert x.grad is first
    np.testing.assert_array_equal(first.numpy(), [8.0, 10.0])


def test_gradient_has_dtype_of_leaf():
    x, y = leaf(1.0, 2.0, dtype=np.float32), leaf(3.0, 4.0)
    (_, grads) = value_and_grad(lambda: (x * y + x).sum(), [x, y])()

    assert [grad.dtype for grad in grads] == [np.float32, np.float64]


def test_graph_can_be_kept_for_another_backward():
    x = leaf(3.0)
    y = (x * x).exp()
    y.backward(retain_graph=True)
    once = x.grad.numpy().copy()
    y.backward()

    np.testing.assert_array_equal(x.grad.numpy(), 2 * once)
    with refused(AutogradError):
        y.backward()


def test_consumed_graph_is_refused():
    """A consumed graph is refused before any gradient changes."""
    x, other = leaf(3.0), leaf(1.0)
    shared = x * x
    (shared * 2).backward()
    before = x.grad.numpy().copy()
    with refused(AutogradError):
        (shared.exp() * other).backward()

    np.testing.assert_array_equal(x.grad.numpy(), before)
    assert other.grad is None


def test_backward_of_deep_graph_does_not_recurse():
    x = y = leaf(1.0)
    for _ in range(5000):
        y = y + 0.0
    y.backward()

    np.testing.assert_array_equal(x.grad.numpy(), [1.0])


def test_gradients_go_where_they_are_needed_only():
    x, constant, labels = leaf(1.0, 2.0), Tensor(np.ones(2)), np.array([1, 0])
    y = x * constant
    F.cross_entropy(y.reshape(1, 2), labels[:1]).backward()

    assert x.grad is not None
    assert constant.grad is None
    assert y.grad is None
    assert not (constant * constant).requires_grad


@pytest.mark.parametrize("value", [None, {"a": 1}, [None, 1.0], np.array([None])])
def test_python_objects_make_no_tensor(value):
    with refused(InputError):
        Tensor(value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: Tensor([1, 2], requires_grad=True), AutogradError),
        (lambda: Tensor([1.0]).backward(), AutogradError),
        (lambda: leaf(1.0, 2.0).backward(), ShapeError),
        (lambda: (leaf(1.0, 2.0) * 2).backward(np.ones(3)), ShapeError),
        (lambda: (leaf(1.0) * 2).requires_grad_(), AutogradError),
        (lambda: (leaf(1.0) * 2).register_post_accumulate_grad_hook(print), AutogradError),
        (lambda: Tensor([1.0]).register_post_accumulate_grad_hook(print), AutogradError),
        (lambda: running_backward(), AutogradError),
        (lambda: value_and_grad(lambda: 1.0, [Tensor([1.0])]), AutogradError),
        (lambda: value_and_grad(lambda: 1.0, [leaf(1.0)])(), AutogradError),
        (lambda: value_and_grad(lambda: (1, 2), [leaf(1.0)], True)(), AutogradError),
    ],
)
def test_unsupported_calls_are_refused(call, error):
    with refused(error):
        call()


def test_prints_as_its_values():
    loss = Tensor(np.float32(2.3026438))
    assert f"loss is {loss}, {str(loss)}, {loss:.2f}" == "loss is 2.3026438, 2.3026438, 2.30"
    assert "loss is %s" % loss == "loss is 2.3026438"  # noqa: UP031
    assert str(Tensor([1.0, 2.0])) == "[1. 2.]"
