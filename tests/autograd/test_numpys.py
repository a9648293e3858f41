"""NumPy's functions on Tensors: the op on the tape, or a refusal where a gradient would be lost."""

from __future__ import annotations

import _thread
import math
import statistics
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import functions as F
from simparallel.autograd import numpy_functions
from simparallel.base.callsite import LIBRARIES, user_line
from simparallel.errors import AutogradError, InputError
from simparallel.testing import check_gradients
from simparallel.testing.strategies import arrays

X = np.array([[0.3, -0.6, 0.9], [0.2, 0.7, -0.4]])


def call_of(name: str, *args: Any, **kwargs: Any) -> Any:
    return lambda x: getattr(np, name)(x, *args, **kwargs)


# A call of every function in the table, with floating-point x (2, 3).
CALLS: dict[str, Any] = {
    **{name: call_of(name, axis=1) for name in numpy_functions._REDUCTIONS.split()},
    **{name: call_of(name, 0, keepdims=True) for name in ("amax", "amin", "var", "std")},
    **{name: call_of(name, 1) for name in ("around", "round")},
    **{name: call_of(name, axis=1) for name in ("cumsum", "flip", "expand_dims")},
    **{name: call_of(name) for name in ("copy", "ravel", "transpose", "squeeze")},
    **{name: call_of(name) for name in ("shape", "ndim", "size")},
    "stack": lambda x: np.stack([x, X, x], axis=1),
    "clip": lambda x: np.clip(x, -0.5, 0.5),
    "where": lambda x: np.where(np.array([True, False, True]), x, 2 * x),
    "concatenate": lambda x: np.concatenate([x, 2 * x], axis=1),
    "split": lambda x: np.split(x, [1], axis=1)[1],
    "take": lambda x: np.take(x, [2, 0], axis=1),
    "reshape": lambda x: np.reshape(x, (3, 2)),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "broadcast_to": lambda x: np.broadcast_to(x, (2, 2, 3)),
    "tile": lambda x: np.tile(x, (1, 2)),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x),
    "dot": lambda x: np.dot(x, x.T),
}  # fmt: skip


def numbers(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, sp.Tensor) else np.asarray(value)


def test_every_function_of_the_table_has_a_call() -> None:
    assert set(CALLS) == {function.__name__ for function in numpy_functions._taped_functions()} | {
        "amax",
        "amin",
        "around",
    }


@pytest.mark.parametrize("name", sorted(CALLS))
def test_function_matches_numpy(name: str) -> None:
    y, expected = CALLS[name](sp.Tensor(X, requires_grad=True)), CALLS[name](X)
    np.testing.assert_allclose(numbers(y), expected, rtol=1e-14)
    assert type(y) is type(expected) or isinstance(y, sp.Tensor)
    if isinstance(y, sp.Tensor) and y.requires_grad:
        check_gradients(CALLS[name], [X])
    else:
        assert name in ("shape", "ndim", "size", "round", "around", "any", "all", "argmax", "argmin")


@pytest.mark.parametrize("ufunc", numpy_functions._taped_ufuncs(), ids=lambda ufunc: ufunc.__name__)
@given(st.data())
def test_ufunc_is_the_op_of_the_tape(ufunc: np.ufunc, data: Any) -> None:
    is_bits = "d->" not in "".join(ufunc.types)
    values = (1, 2, 3) if is_bits else (0.25, 0.5, 0.75)
    x, other = (data.draw(arrays((2, 2), np.int64 if is_bits else np.float64, values=values)) for _ in "ab")
    others = [other] * (ufunc.nin - 1)
    y = ufunc(sp.Tensor(x, requires_grad=not is_bits), *others)
    assert isinstance(y, sp.Tensor)
    np.testing.assert_allclose(y.numpy(), ufunc(x, *others), rtol=1e-14)
    if others:
        assert isinstance(ufunc(*others, sp.Tensor(x)), sp.Tensor)
    if not is_bits and ufunc(x, *others).dtype.kind == "f" and ufunc not in (np.maximum, np.minimum):
        assert y.requires_grad == (ufunc.__name__ not in ("floor", "ceil", "rint", "sign", "trunc", "floor_divide"))


