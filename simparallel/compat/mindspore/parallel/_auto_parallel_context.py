"""`mindspore.parallel._auto_parallel_context`: the names of `mindspore.context`."""

from simparallel.compat.mindspore.context import *
