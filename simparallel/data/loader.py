"""`DataLoader`: turns samples into batches of Tensors; `default_collate` combines a list of samples into one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import get_namespace, is_array
from simparallel.base.checks import check_integer, check_state
from simparallel.base.units import format_object, format_type_of
from simparallel.clock.recorder import current_recorder
from simparallel.data.dataset import Dataset
from simparallel.data.delivery import delivered
from simparallel.data.sampler import RandomSampler, Sampler, SequentialSampler
from simparallel.data.transforms import apply
from simparallel.errors import InputError, ShapeError


class DataLoader:
    """An iterable of batches; each `for` loop over it is one epoch.

    A dataset that accepts an array of indices (`TensorDataset`, a `Subset` of one) is indexed once per
    batch; any other one sample by sample. Transforms get whole batches in either case.

    Args:
        dataset: see `Dataset`.
        batch_size: samples in a batch of *this* rank; see `per_rank_batch_size`.
        shuffle: use a new order in each epoch: `RandomSampler(dataset, seed)`.
        sampler: sets the order instead: a `Sampler`, or any iterable of indices with a length.
        drop_last: drop an incomplete last batch.
        collate_fn: list of samples -> batch, in place of `default_collate`.
        seed: seed of the shuffling.
        transform: batch of the first field -> batch, see `simparallel.data.transforms`. Random transforms draw by
            the sample's index in `dataset` and by the epoch. Not for dicts.

    Attributes:
        epoch: number of the next epoch: the sampler's counter if it has one, else the loader's own.

    Yields:
        Tuple of Tensors, one per field of a sample, each of shape (batch, ...); for dicts a dict of them, see
        `default_collate`; or the result of `collate_fn`. The arrays are copies: writing to them does not change
        the dataset.

    Raises:
        InputError: batch_size is below 1, shuffle together with a sampler, transform together with
            collate_fn, or no batch at all; in the loop, as `default_collate`.
    """

    __repr__ = format_object
    __class_getitem__: Any = classmethod(GenericAlias)

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: Any = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = check_integer("DataLoader", "batch_size", batch_size, 1)
        self.drop_last = bool(drop_last)
        self.collate_fn, self.transform = collate_fn, transform
        self._epoch = 0
        # The number of samples, over all ranks, that the next loop skips.
        self._start = 0
        # Position of the running loop: its epoch, and the samples done over all ranks.
        self._position: list[int] | None = None
        if transform is not None and collate_fn is not None:
            raise InputError(
                "DataLoader: transform and collate_fn exclude each other; apply the transform in collate_fn."
            )
        if sampler is not None and shuffle:
            raise InputError(
                "DataLoader: shuffle=True and a sampler exclude each other: the sampler sets the order. "
                "Leave out shuffle, and shuffle in the sampler (DistributedSampler(..., shuffle=True))."
            )
        if sampler is None:
            sampler = RandomSampler(dataset, seed) if shuffle else SequentialSampler(dataset)
        self.sampler: Any = sampler
        if len(self) == 0:
            if not len(sampler):
                raise InputError("DataLoader: the sampler has no samples; use more data.")
            raise InputError(
                f"DataLoader: {len(sampler)} samples are fewer than batch_size={batch_size}, and drop_last=True drops "
                "an incomplete batch; use more data, a smaller batch or drop_last=False."
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        num_samples = len(self.sampler)
        return num_samples // self.batch_size if self.drop_last else math.ceil(num_samples / self.batch_size)

    @property
    def epoch(self) -> int:
        return getattr(self.sampler, "epoch", self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch: sets the order, if the sampler shuffles, and the random transforms."""
        epoch = check_integer("DataLoader", "epoch", epoch, 0)
        # Moving to another epoch discards a resumed position; setting the same epoch again, as loops do, keeps it.
        if epoch != self.epoch:
            self._start = 0
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the running loop, or the start of the next one, as plain data.

        Samples are counted over all ranks, so that another number of ranks, or another batch size, can
        resume the rest of the epoch. A loop left by `break` is not resumed.
        """
        epoch, position = self._position or (self.epoch, self._start)
        state: dict[str, Any] = {"epoch": epoch, "position": position}
        if hasattr(self.sampler, "state_dict"):
            state["sampler"] = self.sampler.state_dict()
            if isinstance(self.sampler, Sampler):
                # The sampler's own counter may be one ahead: a random sampler advances when it draws the order.
                state["sampler"]["epoch"] = epoch
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next loop resume at another loader's position, maybe in the middle of an epoch.

        Raises:
            StateDictError: names are missing, or the sampler's state does not fit.
            InputError: a bad number.
        """
        own = self.state_dict()
        check_state("DataLoader", state_dict, own)
        epoch, position = (check_integer("DataLoader", n, state_dict[n], 0) for n in ("epoch", "position"))
        if "sampler" in state_dict:
            self.sampler.load_state_dict(state_dict["sampler"])
        self.set_epoch(epoch)
        # After set_epoch, which may clear the position.
        self._start, self._position = position, None

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        self._epoch = epoch + 1
        start, self._start = self._start, 0
        # Draw the order here, not at the first batch: every started loop counts as an epoch.
        if getattr(type(self.sampler), "__iter__", None) is Sampler.__iter__:
            # Skips `start` samples of all ranks.
            order = self.sampler.remaining(start)
        else:
            # An order of the user's own skips this rank's share of them.
            share, rest = divmod(start, getattr(self.sampler, "num_replicas", 1))
            if rest:
                raise InputError(
                    f"DataLoader: {start} samples of this epoch are done, which is not divisible by the "
                    f"{self.sampler.num_replicas} ranks of the {type(self.sampler).__name__}; resume on another number "
                    "of ranks."
                )
            order = np.fromiter(self.sampler, dtype=np.int64)[share:]
        return self._track(order, epoch, start)

    def iterate(self, start: int = 0) -> Iterator[Any]:
        """Iterate over the next epoch's batches, from batch `start` on. Skipped batches are not computed."""
        # Positions count samples over all ranks, so that other numbers of ranks can use them.
        self._start = start * self.batch_size * getattr(self.sampler, "num_replicas", 1)
        return iter(self)

    def _track(self, order: np.ndarray, epoch: int, start: int) -> Iterator[Any]:
        """Yield the batches, and keep the position for `state_dict`."""
        self._position = position = [epoch, start]
        step = self.batch_size * getattr(self.sampler, "num_replicas", 1)
        try:
            # Report the epoch as used only when a second batch is requested: a look at one batch does not count.
            for batch in self._batches(order, epoch):
                if position[1] > start:
                    self._mark_used(epoch)
                # Before the yield: when the caller saves inside its loop, this batch counts as done.
                position[1] += step
                yield batch
            self._mark_used(epoch)
        finally:
            if self._position is position:
                # Otherwise another loop has started since, and the position is its own.
                self._position = None

    def _mark_used(self, epoch: int) -> None:
        if isinstance(self.sampler, Sampler):
            self.sampler.mark_used(epoch)

    def _batches(self, order: np.ndarray, epoch: int) -> Iterator[Any]:
        # A collate function takes a list of samples, so it needs them one by one.
        whole = self.collate_fn is None and getattr(self.dataset, "vectorized", False)
        set_epoch = getattr(self.dataset, "set_epoch", None)
        end = len(order) - len(order) % self.batch_size if self.drop_last else len(order)
        for start in range(0, end, self.batch_size):
            if set_epoch is not None:
                # Set it for each batch: another loop may run over the same dataset.
                set_epoch(epoch)
            chosen = order[start : start + self.batch_size]
            if whole:
                yield self._transformed(_tensors(self.dataset[chosen]), chosen, epoch)
                continue
            samples = [self.dataset[i] for i in chosen.tolist()]
            if self.collate_fn is not None:
                yield self.collate_fn(samples)
            else:
                yield self._transformed(default_collate(samples), chosen, epoch)

    def _transformed(self, batch: Any, chosen: np.ndarray, epoch: int) -> Any:
        """Return the batch with its first field transformed; `chosen` are the numbers of its samples."""
        if self.transform is None:
            return batch
        first = next(iter(batch), None) if isinstance(batch, tuple) else None
        if not isinstance(first, Tensor):
            begins = "" if first is None else f" that begins with a {type(first).__name__}"
            raise InputError(
                "DataLoader: transform takes the first field of each sample, an array; but a batch of these samples "
                f"is a {type(batch).__name__}{begins}. Transform in the dataset, or in a collate_fn."
            )
        return (_tensor(apply(self.transform, first.data, chosen, epoch)), *batch[1:])


