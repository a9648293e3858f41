"""Random crops and flips."""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.backend import Array, get_namespace
from simparallel.data.sampler import check_integer
from simparallel.data.transforms.base import RandomTransform, image_dims
from simparallel.errors import InputError, ShapeError


def check_size(who: str, size: Any) -> tuple[int, int]:
    """A size or a pair of sizes as (height, width)."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise InputError(f"{who}: size={size!r} must be an integer or (height, width).")
    height, width = (check_integer(who, "size", value, 1) for value in pair)
    return height, width


class PadAndCrop(RandomTransform):
    """Pad all four sides, then cut out a window at a random place.   He et al. 2016, section 4.2.

    (n, h, w, c), or (n, c, h, w) with is_hwc=False; the dtype stays.

    Args:
        size: (height, width) of the window, or one number for both; None keeps that of the images.
        padding: pixels on each side, 0 or more.
        fill: value of the padding.
        seed: see `RandomTransform`.
        is_hwc: whether channels come last.

    Raises:
        InputError: a bad setting; ShapeError: (when called) a window larger than the padded image.
    """

    numbers_per_sample = 2

    def __init__(
        self, size: int | tuple[int, int] | None = None, padding: int = 4, fill: float = 0, seed: int = 0,
        is_hwc: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        self.size = None if size is None else check_size("PadAndCrop", size)
        self.padding = check_integer("PadAndCrop", "padding", padding, 0)
        self.fill, self.is_hwc = fill, bool(is_hwc)

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        xp = get_namespace(batch)
        rows, columns = dims = image_dims("PadAndCrop", batch, self.is_hwc)
        height, width = self.size or (batch.shape[rows], batch.shape[columns])
        pad = self.padding
        widths = [(pad, pad) if dim in dims else (0, 0) for dim in range(4)]
        padded = xp.pad(batch, widths, constant_values=self.fill) if pad else batch
        free = padded.shape[rows] - height, padded.shape[columns] - width
        if min(free) < 0:
            raise ShapeError(
                f"PadAndCrop: a window of {height} x {width} does not fit into {batch.shape[rows]} x "
                f"{batch.shape[columns]} pixels with a padding of {pad}."
            )
        offsets = xp.asarray((numbers * (np.array(free) + 1)).astype(np.int64))  # (n, 2), uniform in 0 … free
        n, top, left = xp.arange(len(batch)), offsets[:, 0], offsets[:, 1]
        # All windows as a view, of which one an image is copied: whole rows, not pixel by pixel.
        windows_of = xp.lib.stride_tricks.sliding_window_view
        if not self.is_hwc:
            return windows_of(padded, (height, width), axis=(2, 3))[n, :, top, left]
        channels = padded.shape[3]
        rows_of = padded.reshape(*padded.shape[:2], -1)  # (n, h, w c)
        windows = windows_of(rows_of, (height, width * channels), axis=(1, 2))[n, top, left * channels]
        return windows.reshape(-1, height, width, channels)


class RandomFlip(RandomTransform):
    """Mirror each image with probability `prob`.   Any dtype, the shape stays.

    (n, h, w, c), or (n, c, h, w) with is_hwc=False.

    Args:
        prob: in [0, 1].
        direction: "horizontal" exchanges left and right, "vertical" top and bottom.
        seed: see `RandomTransform`; the two directions draw different numbers by themselves.
        is_hwc: whether channels come last.

    Raises:
        InputError: a bad setting.
    """

    def __init__(
        self, prob: float = 0.5, direction: str = "horizontal", seed: int = 0, is_hwc: bool = True
    ) -> None:
        super().__init__(seed)
        if not isinstance(prob, (int, float)) or not 0 <= prob <= 1:
            raise InputError(f"RandomFlip: prob={prob!r} must be a number in 0 … 1.")
        if direction not in ("horizontal", "vertical"):
            raise InputError(f"RandomFlip: direction={direction!r}, choose from horizontal, vertical.")
        self.prob, self.direction, self.is_hwc = prob, direction, bool(is_hwc)

    @property
    def stream(self) -> str:
        return f"RandomFlip.{self.direction}"

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        xp = get_namespace(batch)
        dim = image_dims("RandomFlip", batch, self.is_hwc)[self.direction == "horizontal"]
        chosen = xp.asarray(np.flatnonzero(numbers[:, 0] < self.prob))
        y = batch.copy()
        y[chosen] = xp.flip(batch[chosen], axis=dim)
        return y
