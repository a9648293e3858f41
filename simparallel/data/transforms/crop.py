"""Transforms of positions: flips, resizing, and crops at random positions, in the centre, of random sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.backend import Array, get_namespace, random_uniform
from simparallel.base.checks import check_choice, check_integer, check_number
from simparallel.data.transforms.base import RandomTransform, Transform, image_dims
from simparallel.data.transforms.basic import decoded, with_colours
from simparallel.errors import InputError, ShapeError


def check_size(who: str, size: Any) -> tuple[int, int]:
    """Return a size or a pair of sizes as (height, width)."""
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise InputError(f"{who}: size={size!r} must be an integer or (height, width).")
    height, width = (check_integer(who, "size", value, 1) for value in pair)
    return height, width


class RandomFlip(RandomTransform):
    """Mirror each image with probability `prob`.   Any dtype; the shape is unchanged.

    (n, h, w, c), or (n, c, h, w) with is_hwc=False.

    Args:
        prob: in [0, 1].
        direction: "horizontal" swaps left and right, "vertical" top and bottom.
        seed: see `RandomTransform`; the two directions draw independently even with the same seed.
        is_hwc: True if channels come last.

    Raises:
        InputError: a bad setting.
    """

    def __init__(self, prob: float = 0.5, direction: str = "horizontal", seed: int = 0, is_hwc: bool = True) -> None:
        super().__init__(seed)
        check_choice("RandomFlip", "direction", direction, ("horizontal", "vertical"))
        self.prob = check_number("RandomFlip", "prob", prob, high=1.0)
        self.direction, self.is_hwc = direction, bool(is_hwc)

    @property
    def stream(self) -> str:
        return f"RandomFlip.{self.direction}"

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        xp = get_namespace(batch)
        dim = image_dims("RandomFlip", batch, self.is_hwc)[self.direction == "horizontal"]
        chosen = xp.asarray(np.flatnonzero(numbers[:, 0] < self.prob))
        y = batch.copy()
        # Only the chosen images are flipped; the copy keeps the argument unchanged.
        y[chosen] = xp.flip(batch[chosen], axis=dim)
        return y


class RandomHorizontalFlip(RandomFlip):
    """`RandomFlip` that swaps left and right; MindSpore's name."""

    def __init__(self, prob: float = 0.5, seed: int = 0, is_hwc: bool = True) -> None:
        super().__init__(prob, "horizontal", seed, is_hwc)


class RandomVerticalFlip(RandomFlip):
    """`RandomFlip` that swaps top and bottom; MindSpore's name."""

    def __init__(self, prob: float = 0.5, seed: int = 0, is_hwc: bool = True) -> None:
        super().__init__(prob, "vertical", seed, is_hwc)


