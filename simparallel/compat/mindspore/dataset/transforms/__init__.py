"""`mindspore.dataset.transforms`."""

from simparallel.data.transforms import Compose, TypeCast
