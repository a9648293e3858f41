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
    """Return `cut_by_context(searches)`; None in an `AutoParallel`, and for pipelines, which cut no operators."""
    if grad_mode.interpreter is not None or get_auto_parallel_context("pipeline_stages") > 1:
        return None
    return cut_by_context(searches)


def kept(owner: Any, by: partial[AutoParallel], fn: Callable[..., Any], gather_results: bool = True) -> AutoParallel:
    """Return `by(fn)`, cached for this rank by owner and settings."""
    # One object for each rank, which may be a thread: it keeps the shapes that were compared, and its plans.
    made = current().kept.setdefault(AutoParallel, WeakKeyDictionary()).setdefault(owner, {})
    settings = tuple(by.keywords.values())
    if settings not in made:
        made[settings] = by(fn, gather_results=gather_results)
    return made[settings]


def in_context(fn: Callable[..., Any], finish: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Return `fn`, run under `AutoParallel` where the context cuts operators and no caller does so.

    Args:
        fn: a function of Tensors.
        finish: turns the results, which are sharded, into those to return; None gathers all of them.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        by = cut(searches=True)
        if by is None:
            return fn(*args, **kwargs)
        result = kept(run, by, fn, finish is None)(*args, **kwargs)
        return result if finish is None else finish(result)

    return run
