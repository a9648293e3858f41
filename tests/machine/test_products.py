"""Products by shape: bounds, and what others measured of single kernels."""

from __future__ import annotations

from math import log
from statistics import median

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.errors import ClusterError
from simparallel.machine.products import MatrixProduct, MatrixUnits

UNITS = MatrixUnits(132, 0.84, 0.84, 0.3, 0.7)
PEAK, BYTES_PER_S = 989e12, 3e12
# Products in bfloat16 on an H100, Tflop/s: batch, m, n, k (openxla/xla, matmul_interpolator_data.h, sm_90).
PUBLISHED = [
    (1, 1024, 2048, 256, 139.5), (2, 256, 2048, 2048, 332.2), (1, 4096, 512, 512, 238.8), (4, 4096, 256, 2048, 588.7),
    (2, 1024, 2048, 1024, 493.4), (4, 1024, 2048, 2048, 712.7), (1, 2048, 2048, 2048, 632.0),
    (1, 256, 512, 4096, 91.68), (1, 4096, 4096, 256, 392.2), (2, 4096, 4096, 2048, 763.0), (1, 4096, 4096, 4096, 783.3),
    (1, 512, 4096, 1024, 373.3), (4, 4096, 4096, 512, 619.9), (1, 256, 4096, 2048, 324.6), (1, 256, 256, 256, 6.453),
    (1, 1024, 1024, 1024, 236.3), (2, 512, 4096, 4096, 734.7), (1, 2048, 512, 4096, 451.2),
]  # fmt: skip
sizes = st.integers(1, 5000)


def seconds(*shape: int, **settings: bool) -> float:
    product = MatrixProduct(*shape, **settings)
    return UNITS.peak_s(flops_of(product), (product,), PEAK, BYTES_PER_S)


def flops_of(product: MatrixProduct) -> int:
    return 2 * product.batch * product.m * product.n * product.k


def test_single_kernels_take_the_published_time():
    errors = []
    for *shape, published in PUBLISHED:
        launch_s = 4e-6
        rate = flops_of(MatrixProduct(*shape)) / (seconds(*shape) + launch_s)
        errors.append(abs(log(rate / (published * 1e12))))
    assert median(errors) < 0.05
    assert max(errors) < 0.3


@given(st.integers(1, 8), sizes, sizes, sizes)
def test_no_product_beats_its_ceiling_or_a_smaller_one(batch, m, n, k):
    time_s = seconds(batch, m, n, k)
    assert time_s > flops_of(MatrixProduct(batch, m, n, k)) / (PEAK * UNITS.product)
    assert time_s <= seconds(batch + 1, m, n, k)
    assert time_s <= seconds(batch, m + 1, n, k)
    assert time_s <= seconds(batch, m, n + 1, k)
    assert time_s == seconds(batch, n, m, k)
    assert time_s < seconds(batch, m, n, k, is_aligned=False)


def test_last_wave_takes_as_long_as_a_whole_one():
    """132 tiles of 128 x 256 are one wave; one row more takes another one, which smaller tiles make shorter."""
    one, two = (seconds(1, rows, 256, 256) for rows in (132 * 128, 132 * 128 + 1))
    assert 1.4 * one < two <= 2 * one
    assert seconds(1, 0, 256, 256) == 0


def test_shape_does_not_matter_where_it_is_not_known():
    known, unknown = MatrixProduct(1, 1, 1, 1), MatrixUnits(0, 0.5, 0.25, 0.125, 1.0)
    for kind, share in (("product", 0.5), ("convolution", 0.25), ("attention", 0.125)):
        assert unknown.peak_s(1000, (known._replace(kind=kind),), 1e3, 1.0) == 1 / share
        assert unknown.peak_s(1000, (known._replace(kind=kind),), 1e3, 1.0, 4) == 0.5 / share
    assert UNITS.peak_s(1000, (), 1e3, 1.0) == 1 / UNITS.product


@pytest.mark.parametrize(("field", "value"), [("multiprocessors", -1), ("product", 1.5), ("attention", 0.0)])
def test_impossible_units_are_refused(field, value):
    with refused(ClusterError, key=field):
        MatrixUnits(
            **{"multiprocessors": 8, "product": 0.5, "convolution": 0.5, "attention": 0.5, "wide": 0.5, field: value}
        )
