"""`data`, `grad` and `requires_grad` of a Tensor: legal values, and their effect on backward."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.autograd import Tensor, no_grad
from simparallel.autograd.tape import _memories, grad_mode, is_written_since, mark_changed
from simparallel.clock.recorder import current_recorder
from simparallel.errors import AutogradError, DTypeError, InputError, ShapeError
from simparallel.nn import Parameter

KINDS = [np.float16, np.float32, np.float64]


def leaf(*values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


# --- data --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=4), st.sampled_from(KINDS))
def test_update_through_data_matches_numpy(values, dtype):
    """`p.data -= 0.5 * p.grad`, with the gradient as a Tensor or as an array."""
    for of_tensor in (True, False):
        p = Parameter(np.array(values, dtype))
        (p * p).sum().backward()
        step = 0.5 * p.grad
        p.data -= step if of_tensor else step.data

        assert type(p.data) is np.ndarray
        np.testing.assert_array_equal(p.data, np.zeros(len(values), dtype))


def test_data_takes_arrays_and_tensors_of_any_shape():
    x, y = leaf(1.0, 2.0), Tensor(np.ones((2, 3)))
    x.data = y
    assert x.data is y.data
    x.data = np.arange(3.0, dtype=np.float32)
    assert (x.shape, x.dtype) == ((3,), np.float32)
    x.data = x.data.sum()  # NumPy makes a scalar of it
    assert type(x.data) is np.ndarray
    assert x.shape == ()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1.0, 2.0], InputError),
        (3.0, InputError),
        (None, InputError),
        (np.array(["a"]), InputError),
        (np.array([1, 2]), AutogradError),
    ],
)
def test_bad_data_is_refused(value, error):
    x = leaf(1.0, 2.0)
    before = x.data
    with refused(error):
        x.data = value

    assert x.data is before


def test_new_data_keeps_old_array_in_graph():
    """Assigning `data` leaves a recorded graph valid; only writing in place invalidates it."""
    x = leaf(3.0)
    y = x * x
    x.data = np.array([7.0])
    y.backward()
    np.testing.assert_array_equal(x.grad.data, [6.0])

    y = x * x
    x.data += 1.0
    with refused(AutogradError):
        y.backward()


# --- grad --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("given_as", [np.float64, np.float32, np.int64, Tensor])
def test_backward_adds_to_an_assigned_gradient(dtype, given_as):
    x = leaf(1.0, 2.0, dtype=dtype)
    x.grad = Tensor(np.ones(2, dtype)) if given_as is Tensor else np.ones(2, given_as)
    (x * x).sum().backward()

    assert isinstance(x.grad, Tensor)
    assert x.grad.dtype == dtype
    np.testing.assert_array_equal(x.grad.numpy(), [3.0, 5.0])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.ones(3), ShapeError),
        (np.float64(1), ShapeError),
        (Tensor(np.ones((2, 1))), ShapeError),
        (Tensor([1, 2]), DTypeError),
        ([1.0, 2.0], InputError),
        ("none", InputError),
    ],
)
def test_bad_gradient_is_refused(value, error):
    x = leaf(1.0, 2.0)
    x.grad = before = Tensor(np.ones(2))
    with refused(error):
        x.grad = value

    assert x.grad is before
    x.grad = None
    assert x.grad is None


def test_float16_tensor_takes_float32_gradient():
    """A float16 tensor may have a float32 gradient, as after a GradScaler; no other pair of dtypes may differ."""
    x = leaf(1.0, 2.0, dtype=np.float16)
    x.grad = Tensor(np.full(2, 2.0**-30, np.float32))
    assert x.grad.dtype == np.float32
    (x * 1.0).sum().backward()  # and it stays
    assert x.grad.dtype == np.float32
    np.testing.assert_array_equal(x.grad.numpy(), np.float32(1 + 2.0**-30))
    for own, other in ((np.float16, np.float64), (np.float32, np.float16), (np.float32, np.float64)):
        with refused(DTypeError):
            leaf(1.0, 2.0, dtype=own).grad = Tensor(np.ones(2, other))


# --- requires_grad -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_integers_require_no_gradient(dtype):
    x = Tensor(np.ones(2, dtype))
    for ask in (lambda: x.requires_grad_(), lambda: setattr(x, "requires_grad", True)):
        with refused(AutogradError):
            ask()
    x.requires_grad = False

    assert not x.requires_grad_(False).requires_grad


def test_op_result_stays_on_tape():
    x = leaf(2.0)
    y = x * x
    with refused(AutogradError):
        y.requires_grad = False
    y.backward()

    np.testing.assert_array_equal(x.grad.data, [4.0])
    x.requires_grad = np.True_
    assert x.requires_grad is True


# --- values that are no Tensor -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", ["abc", np.array([b"a"]), np.array(["2020-01-01"], "datetime64[D]"), [[1.0, 2.0], [3.0]]]
)
def test_tensor_needs_array_of_numbers(data):
    with refused(InputError):
        Tensor(data)


# --- writes in place, through any Tensor -----------------------------------------------------------------------


def written(x, through):
    """Write into the memory of x through another Tensor of it, as an optimizer's step does."""
    mark_changed((through(x),))


