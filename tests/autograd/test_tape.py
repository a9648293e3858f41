"""Features around the tape: no_grad, hooks, value_and_grad, losses that are not finite."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.autograd import Tensor, no_grad, running_backward, value_and_grad
from simparallel.autograd.functions import linear
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import AutogradError, InputError, NonFiniteLossError
from simparallel.machine.cluster import describe


def leaf(*values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


# --- no_grad -------------------------------------------------------------------------------------------


def test_no_grad_as_a_block_and_as_a_decorator():
    x = leaf(1.0)

    @no_grad()
    def countdown(n):
        return (x * n).requires_grad or (n > 0 and countdown(n - 1))

    assert countdown(3) is False
    assert (x * 2).requires_grad
    with no_grad():
        with no_grad():
            assert not (x * 2).requires_grad
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


def test_no_grad_is_per_thread_and_ends_on_error():
    x, seen = leaf(1.0), []

    @no_grad()
    def fail():
        thread = threading.Thread(target=lambda: seen.append((x * 2).requires_grad))
        thread.start()
        thread.join()
        assert not (x * 2).requires_grad
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [True]
    assert (x * 2).requires_grad


# --- hooks -----------------------------------------------------------------------------------------------


def test_hook_gets_finished_gradient_once():
    """A hook fires once in each backward, with the complete gradient."""
    x, seen = leaf(2.0), []
    remove = x.register_post_accumulate_grad_hook(lambda t: seen.append((t is x, t.grad.item())))
    for _ in range(2):
        (x * x * x + x.exp() * x).backward()
        x.grad = None
    expected = 3 * 2.0**2 + np.exp(2) * 3

    assert [is_x for is_x, _ in seen] == [True, True]
    np.testing.assert_allclose([value for _, value in seen], expected)
    remove()
    (x * x).backward()
    assert len(seen) == 2


def test_hook_may_come_after_the_uses():
    seen = []
    x = leaf(1.0, 2.0)
    h = x * 2
    y = h * 3 + h
    h.register_hook(lambda gradient: seen.append(gradient.tolist()))
    h.register_hook(lambda gradient: gradient * 10)
    del h
    y.sum().backward()
    assert seen == [[4.0, 4.0]]
    assert x.grad.tolist() == [80.0, 80.0]


def test_tape_keeps_only_what_backward_reads():
    """Sums, factors of constants and inputs of relu are freed with their Tensors; saved factors are kept."""
    x = leaf(1.0, -2.0, 3.0)
    added = x + 1
    scaled = added * 2.0
    positive = scaled.relu()
    squares = positive * positive
    loss = squares.sum()
    arrays = [weakref.ref(result.data) for result in (added, scaled, positive, squares)]
    del added, scaled, positive, squares
    assert [array() is not None for array in arrays] == [False, False, True, False]
    loss.backward()
    assert x.grad.tolist() == [16.0, 0.0, 32.0]
    assert arrays[2]() is None


def test_hooks_fire_during_backward():
    """Hooks fire in the order of the last uses, youngest first, so that communication overlaps backward."""
    first, second, third = leaf(1.0), leaf(2.0), leaf(3.0)
    order = []
    for name, tensor in [("first", first), ("second", second), ("third", third)]:
        tensor.register_post_accumulate_grad_hook(lambda t, name=name: order.append((name, first.grad is None)))
    (((first * 2).exp() * second).tanh() * third).backward()

    assert order == [("third", True), ("second", True), ("first", False)]


def test_backward_end_callback_runs_once():
    """The callback runs once, after all gradients are there."""
    x, y, order = leaf(1.0), leaf(2.0), []

    def finish():
        order.append(("end", x.grad is not None and y.grad is not None))

    y.register_post_accumulate_grad_hook(lambda t: running_backward().callbacks.append((0, finish)))
    x.register_post_accumulate_grad_hook(lambda t: order.append("x"))
    (x.exp() * y).backward()

    assert order == ["x", ("end", True)]
    with refused(AutogradError):
        running_backward()


def test_backward_end_callback_with_leaf_loss():
    x, order = leaf(1.0), []
    x.register_post_accumulate_grad_hook(
        lambda t: running_backward().callbacks.append((0, lambda: order.append("end")))
    )
    x.backward()

    assert order == ["end"]


# --- gradients that grow in place ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_slice_gradients_keep_memory_order(order):
    """Gradients of slices add up in one array with the memory order of the tensor."""
    x = Tensor(np.arange(24.0).reshape(2, 3, 4), requires_grad=True)
    whole = (x * 1).permute(*order)
    parts = [whole[i] * (i + 1) for i in range(len(whole))] + [whole[0, 1:] * 10]
    y = sum(part.sum() for part in parts)
    for _ in range(2):  # nothing is left over from the first backward
        x.grad = None
        y.backward(retain_graph=True)
        expected = np.ones(whole.shape) * np.arange(1, len(whole) + 1)[:, None, None]
        expected[0, 1:] += 10
        np.testing.assert_array_equal(x.grad.numpy(), expected.transpose(np.argsort(order)))

    part, permuted = whole[0]._node, whole._node
    (gradient,) = part.op.backward(part.ctx, np.ones(whole.shape[1:]))
    (gradient,) = permuted.op.backward(permuted.ctx, gradient)
    assert gradient.flags.c_contiguous


@given(st.lists(st.sampled_from("axsr"), min_size=1, max_size=7))
def test_gradients_of_uses_add_up(uses):
    """Any mix of uses adds up, whether they pass on `dy` itself, a view of it, a part or a new array."""
    x, other, seed = leaf(1.0, 2.0), leaf(5.0, 7.0), np.array([3.0, 4.0])
    apply = {"a": lambda h: h + x, "x": lambda h: h + x * 2, "s": lambda h: h + x[:1], "r": lambda h: h + x.reshape(2)}
    h = other * 1
    for use in uses:
        h = apply[use](h)
    h.backward(seed)
    each = {"a": [3.0, 4], "x": [6.0, 8], "s": [7.0, 0], "r": [3.0, 4]}

    np.testing.assert_array_equal(x.grad.numpy(), np.sum([each[use] for use in uses], axis=0))
    np.testing.assert_array_equal(other.grad.numpy(), seed)
    np.testing.assert_array_equal(seed, [3.0, 4.0])


def test_gradient_uses_its_buffer():
    """A gradient is written into its buffer if that is free and has the right dtype."""
    x = Tensor(np.ones((3, 4), np.float32))
    for shared, room_dtype, is_used in [(False, "f4", True), (True, "f4", False), (False, "f8", False)]:
        w = Tensor(np.ones((2, 4), np.float32), requires_grad=True)
        w._room = np.full((2, 4), 7, room_dtype)
        for factor in (1, 2):  # the second gradient is added to the first
            y = linear(x, w) if not shared else linear(x, w) + linear(x, w)
            y.backward(np.ones((3, 2), np.float32))
            np.testing.assert_array_equal(w.grad.numpy(), np.full((2, 4), 3 * factor * (1 + shared)))
        assert np.shares_memory(w.grad.data, w._room) == is_used

    before = w._room.copy()
    (gradient,) = value_and_grad(lambda: linear(x, w).sum(), [w])()[1]
    assert not np.shares_memory(gradient.data, w._room)
    np.testing.assert_array_equal(w._room, before)


# --- value_and_grad, losses that are not finite ------------------------------------------------------------


def test_value_and_grad_does_not_set_grad():
    """`value_and_grad` leaves `.grad` unchanged and returns zeros for unused parameters."""
    x, unused = leaf(1.0, 2.0), leaf(5.0, dtype=np.float32)
    value, (dx, dunused) = value_and_grad(lambda scale: (x * x * scale).sum(), [x, unused])(3.0)

    assert (value.item(), x.grad, unused.grad) == (15.0, None, None)
    np.testing.assert_array_equal(dx.numpy(), [6.0, 12.0])
    assert (dunused.numpy().tolist(), dunused.dtype) == ([0.0], np.float32)


def test_value_and_grad_passes_aux_on():
    x = leaf(2.0)
    (loss, more), (dx,) = value_and_grad(lambda: (x * x, "more"), [x], has_aux=True)()

    assert (loss.item(), more, dx.item()) == (4.0, "more", 4.0)


def test_value_and_grad_of_several_results():
    """Without has_aux, several results mean the gradient of their sum, as in MindSpore, with one warning."""
    x, w = leaf(2.0, 3.0), leaf(5.0, 7.0)
    grad_fn = value_and_grad(lambda: ((x * x).sum(), x * w, w, Tensor([1]), x.detach()), [x, w])

    with pytest.warns(UserWarning, match=r"5 Tensors, of shapes \(\), \(2,\), .*write has_aux=True"):
        (loss, _, same, count, _), (dx, dw) = grad_fn()
    assert (loss.item(), count.item(), same is w) == (13.0, 1, True)
    assert (dx.numpy().tolist(), dw.numpy().tolist()) == ([4.0 + 5.0, 6.0 + 7.0], [2.0 + 1.0, 3.0 + 1.0])
    assert [g.numpy().tolist() for g in grad_fn()[1]] == [[9.0, 13.0], [3.0, 4.0]]  # no second warning

    (loss, twice), (dx,) = value_and_grad(lambda: [(x * x).sum(), x.sum()], [x], has_aux=True)()
    assert dx.numpy().tolist() == [4.0, 6.0]
    (alone,), (dx,) = value_and_grad(lambda: ((x * x).sum(),), [x])()
    assert dx.numpy().tolist() == [4.0, 6.0]


def test_bad_results_of_value_and_grad_are_refused():
    """Several results must be Tensors, must depend on a parameter, and must be finite."""
    x = leaf(2.0)
    with refused(AutogradError):
        value_and_grad(lambda: ((x * x).sum(), "more"), [x])()
    with pytest.warns(UserWarning, match="has_aux=True"), refused(AutogradError):
        value_and_grad(lambda: (Tensor(1.0), Tensor(2.0)), [x])()
    with pytest.warns(UserWarning, match="has_aux=True"), refused(NonFiniteLossError):
        value_and_grad(lambda: (x * 1.0, (x * np.inf).sum()), [x])()


def test_value_and_grad_takes_both_spellings():
    x, y = leaf(2.0), leaf(3.0)

    def fn(a):
        return x * y * y * a, "more"

    calls = [
        value_and_grad(fn, [x, y], True), value_and_grad(fn, [x, y], has_aux=True),
        value_and_grad(fn, params=(x, y), has_aux=True), value_and_grad(fn, None, [x, y], True),
        value_and_grad(fn, None, weights=[x, y], has_aux=True), value_and_grad(fn, None, (x, y), has_aux=True),
    ]  # fmt: skip
    for call in calls:
        (loss, more), grads = call(5.0)
        assert (loss.item(), more) == (90.0, "more")
        assert [grad.item() for grad in grads] == [45.0, 60.0]
    (_, _), dx = value_and_grad(fn, None, x, has_aux=True)(5.0)
    assert dx.item() == 45.0  # one Tensor for one


def test_value_and_grad_by_arguments():
    w = leaf(2.0)

    def fn(a, b, scale=1.0):
        return (a * a * b * w * scale).sum()

    value, da = value_and_grad(fn)([3.0], np.array([5.0]))
    assert (value.item(), da.numpy().tolist()) == (90.0, [60.0])
    _, (db, da) = value_and_grad(fn, (1, 0))([3.0], np.array([5.0]), scale=2.0)
    assert (db.numpy().tolist(), da.numpy().tolist()) == ([36.0], [120.0])
    assert (db.dtype, da.dtype) == (np.float64, np.float32)  # the arguments' gradients
    _, (da, (dw,)) = value_and_grad(fn, 0, [w])([3.0], [5.0])
    assert (da.item(), dw.item()) == (60.0, 45.0)
    _, ((da,), dw) = value_and_grad(fn, (0,), w)([3.0], [5.0])
    assert (da.item(), dw.item()) == (60.0, 45.0)
    given = leaf(3.0)
    _, da = value_and_grad(fn, 0)(given, [5.0])
    assert (da.item(), given.grad, w.grad) == (60.0, None, None)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: value_and_grad(abs, None), InputError),
        (lambda: value_and_grad(abs, -1), InputError),
        (lambda: value_and_grad(abs, (0, 0)), InputError),
        (lambda: value_and_grad(abs, "weights"), InputError),
        (lambda: value_and_grad(abs, [leaf(1.0)], [leaf(2.0)]), InputError),
        (lambda: value_and_grad(abs, None, [3.0]), AutogradError),
        (lambda: value_and_grad(abs, 1)(2.0), InputError),
        (lambda: value_and_grad(abs, 0)(np.array([2])), AutogradError),
    ],
)
def test_value_and_grad_refuses_bad_arguments(call, error):
    with refused(error):
        call()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_loss_names_rank_and_step(value):
    """A loss that is not finite raises before any gradient changes."""
    x = leaf(1.0)
    recorder = Recorder(3, describe(8))
    recorder.next_step()
    with use_recorder(recorder), refused(NonFiniteLossError) as e:
        (x * value).backward()

    assert (e.value.rank, e.value.step, e.value.value, x.grad) == (3, 1, str(value), None)
    with refused(NonFiniteLossError):
        (x * value).backward()
    with refused(NonFiniteLossError):
        value_and_grad(lambda: x * value, [x])()
    (x * value).backward(check_finite=False)
    assert not np.isfinite(x.grad.item())
