"""Conversion of collectives' arguments and results: Tensors to their data, GPU arrays to host memory, and back.

In simulated time, a collective waits for arrays on another device of the rank, and that device for the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from simparallel.arrays.seam import named_range
from simparallel.autograd import Tensor
from simparallel.autograd.tape import grad_mode, mark_changed
from simparallel.backend import Array, assign, get_namespace, has_data, is_array, to_device_like, to_host
from simparallel.base.units import format_type_of
from simparallel.clock.recorder import current_recorder
from simparallel.comm import Group, Work, current
from simparallel.comm.validate import check_array
from simparallel.errors import AutogradError, DTypeError, InputError
from simparallel.machine.devices import FIRST, Device


def array_of(op: str, x: Any) -> Array:
    """Return the array of a Tensor, or an array itself. Raises InputError for anything else."""
    array = x.data if isinstance(x, Tensor) else x
    if not is_array(array):
        raise InputError(f"{op}: needs an array or a Tensor, got {_shown(x)}; use np.asarray(...).")
    return array


def _shown(x: Any) -> str:
    """Describe a value by its type, and a number by its value as well."""
    kind = type(x).__name__
    return f"the {kind} {x!r}" if isinstance(x, (bool, int, float, complex)) else kind


# A rank communicates from its first device.


def wait_for(device: Device) -> None:
    """Make the first device wait, in simulated time, until another device has computed the data to send."""
    recorder = current_recorder()
    if recorder is not None and device is not recorder.device:
        recorder.join(recorder.of(device).moment())


def go_on(device: Device) -> None:
    """Make another device wait, in simulated time, until the first device has the received data."""
    recorder = current_recorder()
    if recorder is not None and device is not recorder.device:
        recorder.of(device).join(recorder.moment())


def device_of(x: Any) -> Device:
    """Return the device of a Tensor; arrays are on the rank's first device."""
    return x._device or FIRST if isinstance(x, Tensor) else FIRST


def stays_on_gpu(op: str, arguments: Mapping[str, Any], *values: Any) -> bool:
    """Return whether a collective with these arguments runs on GPUs: its arrays are there, the GPUs connected."""
    media = current().media
    if not all(value is None or type(_data_of(value)) in media for value in values):
        return False
    return any(medium.takes(op, arguments) for medium in media.values())


def _host_copy(array: Array) -> np.ndarray:
    """Return a host copy of a GPU array, in shared memory if possible; return an array on the host as it is."""
    medium = current().media.get(type(array))
    return to_host(array) if medium is None else medium.staging.copy_of(array)


