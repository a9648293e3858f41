"""`mindspore.dataset.transforms.vision`: the names of `mindspore.dataset.vision`."""

from simparallel.compat.mindspore.dataset.vision import *
