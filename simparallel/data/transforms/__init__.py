"""Transforms of whole batches of images: `transform(batch)` is one call, whatever the batch size."""

from simparallel.data.transforms.augment import PadAndCrop, RandomFlip
from simparallel.data.transforms.base import Compose, RandomTransform, Transform, apply
from simparallel.data.transforms.basic import HWC2CHW, Normalize, Rescale, TypeCast
from simparallel.data.transforms.resize import Resize

__all__ = [
    "Compose", "HWC2CHW", "Normalize", "PadAndCrop", "RandomFlip", "RandomTransform", "Rescale", "Resize",
    "Transform", "TypeCast", "apply",
]  # fmt: skip
