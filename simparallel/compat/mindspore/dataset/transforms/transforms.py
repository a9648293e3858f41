"""`mindspore.dataset.transforms.transforms`: the names of `mindspore.dataset.transforms`."""

from simparallel.compat.mindspore.dataset.transforms import *
