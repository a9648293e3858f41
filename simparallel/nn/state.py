"""Load a state dict into a module: everything is checked first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from simparallel.autograd import Tensor
from simparallel.autograd.tape import mark_changed
from simparallel.backend import assign, is_array, to_device_like, to_host
from simparallel.errors import InputError, StateDictError


class LoadResult(NamedTuple):
    """The names that `load_state_dict(strict=False)` skipped.

    Attributes:
        missing: names of the module that the state lacks.
        unexpected: names of the state that the module lacks.
    """

    missing: list[str]
    unexpected: list[str]


def load(who: str, targets: Mapping[str, Tensor], state: Mapping[str, Any], strict: bool) -> LoadResult:
    """Copy the arrays of `state` into the tensors of the same names.

    Args:
        who: name of the module, for the message.
        targets: name -> tensor to be written in place.
        state: name -> array or Tensor.
        strict: names must match exactly. Shapes and dtypes must match in any case.

    Returns:
        The missing and unexpected names; both lists are empty when `strict`.

    Raises:
        StateDictError: lists every missing and unexpected name, wrong shape and wrong dtype.
        InputError: `state` is not a mapping.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"{who}.load_state_dict: expected a mapping from names to arrays, such as state_dict() returns, got "
            f"{type(state).__name__}. Nothing was loaded."
        )
    missing = [name for name in targets if name not in state]
    unexpected = [name for name in state if name not in targets]
    arrays = {
        name: value.data if isinstance(value, Tensor) else value for name, value in state.items() if name in targets
    }
    problems = [_misfit(name, array, targets[name]) for name, array in arrays.items()]
    if strict:
        problems += [f"missing: {name}, shape {targets[name].shape}" for name in missing]
        problems += [f"unexpected: {name}" for name in unexpected]
    problems = [problem for problem in problems if problem]
    if problems:
        raise StateDictError(
            f"{who}.load_state_dict: {len(problems)} entries do not fit; nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nBuild the module as it was when saved; strict=False ignores missing and unexpected names.",
            missing=missing,
            unexpected=unexpected,
        )
    for name, array in arrays.items():
        data = targets[name]._data
        # In place: a bucket may share this memory.
        targets[name]._data = assign(data, ..., to_device_like(to_host(array), data))
    mark_changed(targets[name] for name in arrays)
    return LoadResult(missing, unexpected)


def _misfit(name: str, value: Any, target: Tensor) -> str:
    """Return why `value` cannot be copied into `target`, or an empty string."""
    if not is_array(value):
        return f"{name}: expected an array, got {type(value).__name__}"
    # The data of a sharded tensor is this rank's slice.
    if value.shape != target.data.shape:
        return f"{name}: shape {value.shape}, expected {target.data.shape}"
    if value.dtype != target.dtype:
        return f"{name}: dtype {value.dtype}, expected {target.dtype}"
    return ""
