"""Optimizers and schedulers beside PyTorch (the extra "bench"): drawn settings, many steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from simparallel import optim
from simparallel.autograd import Tensor

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
from oracles_torch import assert_near, generator  # noqa: E402

STEPS = 60
TORCH_OF = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
TORCH_OF |= {
    name: getattr(torch.optim, name) for name in ("RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")
}
rates = st.floats(1e-3, 0.5)
decays = st.sampled_from([0.0, 1e-2, 0.3])
flags = st.booleans()
shares = st.floats(0.0, 0.99)
# An eps that counts: a quotient by a rounding error matches nothing.
epsilons = st.sampled_from([1e-8, 1e-3])
adams = st.fixed_dictionaries(
    {
        "lr": rates, "betas": st.tuples(shares, st.floats(0.5, 0.999)), "eps": epsilons, "weight_decay": decays,
        "amsgrad": flags, "maximize": flags,
    }
)  # fmt: skip
SETTINGS = {
    "Adam": adams,
    "AdamW": adams,
    "SGD": st.fixed_dictionaries(
        {"lr": rates, "momentum": shares, "dampening": shares, "weight_decay": decays, "maximize": flags}
    )
    | st.fixed_dictionaries(
        {"lr": rates, "momentum": st.floats(0.1, 0.99), "nesterov": st.just(True), "maximize": flags}
    ),
    "RMSprop": st.fixed_dictionaries(
        {
            "lr": rates,
            "alpha": st.floats(0.5, 0.99),
            "eps": epsilons,
            "weight_decay": decays,
            "maximize": flags,
            "momentum": st.just(0.0) | shares,
            "centered": flags,
        }
    ),
    "Adagrad": st.fixed_dictionaries(
        {
            "lr": rates, "lr_decay": decays, "weight_decay": decays, "initial_accumulator_value": decays,
            "eps": st.sampled_from([1e-10, 1e-3]), "maximize": flags,
        }
    ),
    "Adadelta": st.fixed_dictionaries(
        {"lr": rates, "rho": shares, "eps": st.sampled_from([1e-6, 1e-3]), "weight_decay": decays, "maximize": flags}
    ),
    "Adamax": st.fixed_dictionaries(
        {
            "lr": rates, "betas": st.tuples(shares, st.floats(0.5, 0.999)), "eps": epsilons, "weight_decay": decays,
            "maximize": flags,
        }
    ),
    "NAdam": st.fixed_dictionaries(
        {
            "lr": rates, "betas": st.tuples(shares, st.floats(0.5, 0.999)), "eps": epsilons, "weight_decay": decays,
            "momentum_decay": decays, "decoupled_weight_decay": flags, "maximize": flags,
        }
    ),
    "RAdam": st.fixed_dictionaries(
        {
            "lr": rates, "betas": st.tuples(shares, st.floats(0.5, 0.999)), "eps": epsilons, "weight_decay": decays,
            "decoupled_weight_decay": flags, "maximize": flags,
        }
    ),
}  # fmt: skip


def leaf(values):
    return Tensor(values.copy(), requires_grad=True)


def their_leaf(values):
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize("name", SETTINGS)
@given(draw=st.data())
@settings(max_examples=15)
def test_steps_agree_with_torch(name, draw):
    """Weights after each of 60 steps, each from a gradient of the weights; float64."""
    tolerance = 1e-6 if name == "NAdam" else 1e-8  # PyTorch keeps the product of its momenta in float32
    chosen, seed = draw.draw(SETTINGS[name]), draw.draw(st.integers(0, 99))
    rng = generator(seed)
    start = [rng.standard_normal((3, 2)), rng.standard_normal(5)]
    ours, theirs = [leaf(x) for x in start], [their_leaf(x) for x in start]
    optimizer, their_optimizer = getattr(optim, name)(ours, **chosen), TORCH_OF[name](theirs, **chosen)
    for step in range(STEPS):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            grad = rng.standard_normal(one.shape)
            skipped = i == 1 and step % 7 == 3
            one.grad = None if skipped else Tensor(grad)
            other.grad = None if skipped else torch.tensor(grad)
        optimizer.step()
        their_optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assume(np.abs(one.numpy()).max() < 1e6)  # momentum .99 and lr .5 diverge, and amplify rounding
            assert_near(one, other.detach(), tolerance)
    saved, their_saved = optimizer.state_dict(), their_optimizer.state_dict()
    for number, values in saved["state"].items():
        their_values = {k: v for k, v in their_saved["state"][number].items() if v is not None}
        assert set(values) == set(their_values)
        for key, value in values.items():
            np.testing.assert_allclose(value, their_values[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_torch_defaults(name):
    """PyTorch's further settings (foreach, fused, …) choose the implementation only."""
    ours, theirs = getattr(optim, name)([leaf(np.ones(1))]), TORCH_OF[name]([their_leaf(np.ones(1))])
    assert ours.defaults == {key: theirs.defaults[key] for key in ours.defaults}
    assert repr(ours).splitlines()[:2] == repr(theirs).splitlines()[:2]
    assert set(repr(ours).splitlines()) <= {line.replace(": 0\n", ": 0.0\n") for line in as_floats(repr(theirs))}


