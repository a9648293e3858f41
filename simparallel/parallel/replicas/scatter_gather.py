"""Cut a batch into parts, one for each device, and join the results."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from simparallel.autograd import Tensor, functions
from simparallel.autograd.ops.transfer import move
from simparallel.autograd.tree_map import change_each, leaves
from simparallel.backend import is_array
from simparallel.errors import InputError, ShapeError
from simparallel.machine.devices import Device


def scatter(inputs: Any, target_devices: Sequence[Any], dim: int = 0) -> list[Any]:
    """Cut every Tensor in `inputs` into parts along `dim`, and copy part k to device k.

    The parts have the sizes of `torch.chunk`, equal except for the last: 5 samples on 4 devices give 2, 2 and 1, and
    the last device gets nothing; 0 samples give a single empty part.

    Args:
        inputs: Tensors, also in tuples, lists and dicts, at any depth; an array counts as a Tensor. Any other value
            is passed to every device unchanged.
        target_devices: "sim:k", or k.
        dim: the dim of the samples.

    Returns:
        One entry per part, at most one per device, with the structure of `inputs`.

    Raises:
        ShapeError: a Tensor without that dim, or Tensors that give different numbers of parts.

    Cost: the bytes of all parts that are not on their device already. Differentiable: backward copies the gradients
    back.
    """
    devices = [Device(device) for device in target_devices]
    # Number of parts -> one of the tensors that give it.
    counts = {_num_parts(x, len(devices), dim): x for x in _tensors(inputs)}
    if len(counts) > 1:
        counted = ", ".join(f"shape {x.shape} makes {count}" for count, x in counts.items())
        raise ShapeError(
            f"scatter: along dim {dim} over {len(devices)} devices the tensors give different numbers of parts: "
            f"{counted}. Give all the same number of samples; data that every device needs whole is not an input (a "
            "buffer)."
        )
    # Without tensors, every device gets the same arguments.
    count = next(iter(counts), len(devices))
    parts = [iter(_cut(x, devices[:count], len(devices), dim)) for x in _tensors(inputs)]

    def one() -> Any:
        own = iter(parts)
        return change_each(inputs, lambda x: next(next(own)) if _is_data(x) else x)

    return [one() for _ in range(count)]


def _num_parts(x: Any, num_devices: int, dim: int) -> int:
    if not -len(x.shape) <= dim < len(x.shape):
        raise ShapeError(
            f"scatter: a tensor of shape {x.shape} has no dim {dim} to cut; pass a number as a Python number."
        )
    size = x.shape[dim]
    # At least one: a batch without samples gives one empty part.
    return max(1, -(-size // _part_size(size, num_devices)))


def _part_size(size: int, num_devices: int) -> int:
    return max(1, -(-size // num_devices))


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) or is_array(value)


def _tensors(value: Any) -> list[Any]:
    """Return all Tensors and arrays in `value`, in order."""
    return [x for x in leaves(value) if _is_data(x)]


def _cut(x: Any, devices: list[Device], num_devices: int, dim: int) -> list[Tensor]:
    """Return the parts of a Tensor or an array, each on its device."""
    x = x if isinstance(x, Tensor) else Tensor(x)
    parts = functions.split(x, _part_size(x.shape[dim], num_devices), dim) if len(devices) > 1 else [x]
    return [move(part, device, "Scatter") for part, device in zip(parts, devices, strict=True)]


def gather(outputs: Sequence[Any], target_device: Any, dim: int = 0) -> Any:
    """Copy the outputs of the devices to one device, and join the Tensors along `dim`.

    Args:
        outputs: one entry per device, all of the same structure: Tensors, tuples, lists and dicts of them, None.
        target_device: "sim:k", or k.
        dim: dim along which to join. Scalars, such as losses, become a vector, with a warning.

    Returns:
        One value, with the structure of the entries.

    Raises:
        InputError: no entries, entries that differ in kind, length, or the order of keys, or other types in them.

    Cost: the bytes that are not on the target device already. Differentiable: backward cuts the gradient and copies
    the parts back.
    """
    if not outputs:
        raise InputError("gather: there are no outputs to join.")
    kinds = [repr(change_each(output, _kind)).replace("'Tensor'", "Tensor") for output in outputs]
    if len(set(kinds)) > 1:
        raise InputError(f"gather: the outputs of the devices differ in structure: {', '.join(kinds)}.")
    device = Device(target_device)
    columns = zip(*map(leaves, outputs), strict=True)
    joined = iter([None if parts[0] is None else _joined(parts, device, dim) for parts in columns])
    return change_each(outputs[0], lambda output: next(joined))


def _kind(output: Any) -> Any:
    """Return "Tensor" for a Tensor or an array, and None for None. Raises InputError for anything else."""
    if output is None or _is_data(output):
        return None if output is None else "Tensor"
    raise InputError(
        f"gather: the module returned a {type(output).__name__}; only Tensors, None, and tuples, lists "
        "and dicts of them can be joined."
    )


def _joined(outputs: Sequence[Any], target: Device, dim: int) -> Tensor:
    parts = [move(x if isinstance(x, Tensor) else Tensor(x), target, "Gather") for x in outputs]
    if all(part.ndim == 0 for part in parts):
        warnings.warn(
            "gather: every device returned a single number; they become a vector. Take its mean for a loss.",
            stacklevel=2,
        )
        parts, dim = [part.unsqueeze(0) for part in parts], 0
    return functions.concat(parts, dim) if len(parts) > 1 else parts[0]
