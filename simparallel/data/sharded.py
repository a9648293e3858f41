"""Source datasets of pipelines, with MindSpore's names: `MnistDataset(path, num_shards=8, shard_id=3)`.

Sharding is MindSpore's and PyTorch's: shard s of n gets the samples s, s + n, s + 2n, … of an order
that all shards share. All get equally many, ceil(size / n); if the samples do not divide evenly, the order is
extended with its own beginning, so that some samples repeat. All ranks must name the same files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import is_array, random_state, to_host
from simparallel.base.checks import check_choice, check_integer
from simparallel.data.cifar import CIFAR10
from simparallel.data.columns import Columns, columns_of, fields_of
from simparallel.data.dataset import Dataset, ImageArrays, TensorDataset
from simparallel.data.folder import ImageFolder
from simparallel.data.mnist import MNIST, FashionMNIST
from simparallel.data.pipeline import Pipeline, RowPlan, different_names
from simparallel.data.sampler import DistributedSampler, Sampler
from simparallel.errors import DataError, InputError, ShapeError

USAGES = ("train", "test", "all")


class SourceDataset(Pipeline):
    """Base of source datasets: samples by number, visited in the order of a sampler.

    Args:
        dataset: the source of the samples.
        column_names: a name for each field of a sample.
        num_samples: maximum per shard and epoch; the first ones of the order are used.
        shuffle: use a new order in each epoch. None shuffles, as in MindSpore, unless there is a sampler.
        sampler: sets the order instead: a `Sampler`, or any iterable of numbers with a length.
        num_shards: number of shards, for example `get_group_size()`.
        shard_id: number of this shard, for example `get_rank()`.
        seed: of the order and of `shuffle`, the same on all ranks; None takes the seed of `manual_seed`.
        num_parallel_workers: ignored; for MindSpore's signature. The calling process does the work.

    Raises:
        InputError: only one of num_shards and shard_id, a shard out of range, no samples, duplicate column names,
            or a sampler together with shuffle or shards; in the loop, a number from the sampler without a sample.
    """

    def __init__(
        self,
        dataset: Dataset,
        column_names: Sequence[str],
        *,
        num_samples: int | None = None,
        shuffle: bool | None = None,
        sampler: Any = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
        seed: int | None = None,
        num_parallel_workers: int | None = None,
    ) -> None:
        super().__init__(None)
        who = type(self).__name__
        self.dataset = dataset
        self._col_names = different_names(f"{who}: column_names", column_names)
        self._seed = random_state.seed if seed is None else check_integer(who, "seed", seed, 0)
        if (num_shards is None) != (shard_id is None):
            raise InputError(f"{who}: num_shards={num_shards} and shard_id={shard_id}; give both or neither.")
        if sampler is not None and (shuffle is not None or num_shards is not None):
            raise InputError(f"{who}: a sampler determines the order; leave out shuffle, num_shards, shard_id.")
        shards = 1 if num_shards is None else check_integer(who, "num_shards", num_shards, 1)
        shard = 0 if shard_id is None else check_integer(who, "shard_id", shard_id, 0, high=shards - 1)
        if len(dataset) == 0:
            raise InputError(f"{who}: there are no samples.")
        if sampler is None:
            # A single shard is the whole order, so it needs no case of its own.
            sampler = DistributedSampler(dataset, shards, shard, shuffle is not False, self._seed)
        self.sampler = sampler
        self.num_samples = len(sampler)
        if num_samples is not None:
            self.num_samples = min(len(sampler), check_integer(who, "num_samples", num_samples, 1))

    @property
    def seed(self) -> int:
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed

    def plans(self, epoch: int) -> Iterator[RowPlan]:
        if hasattr(self.sampler, "set_epoch"):
            # Every loop sets its epoch, so the sampler never warns of a repeated one.
            self.sampler.set_epoch(epoch)
        is_own = isinstance(self.sampler, Sampler)
        order = self.sampler.indices() if is_own else np.fromiter(self.sampler, dtype=np.int64)
        outside = order[(order < 0) | (order >= len(self.dataset))]
        if outside.size:
            raise InputError(
                f"{type(self).__name__}: the sampler gives {outside[0]}; valid indices are 0 … {len(self.dataset) - 1}."
            )
        # After the shards were cut, so that each gets this many.
        order = order[: self.num_samples]
        rows = np.arange(len(order))
        yield RowPlan(order, np.full(len(order), epoch), rows, rows + 1)

    def fetch(self, index: np.ndarray, epoch: np.ndarray) -> Columns:
        values = self._values(index, epoch)
        if len(values) != len(self._col_names):
            raise InputError(
                f"{type(self).__name__}: samples have {len(values)} fields, but the columns are "
                f"{', '.join(self._col_names)}."
            )
        return dict(zip(self._col_names, values, strict=True))

    def _values(self, index: np.ndarray, epoch: np.ndarray) -> Sequence[Any]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        # Samples of two epochs: fetch them one by one, each with its own epoch's random numbers.
        if set_epoch is not None and (epoch != epoch[0]).any():
            one_by_one = [self._values(index[i : i + 1], epoch[i : i + 1]) for i in range(len(index))]
            return columns_of([tuple(column[0] for column in columns) for columns in one_by_one])
        if set_epoch is not None:
            set_epoch(int(epoch[0]))
        who = f"{type(self).__name__}: a sample"
        if getattr(self.dataset, "vectorized", False):
            return fields_of(tuple(self.dataset[index]), who)
        return columns_of([fields_of(self.dataset[i], who) for i in index.tolist()])

    def get_dataset_size(self) -> int:
        return self.num_samples

    def get_col_names(self) -> list[str]:
        return self._col_names


class MnistDataset(SourceDataset):
    """MNIST: columns "image", uint8 (28, 28, 1), and "label", int64.

    Args:
        dataset_dir: folder of the files, or one above them, see `MNIST`. None takes the environment variable.
        usage: "train", "test" or "all"; None takes all that exists.
        settings: as for `SourceDataset`: num_samples, shuffle, sampler, num_shards, shard_id, seed.

    Raises:
        DataError: a file is missing or broken; InputError: unknown usage, otherwise as `SourceDataset`.
    """

    reader: type[Any] = MNIST

    def __init__(
        self, dataset_dir: str | os.PathLike[str] | None = None, usage: str | None = None, **settings: Any
    ) -> None:
        images = _labelled_images(type(self).__name__, self.reader, dataset_dir, usage)
        super().__init__(images, ("image", "label"), **settings)


class FashionMnistDataset(MnistDataset):
    """Fashion-MNIST, with the interface of `MnistDataset`."""

    reader = FashionMNIST


class _Cifar10Files(CIFAR10):
    records_per_file = None


class Cifar10Dataset(MnistDataset):
    """CIFAR-10 in its binary version, like `MnistDataset`; images are uint8 (32, 32, 3). Smaller files are accepted."""

    reader = _Cifar10Files


class ImageFolderDataset(SourceDataset):
    """A folder of images for each class: columns "image", (height, width, channels), and "label".

    Images are read and decoded on access. If their sizes differ, `map` a Resize or a
    crop to one size before `batch`.

    Args:
        dataset_dir: the folder, see `ImageFolder`.
        decode: False returns the bytes of the files, for `transforms.Decode` or `RandomCropDecodeResize`. Unlike in
            MindSpore the default is True; `Decode` also accepts decoded images.
        extensions, class_indexing: see `ImageFolder`.
        settings: as for `SourceDataset`.

    Raises:
        DataError: no folder, no classes, or a class without images.
    """

    def __init__(
        self,
        dataset_dir: str | os.PathLike[str],
        *,
        decode: bool = True,
        extensions: Sequence[str] | None = None,
        class_indexing: Mapping[str, int] | None = None,
        **settings: Any,
    ) -> None:
        self.folder = ImageFolder(dataset_dir, decode=decode, extensions=extensions, class_indexing=class_indexing)
        super().__init__(self.folder, ("image", "label"), **settings)

    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.folder.classes)

    def get_class_indexing(self) -> dict[str, int]:
        """Return the name of each class -> its label."""
        return dict(self.folder.class_to_idx)


class GeneratorDataset(SourceDataset):
    """Samples from a Python object.

    Args:
        source: an object with a length and an index, as a `Dataset`; indexed with whole batches if its `vectorized`
            is True. Or an iterable, or a function that makes one: it is read once, at construction, and
            kept in memory; its order stays unless `shuffle=True`.
        column_names: a name for each field of a sample, or one string of names separated by commas.
        settings: as for `SourceDataset`.

    Raises:
        InputError: an unsuitable source, no samples, otherwise as `SourceDataset`.
    """

    def __init__(self, source: Any, column_names: str | Sequence[str], **settings: Any) -> None:
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            samples = source() if callable(source) else source
            if not isinstance(samples, Iterable):
                raise InputError(
                    f"GeneratorDataset: source={source!r} must have a length and an index, or be iterable."
                )
            # Read once: a generator cannot be indexed, or read again in the next epoch.
            source = list(samples)
            if settings.get("sampler") is None and settings.get("shuffle") is None:
                # An iterable has an order of its own.
                settings["shuffle"] = False
        names = column_names.split(",") if isinstance(column_names, str) else column_names
        super().__init__(source, [name.strip() for name in names], **settings)


class NumpySlicesDataset(SourceDataset):
    """The rows of arrays in memory.

    Args:
        data: dict of arrays by column; tuple of arrays, one per column; or one array or list.
        column_names: names of the columns; None takes the dict's, or "column_0", "column_1", …
        settings: as for `SourceDataset`.

    Raises:
        InputError: wrong number of names, otherwise as `SourceDataset`; ShapeError: arrays of different lengths.
    """

    def __init__(self, data: Any, column_names: str | Sequence[str] | None = None, **settings: Any) -> None:
        columns = data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else (data,)
        arrays = [to_host(Tensor(c).data) if not is_array(c) else to_host(c) for c in columns]
        if not arrays or any(array.ndim == 0 for array in arrays):
            raise ShapeError("NumpySlicesDataset: needs arrays with at least one dim each.")
        if column_names is None:
            names = list(data) if isinstance(data, dict) else [f"column_{i}" for i in range(len(arrays))]
        else:
            names = [column_names] if isinstance(column_names, str) else list(column_names)
        if len(names) != len(arrays):
            raise InputError(f"NumpySlicesDataset: {len(names)} names for {len(arrays)} columns.")
        super().__init__(TensorDataset(*arrays), names, **settings)


def _labelled_images(who: str, reader: type[Any], root: Any, usage: str | None) -> ImageArrays:
    """Return the training images, the test images, or both concatenated."""
    if usage is not None:
        check_choice(who, "usage", usage, USAGES)
    if usage in ("train", "test"):
        return reader(root, train=usage == "train")
    parts: list[ImageArrays] = []
    missing: list[DataError] = []
    for train in (True, False):
        try:
            parts.append(reader(root, train=train))
        except DataError as error:
            # With usage None a missing set is skipped, but not a broken one or a single file of a pair.
            if usage == "all" or Path(error.facts["path"]).exists():
                raise
            missing.append(error)
    if not parts:
        raise missing[0]
    if len(parts) == 1:
        return parts[0]
    images, labels = (np.concatenate([getattr(p, name) for p in parts]) for name in ("images", "labels"))
    return ImageArrays(images, labels, parts[0].classes)
