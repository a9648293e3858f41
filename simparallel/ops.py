"""The ops: one class each, with MindSpore's name where it has one; and the classes to write new ops (see `Op`).

`simparallel.functions` calls the same ops on Tensors, arrays and numbers.
"""

from __future__ import annotations

from simparallel import autograd
from simparallel.autograd import *  # noqa: F403
from simparallel.autograd.ops import *  # noqa: F403 (for type checkers, which cannot read the line below)
from simparallel.base.hints import answer_unknown_names

__all__ = autograd.__all__

_TO_WRITE_ONE = ("Context", "Op", "Plan", "Spec", "Work")

# Ops that are registered later, such as a user's own.
answer_unknown_names(__name__, autograd.Op.registry.__getitem__)


def __dir__() -> list[str]:
    """List the ops and the classes to write new ones, for tab completion."""
    return sorted({*autograd.Op.registry, *_TO_WRITE_ONE, *(name for name in globals() if name.startswith("__"))})
