"""Compare the values of ranks with those of one device, and find the first difference.

A record maps keys (step, phase, name) to values. Where ranks hold slices, each is compared with the same
slice of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from simparallel.base.units import format_ranks
from simparallel.errors import NotEquivalentError

Key = tuple[int | None, str, str]
Record = dict[Key, Any]
# name, the whole array, rank, number of ranks -> the part that the rank holds
Slices = Callable[[str, np.ndarray, int, int], np.ndarray]
RESULT = "result"  # the phase of the results of a whole program
# By itemsize: tolerances relative to the largest number of an array, and absolute.
RTOL = {2: 1e-2, 4: 1e-4, 8: 1e-9}
ATOL = {2: 1e-3, 4: 1e-6, 8: 1e-12}
# Different numbers that show a factor or a permutation.
_MIN_NUMBERS = 4


class Tolerance(NamedTuple):
    """How much two arrays may differ: `atol` + `rtol` times the largest number in them; None: the dtype's defaults."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, *arrays: np.ndarray) -> float:
        """Return the largest allowed difference between arrays; 0 for integers."""
        size = min((x.dtype.itemsize for x in arrays if x.dtype.kind == "f"), default=0)
        return self.limit(size, *arrays) if size else 0.0

    def limit(self, itemsize: int, *arrays: np.ndarray) -> float:
        """Return the largest allowed difference between numbers of `itemsize` bytes."""
        size = min(itemsize, 8)
        rtol, atol = RTOL[size] if self.rtol is None else self.rtol, ATOL[size] if self.atol is None else self.atol
        return atol + rtol * max(float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0)) for x in arrays)


class Mismatch(NamedTuple):
    """A value of a rank that differs from the value of one device."""

    key: Key
    rank: int
    at: tuple[int, ...] | None  # index in the part of the rank; None for shapes, texts and missing values
    value: Any
    expected: Any
    details: str  # appended to the message

    def error(self, world_size: int, case: Mapping[str, Any]) -> NotEquivalentError:
        """Return the error that reports this difference."""
        step, phase, name = self.key
        place = "" if step is None else f"step {step}, "
        at = f", index {self.at}" if self.at else ""
        named = f"{' ' if ' of ' in phase else ' of '}{name}" if name else ""
        where = f"{place}{phase}{named}, rank {self.rank}{at}"
        size = f"Smallest failing case: {case_text(world_size, case)}" if case else f"At world_size {world_size}"
        return NotEquivalentError(
            f"assert_equivalent: the ranks do not compute the result of one device. {size}: {where}: "
            f"{_show(self.value)}, on one device {_show(self.expected)}.{self.details}",
            step=step, phase=phase, name=name, rank=self.rank, index=self.at, value=_plain(self.value),
            expected=_plain(self.expected), world_size=world_size, case=dict(case),
        )  # fmt: skip


def case_text(world_size: int, case: Mapping[str, Any]) -> str:
    """Return a drawn case as text."""
    return ", ".join([f"world_size {world_size}", *(f"{name} {value}" for name, value in case.items())])


def _show(value: Any) -> str:
    """Return a short text of a value; a tuple is the shape of an array."""
    if isinstance(value, tuple):
        return f"shape {value}"
    if isinstance(value, float):
        return f"{value:.9g}"
    text = str(value) if isinstance(value, (np.generic, str)) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _plain(value: Any) -> Any:
    """Return a value for the facts of an error: plain data, or its repr."""
    return value if isinstance(value, (int, float, str, bool, tuple)) or value is None else repr(value)


