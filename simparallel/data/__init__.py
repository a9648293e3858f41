"""Datasets, samplers, the loader and transforms, with PyTorch's names."""

from simparallel.data import transforms
from simparallel.data.cifar import CIFAR10, read_cifar10, read_cifar10_archive
from simparallel.data.dataset import Dataset, Subset, TensorDataset
from simparallel.data.digits import digits
from simparallel.data.folder import ImageFolder
from simparallel.data.idx import read_idx
from simparallel.data.imagefile import read_image
from simparallel.data.images import ImageArrays
from simparallel.data.loader import DataLoader, default_collate, per_rank_batch_size
from simparallel.data.mnist import MNIST, FashionMNIST
from simparallel.data.sampler import DistributedSampler, RandomSampler, Sampler, SequentialSampler

__all__ = [
    "CIFAR10", "MNIST", "DataLoader", "Dataset", "DistributedSampler", "FashionMNIST", "ImageArrays",
    "ImageFolder", "RandomSampler", "Sampler", "SequentialSampler", "Subset", "TensorDataset",
    "default_collate", "digits", "per_rank_batch_size", "read_cifar10",
    "read_cifar10_archive", "read_idx", "read_image", "transforms",
]  # fmt: skip
