"""`torch.multiprocessing`: `spawn`, over `sp.launch`."""

from __future__ import annotations

import pickle
from typing import Any

import simparallel as sp
from simparallel.base.pickling import dumps
from simparallel.compat.front import refuse, unused
from simparallel.compat.imports import install, installed


def spawn(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, **settings: Any) -> None:
    """Run `fn(rank, *args)` on `nprocs` ranks, see `sp.launch`.

    Raises:
        InputError: `join=False`; otherwise as `sp.launch`.
    """
    unused("spawn", **settings)
    refuse("spawn", "leave it out, and spawn waits for the ranks", join="False" if not join else None)
    sp.launch(_begin, (installed(), dumps((fn, args))), world_size=nprocs)


def set_start_method(method: str, force: bool = False) -> None:
    """Note the method: `spawn` starts ranks in its own way."""
    unused("set_start_method", method=method)


def _begin(fronts: tuple[str, ...], pickled: bytes) -> None:
    # Before the function is unpickled: its modules may import torch.
    for framework in fronts:
        install(framework)
    fn, args = pickle.loads(pickled)
    fn(sp.get_rank(), *args)
