"""Class labels: check them, and find the elements that they select in this rank's slice."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from simparallel.arrays.captures import check_after
from simparallel.arrays.host.arrays import HostArrays
from simparallel.autograd.op import Context
from simparallel.backend import Array, fused, to_host
from simparallel.errors import LabelError


class Words(NamedTuple):
    """Words of an error message: the name of the integers, and the remedy if one is too large or negative."""

    one: str = "label"
    many: str = "labels"
    of: str = "classes"
    enlarge: str = "widen the last layer to {} outputs"
    ignore: str = ", or pass ignore_index={}"


CLASSES = Words()


class Picked(NamedTuple):
    """Positions of the labels in a slice (n, v) of the classes.

    Attributes:
        rows: the rows with a label in this slice.
        columns: the column of each of these labels in this slice.
        kept: (n,) False for ignored rows; None if no row is ignored.
    """

    rows: Array
    columns: Array
    kept: Array | None

    def of(self, ctx: Context, values: Array, num_rows: int) -> Array:
        """Return `values[row, label]`, or `values[label]` for 1-D values, as (n,); 0 for labels in other slices."""
        where = (self.rows, self.columns) if values.ndim == 2 else self.columns
        # All labels are in this slice, and no row is ignored.
        if self.rows.shape[0] == num_rows:
            return values[where]
        found = ctx.xp.zeros(num_rows, dtype=values.dtype)
        found[self.rows] = values[where]
        return found


def pick(ctx: Context, labels: Array, num_local: int, ignore_index: int | None, who: str) -> Picked:
    """Find the labels in this rank's slice of dim "v", which has `num_local` classes; one label for each row.

    Raises:
        LabelError: a label is outside of all classes and is not `ignore_index`.
    """
    xp, num_classes, labels = ctx.xp, ctx.size("v"), labels.reshape(-1)
    check_labels(ctx.arrays, labels, num_classes, ignore_index, who)
    rows = xp.arange(labels.shape[0])
    if num_local == num_classes and ignore_index is None:
        return Picked(rows, labels, None)
    local = labels.astype("int64", copy=False) - ctx.offset("v")
    inside = (local >= 0) & (local < num_local)
    kept = None
    if ignore_index is not None:
        kept = labels != ignore_index
        inside &= kept
    return Picked(rows[inside], local[inside], kept)


def check_labels(
    arrays: HostArrays, labels: Array, num_classes: int, ignore_index: int | None, who: str, words: Words = CLASSES
) -> None:
    """Raise LabelError if a label is outside of 0 … num_classes-1; the error names the first such label.

    On a GPU it comes when the host next reads a value, such as the loss.
    """
    # Where no read waits, two reductions are the fastest check.
    if labels.size == 0 or (not arrays.reads_wait and labels.min() >= 0 and labels.max() < num_classes):
        return
    bad = fused(arrays.xp, _outside)(labels, num_classes, ignore_index)
    check_after(bad.any(), lambda: _refuse(bad, labels, num_classes, who, words))


def _outside(xp: ModuleType, labels: Array, num_classes: int, ignore_index: int | None) -> Array:
    bad = (labels < 0) | (labels >= num_classes)
    return bad if ignore_index is None else bad & (labels != ignore_index)


def _refuse(bad: Array, labels: Array, num_classes: int, who: str, words: Words) -> None:
    """Raise LabelError for the first bad label."""
    position = int(to_host(bad).argmax())
    label = int(to_host(labels).reshape(-1)[position])
    way_out = f", or {words.enlarge.format(label + 1)}" if label > 0 else words.ignore.format(label)
    raise LabelError(
        f"{who}: {words.one} {label} at position {position} is outside of the {num_classes} {words.of} "
        f"0 … {num_classes - 1}. Fix the {words.many}{way_out}.",
        label=label,
        position=position,
        num_classes=num_classes,
    )
