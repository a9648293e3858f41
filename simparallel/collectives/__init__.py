"""The collectives under their public names: for Tensors, NumPy and CuPy arrays."""

from simparallel.collectives.calls import (
    adasum_layers,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    empty,
    gather,
    gather_object,
    log,
    new_group,
    reduce,
    reduce_scatter,
    scatter,
)
from simparallel.collectives.carry import go_on, wait_for
from simparallel.collectives.messages import irecv, isend, recv, send

__all__ = [
    "adasum_layers", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
    "broadcast_object", "empty", "gather", "gather_object", "go_on", "irecv", "isend", "log", "new_group",
    "recv", "reduce", "reduce_scatter", "scatter", "send", "wait_for",
]  # fmt: skip
