"""Loss scaling: changes of the scale, and skipped steps."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel import optim
from simparallel.autograd import Tensor
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import InputError, NonFiniteLossError, StateDictError
from simparallel.machine.cluster import describe


def leaf(values=(1.0,), dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


def mindspores(scale, factor, window, overflows):
    """Follow the published rule, with its two counters."""
    current, last = 1, 0
    for overflow in overflows:
        if overflow:
            scale, last = max(scale / factor, 1), current
        elif (current - last) % window == 0:
            scale *= factor
        current += 1
        yield scale


@given(
    power=st.integers(0, 20), factor=st.sampled_from([2, 4]), window=st.integers(1, 4),
    overflows=st.lists(st.booleans(), max_size=30),
)  # fmt: skip
def test_dynamic_scale_matches_mindspore(power, factor, window, overflows):
    manager = optim.DynamicLossScaleManager(2.0**power, factor, window)
    for overflow, expected in zip(overflows, mindspores(2.0**power, factor, window, overflows), strict=True):
        manager.update_loss_scale(overflow)
        assert manager.get_loss_scale() == expected
    other = optim.DynamicLossScaleManager()
    other.load_state_dict(json.loads(json.dumps(manager.state_dict())))
    assert vars(other) == vars(manager)


def test_fixed_scale_is_fixed():
    manager = optim.FixedLossScaleManager(1024, drop_overflow_update=False)
    manager.update_loss_scale(True)
    assert (manager.get_loss_scale(), manager.get_drop_overflow_update()) == (1024, False)
    assert optim.FixedLossScaleManager().get_drop_overflow_update()
    assert optim.DynamicLossScaleManager().get_loss_scale() == 2**24
    with refused(StateDictError):
        manager.load_state_dict(optim.DynamicLossScaleManager().state_dict())


def test_overflow_without_end_is_an_error():
    manager = optim.DynamicLossScaleManager(1)
    for _ in range(1000):
        manager.update_loss_scale(True)
    with refused(InputError):
        manager.update_loss_scale(True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.FixedLossScaleManager(0),
        lambda: optim.FixedLossScaleManager(-1),
        lambda: optim.DynamicLossScaleManager(0.5),
        lambda: optim.DynamicLossScaleManager(2, 1),
        lambda: optim.DynamicLossScaleManager(2, 2, 0),
    ],
)
def test_bad_managers_are_refused(make):
    with refused(InputError):
        make()


@given(power=st.integers(0, 12), lr=st.sampled_from([0.25, 1.0]))
def test_scaled_step_is_the_plain_step(power, lr):
    plain, scaled = leaf([3.0]), leaf([3.0])
    optimizer, scaler = optim.SGD([scaled], lr), optim.GradScaler(optim.FixedLossScaleManager(2.0**power))
    (plain * plain).sum().backward()
    optim.SGD([plain], lr).step()
    loss = (scaled * scaled).sum()
    assert scaler.scale(loss).item() == 9.0 * 2**power
    scaler.scale(loss).backward()
    assert scaled.grad.item() == 6.0 * 2**power
    assert scaler.step(optimizer)
    scaler.update()
    assert scaled.item() == plain.item()


def test_disabled_scaler_has_no_effect():
    param, plain = leaf([3.0]), leaf([3.0])
    scaler = optim.GradScaler(init_scale=2.0**10, growth_interval=1, enabled=False)
    optimizer, alone = optim.SGD([param], 0.5), optim.SGD([plain], 0.5)
    for _ in range(3):
        loss = (param * param).sum()
        assert scaler.scale(loss).item() == loss.item()
        scaler.scale(loss).backward()
        (plain * plain).sum().backward()
        assert scaler.unscale_(optimizer) is False
        assert scaler.step(optimizer)
        scaler.update()
        alone.step()
        assert param.item() == plain.item()
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    scaler.load_state_dict(optim.GradScaler().state_dict())
    assert scaler.get_scale() == 1.0
    param.grad = Tensor(np.array([np.inf]))
    assert scaler.step(optimizer)
    assert param.item() == -np.inf


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_overflow_skips_step_and_halves_scale(bad):
    a, b = leaf([1.0, 1.0]), leaf([1.0])
    optimizer, scaler = optim.Adam([a, b], 0.5), optim.GradScaler()
    a.grad, b.grad = Tensor(np.array([0.0, bad])), Tensor(np.ones(1))
    assert not scaler.step(optimizer)
    scaler.update()
    assert (a.numpy().tolist(), b.item(), optimizer.state) == ([1, 1], 1, {})
    assert scaler.get_scale() == 2**15
    a.grad, b.grad = Tensor(np.ones(2)), Tensor(np.ones(1))
    assert scaler.step(optimizer)  # the control: finite gradients do step
    assert b.item() != 1


def test_no_overflow_check_without_dropping():
    param = leaf()
    scaler = optim.GradScaler(
        optim.FixedLossScaleManager(2, drop_overflow_update=False), reduce_overflow=lambda flag: 1 / 0
    )
    param.grad = Tensor(np.array([np.inf]))
    assert scaler.step(optim.SGD([param], 1.0))
    assert param.item() == -np.inf


def test_flag_is_reduced_over_the_ranks():
    param, told = leaf(), []

    def another_rank_overflowed(flag):
        told.append(flag)
        return True

    scaler = optim.GradScaler(reduce_overflow=another_rank_overflowed)
    param.grad = Tensor(np.ones(1))
    assert not scaler.step(optim.SGD([param]))
    scaler.update()
    assert (told, param.item(), scaler.get_scale()) == ([False], 1.0, 2**15)


def test_clipping_between_backward_and_step():
    param = leaf([3.0, 4.0])
    optimizer, scaler = optim.SGD([param], 1.0), optim.GradScaler()
    scaler.scale((param * param).sum() * 0.5).backward()
    assert not scaler.unscale_(optimizer)
    assert optim.clip_grad_norm_([param], 1.0) == 5.0
    with refused(InputError):
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer)
    scaler.update()
    np.testing.assert_allclose(param.numpy(), [2.4, 3.2], rtol=1e-6)
    param.grad = Tensor(np.ones(2))
    scaler.unscale_(optimizer)  # another step


def test_second_step_needs_update():
    """PyTorch refuses the same."""
    a, b = leaf([1.0]), leaf([1.0])
    first, second, scaler = optim.SGD([a], 0.5), optim.SGD([b], 0.5), optim.GradScaler()
    a.grad, b.grad = Tensor(np.full(1, 2.0**16)), Tensor(np.full(1, 2.0**16))
    assert scaler.step(first)
    assert scaler.step(second)
    for call in (scaler.step, scaler.unscale_):
        with refused(InputError):
            call(first)
    assert (a.item(), b.item(), a.grad.item()) == (0.5, 0.5, 1.0)
    scaler.update()
    assert scaler.step(first)


def test_step_without_any_gradient_is_refused():
    param = leaf([1.0])
    optimizer, scaler = optim.SGD([param], 0.5), optim.GradScaler()
    with refused(InputError):
        scaler.step(optimizer)
    param.grad = Tensor(np.ones(1))
    assert scaler.step(optimizer)  # the refusal had no effect
    param.grad = None
    assert optim.GradScaler(enabled=False).step(optimizer)
    told = []  # a rank without gradients takes part in the ranks' agreement
    assert optim.GradScaler(reduce_overflow=lambda flag: told.append(flag) or flag).step(optimizer)
    assert told == [False]


def test_lists_of_losses_are_scaled_one_by_one():
    scaler, losses = optim.GradScaler(init_scale=4.0), [leaf().sum(), (leaf([2.0]).sum(), leaf([3.0]).sum())]
    first, pair = scaler.scale(losses)
    assert (first.item(), type(pair), [loss.item() for loss in pair]) == (4.0, tuple, [8.0, 12.0])
    with refused(InputError):
        scaler.scale([1.0])


def test_unscaled_float16_gradients_are_float32():
    """float32 holds 2 ** -35; float16's smallest number is 2 ** -24."""
    param, scaler = leaf([0.0], np.float16), optim.GradScaler(init_scale=2.0**15)
    optimizer, recorder = optim.SGD([param], lr=2.0**30), Recorder(0, describe(1))
    param.grad = Tensor(np.array([2.0**-20], np.float16))
    with use_recorder(recorder):
        scaler.unscale_(optimizer)
    assert param.grad.dtype == np.float32
    assert param.grad.item() == 2.0**-35
    assert recorder.memory.live["gradients"] == 4
    scaler.step(optimizer)
    assert param.item() == -(2.0**-5)


