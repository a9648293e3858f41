"""`mindspore.nn.optim`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
