"""`mindspore.dataset.vision`."""

from simparallel.data.transforms import *

# Not in MindSpore's module of this name.
del PadAndCrop, RandomFlip, RandomTransform, Transform, TypeCast, apply  # noqa: F821


class Inter:
    """Interpolation modes."""

    NEAREST, LINEAR, BILINEAR = "nearest", "bilinear", "bilinear"


class Border:
    """Padding modes."""

    CONSTANT, EDGE, REFLECT, SYMMETRIC = "constant", "edge", "reflect", "symmetric"