def as_floats(text):
    """Return lines with floats; PyTorch prints some defaults of 0 as integers."""
    return [line + ".0" if line.endswith(": 0") else line for line in text.splitlines()]


@given(seed=st.integers(0, 99), lr=st.floats(0.01, 0.1))
@settings(max_examples=10)
def test_step_with_a_closure_agrees_with_torch(seed, lr):
    start = generator(seed).standard_normal(4)
    ours, theirs = leaf(start), their_leaf(start)
    optimizer, their_optimizer = optim.Adam([ours], lr), torch.optim.Adam([theirs], lr)

    def closure(param, optimizer):
        def compute():
            optimizer.zero_grad()
            loss = (param * param).sum()
            loss.backward()
            return loss

        return compute

    for _ in range(10):
        loss = optimizer.step(closure(ours, optimizer))
        their_loss = their_optimizer.step(closure(theirs, their_optimizer))
        assert loss.item() == pytest.approx(their_loss.item(), rel=1e-9)
    assert_near(ours, theirs.detach(), 1e-9)


# --- schedulers --------------------------------------------------------------------------------------

counts = st.integers(1, 12)
gammas = st.floats(0.1, 1.2)
factors = st.floats(0.05, 1.0)
# Schedulers that start from the current rate, and so can be combined.
RELATIVE = {
    "StepLR": st.fixed_dictionaries({"step_size": counts, "gamma": gammas}),
    "MultiStepLR": st.fixed_dictionaries({"milestones": st.lists(st.integers(0, 30), max_size=4), "gamma": gammas}),
    "ExponentialLR": st.fixed_dictionaries({"gamma": gammas}),
    "LinearLR": st.fixed_dictionaries(
        {"start_factor": factors, "end_factor": st.floats(0.01, 1), "total_iters": counts}
    ),
    "CosineAnnealingLR": st.fixed_dictionaries({"T_max": st.integers(2, 12), "eta_min": st.floats(0, 1e-3)}),
    "ConstantLR": st.fixed_dictionaries({"factor": factors, "total_iters": counts}),
    "PolynomialLR": st.fixed_dictionaries({"total_iters": counts, "power": st.floats(0.1, 3)}),
}
SCHEDULERS = RELATIVE | {
    "LambdaLR": st.fixed_dictionaries({"lr_lambda": st.just(lambda t: 1 / (1 + t))}),
    "CosineAnnealingWarmRestarts": st.fixed_dictionaries(
        {"T_0": counts, "T_mult": st.integers(1, 3), "eta_min": st.floats(0, 1e-3)}
    ),
}
drawn = st.sampled_from(sorted(SCHEDULERS)).flatmap(lambda name: st.tuples(st.just(name), SCHEDULERS[name]))


def optimizers(lrs, kind="SGD", **more):
    """Make our optimizer and PyTorch's, with a group for each rate."""
    ours = [{"params": [leaf(np.ones(1))], "lr": lr, **more} for lr in lrs]
    theirs = [{"params": [their_leaf(np.ones(1))], "lr": lr, **more} for lr in lrs]
    return getattr(optim, kind)(ours), getattr(torch.optim, kind)(theirs)


