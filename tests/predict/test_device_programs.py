"""Every program of `programs.py` with `array="cupy"`: each op and each gradient of every rank gives NumPy's values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import array_backends
import numpy as np
import pytest
from programs import PROGRAMS

import simparallel as sp
from simparallel.arrays.cuda import arrays as cuda_arrays
from simparallel.arrays.host import arrays as host_arrays
from simparallel.autograd import Op
from simparallel.autograd.ops import conv
from simparallel.backend import to_host
from simparallel.errors import DeviceMismatchError, InputError, RunFailedError

# These name simulated devices, whose memory is the host's, or hand over gradients from the host.
REFUSED = {
    "data_parallel": DeviceMismatchError,
    "replicas": DeviceMismatchError,
    "layers_on_two_devices": DeviceMismatchError,
    "gradients_from_numpy": InputError,
}
# A GPU's pool rounds each array up to 512 bytes, so its limit of 2 KB is reached sooner than by the counted bytes.
SOONER_FULL = {"little_memory"}
# In host memory these cut their products for the cache, and BLAS adds products of another size in another order, as the
# processor has it.
OTHER_ORDER = ("ScaledDotProductAttention", "Conv")
# CuPy's operators return arrays in C order, where NumPy keeps that of their inputs; a sum follows the order of memory.
OTHER_MEMORY = {"recurrent[RNN]", "recurrent[LSTM]"}
_here = threading.local()


@pytest.fixture(autouse=True)
def noted_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note what every op computes, by rank; ranks are threads here."""
    forward, backward = Op.run_forward, Op.run_backward

    def note(name: str, arrays: Any) -> None:
        values = getattr(_here, "values", None)
        if values is not None:
            values += [(name, to_host(array).copy()) for array in arrays if array is not None]

    def run_forward(self: Op, ctx: Any, inputs: Any) -> Any:
        y = forward(self, ctx, inputs)
        note(self.name, [y])
        return y

    def run_backward(self: Op, ctx: Any, dy: Any) -> Any:
        grads = backward(self, ctx, dy)
        note(self.backward_name, grads)
        return grads

    monkeypatch.setattr(Op, "run_forward", run_forward)
    monkeypatch.setattr(Op, "run_backward", run_backward)
    yield
    _here.values = None


def noted(function: Any, args: tuple[Any, ...]) -> list[tuple[str, np.ndarray]]:
    _here.values = []
    with np.errstate(all="ignore"):
        function(*args)
    return _here.values


@pytest.fixture
def host_like_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host and a GPU take the same methods.

    Winograd's method, which only the host takes, has another rounding, and so have sums and products that only a GPU
    takes.
    """
    monkeypatch.setattr(conv, "WINOGRAD_CHANNELS", sys.maxsize)
    monkeypatch.setattr(cuda_arrays.CudaArrays, "has_fast_taps", True)
    monkeypatch.setattr(cuda_arrays, "MANY_ROWS", sys.maxsize)
    monkeypatch.setattr(host_arrays, "MANY_ROWS", sys.maxsize)


@pytest.mark.matrices
@pytest.mark.usefixtures("host_like_gpu")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED.keys() | SOONER_FULL])
def test_every_value_of_a_program_equals_numpys(arrays: Any, name: str) -> None:
    function, args, world_size, described = PROGRAMS[name]
    settings = {"world_size": world_size, "transport": "inline", "echo": False, **described}
    expected = sp.launch(noted, (function, args), **settings)
    found = sp.launch(noted, (function, args), **settings, **arrays.run_settings)
    for ours, theirs in zip(found, expected, strict=True):
        is_other = name in OTHER_MEMORY or any(op.startswith(OTHER_ORDER) for op, _ in theirs)
        is_near = arrays.is_exact and is_other
        assert_near(ours, theirs, arrays.reordered() if is_near else arrays, name)


def assert_near(ours: list[Any], theirs: list[Any], arrays: Any, name: str) -> None:
    assert [op for op, _ in ours] == [op for op, _ in theirs]
    for (op, value), (_, numpys) in zip(ours, theirs, strict=True):
        arrays.after(100 * arrays.steps).assert_equal(value, numpys, f"{name}: {op}")


@pytest.mark.matrices
@pytest.mark.usefixtures("host_like_gpu")
def test_rounding_is_told_from_errors() -> None:
    """Within the tolerances of a GPU, values may be rounded otherwise; red control: an op may not be 5% wrong."""
    name = "modules[resnet18]"
    function, args, *_ = PROGRAMS[name]
    settings = {"world_size": 1, "transport": "inline", "echo": False}
    expected = sp.launch(noted, (function, args), **settings)[0]
    for wrong in ("", "BatchNorm"):
        with array_backends.other_rounding(wrong, 0.05):
            found = sp.launch(noted, (function, args), array="cupy", **settings)[0]
        with pytest.raises(AssertionError) if wrong else nullcontext():
            assert_near(found, expected, array_backends.ArrayBackend("cupy"), name)


@pytest.mark.parametrize("name", REFUSED)
def test_program_of_simulated_devices_is_refused(arrays: Any, name: str) -> None:
    """In words, not by an error from inside of an op."""
    function, args, world_size, described = PROGRAMS[name]
    with pytest.raises(RunFailedError) as caught:
        sp.launch(function, args, world_size=world_size, transport="inline", **described, **arrays.run_settings)
    assert type(caught.value.__cause__) is REFUSED[name]
