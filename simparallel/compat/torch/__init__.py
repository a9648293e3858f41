"""PyTorch's names for what exists in simparallel.

Values are NumPy's: a dtype is `np.dtype`, `Tensor` is simparallel's. `cuda:k` is a GPU where CuPy has one, and else a
simulated device of this rank, see `simparallel.cuda`.
"""

from __future__ import annotations

import numpy as np

from simparallel import Tensor, enable_grad, manual_seed, no_grad
from simparallel.autograd.functions import (
    abs,
    add,
    argmax,
    argmin,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    cat,
    chunk,
    concat,
    div,
    eq,
    exp,
    flatten,
    ge,
    gt,
    le,
    log,
    log_softmax,
    logsumexp,
    lt,
    matmul,
    maximum,
    mean,
    minimum,
    mul,
    ne,
    neg,
    permute,
    pow,
    relu,
    reshape,
    sigmoid,
    softmax,
    split,
    sqrt,
    squeeze,
    stack,
    std,
    sub,
    sum,
    tanh,
    tile,
    transpose,
    unsqueeze,
    var,
    where,
)
from simparallel.compat.torch import cuda, distributed, nn, optim, utils
from simparallel.compat.torch.creation import (
    arange,
    as_tensor,
    device,
    empty,
    eye,
    from_numpy,
    full,
    linspace,
    ones,
    ones_like,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
    zeros_like,
)
from simparallel.compat.torch.functions import clamp, clamp as clip, max, min

__version__ = "2.13.0"  # of the names

bool = np.dtype(np.bool_)
float16, float32, float64 = map(np.dtype, ("float16", "float32", "float64"))
uint8, int8 = np.dtype("uint8"), np.dtype("int8")
int16, int32, int64 = map(np.dtype, ("int16", "int32", "int64"))
half, float, double, short, int, long = float16, float32, float64, int16, int32, int64
