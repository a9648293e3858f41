"""`delivered`: a batch of a loader as a Tensor, on the GPU of a rank that has one."""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.arrays.captures import running
from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_array


def delivered(values: Any) -> Tensor:
    """Return `Tensor(values)`; on a GPU its copy runs beside the computation.

    Raises:
        As `Tensor`.
    """
    device = running.device
    # A capture refuses copies from the host; it would not see one on another stream.
    if device is not None and running.capture is None and not isinstance(values, Tensor):
        values = as_array(values)
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
            values = device.uploads.copy(values)
    return Tensor(values)
