"""Strategies that train one model on several devices."""

from simparallel.base.hints import answer_unknown_names
from simparallel.nn.deferred import no_init_parameters
from simparallel.nn.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from simparallel.parallel.ddp import comm_hooks
from simparallel.parallel.ddp.adasum import AdasumOptimizer, DistributedGradScaler, Nodes
from simparallel.parallel.ddp.averaging import PeriodicModelAverager, PostLocalSGDOptimizer, PostLocalSGDState
from simparallel.parallel.ddp.buckets import GradBucket
from simparallel.parallel.ddp.comm_hooks import PowerSGDState
from simparallel.parallel.ddp.distributed import DistributedDataParallel
from simparallel.parallel.ddp.grad_reducer import DistributedGradReducer
from simparallel.parallel.ddp.mixed_precision import MixedPrecision
from simparallel.parallel.ddp.shared_buffers import broadcast_parameters, max_difference_between_ranks
from simparallel.parallel.ddp.uneven_inputs import Join
from simparallel.parallel.operator.auto import (
    AutoParallel,
    explicit_redistribution,
    implicit_redistributions,
    micro_batches,
    quick_redistribution,
)
from simparallel.parallel.operator.distribute import distribute_module, distribute_tensor, from_local, shard
from simparallel.parallel.operator.interpreter import implicit_replication
from simparallel.parallel.operator.layers import (
    ColumnParallelLinear,
    ParallelTransformerBlock,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from simparallel.parallel.pipeline.pipeline import Pipeline
from simparallel.parallel.replicas.data_parallel import DataParallel
from simparallel.parallel.replicas.replicate import parallel_apply, replicate
from simparallel.parallel.replicas.scatter_gather import gather, scatter
from simparallel.parallel.sharded.fully_shard import FullySharded, fully_shard
from simparallel.parallel.sharded.zero_redundancy import ZeroRedundancyOptimizer

__all__ = [
    "AdasumOptimizer", "AutoParallel", "ColumnParallelLinear", "DataParallel", "DistributedDataParallel",
    "DistributedGradReducer", "DistributedGradScaler", "FullySharded", "GradBucket", "Join", "MixedPrecision", "Nodes",
    "ParallelTransformerBlock", "PeriodicModelAverager", "Pipeline", "PostLocalSGDOptimizer", "PostLocalSGDState",
    "PowerSGDState", "RowParallelLinear", "SequenceParallelLayerNorm", "SyncBatchNorm", "VocabParallelCrossEntropy",
    "VocabParallelEmbedding", "ZeroRedundancyOptimizer", "broadcast_parameters", "comm_hooks", "convert_sync_batchnorm",
    "distribute_module", "distribute_tensor", "explicit_redistribution", "from_local", "fully_shard", "gather",
    "implicit_redistributions", "implicit_replication", "max_difference_between_ranks", "micro_batches",
    "no_init_parameters", "parallel_apply", "quick_redistribution", "replicate", "scatter", "shard",
]  # fmt: skip

answer_unknown_names(__name__)
