"""`backend.fused`: NumPy's values on the stand-in, one kernel of CuPy, and refusals of all other functions."""

from __future__ import annotations

import ast
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_backends import ArrayBackend
from cupy_checks import compiled, kernel_of, shown_to_cupy, why_no_compiler
from hypothesis import given, strategies as st
from optimizers import every_optimizer, make, suited
from stand_in.strict import launches, operations, xp

import simparallel as sp
from simparallel import backend, optim
from simparallel.autograd import functions as F
from simparallel.backend import fused

DTYPES = "float16", "float32", "float64"
needs_cupy_alone = pytest.mark.skipif(
    find_spec("cupy") is None or not backend.why_no_gpu(), reason="needs CuPy and no GPU: the arrays have no memory"
)
needs_compiler = pytest.mark.skipif(
    find_spec("cupy") is None or bool(why_no_compiler()), reason="needs CuPy and NVRTC, NVIDIA's compiler"
)
PACKAGE = Path(sp.__file__).parent


# The functions that become kernels, and the position of the argument that names one.
KERNEL_MAKERS = {"fused": 1, "for_each": 0, "sums": 0, "totals": 2, "row_sums": 0, "sums_of_channels": 1}


def fused_functions() -> set[str]:
    """Return the names of all functions in the package that become kernels, as their kernels have them."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        positions = {**KERNEL_MAKERS, **({"_apply": 0} if path.parent.name == "optim" else {})}
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call):
                callee = getattr(call.func, "id", getattr(call.func, "attr", ""))
                position = positions.get(callee, len(call.args))
                names |= {getattr(arg, "id", getattr(arg, "attr", "")) for arg in call.args[position : position + 1]}
    # Functions that are passed on.
    return {name.strip("_") for name in names - {"compute", "in_one_kernel", "on_gpu", "_gradient", ""}}


def polynomial(xp: Any, x: Any, y: Any, factor: float, out: Any = None, *, squared: bool) -> Any:
    result = xp.multiply(x, factor, out=out)
    if squared:
        result = result * x
    if y is not None:
        result += y
    return xp.where(result > 0, result, 0)


@given(st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 3))
def test_values_are_those_of_numpy(dtype: str, squared: bool, has_y: bool, rows: int) -> None:
    x, y = np.arange(-2, 2 * rows - 2, dtype=dtype).reshape(rows, 2), np.array([0.5, -0.25], dtype)
    expected = fused(np, polynomial, squared=squared)(x, y if has_y else None, 0.3)
    compute, device = fused(xp, polynomial, squared=squared), [xp.asarray(x), xp.asarray(y) if has_y else None]
    with launches() as kernels, operations() as names:
        found = compute(*device, 0.3)
    np.testing.assert_array_equal(found.get(), expected, strict=True)
    assert kernels == ["polynomial"] * (rows > 0)
    assert len(names) == (3 + squared + has_y) * (rows > 0)


REFUSED = {
    "index": lambda xp, x, n: x[0],
    "shape": lambda xp, x, n: x.reshape(-1),
    "sum": lambda xp, x, n: x.sum(),
    "product": lambda xp, x, n: x @ x,
    "matmul": lambda xp, x, n: xp.matmul(x, x),
    "absolute": lambda xp, x, n: abs(x),
    "plus": lambda xp, x, n: +x,
    "dtype of a ufunc": lambda xp, x, n: xp.add(x, x, dtype="float64"),
    "memory": lambda xp, x, n: xp.empty_like(x),
    "part": lambda xp, x, n: x.__setitem__(0, 1.0),
    "decision by a value": lambda xp, x, n: x if x else -x,
    "decision by a number": lambda xp, x, n: x if n else -x,
    "number as Python's": lambda xp, x, n: x * float(n),
}
# CuPy computes these, but in other dtypes or shapes than NumPy.
MISTAKEN = {
    "numbers alone": lambda xp, x, n: x * xp.sqrt(n),
    "NumPy's number": lambda xp, x, n: x * np.float64(2.0),
    "argument": lambda xp, x, n: x,
    "number": lambda xp, x, n: n,
}


@pytest.mark.parametrize("case", [*REFUSED, *MISTAKEN])
def test_stand_in_refuses(case: str) -> None:
    x = xp.asarray(np.ones((2, 2), np.float32))
    with pytest.raises((TypeError, AttributeError)):
        fused(xp, {**REFUSED, **MISTAKEN}[case], "kernel")(x, 2.0)
    assert (x + 1).get().tolist() == [[2.0, 2.0], [2.0, 2.0]]  # the refusal ends the kernel


@needs_cupy_alone
@pytest.mark.parametrize("case", REFUSED)
def test_cupy_refuses(case: str) -> None:
    """Red control of `kernel_of`."""
    import cupy

    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 1 << 20, None, 0), 0)
    x = cupy.ndarray((2, 2), np.float32, memptr=memory)
    with pytest.raises(Exception):  # noqa: B017, PT011 (of many kinds)
        kernel_of(partial(REFUSED[case], None), "kernel", (x, 2.0))


@needs_cupy_alone
def test_dtype_that_cupy_widens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control of `check_dtypes`: the stand-in without its own check."""
    from stand_in import strict

    monkeypatch.setattr(strict, "_check_fusible", lambda *args: None)
    with shown_to_cupy() as found:
        fused(xp, MISTAKEN["numbers alone"], "widened")(xp.asarray(np.ones(2, np.float32)), 2.0)
    assert [text.split(":")[0] for text in found] == ["widened"]


