"""Matrix products in tiles are the same products."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from stand_in.strict import xp

from simparallel.arrays.host import tiles
from simparallel.arrays.seam import kernels_of
from simparallel.base import blas

SIZES = st.sampled_from([1, 7, 16, 30, 32, 64, 96, 120, 256, 400, 512])
LAYOUTS = st.sampled_from("CF")
KERNEL = blas.has_small_kernel  # before the fixture below replaces it


PLANS = tiles.tile, tiles._tiles, tiles.pieces
ON_HOST, ON_GPU = kernels_of[np], kernels_of[xp]


def with_kernel(monkeypatch, there):
    for plan in PLANS:
        plan.cache_clear()
    monkeypatch.setattr(blas, "has_small_kernel", lambda: there)


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch):
    """Pretend that BLAS has the kernel: the tiles must not depend on the machine."""
    with_kernel(monkeypatch, True)
    yield
    for plan in PLANS:
        plan.cache_clear()


def integers(rows, columns, order):
    generator = np.random.Generator(np.random.Philox(rows))
    return np.asarray(generator.integers(-4, 5, (rows, columns)), np.float32, order=order)


@given(SIZES, SIZES, SIZES, LAYOUTS, LAYOUTS)
@example(512, 32, 96, "C", "C")
@example(512, 32, 512, "F", "C")
@example(32, 512, 512, "C", "C")
@example(512, 512, 32, "C", "F")  # b is unchanged
def test_product_in_tiles_is_exact_for_integers(rows, inner, columns, order_a, order_b):
    a, b = integers(rows, inner, order_a), integers(inner, columns, order_b)
    y = ON_HOST.product(a, b)

    assert y.flags.c_contiguous or y.flags.f_contiguous
    np.testing.assert_array_equal(y, a.astype(np.int64) @ b.astype(np.int64))


@given(SIZES, SIZES, SIZES)
def test_product_uses_out_if_it_fits(rows, inner, columns):
    a, b = integers(rows, inner, "C"), integers(inner, columns, "C")
    out, other = (np.empty((rows, columns), np.float32, order) for order in "CF")

    assert ON_HOST.product(a, b, out) is out
    assert ON_HOST.product(a, b, other) is other
    np.testing.assert_array_equal(other, out)
    np.testing.assert_array_equal(out, a @ b)


@given(SIZES, SIZES, SIZES)
def test_tiles_cover_the_product_and_fit_the_kernel(rows, inner, columns):
    tile = tiles.tile(rows, inner, columns)
    if tile is not None:
        height, width = tile
        assert (rows % height, columns % width) == (0, 0)
        assert height * width * inner <= tiles.SMALL_PRODUCT < rows * columns * inner


def test_tiles_need_the_kernel_and_a_gain(monkeypatch):
    """Products are tiled where that is faster, and only where BLAS has the kernel."""
    calls = [(32, 512, 512), (512, 32, 784), (1024, 16, 1024)]
    assert all(tiles.tile(*call) for call in calls)
    assert not any(tiles.tile(*call) for call in [(256, 512, 512), (4096, 4096, 4096), (32, 1024, 1024)])
    assert ON_HOST.pieces(64 * 1024, 100) != (1, 64 * 1024)
    assert ON_GPU.pieces(64 * 1024, 100) == (1, 64 * 1024)
    assert tiles._tiles(128, 512, 512) != (128, 512)
    with_kernel(monkeypatch, False)
    assert not any(tiles.tile(*call) for call in calls)
    assert ON_HOST.pieces(64 * 1024, 100) == (1, 64 * 1024)
    assert tiles._tiles(128, 512, 512) == (128, 512)


def test_kernel_is_detected_from_blas_config(monkeypatch):
    for core, expected in [
        (("openblas 0.3.31", "SkylakeX"), True),
        (("openblas 0.3.31", "SapphireRapids"), True),
        (("openblas 0.3.31", "Haswell"), False),  # AVX-512 may still exist if a variable chose this core
        (("openblas 0.3.31", "armv8"), False),
        (("mkl 2025.0", ""), False),
        (("", ""), False),
    ]:
        monkeypatch.setattr(blas, "core", lambda core=core: core)
        KERNEL.cache_clear()
        assert KERNEL() is expected
    monkeypatch.undo()
    KERNEL.cache_clear()
