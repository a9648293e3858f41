"""`mindspore.nn.loss`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
