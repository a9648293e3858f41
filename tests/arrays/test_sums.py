"""Sums over rows on a GPU are NumPy's, and batch norm, biases and attention use them for many rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpp_kernels import COMPILER, compared, compiled, listed_sources
from hypothesis import given, strategies as st
from stand_in.strict import launches, xp

import simparallel as sp
from simparallel.arrays.cuda.add_rows import add_rows
from simparallel.arrays.cuda.kernel_source import itself
from simparallel.arrays.cuda.row_sums import row_sums
from simparallel.arrays.seam import kernels_of
from simparallel.backend import to_host

ROWS = st.sampled_from([1, 2, 63, 64, 65, 500, 4096, 4097, 9000])
COLUMNS = st.sampled_from([0, 1, 3, 40])


def parts(xp: Any, x: Any, y: Any, shift: Any) -> Any:
    return x, x * y - shift


def integers(rng: Any, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


@given(ROWS, COLUMNS, st.sampled_from(["float32", "float64"]), st.booleans())
def test_sums_are_numpys(arrays: Any, num_rows: int, num_columns: int, dtype: str, has_out: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = (integers(rng, num_rows, num_columns, dtype=dtype) for _ in range(2))
    shift = integers(rng, num_columns, dtype=dtype)
    out = arrays.xp.empty((2, num_columns), dtype) if has_out else None
    with launches() as names:
        found = row_sums(parts, [arrays.on_device(x), arrays.on_device(y)], [arrays.on_device(shift)], out)
    np.testing.assert_array_equal(
        (out if has_out else found).get(), [x.sum(axis=0), (x * y - shift).sum(axis=0)], strict=True
    )
    stacked = row_sums(itself, [arrays.on_device(np.stack([x, 2 * x]).reshape(1, 2, num_rows, num_columns))])
    np.testing.assert_array_equal(stacked.get(), [[[x.sum(axis=0), 2 * x.sum(axis=0)]]], strict=True)
    rounds = 1 + (num_rows > 64) + (num_rows > 64**2)
    kernels = ["parts", "itself", "itself"][:rounds] if num_columns else []
    if arrays.name == "strict":
        assert [name for name in names if name != "asarray"] == kernels


def test_errors_do_not_grow_with_the_rows() -> None:
    """A plain sum in float32 of as many numbers is wrong in its fourth digit."""
    x = np.random.default_rng(0).random((1 << 18, 1), np.float32)
    exact, found = x.sum(dtype=float), row_sums(itself, [xp.asarray(x)]).get().item()
    assert abs(found - exact) < 1e-6 * exact


def gradients(module: Any, to_device: Any, x: np.ndarray, *axes: int) -> list[np.ndarray]:
    array = to_device(x)
    given = sp.Tensor(array.transpose(axes) if axes else array, requires_grad=True)
    module = module if to_device is np.asarray else module.to("cuda:0")
    y = module(given)
    (y * y * 0.5 + y * 0.25).sum().backward()
    state = [value for name, value in module.state_dict().items() if "batches" not in name]
    return [y.numpy(), *(t.grad.numpy() for t in (given, *module.parameters())), *state]


@pytest.mark.parametrize("order", ["planes", "pixels"])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_many_pixels_is_numpys(arrays: Any, order: str, affine: bool) -> None:
    """In the memory order of images, and in that of convolutions, in which the sums are two kernels."""
    x = np.random.default_rng(0).normal(3.0, 2.0, (8, 6, 9, 9)).astype(np.float32)
    axes = (2, 3, 0, 1) if order == "pixels" else ()
    if axes:
        x = x.transpose(axes).copy()
    found, expected = (
        gradients(sp.nn.BatchNorm2d(6, affine=affine), to, x, *axes) for to in (arrays.on_device, np.asarray)
    )
    arrays.reordered(10).assert_all_equal(found, expected)


def test_batch_norm_reads_its_input_once_more(arrays: Any) -> None:
    """A write into it before backward is found."""
    x = sp.Tensor(arrays.on_device(np.ones((600, 2), np.float32)))
    y = sp.nn.BatchNorm1d(2).to("cuda:0")(x)
    x += 1.0
    with pytest.raises(sp.errors.AutogradError):
        y.sum().backward()


def test_bias_of_many_rows_is_numpys(arrays: Any) -> None:
    x = np.random.default_rng(0).standard_normal((5000, 3)).astype(np.float32)

    def run(to: Any) -> list[np.ndarray]:
        sp.manual_seed(0)
        return gradients(sp.nn.Linear(3, 4), to, x)

    arrays.reordered(10).assert_all_equal(run(arrays.on_device), run(np.asarray))


def attention(to: Any, causal: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = [sp.Tensor(to(rng.standard_normal((2, 3, n, 8), np.float32)), requires_grad=True) for n in (90, 130, 130)]
    (sp.functions.scaled_dot_product_attention(*inputs, is_causal=causal) ** 2).sum().backward()
    return [x.grad.numpy() for x in inputs]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_many_keys_is_numpys(arrays: Any, causal: bool) -> None:
    arrays.reordered(10).assert_all_equal(attention(arrays.on_device, causal), attention(np.asarray, causal))


@given(
    st.tuples(*[st.integers(0, 3)] * 2, st.integers(1, 70), st.sampled_from([0, 1, 5, 32, 33])),
    st.sampled_from(["float32", "float64"]),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
)
def test_softmax_of_columns_is_numpys(arrays: Any, shape: Any, dtype: str, first: int | None, hides: bool) -> None:
    """And its gradient; a column that sees nothing is 0."""
    rng = np.random.default_rng(0)
    x, dp = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    if hides:
        x[..., -1] = -np.inf
    seen = np.ones(shape, bool) if first is None else np.tri(shape[3], shape[2], first, dtype=bool).T & (x == x)
    exps = np.exp(x.astype(float)) * seen
    p = exps / np.maximum(exps.sum(axis=-2, keepdims=True), 1e-300)
    expected = [p, p * (dp - (p * dp).sum(axis=-2, keepdims=True))]
    for kernels, put in ((kernels_of[np], np.copy), (kernels_of[arrays.xp], arrays.on_device)):
        found = kernels.column_softmax(put(x), first, hides)
        gradient = kernels.column_softmax_gradient(put(dp), found)
        for array, exact in zip((found, gradient), expected, strict=True):
            np.testing.assert_allclose(to_host(array), exact, rtol=0, atol=1e-5 if dtype == "float32" else 1e-14)


@given(st.lists(st.integers(-2, 7), max_size=40), st.integers(0, 9), st.sampled_from(["float32", "float64"]))
def test_rows_with_equal_ids_are_added_in_order(arrays: Any, ids: list[int], num_columns: int, dtype: str) -> None:
    """To the bit of NumPy's sum, which adds in the order of the rows."""
    rows = np.random.default_rng(0).standard_normal((len(ids), num_columns)).astype(dtype)
    expected, found = np.ones((6, num_columns), dtype), arrays.on_device(np.ones((6, num_columns), dtype))
    for i, row in zip(ids, rows, strict=True):
        if 0 <= i < 6:
            expected[i] += row
    add_rows(arrays.on_device(rows), arrays.on_device(np.array(ids, "int64")), found)
    np.testing.assert_array_equal(found.get(), expected, strict=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["int64", "uint8"])
