"""The collectives under their public names: for Tensors, NumPy and CuPy arrays.

A Tensor stands for its data. A CuPy array travels through host memory, on any transport that
shares host memory. The rules are those of `comm.AbstractCommunicator`: every rank of the group
makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.tape import mark_changed
from simparallel.backend import Array, is_array, to_device_like, to_host
from simparallel.comm import Group, Work, current
from simparallel.comm.arguments import check_array
from simparallel.devices import FIRST, Device
from simparallel.errors import DTypeError, InputError
from simparallel.events import current_recorder


def all_reduce(
    x: Any, op: str = "sum", group: Group | None = None, async_op: bool = False, algorithm: str | None = None,
    *, out: Any = None,
) -> Any:  # fmt: skip
    """Replace x on every rank by the reduction of the ranks' x, in the order of the group
    (by "direct"; each algorithm on messages states its own).

    Args:
        x: array or Tensor, any shape and numeric dtype, the same on every rank; written. Or a list of
            them, of one dtype, which travel as one vector; their shapes are the same on every rank.
        op: "sum", "mean", "prod", "max", "min", "and" or "or". float16 is summed in float32
            (on messages: rounded at each step). Or "adasum", see `sp.adasum`, of floating-point x: each array
            of a list is summed by itself. By "ring" that is a left fold, another result than of the others.
        group: from `new_group`; by default all ranks.
        async_op: return a `Work` at once; `work.wait()` returns x.
        algorithm: "direct", or on messages: "naive", "ring", "tree", "halving_doubling", which all
            collectives with this keyword take where they have it. None: that of the `Cluster`.
        out: array or Tensor like x that gets the result instead; x is left as it is. Of the other collectives
            with this keyword too, it may be x or overlap it: the result is as if x had been copied before.

    Returns:
        x, or out; bitwise equal on all ranks.

    Collective: yes - every rank of the group, in the same order.
    Cost: 2 (P-1)/P * x.nbytes [bytes] per rank; of others than "direct" and "ring", see `comm.algorithms`.

    Raises:
        InputError, DTypeError: bad arguments; nothing was sent.
        CollectiveMismatchError: ranks made different calls; no data was changed.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    if out is not None:
        if isinstance(x, (list, tuple)):
            raise InputError("all_reduce: a list is reduced in place; call it for each array to give an out.")
        return _into(x, out, lambda a, b: current().all_reduce(a, op, group, async_op, algorithm, out=b))
    if type(x) is np.ndarray:  # the shortest way for the most frequent call
        return current().all_reduce(x, op, group, async_op, algorithm)
    if isinstance(x, (list, tuple)):
        return _together(x, op, group, async_op, algorithm)
    return _in_place(x, lambda a: current().all_reduce(a, op, group, async_op, algorithm))


def adasum_layers(x: Any, layers: Sequence[int], group: Group | None = None, async_op: bool = False) -> Any:
    """`all_reduce(x, "adasum")` of a flat x that holds several arrays; `layers` are their sizes.

    Each of them is summed by itself. Collective: yes.
    """
    return _in_place(x, lambda a: current().adasum(a, layers, group, async_op))


def broadcast(
    x: Any, src: int = 0, group: Group | None = None, async_op: bool = False, algorithm: str | None = None
) -> Any:
    """Replace x on every rank by x of rank `src`; returns x. Collective: yes."""
    return _in_place(x, lambda a: current().broadcast(a, src, group, async_op, algorithm))


def reduce(
    x: Any, dst: int = 0, op: str = "sum", group: Group | None = None, async_op: bool = False,
    algorithm: str | None = None, *, out: Any = None,
) -> Any:  # fmt: skip
    """Replace x on rank `dst` by the reduction of the ranks' x; returns x. Collective: yes.

    With `out`, which only `dst` passes, the result goes there, and x is left as it is.
    """
    if out is not None:
        return _into(x, out, lambda a, b: current().reduce(a, dst, op, group, async_op, algorithm, out=b))
    return _in_place(x, lambda a: current().reduce(a, dst, op, group, async_op, algorithm))


def all_gather(
    x: Any, dim: int = 0, group: Group | None = None, async_op: bool = False, algorithm: str | None = None,
    *, out: Any = None,
) -> Any:  # fmt: skip
    """A new array, or `out`: the ranks' x concatenated along `dim`. Collective: yes.

    x may be its own part of out; then it is not copied anywhere.
    """
    if out is not None:
        return _into(x, out, lambda a, b: current().all_gather(a, dim, group, async_op, algorithm, out=b))
    return _new(x, lambda a: current().all_gather(a, dim, group, async_op, algorithm))


def reduce_scatter(
    x: Any, dim: int = 0, op: str = "sum", group: Group | None = None, async_op: bool = False,
    algorithm: str | None = None, *, out: Any = None,
) -> Any:  # fmt: skip
    """A new array, or `out`: this rank's equal part, along `dim`, of the reduction. Collective: yes.

    Out may be that part of x.
    """
    if out is not None:
        return _into(
            x, out, lambda a, b: current().reduce_scatter(a, dim, op, group, async_op, algorithm, out=b)
        )
    return _new(x, lambda a: current().reduce_scatter(a, dim, op, group, async_op, algorithm))


