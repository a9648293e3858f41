"""Optimizers beside five-line references, and refused settings."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

from simparallel import optim
from simparallel.autograd import Tensor
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import AutogradError, DTypeError, InputError, ShapeError, StateDictError
from simparallel.machine.cluster import describe

STEPS = 5


def leaf(values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


def reference_sgd(p, grads, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    b = None
    for g in grads:
        g = g + weight_decay * p
        if momentum:
            b = g if b is None else momentum * b + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
        p = p - lr * g
    return p


def reference_adam(p, grads, lr, betas, eps, weight_decay, decoupled):
    (b1, b2), m, v = betas, 0, 0
    for t, g in enumerate(grads, 1):
        p, g = (p * (1 - lr * weight_decay), g) if decoupled else (p, g + weight_decay * p)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p


def train(make, start, grads):
    param = leaf(start)
    memory, optimizer = param.data, make([param])
    for g in grads:
        before = g.copy()
        param.grad = Tensor(g)
        optimizer.step()
        assert np.array_equal(g, before)  # gradients may be in a bucket: do not write them
    assert param.data is memory
    return param.numpy()


shapes = hnp.array_shapes(min_dims=0, max_dims=2, max_side=4)
runs = shapes.flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float64, shape, elements=st.integers(-8, 8)),
        st.lists(hnp.arrays(np.float64, shape, elements=st.integers(-8, 8)), min_size=1, max_size=STEPS),
    )
)
# Powers of two, and integers for the values: every product and sum below is exact.
halves = st.sampled_from([0.0, 0.25, 0.5])


@given(run=runs, lr=halves, momentum=halves, dampening=halves, weight_decay=halves)
def test_sgd_is_exact(run, lr, momentum, dampening, weight_decay):
    settings = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    assert np.array_equal(train(lambda p: optim.SGD(p, **settings), *run), reference_sgd(*run, **settings))


@given(run=runs, lr=halves, momentum=st.sampled_from([0.5, 0.25]), weight_decay=halves)
def test_sgd_nesterov_is_exact(run, lr, momentum, weight_decay):
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": True}
    assert np.array_equal(train(lambda p: optim.SGD(p, **settings), *run), reference_sgd(*run, **settings))


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
@given(
    run=runs, lr=st.floats(1e-4, 0.5), betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    eps=st.floats(1e-8, 1e-2), weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
)  # fmt: skip
def test_adam(cls, run, lr, betas, eps, weight_decay):
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    expected = reference_adam(*run, **settings, decoupled=cls is optim.AdamW)
    # A second moment that underflows against eps makes the quotient sensitive; hence the tolerance.
    np.testing.assert_allclose(train(lambda p: cls(p, **settings), *run), expected, rtol=1e-7, atol=1e-7)


def test_defaults_match_pytorch():
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    adam |= {"amsgrad": False, "maximize": False}
    assert optim.Adam([leaf(0)]).defaults == {**adam, "weight_decay": 0}
    assert optim.AdamW([leaf(0)]).defaults == {**adam, "weight_decay": 1e-2}
    plain = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    assert optim.SGD([leaf(0)]).defaults == {"lr": 1e-3, **plain}


def test_adams_first_step_is_lr_times_the_sign():
    result = train(lambda p: optim.Adam(p, lr=0.5, eps=0), [1.0, 1.0], [np.array([1e-3, -1e3])])
    np.testing.assert_allclose(result, [0.5, 1.5], rtol=1e-12)


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam, optim.AdamW])
def test_float32_stays_float32(make):
    param = leaf([1, 2], np.float32)
    optimizer = make([param], lr=0.1, weight_decay=0.1)
    optimizer([np.ones(2, np.float32)])
    assert param.dtype == np.float32
    assert all(a.dtype == np.float32 for s in optimizer.state.values() for a in s.values() if hasattr(a, "dtype"))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
        lambda p: optim.Adam(p, weight_decay=0.1),
        optim.AdamW,
    ],
)
def test_scratch_and_state_are_allocated_once(make):
    param = leaf([1.0, 2.0])
    optimizer = make([param])
    optimizer([np.ones(2)])
    optimizer([np.ones(2)])

    def arrays():
        state = [a for s in optimizer.state.values() for a in s.values() if isinstance(a, np.ndarray)]
        return [id(a) for a in state + [a for pair in optimizer._scratch.values() for a in pair]]

    before = arrays()
    optimizer([np.ones(2)])
    assert arrays() == before


# --- groups, gradients, zero_grad --------------------------------------------------------------------


def test_groups_have_their_own_settings():
    a, b = leaf([0.0]), leaf([0.0])
    optimizer = optim.SGD([{"params": [a]}, {"params": b, "lr": 2.0}], lr=1.0)
    optimizer([np.ones(1), np.ones(1)])
    optimizer.param_groups[0]["lr"] = 4.0  # as a schedule does
    optimizer([np.ones(1), np.ones(1)])
    assert (a.item(), b.item()) == (-5.0, -4.0)


def test_parameters_without_a_gradient_are_skipped():
    a, b = leaf([1.0]), leaf([1.0])
    optimizer = optim.Adam([a, b], lr=1.0)
    b.grad = Tensor(np.ones(1))
    optimizer.step()
    assert a.item() == 1.0
    assert b.item() != 1.0
    assert list(optimizer.state) == [b]


def test_call_with_gradients_does_not_set_grad():
    a, b = leaf([1.0, 1.0]), leaf([1.0, 1.0])
    first, second = optim.SGD([a], 0.5), optim.SGD([b], 0.5)
    a.grad = Tensor(np.array([1.0, 2.0]))
    first.step()
    second([Tensor(np.array([1.0, 2.0]))])
    assert np.array_equal(a.numpy(), b.numpy())
    assert b.grad is None
    second([None])
    assert np.array_equal(a.numpy(), b.numpy())


def test_zero_grad():
    param = leaf([1.0])
    optimizer = optim.SGD([param])
    param.grad = kept = Tensor(np.ones(1))
    optimizer.zero_grad(set_to_none=False)
    assert param.grad is kept
    assert kept.item() == 0
    optimizer.zero_grad()
    assert param.grad is None


def test_training_fits_a_line():
    w = leaf([0.0])
    optimizer = optim.SGD([w], lr=0.125)
    for _ in range(20):
        optimizer.zero_grad()
        error = w * np.array([2.0]) - np.array([6.0])
        (error * error).sum().backward()
        optimizer.step()
    assert w.item() == 3.0  # (1 - 0.125 * 8) = 0: reached at the first step, and kept


# --- guards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad", "error"), [(np.ones(3), ShapeError), (np.ones(2, np.float32), DTypeError), ([1.0, 1.0], InputError)]
)
def test_bad_gradient_changes_nothing(grad, error):
    a, b = leaf([1.0, 1.0]), leaf([1.0, 1.0])
    optimizer, recorder = optim.Adam([a, b]), Recorder(0, describe(1))
    with use_recorder(recorder), refused(error):
        optimizer([np.ones(2), grad])
    assert a.numpy().tolist() == b.numpy().tolist() == [1, 1]
    assert optimizer.state == {}
    assert (recorder.events, recorder.step) == ([], 0)


def test_number_of_gradients_must_fit():
    with refused(InputError):
        optim.SGD([leaf(0)])([np.ones(()), np.ones(())])


_shared = leaf(0)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ([], InputError),
        ([{"params": []}], InputError),
        (leaf(0), InputError),
        ({"params": [leaf(0)]}, InputError),
        (7, InputError),
        ([1.0], InputError),
        ([_shared, leaf(1), _shared], InputError),
        ([{"params": [_shared]}, {"params": [_shared]}], InputError),
        ([{"params": [leaf(0)], "learning_rate": 1}], InputError),
        ([{"lr": 1}], InputError),
        ([leaf(1) * 2.0], AutogradError),
        ([Tensor(np.zeros(2, np.int64))], DTypeError),
    ],
)
def test_bad_parameters_are_refused(params, error):
    with refused(error):
        optim.SGD(params)


@pytest.mark.parametrize("lr", [-1, math.nan, math.inf, "0.1", None, True])
@pytest.mark.parametrize("make", [optim.SGD, optim.Adam, optim.AdamW])
def test_bad_learning_rates_are_named(make, lr):
    with refused(InputError):
        make([leaf(0)], lr=lr)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, momentum=-0.5),
        lambda p: optim.SGD(p, weight_decay=math.nan),
        lambda p: optim.SGD(p, nesterov=True),
        lambda p: optim.SGD(p, momentum=0.9, dampening=0.1, nesterov=True),
        lambda p: optim.Adam(p, betas=(0.9, 1.0)),
        lambda p: optim.Adam(p, betas=0.9),
        lambda p: optim.AdamW(p, eps=-1),
        lambda p: optim.Adam(p, amsgrad=1),
        lambda p: optim.SGD(p, maximize="no"),
        lambda p: optim.RMSprop(p, alpha=-1),
        lambda p: optim.RMSprop(p, centered=None),
        lambda p: optim.SGD([{"params": p, "initial_lr": -1}]),
        lambda p: optim.Adagrad(p, lr_decay=-1),
        lambda p: optim.Adadelta(p, rho=1.5),
        lambda p: optim.Adamax(p, betas=(1.0, 0.9)),
        lambda p: optim.NAdam(p, momentum_decay=-1),
        lambda p: optim.RAdam(p, decoupled_weight_decay=1),
    ],
)
def test_bad_settings_are_named(make):
    with refused(InputError):
        make([leaf(0)])


# --- saving and loading ------------------------------------------------------------------------------

MAKES = [
    lambda p: optim.SGD(p, 0.1, momentum=0.9),
    lambda p: optim.SGD(p, 0.1, momentum=0.9, maximize=True),
    lambda p: optim.Adam(p, 0.1),
    lambda p: optim.AdamW(p, 0.1, amsgrad=True, maximize=True),
    lambda p: optim.RMSprop(p, 0.1),
    lambda p: optim.RMSprop(p, 0.1, momentum=0.9, centered=True, weight_decay=0.1),
    lambda p: optim.Adagrad(p, 0.1, 0.1, initial_accumulator_value=0.5),
    lambda p: optim.Adadelta(p, 0.1),
    lambda p: optim.Adamax(p, 0.1),
    lambda p: optim.NAdam(p, 0.1, momentum_decay=0.1),
    lambda p: optim.RAdam(p, 0.1, (0.5, 0.8)),
]


@pytest.mark.parametrize("make", MAKES)
@given(run=runs, cut=st.integers(0, STEPS))
def test_resumed_run_has_the_same_bits(make, run, cut):
    start, grads = run
    whole = train(make, start, grads)
    param = leaf(start)
    optimizer = make([param])
    for g in grads[:cut]:
        optimizer([g])
    saved, param = optimizer.state_dict(), leaf(param.numpy())
    for g in grads[cut:]:
        optimizer([g])  # the state dict holds copies: changes must not affect it
    resumed = make([param])
    resumed.load_state_dict(saved)
    for g in grads[cut:]:
        resumed([g])
    assert np.array_equal(param.numpy(), whole)


def test_state_dict_is_plain_data():
    a, b = leaf([1.0]), leaf([2.0])
    optimizer = optim.Adam([{"params": [a]}, {"params": [b], "lr": 0.5}])
    optimizer([None, np.ones(1)])
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1]]
    assert set(saved["state"]) == {1}
    text = json.dumps(saved, default=lambda array: array.tolist())
    loaded = json.loads(text)
    for values in loaded["state"].values():
        values.update({name: np.array(values[name]) for name in ("exp_avg", "exp_avg_sq")})
    other = optim.Adam([{"params": [a]}, {"params": [b]}], lr=0.25)
    scheduled = other.param_groups[1]
    other.load_state_dict(loaded)  # JSON turns the numbers into strings, and the betas into a list
    other([None, np.ones(1)])
    assert other.state[b]["step"] == 2
    assert [group["lr"] for group in other.param_groups] == [1e-3, 0.5]
    assert other.param_groups[1] is scheduled  # a schedule may hold a reference to the dict


def _with(saved, **changes):
    saved["state"][0].update(changes)
    return saved


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda s: _with(s, exp_avg=np.zeros(3)), StateDictError),
        (lambda s: _with(s, exp_avg_sq=np.zeros(2, np.float32)), StateDictError),
        (lambda s: _with(s, momentum_buffer=np.zeros(2)), StateDictError),
        (lambda s: {"optimizer": s}, StateDictError),
        (lambda s: {}, StateDictError),
        (lambda s: None, StateDictError),
        (lambda s: [s], StateDictError),
        (lambda s: {**s, "param_groups": 3}, StateDictError),
        (lambda s: {**s, "param_groups": [{"lr": 1.0}]}, StateDictError),
        (lambda s: {**s, "state": {0: np.ones(2)}}, StateDictError),
        (lambda s: s["param_groups"][0].update(initial_lr=-1.0) or s, InputError),
        (lambda s: s["state"].update({5: s["state"].pop(0)}) or s, StateDictError),
        (lambda s: s["param_groups"][0].update(lr=-1.0) or s, InputError),
        (lambda s: s["param_groups"][0].update(momentum=0.5) or s, StateDictError),
        (lambda s: s["param_groups"].append(s["param_groups"][0]) or s, StateDictError),
    ],
)
def test_bad_state_dict_changes_nothing(spoil, error):
    param = leaf([1.0, 1.0])
    optimizer = optim.Adam([param], lr=0.25)
    optimizer([np.ones(2)])
    before = optimizer.state_dict()
    spoiled = optimizer.state_dict()
    spoiled["param_groups"][0]["lr"] = 0.75
    with refused(error):
        optimizer.load_state_dict(spoil(spoiled))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(np.array_equal(after["state"][0][name], value) for name, value in before["state"][0].items())