@pytest.mark.parametrize(
    "through",
    [lambda x: x, lambda x: x.detach(), lambda x: x.detach()[1:], lambda x: x.detach().T, lambda x: x.detach()[None]],
)
@pytest.mark.parametrize(
    "forward",
    [lambda x: x * x, lambda x: x @ x.T, lambda x: x.T @ np.ones((2, 2)) @ x, lambda x: x[1:] * x.detach()[1:]],
)
def test_write_is_noticed_through_every_view(through, forward):
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    y = forward(x)
    written(x, through)
    with refused(AutogradError):
        y.sum().backward()
    assert x.grad is None
    forward(x).sum().backward()
    assert x.grad is not None


def test_write_outside_saved_array_is_allowed():
    """A write to another part of the same memory does not invalidate the saved part."""
    memory = np.ones((4, 3))
    x = Tensor(memory[:2], requires_grad=True)
    y = (x * x).sum()
    written(Tensor(memory[2:]), lambda x: x)
    y.backward()
    np.testing.assert_array_equal(x.grad.data, np.full((2, 3), 2.0))


def test_freed_memory_is_no_longer_tracked(monkeypatch):
    monkeypatch.setattr("simparallel.autograd.tape._MAX_PARTS", 16)
    gc.collect()  # memory that only reference cycles still hold
    before = len(_memories)
    for _ in range(3):
        x = Tensor(np.ones(40))
        for i in range(40):
            written(x, lambda x, i=i: x[i : i + 1])
        assert len(_memories) == before + 1
        assert len(_memories[id(x.data)].parts) <= 17
        del x
    assert len(_memories) == before


@given(st.integers(0, 30), st.integers(1, 20), st.integers(0, 30), st.integers(1, 20), st.integers(-1, 1))
def test_address_overlap_matches_numpy(a, long, b, wide, step):
    memory = np.zeros((60, 2))
    first, second = memory[a : a + long][:: step or 2], memory[b : b + wide, :1]
    before = next(grad_mode.numbers)
    mark_changed((Tensor(first),))

    assert is_written_since(second, before) == np.may_share_memory(first, second)
    assert not is_written_since(second, next(grad_mode.numbers))


# --- the device's memory account -------------------------------------------------------------------------------


def test_assigned_array_replaces_old_in_account():
    """A parameter's new array counts as a parameter, a gradient's as a gradient."""

    def program():
        p = Parameter(np.zeros(1000, np.float32), device="sim:1")
        memory = current_recorder().of(p.device).memory
        (p * 2.0).sum().backward()
        seen = [dict(memory.live)]
        p.data -= 0.5 * p.grad
        p.grad = p.grad * 0.5
        seen.append(dict(memory.live))
        with no_grad():
            p -= p.grad
        p.grad *= 2.0
        return [*seen, dict(memory.live)]

    (seen,) = sp.launch(program, world_size=1, transport="inline")
    for live in seen:
        assert {name: size for name, size in live.items() if size} == {"parameters": 4000, "gradients": 4000}
