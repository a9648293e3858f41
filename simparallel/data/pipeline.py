"""`Pipeline`: `.map`, `.shuffle`, `.batch`, `.repeat`, with MindSpore's names, evaluated lazily.

Stages that change the order (shuffle, repeat, batch) work on sample numbers only, for a whole epoch at
once. Stages that change values (map) wait until the rows of a batch are needed, and then process all
of them together. The results equal MindSpore's row-by-row evaluation, as long as an operation is
a function of its row. Everything is a pure function of (seed, epoch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import random_permutation, random_uniform
from simparallel.base.checks import check_integer
from simparallel.base.units import format_object
from simparallel.data.columns import Columns, Operation, map_columns, whole
from simparallel.data.delivery import delivered
from simparallel.errors import InputError


class RowPlan(NamedTuple):
    """The rows of a part of an epoch: row i holds the samples `starts[i] … stops[i]-1` of these arrays."""

    # The number of each sample in the dataset, int64.
    sample: np.ndarray
    # The epoch of its random numbers, int64.
    epoch: np.ndarray
    # Before `batch` a row is one sample, after it several.
    starts: np.ndarray
    stops: np.ndarray

    def rows(self, chosen: Any) -> RowPlan:
        return self._replace(starts=self.starts[chosen], stops=self.stops[chosen])


def buffered_order(seed: int, stream: str, count: int, buffer_size: int) -> np.ndarray:
    """Return the order in which a shuffling buffer yields `count` rows, int64, shape (count,).

    Row t (from 0) is drawn from a random slot of the full buffer, and row t + buffer_size refills that
    slot; at the end the rows left in the buffer follow in random order. So a draw yields the row that entered
    its slot last: found by sorting the draws by slot, without a loop.
    """
    size = min(buffer_size, count)
    draws = count - size
    places = (random_uniform(seed, stream, 0, draws) * size).astype(np.int64)
    # After the draws, look up every slot once more, for the row left in it.
    asked = np.concatenate([places, np.arange(size)])
    # A stable sort keeps the order of time within each slot.
    by_place = np.argsort(asked, kind="stable")
    # The row found by each look-up.
    before = np.empty(count, np.int64)
    # After a look-up at time t the slot holds row t + size, which its next look-up finds ...
    before[by_place[1:]] = by_place[:-1] + size
    # ... and the first look-up of a slot finds the slot's initial row, which has the slot's number.
    first = np.ones(count, bool)
    first[1:] = asked[by_place][1:] != asked[by_place][:-1]
    before[by_place[first]] = asked[by_place[first]]
    # Without this permutation, the rows left in the buffer would come out by slot.
    rest = before[draws:][random_permutation(seed, f"{stream}/rest", size)]
    return np.concatenate([before[:draws], rest])


def joined(plans: Iterator[RowPlan]) -> RowPlan:
    """Concatenate several plans."""
    pieces = list(plans)
    if len(pieces) == 1:
        return pieces[0]
    # Row bounds index into the plan's own samples: shift them by the samples before.
    offsets = np.cumsum([0, *(len(plan.sample) for plan in pieces[:-1])])
    shifted = [
        plan._replace(starts=plan.starts + offset, stops=plan.stops + offset)
        for plan, offset in zip(pieces, offsets, strict=True)
    ]
    return RowPlan(*(np.concatenate(arrays) for arrays in zip(*shifted, strict=True)))


# Rows fetched together in a pipeline without batches: maps then work on arrays, not on single rows.
ROWS_AT_ONCE = 64


class Pipeline:
    """Base of all datasets with `.map`, `.batch`, …; each of these methods returns a new pipeline.

    A `for` loop yields tuples of Tensors, one for each column; every loop is the next epoch, with
    a new order if a stage shuffles.

    Args:
        child: the stage that this one reads; None for a source.

    Attributes:
        epoch: number of the next epoch, from 0.
    """

    __repr__ = format_object

    is_batched: bool

    def __init__(self, child: Pipeline | None) -> None:
        # None for a source, which overrides every method that asks the child.
        self.child: Any = child
        self.epoch = 0
        self.is_batched = child is not None and child.is_batched

    # --- interface of a stage ------------------------------------------------------------------------

    def plans(self, epoch: int) -> Iterator[RowPlan]:
        """Yield the rows of an epoch, as one or more plans."""
        return self.child.plans(epoch)

    def fetch(self, index: np.ndarray, epoch: np.ndarray) -> Columns:
        """Return the columns of these samples, with the stages before `batch` applied."""
        return self.child.fetch(index, epoch)

    def finish(self, columns: Columns, index: np.ndarray, epoch: np.ndarray) -> Columns:
        """Apply the stages after `batch` to one batch."""
        return columns if self.child is None else self.child.finish(columns, index, epoch)

    def get_dataset_size(self) -> int:
        """Return the number of rows (batches, after `batch`) in an epoch."""
        return self.child.get_dataset_size()

    @property
    def seed(self) -> int:
        return self.child.seed

    @property
    def num_shuffles(self) -> int:
        """Number of shuffling stages up to this one; maps in between do not change the order."""
        return 0 if self.child is None else self.child.num_shuffles

    def get_col_names(self) -> list[str]:
        """Return the names of the columns, in their order."""
        return self.child.get_col_names()

    def get_batch_size(self) -> int:
        """Return the number of samples in a full batch; 1 before `batch`."""
        return 1 if self.child is None else self.child.get_batch_size()

    def get_repeat_count(self) -> int:
        """Return the number of passes through the dataset in an epoch."""
        return 1 if self.child is None else self.child.get_repeat_count()

    # --- stages ----------------------------------------------------------------------------------------

    def map(
        self,
        operations: Operation | Sequence[Operation],
        input_columns: str | Sequence[str] | None = None,
        output_columns: str | Sequence[str] | None = None,
        num_parallel_workers: int | None = None,
        python_multiprocessing: bool = False,
    ) -> Pipeline:
        """Transform columns.

        Args:
            operations: one or several, applied in turn. A `Transform` gets whole batches at any stage.
                Any other function gets one row: before `batch` a sample's arrays, after it a batch's. They are
                copies: it may work in place, and returns its result.
            input_columns: columns for the first operation; None takes the first column.
            output_columns: names of the results of the last one; None keeps those of the input. An existing
                name is replaced, a new one added; inputs that are not named again are dropped.
            num_parallel_workers, python_multiprocessing: ignored; for MindSpore's signature. The calling process does
                the work.

        Raises:
            InputError: an unknown column, no operations, or an operation that is not callable.
        """
        return Mapped(self, operations, input_columns, output_columns)

    def shuffle(self, buffer_size: int) -> Pipeline:
        """Shuffle rows through a buffer that is filled in their order.

        Each row is drawn from the `buffer_size` rows that were read and not yet yielded, so a row moves forward
        by less than that; a buffer of the whole size gives all orders with equal probability.

        Raises:
            InputError: a buffer of fewer than 2 rows.
        """
        return Shuffled(self, buffer_size)

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_workers: int | None = None) -> Pipeline:
        """Group `batch_size` rows; an incomplete last batch is dropped or yielded as it is.

        `num_parallel_workers` is ignored, see `map`.

        Raises:
            InputError: a size below 1, no batch at all, or batches already.
        """
        return Batched(self, batch_size, drop_remainder)

    def repeat(self, count: int = 1) -> Pipeline:
        """Make one epoch of `count` passes, each in its own order; before `batch`, batches may span two passes.

        Raises:
            InputError: a count below 1. For an unlimited number, loop over epochs.
        """
        return Repeated(self, count)

    # --- iteration ---------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch, for example when training resumes."""
        self.epoch = check_integer("set_epoch", "epoch", epoch, 0)

    def __len__(self) -> int:
        return self.get_dataset_size()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the next epoch's rows, from row `start` on. Skipped rows are not computed."""
        rows = self._next_epoch(start)
        return (tuple(delivered(column) for column in row.values()) for row in rows)

    def create_tuple_iterator(self, num_epochs: int = -1, output_numpy: bool = False) -> EpochIterator:
        """Return an iterator over rows as lists of Tensors or arrays; each `for` loop over it is an epoch.

        Args:
            num_epochs: maximum number of loops; -1 for any number.
            output_numpy: yield arrays instead of Tensors.
        """
        return EpochIterator(self, num_epochs, output_numpy, as_dict=False)

    def create_dict_iterator(self, num_epochs: int = -1, output_numpy: bool = False) -> EpochIterator:
        """Return an iterator over rows as dicts, column -> Tensor or array; otherwise as `create_tuple_iterator`."""
        return EpochIterator(self, num_epochs, output_numpy, as_dict=True)

    def _next_epoch(self, start: int = 0) -> Iterator[Columns]:
        epoch = self.epoch
        # Advanced already at the start of the loop, so that a loop left by `break` counts as an epoch.
        self.epoch = epoch + 1
        return self._rows(epoch, start)

    def _rows(self, epoch: int, start: int) -> Iterator[Columns]:
        # A repeat yields a plan for each pass: a start in a later pass never computes the earlier ones.
        for plan in self.plans(epoch):
            count = len(plan.starts)
            if start < count:
                yield from self._rows_of(plan.rows(slice(start, None)))
            # Whole plans are skipped without fetching a row.
            start = max(0, start - count)

    def _rows_of(self, plan: RowPlan) -> Iterator[Columns]:
        if self.is_batched:
            for first, last in zip(plan.starts.tolist(), plan.stops.tolist(), strict=True):
                index, epochs = plan.sample[first:last], plan.epoch[first:last]
                # Fetched and mapped only when the batch is requested.
                yield self.finish(whole(self.fetch(index, epochs)), index, epochs)
            return
        for first in range(0, len(plan.starts), ROWS_AT_ONCE):
            chosen = plan.starts[first : first + ROWS_AT_ONCE]
            columns = self.fetch(plan.sample[chosen], plan.epoch[chosen])
            for i in range(len(chosen)):
                yield {name: np.asarray(values[i]) for name, values in columns.items()}