def test_gradient_of_a_table_is_numpys_bits(arrays: Any, dtype: str, kind: str) -> None:
    """Though many ids are equal: CuPy's own sum depends on the run."""
    rng = np.random.default_rng(0)
    ids, values, dy = rng.integers(0, 4, (9, 7)), rng.standard_normal((300, 5)), rng.standard_normal((9, 7, 5))

    def run(to: Any) -> np.ndarray:
        table = sp.Tensor(to(values.astype(dtype)), requires_grad=True)
        sp.functions.embedding(sp.Tensor(to(ids.astype(kind))), table).backward(to(dy.astype(dtype)))
        return table.grad.numpy()

    np.testing.assert_array_equal(run(arrays.on_device), run(np.asarray), strict=True)


ADDED: dict[str, Any] = {
    "rows": lambda x, ids, values: (x[ids] * values[0]).sum(),
    "columns": lambda x, ids, values: (x[:, ids] * values[1]).sum(),
    "apart": lambda x, ids, values: (x[ids, :, ids] * values[2]).sum(),
    "together": lambda x, ids, values: (x[:, ids, ids] * values[3]).sum(),
    "negative": lambda x, ids, values: (x[ids - 4] * values[0]).sum(),
    "gather": lambda x, ids, values: (sp.functions.gather(x, 1, ids[:, None, None]) * values[4]).sum(),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", ADDED)
def test_gradients_of_equal_positions_are_numpys_bits(arrays: Any, case: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (3, 4, 4), (4, 3, 4), (3, 4), (4, 3), (3, 1, 1)
    x, ids = rng.standard_normal((4, 4, 4)).astype(dtype), np.array([2, 0, 2])
    values = [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    def run(to: Any) -> np.ndarray:
        leaf = sp.Tensor(to(x), requires_grad=True)
        ADDED[case](leaf, sp.Tensor(to(ids)), [sp.Tensor(to(v)) for v in values]).backward()
        return leaf.grad.numpy()

    np.testing.assert_array_equal(run(arrays.on_device), run(np.asarray), strict=True)


def sum_all() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        rows = xp.asarray(rng.standard_normal((700, 3)).astype(dtype))
        add_rows(rows, xp.asarray(rng.integers(0, 9, 700)), xp.ones((11, 3), dtype))
    attention(xp.asarray, True)
    for dtype in ("float32", "float64"):
        for num_rows in (5, 500, 5000):
            x, y = (xp.asarray(rng.standard_normal((num_rows, 7)).astype(dtype)) for _ in range(2))
            row_sums(parts, [x, y], [xp.asarray(rng.standard_normal(7).astype(dtype))])
        pixels = rng.standard_normal((4, 4, 40, 6)).astype(dtype)
        gradients(sp.nn.BatchNorm2d(6, dtype=dtype), xp.asarray, pixels, 2, 3, 0, 1)


@pytest.mark.matrices
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_source_computes_the_same_as_cpp(tmp_path: Path) -> None:
    with listed_sources() as sources:
        sum_all()
    library = compiled(sources, tmp_path)
    with compared(library, sources) as different:
        sum_all()
    assert different == []
    # Red control: the first row is lost.
    (tmp_path / "wrong").mkdir()
    wrong = [source.replace("row = lane;", "row = lane + 1;") for source in sources]
    wrong = [source.replace("long long k = first;", "long long k = first + 1;") for source in wrong]
    with compared(compiled(wrong, tmp_path / "wrong"), sources) as different:
        sum_all()
    assert {"parts", "itself", "products", "add_rows", "softmax", "softmax_gradient"} <= set(different)
