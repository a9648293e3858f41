"""`ImageFolder`: a folder of images for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.base.checks import check_integer
from simparallel.data.imagefile import EXTENSIONS, LARGEST_PIXELS, read_image
from simparallel.data.source import bad_file, open_source
from simparallel.data.transforms import apply
from simparallel.errors import DataError, InputError

# The largest file that is returned undecoded.
LARGEST_FILE_BYTES = 8 * LARGEST_PIXELS


class ImageFolder:
    """Samples (image, label) from `root/<class>/…/<file>`, read on access.

    Classes are the folders in `root` in alphabetical order, samples the files below them in
    alphabetical order; names that begin with a dot, and extensions other than `.npy .ppm .pgm .png .jpg .jpeg`,
    are skipped.

    Args:
        root: the folder.
        transform: batch of images -> batch, called with a batch of one. A `DataLoader` can
            transform whole batches instead, if all images have one size.
        target_transform: label -> label.
        max_pixels: refuse larger images.
        decode: False returns the bytes of a file, uint8 of shape (bytes,), for `transforms.Decode`.
        extensions: accept only these, such as [".png"].
        class_indexing: name -> label; uses only these folders. None numbers all folders.

    Attributes:
        classes: names, in alphabetical order or in the order of `class_indexing`.
        class_to_idx: name -> label.
        samples: list of (path, label).

    Raises:
        DataError: no folder, no classes, or a class without images; on access, a broken file.
        InputError: an unknown extension, or a label that is not an integer of 0 or more.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        max_pixels: int = LARGEST_PIXELS,
        decode: bool = True,
        extensions: Sequence[str] | None = None,
        class_indexing: Mapping[str, int] | None = None,
    ) -> None:
        self.root = Path(root)
        self.transform, self.target_transform, self.max_pixels = transform, target_transform, max_pixels
        self.decode, self.epoch = bool(decode), 0
        wanted = EXTENSIONS if extensions is None else tuple(extension.lower() for extension in extensions)
        if not wanted or not set(wanted) <= set(EXTENSIONS):
            raise InputError(f"ImageFolder: extensions={extensions!r} must be among {', '.join(EXTENSIONS)}.")
        for name, label in (class_indexing or {}).items():
            check_integer("ImageFolder", f"class_indexing[{name!r}]", label, 0)
        try:
            entries = [e.name for e in os.scandir(self.root) if e.is_dir() and not e.name.startswith(".")]
        except OSError as error:
            raise self._error(self.root, f"cannot be listed: {error.strerror}") from None
        # Sorted: os.scandir has no order, and every rank needs the same labels.
        self.classes = sorted(entries) if class_indexing is None else list(class_indexing)
        self.class_to_idx = dict(class_indexing or {name: label for label, name in enumerate(self.classes)})
        if not self.classes:
            raise self._error(self.root, "has no folders; there must be one for each class")
        self.samples: list[tuple[Path, int]] = []
        for name, label in self.class_to_idx.items():
            paths = _images(self.root / name, wanted)
            if not paths:
                raise self._error(self.root / name, f"has no images ({' '.join(wanted)})")
            self.samples += [(path, label) for path in paths]

    @property
    def targets(self) -> list[int]:
        """The labels of all samples."""
        return [label for _, label in self.samples]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the transform's random numbers; a DataLoader calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return (image of shape (height, width, channels), or bytes, and label), transformed.

        Raises:
            IndexError: the index is out of range; DataError: the file is broken.
        """
        path, label = self.samples[index]
        # Random transforms draw by sample number, so -1 and the last index must be the same sample.
        number = np.array([index % len(self.samples)])
        image = apply(self.transform, self._read(path)[None], number, self.epoch)[0]
        return image, label if self.target_transform is None else self.target_transform(label)

    def _read(self, path: Path) -> np.ndarray:
        if self.decode:
            return read_image(path, self.max_pixels)
        with open_source(path) as source:
            return np.frombuffer(source.rest(LARGEST_FILE_BYTES, "an image"), np.uint8)

    @staticmethod
    def _error(path: Path, text: str) -> DataError:
        return bad_file(path, f"ImageFolder: {path} {text}.")


def _images(folder: Path, extensions: Sequence[str]) -> list[Path]:
    found = []
    for place, folders, files in os.walk(folder):
        # In place, as os.walk requires for folders to be skipped.
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(place, name) for name in files if Path(name).suffix.lower() in extensions and not name.startswith(".")
        ]
    return sorted(found)
