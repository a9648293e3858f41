"""One walk over every op: gradients, `infer`, `rule`, `work`, and a one-line NumPy oracle each.

An op that is registered without a record in `tests/op_records` fails here.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st
from op_records import EXACT, NO_FLOPS, ORACLES, op_calls, unregistered
from refusals import refused

from simparallel.autograd import Mean, Op, Sigmoid, Spec, Tensor, functions as F
from simparallel.autograd.op import AbstractConstant
from simparallel.errors import DTypeError, InputError, LabelError, ShapeError
from simparallel.layout import rule as rules
from simparallel.testing import check_gradients
from simparallel.testing.strategies import INTEGERS, arrays

every_op = pytest.mark.parametrize("name", sorted(Op.registry))


def specs_of(inputs):
    return [Spec(array.shape, array.dtype) for array in inputs]


def is_constant(op, inputs):
    """Tell if no small change of the inputs changes the result: then the op must stay off the tape."""
    constant = issubclass(type(op), AbstractConstant) or op.infer(*specs_of(inputs)).dtype.kind in "biu"
    if constant:
        leaves = [Tensor(array, requires_grad=array.dtype.kind == "f") for array in inputs]
        assert not op(*leaves).requires_grad
    return constant


def call(op, inputs):
    return op(*(Tensor(array) for array in inputs))


def missing_records():
    return sorted(Op.registry.keys() - ORACLES.keys())


def test_every_op_has_its_record():
    assert missing_records() == []


def test_op_without_record_is_found_missing():
    """Red control: the walk below must not pass over an op in silence."""
    with unregistered():

        class Forgotten(Op):
            rule = "... -> ..."

        assert missing_records() == ["Forgotten"]
    assert missing_records() == []


@every_op
@given(data=st.data())
def test_gradients_agree_with_finite_differences(name, data):
    op, inputs = data.draw(op_calls(name))
    if not is_constant(op, inputs):
        check_gradients(op, inputs)


@every_op
@given(data=st.data())
def test_gradients_have_shape_and_dtype_of_their_leaf(name, data):
    dtype = data.draw(st.sampled_from((np.float16, np.float32, np.float64)))
    op, inputs = data.draw(op_calls(name, dtype))
    if is_constant(op, inputs):
        return
    leaves = [Tensor(array, requires_grad=array.dtype.kind == "f") for array in inputs]
    y = op(*leaves)
    y.backward(np.ones(y.shape), check_finite=False)

    for leaf in leaves:
        if leaf.requires_grad:
            assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@every_op
@given(data=st.data())
def test_new_gradients_own_their_memory(name, data):
    """Later uses of the tensor add to these arrays in place, so nothing else may share their memory."""
    op, inputs = data.draw(op_calls(name, dtype="float32"))
    y = op(*(Tensor(array.copy(), requires_grad=array.dtype.kind == "f") for array in inputs))
    if not y.requires_grad:
        return
    ctx = y._node.ctx
    dy = np.ones(y.shape, y.dtype)
    gradients = [g for g in op.backward(ctx, dy) if isinstance(g, np.ndarray)]
    new = [g for g in gradients if g is not dy and (g.base is None or op.accumulates)]
    kept = [value for value in vars(ctx).values() if isinstance(value, np.ndarray)]
    others = [*kept, dy, y.data, *(tensor.data for tensor in y._node.inputs)]

    assert not any(np.shares_memory(g, other) for g in new for other in others)
    assert sum(np.shares_memory(g, other) for g in new for other in gradients) == sum(g.size > 0 for g in new)


@pytest.mark.parametrize("name", sorted(name for name, op in Op.registry.items() if op.fills_grad_buffers))
@given(data=st.data())
def test_gradients_are_written_to_their_buffers(name, data):
    """A gradient written into its buffer has the same bits as elsewhere, whatever the buffer held before."""
    op, inputs = data.draw(op_calls(name, data.draw(st.sampled_from((np.float16, np.float32, np.float64)))))
    leaves = [Tensor(array, requires_grad=array.dtype.kind == "f") for array in inputs]

    def backward(grad_buffers):
        for leaf in leaves:
            leaf.grad, leaf._room = None, grad_buffers.get(id(leaf))
        y = op(*leaves)
        y.backward(np.arange(y.size, dtype=y.dtype).reshape(y.shape) % 5)
        return {id(leaf): leaf.grad.data for leaf in leaves if leaf.grad is not None}

    grad_buffers = {id(leaf): np.full(leaf.shape, 7, leaf.dtype) for leaf in leaves[1:] if leaf.requires_grad}
    expected, found = backward({}), backward(grad_buffers)

    assert expected.keys() == found.keys()
    for leaf, gradient in expected.items():
        np.testing.assert_array_equal(found[leaf], gradient)
    if inputs[0].dtype != np.float16 and (name != "MatMul" or inputs[0].ndim == inputs[1].ndim == 2):
        assert all(found[leaf] is buffer for leaf, buffer in grad_buffers.items())


@every_op
@given(data=st.data())
def test_infer_rule_and_work_predict_the_call(name, data):
    """Work is counted in integers, and is positive where the op computes something."""
    dtype = data.draw(st.sampled_from((np.float16, np.float32, np.float64)))
    op, inputs = data.draw(op_calls(name, dtype))
    shapes, specs = tuple(array.shape for array in inputs), specs_of(inputs)
    y = call(op, inputs)
    output, work = op.infer(*specs), op.work(*specs)
    needs = tuple(array.dtype.kind == "f" for array in inputs)
    backward, plan = op.work_backward(needs, work), op._plan(inputs)

    details = output.dtype.itemsize, prod(output.shape), op.is_matrix_product, (), (), 0, 1.0, 0.0
    assert op.cost(plan, "plain") == (op.name, *work, *details)
    assert op.cost(plan, "plain", needs) == (op.backward_name, *backward, *details)
    for cost in (op.cost(plan, "eager"), op.cost(plan, "eager", needs)):
        assert all(isinstance(number, int) and number >= 0 for number in (cost.flops, cost.size_bytes))
        # A bias adds flops that are no product's.
        flops = sum(2 * batch * m * n * k for batch, m, n, k, kind, *_ in cost.products if kind != "attention")
        # The taps that meet a pixel, in the gradient of a convolution's images, are rounded up.
        taps = sum(2 * batch * m * n for batch, m, n, _, kind, *_ in cost.products if kind == "convolution")
        assert flops <= cost.flops + taps
        assert flops == 0 or cost.flops <= flops or len(inputs) == 3
    assert output == Spec(y.shape, y.dtype)
    assert rules.output_shape(op.rule_for(*shapes), shapes) == y.shape
    assert all(isinstance(number, int) and number >= 0 for number in (*work, *backward))
    if name in NO_FLOPS:
        assert work.flops == 0
    elif output.size_bytes and all(array.size for array in inputs):
        assert work.flops >= prod(output.shape)
        assert work.size_bytes >= output.size_bytes
    if name == "Reshape":
        assert work.size_bytes == 0


@every_op
@given(data=st.data())
def test_forward_equals_numpy(name, data):
    op, inputs = data.draw(op_calls(name, exact=True))
    before = [array.copy() for array in inputs]
    actual, expected = call(op, inputs).numpy(), ORACLES[name](op, *inputs)

    if name in EXACT:
        np.testing.assert_array_equal(actual, expected)
    else:  # the same function, rounded in another order
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
    for array, unchanged in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, unchanged)


@given(st.data())
def test_integer_results_have_inferred_dtype(data):
    for name in ("Add", "Sub", "Mul", "Div", "Neg", "ReLU", "Exp", "Tanh", "Sigmoid", "Sum", "Mean", "MatMul"):
        dtype = data.draw(st.sampled_from((np.int8, np.int32, np.int64)))
        op, inputs = data.draw(op_calls(name, dtype, exact=True))
        y = call(op, inputs)

        assert op.infer(*specs_of(inputs)) == Spec(y.shape, y.dtype)


def test_kernels_of_frameworks_do_what_is_published():
    """Attention stores no scores and leaves out hidden ones; norms read x twice; a sum passes its gradient on."""
    heads, length, width = 6, 512, 64
    q = np.empty((heads, length, width), np.float16)
    whole, causal = (Op.registry["ScaledDotProductAttention"](causal) for causal in (False, True))
    tensor_bytes, row_bytes = q.nbytes, 4 * heads * length
    for op, share in ((whole, 1), (causal, (length + 1) / (2 * length))):
        plan = op._plan([q, q, q])
        assert op.cost(plan, "eager")[1:3] == (4 * heads * length**2 * width * share, 4 * tensor_bytes + row_bytes)
        assert op.cost(plan, "eager", (True,) * 3)[1:3] == (
            10 * heads * length**2 * width * share,
            8 * tensor_bytes + row_bytes,
        )
        assert plan.work.size_bytes > 6 * 2 * heads * length**2

    x, w = np.empty((8, 16, 4, 4), np.float32), np.empty(16, np.float32)
    for name, inputs, forward, backward in (
        ("BatchNorm", [x, w, w], 3, 5),
        ("LayerNorm", [x.reshape(-1, 16), w, w], 2, 5),
        ("Softmax", [x.reshape(-1, 16)], 2, 3),
        ("ReLU", [x], 2, 3),
        ("Add", [x, x], 3, 3),
        ("Permute", [x], 0, 0),
    ):
        op = Op.registry[name](*([(1, 0, 2, 3)] if name == "Permute" else []))
        plan, needs = op._plan(inputs), (True,) * len(inputs)
        passes = [op.cost(plan, "eager", needs).size_bytes / x.nbytes for needs in (None, needs)]
        assert passes == [forward, backward], name
    plan = (add := Op.registry["Add"]())._plan([x, w[0]])
    assert add.cost(plan, "eager", (True, True)).size_bytes == x.nbytes + 4
    assert add.cost(plan, "eager", (True, False))[1:3] == (0, 0)


def test_matmul_and_linear_count_their_flops():
    x, w, b = Spec((5, 3, 4), np.dtype("f4")), Spec((4, 6), np.dtype("f4")), Spec((6,), np.dtype("f4"))

    product = Op.registry["MatMul"]().work(x, w)
    assert product == (2 * 5 * 3 * 4 * 6, 4 * (5 * 3 * 4 + 4 * 6 + 5 * 3 * 6))
    assert Op.registry["MatMul"]().work_backward((True, True), product).flops == 2 * product.flops
    wide = Spec((6, 4), np.dtype("f4"))
    assert Op.registry["Linear"]().work(x, wide, b).flops == (2 * 4 + 1) * 5 * 3 * 6


def test_missing_rule_is_reported():
    class AbstractBare(Op):
        def forward(self, ctx, x):
            return x

    with refused(InputError):
        AbstractBare()(Tensor([1.0]))


def test_forward_may_return_a_number():
    class AbstractTotal(Op):
        rule = "n -> "

        def forward(self, ctx, x):
            return float(x.sum())

        def backward(self, ctx, dy):
            return [np.full(ctx.size("n"), dy)]

    x = Tensor([1.0, 2.0], requires_grad=True)
    y = AbstractTotal()(x)
    assert (y.shape, y.item()) == ((), 3)
    y.backward()
    assert x.grad.tolist() == [1, 1]


def test_ops_without_a_gradient_take_arrays():
    a = np.array([3, 1, 2])
    for name, settings in (("OneHot", (4,)), ("ArgMax", (0,)), ("TopK", (2,)), ("BitwiseNot", ()), ("Cast", ("int8",))):
        op = Op.registry[name](*settings)
        np.testing.assert_array_equal(op(a).numpy(), op(Tensor(a)).numpy())
    for name in ("Equal", "Less", "FloorDivide", "BitwiseAnd"):
        op = Op.registry[name]()
        np.testing.assert_array_equal(op(a, 2).numpy(), op(Tensor(a), Tensor(2)).numpy())


# --- single ops ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("huge", [1e4, -1e4])
def test_cross_entropy_of_huge_logits(huge, dtype):
    """Loss and gradient are finite and right for logits whose exponentials overflow."""
    logits = Tensor(np.array([[huge, 0, -huge], [0, huge, 0]], dtype), requires_grad=True)
    loss = F.cross_entropy(logits, np.array([0, 1]))
    loss.backward()
    row_losses = (0.0, 0.0) if huge > 0 else (2e4, 1e4 + np.log(2))

    np.testing.assert_allclose(loss.numpy(), np.mean(row_losses), rtol=1e-6)
    assert np.isfinite(logits.grad.numpy()).all()
    np.testing.assert_allclose(logits.grad.numpy().sum(1), 0, atol=1e-6)


@pytest.mark.parametrize("label", [-1, 3, 10])
def test_cross_entropy_names_bad_label(label):
    with refused(LabelError) as caught:
        F.cross_entropy(Tensor(np.zeros((3, 3))), np.array([0, label, 2]))

    assert caught.value.facts == {"label": label, "position": 1, "num_classes": 3}


def test_bad_calls_are_refused():
    two, three = Tensor(np.zeros(2)), Tensor(np.zeros((3, 3)))
    with refused(DTypeError):
        F.cross_entropy(three, np.zeros(3))
    with refused(DTypeError):
        F.cross_entropy(np.zeros((3, 3), np.int64), np.zeros(3, np.int64))
    with refused(ShapeError):
        F.cross_entropy(three, np.zeros(2, np.int64))
    with refused(InputError):
        F.cross_entropy(three, np.zeros(3, np.int64), "average")
    with refused(ShapeError):
        two + three
    with refused(ShapeError):
        three @ np.zeros((2, 5))
    with refused(ShapeError):
        three @ two
    with refused(ShapeError):
        three @ np.float32(2)
    with refused(ShapeError):
        three.sum(2)
    with refused(ShapeError):
        three.mean((0, -2))
    with refused(ShapeError):
        three.reshape(4, -1)
    with refused(ShapeError):
        three.permute(0, 0)
    with refused(ShapeError):
        three.transpose(0, 5)
    with refused(ShapeError):
        three.flatten(1, 0)


def test_float16_mean_does_not_overflow():
    """The sum of a float16 mean is wider than float16."""
    x = Tensor(np.full(8, 60000, np.float16))

    assert x.mean().item() == np.mean(x.numpy()) == 60000
    assert Mean().infer(Spec((8,), np.dtype(np.float16))).dtype == np.float16


def test_sigmoid_keeps_small_values():
    x = np.array([-700.0, -30.0, -1.0, 0.0, 1.0, 30.0, 700.0])

    np.testing.assert_allclose(call(Sigmoid(), [x]).numpy(), 1 / (1 + np.exp(-x)), rtol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_linear_inputs_do_not_depend_on_bias(shape):
    x, w = np.ones(shape), np.arange(20.0).reshape(5, 4)

    np.testing.assert_array_equal(F.linear(x, w, np.zeros(5)).numpy(), x @ w.T)
    np.testing.assert_array_equal(F.linear(x, w).numpy(), x @ w.T)


@given(st.data())
def test_flatten_and_transpose_match_numpy(data):
    x = data.draw(arrays((2, 3, 4), values=INTEGERS))
    first, second = data.draw(st.integers(-3, 2)), data.draw(st.integers(-3, 2))
    start, end = sorted((first % 3, second % 3))
    merged = (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :])

    np.testing.assert_array_equal(F.transpose(x, first, second).numpy(), np.swapaxes(x, first, second))
    np.testing.assert_array_equal(F.flatten(x, start, end - 3).numpy(), x.reshape(merged))


def test_chain_of_ops_has_the_right_gradient():
    """A small network through every arithmetic operator, against finite differences."""
    x = np.linspace(-1, 1, 6).reshape(2, 3)
    w = np.linspace(0.2, 0.9, 12).reshape(3, 4)
    labels = np.array([1, 3])

    def loss(x, w, labels):
        hidden = (x @ w).tanh() * 2 - 1
        gate = (hidden.exp() / (1 + hidden.exp())).log()
        return F.cross_entropy(-gate + hidden.sigmoid(), labels)

    check_gradients(loss, [x, w, labels])
