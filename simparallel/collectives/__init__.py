"""The collectives under their public names: for Tensors, NumPy and CuPy arrays."""

from simparallel.base.hints import answer_unknown_names
from simparallel.collectives.api import (
    adasum_layers,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exscan,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from simparallel.collectives.control import (
    all_gather_object,
    barrier,
    broadcast_object,
    empty,
    gather_object,
    log,
    monitored_barrier,
    new_group,
)
from simparallel.collectives.host_copy import go_on, wait_for
from simparallel.collectives.messages import iprobe, irecv, isend, isendrecv, issend, probe, recv, send, sendrecv, ssend

__all__ = [
    "adasum_layers", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast",
    "broadcast_object", "empty", "exscan", "gather", "gather_object", "go_on", "iprobe", "irecv", "isend",
    "isendrecv", "issend", "log", "monitored_barrier", "new_group", "probe", "recv", "reduce",
    "reduce_scatter", "scan", "scatter", "send", "sendrecv", "ssend", "wait_for",
]  # fmt: skip

answer_unknown_names(__name__)