@needs_compiler
def test_wrong_source_does_not_compile() -> None:
    """Red control of the compiler."""
    assert compiled('extern "C" __global__ void f(float* x) { x[0] = sqrt(x[1]); }') > 0
    with pytest.raises(TypeError, match="undefined"):
        compiled('extern "C" __global__ void f(float* x) { x[0] = missing(x[1]); }')


def update_all(dtype: str) -> None:
    """Take steps of all optimizers; the sixth step of RAdam has a denominator."""
    for name, settings in every_optimizer():
        params = suited(name, [sp.Tensor(xp.ones(shape, dtype), requires_grad=True) for shape in ((2, 3), (4,))])
        optimizer = make(name, params, settings)
        for _ in range(7):
            optimizer([xp.ones(p.shape, dtype) for p in params])
    params[0].grad = xp.ones((2, 3), dtype)
    optim.clip_grad_norm_(params, 0.5)
    optim.clip_grad_value_(params, 0.5)
    optim.all_finite([params[0].grad])


def normalize_all(dtype: str) -> None:
    """Train and evaluate all normalisations, with and without weights."""
    for affine in (True, False):
        x = sp.Tensor(xp.ones((4, 6, 3, 3), dtype), requires_grad=True)
        for layer in (sp.nn.BatchNorm2d(6, affine=affine, dtype=dtype), sp.nn.GroupNorm(3, 6, affine=affine)):
            (layer.to("cuda:0")(x.to("cuda:0")) ** 2).sum().backward()
        many = sp.Tensor(xp.ones((4, 16, 16, 6), dtype), requires_grad=True).permute(0, 3, 1, 2)
        (sp.nn.BatchNorm2d(6, affine=affine, dtype=dtype).to("cuda:0")(many) ** 2).sum().backward()
        for norm in (sp.nn.LayerNorm, sp.nn.RMSNorm):
            (norm(3, elementwise_affine=affine).to("cuda:0")(x.to("cuda:0")) ** 2).sum().backward()


