"""Run functions and cells under `AutoParallel` where the auto-parallel context cuts operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

from simparallel import AutoParallel
from simparallel.autograd.grad_mode import grad_mode
from simparallel.comm import current
from simparallel.parallel.operator.auto import cut_by_context
from simparallel.world.context import get_auto_parallel_context


def cut(searches: bool = False) -> partial[AutoParallel] | None:
    """Return `cut_by_context(searches)`; None inside of an `AutoParallel`, and for pipelines, which cut nothing."""
    if grad_mode.interpreter is not None or get_auto_parallel_context("pipeline_stages") > 1:
        return None
    return cut_by_context(searches)


def in_context(fn: Callable[..., Any], finish: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Return `fn`, run under `AutoParallel` where the context cuts operators and no caller does so.

    Args:
        fn: a function of Tensors.
        finish: turns the results, which are sharded, into those to return; None gathers all of them.
    """
    # For each rank, which may be a thread: these objects keep the shapes that they have compared, and their plans.
    made: WeakKeyDictionary[Any, dict[Any, AutoParallel]] = WeakKeyDictionary()

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        by = cut(searches=True)
        if by is None:
            return fn(*args, **kwargs)
        of_rank, settings = made.setdefault(current(), {}), tuple(by.keywords.values())
        if settings not in of_rank:
            of_rank[settings] = by(fn, gather_results=finish is None)
        result = of_rank[settings](*args, **kwargs)
        return result if finish is None else finish(result)

    return run
