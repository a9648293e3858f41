"""Datasets, samplers and the loader, with PyTorch's names."""

from simparallel.data.dataset import Dataset, Subset, TensorDataset
from simparallel.data.digits import digits
from simparallel.data.loader import DataLoader, default_collate, per_rank_batch_size
from simparallel.data.sampler import DistributedSampler, RandomSampler, Sampler, SequentialSampler

__all__ = [
    "DataLoader", "Dataset", "DistributedSampler", "RandomSampler", "Sampler", "SequentialSampler",
    "Subset", "TensorDataset", "default_collate", "digits", "per_rank_batch_size",
]  # fmt: skip