LOST: dict[str, Any] = {
    "fft": lambda x: np.fft.fft(x),
    "reduce": lambda x: np.add.reduce(x),
    "out": lambda x: np.exp(x, out=np.zeros(x.shape)),
    "in place": lambda x: np.zeros(x.shape).__iadd__(x),
    "copyto": lambda x: np.copyto(np.zeros(x.shape), x),
    "norm": lambda x: np.linalg.norm(x),
    "nested": lambda x: np.block([[x, x]]),
    "hypot": lambda x: np.hypot(x, 1.0),
}


@pytest.mark.parametrize("case", LOST, ids=str)
def test_lost_gradient_is_refused(case: str) -> None:
    x = sp.Tensor(X, requires_grad=True, name="x")
    with refused(AutogradError):
        LOST[case](x)
    LOST[case](x.detach())
    with sp.no_grad():
        LOST[case](x)


def test_read_only_functions_are_allowed() -> None:
    x = sp.Tensor(X, requires_grad=True)
    assert np.allclose(x, X)
    assert np.isfinite(x).all()
    assert np.zeros_like(x).shape == (2, 3)
    assert isinstance(np.argsort(x), np.ndarray)
    assert np.where(x > 0)[0].tolist() == np.where(X > 0)[0].tolist()


def test_arguments_that_the_op_lacks_are_refused() -> None:
    with refused(InputError):
        np.sum(sp.Tensor(X), where=X > 0)
    with refused(InputError):
        np.add(X, X, out=sp.Tensor(X))


def test_lists_of_tensors_stay_on_the_tape() -> None:
    x = sp.Tensor([1.0, 2.0], requires_grad=True)
    for function in (
        lambda: F.sum([x[0], 3 * x[1]]),
        lambda: F.sum([[x[0]], [3 * x[1]]]),
        lambda: (sp.Tensor([1.0, 1.0]) * [x[0], 3 * x[1]]).sum(),
    ):
        x.grad = None
        function().backward()
        assert x.grad.tolist() == [1, 3]
    for nested in ([x[0], x[1]], [[1.0, x[0]]], (x[0], 2.0)):
        with refused(AutogradError):
            sp.Tensor(nested)
    with sp.no_grad():
        assert sp.Tensor([x[0], x[1]]).tolist() == [1, 2]
    assert sp.Tensor([x.detach()[0], 4.0]).tolist() == [1, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: sp.Tensor(1j),
        lambda: sp.Tensor(np.ones(2, np.complex64)),
        lambda: sp.Tensor([1.0]) * 1j,
        lambda: np.ones(1, complex) + sp.Tensor([1.0]),
        lambda: sp.Tensor([1.0]).astype(complex),
        lambda: sp.Tensor([1.0]).to(np.complex128),
        lambda: setattr(sp.Tensor([1.0]), "data", np.ones(1, complex)),
    ],
)
def test_complex_numbers_are_refused(make: Any) -> None:
    with refused(InputError):
        make()


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "tanh", "sigmoid", "sin", "log1p"])
def test_functions_of_integers_are_float32(name: str, dtype: Any) -> None:
    x = np.array([1, 1, 0 if name not in ("log",) else 1]).astype(dtype)
    y = getattr(F, name)(x)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y.numpy(), getattr(F, name)(x.astype(np.float32)).numpy())


def test_power_edge_cases() -> None:
    torch = pytest.importorskip("torch")
    a = np.array([np.inf, 0.0, 0.0, 0.0, 2.0, -2.0, -2.0])
    b = np.array([0.0, -1.0, 2.0, 0.0, 3.0, 2.0, 0.0])
    ours, theirs = ((sp.Tensor(a, True), sp.Tensor(b, True)), [torch.tensor(x, requires_grad=True) for x in (a, b)])
    with np.errstate(all="ignore"):
        (ours[0] ** ours[1]).backward(np.ones(7))
    (theirs[0] ** theirs[1]).backward(torch.ones(7, dtype=torch.float64))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.grad.numpy(), other.grad.numpy())


