"""Strategies that train one model on several devices."""

from simparallel.parallel.auto import (
    AutoParallel,
    explicit_redistribution,
    implicit_redistributions,
    implicit_replication,
    no_init_parameters,
)
from simparallel.parallel.distributed import DistributedDataParallel, max_difference_between_ranks
from simparallel.parallel.grad_reducer import DistributedGradReducer, broadcast_parameters
from simparallel.parallel.layers import (
    ColumnParallelLinear,
    ParallelTransformerBlock,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from simparallel.parallel.tensors import distribute_module, distribute_tensor

__all__ = [
    "AutoParallel", "ColumnParallelLinear", "DistributedDataParallel", "DistributedGradReducer",
    "ParallelTransformerBlock", "RowParallelLinear", "SequenceParallelLayerNorm", "VocabParallelCrossEntropy",
    "VocabParallelEmbedding", "broadcast_parameters", "distribute_module", "distribute_tensor",
    "explicit_redistribution", "implicit_redistributions", "implicit_replication",
    "max_difference_between_ranks", "no_init_parameters",
]  # fmt: skip
