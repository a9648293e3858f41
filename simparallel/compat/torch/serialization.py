"""`torch.save` and `torch.load`: safetensors and JSON in one file, which executes nothing when it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

import simparallel as sp
from simparallel import Tensor, save
from simparallel.autograd.tree_map import change_each
from simparallel.compat.front import unused
from simparallel.compat.torch.creation import device


def load(f: Any, map_location: Any = None, *, weights_only: bool = True, **settings: Any) -> Any:
    """Load what `save` wrote, or a dict of Tensors from another safetensors file.

    Args:
        f: path of the file.
        map_location: the device of the Tensors, or a dict {saved: device}, of which the first device counts.
        weights_only: there is nothing else in such a file.

    Raises:
        CheckpointError: a pickle, as PyTorch writes; a damaged file, or one of another kind.
    """
    unused("load", **settings)
    place = next(iter(map_location.values())) if isinstance(map_location, dict) else map_location
    where = device("cpu" if place is None or callable(place) else place)
    return change_each(sp.load(f), lambda x: Tensor(x).to(where) if isinstance(x, np.ndarray) else x)


__all__ = ["load", "save"]