class EpochIterator:
    """An iterator over a pipeline: each `for` loop over it is an epoch; `next()` returns single rows.

    Raises:
        InputError: `num_epochs` is neither -1 nor 1 or more, or (`for`) no epochs are left;
            StopIteration: (`next`) the epoch has ended.
    """

    def __init__(self, pipeline: Pipeline, num_epochs: int, output_numpy: bool, as_dict: bool) -> None:
        if num_epochs != -1:
            check_integer("create iterator", "num_epochs (-1 for any number, or)", num_epochs, 1)
        self._pipeline, self._left = pipeline, num_epochs
        self._numpy, self._dict = output_numpy, as_dict
        # Only `next()` uses these rows; each `for` loop has its own.
        self._rows: Iterator[Columns] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._left == 0:
            raise InputError("this iterator has yielded all epochs that it was created for; create a new one.")
        # -1 stays -1: any number of loops.
        self._left -= self._left > 0
        return (self._shown(row) for row in self._pipeline._next_epoch())

    def __next__(self) -> Any:
        if self._rows is None:
            self._rows = self._pipeline._next_epoch()
        return self._shown(next(self._rows))

    def __len__(self) -> int:
        return self._pipeline.get_dataset_size()

    def _shown(self, row: Columns) -> Any:
        values = row if self._numpy else {name: delivered(value) for name, value in row.items()}
        return values if self._dict else list(values.values())


