"""`mindspore.common.parameter`: the names of `mindspore.common`."""

from simparallel.compat.mindspore.common import *
