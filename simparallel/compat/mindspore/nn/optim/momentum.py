"""`mindspore.nn.optim.momentum`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