def warned_lines(function: Any) -> list[tuple[str, int]]:
    """Return the places that warnings of a lost gradient name."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    assert all(w.category is UserWarning for w in found)
    assert all(str(w.message).startswith(f"{w.filename}:{w.lineno}: a tensor that requires a gr") for w in found)
    return [(w.filename, w.lineno) for w in found]


def test_bare_thread_reads_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may begin with the read, without a frame of the user around it."""
    ended, failures = threading.Event(), list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: failures.append(str(found.exc_value)))
    x = sp.Tensor(2.0, True) * 2
    weakref.finalize(x, ended.set)
    _thread.start_new_thread(float, (x,))
    del x
    assert ended.wait(10)
    assert failures == []


def test_installed_program_is_named() -> None:
    """Where all frames are of libraries, the innermost is the user's: a program that is installed as one."""
    file = str(Path(np.__file__).parents[1] / "of_a_user.py")
    names: dict[str, Any] = {"x": sp.Tensor(2.0, True) * 2, "LIBRARIES": LIBRARIES, "user_line": user_line}
    exec(compile("def run():\n    told.append(user_line(LIBRARIES))\n    float(x)\n", file, "exec"), names)
    names["told"] = []

    def run() -> None:
        thread = threading.Thread(target=names["run"])
        thread.start()
        thread.join()

    assert warned_lines(run) == [(file, 3)]
    assert names["told"] == ["of_a_user.py:2"]


NUMBERS: dict[str, Callable[[sp.Tensor], Any]] = {
    "asarray": np.asarray,
    "array of elements": lambda x: np.array([x[0, 0], x[1, 0]]),
    "r_": lambda x: np.r_[x, x],
    "c_": lambda x: np.c_[x, x],
    "mean of a list": lambda x: np.mean([x[0, 0], x[1, 0]]),
    "assignment": lambda x: np.zeros((2, 3)).__setitem__(..., x),
    "scalar": lambda x: np.float64(x[0, 0]),
    "float": lambda x: float(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "complex": lambda x: complex(x[0, 0]),
    "round": lambda x: round(x[0, 0], 1),
    "math": lambda x: math.exp(x[0, 0]),
    "standard library": lambda x: statistics.fmean([x[0, 0], x[1, 0]]),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_lose_a_gradient_warn(case: str) -> None:
    """At the user's line, also where NumPy or the standard library asks in between."""
    x, read = sp.Tensor(X, requires_grad=True), NUMBERS[case]
    here = {(__file__, read.__code__.co_firstlineno)} if hasattr(read, "__code__") else set()
    assert set(warned_lines(lambda: read(x))) >= here
    assert warned_lines(lambda: read(x))
    assert warned_lines(lambda: read(x.detach())) == []
    with sp.no_grad():
        assert warned_lines(lambda: read(x)) == []


def test_warning_of_a_lost_gradient_comes_once() -> None:
    x = sp.Tensor(X, requires_grad=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for row in x:
            math.exp(row[0])
            math.exp(row[1])
    assert [w.lineno for w in found] == [found[0].lineno, found[0].lineno + 1]


def test_reading_a_loss_does_not_warn() -> None:
    """Nothing is lost where the call says that it wants numbers, shows them, or comes after the backward pass."""
    layer = sp.nn.Linear(3, 1)
    loss = layer(X.astype(np.float32)).mean()
    shown = f"{loss:.3f} {loss} {loss!r} {loss.item()} {loss.tolist()} {loss.numpy()} {loss.asnumpy()} %s" % loss
    assert str(loss) in shown
    assert bool(loss > 9) is False
    total = loss * 2
    loss.backward()
    assert float(total) == 2 * float(loss) == total.item()


def test_package_reads_values_without_a_warning(tmp_path: Any) -> None:
    """Pictures, metrics, checkpoints and schedules: with warnings as errors, as everywhere in this suite."""
    layer = sp.nn.Linear(3, 2)
    logits = layer(X.astype(np.float32))
    losses = list(logits.mean(1))
    sp.view.plot_loss({"a": losses})
    sp.save_checkpoint(layer, tmp_path / "layer")
    sp.load_checkpoint(tmp_path / "layer", layer)
    metrics = [sp.train.Accuracy(), sp.train.Loss()]
    metrics[0].update(logits, np.array([0, 1]))
    metrics[1].update(losses[0])
    assert [metric.eval() is None for metric in metrics] == [False, False]
    sp.optim.lr_scheduler.ReduceLROnPlateau(sp.optim.SGD(layer.parameters(), 0.1)).step(losses[0])
