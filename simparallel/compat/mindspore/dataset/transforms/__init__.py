"""`mindspore.dataset.transforms`."""

from simparallel.compat.mindspore.dataset import vision
from simparallel.data.transforms import Compose, TypeCast
