"""Decoding, arithmetic and layout, with MindSpore's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.backend import Array, get_namespace
from simparallel.data.imagefile import EncodedImage, read_encoded
from simparallel.data.transforms.base import Transform, as_float, image_dims
from simparallel.errors import DTypeError, InputError, ShapeError


class Decode(Transform):
    """Decode the bytes of image files.   uint8 (n, bytes) -> (n, height, width, 3)

    Supports the formats of `read_image`, recognised by their first bytes; a gray image gets three equal channels.
    Images that are already decoded are only expanded to three channels.

    Raises:
        DataError: (when called) the format is unknown or the data broken; ShapeError: neither bytes nor images.
    """

    # Images of different sizes come out of one batch of bytes.
    is_ragged = True

    def apply(self, batch: Array) -> Array:
        if batch.ndim == 4:
            return with_colours(batch)
        return np.stack([decoded(row) for row in batch])


def decoded(row: Array) -> np.ndarray:
    """Decode one image, (height, width, 3), from its bytes."""
    if row.ndim != 1 or row.dtype != np.uint8:
        raise ShapeError(
            f"Decode: expected the bytes of a file, uint8 of one dim, got {row.dtype} of shape {row.shape}."
        )
    return with_colours(read_encoded(EncodedImage(row.tobytes())))


def with_colours(images: Array) -> Array:
    """Repeat a single channel (the last dim) three times."""
    return images.repeat(3, axis=-1) if images.shape[-1] == 1 else images


class Rescale(Transform):
    """y = x * rescale + shift.   Any shape; integers become float32.

    Args:
        rescale, shift: finite numbers; `Rescale(1 / 255, 0)` maps bytes to 0 … 1.

    Raises:
        InputError: a factor or a shift that is not a finite number.
    """

    def __init__(self, rescale: float, shift: float) -> None:
        for name, value in (("rescale", rescale), ("shift", shift)):
            if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
                raise InputError(f"Rescale: {name}={value!r} must be a finite number.")
        self.rescale, self.shift = float(rescale), float(shift)

    def apply(self, batch: Array) -> Array:
        y = as_float(batch)
        # In place on the copy that `as_float` made: one array of the batch's size.
        y *= self.rescale
        if self.shift:
            y += self.shift
        return y


class Normalize(Transform):
    """y = (x - mean) / std for each channel.   (n, h, w, c), or (n, c, h, w) with is_hwc=False

    Args:
        mean: one number per channel, in the units of x.
        std: one number above 0 per channel.
        is_hwc: True if channels come last.

    Raises:
        InputError: different numbers of means and deviations, or a bad value; ShapeError: (when called) a
            different number of channels.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], is_hwc: bool = True) -> None:
        self.mean, self.std, self.is_hwc = tuple(map(float, mean)), tuple(map(float, std)), bool(is_hwc)
        finite = all(math.isfinite(value) for value in self.mean + self.std)
        if len(self.mean) != len(self.std) or not self.mean or not finite or min(self.std) <= 0:
            raise InputError(
                f"Normalize: mean={mean!r} and std={std!r} must have one finite number for each channel, std above 0."
            )

    def apply(self, batch: Array) -> Array:
        image_dims("Normalize", batch, self.is_hwc)
        channels = batch.shape[3 if self.is_hwc else 1]
        if channels != len(self.mean):
            raise ShapeError(
                f"Normalize: {len(self.mean)} means for {channels} channels of shape {batch.shape}; "
                f"is is_hwc={self.is_hwc} right?"
            )
        y = as_float(batch)
        y -= self._spread(self.mean, y)
        y /= self._spread(self.std, y)
        return y

    def _spread(self, values: tuple[float, ...], y: Array) -> Array:
        """Expand one value per channel to a whole image: broadcasting over 3 channels would take 5 times as long."""
        xp = get_namespace(y)
        channels = xp.asarray(values, dtype=y.dtype)
        if not self.is_hwc:
            return channels[:, None, None]
        return xp.tile(channels, y.shape[1] * y.shape[2]).reshape(y.shape[1:])


class HWC2CHW(Transform):
    """(n, h, w, c) -> (n, c, h, w), as a contiguous copy."""

    def apply(self, batch: Array) -> Array:
        image_dims("HWC2CHW", batch, True)
        return get_namespace(batch).ascontiguousarray(batch.transpose(0, 3, 1, 2))


class TypeCast(Transform):
    """Convert to another dtype.   Any shape.

    Args:
        dtype: a NumPy dtype or its name.

    Raises:
        DTypeError: there is no such dtype.
    """

    def __init__(self, dtype: Any) -> None:
        try:
            self.dtype = np.dtype(dtype)
        except TypeError:
            raise DTypeError(f"TypeCast: {dtype!r} is not a dtype, use for example 'int32'.") from None

    def apply(self, batch: Array) -> Array:
        return batch.astype(self.dtype)
