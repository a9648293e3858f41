"""MNIST and Fashion-MNIST, from local IDX files or downloaded ones; and IDX, the format of these files.

IDX is a magic number, big-endian dims, then the elements. "The MNIST database of handwritten digits" (LeCun, Cortes,
Burges): two zero bytes, one byte for the type, one for the number of dims, then each dim as a 32-bit integer.
"""

from __future__ import annotations

import gzip
import os
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from simparallel.base.files import write_atomically
from simparallel.data.dataset import PublishedImages
from simparallel.data.source import bad_file, open_source
from simparallel.errors import DTypeError, ShapeError

# The format's codes of element types; all numbers are big-endian.
DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# MNIST has 47 MB; the limit keeps a damaged header from allocating all memory.
LARGEST_BYTES = 1 << 30
LARGEST_NDIM = 8


def read_idx(
    path: str | os.PathLike[str],
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: str | None = None,
    max_bytes: int = LARGEST_BYTES,
) -> np.ndarray:
    """Read an IDX file, plain or gzip, into an array in the machine's byte order.

    Args:
        path: path of the file.
        shape: expected shape, with None for dims of any size; None accepts any shape.
        dtype: expected dtype, for example "uint8"; None accepts any dtype of the format.
        max_bytes: refuse larger arrays.

    Raises:
        DataError: the file is missing, not IDX, truncated, too long or too large, or has another shape or dtype.

    Memory: the array, and 1 MiB. At most one byte more than the array is decompressed.
    """
    with open_source(path) as source:
        magic = source.take(4, "the magic number")
        code, ndim = magic[2], magic[3]
        if magic[:2] != b"\0\0" or code not in DTYPES:
            known = ", ".join(f"{known:#04x}" for known in DTYPES)
            raise source.fail(
                f"not an IDX file: it begins with {magic.hex(' ')}, expected 00 00, a type ({known}) and the "
                "number of dims.",
                0,
            )
        kind = np.dtype(DTYPES[code])
        if dtype is not None and kind.newbyteorder("=") != np.dtype(dtype):
            raise source.fail(f"elements of type {code:#04x} ({kind.name}), expected {dtype}.", 2)
        if not 1 <= ndim <= LARGEST_NDIM:
            raise source.fail(f"{ndim} dims, expected 1 … {LARGEST_NDIM}.", 3)
        # The usual mistake is to swap images and labels.
        if shape is not None and ndim != len(shape):
            raise source.fail(f"{ndim} dims, expected {len(shape)}: is it another file of the dataset?", 3)
        # Python integers: products of uint32 sizes would overflow.
        dims = tuple(int(size) for size in np.frombuffer(source.take(4 * ndim, "the dims"), ">u4"))
        for i, (size, need) in enumerate(zip(dims, shape or (None,) * ndim, strict=True)):
            if need is not None and size != need:
                raise source.fail(f"dim {i} has size {size}, expected {need}.", 4 + 4 * i)
        if prod(dims) * kind.itemsize > max_bytes:
            raise source.fail(
                f"an array of shape {dims} is larger than max_bytes={max_bytes}; pass a larger max_bytes if the file "
                "is right.",
                4,
            )
        return source.array(dims, kind, "elements").astype(kind.newbyteorder("="), copy=False)


