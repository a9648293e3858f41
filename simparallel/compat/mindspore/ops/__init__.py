"""`mindspore.ops`: ops as objects (`ReLU()`) and as functions (`relu`)."""

from simparallel.compat.mindspore.ops import composite, functional, operations
from simparallel.compat.mindspore.ops.functional import *
from simparallel.compat.mindspore.ops.operations import *

__all__ = [*functional.__all__, *operations.__all__, "composite", "functional", "operations"]