def _tensor(field: Any) -> Tensor:
    return field if isinstance(field, Tensor) else delivered(field)


def _tensors(batch: Any) -> Any:
    """Convert the result of a vectorised dataset to Tensors: a tuple of fields, a dict of them, or a single field."""
    if isinstance(batch, Mapping):
        return {key: _tensor(field) for key, field in batch.items()}
    fields = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(_tensor(field) for field in fields)


def per_rank_batch_size(global_batch_size: int, world_size: int | None = None) -> int:
    """Return the batch size of each rank, given the batch size of all ranks together.

    Args:
        global_batch_size: samples per step over all ranks.
        world_size: number of ranks; None takes the run's, or 1 outside of a run.

    Raises:
        InputError: the batch does not divide evenly; the text names the nearest sizes that do.
    """
    if world_size is None:
        recorder = current_recorder()
        world_size = recorder.cluster.world_size if recorder else 1
    ranks = check_integer("per_rank_batch_size", "world_size", world_size, 1)
    size = check_integer("per_rank_batch_size", "global_batch_size", global_batch_size, 1)
    # Not rounded: another batch size would silently change the training.
    each, rest = divmod(size, ranks)
    if rest:
        nearest = f"{each * ranks} or {(each + 1) * ranks}" if each else f"{ranks} or more"
        raise InputError(
            f"per_rank_batch_size: a global batch of {size} samples does not divide over {ranks} ranks "
            f"({each} each, {rest} left over); use {nearest}."
        )
    return each


