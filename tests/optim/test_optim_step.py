"""An optimizer's step: whole or not at all, its memory account, its event, in float16."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

from simparallel import nn, no_grad, optim
from simparallel.autograd import Tensor
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import DeviceOutOfMemoryError, InputError
from simparallel.machine.cluster import describe


def leaf(values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


# --- whole or not at all -----------------------------------------------------------------------------

MAKES = [
    lambda p: optim.SGD(p, momentum=0.5), optim.Adam, lambda p: optim.AdamW(p, amsgrad=True), optim.RMSprop, optim.LARS,
    optim.LAMB, lambda p: optim.Momentum(p, 0.1, 0.9), optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda o, b: b.data.flags.__setattr__("writeable", False),
        lambda o, b: o.param_groups[1].update(lr=None),
        lambda o, b: o.param_groups[1].update(lr=Tensor(0.5)),
        lambda o, b: o.param_groups[1].update(weight_decay=-1.0),
    ],
)
def test_bad_settings_are_found_before_the_update(make, spoil):
    a, b = leaf([1.0, 1.0]), leaf([1.0, 1.0])
    optimizer = make([{"params": [a]}, {"params": [b]}])
    spoil(optimizer, b)
    with refused(InputError):
        optimizer([np.ones(2)] * 2)
    assert a.numpy().tolist() == b.numpy().tolist() == [1, 1]
    assert optimizer.state == {}


@pytest.mark.parametrize("make", MAKES[:4] + MAKES[-5:])
def test_lack_of_memory_is_found_before_the_update(make):
    params = [leaf(np.zeros(100), np.float32) for _ in range(2)]
    optimizer, recorder = make(params), Recorder(0, describe(1))
    arrays = len(optimizer.remembers(optimizer.param_groups[0]))
    recorder.memory.limit_bytes = 2 * arrays * 400 - 1
    with use_recorder(recorder), refused(DeviceOutOfMemoryError):
        optimizer([np.ones(100, np.float32)] * 2)
    assert not params[0].numpy().any()
    assert optimizer.state == {}
    with use_recorder(recorder):
        optimizer([np.ones(100, np.float32), None])
    assert params[0].numpy().all()


def test_settings_changed_by_hand_change_the_price():
    """A step is planned anew when a setting of its group has changed."""
    w, recorder = leaf(np.ones(100)), Recorder(0, describe(1))
    optimizer = optim.SGD([w], 0.5)
    with use_recorder(recorder):
        for momentum in (0.0, 0.0, 0.5):
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer([np.ones(100)])
    assert [event.flops for event in recorder.events] == [200, 200, 400]
    assert set(optimizer.state[w]) == {"momentum_buffer"}


# --- a closure and the repr --------------------------------------------------------------------------


def test_closure_runs_first_with_the_tape_on():
    w = leaf([3.0])
    optimizer = optim.SGD([w], 0.25)

    def closure():
        optimizer.zero_grad()
        loss = (w * w).sum()
        loss.backward()
        return loss

    with no_grad():
        assert optimizer.step(closure).item() == 9.0
        assert not (w * w).requires_grad
    assert w.item() == 1.5
    assert optimizer.step() is None


def test_failing_closure_changes_nothing():
    w = leaf([3.0])
    w.grad = Tensor(np.ones(1))
    optimizer = optim.SGD([w], 0.25)
    with no_grad():
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert not (w * w).requires_grad
    assert w.item() == 3.0


def test_optimizer_repr_shows_its_groups():
    optimizer = optim.SGD([{"params": [leaf(0)]}, {"params": [leaf(0)], "lr": 0.5}], lr=0.1, momentum=0.9)
    settings = "    dampening: 0.0\n    lr: {}\n    maximize: False\n    momentum: 0.9\n    nesterov: False\n"
    settings += "    weight_decay: 0.0\n"
    groups = [f"\nParameter Group {i}\n{settings.format(lr)}" for i, lr in enumerate((0.1, 0.5))]
    assert repr(optimizer) == f"SGD ({''.join(groups)})"


def test_state_is_added_when_a_setting_needs_it():
    param = leaf([1.0, -1.0])
    for make, names in (
        (optim.Adam, {"amsgrad": True}),
        (optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (optim.SGD, {"momentum": 0.5}),
    ):
        optimizer = make([param])
        optimizer([np.ones(2)])
        optimizer.param_groups[0].update(names)
        optimizer([np.ones(2)])
        assert set(optimizer.state[param]) >= set(optimizer.remembers(optimizer.param_groups[0]))
        make([param], **names).load_state_dict(optimizer.state_dict())


def test_state_without_new_settings_loads():
    """Without them, and with those of the constructor."""
    for make, new in ((optim.SGD, ["maximize"]), (optim.Adam, ["amsgrad", "maximize"])):
        param = leaf([1.0])
        optimizer = make([param], lr=0.25)
        optimizer([np.ones(1)])
        old = optimizer.state_dict()
        for name in new:
            del old["param_groups"][0][name]
        other = make([param], **dict.fromkeys(new, True))
        other.load_state_dict(old)
        assert other.param_groups[0]["lr"] == 0.25
        assert all(other.param_groups[0][name] is True for name in new)
        other([np.ones(1)])


def test_restricted_optimizer_follows_all_settings():
    """Also those that a scheduler changes besides the rate."""
    a, b = leaf([1.0]), leaf([1.0])
    whole = optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1, momentum=0.5)
    part = whole.restricted_to([b])
    optim.OneCycleLR(whole, 1.0, 10).step()
    part.follow(whole)
    assert part.param_groups == [{**whole.param_groups[1], "params": [b]}]


# --- float16 -----------------------------------------------------------------------------------------

HALF = [
    lambda p: optim.SGD(p, 0.1), lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    lambda p: optim.Adam(p, 0.1, weight_decay=0.1), lambda p: optim.AdamW(p, 0.1, amsgrad=True, maximize=True),
    lambda p: optim.RMSprop(p, 0.1, momentum=0.5, centered=True), optim.LARS, lambda p: optim.LAMB(p, weight_decay=0.1),
    lambda p: optim.Momentum(p, 0.1, 0.9, loss_scale=2.0**20),
    lambda p: optim.Adagrad(p, initial_accumulator_value=0.1),
    lambda p: optim.Adadelta(p, 0.5, weight_decay=0.1), lambda p: optim.Adamax(p, 0.1, maximize=True),
    lambda p: optim.NAdam(p, 0.1), lambda p: optim.RAdam(p, 0.1, decoupled_weight_decay=True, weight_decay=0.1),
]  # fmt: skip
halves = hnp.arrays(np.float16, (2, 3), elements=st.sampled_from([0.0, 6e-8, 1e-3, -0.5, 2.0, 300.0]))
orders = st.sampled_from([lambda x: x, lambda x: np.asfortranarray(x)])


@pytest.mark.parametrize("make", HALF)
@given(start=halves, grads=st.lists(halves, min_size=1, max_size=4), order=orders)
def test_float16_step_is_rounded_float32_step(make, start, grads, order):
    half, single = Tensor(order(start), requires_grad=True), leaf(start, np.float32)
    optimizer, other = make([half]), make([single])
    for grad in grads:
        single.data[...] = half.data  # rounded once a step
        optimizer([grad])
        other([grad.astype(np.float32)])
        assert np.array_equal(half.numpy(), single.numpy().astype(np.float16))
        assert np.isfinite(half.numpy()).all()
    for values, expected in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name, value in values.items():
            assert np.array_equal(value, expected[name])
            assert np.asarray(value).dtype != np.float16


def test_zero_gradient_keeps_float16_weights():
    for make in (optim.Adam, optim.AdamW, optim.RMSprop):
        param = leaf([1.0], np.float16)
        make([param], weight_decay=0.0)([np.zeros(1, np.float16)])
        assert param.item() == 1.0


@pytest.mark.parametrize("make", HALF)
def test_float16_on_a_device(arrays, make):
    values, grad = np.array([1.0, -2.0], np.float16), np.array([0.5, 0.25], np.float16)
    param, plain = Tensor(arrays.on_device(values), requires_grad=True), leaf(values, np.float16)
    optimizer, other = make([param]), make([plain])
    for _ in range(3):
        optimizer([arrays.on_device(grad)])
        other([grad])
    np.testing.assert_allclose(param.numpy(), plain.numpy(), rtol=1e-3)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer([arrays.on_device(grad)])


def test_float16_state_is_widened_on_load():
    param = leaf([1.0, 2.0], np.float16)
    optimizer = optim.Adam([param])
    optimizer([np.ones(2, np.float16)])
    saved = optimizer.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][name] = saved["state"][0][name].astype(np.float16)
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["exp_avg"].dtype == np.float32


def test_o3_trains_with_adam():
    net = nn.auto_mixed_precision(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), "O3")
    x = np.eye(4, dtype=np.float32)[:2]  # two inputs are always 0, and so are their weights' gradients
    optimizer, losses = optim.Adam(net.parameters(), 0.01), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = ((net(x) - 1.0) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(np.isfinite(p.numpy()).all() and p.dtype == np.float16 for p in net.parameters())


# --- memory ------------------------------------------------------------------------------------------


def test_state_and_scratch_memory_are_counted():
    param, recorder = leaf(np.zeros(100), np.float32), Recorder(0, describe(1))
    with use_recorder(recorder):
        for make, arrays in ((optim.SGD, 1), (lambda p: optim.SGD(p, momentum=0.5), 2), (optim.Adam, 3)):
            optimizer = make([param])
            for _ in range(2):
                optimizer([np.ones(100, np.float32)])
                assert recorder.memory.live["optimizer state"] == arrays * 400
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer([np.ones(100, np.float32)])
            assert recorder.memory.live["optimizer state"] == arrays * 400
            del optimizer
            assert recorder.memory.live["optimizer state"] == 0
        recorder.memory.limit_bytes = 500
        with refused(DeviceOutOfMemoryError):
            optim.Adam([param])([np.ones(100, np.float32)])


# --- the clock ---------------------------------------------------------------------------------------


@given(size=st.integers(1, 50), weight_decay=st.sampled_from([0.0, 0.5]), momentum=st.sampled_from([0.0, 0.5]))
def test_step_is_one_event_with_a_price(size, weight_decay, momentum):
    params = [leaf(np.zeros(size), np.float32), leaf(np.zeros(3), np.float32)]
    optimizer = optim.SGD(params, 0.1, momentum=momentum, weight_decay=weight_decay)
    recorder = Recorder(0, describe(1))
    with use_recorder(recorder):
        optimizer([np.ones(size, np.float32), None])
        optimizer([np.ones(size, np.float32), np.ones(3, np.float32)])
    first, second = recorder.events
    flops = 2 + 2 * (weight_decay > 0) + 2 * (momentum > 0)
    accesses = 3 + 2 * (momentum > 0)
    assert (first.name, first.kind, first.stream, first.step) == ("SGD.step", "optimizer", "compute", 0)
    assert (first.flops, first.size_bytes) == (flops * size, accesses * 4 * size)
    assert (second.flops, second.size_bytes) == (flops * (size + 3), accesses * 4 * (size + 3))
    assert (second.step, recorder.step) == (1, 2)
    duration = recorder.cluster.device.time_ps(first.flops, first.size_bytes, 4)
    assert (first.sim_end_ps, second.sim_start_ps) == (duration, duration)


@given(size=st.integers(1, 50))
def test_float16_step_price_counts_float32_state(size):
    param, recorder = leaf(np.zeros(size), np.float16), Recorder(0, describe(1))
    with use_recorder(recorder):
        optim.Adam([param])([np.ones(size, np.float16)])
    (event,) = recorder.events
    assert event.size_bytes == size * (3 * 2 + 4 * 4)  # gradient, weight twice; two moments twice