def test_optimizer_with_loss_scale_is_refused():
    param = leaf()
    param.grad = Tensor(np.ones(1))
    with refused(InputError):
        optim.GradScaler().step(optim.Momentum([param], 0.1, 0.9, loss_scale=1024))
    assert param.grad.item() == 1.0


def test_scaler_takes_pytorch_names():
    scaler = optim.GradScaler(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    assert vars(scaler.manager) == vars(optim.DynamicLossScaleManager(8.0, 4.0, 3))
    assert vars(optim.GradScaler().manager) == vars(optim.DynamicLossScaleManager(2.0**16))
    with refused(InputError):
        optim.GradScaler(growth_factor=4.0)
    with refused(InputError):
        optim.GradScaler(optim.FixedLossScaleManager(), init_scale=8.0)
    with refused(InputError):
        optim.GradScaler(growth_interval=0)


def test_scaler_resumes():
    scaler = optim.GradScaler(optim.DynamicLossScaleManager(8))
    scaler.manager.update_loss_scale(True)
    other = optim.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 4


def test_all_finite():
    assert optim.all_finite([])
    assert optim.all_finite([np.ones(3), Tensor([1.0])])
    assert not optim.all_finite([np.ones(3), Tensor(np.array([np.nan], np.float16))])


@pytest.mark.parametrize("value", [np.nan, 60000.0])
def test_nonfinite_scaled_loss_names_the_scale(value):
    x = leaf(dtype=np.float16)
    scaler = optim.GradScaler(optim.FixedLossScaleManager(1024.0, drop_overflow_update=False))
    with refused(NonFiniteLossError):
        scaler.scale((x * value).sum()).backward()
    assert x.grad is None


def test_too_large_scale_is_lowered():
    """If overflowing steps are dropped, a scale that makes the loss infinite is lowered."""
    x = leaf(dtype=np.float16)
    optimizer, scaler = optim.SGD([x], 1.0), optim.GradScaler(optim.DynamicLossScaleManager(2.0**10))
    steps = []
    while not any(steps):
        optimizer.zero_grad()
        scaler.scale((x * 100.0).sum()).backward()  # past 65,504 from 2**10 on; silent: the suite's warnings are errors
        steps.append(scaler.step(optimizer))
        scaler.update()
    assert steps == [False, True]
    assert (x.item(), scaler.get_scale()) == (-99, 2.0**9)


def test_dropping_steps_does_not_hide_nan_loss():
    """No scale would mend it."""
    x = leaf(dtype=np.float16)
    with refused(NonFiniteLossError):
        optim.GradScaler().scale((x * np.nan).sum()).backward()
    assert x.grad is None


@pytest.mark.parametrize("scale", [None, 1.0])
def test_nan_loss_without_scale_names_no_scale(scale):  # red control: without a scale, the advice is not to lower it
    loss = (leaf() * np.nan).sum()
    if scale is not None:
        loss = optim.GradScaler(optim.FixedLossScaleManager(scale)).scale(loss)
    with refused(NonFiniteLossError):
        loss.backward()
