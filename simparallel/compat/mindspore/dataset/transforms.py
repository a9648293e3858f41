"""`mindspore.dataset.transforms`, and `c_transforms` as they were called before."""

from simparallel.data.transforms import Compose, TypeCast