def first_difference(
    one: Record, ranks: Sequence[Record], tolerance: Tolerance, slices: Slices | None = None,
    optional: Sequence[str] = (),
) -> Mismatch | None:  # fmt: skip
    """Return the first value that differs: in the order of the record of one device, then by rank and index.

    Args:
        one: the record of one device.
        ranks: the records of the ranks, in order.
        tolerance: how much numbers may differ.
        slices: gives the part of an array that a rank holds; by default consecutive slices, in the order of the ranks.
        optional: phases that are not compared if no rank has recorded them.
    """
    phases = {key[1] for record in ranks for key in record}
    for rank, record in enumerate(ranks):
        for key in record.keys() - one.keys():
            return Mismatch(key, rank, None, "a value", "none", f" One device has {_names(one, key)}.")
    names = [{key[2] for key in record} for record in ranks]
    for key, whole in one.items():
        if key[1] in phases or key[1] not in optional:
            held = {rank: record[key] for rank, record in enumerate(ranks) if key in record}
            # A pipeline stage has only some of the parameters, but records each of these in every phase.
            is_whole = key[1] == RESULT or not key[2]
            lacking = [rank for rank in range(len(ranks)) if rank not in held and (is_whole or key[2] in names[rank])]
            if lacking or not held:
                return Mismatch(key, min(lacking, default=0), None, "nothing", "a value", "")
            found = _difference(key, whole, held, len(ranks), tolerance, slices)
            if found is not None:
                return found
    return None


def first_layer(
    one: Mapping[str, np.ndarray], ranks: Sequence[Mapping[str, np.ndarray]], tolerance: Tolerance
) -> str | None:
    """Return the first layer whose output differs, as do those of the layers that contain it; None if there is none.

    Outputs of another shape, such as those of layers that are cut, are not compared.
    """
    differs = {}
    for name, whole in one.items():
        held = {rank: outputs[name] for rank, outputs in enumerate(ranks) if name in outputs}
        found = _difference((None, "", name), whole, held, len(ranks), tolerance, None) if held else None
        if found is None or found.at is not None:
            differs[name] = found is not None
    parents = {name: accumulate(name.split("."), "{}.{}".format) for name in differs}
    return next((name for name in differs if all(differs.get(parent, True) for parent in parents[name])), None)


def _names(record: Record, key: Key) -> str:
    return ", ".join(name for step, phase, name in record if (step, phase) == key[:2]) or "none"


def _difference(
    key: Key, whole: Any, held: dict[int, Any], world_size: int, tolerance: Tolerance, slices: Slices | None
) -> Mismatch | None:
    arrays = {rank: value for rank, value in held.items() if isinstance(value, (np.ndarray, np.generic))}
    if not isinstance(whole, np.ndarray) or len(arrays) < len(held):
        # A gradient that does not exist counts as zeros.
        example = whole if isinstance(whole, np.ndarray) else next(iter(arrays.values()), None)
        if example is None or not any(value is None for value in (whole, *held.values())):
            return next((_unequal(key, r, x, whole, tolerance) for r, x in held.items() if not _same(x, whole)), None)
        whole = np.zeros_like(example) if whole is None else whole
        held = {rank: np.zeros_like(whole) if value is None else value for rank, value in held.items()}
    expected = expected_parts(key, whole, {rank: x.shape for rank, x in held.items()}, world_size, slices)
    if isinstance(expected, Mismatch):
        return expected
    wrong = {}
    for rank, x in held.items():
        difference = _first_index(x, expected[rank], tolerance)
        if difference is not None:
            wrong[rank] = difference
    if not wrong:
        return None
    rank, index = next(iter(wrong.items()))
    value, right = held[rank][index].item(), expected[rank][index].item()
    return Mismatch(key, rank, index, value, right, _describe(held, expected, wrong, tolerance))


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (a != a and b != b)
    except (TypeError, ValueError):
        return False


def _unequal(key: Key, rank: int, value: Any, expected: Any, tolerance: Tolerance) -> Mismatch | None:
    both = value, expected
    if any(isinstance(x, (float, np.floating)) for x in both) and all(
        isinstance(x, (int, float, np.number)) for x in both
    ):
        a, b = map(np.asarray, both)
        # A Python float is usually the `item()` of a float32 tensor.
        limit = tolerance.limit(4, a, b) if any(type(x) is float for x in both) else tolerance.of(a, b)
        if abs(a - b) <= limit:
            return None
    return Mismatch(key, rank, None, value, expected, "")