def default_collate(samples: Sequence[Any]) -> Any:
    """Stack samples field by field, like PyTorch's function of this name.

    Args:
        samples: tuples, lists or dicts of fields, or single fields. A field is an array, a Tensor, a number, a
            string, or a tuple, list or dict of fields.

    Returns:
        A tuple with an entry for each field; for dicts, a dict with one for each key. An entry is a Tensor of
        shape (len(samples), ...), with Python floats as float32; for strings their list; for tuples and
        lists a tuple of entries; for dicts a dict.

    Raises:
        ShapeError: samples have different numbers of fields, or fields different shapes.
        InputError: no samples, dicts with different keys, samples of different structure, or a field of another type.
    """
    if not samples:
        raise InputError("default_collate: there are no samples to make a batch of.")
    batch = _collated("", samples)
    return batch if isinstance(batch, (tuple, dict)) else (batch,)


def _collated(path: str, values: Sequence[Any]) -> Any:
    """Return the batch's entry for the values of all samples at `path`, such as "['image'][0]"."""
    kind = _kind(values[0])
    for i, value in enumerate(values):
        if _kind(value) is not kind:
            types = f"a {type(values[0]).__name__} in sample 0 of the batch and a {type(value).__name__} in sample {i}"
            raise InputError(f"default_collate: {_field(path)} is {types}; all samples must have the same structure.")
    if kind is str:
        return list(values)
    if kind is dict:
        return _collated_dicts(path, values)
    if kind is tuple:
        counts = sorted({len(value) for value in values})
        if len(counts) != 1:
            has = f"{_field(path)} has" if path else "samples have"
            raise ShapeError(f"default_collate: {has} {counts} fields, all must have the same number.")
        entries = [_collated(f"{path}[{k}]", column) for k, column in enumerate(zip(*values, strict=True))]
        is_named = hasattr(values[0], "_fields")
        # Keep named tuples, as PyTorch does.
        return type(values[0])(*entries) if is_named else tuple(entries)
    return _stacked(path, values)


def _kind(value: Any) -> type | None:
    if isinstance(value, (tuple, list)):
        return tuple
    if isinstance(value, (str, bytes)):
        return str
    return dict if isinstance(value, Mapping) else None


def _field(path: str) -> str:
    """Return `path` in words: "field 0", "field 'image'[0]"."""
    first, bracket, rest = path[1:].partition("]")
    return f"field {first}{rest}" if bracket else "a sample"


def _collated_dicts(path: str, values: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    keys = list(values[0])
    for i, value in enumerate(values):
        if value.keys() != values[0].keys():
            raise InputError(
                f"default_collate: {_field(path)} has the keys {keys} in sample 0 of the batch and {list(value)} in "
                f"sample {i}; give all samples the same, or pass collate_fn."
            )
    return {key: _collated(f"{path}[{key!r}]", [value[key] for value in values]) for key in keys}


def _stacked(path: str, values: Sequence[Any]) -> Tensor:
    arrays = [value.data if isinstance(value, Tensor) else value for value in values]
    shapes = [np.shape(array) for array in arrays]
    if len(set(shapes)) > 1:
        other = next(k for k, shape in enumerate(shapes) if shape != shapes[0])
        raise ShapeError(
            f"default_collate: {_field(path or '[0]')} has shape {shapes[0]} in sample 0 of the batch and "
            f"{shapes[other]} in sample {other}; bring them to one shape in the dataset, or pass collate_fn."
        )
    are_arrays = any(is_array(array) or isinstance(array, np.generic) for array in arrays)
    # Lists of Python numbers go to Tensor as they are, which makes floats float32 as everywhere.
    stacked = get_namespace(*arrays).stack(arrays) if are_arrays else np.asarray(arrays)
    if stacked.dtype.kind == "O":
        other = next(k for k, array in enumerate(arrays) if np.asarray(array).dtype.kind == "O")
        raise InputError(
            f"default_collate: {_field(path)} is {format_type_of(arrays[other])} in sample {other} of the batch; only "
            "arrays, Tensors, numbers and strings, and tuples, lists and dicts of them can be batched. Convert it "
            "in the dataset, or pass collate_fn."
        )
    return delivered(stacked if are_arrays else arrays)
