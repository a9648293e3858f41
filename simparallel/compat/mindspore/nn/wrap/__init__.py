"""`mindspore.nn.wrap`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
