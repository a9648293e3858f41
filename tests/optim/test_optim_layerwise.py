"""LARS, LAMB, Momentum and clipping beside references in plain NumPy."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

from simparallel import optim
from simparallel.autograd import Tensor
from simparallel.errors import InputError
from simparallel.optim.norms import _BLOCK, norm


def leaf(values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


def train(make, start, grads):
    param = leaf(start)
    memory, optimizer = param.data, make([param])
    for g in grads:
        before = g.copy()
        optimizer([g])
        assert np.array_equal(g, before)
    assert param.data is memory
    return param.numpy()


shapes = hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)
values = st.integers(-8, 8)
runs = shapes.flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float64, shape, elements=values),
        st.lists(hnp.arrays(np.float64, shape, elements=values), min_size=1, max_size=5),
    )
)
decays = st.sampled_from([0.0, 0.01, 0.5])


def reference_lars(p, grads, lr, momentum, weight_decay, coefficient, eps, adapt=True):
    v = np.zeros_like(p)
    for g in grads:
        p_norm, g_norm = np.linalg.norm(p.ravel()), np.linalg.norm(g.ravel())
        ratio = coefficient * p_norm / (g_norm + weight_decay * p_norm + eps) if p_norm * g_norm > 0 else 1
        v = momentum * v + lr * (ratio if adapt else 1) * (g + weight_decay * p)
        p = p - v
    return p


def reference_lamb(p, grads, lr, betas, eps, weight_decay, adapt=True):
    (b1, b2), m, v = betas, 0, 0
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps) + weight_decay * p
        p_norm, r_norm = np.linalg.norm(p.ravel()), np.linalg.norm(r.ravel())
        p = p - lr * (p_norm / r_norm if adapt and p_norm * r_norm > 0 else 1) * r
    return p


@given(run=runs, lr=st.floats(0, 1), momentum=st.floats(0, 0.99), weight_decay=decays, adapt=st.booleans())
def test_lars(run, lr, momentum, weight_decay, adapt):
    settings = {
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "coefficient": 0.25, "eps": 1e-3,
        "adapt": adapt,
    }  # fmt: skip
    expected = reference_lars(*run, **settings)
    np.testing.assert_allclose(train(lambda p: optim.LARS(p, **settings), *run), expected, rtol=1e-9, atol=1e-9)


@given(
    run=runs,
    lr=st.floats(1e-4, 0.1),
    # In thousandths: with a beta near the smallest numbers, a step follows the rounding of the one before.
    betas=st.tuples(st.integers(0, 900), st.integers(0, 990)).map(lambda betas: (betas[0] / 1000, betas[1] / 1000)),
    weight_decay=decays,
    adapt=st.booleans(),
)
def test_lamb(run, lr, betas, weight_decay, adapt):
    settings = {"lr": lr, "betas": betas, "eps": 1e-3, "weight_decay": weight_decay, "adapt": adapt}
    expected = reference_lamb(*run, **settings)
    np.testing.assert_allclose(train(lambda p: optim.LAMB(p, **settings), *run), expected, rtol=1e-6, atol=1e-7)


@given(factor=st.sampled_from([2.0**-10, 0.5, 4.0, 2.0**10]))
def test_layerwise_rate_ignores_gradient_scale(factor):
    """The purpose of LARS and LAMB; SGD is the red control."""
    start, grads = np.array([3.0, 4.0]), [np.array([1.0, -2.0])]
    for make in (lambda p: optim.LARS(p, 1.0, eps=0), lambda p: optim.LAMB(p, 0.1, eps=0)):
        np.testing.assert_allclose(
            train(make, start, [g * factor for g in grads]), train(make, start, grads), rtol=1e-12
        )
    sgd = [train(lambda p: optim.SGD(p, 0.1), start, [g * f for g in grads]) for f in (1.0, factor)]
    assert not np.allclose(*sgd)


def test_groups_leave_biases_out():
    a, b = leaf([3.0, 4.0]), leaf([3.0, 4.0])
    optimizer = optim.LARS([{"params": [a]}, {"params": [b], "adapt": False}], lr=1.0, coefficient=0.5, eps=0)
    optimizer([np.array([0.0, 1.0])] * 2)
    assert a.numpy().tolist() == [3.0, 1.5]  # 0.5 * 5 / 1
    assert b.numpy().tolist() == [3.0, 3.0]
    with refused(InputError):
        optim.LAMB([leaf(0)], adapt=1)
    with refused(InputError):
        optim.LARS([leaf(0)], coefficient=-1)


@pytest.mark.parametrize("make", [optim.LARS, optim.LAMB])
def test_layerwise_resumes_with_the_same_bits(make):
    grads = [np.array([1.0, -2.0]) * k for k in range(1, 5)]
    whole = train(make, [3.0, 4.0], grads)
    param = leaf([3.0, 4.0])
    first = make([param])
    for g in grads[:2]:
        first([g])
    second = make([param])
    second.load_state_dict(first.state_dict())
    for g in grads[2:]:
        second([g])
    assert np.array_equal(param.numpy(), whole)


# --- Momentum ----------------------------------------------------------------------------------------

halves = st.sampled_from([0.0, 0.25, 0.5])


@given(run=runs, lr=halves, momentum=halves, weight_decay=halves, scale=st.sampled_from([1.0, 2.0, 1024.0]))
def test_momentum_is_sgd_on_the_divided_gradients(run, lr, momentum, weight_decay, scale):
    start, grads = run
    scaled = [np.asarray(g * scale) for g in grads]
    ours = train(lambda p: optim.Momentum(p, lr, momentum, weight_decay, scale), start, scaled)
    sgd = train(lambda p: optim.SGD(p, lr, momentum, weight_decay=weight_decay), start, grads)
    assert np.array_equal(ours, sgd)
    if momentum:
        nesterov = train(
            lambda p: optim.Momentum(p, lr, momentum, weight_decay, scale, use_nesterov=True), start, scaled
        )
        v, p = 0, start
        for g in grads:
            g = g + weight_decay * p
            v = momentum * v + g
            p = p - lr * (g + momentum * v)
        assert np.array_equal(nesterov, p)


def test_momentum_takes_mindspore_groups():
    weight, bias = leaf([1.0]), leaf([1.0])
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias]}, {"order_params": [bias, weight]}]
    optimizer = optim.Momentum(groups, 1.0, 0.0)
    assert optimizer.parameters == [bias, weight]
    optimizer([np.array([4.0]), np.array([8.0])])  # in the order of order_params
    assert (bias.item(), weight.item()) == (-3.0, -7.5)
    assert optim.SGD([weight, bias]).parameters == [weight, bias]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Momentum([p], -1, 0.9),
        lambda p: optim.Momentum([p], 1, -0.9),
        lambda p: optim.Momentum([p], 1, 0.9, loss_scale=0),
        lambda p: optim.Momentum([p], 1, 0, use_nesterov=True),
        lambda p: optim.Momentum([{"params": [p]}, {"order_params": []}], 1, 0),
        lambda p: optim.Momentum([{"params": [p]}, {"order_params": [p], "lr": 1}], 1, 0),
        lambda p: optim.Momentum(p, 1, 0),
    ],
)
def test_momentum_refuses_bad_groups(make):
    with refused(InputError):
        make(leaf([1.0]))


# --- clipping ----------------------------------------------------------------------------------------


def with_grads(arrays):
    params = [leaf(np.zeros_like(a), a.dtype) for a in arrays]
    for param, array in zip(params, arrays, strict=True):
        param.grad = Tensor(array)
    return params


gradient_lists = st.lists(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=2, max_side=5), elements=st.floats(-9, 9)),
    min_size=1,
    max_size=4,
)


@given(grads=gradient_lists, max_norm=st.floats(0, 20), p=st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_clip_by_norm(grads, max_norm, p):
    flat = np.concatenate([g.ravel() for g in grads])
    expected = np.linalg.norm(flat, p)
    params = with_grads([g.copy() for g in grads])
    memory = [param.grad.data for param in params]
    total = optim.clip_grad_norm_([*params, params[0]], max_norm, p)  # a tied one counts once
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-300)
    factor = min(1.0, max_norm / (expected + 1e-6))
    for param, data, g in zip(params, memory, grads, strict=True):
        assert param.grad.data is data
        np.testing.assert_allclose(data, g * factor, rtol=1e-12, atol=1e-12)


@given(grads=gradient_lists, limit=st.floats(0, 10))
def test_clip_by_value(grads, limit):
    params = with_grads([g.copy() for g in grads])
    optim.clip_grad_value_(params, limit)
    for param, g in zip(params, grads, strict=True):
        assert np.array_equal(param.grad.data, np.clip(g, -limit, limit))


def test_clip_skips_parameters_without_gradient():
    """Clipping skips parameters without gradient, and takes a single parameter."""
    param = leaf([1.0])
    assert optim.clip_grad_norm_([param], 1.0) == 0.0
    optim.clip_grad_value_(param, 1.0)
    param.grad = Tensor(np.array([3.0]))
    assert optim.clip_grad_norm_(param, math.inf) == 3.0  # measured only
    assert optim.clip_grad_norm_(param, 1.0) == 3.0
    assert param.grad.item() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
def test_nonfinite_norm(bad, p):
    params = with_grads([np.array([1.0, bad]), np.array([2.0])])
    with refused(InputError):
        optim.clip_grad_norm_(params, 1.0, p, error_if_nonfinite=True)
    assert params[1].grad.item() == 2.0
    with np.errstate(invalid="ignore"):
        before = [param.grad.numpy().copy() for param in params]
        assert not math.isfinite(optim.clip_grad_norm_(params, math.inf, p))
        np.testing.assert_equal([param.grad.numpy() for param in params], before)
        assert not math.isfinite(optim.clip_grad_norm_(params, 1.0, p))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda p: optim.clip_grad_norm_(p, -1),
        lambda p: optim.clip_grad_norm_(p, math.nan),
        lambda p: optim.clip_grad_norm_(p, 1, 0),
        lambda p: optim.clip_grad_norm_(p, 1, math.nan),
        lambda p: optim.clip_grad_value_(p, -1),
    ],
)
def test_bad_clipping_is_refused(misuse):
    with refused(InputError):
        misuse([leaf([1.0])])


def test_norms_do_not_overflow_or_drift():
    size = 3 * _BLOCK + 7
    assert norm(np.full(size, 300, np.float16)) == pytest.approx(300 * math.sqrt(size), rel=1e-6)
    x = np.full(size, 0.1, np.float32)
    assert norm(x) == pytest.approx(float(np.float32(0.1)) * math.sqrt(size), rel=1e-6)