def their_scheduler(name):
    return getattr(torch.optim.lr_scheduler, name)


def check_rates(ours, theirs):
    for group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert group["lr"] == pytest.approx(their_group["lr"], rel=1e-9, abs=1e-12)


@given(lrs=st.lists(rates, min_size=1, max_size=3), scheduler=drawn, by_hand=st.sets(st.integers(0, 30)))
def test_schedulers_agree_with_torch(lrs, scheduler, by_hand):
    """Also where the rate is set by hand in between."""
    name, chosen = scheduler
    ours, theirs = optimizers(lrs)
    mine, other = getattr(optim.lr_scheduler, name)(ours, **chosen), their_scheduler(name)(theirs, **chosen)
    for step in range(30):
        check_rates(ours, theirs)
        assert mine.last_epoch == other.last_epoch == step
        if step in by_hand:
            ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.125
        theirs.step()
        mine.step()
        other.step()


FACTORS = {**RELATIVE, "CosineAnnealingLR": st.fixed_dictionaries({"T_max": st.integers(2, 12)})}
several = st.lists(
    st.sampled_from(sorted(FACTORS)).flatmap(lambda name: st.tuples(st.just(name), FACTORS[name])),
    min_size=2,
    max_size=3,
)


@given(lr=rates, schedulers=several)
def test_several_schedulers_at_once_agree_with_torch(lr, schedulers):
    """The usual way to write a warm-up times a decay."""
    # Two cosines add up at their lowest points, and go below 0.
    assume(sum(name == "CosineAnnealingLR" for name, _ in schedulers) < 2)
    ours, theirs = optimizers([lr])
    mine = [getattr(optim, name)(ours, **chosen) for name, chosen in schedulers]
    others = [their_scheduler(name)(theirs, **chosen) for name, chosen in schedulers]
    for _ in range(25):
        check_rates(ours, theirs)
        assume(ours.param_groups[0]["lr"] > 1e-9)  # a cosine that turns at its lowest point amplifies rounding as well
        theirs.step()
        for one in (*mine, *others):
            one.step()


@given(lr=rates, scheduler=drawn, done=st.integers(0, 20), order=st.permutations(["optimizer", "scheduler"]))
def test_scheduler_made_after_loading_continues(lr, scheduler, done, order):
    """PyTorch's rates without a stop are the expected ones."""
    name, chosen = scheduler
    ours, theirs = optimizers([lr, lr / 2])
    mine, other = getattr(optim, name)(ours, **chosen), their_scheduler(name)(theirs, **chosen)
    for _ in range(done):
        theirs.step()
        mine.step()
        other.step()
    saved = {"optimizer": ours.state_dict(), "scheduler": mine.state_dict()}
    resumed, _ = optimizers([0.9, 0.9])
    late = order[0] == "optimizer"
    if late:
        resumed.load_state_dict(saved["optimizer"])
    goes_on = getattr(optim, name)(resumed, **chosen)
    for part in order[late:]:
        {"optimizer": resumed, "scheduler": goes_on}[part].load_state_dict(saved[part])
    for _ in range(10):
        check_rates(resumed, theirs)
        assert goes_on.get_last_lr() == mine.get_last_lr()
        theirs.step()
        for one in (mine, other, goes_on):
            one.step()


@given(lr=rates, scheduler=drawn, done=st.integers(0, 15))
def test_last_epoch_agrees_with_torch(lr, scheduler, done):
    """Some of PyTorch's schedulers start from the rate at `last_epoch`, others from the rate after it."""
    name, chosen = scheduler
    ours, theirs = optimizers([lr])
    mine, other = getattr(optim, name)(ours, **chosen), their_scheduler(name)(theirs, **chosen)
    for _ in range(done + 1):
        theirs.step()
        other.step()
        mine.step()
    ours.param_groups[0]["lr"] = 0.3  # any value
    again = getattr(optim, name)(ours, **chosen, last_epoch=done)
    assert again.last_epoch == done + 1
    for _ in range(5):
        check_rates(ours, theirs)
        theirs.step()
        other.step()
        again.step()


