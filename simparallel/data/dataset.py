"""Datasets: objects with a length and an index.

A dataset with `vectorized = True` also accepts an array of indices and returns a whole batch from
one look-up. This makes a loader fast without worker processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, ClassVar, Protocol

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_array
from simparallel.backend import Array
from simparallel.base.units import format_object
from simparallel.data.source import find_root
from simparallel.data.transforms import apply
from simparallel.errors import DTypeError, InputError, ShapeError


class Dataset(Protocol):
    """The interface for loaders: `len(dataset)` samples, and `dataset[i]` for i in 0 … len-1."""

    __class_getitem__: Any = classmethod(GenericAlias)

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


class TensorDataset:
    """Samples are the rows of one or more arrays: `dataset[i] == (images[i], labels[i])`.

    Args:
        arrays: arrays, Tensors or nested sequences, each of shape (n, ...). Arrays are kept, not copied.

    Attributes:
        arrays: tuple of the arrays.

    Raises:
        InputError: no arrays.
        ShapeError: an array without dims, or arrays of different lengths.
    """

    def __repr__(self) -> str:
        fields = ", ".join(f"{array.dtype} {array.shape}" for array in self.arrays)
        return f"TensorDataset({fields})"

    vectorized = True

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise InputError("TensorDataset: needs at least one array, as in TensorDataset(images, labels).")
        # Kept where they are: a batch goes to the device when it becomes a Tensor.
        self.arrays: tuple[Array, ...] = tuple(x.data if isinstance(x, Tensor) else as_array(x) for x in arrays)
        shapes = [array.shape for array in self.arrays]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise ShapeError(f"TensorDataset: shapes {shapes} must have the same number of samples in dim 0.")

    def __len__(self) -> int:
        return self.arrays[0].shape[0]

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        """Return rows of every array: one for an int, a batch for a slice or an array of integers.

        Raises:
            IndexError: an index is out of range.
            DTypeError: the indices are not integers.
        """
        rows = _index(index)
        return tuple(array[rows] for array in self.arrays)


class Subset:
    """The samples of `dataset` at `indices`, in that order.

    Args:
        dataset: the source of the samples.
        indices: integers in 0 … len(dataset)-1; repeats are fine.

    Raises:
        InputError: an index is out of range.
        DTypeError: the indices are not integers.
    """

    __repr__ = format_object

    def __init__(self, dataset: Dataset, indices: Sequence[int] | np.ndarray) -> None:
        self.dataset = dataset
        self.indices = np.array(indices if isinstance(indices, np.ndarray) else list(indices))
        if self.indices.size == 0:
            # NumPy makes an empty list float64.
            self.indices = np.zeros(0, np.int64)
        if self.indices.ndim != 1 or self.indices.dtype.kind not in "iu":
            raise DTypeError(
                f"Subset: indices have shape {self.indices.shape} and dtype {self.indices.dtype}, expected "
                "integers in a list; turn a mask into indices with np.flatnonzero(mask)."
            )
        outside = (self.indices < 0) | (self.indices >= len(dataset))
        if outside.any():
            position = int(np.argmax(outside))
            raise InputError(
                f"Subset: index {self.indices[position]} at position {position} is out of range for a dataset of "
                f"{len(dataset)} samples."
            )

    @property
    def vectorized(self) -> bool:
        return getattr(self.dataset, "vectorized", False)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset, if it has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """Return `dataset[indices[index]]`: a sample or, if the dataset supports it, a batch."""
        chosen = self.indices[_index(index)]
        return self.dataset[chosen if chosen.ndim else int(chosen)]


def _index(index: Any) -> Any:
    """Return `index` as an int, a slice or an array of integers."""
    if isinstance(index, (int, slice)) and not isinstance(index, bool):
        return index
    rows = np.asarray(index)
    if rows.size == 0:
        # NumPy makes an empty list float64.
        return rows.astype(np.int64)
    if rows.dtype.kind not in "iu":
        raise DTypeError(
            f"index of dtype {rows.dtype}: expected integers; turn a mask into indices with np.flatnonzero(mask)."
        )
    return rows


class ImageArrays:
    """Images and labels in two arrays; transforms get whole batches.

    Args:
        images: shape (n, height, width, channels).
        labels: shape (n,), integers.
        classes: names of the labels.
        transform: batch of images -> batch, see `simparallel.data.transforms`; an array of indices gives one
            call with the whole batch, an int a batch of one.
        target_transform: labels -> labels, shape (batch,).

    Attributes:
        epoch: seeds random transforms, together with their seed and the sample's index.

    Raises:
        ShapeError: the arrays have other shapes.
    """

    vectorized = True

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: tuple[str, ...] = (),
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
    ) -> None:
        if images.ndim != 4 or labels.shape != images.shape[:1]:
            raise ShapeError(
                f"{type(self).__name__}: images have shape {images.shape} and labels {labels.shape}; expected "
                "(n, height, width, channels) and (n,)."
            )
        self.images, self.labels, self.classes = images, labels, classes
        self.transform, self.target_transform = transform, target_transform
        self.epoch = 0
        self._rows = np.arange(len(images))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the transforms' random numbers; a DataLoader calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return (image, label) for an int; (images, labels) for a slice or an array of integers.

        Raises:
            IndexError: an index is out of range.
            DTypeError: the indices are not integers.
        """
        # Look the indices up, which resolves negative ones and slices: random transforms draw by sample number.
        rows = self._rows[_index(index)]
        # A single image is a batch of one, so transforms see the same shapes.
        batch = np.atleast_1d(rows)
        images, labels = apply(self.transform, self.images[batch], batch, self.epoch), self.labels[batch]
        if self.target_transform is not None:
            labels = self.target_transform(labels)
        return (images, labels) if np.ndim(rows) else (images[0], labels[0])


class PublishedImages(ImageArrays):
    """A training or test set in files below a folder. A subclass reads them."""

    names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        train: bool = True,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        download: bool = False,
    ) -> None:
        images, labels = self._read(find_root(type(self).__name__, root), bool(train), download)
        super().__init__(images, labels, self.names, transform, target_transform)
        self.train = bool(train)

    def _read(self, base: Path, train: bool, download: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return images and labels of the training or the test set in the folder `base`, fetched if asked for."""
        raise TypeError(f"{type(self).__name__} does not define _read")
