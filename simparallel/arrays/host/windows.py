"""Sliding windows for convolution and pooling: their positions, and scratch arrays that calls reuse.

Positions are pure integers; only `Scratch` touches arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.backend import Array, get_namespace
from simparallel.clock.memory import MemoryAccount
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError, ShapeError
from simparallel.rank_local import RankLocal, per_rank

Pair = tuple[int, int]


class Windows(NamedTuple):
    """All windows over an image: sizes and positions as pairs (height, width).

    Attributes:
        image: size of the image.
        kernel: size of a window, in taps.
        stride: step from window to window.
        dilation: step from tap to tap.
        before: padding at the top and at the left.
        after: padding at the bottom and at the right.
        out: number of windows.
    """

    image: Pair
    kernel: Pair
    stride: Pair
    dilation: Pair
    before: Pair
    after: Pair
    out: Pair

    @property
    def padded(self) -> Pair:
        """Size of the image with its padding."""
        return (self.image[0] + self.before[0] + self.after[0], self.image[1] + self.before[1] + self.after[1])

    @property
    def is_plain(self) -> bool:
        """Whether each window is one pixel: kernel and stride 1, no padding."""
        return self.kernel == self.stride == (1, 1) and self.before == self.after == (0, 0)

    @property
    def turned(self) -> Windows | None:
        """Windows over dy: their products with the kernel, turned by 180°, give dx.

        None if the stride is not 1, because most products would be with zeros between the pixels of dy, and if the
        padding is wider than the kernel reaches.
        """
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        before, after = ((reach[0] - pad[0], reach[1] - pad[1]) for pad in (self.before, self.after))
        if self.stride != (1, 1) or min(*before, *after) < 0:
            return None
        return self._replace(image=self.out, before=before, after=after, out=self.image)

    def slices(self, i: int, j: int, rows: Pair | None = None) -> tuple[slice, slice]:
        """Return the slices of the padded image that pick tap (i, j) of every window, or of these rows of windows."""
        first, last = rows or (0, self.out[0])
        (sh, sw), (dh, dw) = self.stride, self.dilation
        # Stop just past the last window's tap: the slice has one element for each window.
        top, left = i * dh + first * sh, j * dw
        height, width = (last - first - 1) * sh + 1, (self.out[1] - 1) * sw + 1
        return slice(top, top + height, sh), slice(left, left + width, sw)

    def part(self, first: Pair, out: Pair) -> tuple[tuple[Pair, Pair], Windows]:
        """Select `out` windows (rows, columns), beginning with window `first` along each dim.

        Returns:
            The rows and columns (start, stop) of the image under these windows, and the windows over that part alone,
            which is padded only where the image ends.
        """
        spans, before, after = [], [], []
        for f, count, k, s, d, top, size in zip(
            first, out, self.kernel, self.stride, self.dilation, self.before, self.image, strict=True
        ):
            start = f * s - top
            stop = start + (count - 1) * s + d * (k - 1) + 1
            # Windows that lie in the padding alone cover no pixel: then low == high.
            low = min(max(start, 0), size)
            high = max(low, min(stop, size))
            before.append(min(max(-start, 0), stop - start))
            after.append(stop - start - before[-1] - (high - low))
            spans.append((low, high))
        image = spans[0][1] - spans[0][0], spans[1][1] - spans[1][0]
        pads = {"before": (before[0], before[1]), "after": (after[0], after[1])}
        return (spans[0], spans[1]), self._replace(image=image, out=out, **pads)

    def taps(self) -> list[Pair]:
        """List the positions (i, j) in the kernel, row by row."""
        return [(i, j) for i in range(self.kernel[0]) for j in range(self.kernel[1])]


@lru_cache(maxsize=4096)
def windows(
    image: Pair, kernel: Pair, stride: Pair, padding: Pair | str, dilation: Pair, ceil: bool = False
) -> Windows:
    """Place the windows; "same" pads so that out = ceil(image / stride), with the odd pixel at the end.

    With `ceil`, a last window may reach beyond the padding if it begins before the image ends.

    Raises:
        ShapeError: no window fits.
    """
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    if padding == "same":
        missing = tuple(
            max((-(-size // s) - 1) * s + r - size, 0) for size, s, r in zip(image, stride, reach, strict=True)
        )
        before = missing[0] // 2, missing[1] // 2
        after = missing[0] - before[0], missing[1] - before[1]
    else:
        before = after = (0, 0) if isinstance(padding, str) else padding
    room = tuple(size + b + a - r for size, b, a, r in zip(image, before, after, reach, strict=True))
    if min(room) < 0 or min(kernel) < 1:
        raise ShapeError(
            f"a window of {reach[0]} x {reach[1]} does not fit an image of {image[0]} x {image[1]} "
            f"with padding {before} and {after}"
        )
    out = room[0] // stride[0] + 1, room[1] // stride[1] + 1
    # `room` is the length that windows may slide over, so the rounded-up quotient counts a last, partial window.
    # Drop it if it begins beyond the image; else extend the padding at the end to cover it.
    if ceil:
        begins = tuple(-(-r // s) + 1 for r, s in zip(room, stride, strict=True))
        more = [n - ((n - 1) * s >= size + b) for n, s, size, b in zip(begins, stride, image, before, strict=True)]
        out = more[0], more[1]
        reaches = [(n - 1) * s - r for n, s, r in zip(out, stride, room, strict=True)]
        after = after[0] + max(reaches[0], 0), after[1] + max(reaches[1], 0)
    return Windows(image, kernel, stride, dilation, before, after, out)


def as_pair(who: str, name: str, value: Any, least: int) -> Pair:
    """Return (height, width) from one integer or two.

    Raises:
        InputError: `value` is anything else, or holds a number below `least`.
    """
    pair = tuple(value) if isinstance(value, (tuple, list, np.ndarray)) and np.ndim(value) else (value, value)
    is_right = len(pair) == 2 and all(
        isinstance(v, (int, np.integer)) and not isinstance(v, bool) and v >= least for v in pair
    )
    if not is_right:
        raise InputError(f"{who}: {name}={value!r} must be an integer of {least} or more, or a pair of them.")
    return int(pair[0]), int(pair[1])


class Scratch(RankLocal):
    """Scratch arrays by name. Calls reuse their memory, since fresh pages cost as much as the arithmetic.

    The memory of a name grows to its largest use, so a network needs as much as its largest layer. Each device has
    its own arrays, counted on its memory account; outside of a run each thread has its own.
    """

    _arrays: dict[Any, Array] = per_rank(dict)

    def get(self, name: str, shape: tuple[int, ...], like: Array) -> Array:
        """Return an array with the dtype and device of `like` and arbitrary content.

        Raises:
            DeviceOutOfMemoryError: the array has to grow beyond the free device memory.
        """
        size = prod(shape)
        memory, arrays = self._mine()
        key = _key(name, like)
        flat = arrays.get(key)
        if flat is None or flat.size < size:
            arrays.pop(key, None)
            # Free the old array before the larger one is allocated.
            flat = None
            flat = arrays[key] = _make(memory, name, size, like, lambda: get_namespace(like).empty(size, like.dtype))
        return flat[:size].reshape(shape)

    def made(self, name: str, what: Any, size: int, like: Array, make: Callable[[], Array]) -> Array:
        """Return the array that `make()` builds for the key `what`, and cache it until a call with another key.

        It has `size` elements with the dtype and device of `like`, and must not be written to.

        Raises:
            DeviceOutOfMemoryError: the array is larger than the free device memory.
        """
        # `what` comes last in the key: the other entries find the array that the new one replaces.
        memory, arrays = self._mine()
        key = (*_key(name, like), what)
        array = arrays.get(key)
        if array is None:
            for other in [other for other in arrays if other[:-1] == key[:-1]]:
                del arrays[other]
            array = arrays[key] = _make(memory, name, size, like, make)
        return array

    @property
    def limit_bytes(self) -> int | None:
        """The capacity of this thread's device; None for no limit."""
        memory, _ = self._mine()
        return None if memory is None else memory.limit_bytes

    def clear(self) -> None:
        """Free the scratch arrays of this thread's device."""
        self._mine()[1].clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Use separate scratch arrays inside the block, and free them at its end: the others may grow and move."""
        _, arrays = self._mine()
        before = dict(arrays)
        arrays.clear()
        try:
            yield
        finally:
            arrays.clear()
            arrays.update(before)

    def _mine(self) -> tuple[MemoryAccount | None, dict[Any, Array]]:
        """Return the memory account of this thread's device (None outside of a run) and its scratch arrays."""
        recorder = current_recorder()
        return (None, self._arrays) if recorder is None else (recorder.memory, recorder.memory.scratch)


def _key(name: str, like: Array) -> tuple[Any, ...]:
    return name, like.dtype, str(getattr(like, "device", ""))


def _make(memory: MemoryAccount | None, name: str, size: int, like: Array, make: Callable[[], Array]) -> Array:
    """Call `make()` and count its array on the memory account."""
    if memory is None:
        return make()
    memory.make_room(size * like.dtype.itemsize, f"scratch memory {name}")
    array = make()
    memory.hold_scratch(array)
    return array


scratch = Scratch()
