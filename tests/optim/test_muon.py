"""Muon beside PyTorch's, and its matrices beside the singular value decomposition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel import optim
from simparallel.autograd import Tensor
from simparallel.errors import InputError
from simparallel.optim.muon import orthogonal

SIDES = st.integers(1, 6)
SETTINGS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.5), "weight_decay": st.sampled_from([0.0, 0.1]), "momentum": st.floats(0.0, 0.99),
        "nesterov": st.booleans(), "ns_steps": st.integers(0, 5),
        "ns_coefficients": st.sampled_from([(3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)]),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
    }
)  # fmt: skip


def trained(library, leaf, tensor, settings, shape, seed, steps=4):
    """Return the weights and the momentum after steps, the last one with a gradient of zeros."""
    rng = np.random.default_rng(seed)
    param = leaf(rng.standard_normal(shape))
    optimizer = library.Muon([param], **settings)
    for step in range(steps):
        param.grad = tensor(rng.standard_normal(shape) * (step < steps - 1))
        optimizer.step()
    return param.detach().numpy(), np.asarray(optimizer.state[param]["momentum_buffer"])


def ours(*args, dtype=np.float64):
    return trained(
        optim, lambda a: Tensor(a.astype(dtype), requires_grad=True), lambda a: Tensor(a.astype(dtype)), *args
    )


@given(SETTINGS, st.tuples(SIDES, SIDES), st.integers(0, 99))
def test_steps_agree_with_torch(chosen, shape, seed):
    """In float64: PyTorch multiplies in bfloat16, whose error is that of another test."""
    torch = pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        expected = trained(
            torch.optim, lambda a: torch.tensor(a, requires_grad=True), torch.tensor, chosen, shape, seed
        )
    for found, value in zip(ours(chosen, shape, seed), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (16, 16)])
def test_steps_are_near_those_in_bfloat16(shape):
    torch = pytest.importorskip("torch")
    start, _ = ours({"lr": 0.0}, shape, 0)

    def tensor(values, requires_grad=False):
        return torch.tensor(values, dtype=torch.float32, requires_grad=requires_grad)

    expected, _ = trained(torch.optim, lambda a: tensor(a, True), tensor, {"lr": 0.1}, shape, 0)
    found, _ = ours({"lr": 0.1}, shape, 0, dtype=np.float32)
    # bfloat16 has 8 bits.
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(found - start)


def test_settings_have_torch_defaults():
    torch = pytest.importorskip("torch")
    theirs = torch.optim.Muon([torch.zeros(1, 1)])
    assert optim.Muon([Tensor(np.ones((1, 1)), requires_grad=True)]).defaults == theirs.defaults


@given(st.tuples(SIDES, SIDES), st.integers(0, 99))
def test_singular_values_come_near_one(shape, seed):
    """Vectors stay; the coefficients of Newton and Schulz converge, those of Muon end in a band."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((side, side)))[0] for side in shape)
    s = np.zeros(shape)
    np.fill_diagonal(s, rng.uniform(0.1, 1, min(shape)))
    exact = u @ (s > 0) @ v.T
    np.testing.assert_allclose(orthogonal(u @ s @ v.T, (1.5, -0.5, 0.0), 40, 1e-7), exact, atol=1e-9)
    values = np.diagonal(u.T @ orthogonal(u @ s @ v.T, (3.4445, -4.7750, 2.0315), 5, 1e-7) @ v)
    assert np.all((values > 0.65) & (values < 1.25))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_nothing_to_divide_by(shape):
    param = Tensor(np.ones(shape, np.float32), requires_grad=True)
    optim.Muon([param], lr=0.1, weight_decay=0.5)([np.zeros(shape, np.float32)])
    np.testing.assert_array_equal(param.numpy(), np.full(shape, np.float32(0.95)))


@pytest.mark.parametrize(
    "settings",
    [
        {"ns_coefficients": (1.0, 2.0)}, {"ns_coefficients": (1.0, 2.0, np.nan)}, {"ns_steps": -1}, {"ns_steps": 2.5},
        {"adjust_lr_fn": "none"}, {"momentum": -0.1}, {"nesterov": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(settings):
    with refused(InputError):
        optim.Muon([Tensor(np.ones((1, 1)), requires_grad=True)], **settings)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 1)], ids=str)
def test_only_matrices(shape):
    with refused(InputError):
        optim.Muon([Tensor(np.ones(shape), requires_grad=True)])
