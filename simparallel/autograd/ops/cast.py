"""Change of dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Spec, instance
from simparallel.autograd.tensor import Tensor, as_tensor, check_numbers
from simparallel.backend import Array


class Cast(Op):
    """y = x in another dtype; the gradient has the dtype of x.

    A cast to an integer or bool dtype is a step function, so it is not recorded in the autograd graph.

    Args:
        dtype: dtype of the result.
    """

    rule = "... -> ..."
    stays = True
    flops_per_element = 0

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        check_numbers("Cast", np.empty(0, self.dtype))

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.dtype.kind != "f":
            inputs = tuple(as_tensor(x).detach() for x in inputs)
        return super().__call__(*inputs)

    def infer(self, x: Spec) -> Spec:
        return Spec(x.shape, self.dtype)

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.astype(self.dtype)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy.astype(ctx.plan.inputs[0].dtype),)


@function("astype")
def cast(x: Any, dtype: Any) -> Tensor:
    """Convert `x` to `dtype`; return `x` itself if it has this dtype."""
    x, dtype = as_tensor(x), np.dtype(dtype)
    return x if x.dtype == dtype else instance(Cast, dtype)(x)
