"""Tensors, the tape, and the ops by family."""

from simparallel.autograd import functions
from simparallel.autograd.differentiate import value_and_grad
from simparallel.autograd.elementwise import Add, Div, Exp, Log, Mul, Neg, ReLU, Sigmoid, Sub, Tanh
from simparallel.autograd.loss import CrossEntropy
from simparallel.autograd.matmul import Linear, MatMul
from simparallel.autograd.op import Context, Op, Plan, Spec, Work
from simparallel.autograd.reduce import Mean, Sum
from simparallel.autograd.shape import Permute, Reshape
from simparallel.autograd.tape import at_backward_end, no_grad, run_backward
from simparallel.autograd.tensor import Tensor

__all__ = [
    "Add", "Context", "CrossEntropy", "Div", "Exp", "Linear", "Log", "MatMul", "Mean", "Mul", "Neg",
    "Op", "Permute", "Plan", "ReLU", "Reshape", "Sigmoid", "Spec", "Sub", "Sum", "Tanh", "Tensor",
    "Work", "at_backward_end", "functions", "no_grad", "run_backward", "value_and_grad",
]  # fmt: skip
