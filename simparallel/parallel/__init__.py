"""Strategies that train one model on several devices."""

from simparallel.parallel.distributed import DistributedDataParallel, max_difference_between_ranks

__all__ = ["DistributedDataParallel", "max_difference_between_ranks"]
