"""The interface of transforms, and the source of their random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from simparallel.backend import Array, get_namespace, random_uniform
from simparallel.base.checks import check_integer
from simparallel.base.units import format_object
from simparallel.errors import InputError, ShapeError


class Transform:
    """Base of transforms: a subclass defines `apply`.

    Called with a batch, the samples' indices in their dataset and the epoch. Only random
    transforms use the last two.
    """

    __repr__ = format_object

    # The results of one batch may differ in shape, so a pipeline calls it row by row.
    is_ragged: ClassVar[bool] = False

    def __call__(self, batch: Array, index: np.ndarray | None = None, epoch: int = 0) -> Array:
        return self.apply(batch)

    def apply(self, batch: Array) -> Array:
        """Return the transformed batch; the argument is not changed."""
        raise TypeError(f"{type(self).__name__} does not define apply")


def apply(transform: Callable[..., Any] | None, batch: Array, index: np.ndarray | None = None, epoch: int = 0) -> Any:
    """Apply `transform` to a batch; a plain function gets the batch alone, None is a no-op.

    Args:
        transform: a `Transform`, a function of a batch, or None.
        batch: the samples, (n, ...).
        index: for each sample its index in the dataset; by default 0, 1, …, n-1.
        epoch: number of the epoch; random transforms draw by it and by the index.
    """
    if transform is None:
        return batch
    return transform(batch, index, epoch) if isinstance(transform, Transform) else transform(batch)


class Compose(Transform):
    """A sequence of transforms.

    Args:
        transforms: Transforms, or functions of a batch.

    Raises:
        InputError: an entry is not callable.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self.transforms = list(transforms)
        for i, transform in enumerate(self.transforms):
            if not callable(transform):
                raise InputError(f"Compose: transforms[{i}]={transform!r} cannot be called.")

    def __call__(self, batch: Array, index: np.ndarray | None = None, epoch: int = 0) -> Array:
        for transform in self.transforms:
            # Each random transform draws by itself, so the order of the others does not change its numbers.
            batch = apply(transform, batch, index, epoch)
        return batch


class RandomTransform(Transform):
    """Base of random transforms: a subclass defines `apply_random`.

    The numbers of a sample are a pure function of (seed, epoch, index of the sample in its
    dataset): the same on any number of ranks, in any order and at any batch size. Two transforms of
    the same class share their numbers unless they have different seeds.

    Args:
        seed: integer of 0 or more.

    Raises:
        InputError: a bad seed.
    """

    numbers_per_sample: ClassVar[int] = 1

    def __init__(self, seed: int = 0) -> None:
        self.seed = check_integer(type(self).__name__, "seed", seed, 0)
        # Cache of the numbers of one epoch drawn so far: (epoch, array (samples, numbers)).
        self._drawn: tuple[int, np.ndarray] = (-1, np.empty((0, self.numbers_per_sample)))

    @property
    def stream(self) -> str:
        """Name of the stream of random numbers."""
        return type(self).__name__

    def __call__(self, batch: Array, index: np.ndarray | None = None, epoch: int = 0) -> Array:
        if index is None:
            index = np.arange(len(batch))
        index = np.asarray(index)
        if index.shape != (len(batch),):
            raise ShapeError(
                f"{type(self).__name__}: {len(batch)} samples were given with indices of shape {index.shape}."
            )
        return self.apply_random(batch, self._numbers(index, epoch))

    def apply_random(self, batch: Array, numbers: np.ndarray) -> Array:
        """Return the transformed batch. `numbers`: uniform in [0, 1), shape (batch, numbers_per_sample)."""
        raise TypeError(f"{type(self).__name__} does not define apply_random")

    def _numbers(self, index: np.ndarray, epoch: int) -> np.ndarray:
        drawn_epoch, drawn = self._drawn
        need = int(index.max()) + 1 if index.size else 0
        # Numbers are counter-based: drawing a longer range repeats the numbers drawn before.
        if drawn_epoch != epoch or need > len(drawn):
            # Double the cache: an epoch in order then costs a few calls, not one per batch.
            count = max(need, 2 * len(drawn)) if drawn_epoch == epoch else max(need, len(drawn))
            k = self.numbers_per_sample
            drawn = random_uniform(self.seed, f"{self.stream}/{epoch}", 0, count * k).reshape(count, k)
            # Only one epoch is kept: training goes through the epochs one by one.
            self._drawn = epoch, drawn
        return drawn[index]


def image_dims(who: str, batch: Array, is_hwc: bool) -> tuple[int, int]:
    """Return the dims of height and width: (1, 2) for (n, h, w, c), (2, 3) for (n, c, h, w).

    Raises:
        ShapeError: the batch does not have four dims.
    """
    if batch.ndim != 4:
        layout = "(n, height, width, channels)" if is_hwc else "(n, channels, height, width)"
        raise ShapeError(f"{who}: expected a batch of images {layout}, got shape {batch.shape}.")
    return (1, 2) if is_hwc else (2, 3)


def as_float(batch: Array) -> Array:
    """Return a copy in float32, or in the batch's own dtype if that is floating point."""
    return batch.astype(batch.dtype if batch.dtype.kind == "f" else get_namespace(batch).float32)
