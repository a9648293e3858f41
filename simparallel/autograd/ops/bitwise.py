"""Bitwise ops on integers, logical ops on bools: no gradient."""

from __future__ import annotations

import operator
from typing import Any

from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Spec
from simparallel.autograd.ops.compare import AbstractPairwise, pairwise, pairwise_function
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import DTypeError


class AbstractBitwise(AbstractPairwise):
    def infer(self, *inputs: Spec) -> Spec:
        for spec in inputs:
            if spec.dtype.kind not in "biu":
                raise DTypeError(f"a tensor of {spec.dtype} has no bits to combine; expected bool or integers.")
        return super().infer(*inputs)


BitwiseAnd = pairwise(AbstractBitwise, "BitwiseAnd", "a & b", operator.and_)
BitwiseOr = pairwise(AbstractBitwise, "BitwiseOr", "a | b", operator.or_)
BitwiseXor = pairwise(AbstractBitwise, "BitwiseXor", "a ^ b", operator.xor)


class BitwiseNot(AbstractBitwise):
    """y = ~x: not x for bools, -x - 1 for signed integers"""

    rule = "... -> ..."

    def forward(self, ctx: Context, x: Array) -> Array:
        return ~x


_NOT = BitwiseNot()
_DOC = "Return a {} b of bools or integers, broadcast."
bitwise_and = pairwise_function(BitwiseAnd, "bitwise_and", "__and__ __rand__", _DOC.format("&"))
bitwise_or = pairwise_function(BitwiseOr, "bitwise_or", "__or__ __ror__", _DOC.format("|"))
bitwise_xor = pairwise_function(BitwiseXor, "bitwise_xor", "__xor__ __rxor__", _DOC.format("^"))


@function("__invert__")
def bitwise_not(x: Any) -> Tensor:
    """Return ~x of bools or integers."""
    return _NOT(as_tensor(x))
