"""Datasets, samplers, the loader and transforms, with PyTorch's names; pipelines with MindSpore's."""

from simparallel.base.hints import answer_unknown_names
from simparallel.data import transforms
from simparallel.data.cifar import CIFAR10, read_cifar10, read_cifar10_archive
from simparallel.data.dataset import Dataset, ImageArrays, Subset, TensorDataset
from simparallel.data.digits import digits
from simparallel.data.folder import ImageFolder
from simparallel.data.imagefile import read_image
from simparallel.data.loader import DataLoader, default_collate, per_rank_batch_size
from simparallel.data.mnist import MNIST, FashionMNIST, read_idx, write_idx
from simparallel.data.pipeline import Pipeline
from simparallel.data.sampler import DistributedSampler, RandomSampler, Sampler, SequentialSampler
from simparallel.data.sharded import (
    Cifar10Dataset,
    FashionMnistDataset,
    GeneratorDataset,
    ImageFolderDataset,
    MnistDataset,
    NumpySlicesDataset,
    SourceDataset,
)

__all__ = [
    "CIFAR10", "MNIST", "Cifar10Dataset", "DataLoader", "Dataset", "DistributedSampler", "FashionMNIST",
    "FashionMnistDataset", "GeneratorDataset", "ImageArrays", "ImageFolder", "ImageFolderDataset",
    "MnistDataset", "NumpySlicesDataset", "Pipeline", "RandomSampler", "Sampler", "SequentialSampler",
    "SourceDataset", "Subset", "TensorDataset", "default_collate", "digits", "per_rank_batch_size", "read_cifar10",
    "read_cifar10_archive", "read_idx", "read_image", "transforms", "write_idx",
]  # fmt: skip

answer_unknown_names(__name__)
