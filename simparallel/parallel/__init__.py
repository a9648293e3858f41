"""Strategies that train one model on several devices."""

from simparallel.parallel.auto import (
    AutoParallel,
    explicit_redistribution,
    implicit_redistributions,
    no_init_parameters,
)
from simparallel.parallel.distributed import DistributedDataParallel, max_difference_between_ranks
from simparallel.parallel.tensors import distribute_tensor

__all__ = [
    "AutoParallel", "DistributedDataParallel", "distribute_tensor", "explicit_redistribution",
    "implicit_redistributions", "max_difference_between_ranks", "no_init_parameters",
]  # fmt: skip
