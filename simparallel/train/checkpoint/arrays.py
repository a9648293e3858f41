"""Arrays as bytes: the safetensors layout, and tensor slices cut into blocks with checksums.

A file is 8 bytes of header length, a JSON header, and the arrays without gaps, in C order and
little-endian (https://github.com/huggingface/safetensors). We read with that library but write here,
because it can neither stream nor sync to disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import to_host
from simparallel.errors import CheckpointError

# The unit of checksums: a verified read of a slice has to read whole blocks.
BLOCK_BYTES = 8 << 20
HEADER_ALIGNMENT = 8
_CODES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "|b1", "C64": "<c8",
    "I8": "|i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}  # fmt: skip
DTYPES = {code: np.dtype(text) for code, text in _CODES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorSlice(NamedTuple):
    """This rank's slice of a tensor.

    Attributes:
        global_shape: shape of the whole tensor.
        slices: a `slice` per dim, as from `Layout.slices`: step 1; None ends mean the whole dim.
        array: the slice, an array or Tensor with the shape of `slices`.
    """

    global_shape: tuple[int, ...]
    slices: tuple[slice, ...]
    array: Any


class Region(NamedTuple):
    """A box inside a tensor: first index and size in each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, who: str, global_shape: Sequence[int], slices: Sequence[slice] | None) -> Region:
        """Return the region of `slices`; None means all of it. Raises CheckpointError if it does not fit."""
        if slices is None:
            return cls((0,) * len(global_shape), tuple(global_shape))
        start, shape = [], []
        for part, size in zip(slices, global_shape, strict=False):
            low = 0 if part.start is None else int(part.start)
            high = size if part.stop is None else int(part.stop)
            if not 0 <= low <= high <= size or part.step not in (None, 1):
                raise CheckpointError(f"{who}: {part} is outside a dim of size {size}.")
            start.append(low)
            shape.append(high - low)
        if len(slices) != len(global_shape):
            raise CheckpointError(f"{who}: {len(slices)} slices do not fit shape {tuple(global_shape)}.")
        return cls(tuple(start), tuple(shape))

    def common(self, other: Region) -> Region | None:
        """Return the intersection of two regions, None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = [min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True)]
        shape = tuple(high - low for low, high in zip(start, stop, strict=True))
        return Region(start, shape) if all(size > 0 for size in shape) else None

    def inside(self, outer: Region) -> tuple[Any, ...]:
        """Return the index of this region in an array that holds `outer`; it yields a view even of 0-d arrays."""
        lows = [a - b for a, b in zip(self.start, outer.start, strict=True)]
        return (*(slice(low, low + size) for low, size in zip(lows, self.shape, strict=True)), ...)


class Block(NamedTuple):
    """A region, stored contiguously in a file."""

    region: Region
    file: str
    offset: int  # in the file [bytes]
    sha256: str


def host_array(name: str, value: Any) -> np.ndarray:
    """Return `value` as a little-endian array in C order, on the host; copied only where needed.

    Raises:
        CheckpointError: its dtype cannot be saved.
    """
    array = np.asarray(to_host(value.data if isinstance(value, Tensor) else value).__array__())
    dtype = array.dtype.newbyteorder("<")
    if dtype not in CODES:
        raise CheckpointError(f"{name} has dtype {array.dtype}; a checkpoint holds {', '.join(DTYPES)}.")
    # np.ascontiguousarray would make 0-d arrays 1-d.
    return np.asarray(array, dtype, order="C")


def raw(array: np.ndarray) -> memoryview:
    """Return the bytes of a C-ordered array, without a copy."""
    # Any, because mypy does not know arrays as buffers before Python 3.12.
    data: Any = array.reshape(-1).view(np.uint8)
    return memoryview(data)


def cut(region: Region, itemsize: int) -> Iterator[tuple[Region, int, int]]:
    """Cut a C-ordered array that holds `region` into blocks of whole rows: (region, first byte, bytes)."""
    shape = region.shape
    rows = shape[0] if shape else 1
    row_bytes = prod(shape[1:]) * itemsize
    # An empty array has no bytes, hence no blocks.
    if not rows * row_bytes:
        return
    # Whole rows are contiguous in the file. A row that is larger than a block is a block of its own.
    step = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = region
        if count < rows:
            part = Region((region.start[0] + first, *region.start[1:]), (count, *shape[1:]))
        yield part, first * row_bytes, count * row_bytes


def digests(region: Region, array: np.ndarray) -> tuple[str, ...]:
    """Return the SHA-256 of each block, in the order of `cut`."""
    data = raw(array)
    return tuple(
        hashlib.sha256(data[start : start + size]).hexdigest() for _, start, size in cut(region, array.dtype.itemsize)
    )


class FilePlan(NamedTuple):
    """The offset of each array in a file, computed from names, dtypes and shapes alone."""

    header: bytes
    # Name -> first byte in the file.
    offsets: dict[str, int]
    size_bytes: int


def plan_file(
    entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> FilePlan:
    """Lay out arrays in a file, the widest dtypes first, so that each array is aligned.

    Raises:
        CheckpointError: a name that the format does not allow.
    """
    if "__metadata__" in entries:
        raise CheckpointError("no array can have the name '__metadata__', which the format reserves.")
    # Descending item sizes need no padding: each offset is a multiple of every later item size.
    order = sorted(entries, key=lambda name: (-entries[name][0].itemsize, name))
    sizes = [entries[name][0].itemsize * prod(entries[name][1]) for name in order]
    stops = list(accumulate(sizes))
    # Offsets in the header count from its end, as the format requires; `starts` counts from the start of the file.
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, size, stop in zip(order, sizes, stops, strict=True):
        dtype, shape = entries[name]
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [stop - size, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad the header, so that the arrays begin at a multiple of 8.
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    front = len(text).to_bytes(8, "little") + text
    starts = {name: len(front) + stop - size for name, size, stop in zip(order, sizes, stops, strict=True)}
    return FilePlan(front, starts, len(front) + (stops[-1] if stops else 0))
