"""`mindspore.ops.composite`: the names of `mindspore.ops.functional`."""

from simparallel.compat.mindspore.ops.functional import *
