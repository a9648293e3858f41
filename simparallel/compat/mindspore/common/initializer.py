"""`mindspore.common.initializer`."""

from simparallel.nn.init import (
    Constant,
    HeNormal,
    HeUniform,
    Normal,
    One,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
    Zero,
    initializer,
)
