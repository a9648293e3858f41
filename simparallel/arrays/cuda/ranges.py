"""NVTX ranges: names that NVIDIA's profiler (Nsight Systems) shows above the kernels of a program.

`SIMPARALLEL_NVTX=1` switches them on in runs on a GPU: for ops, optimizer steps, collectives and `record_function`.
Ranges show the time of the host: from the call of an operation until it has started its last kernel.
"""

from __future__ import annotations

import os
from typing import Any

from simparallel.errors import InputError

VARIABLE = "SIMPARALLEL_NVTX"


def nvtx_of(cuda: Any) -> Any:
    """Return `cupy.cuda.nvtx` if ranges are switched on, else None.

    Raises:
        InputError: SIMPARALLEL_NVTX is neither 0 nor 1, or CuPy has been built without NVTX.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{VARIABLE}={value!r} is not 1 (NVTX ranges) or 0 (none).")
    if value != "1":
        return None
    if not cuda.nvtx.available:
        raise InputError(f"{VARIABLE}=1 needs a CuPy that was built with NVTX; set it to 0, or install CuPy's wheel.")
    return cuda.nvtx