def _data_of(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def in_place(op: str, x: Any, communicate: Callable[[Array], Any], *, on_gpu: bool = False) -> Any:
    """Communicate x in place, and return it. `on_gpu`: `communicate` takes arrays on a GPU."""
    if type(x) is np.ndarray:  # no conversion is needed
        return communicate(x)
    array = array_of(op, x)
    if isinstance(x, Tensor):
        # A backward that kept the old values becomes an error, as for every write in place.
        mark_changed((x,))
    if isinstance(array, np.ndarray) or on_gpu:
        wait_for(device_of(x))
        result = communicate(array)

        def give(written: Any) -> Any:
            go_on(device_of(x))
            if isinstance(x, Tensor) and not has_data(written):
                x._data = written
            return x

        return result.then(give) if isinstance(result, Work) else give(result)
    # GPU memory is communicated through a copy on the host.
    with named_range(op):
        host = _host_copy(array)
        result = communicate(host)

    def copy_back() -> Any:
        array[...] = to_device_like(host, array)
        return x

    if isinstance(result, Work):
        # The copy back is part of the first `wait()`, so it happens at the same place of the program on every rank.
        return result.then(lambda _: copy_back())
    return copy_back()


def check_needs_no_gradient(op: str, x: Any) -> None:
    """Refuse a Tensor whose gradient would be lost because the result is an array."""
    if isinstance(x, Tensor) and x.requires_grad and grad_mode.enabled:
        function = {"gather": "gather_to", "scatter": "scatter_from"}.get(op, op)
        raise AutogradError(
            f"{op}: returns arrays, which carry no gradient, but this Tensor of shape {x.shape} needs one. "
            f"Use sp.functions.{function} for a result with a gradient, or {op}(x.detach()) for the values."
        )


def into(op: str, x: Any, out: Any, communicate: Callable[[Array, Any], Any], *, on_gpu: bool = False) -> Any:
    """Communicate x, which is only read, with the result in `out`. `on_gpu`: as `in_place`."""
    array = array_of(op, x)
    wait_for(device_of(x))
    if on_gpu:

        def give(_: Any) -> Any:
            go_on(device_of(out))
            return out

        result = communicate(array, array_of(f"{op}: out", out))
        return result.then(give) if isinstance(result, Work) else give(None)
    return filled(op, out, lambda host: communicate(to_host(array), host))


def filled(op: str, out: Any, communicate: Callable[[Any], Any]) -> Any:
    """Let `communicate` fill the host memory of `out`, an array or Tensor or a list of them; return `out`."""
    is_list = isinstance(out, (list, tuple))
    outs = out if is_list else [out]
    arrays = [array_of(f"{op}: out", one) for one in outs]
    hosts = [array if isinstance(array, np.ndarray) else np.array(to_host(array)) for array in arrays]
    result = communicate(hosts if is_list else hosts[0])

    def give(_: Any) -> Any:
        for one, array, host in zip(outs, arrays, hosts, strict=True):
            if host is not array:
                array[...] = to_device_like(host, array)
            go_on(device_of(one))
        return out

    return result.then(give) if isinstance(result, Work) else give(None)


def reduce_list(
    xs: Sequence[Any],
    out: Any,
    op: str = "sum",
    group: Group | None = None,
    async_op: bool = False,
    algorithm: str | None = None,
) -> Any:
    """Reduce several arrays as one vector, on all ranks."""
    if out is not None:
        raise InputError("all_reduce: a list is reduced in place; call all_reduce for each array to pass out=.")
    arrays = [x.data if isinstance(x, Tensor) else x for x in xs]
    if not arrays:
        raise InputError("all_reduce: the list of arrays is empty.")
    for i, array in enumerate(arrays):
        if not is_array(array):
            kind = format_type_of(array)
            raise InputError(f"all_reduce: entry {i} of the list is {kind}; use one np.asarray(list).")
        if isinstance(array, np.ndarray):
            check_array("all_reduce", array, name=f"array {i} of the list")
    for i, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise DTypeError(
                f"all_reduce: array 0 of the list has dtype {arrays[0].dtype}, array {i} has {array.dtype}; make one "
                "call for each dtype."
            )
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise InputError(f"all_reduce: array {i} of the list is read-only, but all_reduce would write to it.")
    mark_changed(x for x in xs if isinstance(x, Tensor))
    devices = dict.fromkeys(map(device_of, xs))
    for device in devices:
        wait_for(device)
    # One vector takes one collective: the cost of a call is paid once for all arrays.
    arguments = {"op": op, "group": group, "algorithm": algorithm}
    xp: Any = get_namespace(arrays[0]) if stays_on_gpu("all_reduce", arguments, *arrays) else np
    flat = xp.concatenate([(array if xp is not np else to_host(array)).reshape(-1) for array in arrays])
    shapes, ends = [array.shape for array in arrays], np.cumsum([array.size for array in arrays])
    result = current().all_reduce_list(flat, shapes, op, group, async_op, algorithm)

    def copy_back(_: Any = None) -> Any:
        for x, array, part in zip(xs, arrays, xp.split(flat, ends[:-1].tolist()), strict=True):
            array = assign(array, ..., to_device_like(part.reshape(array.shape), array))
            if isinstance(x, Tensor):
                x._data = array
        for device in devices:
            go_on(device)
        return xs

    return result.then(copy_back) if isinstance(result, Work) else copy_back()


def new(op: str, x: Any, communicate: Callable[[Array], Any], *, on_gpu: bool = False) -> Any:
    """Communicate x, which is only read; return a new result, on the GPU if x is there. `on_gpu`: as `in_place`.

    Raises:
        AutogradError: x needs a gradient, which would be lost silently.
    """
    if type(x) is np.ndarray:
        return communicate(x)
    check_needs_no_gradient(op, x)
    array = array_of(op, x)
    wait_for(device_of(x))
    if on_gpu or isinstance(array, np.ndarray):
        result = communicate(array)
    else:
        with named_range(op):
            result = communicate(_host_copy(array))

    def back(value: Any) -> Any:
        go_on(device_of(x))
        if on_gpu:
            return value
        if isinstance(value, list):
            return [to_device_like(part, array) for part in value]
        return None if value is None else to_device_like(value, array)

    return result.then(back) if isinstance(result, Work) else back(result)
