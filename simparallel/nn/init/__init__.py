"""Initial values: functions that fill a tensor (PyTorch's names), and initializers by name (MindSpore's)."""

from simparallel.nn.init.fill import (
    calculate_gain,
    constant_,
    copy_,
    fans,
    kaiming_normal_,
    kaiming_uniform_,
    normal_,
    ones_,
    orthogonal_,
    trunc_normal_,
    uniform_,
    xavier_normal_,
    xavier_uniform_,
    zeros_,
)
from simparallel.nn.init.initializers import (
    Constant,
    HeNormal,
    HeUniform,
    Initializer,
    Normal,
    One,
    Orthogonal,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
    Zero,
    as_initializer,
    initializer,
)

__all__ = [
    "Constant", "HeNormal", "HeUniform", "Initializer", "Normal", "One", "Orthogonal", "TruncatedNormal", "Uniform",
    "XavierNormal", "XavierUniform", "Zero", "as_initializer", "calculate_gain", "constant_", "copy_", "fans",
    "initializer", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "orthogonal_", "trunc_normal_",
    "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
]  # fmt: skip
