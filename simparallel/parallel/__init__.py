"""Strategies that train one model on several devices."""

from simparallel.parallel.distributed import DistributedDataParallel, max_difference_between_ranks
from simparallel.parallel.tensors import distribute_tensor

__all__ = ["DistributedDataParallel", "distribute_tensor", "max_difference_between_ranks"]