class Mapped(Pipeline):
    """The stage of `Pipeline.map`."""

    def __init__(self, child: Pipeline, operations: Any, inputs: Any, outputs: Any) -> None:
        super().__init__(child)
        self.operations = list(operations) if isinstance(operations, (list, tuple)) else [operations]
        for i, operation in enumerate(self.operations):
            if not callable(operation):
                raise InputError(f"map: operations[{i}]={operation!r} must be a transform or a function.")
        names = child.get_col_names()
        self.inputs = different_names("map: input_columns", names[:1] if inputs is None else inputs)
        self.outputs = different_names("map: output_columns", self.inputs if outputs is None else outputs)
        unknown = [name for name in self.inputs if name not in names]
        if unknown or not self.operations or not self.inputs or not self.outputs:
            raise InputError(
                f"map: {len(self.operations)} operations on columns {self.inputs} to {self.outputs}; expected at least "
                f"one of each, and columns out of {names}."
            )
        # Kept columns stay in place, new ones are appended.
        gone = set(self.inputs) - set(self.outputs)
        self._col_names = [name for name in names if name not in gone]
        self._col_names += [name for name in self.outputs if name not in self._col_names]

    def get_col_names(self) -> list[str]:
        return self._col_names

    def fetch(self, index: np.ndarray, epoch: np.ndarray) -> Columns:
        columns = self.child.fetch(index, epoch)
        # Before `batch`, maps run here, on many samples at once; after it they run in `finish`, on one batch.
        return columns if self.is_batched else self._apply(columns, index, epoch)

    def finish(self, columns: Columns, index: np.ndarray, epoch: np.ndarray) -> Columns:
        columns = super().finish(columns, index, epoch)
        return self._apply(columns, index, epoch) if self.is_batched else columns

    def _apply(self, columns: Columns, index: np.ndarray, epoch: np.ndarray) -> Columns:
        values = [columns[name] for name in self.inputs]
        values = map_columns(self.operations, values, index, epoch, is_one_row=self.is_batched, names=self.inputs)
        if len(values) != len(self.outputs):
            raise InputError(
                f"map: the operations return {len(values)} columns, but output_columns names {len(self.outputs)}: "
                f"{', '.join(self.outputs)}."
            )
        changed = {**columns, **dict(zip(self.outputs, values, strict=True))}
        return {name: changed[name] for name in self._col_names}


