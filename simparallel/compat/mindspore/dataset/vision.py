"""`mindspore.dataset.vision`, and `c_transforms` as they were called before."""

from simparallel.data.transforms import HWC2CHW, Compose, Normalize, Rescale, Resize
