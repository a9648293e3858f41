"""PyTorch's names for features that exist in simparallel.

Values are NumPy's: a dtype is `np.dtype`, `Tensor` is simparallel's. `cuda:k` is a GPU if CuPy has one, otherwise a
simulated device of this rank, see `simparallel.clock.cuda`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel import Tensor, enable_grad, manual_seed, no_grad, no_grad as inference_mode
from simparallel.base.hints import answer_unknown_names as _answer_unknown_names
from simparallel.clock.notes import note_once
from simparallel.compat.torch import accelerator, amp, backends, cuda, distributed, multiprocessing, nn, optim, utils
from simparallel.compat.torch.amp import autocast
from simparallel.compat.torch.creation import *
from simparallel.compat.torch.functions import *
from simparallel.compat.torch.serialization import *

# The version of PyTorch whose names these are; programs may compare it.
__version__ = "2.13.0"

bool = np.dtype(np.bool_)
float16, float32, float64 = map(np.dtype, ("float16", "float32", "float64"))
uint8, int8 = np.dtype("uint8"), np.dtype("int8")
int16, int32, int64 = map(np.dtype, ("int16", "int32", "int64"))
half, float, double, short, int, long = float16, float32, float64, int16, int32, int64


def _find(name: str) -> Any:
    if name != "bfloat16":
        raise KeyError(name)
    note_once("bfloat16 is float32 here: values, memory and simulated time are those of float32.")
    return float32


_answer_unknown_names(__name__, _find, imports=True)
