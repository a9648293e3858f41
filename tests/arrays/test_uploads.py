"""Batches of a run on a GPU: NumPy's bits, copied on a stream of their own, from memory that nothing else writes."""

from __future__ import annotations

from typing import Any

import array_backends
import numpy as np
import pytest
from array_backends import name_of
from gpu_facts import needs_cupy
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from stand_in import strict, strict_cuda
from stand_in.strict_cuda import StreamRaceError

import simparallel as sp
from simparallel.arrays.captures import running
from simparallel.arrays.cuda.device import Gpu

ON_GPU: dict[str, Any] = {"world_size": 1, "transport": "inline", "array": "cupy"}
DTYPES = st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.float16])


@given(st.lists(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0)), max_size=6), st.booleans())
def test_copies_have_the_values_of_then(arrays: list[np.ndarray], is_transposed: bool) -> None:
    gpu, copies, before = Gpu(0), [], [array.copy() for array in arrays]
    with gpu.compute:
        for array in arrays:
            copies.append(gpu.uploads.copy(array.T if is_transposed else array))
            # The caller goes on with its array.
            array[...] = 1
            copies[-1] == copies[-1]  # noqa: B015
        found = [copy.get() for copy in copies]
    for one, other in zip(found, before, strict=True):
        np.testing.assert_array_equal(one, other.T if is_transposed else other, strict=True)


def test_compute_stream_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control: without the event, the stand-in finds the race."""
    gpu = Gpu(0)
    with gpu.compute:
        gpu.uploads.copy(np.ones(3))
        monkeypatch.setattr(gpu.compute, "wait_event", lambda event: None)
        with pytest.raises(StreamRaceError):
            gpu.uploads.copy(np.ones(3))


def test_copy_waits_until_its_memory_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0)
    with gpu.compute:
        gpu.uploads.copy(np.ones(3))
        # The host knows of no operation that has ended.
        strict_cuda._known.clear()
        monkeypatch.setattr(gpu.copies, "wait_event", lambda event: None)
        monkeypatch.setattr(strict_cuda.Event, "done", True)
        with pytest.raises(StreamRaceError):
            gpu.uploads.copy(np.ones(3))


def test_pinned_memory_waits_for_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the GPU is late, every copy has a buffer of its own; later the buffers are reused."""
    gpu, is_done = Gpu(0), [False]
    monkeypatch.setattr(strict_cuda.Event, "done", property(lambda event: is_done[0]))
    with gpu.compute:
        for i in range(3):
            gpu.uploads.copy(np.full(100, i))
        (slots,) = gpu.uploads._slots.values()
        assert [slot.host[:8].view(np.int64).item() for slot in slots] == [0, 1, 2]
        is_done[0] = True
        gpu.uploads.copy(np.full(100, 3))
        assert [slot.host[:8].view(np.int64).item() for slot in slots] == [3, 1, 2]


class Samples:
    """Samples of two fields, one by one."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return np.full((2, 3), i, np.float32), {"label": i, "name": f"sample {i}"}


def loaders() -> dict[str, Any]:
    images, labels = sp.data.digits("train")[:22]
    digits = sp.data.TensorDataset(images.copy(), labels)
    rows = sp.data.NumpySlicesDataset((images, labels), ["image", "label"], shuffle=False)
    return {
        "shuffled": sp.data.DataLoader(digits, 4, shuffle=True, seed=3),
        "samples": sp.data.DataLoader(Samples(), 4),
        "own": sp.data.DataLoader(digits, 5, collate_fn=lambda samples: np.stack([x for x, _ in samples])),
        "rows": rows,
        "pipeline": rows.shuffle(8).map(lambda x: (x * 2).tolist(), "image").batch(4),
    }


def values_of(batch: Any) -> Any:
    if isinstance(batch, sp.Tensor):
        return batch.numpy(), batch.shape
    if isinstance(batch, dict):
        return {key: values_of(value) for key, value in batch.items()}
    return [values_of(value) for value in batch] if isinstance(batch, (tuple, list)) else batch


def epochs() -> dict[str, Any]:
    found: dict[str, Any] = {"kinds": set()}
    for name, loader in loaders().items():
        for epoch in range(2):
            for number, batch in enumerate(loader):
                found[f"{name} {epoch} {number}"] = values_of(batch), str(getattr(loader, "state_dict", dict)())
                fields = batch if isinstance(batch, tuple) else ()
                found["kinds"] |= {name_of(type(one.data)) for one in fields if isinstance(one, sp.Tensor)}
    return found


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_batches_are_numpys_bits(arrays: Any, transport: str) -> None:
    """Also check the loaders' positions in the middle of an epoch."""
    (host,), (gpu,) = (
        list(sp.launch(epochs, world_size=1, transport=transport, **settings)) for settings in ({}, arrays.run_settings)
    )
    assert (host.pop("kinds"), gpu.pop("kinds")) == ({"numpy.ndarray"}, {arrays.type_name})
    array_backends.ArrayBackend("strict").assert_all_equal(gpu, host)


