"""Hypothesis strategies: valid by construction, never filtered, and shrinking towards the smallest case.

Import the package by name (`from simparallel.testing import strategies`): it needs Hypothesis, unlike the rest of
simparallel.
"""

from simparallel.testing.strategies.collectives import Program, ProgramCall, programs
from simparallel.testing.strategies.cuts import device_matrices, layouts, strategies_for
from simparallel.testing.strategies.hardware import clusters, links
from simparallel.testing.strategies.values import (
    FLOATS,
    INTEGERS,
    NONZERO_INTEGERS,
    POSITIVE_FLOATS,
    POSITIVE_INTEGERS,
    Draw,
    Shape,
    arrays,
    broadcastable_shapes,
    cuttable_arrays,
    gradients,
    matmul_operands,
    operand,
    shapes,
    world_sizes,
)

__all__ = [
    "FLOATS", "INTEGERS", "NONZERO_INTEGERS", "POSITIVE_FLOATS", "POSITIVE_INTEGERS", "Draw", "Program", "ProgramCall",
    "Shape", "arrays", "broadcastable_shapes", "clusters", "cuttable_arrays", "device_matrices", "gradients", "layouts",
    "links", "matmul_operands", "operand", "programs", "shapes", "strategies_for", "world_sizes",
]  # fmt: skip
