"""The memory pool of a rank on a GPU: its limit, its error, its peak; ranks and runs do not share it."""

from __future__ import annotations

from typing import Any

import array_backends
import numpy as np
import pytest
from gpu_facts import needs_cupy, own_names
from hypothesis import given, strategies as st
from refusals import refused
from stand_in import strict, strict_cuda, strict_memory

import simparallel as sp
from simparallel.arrays.captures import running
from simparallel.arrays.cuda import memory as gpu_memory
from simparallel.arrays.cuda.memory import use_memory
from simparallel.backend import get_namespace
from simparallel.errors import DeviceOutOfMemoryError


def rounded(size: int) -> int:
    return -(-size // 512) * 512


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=20), st.integers(1, 12_000))
def test_pool_counts_its_live_arrays(steps: list[tuple[int, bool]], limit: int) -> None:
    pool, alive = strict_cuda.MemoryPool(), []
    pool.set_limit(size=limit)
    for size, frees in steps:
        try:
            alive.append((pool.malloc(size), rounded(size)))
        except strict_memory.OutOfMemoryError:
            assert sum(held for _, held in alive) + rounded(size) > limit
        if frees and alive:
            alive.pop(0)
        assert pool.used_bytes() == sum(held for _, held in alive) <= pool.total_bytes() <= limit
        assert pool.free_bytes() == pool.total_bytes() - pool.used_bytes()
    alive.clear()
    pool.free_all_blocks()
    assert pool.total_bytes() == 0


def test_views_and_outputs_share_their_memory() -> None:
    with use_memory(strict_cuda, 0) as memory:
        x = strict.xp.zeros(1000)
        views = [x[3:], x.reshape(10, 100), strict.xp.add(x, 1.0, out=x)]
        x += 1.0
        assert memory.taken_bytes == rounded(8000)
        y = x + 1.0
        assert memory.taken_bytes == 2 * rounded(8000)
        del x, y
        assert not memory.is_empty()
        assert memory.taken_bytes == rounded(8000)  # the views keep it
        views.clear()
        assert memory.is_empty()


def test_array_beyond_the_limit_is_refused() -> None:
    with use_memory(strict_cuda, 0) as memory:
        memory.limit_to(10_000)
        x = strict.xp.zeros(1000)
        with refused(DeviceOutOfMemoryError, needed_bytes=8000, limit_bytes=10_000, pool_bytes=8192, live={}):
            strict.xp.zeros(1000)
        del x
        strict.xp.zeros(1000)  # red control: there is room again
        assert memory.peak_bytes == 8192
        memory.limit_to(None)


def test_limit_of_cupy_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPY_GPU_MEMORY_LIMIT gives each new pool a limit."""
    monkeypatch.setattr(strict_cuda.MemoryPool, "get_limit", lambda pool: 10_000)
    monkeypatch.setattr(gpu_memory, "_idle", {})
    with use_memory(strict_cuda, 0) as memory:
        for limit_bytes, expected in ((None, 10_000), (2_000, 2_000), (None, 10_000)):
            memory.limit_to(limit_bytes)
            assert memory.limit_bytes == expected


def test_pool_of_an_ended_run_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_idle", {})
    with use_memory(strict_cuda, 0) as first:
        strict.xp.zeros(1000)
        assert first.peak_bytes == 8192
    with use_memory(strict_cuda, 0) as second:
        assert second is first
        assert second.taken_bytes == second.peak_bytes == 0
        kept = strict.xp.zeros(1000)
    # A warm rank may keep arrays: the next run has a pool without them.
    with use_memory(strict_cuda, 0) as third:
        assert third is not first
        assert third.taken_bytes == 0
    assert kept.nbytes == 8000


def fill(num_arrays: int) -> tuple[str, int | None]:
    """Hold arrays that the recorder does not count."""
    x = sp.Tensor(np.zeros(250_000, np.float32))
    held = [x.data + float(i) for i in range(num_arrays * (1 + sp.get_rank()))]
    gpu = running.device
    return type(held[0]).__name__, None if gpu is None else gpu.memory.limit_bytes


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_limit_of_a_run_is_that_of_each_rank(arrays: Any, transport: str) -> None:
    """Two ranks that share a GPU hold 4 and 7 MB."""
    settings = {"world_size": 2, "transport": transport, **arrays.run_settings}
    results = sp.launch(fill, (3,), device_memory="8MB", **settings)
    assert [limit for _, limit in results] == [8_000_000] * 2
    peaks = [results.memory[rank]["measured"]["peak_bytes"] for rank in range(2)]
    assert 4_000_000 <= peaks[0] < 7_000_000 <= peaks[1] <= 8_000_000
    assert {results.memory[rank]["measured"]["limit_bytes"] for rank in range(2)} == {8_000_000}
    with pytest.raises(sp.errors.RunFailedError) as found:
        sp.launch(fill, (5,), device_memory="8MB", **settings)
    assert found.value.rank == 1
    assert "rank 1: the GPU has no room for another 1 MB" in str(found.value)


def test_run_without_a_gpu_measures_no_pool() -> None:
    assert "measured" not in sp.launch(fill, (1,), world_size=1, transport="inline").memory[0]


class Wide(sp.nn.Module):
    def forward(self, x: Any) -> Any:
        xp = get_namespace(x.data)
        return [xp.zeros(300_000, np.float32) for _ in range(3)]


def call_layer() -> None:
    model = sp.nn.Sequential(sp.nn.Linear(4, 4), Wide())
    with refused(DeviceOutOfMemoryError, limit_bytes=2_000_000, layer="1"):
        model(sp.Tensor(np.ones((2, 4), np.float32)))


def test_error_names_the_layer_and_what_is_held() -> None:
    sp.launch(call_layer, world_size=1, transport="inline", array="cupy", device_memory="2MB")


def train() -> None:
    model = sp.nn.Sequential(sp.nn.Linear(64, 128), sp.nn.ReLU(), sp.nn.Linear(128, 10))
    optimizer = sp.optim.Adam(model.parameters())
    images, labels = sp.data.digits("train")[:64]
    for _ in range(2):
        loss = sp.functions.cross_entropy(model(sp.Tensor(images)), labels)
        optimizer.zero_grad()
        loss.backward(check_finite=False)
        optimizer.step()


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_pool_has_at_least_the_counted_bytes(arrays: Any, transport: str) -> None:
    memory = sp.launch(train, world_size=1, transport=transport, **arrays.run_settings).memory[0]
    assert memory["peak_bytes"] <= memory["measured"]["peak_bytes"] < 10 * memory["peak_bytes"]


def lower_the_limit() -> None:
    sp.set_memory("1MB")
    with refused(DeviceOutOfMemoryError, limit_bytes=1_000_000):
        fill(1)


def test_program_may_lower_the_limit() -> None:
    sp.launch(lower_the_limit, world_size=1, transport="inline", array="cupy")


@needs_cupy
def test_pools_of_cupy_have_these_names() -> None:
    cuda = pytest.importorskip("cupy", minversion="14.2").cuda
    assert own_names(strict_cuda.MemoryPool) <= own_names(cuda.MemoryPool)
    error = cuda.memory.OutOfMemoryError(1, 2, 3)
    assert isinstance(error, MemoryError)
    assert callable(cuda.Memory)
    assert callable(cuda.MemoryPointer)

    def refuse(size: int) -> Any:
        raise DeviceOutOfMemoryError("no room")

    cuda.MemoryPool(refuse)
    with cuda.using_allocator(refuse):
        assert cuda.get_allocator() is refuse
    assert cuda.get_allocator() is not refuse