def compute_all(dtype: str) -> None:
    """Take forward and backward of all other functions."""

    def leaf(*shape: int) -> sp.Tensor:
        return sp.Tensor(xp.ones(shape, dtype), requires_grad=True)

    labels, tanh = sp.Tensor(xp.zeros(4, "int64")), partial(F.gelu, approximate="tanh")
    sums = partial(F.softmax, dim=1), partial(F.log_softmax, dim=1)
    gates = F.gelu, tanh, F.silu, F.sigmoid, F.relu, F.leaky_relu, F.dropout
    for function in (*sums, *gates, F.tanh, F.sqrt, F.log, F.cos, F.asin):
        (function(leaf(4, 6) * 0.5) ** 2).sum().backward()
    for settings in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weight": leaf(6).detach()}):
        F.cross_entropy(leaf(4, 6), labels, **settings).backward()
    for mask in (None, leaf(4, 4).detach()):
        (F.scaled_dot_product_attention(*(leaf(2, 4, 3) for _ in range(3)), attn_mask=mask) ** 2).sum().backward()
    many = [leaf(2, 2, 128, 3), leaf(2, 2, 128, 3), leaf(2, 2, 128, 3)]
    (F.scaled_dot_product_attention(*many) ** 2).sum().backward()
    for size, stride in ((2, 1), (2, 2), (7, 7), (6, 1)):
        (F.max_pool2d(leaf(2, 2, 14, 14), size, stride) ** 2).sum().backward()


@needs_cupy_alone
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_fuses_every_function(dtype: str) -> None:
    """Each function is one kernel, in NumPy's dtypes, and NVRTC compiles it. No function of the package is left out."""
    names: set[str] = set()
    with shown_to_cupy(names) as found:
        update_all(dtype)
        normalize_all(dtype)
        compute_all(dtype)
    assert found == []
    assert names - {"<lambda>"} == fused_functions()


def product(xp: Any, x: Any, y: Any, factor: float) -> Any:
    return x * y * factor


@given(st.permutations(range(3)), st.permutations(range(3)))
def test_new_arrays_have_numpys_memory_order(axes: list[int], others: list[int]) -> None:
    """CuPy's kernels alone would return C order."""
    x, y = (np.arange(27.0).reshape(3, 3, 3).transpose(order) for order in (axes, others))
    ours = [xp.asarray(np.arange(27.0)).reshape(3, 3, 3).transpose(order) for order in (axes, others)]
    found, expected = fused(xp, product)(*ours, 0.5), fused(np, product)(x, y, 0.5)
    np.testing.assert_array_equal(found.get(), expected, strict=True)
    if axes == others or [0, 1, 2] in (axes, others):
        assert found.strides == expected.strides


def small_gpt() -> sp.nn.Module:
    return sp.models.gpt(16, 8, num_layers=1, num_heads=2, width=8)


# Model, inputs, labels.
STEPS: dict[str, tuple[Any, Any, Any]] = {
    "LeNet-5": (sp.models.lenet5, np.ones((4, 1, 28, 28), np.float32), np.arange(4)),
    "GPT": (small_gpt, np.arange(16).reshape(2, 8), np.arange(16)),
}


def take_step(name: str, level: str, to_device: Any) -> list[np.ndarray]:
    """Return the loss and the parameters after two steps in mixed precision; the second has a new loss scale."""
    sp.manual_seed(0)
    make, x, labels = STEPS[name]
    model = sp.nn.auto_mixed_precision(make(), level)
    if to_device is not None:
        model = model.to("cuda:0")
        x, labels = to_device(x), to_device(labels)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = optim.GradScaler(init_scale=1024.0, growth_interval=1)
    for _ in range(2):
        optimizer.zero_grad()
        scores = model(sp.Tensor(x))
        loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), sp.Tensor(labels))
        scaler.scale(loss).backward(check_finite=False)
        scaler.step(optimizer)
        scaler.update()
    return [loss.numpy(), *(p.numpy() for p in model.parameters())]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", STEPS)
def test_mixed_precision_on_device_is_numpys(arrays: Any, name: str, level: str) -> None:
    """Equal within rounding: a GPU multiplies larger matrices at once."""
    found, expected = take_step(name, level, arrays.on_device), take_step(name, level, None)
    ArrayBackend(arrays.name, 5, is_exact=False).assert_all_equal(found, expected)


@needs_cupy_alone
@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", STEPS)
def test_cupy_takes_every_call_of_a_step(name: str, level: str) -> None:
    """As far as CuPy looks at arguments; the fused functions of the step compile."""
    names: set[str] = set()
    with shown_to_cupy(names) as found:
        take_step(name, level, xp.asarray)
    assert found == []
    assert "sgd" in names
