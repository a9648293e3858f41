"""`mindspore.parallel.nn.parallel_cell_wrapper`: the names of `mindspore.parallel`."""

from simparallel.compat.mindspore.parallel import *
