"""The collectives under their public names: for Tensors, NumPy and CuPy arrays.

A Tensor is replaced by its data; `host_copy` copies GPU arrays to host memory and back, unless `comm.gpu` exchanges
them between GPUs. Signatures and docstrings come from `Communicator`: every rank of the group makes the same calls
in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from types import NoneType
from typing import Any, Concatenate, ParamSpec

import numpy as np

from simparallel.backend import to_host
from simparallel.clock.recorder import current_recorder
from simparallel.collectives.host_copy import (
    array_of,
    check_needs_no_gradient,
    filled,
    in_place,
    into,
    new,
    reduce_list,
    stays_on_gpu,
)
from simparallel.comm import Communicator, Group, current
from simparallel.comm.collective import COLLECTIVES
from simparallel.comm.work import Work

P = ParamSpec("P")


def _public(
    method: Callable[Concatenate[Communicator, Any, P], Any], of_list: Callable[..., Any] | None = None
) -> Callable[Concatenate[Any, P], Any]:
    """Return the public function of a collective; `of_list` runs it for a list of arrays."""
    name = method.__name__
    convert = in_place if COLLECTIVES[name].in_place else new
    signature = inspect.signature(method)
    has_out = "out" in signature.parameters

    @wraps(method)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        communicator = current()
        communicate = getattr(communicator, name)
        # Plain arrays are the common call: it skips every conversion.
        if type(x) is np.ndarray and (not kwargs or type(kwargs.get("out")) in (NoneType, np.ndarray)):
            return communicate(x, *args, **kwargs)  # nothing to convert
        out = kwargs.pop("out", None) if has_out else None
        if of_list is not None and isinstance(x, (list, tuple)):
            return of_list(x, out, *args, **kwargs)
        arguments = signature.bind(communicator, x, *args, **kwargs).arguments if communicator.media else {}
        on_gpu = stays_on_gpu(name, arguments, x, out)
        if out is not None:
            return into(name, x, out, lambda a, b: communicate(a, *args, out=b, **kwargs), on_gpu=on_gpu)
        return convert(name, x, lambda a: communicate(a, *args, **kwargs), on_gpu=on_gpu)

    return _named(call, name, method)


def _named(call: Callable[..., Any], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function its public name, and docstring and signature of a method without `self`."""
    signature, call.__doc__ = inspect.signature(method), method.__doc__
    call.__module__, call.__name__, call.__qualname__ = __name__, name, name
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return call


all_reduce = _public(Communicator.all_reduce, of_list=reduce_list)
broadcast = _public(Communicator.broadcast)
reduce = _public(Communicator.reduce)
all_gather = _public(Communicator.all_gather)
reduce_scatter = _public(Communicator.reduce_scatter)
scan = _public(Communicator.scan)
exscan = _public(Communicator.exscan)
all_to_all = _public(Communicator.all_to_all)
gather = _public(Communicator.gather)


def adasum_layers(x: Any, layers: Sequence[int], group: Group | None = None, async_op: bool = False) -> Any:
    """Run `all_reduce(x, "adasum")` on several arrays stored in one; each is combined separately. Returns x.

    Args:
        x: array or Tensor, 1-D, floating point, with the same shape and dtype on every rank; written.
        layers: number of elements of each array; together x.size.
        group, async_op: as in `all_reduce`.

    Collective: yes. Cost: 2 (P-1)/P * x.nbytes [bytes] per rank.

    Raises:
        InputError, ShapeError, DTypeError: bad arguments; nothing was sent.
        CollectiveMismatchError: ranks made different calls; no data was changed.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    return in_place("adasum", x, lambda a: current().adasum(a, layers, group, async_op))


def scatter(arrays: Sequence[Any] | None = None, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    parts = None if arrays is None else [to_host(array_of("scatter", part)) for part in arrays]
    if out is not None:
        return filled("scatter", out, lambda b: current().scatter(parts, *args, out=b, **kwargs))
    for part in arrays or ():
        check_needs_no_gradient("scatter", part)
    result = current().scatter(parts, *args, **kwargs)
    return result.then(_on_home_device) if isinstance(result, Work) else _on_home_device(result)


def _on_home_device(array: np.ndarray) -> Any:
    """Move the array to where the run puts new arrays (`Recorder.home`): only the root knows where the parts were."""
    recorder = current_recorder()
    return array if recorder is None or recorder.home is None else recorder.home(array, False)


_named(scatter, "scatter", Communicator.scatter)