def watched_epoch() -> tuple[list[str], set[str], int]:
    gpu = running.device
    assert gpu is not None
    streams, copy = [], strict_cuda.runtime.memcpyAsync

    def noted(*args: Any) -> None:
        streams.append("copies" if args[-1] == gpu.copies.ptr else "other")
        copy(*args)

    strict_cuda.runtime.memcpyAsync = noted
    images, labels = sp.data.digits("train")[:64]
    rows = sp.data.NumpySlicesDataset((images, labels), ["image", "label"])
    rows = rows.map(lambda x: (x * 2).tolist(), "image").batch(8)
    try:
        with strict.host_waits() as waits:
            for loader in (sp.data.DataLoader(sp.data.TensorDataset(images, labels), 8, shuffle=True), rows):
                for batch, _ in loader:
                    sp.functions.relu(batch)
    finally:
        strict_cuda.runtime.memcpyAsync = copy
    return waits, set(streams), len(streams)


def test_loaders_copy_beside_the_computation() -> None:
    """Copy two fields of 16 batches on the copy stream; the host waits for nothing."""
    assert sp.launch(watched_epoch, **ON_GPU)[0] == ([], {"copies"}, 32)


class FailsLate(Samples):
    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if i == 6:
            raise KeyError("sample 6")
        return super().__getitem__(i)


def read_until_it_fails() -> int:
    number = 0
    try:
        for _ in sp.data.DataLoader(FailsLate(), 2):
            number += 1
    except KeyError:
        return number
    return -1


def test_errors_come_at_the_same_batch() -> None:
    assert [sp.launch(read_until_it_fails, **{**ON_GPU, "array": array})[0] for array in ("numpy", "cupy")] == [3, 3]


def change_the_dataset() -> list[float]:
    images = np.zeros((6, 2), np.float32)
    seen = []
    for (batch,) in sp.data.DataLoader(sp.data.TensorDataset(images), 2):
        seen.append(float(batch.sum().item()))
        images += 1
    return seen


def test_program_may_change_what_comes_next() -> None:
    """No batch is read before the program asks for it."""
    host, gpu = (sp.launch(change_the_dataset, **{**ON_GPU, "array": array})[0] for array in ("numpy", "cupy"))
    assert host == gpu == [0.0, 4.0, 8.0]


@needs_cupy
def test_copies_of_cupy_have_these_names() -> None:
    cuda = pytest.importorskip("cupy", minversion="14.2").cuda
    signature = "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)"
    assert cuda.runtime.memcpyAsync.__doc__.startswith(signature)
    assert cuda.runtime.memcpyHostToDevice == strict_cuda.runtime.memcpyHostToDevice == 1
    assert cuda.alloc_pinned_memory.__doc__.startswith("alloc_pinned_memory(size_t size) -> PinnedMemoryPointer")
    assert hasattr(cuda.PinnedMemoryPointer, "ptr")
