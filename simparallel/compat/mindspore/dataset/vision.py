"""`mindspore.dataset.vision`, and `c_transforms` as they were called before."""

from simparallel.data.transforms import (
    HWC2CHW,
    CenterCrop,
    Compose,
    Decode,
    Normalize,
    RandomCrop,
    RandomCropDecodeResize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Rescale,
    Resize,
)


class Inter:
    """Names of the interpolations."""

    NEAREST, LINEAR, BILINEAR = "nearest", "bilinear", "bilinear"


class Border:
    """Names of the ways to pad."""

    CONSTANT, EDGE, REFLECT, SYMMETRIC = "constant", "edge", "reflect", "symmetric"
