"""Kernels for many tensors have NumPy's values, as the stand-in runs them and as C++."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_kernels import COMPILER, compared, compiled, listed_sources
from hypothesis import example, given, strategies as st
from optimizers import every_optimizer, make
from stand_in.strict import launches, xp

import simparallel as sp
from simparallel import optim
from simparallel.arrays.cuda.multi_tensor import MultiTensorKernel, sums
from simparallel.arrays.seam import for_each

# Sizes around the elements of a block, and few.
SIZES = st.sampled_from([0, 1, 2, 3, 4095, 4096, 4097, 9000])
DTYPES = "float16", "float32", "float64"


def move(xp: Any, x: Any, y: Any, factor: float, shift: Any, *, doubled: bool) -> None:
    step = xp.multiply(y, factor) if y is not None else x * factor
    if doubled:
        step += step
    x -= xp.maximum(step / 3, shift)


def squares(xp: Any, x: Any) -> Any:
    return x * x


def integers(rng: Any, size: int, dtype: str) -> np.ndarray:
    return rng.integers(-8, 8, size).astype(dtype)


@example([(3, "float32", True, 0.5)] * 200, True)
@given(
    st.lists(st.tuples(SIZES, st.sampled_from(DTYPES), st.booleans(), st.sampled_from([0.5, 0.25])), max_size=9),
    st.booleans(),
)
def test_each_tensor_is_computed(arrays: Any, tensors: Any, doubled: bool) -> None:
    """Of any size, dtype and numbers; one kernel starts for those that are alike, up to a limit."""
    to = arrays.on_device
    rng = np.random.default_rng(0)
    calls = []
    for size, dtype, has_other, factor in tensors:
        own = [integers(rng, size, dtype) for _ in range(1 + has_other)]
        calls.append(([*own, *[None] * (not has_other)], [factor, np.array(0.125, dtype)]))
    on_gpu = [([a if a is None else to(a) for a in given], [n, to(s)]) for given, (n, s) in calls]
    for_each(move, calls, doubled=doubled)
    with launches() as names:
        for_each(move, on_gpu, doubled=doubled)
    for (found, _), (expected, _) in zip(on_gpu, calls, strict=True):
        np.testing.assert_array_equal(found[0].get(), expected[0], strict=True)
    kinds = {kind for kind in tensors if kind[0] > 0}
    assert arrays.name == "cupy" or len(names) == (2 if len(tensors) == 200 else len({kind[1:] for kind in kinds}))


@given(st.lists(st.tuples(SIZES, st.sampled_from(DTYPES)), min_size=1, max_size=9), st.sampled_from([1, 1, 40]))
def test_sums_of_each_array(arrays: Any, tensors: Any, repeats: int) -> None:
    """Also of more arrays than one kernel takes."""
    rng = np.random.default_rng(0)
    given_arrays = [integers(rng, size, dtype) for size, dtype in tensors] * repeats
    found = sums(squares, [arrays.on_device(array) for array in given_arrays]).get()
    np.testing.assert_array_equal(found, [np.sum(array.astype(float) ** 2) for array in given_arrays], strict=True)


def test_sums_of_long_arrays_take_rounds() -> None:
    arrays = [xp.ones(size, "float32") for size in (4096 * 4096 + 1, 5, 4096)]
    with launches() as names:
        assert sums(squares, arrays).get().tolist() == [4096 * 4096 + 1, 5, 4096]
    assert names == ["squares", "itself", "itself"]


def test_arrays_of_any_memory_order(arrays: Any) -> None:
    to = arrays.on_device
    base = np.arange(24.0).reshape(2, 3, 4)
    for view in (base.T, base[:, ::2], base[..., 1], base[::-1]):
        x, y = to(np.zeros(view.shape[::-1])).T, to(view)
        for_each(move, [([x, y], [1.0, to(np.array(-100.0))])], doubled=False)
        np.testing.assert_array_equal(x.get(), -view / 3)


WRONG: dict[str, Any] = {
    "part": lambda xp, x, n: x.__setitem__(0, x),
    "function": lambda xp, x, n: xp.exp(x),
    "decision by a number": lambda xp, x, n: x if n > 0 else None,
    "numbers alone": lambda xp, x, n: x * (1 - n),
    "dtype": lambda xp, x, n: x.astype("int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_functions_are_refused(case: str) -> None:
    with pytest.raises((TypeError, AttributeError, KeyError)):
        MultiTensorKernel(xp, WRONG[case], [np.dtype("float32")], [True])


def train(dtypes: Sequence[str] = DTYPES) -> list[Any]:
    """Take steps of all optimizers, clip, and look for infinite gradients."""
    rng = np.random.default_rng(0)
    values: list[Any] = []
    for dtype in dtypes:
        for name, settings in every_optimizer():
            shapes: Any = ((9, 1), (5000, 1)) if name == "Muon" else (9, 5000)
            params = [sp.Tensor(xp.asarray(rng.standard_normal(n).astype(dtype)), requires_grad=True) for n in shapes]
            optimizer = make(name, params, settings)
            for _ in range(7):
                optimizer([xp.asarray(rng.standard_normal(p.shape).astype(dtype)) for p in params])
            values += [p.numpy() for p in params]
        params[0].grad = xp.asarray(rng.standard_normal(9).astype(dtype))
        values.append(optim.clip_grad_norm_(params, 0.5))
        optim.clip_grad_value_(params, 0.125)
        values += [params[0].grad.numpy(), optim.all_finite([params[0].grad])]
    return values


@pytest.mark.matrices
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_source_computes_the_same_as_cpp(tmp_path: Path) -> None:
    """The source of every kernel, with its search for the tensor of a block, compiled instead of interpreted."""
    with listed_sources() as sources:
        train()
    assert len(sources) > 50
    library = compiled(sources, tmp_path)
    with compared(library, sources) as different:
        train()
    assert different == []
    # Red control.
    (tmp_path / "wrong").mkdir()
    library = compiled([source.replace("v0 = ", "v0 = 2 * ", 1) for source in sources], tmp_path / "wrong")
    with compared(library, sources) as different:
        train(["float32"])
    assert {"adam", "sgd", "squares", "scale"} <= set(different)
