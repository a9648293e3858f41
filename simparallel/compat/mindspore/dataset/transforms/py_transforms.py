"""`mindspore.dataset.transforms.py_transforms`: the names of `mindspore.dataset.transforms`."""

from simparallel.compat.mindspore.dataset.transforms import *
