"""`mindspore.parallel.auto_parallel`: the names of `mindspore.parallel`."""

from simparallel.compat.mindspore.parallel import *
