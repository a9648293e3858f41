"""Decoding images in a pipeline."""

from __future__ import annotations

import numpy as np

from simparallel.backend import Array
from simparallel.data.imagefile import EncodedImage, read_encoded
from simparallel.data.transforms.base import Transform
from simparallel.errors import ShapeError


class Decode(Transform):
    """An image out of the bytes of its file.   uint8 (n, bytes) -> (n, height, width, channels)

    Formats and channels are those of `read_image`, recognised by their first bytes; images that are decoded
    already stay as they are.

    Raises:
        DataError: (when called) an unknown format, or broken; ShapeError: neither bytes nor images.
    """

    is_ragged = True

    def apply(self, batch: Array) -> Array:
        if batch.ndim == 4:
            return batch
        return np.stack([decoded(row) for row in batch])


def decoded(row: Array) -> np.ndarray:
    """One image, (height, width, channels), of its bytes."""
    if row.ndim != 1 or row.dtype != np.uint8:
        raise ShapeError(
            f"Decode: need the bytes of a file, uint8 of one dim, got {row.dtype} of shape {row.shape}."
        )
    return read_encoded(EncodedImage(row.tobytes()))
