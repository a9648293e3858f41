"""Comparisons: bool results, no gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from simparallel.autograd.methods import function
from simparallel.autograd.op import AbstractConstant, Context, Op, Spec
from simparallel.autograd.ops.promotion import operands
from simparallel.autograd.tensor import Tensor
from simparallel.backend import Array


class AbstractPairwise(AbstractConstant):
    """y = a sign b, elementwise and broadcast, by one of Python's operators; without a gradient."""

    rule = "..., ... -> ..."
    _compute: ClassVar[Any]

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        return self._compute(a, b)


class AbstractComparison(AbstractPairwise):
    def infer(self, a: Spec, b: Spec) -> Spec:
        return Spec(super().infer(a, b).shape, np.dtype(bool))


def pairwise(base: type[AbstractPairwise], name: str, text: str, compute: Callable[[Array, Array], Array]) -> type[Op]:
    """Make the op of an operator, for example of `text` "a < b"."""
    settings = {"__doc__": f"y = {text}", "__module__": base.__module__, "_compute": staticmethod(compute)}
    return type(name, (base,), settings)


def pairwise_function(kind: type[Op], name: str, methods: str, doc: str) -> Callable[[Any, Any], Tensor]:
    """Make the function and the methods of such an op."""
    call = kind()

    def pair(a: Any, b: Any) -> Tensor:
        return call(*operands(a, b))

    pair.__name__ = pair.__qualname__ = name
    pair.__module__, pair.__doc__ = kind.__module__, doc
    return function(methods)(pair)


def _comparison(name: str, text: str, compute: Callable[[Array, Array], Array]) -> type[Op]:
    return pairwise(AbstractComparison, name, f"({text})", compute)


def _function(kind: type[Op], text: str, methods: str) -> Callable[[Any, Any], Tensor]:
    return pairwise_function(kind, methods.split()[0], methods, f"Return {text}, bool, broadcast.")


Equal = _comparison("Equal", "a == b", operator.eq)
NotEqual = _comparison("NotEqual", "a != b", operator.ne)
Less = _comparison("Less", "a < b", operator.lt)
LessEqual = _comparison("LessEqual", "a <= b", operator.le)
Greater = _comparison("Greater", "a > b", operator.gt)
GreaterEqual = _comparison("GreaterEqual", "a >= b", operator.ge)

eq, ne = _function(Equal, "a == b", "eq"), _function(NotEqual, "a != b", "ne")
lt, le = _function(Less, "a < b", "lt __lt__"), _function(LessEqual, "a <= b", "le __le__")
gt, ge = _function(Greater, "a > b", "gt __gt__"), _function(GreaterEqual, "a >= b", "ge __ge__")
