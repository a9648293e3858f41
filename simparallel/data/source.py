"""Read untrusted files: exact lengths, bounded memory, one kind of error.

A number in a file is compared with the size of the file before it is used.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from simparallel.base import files
from simparallel.base.system import memory_size_bytes
from simparallel.base.units import format_bytes
from simparallel.errors import DataError

# Bytes read at a time: the memory that reading needs in addition to the result.
CHUNK = 1 << 20
# The largest compression ratio of deflate, so `size * DEFLATE_RATIO` bounds the unpacked data.
DEFLATE_RATIO = 1032
ROOT_VARIABLES = ("SIMPARALLEL_DATA", "DATA_PATH")


def bad_file(path: object, text: str, offset: int | None = None, *, where: str = "", who: str = "") -> DataError:
    """Return the error to raise for a file: path and byte offset before the text, and as facts.

    Args:
        path: of the file.
        text: the problem.
        offset: in bytes.
        where: added to the offset, for example " of the unpacked data".
        who: begins the message in place of path and offset, for a text that names the file itself.
    """
    at = "" if offset is None else f", byte {offset}{where}"
    return DataError(f"{who or f'{path}{at}'}: {text}", path=str(path), offset=offset)


class Source:
    """A stream of bytes with a path and a position; every failure is a DataError.

    Args:
        path: for messages.
        stream: the source of the bytes.
        capacity: upper bound of the number of bytes.
        exact: `capacity` is the exact number.
        where: added to the offset in messages, for example " of the unpacked data".
    """

    def __init__(self, path: Path, stream: IO[bytes], capacity: int, exact: bool, where: str = "") -> None:
        self.path, self._stream, self._capacity, self._exact, self._where = (path, stream, capacity, exact, where)
        self.position = 0
        # Bytes that `peek` has read.
        self._ahead = b""

    def fail(self, text: str, offset: int | None = None) -> DataError:
        """Return the error to raise: path and byte offset (by default the position) before `text`."""
        at = self.position if offset is None else offset
        return bad_file(self.path, text, at, where=self._where)

    def peek(self, count: int) -> bytes:
        """Return the next `count` bytes, or all that are left, without moving the position."""
        start = self.position
        parts = list(iter(lambda: self._read(count - (self.position - start)), b""))
        self.position, self._ahead = start, b"".join(parts) + self._ahead
        return self._ahead[:count]

    def take(self, count: int, what: str) -> bytes:
        """Read the next `count` bytes, for short pieces such as headers."""
        parts, missing = [], count
        while missing:
            part = self._read(min(missing, CHUNK))
            if not part:
                raise self.fail(f"the file ends within {what}; {count} bytes were expected, {missing} are missing.")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def rest(self, limit: int, what: str) -> bytes:
        """Read the remaining bytes; more than `limit` are an error."""
        parts, start = [], self.position
        while part := self._read(CHUNK):
            parts.append(part)
            if self.position - start > limit:
                raise self.fail(f"more than {limit} bytes of {what}.")
        return b"".join(parts)

    def array(self, shape: tuple[int, ...], dtype: Any, what: str) -> np.ndarray:
        """Read the rest of the stream as an array, which it must fill exactly.

        Memory: the array, and one chunk. No array is allocated if the file cannot hold that much.
        """
        dtype = np.dtype(dtype)
        # Python integers do not overflow, unlike np.prod of a malicious shape.
        need = dtype.itemsize * prod(shape)
        left = self._capacity - self.position
        if need > left:
            raise self.fail(f"{what} of shape {shape} need {need} bytes, the file has at most {left} left: truncated.")
        if self._exact and need < left:
            raise self.fail(f"{what} of shape {shape} need {need} bytes, but {left} follow.")
        values = self._allocate(shape, dtype, need, what)
        flat, start = values.reshape(-1).view(np.uint8), 0
        while start < need:
            part = self._read(min(CHUNK, need - start))
            if not part:
                raise self.fail(f"{what} of shape {shape} need {need} bytes, only {start} are there: truncated.")
            flat[start : start + len(part)] = np.frombuffer(part, np.uint8)
            start += len(part)
        if self._read(1):
            # Reading at the end of the data also makes gzip verify its checksum.
            raise self.fail(f"more data follow the {what} of shape {shape}.", self.position - 1)
        return values

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype, need: int, what: str) -> np.ndarray:
        """Allocate an array of the declared size, unless it exceeds memory: a sparse file may declare any size."""
        memory = memory_size_bytes()
        try:
            if need < memory or not memory:
                return np.empty(shape, dtype)
        except MemoryError:
            # Refused below, with the sizes.
            pass
        raise self.fail(
            f"{what} of shape {shape} need {format_bytes(need)}, but this machine has "
            f"{format_bytes(memory) if memory else 'less'}."
        )

    def _read(self, count: int) -> bytes:
        try:
            part = self._ahead[:count] or self._stream.read(count)
        except (OSError, EOFError, zlib.error) as error:
            # gzip reports damage by any of these errors.
            raise self.fail(f"cannot be read: {type(error).__name__}: {error}.") from None
        self.position += len(part)
        self._ahead = self._ahead[len(part) :]
        return part


@contextmanager
def open_file(path: str | os.PathLike[str] | io.BytesIO) -> Iterator[IO[bytes]]:
    """Open a regular file: opening or reading a pipe or a device might never return. Bytes in memory are yielded as is.

    Raises:
        DataError: the file cannot be opened, or is not a regular one.
    """
    if isinstance(path, io.BytesIO):
        path.seek(0)
        yield path
        return
    path = Path(path)
    try:
        file = files.open_file(path)
    except OSError as error:
        raise bad_file(path, f"cannot be opened: {error.strerror or error}.") from None
    with file:
        yield file


@contextmanager
def open_source(path: str | os.PathLike[str] | io.BytesIO) -> Iterator[Source]:
    """Open a file, decompressing it if it begins like gzip; bytes in memory are used as they are.

    Raises:
        DataError: the file cannot be opened.
    """
    with open_file(path) as file:
        name = Path(str(path) if isinstance(path, io.BytesIO) else path)
        size = len(path.getvalue()) if isinstance(path, io.BytesIO) else os.fstat(file.fileno()).st_size
        plain = Source(name, file, size, exact=True)
        # Two bytes identify gzip.
        if isinstance(path, io.BytesIO) or plain.peek(2) != b"\x1f\x8b":
            yield plain
            return
        file.seek(0)
        with gzip.GzipFile(fileobj=file) as unpacked:
            # gzip states no reliable size, so this is only an upper bound, for the check before allocating.
            capacity = size * DEFLATE_RATIO
            yield Source(name, unpacked, capacity, exact=False, where=" of the unpacked data")  # type: ignore[arg-type]


def find_root(who: str, root: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the data sets: `root`, or the value of SIMPARALLEL_DATA or DATA_PATH.

    Raises:
        DataError: none of them is set.
    """
    for value in (root, *(os.environ.get(name) for name in ROOT_VARIABLES)):
        if value:
            return Path(value).expanduser()
    raise DataError(
        f"{who}: the folder of the data is unknown: pass root=..., or set {' or '.join(ROOT_VARIABLES)} to the folder.",
        path="",
        offset=None,
    )