def all_to_all(
    x: Any, split_dim: int = 0, concat_dim: int = 0, group: Group | None = None, async_op: bool = False,
    algorithm: str | None = None, *, out: Any = None,
) -> Any:  # fmt: skip
    """A new array, or `out`: part `rank` of every rank's x, joined along `concat_dim`. Collective: yes."""
    if out is not None:
        return _into(
            x, out,
            lambda a, b: current().all_to_all(a, split_dim, concat_dim, group, async_op, algorithm, out=b),
        )  # fmt: skip
    return _new(x, lambda a: current().all_to_all(a, split_dim, concat_dim, group, async_op, algorithm))


def gather(
    x: Any, dst: int = 0, group: Group | None = None, async_op: bool = False, algorithm: str | None = None,
    *, out: Any = None,
) -> Any:  # fmt: skip
    """On rank `dst` a list of the ranks' x, elsewhere None. Collective: yes.

    `out`, which only `dst` passes: a list of arrays or Tensors that get them, or an array whose rows they become.
    """
    if out is not None:
        return _into(x, out, lambda a, b: current().gather(a, dst, group, async_op, algorithm, out=b))
    return _new(x, lambda a: current().gather(a, dst, group, async_op, algorithm))


def scatter(
    arrays: Sequence[Any] | None = None, src: int = 0, group: Group | None = None, async_op: bool = False,
    algorithm: str | None = None, *, out: Any = None,
) -> Any:  # fmt: skip
    """A new array, or `out`: entry `rank` of the list on rank `src`; the others pass None. Collective: yes.

    Raises:
        CollectiveMismatchError: also where out has another shape or dtype than what comes.
    """
    parts = None if arrays is None else [to_host(_array("scatter", part)) for part in arrays]
    if out is not None:
        return _filled(out, lambda b: current().scatter(parts, src, group, async_op, algorithm, out=b))
    return current().scatter(parts, src, group, async_op, algorithm)


def send(x: Any, dst: int, tag: int = 0) -> None:
    """Send x to rank `dst`; x may be changed when it returns. Collective: no."""
    wait_for(_device(x))
    current().send(to_host(_array("send", x)), dst, tag)


def recv(x: Any, src: int, tag: int = 0) -> Any:
    """Fill x with the next message of this tag from rank `src`; returns x. Collective: no."""
    return _in_place(x, lambda a: current().recv(a, src, tag))


def isend(x: Any, dst: int, tag: int = 0) -> Work:
    """`send` as a `Work`; x must not change before `wait()`. Collective: no."""
    wait_for(_device(x))
    return current().isend(to_host(_array("isend", x)), dst, tag)


def irecv(x: Any, src: int, tag: int = 0) -> Any:
    """`recv` as a `Work`; x is filled when `wait()` returns. Collective: no."""
    return _in_place(x, lambda a: current().irecv(a, src, tag))


def barrier(group: Group | None = None) -> None:
    """Return when every rank of the group is here. Collective: yes."""
    current().barrier(group)


def new_group(ranks: Sequence[int]) -> Group:
    """A group of these ranks in this order. Collective: over all ranks, members or not."""
    return current().new_group(ranks)


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """Every rank's value, in the order of the group. Collective: yes.

    Any object that can be pickled; over MPI, which goes without pickle, None, numbers, text, bytes, arrays, and
    lists, tuples, sets and dicts of them.
    """
    return current().all_gather_object(value, group)


def broadcast_object(value: Any = None, src: int = 0, group: Group | None = None) -> Any:
    """The value of rank `src` (as for `all_gather_object`), on every rank. Collective: yes."""
    return current().broadcast_object(value, src, group)


def gather_object(value: Any, dst: int = 0, group: Group | None = None) -> list[Any] | None:
    """On rank `dst` every rank's value (as for `all_gather_object`), elsewhere None. Collective: yes."""
    return current().gather_object(value, dst, group)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32, shared: bool = False) -> Array:
    """A new array, not initialised. `shared=True`: in the arena, so that collectives do not copy it.

    Collective: no.

    Raises:
        SharedMemoryError: no room in the arena.
    """
    return current().empty(shape, dtype) if shared else np.empty(shape, dtype)


def log(**values: Any) -> None:
    """Note numbers of the current step: `sp.log(loss=loss, accuracy=0.9)`. Collective: no.

    They are in `.metrics` of what `launch` returns: rank -> [(step, name, value), ...]. `simparallel run` writes
    "metrics": {name: [[step, mean over the ranks], ...]} to `metrics.json`, and draws those named `loss` in
    `loss.png`. Outside of a run nothing is noted.

    Args:
        values: a number each: a float, or a Tensor or array with one element.
    """
    recorder = current_recorder()
    if recorder is not None:
        recorder.log(**{name: float(value) for name, value in values.items()})