def expected_parts(
    key: Key, whole: np.ndarray, shapes: Mapping[int, tuple[int, ...]], world_size: int, slices: Slices | None = None
) -> dict[int, np.ndarray] | Mismatch:
    """Return the part of `whole` that each rank should hold: all of it, or slices of one dim in the order of the ranks.

    Args:
        key: of the value.
        whole: the value of one device.
        shapes: of the arrays that the ranks hold.
        world_size: number of ranks.
        slices: see `first_difference`; unused if every rank's array has the shape of `whole`.

    Returns:
        rank -> its part; or a Mismatch, if the shapes are not those of such slices.
    """
    if all(shape == whole.shape for shape in shapes.values()):
        return dict.fromkeys(shapes, whole)
    if slices is not None:
        parts_of = {rank: np.asarray(slices(key[2], whole, rank, world_size)) for rank in shapes}
        for rank, part in parts_of.items():
            if part.shape != shapes[rank]:
                details = " The latter is the result of `slices`."
                return Mismatch(key, rank, None, shapes[rank], part.shape, details)
        return parts_of
    cut = {
        dim for s in shapes.values() if len(s) == whole.ndim for dim in range(whole.ndim) if s[dim] != whole.shape[dim]
    }
    if any(len(shape) != whole.ndim for shape in shapes.values()) or len(cut) != 1:
        rank = next(rank for rank, shape in shapes.items() if shape != whole.shape)
        details = " Ranks hold the whole, or slices of one dim in their order; for other parts pass slices=."
        return Mismatch(key, rank, None, shapes[rank], whole.shape, details)
    (dim,) = cut
    sizes = [shape[dim] for shape in shapes.values()]
    ends = np.cumsum(sizes).tolist()
    if ends[-1] != whole.shape[dim]:
        details = f" The slices of dim {dim} have {' + '.join(map(str, sizes))} = {ends[-1]}."
        return Mismatch(key, next(iter(shapes)), None, next(iter(shapes.values())), whole.shape, details)
    parts = np.split(whole, ends[:-1], dim)
    return dict(zip(shapes, parts, strict=True))


def _first_index(x: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> tuple[int, ...] | None:
    wrong = np.argwhere(_wrong(x, expected, tolerance))
    return tuple(map(int, wrong[0])) if len(wrong) else None


def _wrong(x: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    if x.dtype.kind not in "fiub" or expected.dtype.kind not in "fiub":
        return np.asarray(x != expected)
    a, b = x.astype(np.float64), expected.astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(~np.isclose(a, b, rtol=0, atol=tolerance.of(x, expected), equal_nan=True))


def _describe(
    held: Mapping[int, np.ndarray], expected: Mapping[int, np.ndarray], wrong: Mapping[int, Any], tolerance: Tolerance
) -> str:
    """Return how much is wrong, on which ranks, and by which factor if there is one."""
    flat = np.concatenate([held[rank].ravel().astype(np.float64) for rank in wrong])
    right = np.concatenate([expected[rank].ravel().astype(np.float64) for rank in wrong])
    bad = np.concatenate([_wrong(held[rank], expected[rank], tolerance).ravel() for rank in wrong])
    with np.errstate(all="ignore"):
        largest = float(np.max(np.abs(flat - right)[bad]))
        ratios = (flat / right)[bad & (right != 0)]
    others = "" if len(wrong) == len(held) else f" on {format_ranks(list(wrong))} of {len(held)}"
    details = f" {bad.sum()} of {bad.size} numbers differ{others}, by up to {largest:.3g}"
    # Fewer different numbers have a common factor, or one order, by chance.
    is_telling = len(np.unique(right[bad])) >= _MIN_NUMBERS
    limit = tolerance.of(*held.values(), *expected.values())
    if is_telling and ratios.size == bad.sum() and isfinite(ratios[0]) and np.allclose(ratios, ratios[0], rtol=1e-3):
        details += f"; each is {ratios[0]:.4g} times the value of one device"
    elif is_telling and np.allclose(np.sort(flat), np.sort(right), rtol=0, atol=limit, equal_nan=True):
        details += "; they are the same values as on one device, in another order"
    return details + "."
