"""Distributed deep-learning training on one laptop.

Real device processes, real gradients, real collectives through shared memory, simulated hardware
time. `import simparallel as sp` starts nothing and imports neither CuPy nor matplotlib.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from simparallel import errors, functions, ops
from simparallel.autograd import Function, Tensor, captured, enable_grad, no_grad, value_and_grad
from simparallel.backend import (
    device_count,
    get_float32_matmul_precision,
    get_namespace,
    manual_seed,
    manual_seed as set_seed,
    set_float32_matmul_precision,
)
from simparallel.base.adasum import adasum
from simparallel.base.hints import answer_unknown_names
from simparallel.clock.recorder import record_function
from simparallel.collectives import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    empty,
    exscan,
    gather,
    gather_object,
    iprobe,
    irecv,
    isend,
    isendrecv,
    issend,
    log,
    monitored_barrier,
    new_group,
    probe,
    recv,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    send,
    sendrecv,
    ssend,
)
from simparallel.comm import Group, Work
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh
from simparallel.machine import cluster
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec
from simparallel.machine.devices import Device as device
from simparallel.world.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_context,
)
from simparallel.world.rank import (
    get_group_size,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_num_nodes,
    get_rank,
    get_world_size,
    init,
    node_group,
    set_memory,
)

if TYPE_CHECKING:
    from simparallel import data, exercises, models, nn, optim, parallel, testing, train, view, zoo
    from simparallel.algorithms.ledger import Ledger
    from simparallel.nn import Parameter
    from simparallel.parallel import (
        AutoParallel,
        distribute_module,
        distribute_tensor,
        from_local,
        no_init_parameters,
        shard,
    )
    from simparallel.parallel.pipeline.schedule import pipeline_schedule
    from simparallel.parallel.pipeline.search import search_schedule
    from simparallel.predict.dry_run import dry_run
    from simparallel.predict.prediction import Prediction
    from simparallel.runtime import progress
    from simparallel.runtime.launcher.launch import Cluster, Results, launch
    from simparallel.search.plan import Plan
    from simparallel.simulate.prediction import predict_transformer
    from simparallel.trace import Trace
    from simparallel.train import (
        Callback,
        CheckpointConfig,
        CheckpointManager,
        EarlyStopping,
        LearningRateScheduler,
        LossMonitor,
        Model,
        ModelCheckpoint,
        TimeMonitor,
        load,
        load_checkpoint,
        load_param_into_net,
        save,
        save_checkpoint,
    )

__version__ = "0.1.0"

__all__ = [
    "AutoParallel", "Callback", "CheckpointConfig", "CheckpointManager", "Cluster", "ClusterSpec", "DeviceSpec",
    "EarlyStopping", "Function", "GRAPH_MODE", "Group", "Layout", "LearningRateScheduler", "Ledger", "LinkSpec",
    "LossMonitor", "Mesh", "Model", "ModelCheckpoint", "PYNATIVE_MODE", "ParallelMode", "Parameter", "Plan",
    "Prediction", "Results", "Tensor", "TimeMonitor", "Trace", "Work", "adasum", "all_gather", "all_gather_object",
    "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object", "captured", "cluster", "data",
    "device", "device_count",
    "distribute_module", "distribute_tensor", "dry_run", "empty", "enable_grad", "errors", "exercises", "exscan",
    "from_local", "functions", "gather", "gather_object", "get_auto_parallel_context", "get_float32_matmul_precision",
    "get_group_size", "get_local_rank", "get_local_world_size", "get_namespace", "get_node_rank", "get_num_nodes",
    "get_rank", "get_world_size", "init", "iprobe", "irecv", "isend", "isendrecv", "issend", "launch", "load",
    "load_checkpoint", "load_param_into_net", "log", "manual_seed", "models", "monitored_barrier", "new_group", "nn",
    "no_grad", "no_init_parameters", "node_group", "ops", "optim", "parallel", "pipeline_schedule",
    "predict_transformer", "probe", "progress",
    "record_function", "recv", "reduce", "reduce_scatter", "reset_auto_parallel_context", "save", "save_checkpoint",
    "scan", "scatter", "search_schedule", "send", "sendrecv", "set_auto_parallel_context", "set_context",
    "set_float32_matmul_precision", "set_memory", "set_seed", "shard", "ssend", "testing", "train", "value_and_grad",
    "view", "zoo",
]  # fmt: skip

logging.getLogger("simparallel").addHandler(logging.NullHandler())


_LATER = {
    "Cluster": "runtime", "launch": "runtime", "progress": "runtime", "Trace": "trace",
    "Ledger": "algorithms.ledger", "Results": "runtime.launcher.launch",
    "predict_transformer": "simulate.prediction",
    "dry_run": "predict.dry_run", "Prediction": "predict.prediction", "Plan": "search.plan",
    "pipeline_schedule": "parallel.pipeline.schedule", "search_schedule": "parallel.pipeline.search",
    **dict.fromkeys(
        ("Callback", "CheckpointConfig", "CheckpointManager", "EarlyStopping", "LearningRateScheduler",
         "LossMonitor", "Model", "ModelCheckpoint", "TimeMonitor", "load", "load_checkpoint",
         "load_param_into_net", "save", "save_checkpoint"), "train",
    ),
    **dict.fromkeys(
        ("AutoParallel", "distribute_module", "distribute_tensor", "from_local", "no_init_parameters", "shard"),
        "parallel",
    ),
    "Parameter": "nn",
    **dict.fromkeys(("data", "exercises", "models", "nn", "optim", "parallel", "testing", "train", "view", "zoo"), ""),
}  # fmt: skip


def _later(name: str) -> Any:
    """Import on first use the modules that device processes and plain scripts may not need. Raises KeyError."""
    package = _LATER[name]
    value = getattr(import_module(f"simparallel.{package}"), name) if package else import_module(f"simparallel.{name}")
    globals()[name] = value
    return value


answer_unknown_names(__name__, _later, imports=True)
