"""`delivered`: a batch of a loader as a Tensor, on the GPU of a rank that has one."""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.arrays.seam import uploaded
from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_array


def delivered(values: Any) -> Tensor:
    """Return `Tensor(values)`; on a GPU it is copied while earlier kernels still run.

    Raises:
        As `Tensor`.
    """
    if not isinstance(values, Tensor):
        values = as_array(values)
        if type(values) is np.ndarray and values.dtype.kind in "biuf":
            values = uploaded(values)
    return Tensor(values)
