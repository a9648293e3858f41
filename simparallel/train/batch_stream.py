"""`BatchStream`: the batches of a dataset, epoch after epoch, from any position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from simparallel.data import DataLoader, Pipeline
from simparallel.data.order import order_of, take_seed
from simparallel.errors import CheckpointError, InputError


class BatchStream:
    """An endless stream of batches from a `DataLoader`, a pipeline, or any reusable iterable with a length.

    Before each epoch the dataset gets the epoch's number (`set_epoch`, where it has one), so the order depends on
    the number alone and not on the steps that led there.

    Args:
        dataset: yields batches; has a length.
        may_be_empty: accept a dataset without batches, because other ranks may have some.

    Attributes:
        pass_size: batches of one pass through the data: `size`, or `size` divided by the number of repeats (`repeat`)
            if that is a whole number.
        epoch, offset: the position: `offset` batches of this epoch have been given.

    Raises:
        InputError: the dataset has no length, or no batch.
    """

    def __init__(self, dataset: Any, may_be_empty: bool = False) -> None:
        try:
            self.size = len(dataset)
        except TypeError:
            raise InputError(
                f"Model: {type(dataset).__name__} has no length; use a DataLoader, a pipeline or a list of batches."
            ) from None
        if self.size == 0 and not may_be_empty:
            raise InputError(f"Model: {type(dataset).__name__} has no batches.")
        self.dataset = dataset
        # One pass is an epoch, however often the pipeline repeats, see `Model.train`.
        passes = dataset.get_repeat_count() if isinstance(dataset, Pipeline) else 1
        self.pass_size = self.size if self.size % passes else self.size // passes
        self.epoch, self.offset = int(getattr(dataset, "epoch", 0)), 0
        self._batches: Iterator[Any] | None = None

    def seek(self, epoch: int, offset: int) -> None:
        """Move to a position."""
        self.epoch, self.offset, self._batches = epoch, offset, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the length of the epoch and the order of the data."""
        return {"epoch": self.epoch, "offset": self.offset, **self._order()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to a saved position and adopt its seed; the end of an epoch counts as the start of the next one.

        Raises:
            CheckpointError: the position is in the middle of an epoch that had other batches.
        """
        epoch, offset = state_dict["epoch"], state_dict["offset"]
        # At the end of an epoch any data may follow, so move on to the next one.
        if offset == state_dict["num_batches"]:
            epoch, offset = epoch + 1, 0
        own = self._order()
        # In the middle of an epoch the rest must be the batches that the interrupted run would have seen.
        differ = [
            f"{name}={state_dict[name]!r}, which is {own[name]!r} now"
            for name in ("num_batches", "num_samples", "shuffle", "stages")
            if name in own and state_dict.get(name, own[name]) != own[name]
        ]
        if offset and differ:
            raise CheckpointError(
                f"Model: the checkpoint was saved after {offset} batches of an epoch of data with {', '.join(differ)}; "
                "the rest would be different samples. Use the same data, or a checkpoint from the end of an epoch."
            )
        # The order follows the saved seed, even if this program was started with another one.
        take_seed(self.dataset, dict(state_dict))
        self.seek(epoch, offset)

    def _order(self) -> dict[str, Any]:
        return {"num_batches": self.size, **order_of(self.dataset)}

    def next(self) -> tuple[Any, ...]:
        """Return the fields of the next batch."""
        if self._batches is None:
            self._batches = self._open()
        batch = next(self._batches, None)
        if batch is None:
            self.epoch, self.offset = self.epoch + 1, 0
            self._batches = self._open()
            batch = next(self._batches, None)
        if batch is None:
            raise InputError(f"Model: {type(self.dataset).__name__} has no batch in epoch {self.epoch}.")
        self.offset += 1
        return fields_of(batch)

    def close(self) -> None:
        """Drop the open iterator and set the dataset to its next epoch."""
        self._batches = None
        if hasattr(self.dataset, "set_epoch"):
            # An epoch that has begun counts as used: a later loop outside of `Model` gets the next one.
            self.dataset.set_epoch(self.epoch + (self.offset > 0))

    def _open(self) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        if isinstance(self.dataset, (DataLoader, Pipeline)):
            # Skips by sample number, without reading the skipped batches; other iterables have to produce them.
            return self.dataset.iterate(self.offset)
        return islice(iter(self.dataset), self.offset, None)


def fields_of(batch: Any) -> tuple[Any, ...]:
    """Return a batch as a tuple of fields; for a dict its values, in their order."""
    if isinstance(batch, dict):
        return tuple(batch.values())
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