class Resize(Transform):
    """Resize images.   (n, h, w, c), or (n, c, h, w) with is_hwc=False; the dtype is unchanged.

    "bilinear": pixel i of the result is sampled at s = (i + 1/2) in / out - 1/2 of the source (clamped to
    it), mixing the two pixels around s by their distances, in each direction: `align_corners=False`
    without anti-aliasing in PyTorch's terms. Integers are rounded, halves to even.
    "nearest": pixel i is pixel floor(i in / out) of the source.

    Args:
        size: (height, width); or one number for the shorter side, keeping the images' aspect ratio.
        interpolation: "bilinear" or "nearest".
        is_hwc: True if channels come last.

    Raises:
        InputError: a bad setting; ShapeError: (when called) images have no pixels.
    """

    def __init__(self, size: int | tuple[int, int], interpolation: str = "bilinear", is_hwc: bool = True) -> None:
        self.size = check_size("Resize", size)
        # One number means the shorter side, as in PyTorch; the other side depends on the images.
        self._keeps_shape = not isinstance(size, (tuple, list))
        check_choice("Resize", "interpolation", interpolation, ("bilinear", "nearest"))
        self.interpolation, self.is_hwc = interpolation, bool(is_hwc)

    def apply(self, batch: Array) -> Array:
        dims = image_dims("Resize", batch, self.is_hwc)
        if not all(batch.shape[dim] for dim in dims):
            raise ShapeError(f"Resize: images of shape {batch.shape} have no pixels.")
        y = batch
        for dim, size in zip(dims, self._sizes([batch.shape[dim] for dim in dims]), strict=True):
            y = self._along(y, dim, size)
        if y.dtype != batch.dtype:
            # Round once, after both directions, so that errors do not add up.
            y = get_namespace(batch).rint(y).astype(batch.dtype) if batch.dtype.kind in "iu" else y.astype(batch.dtype)
        return y if y is not batch else batch.copy()

    def _sizes(self, before: list[int]) -> tuple[int, ...]:
        if not self._keeps_shape:
            return self.size
        return tuple(int(size * self.size[0] / min(before) + 0.5) for size in before)

    def _along(self, batch: Array, dim: int, size: int) -> Array:
        before = batch.shape[dim]
        if before == size:
            return batch
        xp = get_namespace(batch)
        if self.interpolation == "nearest":
            return xp.take(batch, xp.asarray(np.arange(size) * before // size), axis=dim)
        # Linear interpolation between the two neighbouring pixels: left + share (right - left).
        place = np.clip((np.arange(size) + 0.5) * (before / size) - 0.5, 0, before - 1)
        low = np.floor(place).astype(np.int64)
        dtype = np.result_type(batch.dtype, np.float32)
        shape = [-1 if d == dim else 1 for d in range(batch.ndim)]
        share = xp.asarray((place - low).astype(dtype)).reshape(shape)
        left = xp.take(batch, xp.asarray(low), axis=dim).astype(dtype)
        y = xp.take(batch, xp.asarray(np.minimum(low + 1, before - 1)), axis=dim).astype(dtype)
        # left + share * (right - left), in place: two temporary arrays less.
        y -= left
        y *= share
        y += left
        return y


PADDING_MODES = ("constant", "edge", "reflect", "symmetric")


class RandomCrop(RandomTransform):
    """Pad, then crop a window at a random position.   He et al. 2016, section 4.2.

    (n, h, w, c), or (n, c, h, w) with is_hwc=False; the dtype is unchanged.

    Args:
        size: (height, width) of the window, or one number for both; None keeps the images' size.
        padding: pixels to add: on each side; or (left and right, top and bottom); or (left, top, right, bottom).
        pad_if_needed: pad an image that is smaller than the window by the missing pixels, on both sides.
        fill_value: value of the padding, or one for each channel.
        padding_mode: "constant" pads with `fill_value`, "edge" with the last pixel, "reflect" and "symmetric" with
            the mirrored image, without and with the last pixel.
        seed: see `RandomTransform`.
        is_hwc: True if channels come last.

    Raises:
        InputError: a bad setting; ShapeError: (when called) a window larger than the padded image, or a wrong
            number of values in `fill_value`.
    """

    numbers_per_sample = 2

    def __init__(
        self,
        size: int | tuple[int, int] | None,
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill_value: float | Sequence[float] = 0,
        padding_mode: str = "constant",
        seed: int = 0,
        is_hwc: bool = True,
    ) -> None:
        super().__init__(seed)
        who = type(self).__name__
        self.size = None if size is None else check_size(who, size)
        self.padding = _sides(who, 0 if padding is None else padding)
        self.pad_if_needed, self.fill_value = bool(pad_if_needed), fill_value
        check_choice(who, "padding_mode", padding_mode, PADDING_MODES)
        self.padding_mode, self.is_hwc = padding_mode, bool(is_hwc)

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        xp = get_namespace(batch)
        rows, columns = image_dims(type(self).__name__, batch, self.is_hwc)
        height, width = self.size or (batch.shape[rows], batch.shape[columns])
        left, top, right, bottom = self.padding
        sides = {rows: (top, bottom), columns: (left, right)}
        if self.pad_if_needed:
            for dim, size in ((rows, height), (columns, width)):
                # Each side gets all missing pixels, as in torchvision, so that the image can be anywhere in the window.
                lacks = max(0, size - batch.shape[dim] - sum(sides[dim]))
                sides[dim] = sides[dim][0] + lacks, sides[dim][1] + lacks
        padded = self._padded(batch, sides)
        free = padded.shape[rows] - height, padded.shape[columns] - width
        if min(free) < 0:
            raise ShapeError(
                f"{type(self).__name__}: a window of {height} x {width} does not fit into {batch.shape[rows]} x "
                f"{batch.shape[columns]} pixels with a padding of {self.padding} (left, top, right, bottom)."
            )
        offsets = xp.asarray((numbers * (np.array(free) + 1)).astype(np.int64))  # (n, 2), uniform in 0 … free
        n, first_row, first_column = xp.arange(len(batch)), offsets[:, 0], offsets[:, 1]
        # View all windows and copy one per image: this copies whole rows, not single pixels.
        windows_of = xp.lib.stride_tricks.sliding_window_view
        if not self.is_hwc:
            return windows_of(padded, (height, width), axis=(2, 3))[n, :, first_row, first_column]
        channels = padded.shape[3]
        # Merge width and channels, so that the copied rows are as long as possible.
        rows_of = padded.reshape(*padded.shape[:2], -1)  # (n, h, w c)
        windows = windows_of(rows_of, (height, width * channels), axis=(1, 2))
        return windows[n, first_row, first_column * channels].reshape(-1, height, width, channels)

    def _padded(self, batch: Array, sides: dict[int, tuple[int, int]]) -> Array:
        if not any(map(sum, sides.values())):
            return batch
        xp = get_namespace(batch)
        widths = [sides.get(dim, (0, 0)) for dim in range(4)]
        if self.padding_mode != "constant":
            return xp.pad(batch, widths, mode=self.padding_mode)
        if np.ndim(self.fill_value) == 0:
            return xp.pad(batch, widths, constant_values=self.fill_value)
        # One fill value per channel is beyond xp.pad: fill an array and copy the batch into its centre.
        padded = xp.empty(
            tuple(size + sum(width) for size, width in zip(batch.shape, widths, strict=True)), batch.dtype
        )
        channels = batch.shape[3 if self.is_hwc else 1]
        fill = xp.asarray(self.fill_value, dtype=batch.dtype)
        if fill.shape != (channels,):
            raise ShapeError(
                f"{type(self).__name__}: fill_value={self.fill_value!r} for {channels} channels; give one number, or "
                "one for each."
            )
        padded[...] = fill if self.is_hwc else fill[:, None, None]
        inside = (slice(first, first + size) for size, (first, _) in zip(batch.shape, widths, strict=True))
        padded[tuple(inside)] = batch
        return padded


class PadAndCrop(RandomCrop):
    """`RandomCrop` with equal padding on all four sides; by default the window has the images' size.

    Args:
        size: as for `RandomCrop`.
        padding: pixels on each side, 0 or more.
        fill: value of the padding.
        seed, is_hwc: as for `RandomCrop`.
    """

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        padding: int = 4,
        fill: float = 0,
        seed: int = 0,
        is_hwc: bool = True,
    ) -> None:
        super().__init__(size, padding, fill_value=fill, seed=seed, is_hwc=is_hwc)


class CenterCrop(Transform):
    """Crop the centre.   (n, h, w, c), or (n, c, h, w) with is_hwc=False; the dtype is unchanged.

    Smaller images are padded with 0.

    Args:
        size: (height, width), or one number for both.
        is_hwc: True if channels come last.

    Raises:
        InputError: a bad size.
    """

    def __init__(self, size: int | tuple[int, int], is_hwc: bool = True) -> None:
        self.size, self.is_hwc = check_size("CenterCrop", size), bool(is_hwc)

    def apply(self, batch: Array) -> Array:
        xp = get_namespace(batch)
        dims = image_dims("CenterCrop", batch, self.is_hwc)
        widths, window = [(0, 0)] * 4, [slice(None)] * 4
        for dim, size in zip(dims, self.size, strict=True):
            lacks = max(0, size - batch.shape[dim])
            # An odd pixel goes to the top or left.
            widths[dim] = (lacks + 1) // 2, lacks // 2
            first = max(0, batch.shape[dim] - size) // 2
            window[dim] = slice(first, first + size)
        y = xp.pad(batch, widths)[tuple(window)]
        # A window is a view of the padded copy, which it would keep alive.
        return xp.ascontiguousarray(y)


class RandomResizedCrop(RandomTransform):
    """Crop a window of random size, shape and position, and resize it.   Szegedy et al. 2015, section 6.

    (n, h, w, c), or (n, c, h, w) with is_hwc=False; the dtype is unchanged. A window's share of the area is uniform
    in `scale`, the logarithm of its width / height uniform in `ratio`. A window that does not fit is drawn
    again; after `max_attempts` the largest centred window of an allowed shape is used.

    Args:
        size: (height, width) of the result, or one number for both.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width / height.
        interpolation: see `Resize`.
        max_attempts: 1 or more.
        seed: see `RandomTransform`.
        is_hwc: True if channels come last.

    Raises:
        InputError: a bad setting.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
        max_attempts: int = 10,
        seed: int = 0,
        is_hwc: bool = True,
    ) -> None:
        super().__init__(seed)
        who = type(self).__name__
        self.size = check_size(who, size)
        for name, (low, high) in (("scale", scale), ("ratio", ratio)):
            if not 0 < low <= high < math.inf:
                raise InputError(f"{who}: {name}={(low, high)} must be two numbers above 0, the first no larger.")
        self.scale, self.ratio, self.is_hwc = tuple(scale), tuple(ratio), bool(is_hwc)
        self.max_attempts = check_integer(who, "max_attempts", max_attempts, 1)
        self.interpolation = interpolation
        self._resize = Resize(self.size, interpolation, is_hwc)

    def _numbers(self, index: np.ndarray, epoch: int) -> np.ndarray:
        """Return a row of random numbers in 0 … 1 for each sample; not cached, which would take 176 bytes a sample."""
        # Two numbers for each attempt, and two for the position.
        count, stream = 2 * self.max_attempts + 2, f"{self.stream}/{epoch}"
        # Each sample has its own range of the stream, so its numbers do not depend on the batch.
        rows = [random_uniform(self.seed, stream, int(i) * count, count) for i in index]
        return np.array(rows).reshape(len(index), count)

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        rows, columns = image_dims(type(self).__name__, batch, self.is_hwc)
        resized = []
        for i in range(len(batch)):
            window = [slice(i, i + 1), slice(None), slice(None), slice(None)]
            window[rows], window[columns] = self._window(batch.shape[rows], batch.shape[columns], numbers[i])
            resized.append(self._resize.apply(batch[tuple(window)]))
        return get_namespace(batch).concatenate(resized) if resized else self._resize.apply(batch)

    def _window(self, height: int, width: int, numbers: np.ndarray) -> tuple[slice, slice]:
        """Return the rows and columns of the window in an image."""
        (small, large), (narrow, wide) = self.scale, self.ratio
        for share, shape in zip(numbers[:-2:2], numbers[1:-2:2], strict=True):
            area = height * width * (small + (large - small) * share)
            # Uniform in log(aspect): an aspect and its inverse are equally likely if the range is symmetric.
            aspect = narrow * (wide / narrow) ** shape
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top, left = int(numbers[-2] * (height - h + 1)), int(numbers[-1] * (width - w + 1))
                return slice(top, top + h), slice(left, left + w)
        # All attempts failed: the largest window in the centre, with the nearest allowed width / height.
        aspect = min(max(width / height, narrow), wide)
        w, h = max(1, min(width, round(height * aspect))), max(1, min(height, round(width / aspect)))
        top, left = (height - h) // 2, (width - w) // 2
        return slice(top, top + h), slice(left, left + w)


class RandomCropDecodeResize(RandomResizedCrop):
    """`Decode`, then `RandomResizedCrop`.   uint8 (n, bytes) -> (n, height, width, 3)

    Args:
        size, scale, ratio, interpolation, max_attempts, seed: as for `RandomResizedCrop`.

    Raises:
        InputError: a bad setting; (when called) also the errors of `Decode`.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
        max_attempts: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__(size, scale, ratio, interpolation, max_attempts, seed)

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        if batch.ndim == 4:
            # The images are decoded already.
            return super().apply_random(with_colours(batch), numbers)
        # Crop image by image, because sizes differ before the resize.
        cut = super().apply_random
        return np.concatenate([cut(decoded(row)[None], numbers[i : i + 1]) for i, row in enumerate(batch)])


def _sides(who: str, padding: Any) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) for one, two or four numbers."""
    given = tuple(padding) if isinstance(padding, (tuple, list)) else (padding,)
    if len(given) not in (1, 2, 4):
        raise InputError(
            f"{who}: padding={padding!r} must be one number, (left and right, top and bottom) or (left, top, right, "
            "bottom)."
        )
    left, top, right, bottom = (check_integer(who, "padding", side, 0) for side in given * (4 // len(given)))
    return left, top, right, bottom
