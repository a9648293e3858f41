"""The comparison with PyTorch: read by test_torch*.py."""

from __future__ import annotations

import numpy as np

from simparallel import Tensor


def generator(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def to_float64(module):
    """Convert the parameters and buffers of one of our modules to float64, as PyTorch's `.double()` does."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype.kind == "f":
            tensor.data = tensor.data.astype(np.float64)
    return module


def assert_near(actual, expected, tolerance=1e-12):
    """Compare relative to the largest element, or to 1 if that is larger."""
    actual = actual.numpy() if isinstance(actual, Tensor) else np.asarray(actual)
    expected = np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    scale = max(1.0, float(abs(expected).max(initial=0)))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)
