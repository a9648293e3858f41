"""Changing the settings of a batch norm after its construction."""

import copy

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.autograd import Tensor
from simparallel.errors import InputError
from simparallel.parallel import DataParallel, SyncBatchNorm

SETTINGS = {
    "eps": st.sampled_from([1e-5, 0.5, 3]),
    "momentum": st.sampled_from([0.1, 0.5, None]),
    "track_running_stats": st.booleans(),
}


def batch(seed):
    return np.random.default_rng(seed).standard_normal((6, 3))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, SyncBatchNorm])
@given(first=st.fixed_dictionaries(SETTINGS), second=st.fixed_dictionaries(SETTINGS), train=st.booleans())
def test_changed_setting_takes_effect(kind, first, second, train):
    """A batch norm used before follows NumPy with its new settings, and so do its copies."""
    norm = kind(3, **first, dtype=np.float64)
    norm(batch(0))
    for name, value in second.items():
        setattr(norm, name, value)
    norm.train(train)
    before = {name: b.numpy().copy() for name, b in norm.named_buffers()}
    x = batch(1)
    for layer in (copy.deepcopy(norm), norm):
        tracked = second["track_running_stats"] and bool(before)
        is_batch = train or not tracked
        mean = x.mean(0) if is_batch else before["running_mean"]
        var = x.var(0) if is_batch else before["running_var"]
        y = layer(x)

        np.testing.assert_allclose(y.numpy(), (x - mean) / np.sqrt(var + second["eps"]), rtol=1e-9, atol=1e-12)
        for name, buffer in layer.named_buffers():
            if not (train and tracked):
                np.testing.assert_array_equal(buffer.numpy(), before[name])
        if train and tracked:
            count = before["num_batches_tracked"] + 1
            share = second["momentum"] or 1 / count
            assert layer.num_batches_tracked.item() == count
            np.testing.assert_allclose(
                layer.running_mean.numpy(), (1 - share) * before["running_mean"] + share * x.mean(0)
            )


def test_forgetting_needs_running_statistics_only():
    norm = nn.BatchNorm1d(3)
    norm(batch(0))
    norm.track_running_stats = False
    norm.reset_running_stats()
    assert not norm.running_mean.numpy().any()
    without = nn.BatchNorm1d(3, track_running_stats=False)
    without.track_running_stats = True
    without.reset_parameters()
    assert without.running_mean is None


@pytest.mark.parametrize("tracking", [False, True])
def test_replicas_use_current_settings(tracking):
    """Replicas and converted layers use the settings at the time of the call."""

    def program():
        net = nn.Sequential(nn.BatchNorm1d(3))
        net[0].eps, net[0].track_running_stats = 0.5, tracking
        y = DataParallel(net, [0, 1])(Tensor(batch(0)))
        parts = [(x - x.mean(0)) / np.sqrt(x.var(0) + 0.5) for x in (batch(0)[:3], batch(0)[3:])]
        np.testing.assert_allclose(y.numpy(), np.concatenate(parts), rtol=1e-6)
        assert net[0].num_batches_tracked.item() == tracking

        SyncBatchNorm.convert_sync_batchnorm(net)
        net(Tensor(batch(1)))
        np.testing.assert_allclose(
            net(Tensor(batch(1))).numpy(), (batch(1) - batch(1).mean(0)) / np.sqrt(batch(1).var(0) + 0.5), rtol=1e-6
        )
        return net[0].num_batches_tracked.item()

    assert sp.launch(program, world_size=1, transport="inline", devices_per_rank=2) == [3 * tracking]


@pytest.mark.parametrize("name", ["mean", "var"])
def test_mean_and_variance_come_together(name: str) -> None:
    with refused(InputError):
        sp.functions.batch_norm(np.ones((4, 3), np.float32), **{name: np.ones(3, np.float32)})
