"""`torch.save` and `torch.load`: safetensors and JSON in one file, which executes nothing when it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

import simparallel as sp
from simparallel import Tensor
from simparallel.autograd.tree_map import change_each
from simparallel.base.files import expanded, open_file
from simparallel.compat.front import unused
from simparallel.compat.torch.creation import device
from simparallel.errors import CheckpointError


def save(obj: Any, f: Any) -> None:
    """Save nested dicts, lists, tuples, numbers, text and Tensors in one file, see `sp.save`.

    Raises:
        CheckpointError: `obj` holds any other type, such as a module instead of its state_dict; or writing fails.
    """
    sp.save(obj, f)


def load(f: Any, map_location: Any = None, *, weights_only: bool = True, mmap: bool | None = None) -> Any:
    """Load what `save` wrote, or a dict of Tensors from another safetensors file.

    Args:
        f: path of the file.
        map_location: the device of the Tensors, or a dict {saved: device}, of which the first device counts.
        weights_only: there is nothing else in such a file.

    Raises:
        CheckpointError: a pickle, as PyTorch writes; a damaged file, or another one.
    """
    unused("load", mmap=mmap)
    try:
        found = sp.load(f)
    except CheckpointError as error:
        with open_file(expanded(f)) as file:
            if file.read(2) not in (b"PK", b"\x80\x02"):
                raise
        raise CheckpointError(
            f"{f} is a pickle, which could run any program when it is read; where PyTorch is installed, write it again "
            "with safetensors.torch.save_file(state_dict, path)."
        ) from error
    place = next(iter(map_location.values())) if isinstance(map_location, dict) else map_location
    place = "cpu" if place is None or callable(place) else place
    return change_each(found, lambda x: Tensor(x).to(device(place)) if isinstance(x, np.ndarray) else x)


__all__ = ["load", "save"]
