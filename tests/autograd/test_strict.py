"""Every op on device arrays gives NumPy's results; and the stand-in for CuPy refuses what CuPy lacks."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from array_backends import gpus_hidden
from cupy_checks import shown_to_cupy
from hypothesis import given, settings, strategies as st
from op_records import op_calls
from refusals import refused
from stand_in import cupy_lacks
from stand_in.strict import StrictArray, xp

import simparallel as sp
from simparallel import backend
from simparallel.arrays.cuda.arrays import CudaArrays
from simparallel.autograd import Op, Tensor, functions as F
from simparallel.autograd.op import AbstractConstant
from simparallel.backend import get_namespace, is_array, to_device_like, to_host
from simparallel.errors import DeviceMismatchError, SimParallelError


def on_device(array):
    return xp.asarray(array)


def forward_and_backward(op, inputs):
    """Return (output, gradients) on the host."""
    leaves = [Tensor(array, requires_grad=array.dtype.kind == "f") for array in inputs]
    y = op(*leaves)
    if y.requires_grad:
        y.backward(get_namespace(y.data).ones(y.shape, dtype=y.dtype), check_finite=False)
    # Only copies leave the GPU.
    assert type(y.data) is (np.ndarray if op.name in ("ToDevice", "Replicate") else type(inputs[0]))
    return [to_host(y.data)] + [to_host(x.grad.data) for x in leaves if x.grad is not None]


@pytest.mark.parametrize("name", sorted(Op.registry))
@settings(max_examples=15)
@given(data=st.data())
def test_every_op_on_device_equals_numpy(arrays, name, data):
    """To the bit on the stand-in."""
    dtype = data.draw(st.sampled_from((np.float32, np.float64, np.float16)))
    op, inputs = data.draw(op_calls(name, dtype))
    expected = forward_and_backward(op, inputs)
    actual = forward_and_backward(op, [arrays.on_device(array) for array in inputs])

    assert len(actual) == len(expected)
    assert len(actual) > 1 or isinstance(op, AbstractConstant) or name == "Cast"
    for a, b in zip(actual, expected, strict=True):
        arrays.assert_equal(a, b)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_scatter_adds_every_kind_of_integer(arrays, dtype):
    """Sums wrap around, and of bools any True wins, as in NumPy."""
    x, index = np.array([1, 0, 120], dtype), np.array([0, 0, 2, 2])
    source = np.array([1, 0, 100, 120]).astype(dtype)
    expected = x.copy()
    np.add.at(expected, index, source)
    inputs = [Tensor(arrays.on_device(array)) for array in (x, index, source)]

    arrays.assert_equal(F.scatter_add(inputs[0], 0, inputs[1], inputs[2]).data, expected)


def test_operators_and_indexing_stay_on_device(arrays):
    x = Tensor(arrays.on_device(np.arange(12.0).reshape(3, 4)), requires_grad=True)
    y = (x[1:, ::2] ** 2 + 1).clip(0, 50).sum() + x[[0, 0, 2], 1].max() + x[x > 5].mean() - 2 / x[0, 1]
    y = y + F.where(x > 3, x, 0.0).sum() + F.pad(F.concat([x, x], 1), (1, 1)).sum()
    y.backward()

    assert type(y.data) is type(x.grad.data) is arrays.type


def test_mixed_libraries_name_the_inputs():
    with refused(DeviceMismatchError, op="Mul", devices=["host", "cuda:0"]):
        Tensor(np.ones(3)) * Tensor(on_device(np.ones(3)))


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


@pytest.mark.parametrize(
    "call",
    [
        lambda x: xp.sum(x, where=x > 0),
        lambda x: x.max(initial=0.0),
        lambda x: x.take(x.astype("int64"), mode="clip"),
        lambda x: xp.add(x, x, where=x > 0),
        lambda x: xp.exp(x, subok=True),
        lambda x: xp.zeros(3, like=x),
        lambda x: xp.linalg.svd(x, hermitian=True),
        lambda x: x.item(0),
    ],
)
def test_keywords_missing_in_cupy_are_refused(call):
    with pytest.raises(TypeError):
        call(on_device(np.zeros((3, 3))))


@pytest.mark.parametrize("method", ["reduce", "accumulate", "reduceat", "at"])
def test_methods_of_ufuncs_as_in_cupy(method):
    assert getattr(xp.add, method)
    with pytest.raises(NotImplementedError, match=f"CuPy 14 has no exp.{method}"):
        getattr(xp.exp, method)
    assert xp.exp.outer


def test_at_refuses_dtypes_that_cupy_lacks():
    x, first = on_device(np.zeros(3, np.int16)), on_device(np.array([0]))
    with pytest.raises(TypeError, match=r"cupy\.add\.at does not support int16"):
        xp.add.at(x, first, 1)


@pytest.mark.parametrize("dtype", ["U3", "S3", "O", "M8[s]", np.longdouble])
def test_dtypes_missing_in_cupy_are_refused(dtype):
    with pytest.raises(ValueError, match="CuPy has no arrays of dtype"):
        xp.zeros(3, dtype)


def test_flags_are_those_of_cupy():
    flags = on_device(np.zeros((2, 3))).T.flags
    assert (flags.c_contiguous, flags.f_contiguous) == (False, True)
    with pytest.raises(AttributeError, match="writeable"):
        flags.writeable  # noqa: B018


def test_hidden_gpus_leave_the_stand_in(monkeypatch):
    """On a machine with GPUs, tests on the stand-in find none."""
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 2)))
    monkeypatch.setattr(backend, "_usable_cupy", lambda: cupy)
    assert backend.device_count() == 2
    with gpus_hidden():
        assert backend.device_count() == 0
        assert type(Tensor(np.ones(3)).to("cuda:0").data) is StrictArray
    assert backend.device_count() == 2


needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed; its tables need no GPU")


def parameters(function: Any) -> set[str] | None:
    """Return the names of a function's keywords; None if it takes any, or does not tell."""
    try:
        kinds = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is each.VAR_KEYWORD for each in kinds):
        return None
    return {each.name for each in kinds if each.kind not in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY)}


