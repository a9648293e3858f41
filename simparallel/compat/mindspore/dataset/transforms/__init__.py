"""`mindspore.dataset.transforms`."""

from simparallel.data.transforms import Compose, TypeCast

__all__ = ["Compose", "TypeCast"]

# After `__all__`: these modules have the same names.
from simparallel.compat.mindspore.dataset.transforms import c_transforms, transforms
