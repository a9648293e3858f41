"""The memory account of a device, and its limit."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.clock.memory import CATEGORIES, MemoryAccount, parse_bytes
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import DeviceOutOfMemoryError, InputError
from simparallel.machine.cluster import describe


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(CATEGORIES)), max_size=20), st.randoms())
def test_account_is_the_sum_of_live_arrays(sizes, random):
    account = MemoryAccount()
    alive, largest = [], 0
    for size, category in sizes:
        alive.append((np.empty(size, np.uint8), category))
        account.hold(*alive[-1])
        largest = max(largest, sum(array.nbytes for array, _ in alive))
        if random.random() < 0.4:
            del alive[random.randrange(len(alive))]

    for category in CATEGORIES:
        assert account.live[category] == sum(array.nbytes for array, held in alive if held == category)
    assert account.total == sum(account.live.values())
    assert account.peak == largest
    assert sum(account.at_peak.values()) == account.peak


def test_views_cost_nothing_and_keep_their_owner():
    account = MemoryAccount()
    owner = np.empty((10, 4), np.float32)
    view = owner.T[2:]
    account.hold(view, "gradients")
    account.hold(owner, "activations")
    assert account.live["gradients"] == 160
    assert account.total == 160
    account.hold(owner, "activations", move=True)
    assert account.live == {**dict.fromkeys(CATEGORIES, 0), "activations": 160}
    del owner
    assert account.total == 160
    del view
    assert account.total == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64_000_000), ("64MiB", 64 << 20), ("1.5 GB", 1_500_000_000), (10, 10), ("10", 10), ("2kb", 2000)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", 0, "1e400", "much", "nan", None])
def test_bad_sizes_are_refused(text):
    with refused(InputError):
        parse_bytes(text)


def step(net, batch_size):
    loss = sp.functions.cross_entropy(net(sp.Tensor(np.ones((batch_size, 8), np.float32))), np.zeros(batch_size, int))
    loss.backward()
    return loss


def test_training_step_is_counted_and_freed():
    with use_recorder(Recorder(0, describe(1))) as recorder:
        assert recorder is not None
        net = sp.nn.Sequential(sp.nn.Linear(8, 16), sp.nn.ReLU(), sp.nn.Linear(16, 4))
        parameter_bytes = sum(p.data.nbytes for p in net.parameters())
        assert recorder.memory.live["parameters"] == parameter_bytes
        step(net, 32)
        gc.collect()
        assert recorder.memory.live["gradients"] == parameter_bytes
        assert recorder.memory.live["activations"] == 0
        assert recorder.memory.at_peak["activations"] >= 32 * 16 * 4
        net.zero_grad()
        del net
        gc.collect()
        assert recorder.memory.total == 0


def test_backward_releases_activations():
    with use_recorder(Recorder(0, describe(1))) as recorder:
        assert recorder is not None
        x = sp.Tensor(np.ones(1000), requires_grad=True)
        y = x
        for _ in range(10):
            y = y.exp().log()
        held = recorder.memory.live["activations"]
        assert held == 11 * 8000  # what exp gave and log has read, and the last result
        loss = y.sum()
        loss.backward()
        assert recorder.memory.live["activations"] <= 8000 + 8  # of activations that are still referenced
        del y, loss
        assert recorder.memory.live["activations"] == 0
        assert recorder.memory.peak < held + 6 * 8000  # not twice the activations


def test_limit_is_checked_before_allocation():
    """The error gives the breakdown of the memory and the layer."""
    memory_bytes = 40_000
    with use_recorder(Recorder(3, describe(4), memory_bytes=memory_bytes)) as recorder:
        assert recorder is not None
        net = sp.nn.Sequential(sp.nn.Linear(8, 16), sp.nn.ReLU(), sp.nn.Linear(16, 4))
        step(net, 10)
        with refused(DeviceOutOfMemoryError) as caught:
            step(net, 1000)
        assert caught.value.limit_bytes == memory_bytes
        assert caught.value.live["parameters"] > 0
        assert caught.value.layer == "0"
        assert recorder.memory.total <= memory_bytes


def test_convolution_scratch_memory_is_counted():
    """Scratch memory of convolutions is counted, and freed with the account."""

    def convolve(size):
        x = np.ones((4, 16, size, size), np.float32)
        return sp.functions.conv2d(x, np.ones((16, 16, 3, 3), np.float32), padding=1)

    outside = convolve(12).numpy()
    recorder = Recorder(0, describe(1))
    with use_recorder(recorder):
        inside = convolve(12).numpy()
        after_one = recorder.memory.live["buffers"]
        convolve(12)
        assert recorder.memory.live["buffers"] == after_one == sum(a.nbytes for a in recorder.memory.scratch.values())
        convolve(24)
        assert recorder.memory.live["buffers"] > after_one > 0
    np.testing.assert_array_equal(inside, outside)
    with use_recorder(Recorder(0, describe(1), memory_bytes=200_000)) as small:
        with refused(DeviceOutOfMemoryError):
            convolve(12)
        assert small is not None
        assert small.memory.total <= 200_000


def fill(batch_size):
    net = sp.parallel.DistributedDataParallel(sp.nn.Sequential(sp.nn.Linear(8, 16), sp.nn.ReLU(), sp.nn.Linear(16, 4)))
    for _ in range(2):
        net.zero_grad()
        step(net, batch_size)


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_ranks_report_their_memory(transport):
    results = sp.launch(fill, (10,), world_size=2, transport=transport, device_memory="1MB", echo=False)
    parameter_bytes = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    for rank in range(2):
        memory = results.memory[rank]
        assert memory["limit_bytes"] == 10**6
        assert memory["at_peak"]["parameters"] == parameter_bytes
        assert memory["at_peak"]["gradients"] >= parameter_bytes


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_device_out_of_memory_fails_the_run(transport):
    with pytest.raises(sp.errors.RunFailedError) as caught:
        sp.launch(fill, (2000,), world_size=2, transport=transport, device_memory="100KB", echo=False)
    assert isinstance(caught.value.__cause__, DeviceOutOfMemoryError)


def test_limit_below_live_memory_is_refused() -> None:
    with use_recorder(Recorder(0, describe(1))) as recorder:
        layer = sp.nn.Linear(100, 10)
        with refused(DeviceOutOfMemoryError) as caught:
            sp.set_memory("1KB")
        assert caught.value.facts["needed_bytes"] == sum(p.nbytes for p in layer.parameters()) == 4040
        assert recorder.memory.limit_bytes is None
        sp.set_memory("5KB")
        assert recorder.memory.limit_bytes == 5000


def test_own_tensors_count_towards_the_limit() -> None:
    """A hundred Tensors of 4 MB do not fit into 64 MB; their memory is freed with them."""
    with use_recorder(Recorder(0, describe(1), memory_bytes=64 * 10**6)) as recorder:
        kept = [sp.Tensor(np.zeros((1000, 1000), np.float32)) for _ in range(16)]
        with refused(DeviceOutOfMemoryError):
            sp.Tensor(np.zeros((1, 1), np.float32))
        assert recorder.memory.live["tensors"] == 64 * 10**6
        kept.clear()
        assert recorder.memory.total == 0
        samples = np.zeros((10**6, 100), np.float32)  # of the host
        batch = sp.Tensor(samples[:32])
        assert recorder.memory.live["tensors"] == batch.nbytes == 32 * 400


def test_gradients_count_towards_the_limit() -> None:
    """The parameters of a layer fit, its gradients do not: the error gives their size."""
    with use_recorder(Recorder(0, describe(1), memory_bytes=70_000)) as recorder:
        layer = sp.nn.Linear(100, 100)
        loss = layer(sp.Tensor(np.ones((1, 100), np.float32))).sum()
        with refused(DeviceOutOfMemoryError) as caught:
            loss.backward()
        assert caught.value.needed_bytes == 40_000
        assert recorder.memory.total <= 70_000
