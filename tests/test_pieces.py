"""Matrix products in tiles are the same products."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from simparallel.autograd import pieces

SIZES = st.sampled_from([1, 7, 16, 30, 32, 64, 96, 120, 256, 400, 512])
LAYOUTS = st.sampled_from("CF")
KERNEL = pieces.has_small_kernel  # before the fixture below replaces it


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch):
    """As if BLAS had the other kernel: which tiles there are does not depend on where this runs."""
    pieces._tile.cache_clear()
    monkeypatch.setattr(pieces, "has_small_kernel", lambda: True)
    yield
    pieces._tile.cache_clear()


def integers(rows, columns, order):
    generator = np.random.Generator(np.random.Philox(rows))
    return np.asarray(generator.integers(-4, 5, (rows, columns)), np.float32, order=order)


@given(SIZES, SIZES, SIZES, LAYOUTS, LAYOUTS)
@example(1024, 128, 96, "C", "F")  # b is copied first
@example(512, 512, 32, "C", "F")  # b stays as it is
@example(512, 32, 96, "F", "C")
@example(64, 400, 120, "C", "C")
def test_product_in_tiles_is_exact_for_integers(rows, inner, columns, order_a, order_b):
    a, b = integers(rows, inner, order_a), integers(inner, columns, order_b)
    y = pieces.matrix_product(a, b)

    assert y.flags.c_contiguous or y.flags.f_contiguous
    np.testing.assert_array_equal(y, a.astype(np.int64) @ b.astype(np.int64))


@given(SIZES, SIZES, SIZES)
def test_product_goes_into_what_is_given_if_it_fits(rows, inner, columns):
    a, b = integers(rows, inner, "C"), integers(inner, columns, "C")
    out, other = np.empty((rows, columns), np.float32), np.empty((rows, columns))

    assert pieces.matrix_product(a, b, out) is out
    assert pieces.matrix_product(a, b, other) is not other
    np.testing.assert_array_equal(out, a @ b)


@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_tiles_cover_the_product_and_fit_the_kernel(rows, inner, columns, a_in_rows, b_in_rows):
    tile = pieces._tile(rows, inner, columns, a_in_rows, b_in_rows)
    if tile is not None:
        height, width = tile
        assert (rows % height, columns % width) == (0, 0)
        assert height * width * inner <= pieces.SMALL_PRODUCT < rows * columns * inner
        assert b_in_rows or width == columns


def test_there_are_tiles_where_they_pay_and_only_where_the_kernel_is(monkeypatch):
    calls = [(32, 512, 512, True, True), (512, 32, 784, False, True), (512, 784, 32, True, False)]
    assert all(pieces._tile(*call) for call in calls)
    assert pieces._tile(4096, 4096, 4096, True, True) is None
    pieces._tile.cache_clear()
    monkeypatch.setattr(pieces, "has_small_kernel", lambda: False)
    assert not any(pieces._tile(*call) for call in calls)


def test_whether_the_kernel_is_there_is_read_from_what_numpy_says(monkeypatch):
    for blas, feature, expected in [
        ("scipy-openblas", "X86_V4", True),
        ("openblas64", "AVX512_SKX", True),
        ("mkl", "X86_V4", False),
        ("scipy-openblas", "ASIMD", False),
    ]:
        config = {"Build Dependencies": {"blas": {"name": blas}}, "SIMD Extensions": {"found": [feature]}}
        monkeypatch.setattr(np, "show_config", lambda mode, config=config: config)
        KERNEL.cache_clear()
        assert KERNEL() is expected
    monkeypatch.undo()
    KERNEL.cache_clear()
