"""Every op on arrays without data: the same shapes, events and memory as with data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from op_records import op_calls

from simparallel.arrays.seam import arrays_of
from simparallel.autograd import Op, Tensor
from simparallel.backend import has_data
from simparallel.base.dry_arrays import DryArray, dried, empty, reshapes_in_place
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.machine.cluster import describe


def observed(op: Op, arrays: list[np.ndarray], make: Any) -> tuple[Any, ...]:
    """Run forward and backward; return shapes and dtypes, events and memory, and whether any result has data."""
    recorder = Recorder(0, describe(1), record="full")
    with use_recorder(recorder):
        leaves = [Tensor(make(array), requires_grad=array.dtype.kind == "f") for array in arrays]
        y = op(*leaves)
        if y.requires_grad:
            y.backward(make(np.ones(y.shape, y.dtype)), check_finite=False)
    results = [y.data, *(x.grad.data for x in leaves if x.grad is not None)]
    events = [event._replace(wall_start_ns=0, wall_end_ns=0) for event in recorder.events]
    looks = [(array.shape, array.dtype, _steps(array), array.base is None or not array.size) for array in results]
    return looks, events, recorder.memory_summary(), [has_data(array) for array in results]


def _steps(array: np.ndarray) -> list[int]:
    """Return the strides that matter."""
    return [stride for stride, size in zip(array.strides, array.shape, strict=True) if size > 1 and array.size]


@pytest.mark.parametrize("name", sorted(Op.registry))
@given(data=st.data())
def test_dry_op_observed_as_real(name: str, data: Any) -> None:
    dtype = data.draw(st.sampled_from((np.float32, np.float64, np.float16)))
    op, arrays = data.draw(op_calls(name, dtype))
    *expected, _ = observed(op, arrays, np.copy)
    *actual, have_data = observed(op, arrays, lambda array: dried(array) if array.dtype.kind == "f" else array)

    assert actual == expected
    assert not any(have_data) or not any(array.dtype.kind == "f" for array in arrays)


@st.composite
def views(draw: Any) -> Any:
    """Draw the shape of an array, and a function that makes a view of it: dims cut, repeated and in another order."""
    shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 6)), min_size=1, max_size=4))
    cuts = tuple(slice(None, None, draw(st.sampled_from((1, 1, 2, -1)))) for _ in shape)
    order, copies = draw(st.permutations(range(len(shape)))), draw(st.integers(1, 3))

    def view(x: np.ndarray) -> np.ndarray:
        x = x[cuts].transpose(order)
        return np.broadcast_to(x, (copies, *x.shape), subok=True) if copies > 1 else x

    return shape, view


@settings(max_examples=6 * settings.default.max_examples)
@given(views(), st.data())
def test_dry_array_reshapes_as_real(view: Any, data: Any) -> None:
    """In the same place where NumPy makes a view, and into a copy where it makes a copy."""
    shape, view = view
    real, dry = view(np.zeros(shape)), view(empty(shape))
    factors = [factor for size in real.shape for factor in ((2, size // 2) if size in (4, 6) else (size,))]
    cuts = [cut for cut in range(len(factors)) if data.draw(st.booleans())]
    new = [int(np.prod(factors[a:b], dtype=int)) for a, b in zip((0, *cuts), (*cuts, len(factors)), strict=True)]
    if real.size and data.draw(st.booleans()):
        new[data.draw(st.integers(0, len(new) - 1))] = -1
    order = data.draw(st.sampled_from("CFA"))
    expected, found = real.reshape(new, order=order), dry.reshape(new, order=order)

    assert (found.shape, _steps(found)) == (expected.shape, _steps(expected))
    assert np.may_share_memory(found, dry) == np.may_share_memory(expected, real)
    if real.size:
        assert reshapes_in_place(dry, tuple(new), order) == np.may_share_memory(expected, real)


# Everything that NumPy gives a method in C reads elements, unless it is here.
_VIEWS = {
    "base", "ctypes", "data", "device", "diagonal", "dtype", "flags", "imag", "itemset", "itemsize", "mT", "nbytes",
    "ndim", "newbyteorder", "ptp", "real", "resize", "setfield", "setflags", "shape", "size", "squeeze", "strides",
    "swapaxes", "T", "to_device", "transpose", "view", "flat", "conj", "conjugate", "_set_dtype", "_set_shape",
}  # fmt: skip
# Reductions call a ufunc.
_UFUNCS = {"all", "any", "clip", "max", "mean", "min", "prod", "std", "sum", "var"}


def test_no_method_of_arrays_reads_elements() -> None:
    own = {name for name in vars(DryArray) if not name.startswith("__")}
    methods = {name for name in vars(np.ndarray) if not name.startswith("__")}
    assert methods - own - _VIEWS - _UFUNCS == set()


@pytest.mark.parametrize("shape", [(64, 10, 2048), (32, 100, 512)])
def test_products_in_tiles_are_dry(shape):
    """A result in real memory would be computed from what happens to be there."""
    rows, inner, columns = shape
    a, b = empty((rows, inner), np.float32), empty((inner, columns), np.float32)
    assert not has_data(arrays_of(a).product(a, b))
