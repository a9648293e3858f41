"""`mindspore.parallel.nn`: the names of `mindspore.parallel`."""

from simparallel.compat.mindspore.parallel import *
