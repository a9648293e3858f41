"""The record of an op: how to draw its calls, and what it is in NumPy and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from typing import Any, cast

import numpy as np

from simparallel.autograd import Op
from simparallel.autograd.methods import FUNCTIONS, TensorMethods
from simparallel.course.exercises.exercise import EXERCISES

OpCall = tuple[Op, list[np.ndarray]]
Peers = dict[str, Any]

ORACLES: Peers = {}
EXACT: set[str] = set()
NO_FLOPS: set[str] = set()
TORCH: Peers = {}
WITHOUT: dict[str, str] = {}
_CALLS: dict[str, Callable[..., Any]] = {}


class _Later:
    """A module that is imported when it is first used: PyTorch is an extra, and takes seconds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


torch, TF = _Later("torch"), _Later("torch.nn.functional")


def record(*, near: Peers | None = None, exact: Peers | None = None, moved: Peers | None = None) -> Any:
    """Record ops with the strategy that draws their calls. A decorator.

    The strategy takes `(name, dtype, exact)`, as `op_calls`, and draws `(op, arrays)`. Each op comes with itself in
    NumPy, `(op, *arrays)`, and in PyTorch, `(op, *tensors)`: a pair, with a reason in place of a missing peer, or one
    function for both.

    Args:
        near: ops that equal NumPy's result up to rounding.
        exact: ops that give its very bits for small integers.
        moved: the same, and they only move elements: they count no flops.
    """

    def enter(strategy: Callable[..., Any]) -> Callable[..., Any]:
        for name, peers in {**(near or {}), **(exact or {}), **(moved or {})}.items():
            ORACLES[name], peer = peers if isinstance(peers, tuple) else (peers, peers)
            (WITHOUT if isinstance(peer, str) else TORCH)[name] = peer
            _CALLS[name] = strategy
        EXACT.update(exact or (), moved or ())
        NO_FLOPS.update(moved or ())
        return strategy

    return enter


@contextmanager
def unregistered() -> Iterator[None]:
    """Forget in the end the ops, functions, methods, records and exercises of the block: examples are not ours."""
    registries: tuple[Any, ...] = (Op.registry, FUNCTIONS, ORACLES, EXACT, NO_FLOPS, TORCH, WITHOUT, _CALLS, EXERCISES)
    before, methods = [copy(registry) for registry in registries], set(vars(TensorMethods))
    try:
        yield
    finally:
        for registry, old in zip(registries, before, strict=True):
            registry.clear()
            registry.update(old)
        for name in vars(TensorMethods).keys() - methods:
            delattr(TensorMethods, name)


def op_calls(name: str, dtype: Any = np.float64, *, exact: bool = False) -> Any:
    """Draw calls of the op `name`: pairs of an Op with its settings and the list of its input arrays.

    Args:
        name: a key of `Op.registry` that has a record.
        dtype: dtype of the floating-point inputs.
        exact: draw small integers instead of floats at least 0.5 away from 0.
    """
    return _CALLS[name](name, dtype, exact)


def new(name: str, *settings: Any) -> Op:
    return cast(Any, Op.registry[name])(*settings)


def axes(op: Any) -> Any:
    """Return the dims for NumPy."""
    return tuple(op.dim) if isinstance(op.dim, tuple) else op.dim


def dims(op, x):
    """Return the reduced dims as a tuple. An empty tuple means all dims to PyTorch, none to NumPy and to us."""
    if op.dim is None:
        return tuple(range(x.ndim))
    return op.dim if isinstance(op.dim, tuple) else (op.dim,)


def reduction(op, count):
    """Reduce; the mean of nothing is NaN in PyTorch and 0 here, so use the sum."""
    return "sum" if op.reduction == "mean" and not count else op.reduction
