"""`mindspore.nn.optim.optimizer`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
