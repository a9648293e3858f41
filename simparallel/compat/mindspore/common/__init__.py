"""`mindspore.common`: tensors, parameters, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import simparallel as sp
from simparallel import Tensor
from simparallel.autograd.tree_map import change_each as _change_each
from simparallel.backend import random_state
from simparallel.compat.cutting import in_context
from simparallel.compat.front import front, public_names, unused
from simparallel.compat.mindspore.common import initializer
from simparallel.compat.mindspore.common.dtype import *

set_seed = sp.set_seed
# A plain tuple: parameters need no container class here.
ParameterTuple = tuple


@front(sp.nn.Parameter, default_input="data")
def Parameter(
    default_input: Any,
    name: str | None = None,
    requires_grad: bool = True,
    layerwise_parallel: bool = False,
    parallel_optimizer: bool = True,
) -> dict[str, Any]:
    """A leaf tensor that a Cell registers, see `sp.nn.Parameter`."""
    unused("Parameter", layerwise_parallel=layerwise_parallel or None)
    return {"name": name or ""}


def get_seed() -> int:
    """Return the seed set by `set_seed`."""
    return random_state.seed


def value_and_grad(
    fn: Callable[..., Any], grad_position: Any = 0, weights: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """See `sp.value_and_grad`. Under a context that cuts operators, gradients of weights are cut as the weights are."""

    def finish(found: tuple[Any, Any]) -> tuple[Any, Any]:
        value, grads = found
        if weights is None:
            return _change_each((value, grads), _whole)
        if grad_position is None:
            return _change_each(value, _whole), grads
        return _change_each(value, _whole), (_change_each(grads[0], _whole), grads[1])

    return in_context(sp.value_and_grad(fn, grad_position, weights, has_aux), finish)


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, Tensor) else x


def grad(
    fn: Callable[..., Any], grad_position: Any = 0, weights: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function for the gradients alone, or (gradients, more) with `has_aux`; see `sp.value_and_grad`."""
    both = value_and_grad(fn, grad_position, weights, has_aux)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        # With `has_aux` the value is (loss, more); the loss itself is dropped.
        return (grads, *value[1:]) if has_aux else grads

    return gradients


def jit(fn: Any = None, **settings: Any) -> Any:
    """Return the function; under a context that cuts operators, its calls are cut. The settings are ignored.

    Operations run one by one in any case.
    """
    return in_context if fn is None else in_context(fn)


# The name of `jit` before MindSpore 2.0.
ms_function = jit

__all__ = public_names(globals(), "initializer", "random_state")
