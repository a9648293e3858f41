"""`x += y` and `x[i] = y` write NumPy's values into x's own memory, and never into a tensor on the tape."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

import simparallel as sp
from simparallel import nn, optim
from simparallel.autograd import Tensor, functions as F, no_grad
from simparallel.errors import (
    AutogradError,
    DeviceMismatchError,
    DTypeError,
    InputError,
    LayoutError,
    OutOfRangeError,
    ShapeError,
)
from simparallel.layout.layout import Layout
from simparallel.nn.deferred import no_init_parameters
from simparallel.parallel import DistributedDataParallel, distribute_tensor

SIGNS = [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow]
INTEGERS = st.integers(-4, 4).map(float)


def leaf(*values):
    return Tensor(np.array(values), requires_grad=True)


# --- values ------------------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from(SIGNS), hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3))
def test_inplace_operators_match_numpy(data, sign, shapes):
    shape = shapes.result_shape
    a = data.draw(hnp.arrays(np.float64, shape, elements=INTEGERS))
    b = data.draw(hnp.arrays(np.float64, shapes.input_shapes[0], elements=INTEGERS))
    x, expected = Tensor(a.copy()), a.copy()
    memory, same = x.data, x
    with np.errstate(all="ignore"):
        expected = sign(expected, b)
        x = sign(x, data.draw(st.sampled_from([b, Tensor(b), b.tolist()])))

    assert x is same
    assert x.data is memory
    np.testing.assert_allclose(x.data, expected, rtol=1e-14)


@given(st.data(), hnp.array_shapes(max_dims=3, max_side=4))
def test_item_assignment_matches_numpy(data, shape):
    basic = hnp.basic_indices(shape, allow_newaxis=True)
    fancy = hnp.integer_array_indices(shape).map(lambda key: tuple(np.unique(k) for k in key[:1]))
    mask = hnp.arrays(np.bool_, shape)
    key = data.draw(st.one_of(basic, fancy, mask))
    expected = data.draw(hnp.arrays(np.float64, shape, elements=INTEGERS))
    x = Tensor(expected.copy())
    part = np.array(expected[key])
    value = data.draw(
        st.one_of(
            INTEGERS,
            hnp.arrays(np.float64, part.shape, elements=INTEGERS),
            hnp.arrays(np.float64, (1, *part.shape[1:]) if part.ndim else (1, 1), elements=INTEGERS),
        )
    )
    expected[key] = value if part.ndim else np.asarray(value).item()
    memory = x.data
    x[key] = data.draw(st.sampled_from([value, Tensor(value)]))

    assert x.data is memory
    np.testing.assert_array_equal(x.data, expected)


def test_tensors_and_lists_are_indices():
    x = Tensor(np.zeros((2, 3)))
    x[Tensor([0, 1]), [2, 0]] = Tensor([1, 2])
    x[Tensor(1), 1:] += 5
    x[x == 1] = True

    assert x.data.tolist() == [[0, 0, 1], [2, 5, 5]]


def test_view_writes_into_its_base():
    x = Tensor(np.zeros((2, 3)))
    row, flat = x[1], x.reshape(6)
    row += 1.0
    flat[0] = 7.0

    assert x.data.tolist() == [[7, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "bool"])
def test_inplace_keeps_dtype_or_raises(dtype):
    x = Tensor(np.ones(2, dtype))
    if x.dtype.kind == "f":
        x += Tensor(np.ones(2))
        x[0] = 1
        assert (x.dtype, x.data.tolist()) == (np.dtype(dtype), [1, 2])
        return
    for change in (lambda: operator.itruediv(x, 2.0), lambda: operator.setitem(x, 0, 1.5)):
        with refused(DTypeError):
            change()
    assert x.data.tolist() == [1, 1]


# --- the tape ------------------------------------------------------------------------------------------------


@given(st.lists(INTEGERS, min_size=1, max_size=3))
def test_update_under_no_grad_matches_sgd(values):
    p, q = nn.Parameter(np.array(values)), nn.Parameter(np.array(values))
    for x in (p, q):
        (x * x).sum().backward()
    with no_grad():
        for x in (p,):
            x -= 0.25 * x.grad
    optim.SGD([q], lr=0.25).step()

    np.testing.assert_array_equal(p.data, q.data)
    assert p.requires_grad
    assert p.is_leaf


CHANGES = {
    "x += y": lambda x: operator.iadd(x, 1.0),
    "x[...] = y": lambda x: operator.setitem(x, 0, 1.0),
    "by a view": lambda x: operator.iadd(x[:1], 1.0),
    "by a detached one": lambda x: operator.setitem(x.detach(), ..., 1.0),
    "by data": lambda x: operator.imul(x.detach(), 2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_graph_needing_old_values_is_refused(change):
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    needs, does_not = (x * w).sum(), (x + w).sum()
    with no_grad():
        change(x)
    with refused(AutogradError):
        needs.backward()
    assert x.grad is w.grad is None
    does_not.backward()
    assert x.grad.data.tolist() == [1, 1]


def test_tensor_on_tape_is_not_written():
    x = leaf(1.0, 2.0)
    y, before = x * 2.0, x.data.copy()
    constant = Tensor([1.0, 2.0])
    with refused(AutogradError):
        y[0] = 1.0
    with no_grad(), refused(AutogradError):
        y[0] = 1.0
    with no_grad():
        z = operator.iadd(y, 1.0)  # as results are adjusted for display
    assert (z.numpy().tolist(), z.requires_grad) == ([3, 5], False)
    for change in (lambda t: operator.iadd(t, 1.0), lambda t: operator.setitem(t, 0, 1.0)):
        with refused(AutogradError):
            change(x)
    with refused(AutogradError):
        constant[0] = x[0]

    np.testing.assert_array_equal(x.data, before)
    np.testing.assert_array_equal(y.data, 2 * before)
    assert constant.data.tolist() == [1, 2]


AUGMENTED = [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow]


@pytest.mark.parametrize("augment", AUGMENTED)
@pytest.mark.parametrize("is_on_tape", [(True, False), (False, True), (True, True)])
def test_augmented_assignment_on_tape_is_new_tensor(augment, is_on_tape):
    """As losses add up: `total += loss`, from a number, from a Tensor, or from another loss."""
    x, w = leaf(2.0, 3.0), leaf(3.0, 2.0)
    a, b = (t * 1.0 if on_tape else t.detach() for t, on_tape in zip((x, w), is_on_tape, strict=True))
    before = a, a.data.copy()
    c = augment(a, b)
    assert c is not a
    np.testing.assert_array_equal(before[0].data, before[1])
    plain = getattr(operator, augment.__name__.removeprefix("i"))
    p, q = leaf(2.0, 3.0), leaf(3.0, 2.0)
    d = plain(p if is_on_tape[0] else p.detach(), q if is_on_tape[1] else q.detach())
    np.testing.assert_array_equal(c.data, d.data)
    c.sum().backward()
    d.sum().backward()
    for found, expected in ((x, p), (w, q)):
        assert (found.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            np.testing.assert_array_equal(found.grad.data, expected.grad.data)


def test_losses_add_up():
    w = leaf(1.0, 2.0)
    total = 0
    for factor in (1.0, 3.0):
        total += (w * factor).sum()
    total /= 2
    total.backward()
    assert w.grad.data.tolist() == [2, 2]


# --- refused writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: operator.iadd(x, np.ones((2, 3))), ShapeError),
        (lambda x: operator.isub(x, np.ones(2)), ShapeError),
        (lambda x: operator.setitem(x, 0, np.ones(2)), ShapeError),
        (lambda x: operator.setitem(x, slice(2), np.ones(3)), ShapeError),
        (lambda x: operator.setitem(x, ..., np.ones((2, 3))), ShapeError),
        (lambda x: operator.setitem(x, 3, 1.0), OutOfRangeError),
        (lambda x: operator.setitem(x, [0, 5], 1.0), OutOfRangeError),
        (lambda x: operator.setitem(x, [True, False], 1.0), OutOfRangeError),
        (lambda x: operator.setitem(x, 0, "a"), InputError),
        (lambda x: operator.iadd(x, None), InputError),
        (lambda x: operator.iadd(x.expand(2, 3), 1.0), InputError),
        (lambda x: operator.iadd(x, Tensor([1.0], device="sim:1")), DeviceMismatchError),
        (lambda x: operator.setitem(x, 0, Tensor([1.0], device="sim:1")), DeviceMismatchError),
    ],
)
def test_bad_assignments_are_refused(change, error):
    x = Tensor(np.zeros(3))
    with refused(error):
        change(x)

    assert x.data.tolist() == [0, 0, 0]


def test_parameter_without_data_is_not_written():
    with no_init_parameters():
        layer = nn.Linear(2, 2)
    with no_grad(), refused(InputError):
        layer.weight += 1.0


# --- devices, ranks ----------------------------------------------------------------------------------------------


def test_on_another_device():
    x = Tensor(np.arange(3.0), device="sim:1")
    x *= 2.0
    x[1:] = Tensor([5.0, 6.0], device="sim:1")
    assert (x.data.tolist(), x.device) == ([0, 5, 6], "sim:1")


def test_on_a_gpu(arrays):
    y = Tensor(arrays.on_device(np.arange(3.0)))
    y -= 1.0
    y[[0, 2]] = 9.0
    y[y < 1] = Tensor(arrays.on_device(np.array([4.0])))
    assert type(y.data) is arrays.type
    assert y.numpy().tolist() == [9, 4, 9]


def test_work_is_priced_on_its_device():
    def program():
        x = Tensor(np.ones(1000, np.float32), device="sim:1")
        x += x
        return x.data[0]

    with sp.Cluster(1, transport="inline") as cluster:
        assert list(cluster.run(program)) == [2]
        assert [(event.name, event.device) for event in cluster.trace.events] == [("Add", 1)]


@pytest.mark.parametrize("as_view", [True, False])
def test_gradients_stay_in_their_bucket(as_view):
    def program():
        model = nn.Linear(3, 2)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        ddp(np.full((1, 3), 1.0 + sp.get_rank(), np.float32)).sum().backward()
        memory = [p.grad.data for p in model.parameters()]
        for p in model.parameters():
            p.grad *= 0.5
        kept = all(p.grad.data is array for p, array in zip(model.parameters(), memory, strict=True))
        ddp(np.zeros((1, 3), np.float32)).sum().backward()
        return kept, model.weight.grad.data.tolist(), model.bias.grad.data.tolist()

    for kept, weight, bias in sp.launch(program, world_size=2, transport="inline"):
        assert kept
        assert weight == [[0.75] * 3] * 2
        assert bias == [1.5] * 2


def test_sharded_tensors_are_written_slice_by_slice():
    layout = Layout((2,), ("a",))

    def program():
        p = distribute_tensor(np.arange(8.0).reshape(4, 2), layout("a", "None"), requires_grad=True)
        (p * p).sum().backward()
        memory = p.data
        with no_grad():
            p -= 0.25 * p.grad
            p *= distribute_tensor([1.0, 2.0], layout("None"))
            whole = distribute_tensor(np.ones(2), layout("None"))
            with refused(LayoutError):
                whole += distribute_tensor(np.ones(2), layout("a"))
            with refused(LayoutError):
                p[0] = 1.0
            with refused(LayoutError):
                p.data = p.redistribute(layout("None", "a"))
        assert p.data is memory
        assert p.layout == layout("a", "None")
        return p.full_tensor().numpy()

    expected = np.arange(8.0).reshape(4, 2) * 0.5 * [1.0, 2.0]
    for whole in sp.launch(program, world_size=2, transport="inline"):
        np.testing.assert_array_equal(whole, expected)


def test_saved_labels_and_indices_may_not_change():
    w, i = Tensor(np.ones((4, 3)), requires_grad=True), Tensor(np.array([0, 1]))
    losses = [(w[i] * 2.0).sum(), F.cross_entropy(w, Tensor(np.zeros(4, np.int64))), (w * 1.0).sum()]
    labels = Tensor(np.zeros(4, np.int64))
    losses[1] = F.cross_entropy(w, labels)
    i[0], labels[1] = 3, 2
    for loss in losses[:2]:
        with refused(AutogradError):
            loss.backward()
    losses[2].backward()
    assert w.grad.data.tolist() == [[1, 1, 1]] * 4


def test_batches_of_one_array_are_separate():
    data, w, total = np.ones((800, 3)), Tensor(np.ones(3), requires_grad=True), 0
    for start in range(0, 800, 4):
        x = Tensor(data[start : start + 4])
        x -= 0.5
        total += (x * w).sum()
    total.backward()
    assert w.grad.data.tolist() == [400, 400, 400]
