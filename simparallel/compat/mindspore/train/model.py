"""`mindspore.train.model`: the names of `mindspore.train`."""

from simparallel.compat.mindspore.train import *
