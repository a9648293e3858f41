"""The functions of all ops: `add(x, 1.0)`, `linear(x, w, b)`, … Each stands beside its op in `autograd/ops`."""

from __future__ import annotations

import simparallel.autograd.ops  # noqa: F401 (registers the functions)
from simparallel.autograd.methods import FUNCTIONS

globals().update(FUNCTIONS)
__all__ = sorted(FUNCTIONS)
