"""CIFAR-10 in its binary version. (The Python version is a pickle, which could execute anything.)"""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from simparallel.data.dataset import PublishedImages
from simparallel.data.source import Source, bad_file, open_file, open_source
from simparallel.errors import DataError

SIDE, CHANNELS, NUM_CLASSES = 32, 3, 10
# A label and three colour planes.
RECORD_BYTES = 1 + CHANNELS * SIDE * SIDE
FILES = {True: tuple(f"data_batch_{i}.bin" for i in range(1, 6)), False: ("test_batch.bin",)}
FOLDER = "cifar-10-batches-bin"
ARCHIVE = "cifar-10-binary.tar.gz"
# Limits of an archive: the number of its members, and the bytes of one that is skipped.
LARGEST_MEMBERS, LARGEST_OTHER_BYTES = 64, 1 << 20


class CIFAR10(PublishedImages):
    """32 x 32 colour images of ten classes: Krizhevsky 2009, "Learning multiple layers of features".

    Reads the folder `cifar-10-batches-bin` in `root`, or its files in `root` itself, or the
    archive `cifar-10-binary.tar.gz`, without unpacking it to disk.

    Args:
        root: folder of the data sets; None takes the environment variable SIMPARALLEL_DATA or DATA_PATH.
        train: the five training files or the test file.
        transform: batch of images -> batch.
        target_transform: labels -> labels.
        download: fetch the archive (170 MB) to `root` if no data is found; one process fetches
            while others wait.

    Attributes:
        images: uint8, shape (n, 32, 32, 3).
        labels: int64 in 0 … 9, shape (n,).

    Raises:
        DataError: a file is missing, broken or not downloadable; with path and byte offset.
    """

    names: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    urls: ClassVar[tuple[str, ...]] = (f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",)
    md5: ClassVar[str] = "c32a1d4ab5d03f1284b67883e8d87530"
    archive_bytes: ClassVar[int] = 170_052_171
    # None accepts any number.
    records_per_file: ClassVar[int | None] = 10_000

    def _read(self, base: Path, train: bool, download: bool) -> tuple[np.ndarray, np.ndarray]:
        files, archive = FILES[train], base / ARCHIVE
        # A folder counts only if it has all files of the part; the archive is the second choice.
        folder = next((f for f in (base / FOLDER, base) if all((f / name).is_file() for name in files)), None)
        if folder is None and download:
            # Imported here, because urllib is slow to import.
            from simparallel.data.download import download as fetch

            fetch(self.urls, archive, md5=self.md5, size_bytes=self.archive_bytes)
        if folder is not None:
            parts = [read_cifar10(folder / name, self.records_per_file) for name in files]
        elif archive.is_file():
            parts = read_cifar10_archive(archive, files, self.records_per_file or 10_000)
        else:
            found = [place / name for place in (base / FOLDER, base) for name in files if (place / name).is_file()]
            if found:
                missing = ", ".join(name for name in files if not (found[0].parent / name).is_file())
                raise bad_file(found[0], f"{found[0]} exists, but {missing} is missing next to it.", who="CIFAR10")
            text = f"{', '.join(files)} are neither in {base / FOLDER} nor in {base}, and there is no {archive}."
            raise bad_file(archive, f"{text} Pass the right root, or download=True.", who="CIFAR10")
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return images, labels


def read_cifar10(path: str | os.PathLike[str], num_records: int | None = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Read images, uint8 (n, 32, 32, 3), and labels, int64 (n,), from one binary file.

    Args:
        path: path of the file.
        num_records: expected number of records of 3,073 bytes; None accepts any whole number.

    Raises:
        DataError: the file is missing or has another size, or a label is outside of 0 … 9.
    """
    path = Path(path)
    if num_records is None:
        size = path.stat().st_size if path.is_file() else 0
        # Rounded down: `_records` refuses a file with an incomplete record.
        num_records = max(1, size // RECORD_BYTES)
    with open_source(path) as source:
        return _records(source, num_records)


def read_cifar10_archive(
    path: str | os.PathLike[str], names: Sequence[str], num_records: int = 10_000
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read some members of the archive, as `read_cifar10`; nothing is unpacked to disk.

    Args:
        path: the .tar.gz file.
        names: of the members to read, without their folder.
        num_records: images in each member.

    Raises:
        DataError: not such an archive, or a member is missing, broken or not a plain file.
    """
    # Most programs never need it.
    import tarfile

    path = Path(path)
    bad = partial(bad_file, path, where=" of the unpacked data")
    wanted = {f"{FOLDER}/{name}" for name in names}
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    size = num_records * RECORD_BYTES
    try:
        with (
            open_file(path) as file,
            gzip.GzipFile(fileobj=file) as unpacked,
            tarfile.open(fileobj=_Limited(unpacked, size), mode="r:") as tar,  # type: ignore[call-overload]
        ):
            for count, member in enumerate(tar):
                if count >= LARGEST_MEMBERS:
                    raise bad(f"more than {LARGEST_MEMBERS} members.", member.offset)
                if member.name not in wanted:
                    # Skipping a member decompresses it, so its size is limited, too.
                    if member.size > max(size, LARGEST_OTHER_BYTES):
                        raise bad(f"member {member.name[:99]!r} has {member.size} bytes.", member.offset)
                    continue
                if not member.isreg() or member.size != size or member.name in found:
                    text = f"member {member.name!r} must be a regular file of {size} bytes, but has {member.size}."
                    raise bad(text, member.offset)
                stream = tar.extractfile(member)
                # `isreg` has checked that it is a plain file.
                assert stream is not None
                where = f" of {member.name}"
                found[member.name] = _records(Source(path, stream, size, exact=True, where=where), num_records)
    except DataError:
        raise
    except Exception as error:
        # tarfile may raise anything on a broken file.
        raise bad(f"cannot be read as tar.gz: {type(error).__name__}: {error}.") from None
    missing = sorted(wanted - set(found))
    if missing:
        raise bad(f"members {', '.join(missing)} are missing.")
    return [found[f"{FOLDER}/{name}"] for name in names]


class _Limited:
    """A file for tarfile that limits each read to the size of a member.

    tarfile reads long names and extended headers in one piece, of the size that their header declares.
    """

    def __init__(self, stream: gzip.GzipFile, largest: int) -> None:
        self._stream, self._largest = stream, max(largest, LARGEST_OTHER_BYTES)
        self.tell, self.seek = stream.tell, stream.seek

    def read(self, count: int = -1) -> bytes:
        if not 0 <= count <= self._largest:
            raise ValueError(f"the header of an archive member announces {count} bytes")
        return self._stream.read(count)


def _records(source: Source, num_records: int) -> tuple[np.ndarray, np.ndarray]:
    records = source.array((num_records, RECORD_BYTES), np.uint8, "records")
    wrong = records[:, 0] >= NUM_CLASSES
    if wrong.any():
        position = int(np.argmax(wrong))
        raise source.fail(
            f"label {records[position, 0]} of record {position} is not in 0 … 9.", position * RECORD_BYTES
        )
    # A record is a label and three colour planes; images have channels last.
    planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)
