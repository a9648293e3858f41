"""Change of dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.autograd.op import Context, Op, Spec, Work
from simparallel.autograd.tensor import Tensor
from simparallel.backend import Array


class Cast(Op):
    """y = x in another dtype; the gradient goes back in the dtype of x.

    To an integer or bool dtype the result is a step function, and off the tape.

    Args:
        dtype: of the result.
    """

    rule = "... -> ..."

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.dtype.kind not in "fc":
            inputs = tuple(x.detach() for x in inputs)
        return super().__call__(*inputs)

    def infer(self, x: Spec) -> Spec:
        return Spec(x.shape, self.dtype)

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.astype(self.dtype)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy.astype(ctx.plan.inputs[0].dtype),)

    def work(self, x: Spec) -> Work:
        return Work(0, x.size_bytes + self.infer(x).size_bytes)