# --- Tensors and GPU arrays -------------------------------------------------------------------------


def _array(op: str, x: Any) -> Array:
    array = x.data if isinstance(x, Tensor) else x
    if not is_array(array):
        raise InputError(f"{op}: needs an array or a Tensor, got {type(x).__name__}; use np.asarray(...).")
    return array


# A rank communicates from its first device.


def wait_for(device: Device) -> None:
    """In simulated time, let the first device wait until another one has made what it is to send."""
    recorder = current_recorder()
    if recorder is not None and device is not recorder.device:
        recorder.join(recorder.of(device).now_ps)


def go_on(device: Device) -> None:
    """In simulated time, let another device wait until the first one has what was communicated."""
    recorder = current_recorder()
    if recorder is not None and device is not recorder.device:
        recorder.of(device).join(recorder.now_ps)


def _device(x: Any) -> Device:
    return x._device or FIRST if isinstance(x, Tensor) else FIRST


def _in_place(x: Any, communicate: Callable[[np.ndarray], Any]) -> Any:
    if type(x) is np.ndarray:  # which is already where its communicator wants it
        return communicate(x)
    array = _array("this call", x)
    if isinstance(x, Tensor):
        mark_changed((x,))
    if isinstance(array, np.ndarray):
        wait_for(_device(x))
        result = communicate(array)

        def give(_: Any) -> Any:
            go_on(_device(x))
            return x

        return result.then(give) if isinstance(result, Work) else give(None)
    host = np.array(to_host(array))
    result = communicate(host)

    def copy_back() -> Any:
        array[...] = to_device_like(host, array)
        return x

    if isinstance(result, Work):
        return result.then(lambda _: copy_back())
    return copy_back()


def _into(x: Any, out: Any, communicate: Callable[[np.ndarray, Any], Any]) -> Any:
    """Communicate x, which is only read, and have the result in `out`."""
    array = _array("this call", x)
    wait_for(_device(x))
    return _filled(out, lambda host: communicate(to_host(array), host))


def _filled(out: Any, communicate: Callable[[Any], Any]) -> Any:
    """`out`, an array or Tensor or a list of them, after `communicate` has filled its host memory."""
    is_list = isinstance(out, (list, tuple))
    outs = out if is_list else [out]
    arrays = [_array("out of this call", one) for one in outs]
    hosts = [array if isinstance(array, np.ndarray) else np.array(to_host(array)) for array in arrays]
    result = communicate(hosts if is_list else hosts[0])

    def give(_: Any) -> Any:
        for one, array, host in zip(outs, arrays, hosts, strict=True):
            if host is not array:
                array[...] = to_device_like(host, array)
            go_on(_device(one))
        return out

    return result.then(give) if isinstance(result, Work) else give(None)


def _together(xs: Sequence[Any], op: str, group: Group | None, async_op: bool, algorithm: str | None) -> Any:
    """All-reduce several arrays as one vector."""
    arrays = [x.data if isinstance(x, Tensor) else x for x in xs]
    if not arrays:
        raise InputError("all_reduce: the list of arrays is empty.")
    for i, array in enumerate(arrays):
        if not is_array(array):
            kind = type(array).__name__
            raise InputError(f"all_reduce: entry {i} of the list is a {kind}; use one np.asarray(list).")
        if isinstance(array, np.ndarray):
            check_array("all_reduce", array, name=f"array {i} of the list")
    for i, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise DTypeError(
                f"all_reduce: array 0 of the list has dtype {arrays[0].dtype}, array {i} has {array.dtype}; make one "
                "call for each dtype."
            )
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise InputError(f"all_reduce: array {i} of the list is read-only, but would be written.")
    mark_changed(x for x in xs if isinstance(x, Tensor))
    devices = dict.fromkeys(map(_device, xs))
    for device in devices:
        wait_for(device)
    flat = np.concatenate([to_host(array).reshape(-1) for array in arrays])
    shapes, ends = [array.shape for array in arrays], np.cumsum([array.size for array in arrays])
    result = current().all_reduce_list(flat, shapes, op, group, async_op, algorithm)

    def copy_back(_: Any = None) -> Any:
        for array, part in zip(arrays, np.split(flat, ends[:-1]), strict=True):
            array[...] = to_device_like(part.reshape(array.shape), array)
        for device in devices:
            go_on(device)
        return xs

    return result.then(copy_back) if isinstance(result, Work) else copy_back()


def _new(x: Any, communicate: Callable[[np.ndarray], Any]) -> Any:
    if type(x) is np.ndarray:
        return communicate(x)
    array = _array("this call", x)
    wait_for(_device(x))
    result = communicate(to_host(array))

    def back(value: Any) -> Any:
        go_on(_device(x))
        if isinstance(value, list):
            return [to_device_like(part, array) for part in value]
        return None if value is None else to_device_like(value, array)

    return result.then(back) if isinstance(result, Work) else back(result)
