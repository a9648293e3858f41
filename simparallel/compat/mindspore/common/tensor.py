"""`mindspore.common.tensor`: the names of `mindspore.common`."""

from simparallel.compat.mindspore.common import *
