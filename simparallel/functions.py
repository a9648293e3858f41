"""The ops as functions: `relu(x)`, `linear(x, w, b)`, …; and the differentiable collectives."""

# This module only re-exports functions, so that users find all of them in one place.
# ruff: noqa: F403

from __future__ import annotations

from simparallel.autograd.functions import *
from simparallel.autograd.methods import FUNCTIONS
from simparallel.base.hints import answer_unknown_names
from simparallel.collectives.differentiable import (  # type: ignore[no-redef, unused-ignore]
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_to,
    reduce,
    reduce_scatter,
    scatter_from,
)

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather_to", "reduce", "reduce_scatter",
    "scatter_from",
]  # fmt: skip
__all__ += sorted(FUNCTIONS)

# Functions that are registered later, such as those of a user's own ops.
answer_unknown_names(__name__, FUNCTIONS.__getitem__)


def __dir__() -> list[str]:
    """List the functions alone for tab completion, without the modules that define them."""
    return sorted({*__all__, *FUNCTIONS, *(name for name in globals() if name.startswith("__"))})