def write_idx(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Write an array as an IDX file, compressed if the name ends in `.gz`.

    Args:
        path: the file.
        array: any shape of 1 to 8 dims; bytes, integers or floating-point numbers.

    Raises:
        DTypeError: the format lacks the dtype; ShapeError: no dims, or more than 8.
    """
    kinds = {np.dtype(kind).newbyteorder("="): (code, kind) for code, kind in DTYPES.items()}
    code, kind = kinds.get(array.dtype.newbyteorder("="), (None, ""))
    if code is None:
        raise DTypeError(f"write_idx: dtype {array.dtype} is not one of {', '.join(map(str, kinds))}.")
    if not 1 <= array.ndim <= LARGEST_NDIM:
        raise ShapeError(f"write_idx: shape {array.shape} must have 1 … {LARGEST_NDIM} dims.")
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content = header + array.astype(kind).tobytes()
    # Without a time stamp in the gzip header, equal arrays give equal files.
    write_atomically(path, gzip.compress(content, mtime=0) if str(path).endswith(".gz") else content)


NUM_CLASSES = 10
SIDE = 28


class MNIST(PublishedImages):
    """28 x 28 images of handwritten digits: LeCun et al. 1998, "Gradient-based learning".

    Looks for the four files, gzipped or not, in `root/MNIST/raw` (torchvision's
    folder), `root/MNIST`, `root`, and `root/train` or `root/test` (MindSpore's tutorials).

    Args:
        root: folder of the data sets; None takes the environment variable SIMPARALLEL_DATA or DATA_PATH.
        train: the training set (60,000 in the original) or the test set (10,000).
        transform: batch of images -> batch.
        target_transform: labels -> labels.
        download: fetch the gzipped files to `root/MNIST/raw` if they are missing; one process
            fetches while others wait.

    Attributes:
        images: uint8, shape (n, 28, 28, 1).
        labels: int64 in 0 … 9, shape (n,).

    Raises:
        DataError: a file is missing, broken or not downloadable; with path and byte offset.
    """

    folder: ClassVar[str] = "MNIST"
    names: ClassVar[tuple[str, ...]] = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    mirrors: ClassVar[tuple[str, ...]] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    }

    def _read(self, base: Path, train: bool, download: bool) -> tuple[np.ndarray, np.ndarray]:
        who = type(self).__name__
        part = "train" if train else "t10k"
        wanted = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        places = [base / self.folder / "raw", base / self.folder, base, base / ("train" if train else "test")]
        found = _find(places, wanted)
        if found is None and download:
            # Imported here, because urllib is slow to import.
            from simparallel.data.download import download as fetch

            for name in wanted:
                file = f"{name}.gz"
                fetch([mirror + file for mirror in self.mirrors], places[0] / file, md5=self.md5[file])
            found = _find(places, wanted)
        if found is None:
            # One file of a pair was found: name its missing partner, instead of all places that were searched.
            single = [file for place in places for file in _files(place, wanted) if file is not None]
            if single:
                missing = next(name for name in wanted if not single[0].name.startswith(name))
                text = f"{single[0]} exists, but {missing} (or with .gz) is missing next to it."
                raise bad_file(single[0], text, who=who)
            text = f"{wanted[0]} and {wanted[1]} (or with .gz) are not in any of {', '.join(map(str, places))}."
            raise bad_file(places[0] / wanted[0], f"{text} Pass the right root, or download=True.", who=who)
        return read_labelled(*found)


class FashionMNIST(MNIST):
    """28 x 28 images of clothes: Xiao et al. 2017, "Fashion-MNIST". Like `MNIST`, in `root/FashionMNIST`."""

    folder = "FashionMNIST"
    names = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    mirrors = (
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    )
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    }


def read_labelled(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images, uint8 (n, 28, 28, 1), and labels, int64 (n,), from a pair of IDX files.

    Raises:
        DataError: a broken file, labels outside of 0 … 9, or different counts.
    """
    # Labels first: they are small, and swapped files are found before the images are read.
    labels = read_idx(labels_path, shape=(None,), dtype="uint8")
    wrong = labels >= NUM_CLASSES
    if wrong.any():
        position = int(np.argmax(wrong))
        text = f"label {labels[position]} of sample {position} is not in 0 … 9."
        # The header of a vector has 8 bytes: the magic number and one size.
        raise bad_file(labels_path, text, 8 + position)
    images = read_idx(images_path, shape=(None, SIDE, SIDE), dtype="uint8")
    if len(images) != len(labels):
        text = f"{len(images)} images, but {len(labels)} labels in {labels_path}; the files do not belong together."
        raise bad_file(images_path, text, 4)
    if not len(images):
        raise bad_file(images_path, "no images.", 4)
    return images[..., None], labels.astype(np.int64)


def _find(places: list[Path], wanted: tuple[str, str]) -> list[Any] | None:
    """Return the files of the first folder that has both (see `_files`), or None."""
    return next((files for place in places if None not in (files := _files(place, wanted))), None)


def _files(place: Path, wanted: tuple[str, str]) -> list[Path | None]:
    """Return the files of these names in a folder, preferring plain to gzipped ones; None for a missing one."""
    return [next((f for f in (place / name, place / f"{name}.gz") if f.is_file()), None) for name in wanted]
