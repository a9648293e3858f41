"""`mindspore.nn.wrap.cell_wrapper`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
