"""`mindspore.train.loss_scale_manager`: the names of `mindspore.train`."""

from simparallel.compat.mindspore.train import *
