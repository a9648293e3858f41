"""Every op under a namespace that refuses what CuPy lacks, and refuses to mix host and device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from op_records import op_calls

from simparallel.autograd import Op, Tensor, functions as F
from simparallel.autograd.op import AbstractConstant
from simparallel.backend import get_namespace, is_array, to_device_like, to_host
from simparallel.errors import SimParallelError
from simparallel.testing import cupy_lacks
from simparallel.testing.strict import StrictArray, xp


def on_device(array):
    return xp.asarray(array)


def forward_and_backward(op, arrays):
    """Return (output, gradients) on the host."""
    leaves = [Tensor(array, requires_grad=array.dtype.kind == "f") for array in arrays]
    y = op(*leaves)
    if y.requires_grad:
        y.backward(get_namespace(y.data).ones(y.shape, dtype=y.dtype), check_finite=False)
    # Only copies leave the GPU.
    assert type(y.data) is (np.ndarray if op.name in ("ToDevice", "Replicate") else type(arrays[0]))
    return [to_host(y.data)] + [to_host(x.grad.data) for x in leaves if x.grad is not None]


@pytest.mark.parametrize("name", sorted(Op.registry))
@settings(max_examples=15)
@given(data=st.data())
def test_every_op_runs_and_gives_the_same_bits(name, data):
    dtype = data.draw(st.sampled_from((np.float32, np.float64, np.float16)))
    op, inputs = data.draw(op_calls(name, dtype))
    expected = forward_and_backward(op, inputs)
    actual = forward_and_backward(op, [on_device(array) for array in inputs])

    assert len(actual) == len(expected)
    assert len(actual) > 1 or isinstance(op, AbstractConstant) or name == "Cast"
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_operators_and_indexing_stay_on_device():
    x = Tensor(on_device(np.arange(12.0).reshape(3, 4)), requires_grad=True)
    y = (x[1:, ::2] ** 2 + 1).clip(0, 50).sum() + x[[0, 0, 2], 1].max() + x[x > 5].mean() - 2 / x[0, 1]
    y = y + F.where(x > 3, x, 0.0).sum() + F.pad(F.concat([x, x], 1), (1, 1)).sum()
    y.backward()

    assert type(y.data) is type(x.grad.data) is StrictArray


# --- the stand-in itself: red controls -----------------------------------------------------------------


def test_host_and_device_do_not_mix():
    host, device = np.ones(3), on_device(np.ones(3))
    for mix in (
        lambda: device + host,
        lambda: host + device,
        lambda: host == device,
        lambda: xp.add(device, host),
        lambda: xp.concatenate([device, host]),
        lambda: np.exp(device),
        lambda: np.sum(device),
        lambda: np.asarray(device),
        lambda: np.concatenate([device, device]),
        lambda: device[host.astype(int)],
        lambda: device.__setitem__(0, host),
        lambda: xp.add(device, [1.0, 1.0, 1.0]),
        lambda: device + [1.0, 1.0, 1.0],
        lambda: Tensor(device) + host,
    ):
        with pytest.raises((TypeError, SimParallelError)):
            mix()


@pytest.mark.parametrize("name", ["errstate", "vecdot", "unstack", "nditer", "insert"])
def test_names_missing_in_cupy_are_refused(name):
    assert name in cupy_lacks.NAMES
    with pytest.raises(AttributeError, match=f"CuPy 14 has no '{name}'"):
        getattr(xp, name)
    with pytest.raises(AttributeError, match="no 'vector_norm'"):
        xp.linalg.vector_norm  # noqa: B018


def test_duplicate_index_write_is_refused():
    x, twice = on_device(np.zeros(3)), on_device(np.array([1, 1]))
    with pytest.raises(IndexError, match=r"add\.at"):
        x[twice] = 1.0
    xp.add.at(x, twice, 1.0)

    assert x.get().tolist() == [0, 2, 0]


def test_results_without_dims_stay_arrays():
    x = on_device(np.arange(3.0))

    assert [type(y) for y in (x.sum(), x[1], xp.max(x), x @ x)] == [StrictArray] * 4
    assert float(x.sum()) == x.sum().item() == 3.0
    assert is_array(x)
    assert get_namespace(2.0, x) is xp
    assert type(to_device_like(np.ones(2), x)) is StrictArray