@needs_cupy
@pytest.mark.parametrize("module", ["", "linalg"])
def test_recorded_tables_are_those_of_cupy(module):
    """As far as the functions tell; of newer versions the stand-in may refuse more than they do."""
    cupy = pytest.importorskip("cupy", minversion="14.2")
    ours, theirs = (getattr(library, module) if module else library for library in (np, cupy))
    names = cupy_lacks.NAMES_IN_LINALG if module else cupy_lacks.NAMES
    keywords = cupy_lacks.KEYWORDS_IN_LINALG if module else cupy_lacks.KEYWORDS
    assert {name for name in vars(ours) if not name.startswith("_") and _is_offered(ours, theirs, name)} <= set(names)
    for name in dir(ours):
        function, other = getattr(ours, name), getattr(theirs, name, None)
        if isinstance(function, (type, np.ufunc)) or other is None or not callable(function):
            continue
        known, taken = parameters(function), parameters(other)
        if known is not None and taken is not None:
            assert known - taken <= keywords.get(name, set()), name


def _is_offered(ours: Any, theirs: Any, name: str) -> bool:
    """Return whether a public function of NumPy is missing in CuPy."""
    value = getattr(ours, name)
    return name in ours.__all__ and callable(value) and not isinstance(value, type) and not hasattr(theirs, name)


@needs_cupy
def test_every_call_of_cupy_takes_its_keywords():
    """Red control of the tables: what they let through, CuPy's own functions take."""
    cupy = pytest.importorskip("cupy", minversion="14.2")
    assert cupy_lacks.NAMES.isdisjoint(dir(cupy))
    assert cupy_lacks.METHODS.isdisjoint(dir(cupy.ndarray))
    for name, lacks in cupy_lacks.KEYWORDS.items():
        taken = parameters(getattr(cupy, name))
        assert taken is None or lacks.isdisjoint(taken), name


needs_cupy_alone = pytest.mark.skipif(
    find_spec("cupy") is None or not backend.why_no_gpu(), reason="needs CuPy and no GPU: the arrays have no memory"
)


@needs_cupy_alone
@pytest.mark.parametrize("name", sorted(Op.registry))
@given(data=st.data())
def test_cupys_own_checks_accept_every_op(name, data):
    """The calls of forward and backward, as far as CuPy looks at arguments before it asks for a GPU."""
    op, inputs = data.draw(op_calls(name, data.draw(st.sampled_from((np.float32, np.float64, np.float16)))))
    with shown_to_cupy() as found:
        forward_and_backward(op, [on_device(array) for array in inputs])
    assert found == []


@needs_cupy_alone
def test_call_that_cupy_refuses_is_found():
    """Red control: NumPy sorts in many ways, CuPy in one."""
    x = on_device(np.zeros(3))
    with shown_to_cupy() as found:
        xp.argsort(x, kind="stable")
        xp.argsort(x, kind="quicksort")
        x.view(None)
        x[0:2, None].reshape(2)
        xp.linalg.svd(on_device(np.zeros(3, np.int64).reshape(1, 3)))
    assert [text.split(":")[0] for text in found] == ["argsort"]


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


def test_results_of_ufuncs_are_in_c_order():
    """As in CuPy, whatever the order of their inputs; NumPy keeps that order."""
    x = xp.ones((2, 3, 4)).transpose(2, 0, 1)
    for result in (x + x, -x, x > 0, xp.exp(x), xp.maximum(x, 0), xp.where(x > 0, x, 0)):
        assert result.flags.c_contiguous
    out = xp.empty_like(x)
    assert xp.add(x, x, out=out).strides == x.strides


def test_channels_stay_innermost_in_a_residual_net(monkeypatch):
    """Else a kernel copies the gradients of each batch norm, which takes longer than the norm itself."""
    copies = []

    def fusible(self, x, like):
        copies.append(x.strides != like.strides)
        return before(self, x, like)

    before = CudaArrays.fusible
    monkeypatch.setattr(CudaArrays, "fusible", fusible)

    def program():
        x = sp.Tensor(np.ones((2, 3, 32, 32), np.float32))
        sp.functions.cross_entropy(sp.models.resnet18(10, "cifar")(x), sp.Tensor(np.array([1, 2]))).backward()

    sp.launch(program, world_size=1, transport="inline", array="cupy")
    assert (len(copies), sum(copies)) == (20, 0)
