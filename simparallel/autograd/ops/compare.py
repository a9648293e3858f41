"""Comparisons: bool results, no gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from simparallel.autograd.methods import function
from simparallel.autograd.op import AbstractConstant, Context, Spec
from simparallel.autograd.ops.promotion import operands
from simparallel.autograd.tensor import Tensor
from simparallel.backend import Array


class AbstractComparison(AbstractConstant):
    rule = "..., ... -> ..."
    _compare: ClassVar[Any]

    def infer(self, a: Spec, b: Spec) -> Spec:
        return Spec(super().infer(a, b).shape, np.dtype(bool))

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        return self._compare(a, b)


def _comparison(name: str, sign: str, compare: Callable[[Array, Array], Array]) -> type[AbstractComparison]:
    settings = {"__doc__": f"y = (a {sign} b)", "__module__": __name__, "_compare": staticmethod(compare)}
    return type(name, (AbstractComparison,), settings)


Equal = _comparison("Equal", "==", operator.eq)
NotEqual = _comparison("NotEqual", "!=", operator.ne)
Less = _comparison("Less", "<", operator.lt)
LessEqual = _comparison("LessEqual", "<=", operator.le)
Greater = _comparison("Greater", ">", operator.gt)
GreaterEqual = _comparison("GreaterEqual", ">=", operator.ge)
_EQ, _NE, _LT = Equal(), NotEqual(), Less()
_LE, _GT, _GE = LessEqual(), Greater(), GreaterEqual()


@function("eq")
def eq(a: Any, b: Any) -> Tensor:
    """Return a == b, bool, broadcast."""
    return _EQ(*operands(a, b))


@function("ne")
def ne(a: Any, b: Any) -> Tensor:
    """Return a != b, bool, broadcast."""
    return _NE(*operands(a, b))


@function("lt __lt__")
def lt(a: Any, b: Any) -> Tensor:
    """Return a < b, bool, broadcast."""
    return _LT(*operands(a, b))


@function("le __le__")
def le(a: Any, b: Any) -> Tensor:
    """Return a <= b, bool, broadcast."""
    return _LE(*operands(a, b))


@function("gt __gt__")
def gt(a: Any, b: Any) -> Tensor:
    """Return a > b, bool, broadcast."""
    return _GT(*operands(a, b))


@function("ge __ge__")
def ge(a: Any, b: Any) -> Tensor:
    """Return a >= b, bool, broadcast."""
    return _GE(*operands(a, b))
