"""Strategies that train one model on several devices."""

from simparallel.parallel import comm_hooks
from simparallel.parallel.auto import (
    AutoParallel,
    explicit_redistribution,
    implicit_redistributions,
    implicit_replication,
    no_init_parameters,
)
from simparallel.parallel.buckets import GradBucket
from simparallel.parallel.comm_hooks import PowerSGDState
from simparallel.parallel.distributed import DistributedDataParallel, max_difference_between_ranks
from simparallel.parallel.join import Join
from simparallel.parallel.layers import (
    ColumnParallelLinear,
    ParallelTransformerBlock,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from simparallel.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from simparallel.parallel.tensors import distribute_module, distribute_tensor

__all__ = [
    "AutoParallel", "ColumnParallelLinear", "DistributedDataParallel", "GradBucket", "Join",
    "ParallelTransformerBlock", "PowerSGDState", "RowParallelLinear", "SequenceParallelLayerNorm",
    "SyncBatchNorm", "VocabParallelCrossEntropy", "VocabParallelEmbedding", "comm_hooks",
    "convert_sync_batchnorm", "distribute_module", "distribute_tensor", "explicit_redistribution",
    "implicit_redistributions", "implicit_replication", "max_difference_between_ranks",
    "no_init_parameters",
]  # fmt: skip
