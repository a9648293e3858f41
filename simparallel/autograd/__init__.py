"""Tensors, the tape, and the ops by family."""

from simparallel.autograd import functions
from simparallel.autograd.captured import captured
from simparallel.autograd.function import Function
from simparallel.autograd.grad_mode import enable_grad, no_grad
from simparallel.autograd.op import Context, Op, Plan, Spec, Work
from simparallel.autograd.ops import *  # noqa: F403
from simparallel.autograd.tape import Backward, run_backward, running_backward
from simparallel.autograd.tensor import Tensor
from simparallel.autograd.value_and_grad import value_and_grad

__all__ = [
    "Backward", "Context", "Function", "Op", "Plan", "Spec", "Tensor", "Work", "captured",
    "enable_grad", "functions", "no_grad", "run_backward", "running_backward", "value_and_grad",
]  # fmt: skip
__all__ += sorted(Op.registry)
