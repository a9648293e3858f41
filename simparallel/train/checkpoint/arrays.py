"""Arrays in files: the safetensors layout, and tensor slices cut into blocks with checksums.

A file is 8 bytes of header length, a JSON header, and the arrays without gaps, in C order and
little-endian (https://github.com/huggingface/safetensors). We read with that library but write here, because before
version 0.8 it copies all arrays first, and because all writes go through `Files`, where tests cut them off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import to_host
from simparallel.errors import CheckpointError
from simparallel.layout.boxes import Box, shape_of, size_of

# The unit of checksums: a verified read of a slice has to read whole blocks.
BLOCK_BYTES = 8 << 20
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


def box_of(name: str, global_shape: Sequence[int], slices: Sequence[slice] | None) -> Box:
    """Return the box of `slices` in a tensor; None means all of it. Raises CheckpointError if it does not fit."""
    slices = [slice(None)] * len(global_shape) if slices is None else slices
    if len(slices) != len(global_shape):
        raise CheckpointError(f"{name}: {len(slices)} slices do not fit shape {tuple(global_shape)}.")
    box = []
    for part, size in zip(slices, global_shape, strict=True):
        low = 0 if part.start is None else int(part.start)
        high = size if part.stop is None else int(part.stop)
        if not 0 <= low <= high <= size or part.step not in (None, 1):
            raise CheckpointError(f"{name}: {part} is outside a dim of size {size}.")
        box.append((low, high))
    return tuple(box)


def listed(names: Collection[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def on_disk(path: Path | IO[bytes], writing: bool = False) -> Iterator[None]:
    """Turn errors of the system about a file or directory into a CheckpointError with its path."""
    doing = "written; earlier checkpoints are unchanged" if writing else "read"
    try:
        yield
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise CheckpointError(f"{path} cannot be {doing}: {reason}.", path=str(path)) from error
    except CheckpointError as error:
        # An inner block has named the file; this one would name its directory.
        if "path" in error.facts:
            raise
        raise CheckpointError(f"{path}: {error}", path=str(path)) from error.__cause__


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


class HeldTensor(NamedTuple):
    """A rank's description of the tensor, or slice of one, that it holds."""

    # The dtype, as safetensors spells it.
    code: str
    # The global shape.
    shape: tuple[int, ...]
    # False: a whole tensor of this rank, which may differ from other ranks' tensors.
    sliced: bool
    # The slice that this rank holds.
    box: Box
    # Its blocks: start, shape, and SHA-256, by which ranks compare values without sending them.
    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]

    @property
    def size_bytes(self) -> int:
        return size_of(self.box) * DTYPES[self.code].itemsize


def describe(name: str, value: Any) -> tuple[np.ndarray, HeldTensor]:
    """Return a tensor or `TensorSlice` as an array on the host, and its description. Raises CheckpointError."""
    sliced = isinstance(value, TensorSlice)
    array = host_array(name, value.array if sliced else value)
    shape = tuple(value.global_shape) if sliced else array.shape
    box = box_of(name, shape, value.slices if sliced else None)
    if shape_of(box) != array.shape:
        raise CheckpointError(f"{name}: the slice has shape {shape_of(box)}, the array {array.shape}.")
    return array, HeldTensor(CODES[array.dtype], shape, sliced, box, blocks(box, array))


def blocks(box: Box, array: np.ndarray) -> tuple[Any, ...]:
    """Cut a C-ordered array that holds `box` into blocks of whole rows; return start, shape and SHA-256 of each."""
    data = raw(array)
    # An empty array has no bytes, hence no blocks.
    if not data:
        return ()
    first, stop = box[0] if box else (0, 1)
    row_bytes = len(data) // (stop - first)
    # Whole rows are contiguous in the file. A row that is larger than a block is a block of its own.
    step = max(1, BLOCK_BYTES // row_bytes)
    found = []
    for row in range(first, stop, step):
        part = ((row, min(row + step, stop)), *box[1:]) if box else box
        content = data[(row - first) * row_bytes :][: step * row_bytes]
        found.append((tuple(low for low, _ in part), shape_of(part), hashlib.sha256(content).hexdigest()))
    return tuple(found)


class FilePlan(NamedTuple):
    """The offset of each array in a file, computed from names, dtypes and shapes alone."""

    header: bytes
    # Name -> first byte in the file, in the order of the file.
    offsets: dict[str, int]
    size_bytes: int

    def pieces(self, arrays: Mapping[str, np.ndarray]) -> Iterator[Any]:
        """Yield the bytes of the file array by array, without a copy of the whole."""
        yield self.header
        for name in self.offsets:
            yield raw(arrays[name])


def plan_file(entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> FilePlan:
    """Lay out arrays in a file, the widest dtypes first, so that each array is aligned.

    Args:
        entries: name -> dtype, as safetensors spells it, and shape.
        metadata: texts for the header.

    Raises:
        CheckpointError: a name that the format does not allow.
    """
    if "__metadata__" in entries:
        raise CheckpointError("no array can have the name '__metadata__', which the format reserves.")
    header: dict[str, Any] = {"__metadata__": metadata}
    offsets, end = {}, 0
    # Descending item sizes need no padding: each offset is a multiple of every later item size.
    for name in sorted(entries, key=lambda name: (-DTYPES[entries[name][0]].itemsize, name)):
        code, shape = entries[name]
        offsets[name], end = end, end + prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad the header, so that the arrays begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    # Offsets in the header count from its end, as the format requires; ours count from the start of the file.
    return FilePlan(front, {name: len(front) + offset for name, offset in offsets.items()}, len(front) + end)
