"""The array libraries that stand for a GPU in tests: `strict`, a stand-in that runs everywhere, and CuPy on a real GPU.

A test takes the fixture `arrays`, or runs of `PLACES`. The case "cupy" has the mark `gpu`: `pytest -m gpu` runs these
cases, and without a GPU they are skipped with the reason. All other tests see a machine without GPUs, so that both
kinds run in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from stand_in import strict, strict_cuda

from simparallel import backend
from simparallel.autograd import Op
from simparallel.backend import Array, to_host

# Largest difference from NumPy on a real GPU, relative to the largest element: sums in another order, fused
# multiply-adds, and the GPU's own exp, log and tanh. Integers and bools are exact.
TOLERANCES = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2}
# Of a test on a GPU, and of the runs in it.
GPU_TIMEOUT_S = 900


def name_of(kind: type) -> str:
    """Return the full name of a type: the arrays of NumPy and CuPy are both called ndarray."""
    return f"{kind.__module__}.{kind.__qualname__}"


class ArrayBackend:
    """An array library, and how close its results are to NumPy's.

    Args:
        name: "strict" or "cupy".
        steps: how much more the results may differ, because several updates follow one another.
        is_exact: whether results are NumPy's bits; by default on the stand-in.
    """

    def __init__(self, name: str, steps: float = 1.0, is_exact: bool | None = None) -> None:
        self.name, self.steps = name, steps
        self.is_exact = name == "strict" if is_exact is None else is_exact

    @property
    def xp(self) -> Any:
        if self.name == "strict":
            return strict.xp
        return pytest.importorskip("cupy")

    @property
    def type(self) -> type:
        return self.xp.ndarray

    @property
    def run_settings(self) -> dict[str, Any]:
        """Settings of a run whose new Tensors are these arrays."""
        return {"array": "cupy"} if self.name == "strict" else {"array": "cupy", "timeout_s": GPU_TIMEOUT_S / 2}

    @property
    def type_name(self) -> str:
        return name_of(self.type)

    def on_device(self, array: np.ndarray) -> Array:
        return self.xp.asarray(array)

    def after(self, steps: float) -> ArrayBackend:
        """Return the backend for values that several updates made one after another."""
        return ArrayBackend(self.name, steps, self.is_exact)

    def reordered(self, steps: float = 1.0) -> ArrayBackend:
        """Return the backend for values whose sums have another order than NumPy's, on the stand-in, too."""
        return ArrayBackend(self.name, steps * (0.01 if self.name == "strict" else 1.0), is_exact=False)

    def assert_equal(self, actual: Any, expected: Any, what: str = "") -> None:
        """Compare an array with NumPy's: to the bit on the stand-in, within `TOLERANCES` on a GPU.

        Shape and dtype are equal on both. NaN equals NaN.
        """
        actual, expected = np.asarray(to_host(actual)), np.asarray(expected)
        assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} instead of {expected.dtype}"
        if self.is_exact or expected.dtype.kind != "f":
            np.testing.assert_array_equal(actual, expected, err_msg=what, strict=True)
            return
        wide = expected.astype("float64")
        largest = abs(wide[np.isfinite(wide)]).max(initial=1.0)
        tolerance = self.steps * TOLERANCES[expected.dtype.name]
        np.testing.assert_allclose(
            actual.astype("float64"), wide, rtol=tolerance, atol=tolerance * largest, err_msg=what, strict=True
        )

    def assert_all_equal(self, actual: Any, expected: Any, what: str = "") -> None:
        """Compare dicts, lists and tuples of arrays, numbers and other values, entry by entry."""
        if isinstance(expected, dict):
            assert actual.keys() == expected.keys(), what
            for key, value in expected.items():
                self.assert_all_equal(actual[key], value, f"{what}[{key!r}]")
        elif isinstance(expected, (list, tuple)):
            assert len(actual) == len(expected), what
            for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
                self.assert_all_equal(one, other, f"{what}[{i}]")
        elif isinstance(expected, float):
            # Losses and norms were computed in float32.
            self.assert_equal(np.float32(actual), np.float32(expected), what)
        elif isinstance(expected, (np.ndarray, np.generic)):
            self.assert_equal(actual, expected, what)
        else:
            assert actual == expected, what

    def __repr__(self) -> str:
        return self.name


ARRAYS = [
    pytest.param(ArrayBackend("strict"), id="strict"),
    pytest.param(ArrayBackend("cupy"), id="cupy", marks=pytest.mark.gpu),
]
# Real device processes, too: a CUDA context must start after the fork.
PLACES = [
    pytest.param(ArrayBackend("strict"), "inline", id="strict"),
    pytest.param(ArrayBackend("cupy"), "inline", id="cupy", marks=pytest.mark.gpu),
    pytest.param(ArrayBackend("cupy"), "shm", id="cupy-processes", marks=[pytest.mark.gpu, pytest.mark.process]),
]


# Link between ranks -> number of GPUs of the stand-in: NCCL needs one for each rank.
LINKS = {"nccl": 8, "ipc": 1, "host": 1}


@contextmanager
def linked(link: str) -> Iterator[None]:
    """Let ranks on the stand-in exchange arrays over this link, in threads and in processes."""
    settings = {"SIMPARALLEL_GPU_LINK": link, "SIMPARALLEL_STAND_IN_DEVICES": str(LINKS[link])}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, backend.STAND_IN: "stand_in.strict"}.items():
            patch.setenv(name, value)
        patch.setattr(strict_cuda, "num_devices", LINKS[link])
        yield


@contextmanager
def other_rounding(wrong: str = "", error: float = 0.0) -> Iterator[None]:
    """Let ops of device arrays round as another machine: each value may be one unit in the last place off.

    Args:
        wrong: an op, or an op's backward, whose values are farther off.
        error: how far, relative to the value.
    """
    forward, backward, rng = Op.run_forward, Op.run_backward, np.random.default_rng(0)

    def changed(array: Any, name: str) -> Any:
        if isinstance(array, (np.ndarray, type(None))) or array.dtype.kind != "f":
            return array
        largest = error if name == wrong else np.finfo(array.dtype).eps
        factors = 1 + largest * rng.uniform(-1, 1, array.shape)
        return array * backend.get_namespace(array).asarray(factors.astype(array.dtype))

    def run_forward(self: Op, ctx: Any, inputs: Any) -> Any:
        return changed(forward(self, ctx, inputs), self.name)

    def run_backward(self: Op, ctx: Any, dy: Any) -> Any:
        return [changed(array, self.backward_name) for array in backward(self, ctx, dy)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "run_forward", run_forward)
        patch.setattr(Op, "run_backward", run_backward)
        yield


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """Let the package find no GPU inside of the block, so that `strict` takes its place."""
    usable, backend._usable_cupy = backend._usable_cupy, lambda: None
    try:
        yield
    finally:
        backend._usable_cupy = usable


def skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is none, with the reason.

    Elsewhere they get more time: CuPy compiles each kernel when it is first used, and keeps it in `~/.cupy`. What CuPy
    warns of is no error.
    """
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    why = backend.why_no_gpu() if marked else ""
    for item in marked:
        if why:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {why}"))
        else:
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("default:::cupy.*"))
