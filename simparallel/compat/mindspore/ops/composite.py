"""`mindspore.ops.composite`: the names of `mindspore.ops.functional`, and `GradOperation`."""

from simparallel.compat.mindspore.ops.functional import *
from simparallel.compat.mindspore.ops.operations import GradOperation