class Shuffled(Pipeline):
    """The stage of `Pipeline.shuffle`."""

    def __init__(self, child: Pipeline, buffer_size: int) -> None:
        super().__init__(child)
        self.buffer_size = check_integer("shuffle", "buffer_size", buffer_size, 2)

    @property
    def num_shuffles(self) -> int:
        return super().num_shuffles + 1

    def plans(self, epoch: int) -> Iterator[RowPlan]:
        plan = joined(super().plans(epoch))
        # Each shuffle of a pipeline draws from its own stream, and a new one in each epoch.
        stream = f"shuffle/{self.num_shuffles}/{epoch}"
        # Only the rows' bounds are permuted; the samples stay in place.
        yield plan.rows(buffered_order(self.seed, stream, len(plan.starts), self.buffer_size))


class Batched(Pipeline):
    """The stage of `Pipeline.batch`."""

    def __init__(self, child: Pipeline, batch_size: int, drop_remainder: bool) -> None:
        if child.is_batched:
            raise InputError("batch: the rows are batches already; call batch once, with the final size.")
        super().__init__(child)
        self.is_batched = True
        self.batch_size = check_integer("batch", "batch_size", batch_size, 1)
        self.drop_remainder = bool(drop_remainder)
        if self.get_dataset_size() == 0:
            if not child.get_dataset_size():
                raise InputError("batch: the data set has no rows; use more data.")
            raise InputError(
                f"batch: {child.get_dataset_size()} rows are fewer than batch_size={batch_size}, and "
                "drop_remainder=True drops an incomplete batch; use more data, a smaller batch or drop_remainder=False."
            )

    def plans(self, epoch: int) -> Iterator[RowPlan]:
        rows = joined(super().plans(epoch))
        order, size = rows.starts, self.batch_size
        # Rows hold one sample each here, so `starts` is their order; -(-a // b) rounds up.
        count = len(order) // size if self.drop_remainder else -(-len(order) // size)
        starts = np.arange(count) * size
        yield RowPlan(rows.sample[order], rows.epoch[order], starts, np.minimum(starts + size, len(order)))

    def get_dataset_size(self) -> int:
        rows = self.child.get_dataset_size()
        return rows // self.batch_size if self.drop_remainder else -(-rows // self.batch_size)

    def get_batch_size(self) -> int:
        return self.batch_size


class Repeated(Pipeline):
    """The stage of `Pipeline.repeat`."""

    def __init__(self, child: Pipeline, count: int) -> None:
        super().__init__(child)
        self.count = check_integer("repeat", "count", count, 1)

    def plans(self, epoch: int) -> Iterator[RowPlan]:
        # Every pass of every epoch has its own number, so no two passes have the same order.
        for part in range(epoch * self.count, (epoch + 1) * self.count):
            yield from super().plans(part)

    def get_dataset_size(self) -> int:
        return super().get_dataset_size() * self.count

    def get_repeat_count(self) -> int:
        return super().get_repeat_count() * self.count


def different_names(who: str, given: Any) -> list[str]:
    """Return one name or several as a list; InputError (its text begins with `who`) unless they are distinct names."""
    names = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InputError(f"{who}={given!r} must be distinct names.")
    return names
