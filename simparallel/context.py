"""How a rank trains: MindSpore's context, as far as it has a meaning here.

The settings belong to the rank, which may be a thread, and every run begins with the default ones.
They may be set before `init()`. Who reads them: `train.Model`, `parallel.DistributedGradReducer`, and the random
numbers: in data-parallel mode a rank draws its part of the masks of the whole batch.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from simparallel.backend import random_state
from simparallel.comm import current
from simparallel.errors import InputError


class ParallelMode:
    """Names of the parallel modes.

    STAND_ALONE: each rank for itself. DATA_PARALLEL: the whole model on each rank, a part of the
    data; gradients are reduced. SEMI_AUTO_PARALLEL, AUTO_PARALLEL: operators are cut.
    """

    STAND_ALONE: Final = "stand_alone"
    DATA_PARALLEL: Final = "data_parallel"
    SEMI_AUTO_PARALLEL: Final = "semi_auto_parallel"
    AUTO_PARALLEL: Final = "auto_parallel"


GRAPH_MODE: Final = 0
PYNATIVE_MODE: Final = 1

_MODES = (
    ParallelMode.STAND_ALONE, ParallelMode.DATA_PARALLEL, ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL,
)  # fmt: skip
_SHORT = {"semi_auto": ParallelMode.SEMI_AUTO_PARALLEL, "auto": ParallelMode.AUTO_PARALLEL}
_BY_WRAPPER = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)
_DEFAULTS: dict[str, Any] = {
    "parallel_mode": ParallelMode.STAND_ALONE,
    "gradients_mean": False,
    "parameter_broadcast": False,
    "device_num": None,
    "global_rank": None,
}


class _Settings(threading.local):
    """The settings of the rank that this thread plays."""

    def __init__(self) -> None:  # once in each thread
        self.values = dict(_DEFAULTS)


_settings = _Settings()


def set_auto_parallel_context(**settings: Any) -> None:
    """Choose how the ranks share the work; call it before a `Model` or a gradient reducer is made.

    Args:
        parallel_mode: one of `ParallelMode`, "stand_alone" at first. In data-parallel mode `nn.Dropout` takes the
            ranks' batches as equal parts of one.
        gradients_mean: whether gradients are divided by the number of ranks after they were summed.
            False at first, as in MindSpore: with losses that are means over a rank's part of the
            batch, the sum acts as a learning rate that many times as large.
        parameter_broadcast: whether `Model` copies the parameters of rank 0 to all ranks before it trains.
            False at first. Equal seeds give equal parameters without it.
        device_num, global_rank: the number of ranks and the own one; what is set must agree with the run.

    Raises:
        InputError: an unknown name or a bad value; nothing is changed. Also the modes that cut operators, for
            which `parallel.AutoParallel` is there.
    """
    for name, value in settings.items():
        settings[name] = _checked(name, value)
    _settings.values.update(settings)
    if settings.get("parallel_mode") == ParallelMode.DATA_PARALLEL:
        random_state.usual_part = _part_of_rank
    elif "parallel_mode" in settings:
        random_state.usual_part = None


def get_auto_parallel_context(name: str) -> Any:
    """A setting of `set_auto_parallel_context`; `device_num` and `global_rank` are the run's where they were not set.

    Args:
        name: "parallel_mode", "gradients_mean", "parameter_broadcast", "device_num" or "global_rank".

    Raises:
        InputError: an unknown name.
    """
    if name not in _DEFAULTS:
        raise _unknown(name)
    value = _settings.values[name]
    if value is None:
        return current().world_size if name == "device_num" else current().rank
    return value


def reset_auto_parallel_context() -> None:
    """Go back to the settings that a run begins with."""
    _settings.values = dict(_DEFAULTS)
    random_state.usual_part = None


def set_context(
    mode: int | None = None, device_target: str | None = None, device_id: int | None = None
) -> None:
    """Take what a MindSpore script says first. It changes nothing: here it is not a choice.

    Operations run one by one, with GRAPH_MODE as with PYNATIVE_MODE, and give the same numbers. What
    a device is, is said where a run starts: `launch(..., device="ascend910")`; its number is the rank.

    Raises:
        InputError: a mode, target or device that does not exist.
    """
    if mode not in (None, GRAPH_MODE, PYNATIVE_MODE):
        raise InputError(f"set_context: mode={mode!r} is neither GRAPH_MODE (0) nor PYNATIVE_MODE (1).")
    if device_target not in (None, "CPU", "GPU", "Ascend"):
        raise InputError(f"set_context: device_target={device_target!r} is not one of CPU, GPU, Ascend.")
    if device_id is not None and not _is_count(device_id, 0):
        raise InputError(f"set_context: device_id={device_id!r} must be an integer of 0 or more.")


def check_world(who: str) -> None:
    """Refuse a `device_num` or `global_rank` that is not that of the run, before anything waits for it.

    Raises:
        InputError: they disagree.
    """
    for name, real in (("device_num", current().world_size), ("global_rank", current().rank)):
        value = _settings.values[name]
        if value not in (None, real):
            raise InputError(
                f"{who}: {name}={value} was set, but it is {real} in this run; leave it out, or start "
                f"{'as many ranks' if name == 'device_num' else 'the rank'} that you mean."
            )


def _checked(name: str, value: Any) -> Any:
    who = "set_auto_parallel_context"
    if name not in _DEFAULTS:
        raise _unknown(name)
    if name == "parallel_mode":
        mode = _SHORT.get(value, value) if isinstance(value, str) else value
        if mode not in _MODES:
            raise InputError(f"{who}: parallel_mode={value!r} is not one of {', '.join(_MODES)}.")
        if mode in _BY_WRAPPER:
            raise InputError(
                f"{who}: parallel_mode={value!r} comes with operator-level parallelism: leave the mode as it is, and "
                "wrap the network or the whole step, parallel.AutoParallel(step, parallel_mode='semi_auto')."
            )
        return mode
    if name in ("gradients_mean", "parameter_broadcast"):
        if not isinstance(value, bool):
            raise InputError(f"{who}: {name}={value!r} must be True or False.")
        return value
    low = 1 if name == "device_num" else 0
    if value is not None and not _is_count(value, low):
        raise InputError(f"{who}: {name}={value!r} must be an integer of {low} or more.")
    return value


def _part_of_rank() -> tuple[int, int]:
    return current().rank, current().world_size


def _is_count(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _unknown(name: str) -> InputError:
    hint = " (mirror_mean is called gradients_mean now)" if name == "mirror_mean" else ""
    return InputError(f"auto-parallel context: no setting {name!r}{hint}; there are {', '.join(_DEFAULTS)}.")