cycles = st.fixed_dictionaries(
    {
        "max_lr": rates, "total_steps": st.integers(2, 40), "pct_start": st.floats(0, 1),
        "anneal_strategy": st.sampled_from(["cos", "linear"]), "three_phase": flags, "cycle_momentum": flags,
        "base_momentum": st.floats(0.1, 0.9), "max_momentum": st.floats(0.1, 0.95),
        "div_factor": st.floats(1, 50), "final_div_factor": st.floats(1, 1e4),
    }
)  # fmt: skip


@given(kind=st.sampled_from(["SGD", "Adam", "RMSprop"]), chosen=cycles, cut=st.integers(0, 40))
def test_one_cycle_agrees_with_torch(kind, chosen, cut):
    """In all steps of the cycle; also from a state in the middle, and from `last_epoch`."""
    total, turn = chosen["total_steps"], chosen["pct_start"] * chosen["total_steps"]
    ends = [0, turn - 1, *([2 * turn - 2] if chosen["three_phase"] else []), total - 1]
    assume(all(abs(a - b) > 1e-6 for i, a in enumerate(ends) for b in ends[:i]))  # PyTorch divides by their difference
    assume(not chosen["three_phase"] or chosen["pct_start"] <= 0.5)  # otherwise its phases overlap
    more = {} if kind == "Adam" else {"momentum": 0.5}
    ours, theirs = optimizers([0.1, 0.2], kind, **more)
    mine = optim.OneCycleLR(ours, **chosen)
    other = torch.optim.lr_scheduler.OneCycleLR(theirs, **chosen)
    for step in range(total):
        check_rates(ours, theirs)
        for group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True):
            name = "betas" if kind == "Adam" else "momentum"
            assert group[name] == pytest.approx(their_group[name], rel=1e-9)
        if step == min(cut, total - 1):
            optimizer, _ = optimizers([0.5, 0.5], kind, **more)
            fresh = optim.OneCycleLR(optimizer, **chosen)
            fresh.load_state_dict(mine.state_dict())
            assert settings_of(optimizer) == settings_of(ours)
            if step:
                optimizer.param_groups[0]["lr"] = 0.5
                optim.OneCycleLR(optimizer, **chosen, last_epoch=step - 1)
                assert settings_of(optimizer) == settings_of(ours)
        theirs.step()
        mine.step()
        if step < total - 1:
            other.step()


def settings_of(optimizer):
    return [{**group, "params": None} for group in optimizer.param_groups]


plateaus = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["min", "max"]), "factor": st.floats(0.1, 0.9), "patience": st.integers(0, 3),
        "threshold": st.sampled_from([0.0, 1e-4, 0.3]), "threshold_mode": st.sampled_from(["rel", "abs"]),
        "cooldown": st.integers(0, 3), "min_lr": st.floats(0, 0.1), "eps": st.sampled_from([0.0, 1e-8, 0.05]),
    }
)  # fmt: skip
told = st.lists(
    st.sampled_from([0.0, 1.0, 1.2, -1.0, -1.3, 3.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=30
)


@given(lrs=st.lists(rates, min_size=1, max_size=2), chosen=plateaus, numbers=told, cut=st.integers(0, 30))
def test_plateaus_agree_with_torch(lrs, chosen, numbers, cut):
    ours, theirs = optimizers(lrs)
    mine = optim.ReduceLROnPlateau(ours, **chosen)
    other = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, **chosen)
    for i, number in enumerate(numbers):
        if i == cut:
            saved, state = ours.state_dict(), mine.state_dict()
            ours, _ = optimizers([0.7] * len(lrs))
            ours.load_state_dict(saved)
            mine = optim.ReduceLROnPlateau(ours, **chosen)
            mine.load_state_dict(state)
        mine.step(Tensor(np.array(number)))
        other.step(number)
        check_rates(ours, theirs)
        for name in ("last_epoch", "num_bad_epochs", "cooldown_counter", "best"):
            assert getattr(mine, name) == getattr(other, name)
