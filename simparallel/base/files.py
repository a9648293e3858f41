"""Atomic writes, for files that others may read at any time, and durable writes, which survive a power cut.

A write is durable when both the file's bytes (`sync`) and its name (`sync_directory`) are on the disk.
Every write goes through `Files`, with one system call per method, so that a test can substitute a class
that stops, fails or loses data between any two.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from simparallel.base.system import BINARY, CLOSE_ON_EXEC, NO_FOLLOW, NON_BLOCKING, read_at
from simparallel.errors import InputError

T = TypeVar("T")

# Most bytes per system call.
WRITE_BYTES = 4 << 20
DIRECTORY_MODE = 0o700


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a user's path with "~" at its beginning replaced by the home folder."""
    return Path(os.path.expanduser(path))


class Files:
    """The system calls of a durable write. All raise OSError."""

    def __repr__(self) -> str:
        # `help` shows it as a default value.
        return type(self).__name__

    def make_directory(self, path: Path) -> None:
        os.mkdir(path, DIRECTORY_MODE)

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor; an existing file or link of that name is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY | CLOSE_ON_EXEC, 0o666)

    def write(self, descriptor: int, data: Any) -> int:
        """Append bytes; return the number written."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until the file's bytes are on the disk."""
        # On macOS fsync does not flush the drive's cache.
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically; a file at `target` is replaced, a directory only if it is empty."""
        os.replace(source, target)

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in the directory are on the disk."""
        # Windows cannot open directories, and syncs names by itself.
        if not hasattr(os, "O_DIRECTORY"):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)


FILES = Files()


def write_file(path: Path, pieces: Iterable[Any], *, sync: bool, files: Files = FILES) -> int:
    """Write the bytes of `pieces` (bytes, contiguous arrays) one after the other to a new file.

    Args:
        path: the file; it must not exist.
        pieces: the contents.
        sync: wait until the bytes are on the disk. For the name see `Files.sync_directory`.
        files: the system calls.

    Returns:
        The number of bytes.

    Raises:
        OSError: the file exists or cannot be written; a part of it may remain.
    """
    descriptor = files.create(path)
    size_bytes = 0
    try:
        for piece in pieces:
            # A system call may write less than it was given.
            rest = memoryview(piece).cast("B")
            while rest:
                count = files.write(descriptor, rest[:WRITE_BYTES])
                size_bytes += count
                rest = rest[count:]
        if sync:
            files.sync(descriptor)
    finally:
        files.close(descriptor)
    return size_bytes


def write_atomically(
    path: str | os.PathLike[str], content: bytes | Iterable[Any], *, sync: bool = False, files: Files = FILES
) -> None:
    """Write `content` to `path` atomically: a reader sees the old file or the new one, never a part.

    Args:
        path: the file; its directory is created. A device or a pipe, such as /dev/null, is written to as it is.
        content: bytes, or pieces as in `write_file`.
        sync: make the write durable before returning.
        files: the system calls.

    Raises:
        OSError: the file cannot be written; nothing is left behind. Its `filename` is `path`.
    """
    target = Path(path)
    pieces = [content] if isinstance(content, bytes) else content
    if target.exists() and not target.is_file() and not target.is_dir():
        # A rename would put a file in its place.
        _write_through(target, pieces)
        return
    if sync:
        make_directories(target.parent, files)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, since a rename does not cross file systems; an unpredictable name is never taken.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_file(partial, pieces, sync=sync, files=files)
        files.rename(partial, target)
    except BaseException as error:
        # A file that already existed is not ours to remove.
        if not isinstance(error, FileExistsError):
            with suppress(OSError):
                files.remove(partial)
        # The caller does not know the temporary name: report the target's.
        if isinstance(error, OSError) and error.errno is not None:
            error.filename, error.filename2 = str(target), None
        raise
    if sync:
        files.sync_directory(target.parent)


def _write_through(path: Path, pieces: Iterable[Any]) -> None:
    """Write to a device or a pipe; OSError for a pipe that nobody reads."""
    descriptor = os.open(path, os.O_WRONLY | BINARY | CLOSE_ON_EXEC | NON_BLOCKING)
    if NON_BLOCKING:
        # Opening must not wait for a reader, but a write waits while the pipe is full.
        os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.writelines(pieces)


def make_directories(path: Path, files: Files = FILES) -> None:
    """Create a directory and its missing parents durably, accessible to the owner alone.

    Raises:
        OSError: one cannot be created, or is a file.
    """
    if path.is_dir():
        return
    # Parents first: the name of each directory is made durable in a parent that is durable itself.
    make_directories(path.parent, files)
    # Another process may create it at the same time.
    with suppress(FileExistsError):
        files.make_directory(path)
    files.sync_directory(path.parent)


def remove_tree(path: Path, files: Files = FILES) -> None:
    """Remove a directory with its contents; links are removed, not followed.

    Raises:
        OSError: an entry cannot be removed.
    """
    with os.scandir(path) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path), files)
        else:
            files.remove(Path(entry.path))
    files.remove_directory(path)


def open_file(path: str | os.PathLike[str], *, links: bool = True) -> BinaryIO:
    """Open a regular file for reading: opening a pipe or reading a device might never return.

    Args:
        path: the file.
        links: whether it may be a symbolic link.

    Raises:
        OSError: the file is missing, cannot be read, or is not a regular file.
    """
    more = NON_BLOCKING if links else NON_BLOCKING | NO_FOLLOW
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | more))  # noqa: SIM115 (returned)
    except ValueError as error:
        # A path with null bytes.
        raise OSError(0, str(error)) from None
    # Checked on the open file: a path may change.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(0, "it is not a regular file")
    return file


def read_limited(path: str | os.PathLike[str], limit_bytes: int, *, links: bool = True) -> bytes:
    """Return the contents of a regular file; `links` as in `open_file`.

    Raises:
        OSError: as `open_file`, or the file is larger than the limit.
    """
    with open_file(path, links=links) as file:
        # A sparse file may have any size. Files of /proc have none.
        size_bytes = os.fstat(file.fileno()).st_size
        is_large = size_bytes > limit_bytes
        # Not more than there is: Python allocates as many bytes as it is asked for.
        data = b"" if is_large else file.read((size_bytes or limit_bytes) + 1)
    if is_large or len(data) > limit_bytes:
        raise OSError(0, f"it has more than {limit_bytes} bytes, the most that is read")
    return data


def read_text(path: str | os.PathLike[str], limit_bytes: int) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        InputError: it cannot be read, is too large, or is not UTF-8: the reason and the line, without the path.
    """
    try:
        data = read_limited(path, limit_bytes)
        return data.decode()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"line {line} is not UTF-8: byte 0x{data[error.start]:02x}") from None


def parse_json(text: str, read: Callable[[Any], T]) -> T:
    """Return `read(data)` for the data of a JSON text.

    Raises:
        InputError: the text is not JSON, or nested too deeply: the reason and the place.
    """
    try:
        try:
            data = json.loads(text, parse_constant=no_constant)
        except ValueError as error:
            raise InputError(f"is not JSON: {error}") from None
        return read(data)
    except RecursionError:
        raise InputError("is nested too deeply") from None


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, for `json.loads(…, parse_constant=no_constant)`."""
    raise ValueError(f"{name} is not a JSON number")


def read_into(descriptor: int, offset: int, buffer: Any) -> int:
    """Fill `buffer` from `offset` [bytes] on; return the number of bytes read, fewer only at the end of the file."""
    rest = memoryview(buffer).cast("B")
    done = 0
    while done < len(rest):
        count = read_at(descriptor, rest[done:], offset + done)
        if count == 0:
            break
        done += count
    return done
