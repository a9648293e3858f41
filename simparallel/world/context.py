"""The training context: MindSpore's settings, as far as they have a meaning here.

The settings belong to the rank, which may be a thread, and every run begins with the defaults. They may be set before
`init()`. `train.Model`, `parallel.DistributedGradReducer` and the random numbers read them: in data-parallel mode a
rank draws its part of the masks of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simparallel.backend import random_state
from simparallel.base.callsite import user_line
from simparallel.base.checks import check_choice, check_flags, check_integer, check_number
from simparallel.base.names import did_you_mean
from simparallel.clock.notes import forget_notes, note_once
from simparallel.clock.recorder import describe_device
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.rank_local import RankLocal, per_rank
from simparallel.world.rank import init_if_described, set_memory


class ParallelMode:
    """Names of the parallel modes.

    STAND_ALONE: each rank trains alone. DATA_PARALLEL: each rank has the whole model and a part of the data, and
    gradients are reduced. SEMI_AUTO_PARALLEL, AUTO_PARALLEL: operators are sharded.
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
SHARDED_MODES: Final = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)
_DEFAULTS: dict[str, Any] = {
    "parallel_mode": ParallelMode.STAND_ALONE,
    "gradients_mean": False,
    "parameter_broadcast": None,
    "dataset_strategy": "data_parallel",
    "device_num": None,
    "global_rank": None,
    "search_mode": "dynamic_programming",
    "pipeline_stages": 1,
    "pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"},
}
# MindSpore's searches for ParallelMode.AUTO_PARALLEL -> the modes of `AutoParallel`.
SEARCHES: Final = {
    "dynamic_programming": "auto",
    "recursive_programming": "recursive_programming",
    "sharding_propagation": "sharding_propagation",
}
# MindSpore's schedulers -> the schedules of `pipeline_schedule` with one stage on a rank, and with several.
PIPELINE_SCHEDULERS: Final = {
    "1f1b": ("1f1b", "interleaved_1f1b"), "gpipe": ("gpipe", "looped_bfs"), "zero_bubble_v": ("zbv", "zbv"),
}  # fmt: skip
# Earlier names, and a misspelling in a tutorial.
_EARLIER = {
    "mirror_mean": "gradients_mean", "paramater_broadcast": "parameter_broadcast",
    "auto_parallel_search_mode": "search_mode",
}  # fmt: skip


class _Settings(RankLocal):
    """The settings of this rank."""

    values: dict[str, Any] = per_rank(lambda: dict(_DEFAULTS))
    # The user's line that changed `values` last; "" for the beginning of a run, None before.
    line: str | None = None
    context: dict[str, Any] = per_rank(dict)
    algorithm: dict[str, Any] = per_rank(dict)
    cost_model: dict[str, float] = per_rank(dict)


_settings = _Settings()


class SettingsRead:
    """Settings of the auto-parallel context that an object reads when it is made."""

    def __init__(self, *names: str) -> None:
        self._names, self._values, self._line = names, _settings.values, user_line()

    def check(self, who: str) -> None:
        """Refuse the use of an object that was made with other settings than those of now.

        Raises:
            InputError: a setting has changed since; both lines are named.
        """
        # Each change makes a new dict. A thread that the user started has no settings of its own.
        if _settings.values is self._values or _settings.line is None:
            return
        for name in self._names:
            before, now = self._values[name], _settings.values[name]
            if now != before:
                since = f"since {_settings.line} it is {now!r}" if _settings.line else f"in this run it is {now!r}"
                raise InputError(
                    f"{who}: it was made at {self._line}, with {name}={before!r} in the auto-parallel context; {since}."
                    " Nothing was changed. Call set_auto_parallel_context first, and then make it."
                )


def set_auto_parallel_context(**settings: Any) -> None:
    """Set how the ranks share the work; call it before a `Model` or a gradient reducer is made.

    Args:
        parallel_mode: one of `ParallelMode`, by default "stand_alone". In data-parallel mode `nn.Dropout` takes the
            ranks' batches as equal parts of one batch. In the semi-automatic and automatic modes `Model` runs its
            steps under `AutoParallel`; in a training loop of your own, wrap the step in it, or write it with
            MindSpore's names (`simparallel.compat.mindspore`), whose cells, `jit` and `value_and_grad` do so.
        gradients_mean: whether gradients are divided by the number of ranks after the sum. False by default, as in
            MindSpore: if losses are means over a rank's part of the batch, the sum acts as a learning rate that many
            times as large. MindSpore 0.2 calls it mirror_mean.
        parameter_broadcast: whether `Model` copies the parameters of rank 0 to all ranks before training; by default
            only in data-parallel mode.
        dataset_strategy, full_batch: distribution of batches in the modes that shard operators: "data_parallel" (each
            rank has its part, the default) or "full_batch"; see `AutoParallel`.
        search_mode: how AUTO_PARALLEL searches: "dynamic_programming" (exact, the default), "recursive_programming" or
            "sharding_propagation"; see `AutoParallel`.
        pipeline_stages: number of stages, each on a rank of its own; the network is a `PipelineCell`
            (`simparallel.compat.mindspore`).
        pipeline_config: {"pipeline_interleave": several stages on a rank, "pipeline_scheduler": "1f1b", "gpipe" or
            "zero_bubble_v"}; False and "1f1b" by default.
        device_num, global_rank: number of ranks, and this rank; they must agree with the run.
        Other settings of MindSpore have no effect; the first call logs a note.

    Raises:
        InputError: an unknown name or a bad value, or a mode that shards operators with PYNATIVE_MODE, as in MindSpore;
            nothing is changed.
    """
    who = "set_auto_parallel_context"
    settings = {_EARLIER.get(name, name): value for name, value in settings.items()}
    if "full_batch" in settings:
        settings["dataset_strategy"] = "full_batch" if settings.pop("full_batch") else "data_parallel"
    # Check everything before the first setting changes.
    _refuse_unknown(who, settings, (*_DEFAULTS, *_UNUSED_PARALLEL))
    unused = {name: settings.pop(name) for name in _UNUSED_PARALLEL if name in settings}
    for name, value in settings.items():
        settings[name] = _checked(name, value)
    _check_graph_mode(who, settings.get("parallel_mode"), _settings.context.get("mode"))
    _note_unused(who, unused)
    _settings.values, _settings.line = {**_settings.values, **settings}, user_line()
    mode = settings.get("parallel_mode")
    # In this mode random numbers are drawn for the whole batch: the rank takes its part of them.
    if mode == ParallelMode.DATA_PARALLEL:
        random_state.usual_part = _part_of_rank
    elif mode is not None:
        random_state.usual_part = None


def get_auto_parallel_context(name: str) -> Any:
    """Return a setting of `set_auto_parallel_context`; if it is not set, the default of the run or the mode.

    Args:
        name: "parallel_mode", "gradients_mean", "parameter_broadcast", "dataset_strategy", "device_num",
            "global_rank", "search_mode", "pipeline_stages", "pipeline_config", or an earlier name of one of them.

    Raises:
        InputError: an unknown name.
    """
    name = _EARLIER.get(name, name)
    _refuse_unknown("get_auto_parallel_context", {name: None}, tuple(_DEFAULTS))
    # None stands for a default that depends on the mode or the run.
    value = _settings.values[name]
    if value is not None:
        return value
    if name == "parameter_broadcast":
        return _settings.values["parallel_mode"] == ParallelMode.DATA_PARALLEL
    return current().world_size if name == "device_num" else current().rank


def reset_auto_parallel_context() -> None:
    """Restore the settings that a run begins with."""
    _settings.values, _settings.line = dict(_DEFAULTS), user_line()
    random_state.usual_part = None


def begin_settings() -> None:
    """Note the beginning of a run, at which `rank_local.begin_run` has restored the defaults."""
    _settings.line = ""
    forget_notes()


def _check_graph_mode(who: str, parallel_mode: str | None, mode: int | None) -> None:
    """Refuse what MindSpore refuses in PYNATIVE_MODE, and note what its first versions refuse."""
    if mode != PYNATIVE_MODE or parallel_mode in (None, ParallelMode.STAND_ALONE):
        return
    if parallel_mode in SHARDED_MODES:
        raise InputError(
            f"{who}: parallel_mode={parallel_mode!r} in PYNATIVE_MODE; MindSpore shards operators in graph mode only. "
            "Call set_context(mode=GRAPH_MODE) first; operations run one by one here in both modes."
        )
    note_once(f"{parallel_mode} in PYNATIVE_MODE: MindSpore's first versions are parallel in graph mode only.")


# Settings of MindSpore's graph compiler and of its hardware. They do not affect values.
_UNUSED_CONTEXT = (
    "enable_auto_mixed_precision", "enable_compile_cache", "enable_graph_kernel", "enable_hccl", "enable_loop_sink",
    "enable_mem_reuse", "enable_reduce_precision", "enable_task_sink", "jit_config", "jit_level", "max_call_depth",
    "memory_optimize_level", "mempool_block_size", "op_timeout", "pynative_synchronize",
    "save_graphs", "save_graphs_path", "variable_memory_max_size",
)  # fmt: skip
_UNUSED_PARALLEL = (
    "all_reduce_fusion_config", "comm_fusion", "communi_parallel_mode", "enable_alltoall",
    "enable_parallel_optimizer", "gradient_fp32_sync", "loss_repeated_mean", "parallel_optimizer_config",
)  # fmt: skip
_TARGETS = {"CPU": None, "GPU": "a100", "Ascend": "ascend910"}


def set_context(
    mode: int | None = None,
    device_target: str | None = None,
    device_id: int | None = None,
    max_device_memory: str | None = None,
    **settings: Any,
) -> None:
    """Accept the settings that a MindSpore script begins with.

    Operations run one by one in GRAPH_MODE as in PYNATIVE_MODE, and give the same numbers.

    Args:
        mode: GRAPH_MODE or PYNATIVE_MODE.
        device_target: "Ascend" describes this rank's device as an ascend910, "GPU" as an a100, from now on, unless
            the run was started with a device; "CPU" changes nothing.
        device_id: number of the device on its node; no effect, because the launcher has chosen it.
        max_device_memory: such as "28GB"; see `set_memory`.
        settings: other settings of MindSpore; they have no effect, and the first call logs a note.

    Raises:
        InputError: an unknown mode, target or setting, a bad `device_id` or size, or PYNATIVE_MODE with a parallel
            mode that shards operators, as in MindSpore; nothing is changed.
        DeviceOutOfMemoryError: the device already holds more than `max_device_memory`; nothing is changed.
    """
    _refuse_unknown("set_context", settings, _UNUSED_CONTEXT)
    if mode not in (None, GRAPH_MODE, PYNATIVE_MODE):
        raise InputError(f"set_context: mode={mode!r} is neither GRAPH_MODE (0) nor PYNATIVE_MODE (1).")
    if device_target is not None:
        check_choice("set_context", "device_target", device_target, _TARGETS)
    if device_id is not None:
        check_integer("set_context", "device_id", device_id, 0)
    _check_graph_mode("set_context", _settings.values["parallel_mode"], mode)
    if max_device_memory is not None:
        set_memory(max_device_memory)
    _note_unused("set_context", settings)
    given = {"mode": mode, "device_target": device_target, "device_id": device_id, **settings}
    given["max_device_memory"] = max_device_memory
    _settings.context.update({name: value for name, value in given.items() if value is not None})
    # Only from here on: work that was priced before keeps its price.
    preset = _TARGETS.get(device_target) if device_target is not None else None
    if preset is not None:
        describe_device(preset)


def get_context(attr_key: str) -> Any:
    """Return a setting of `set_context`.

    Raises:
        InputError: an unknown name.
    """
    known = ("mode", "device_target", "device_id", "max_device_memory", *_UNUSED_CONTEXT)
    _refuse_unknown("get_context", {attr_key: None}, known)
    usual = {"mode": PYNATIVE_MODE, "device_target": "CPU", "device_id": 0}
    return _settings.context.get(attr_key, usual.get(attr_key))


def set_algo_parameters(
    elementwise_op_strategy_follow: bool | None = None,
    fully_use_devices: bool | None = None,
    algo_phase: int | None = None,
    enable_algo_approxi: bool | None = None,
    algo_approxi_epsilon: float | None = None,
    tensor_slice_align_enable: bool | None = None,
    tensor_slice_align_size: int | None = None,
) -> None:
    """Set options of the searches for strategies; see `AutoParallel`.

    Args:
        elementwise_op_strategy_follow: whether elementwise ops take the strategy of the op before them.
        fully_use_devices: whether an op that is cut has to use all devices.
        Other settings of MindSpore have no effect; the first call logs a note.

    Raises:
        InputError: one of the first two is not True or False; nothing is changed.
    """
    # The first statement, so `locals` are the arguments.
    given = {name: value for name, value in locals().items() if value is not None}
    check_flags("set_algo_parameters", given, (name for name in _SEARCH_FLAGS if name in given))
    _note_unused("set_algo_parameters", {name: value for name, value in given.items() if name not in _SEARCH_FLAGS})
    _settings.algorithm.update(given)


def get_algo_parameters(attr_key: str) -> Any:
    """Return a setting of `set_algo_parameters`; None if it is not set."""
    return _settings.algorithm.get(attr_key)


_SEARCH_FLAGS = ("elementwise_op_strategy_follow", "fully_use_devices")


def reset_algo_parameters() -> None:
    """Discard the settings of `set_algo_parameters`."""
    _settings.algorithm = {}


# Weights and limits of the search's cost model, with their defaults; the times are those of the described cluster.
_COST_MODEL: dict[str, float | None] = {
    "device_memory_capacity": None, "costmodel_alpha": 1.0, "costmodel_beta": 1.0, "costmodel_gamma": None,
}  # fmt: skip
_UNUSED_COST_MODEL = (
    "costmodel_allreduce_fusion_algorithm", "costmodel_allreduce_fusion_allreduce_bandwidth",
    "costmodel_allreduce_fusion_allreduce_inherent_time", "costmodel_allreduce_fusion_computation_time_parameter",
    "costmodel_allreduce_fusion_tail_percent", "costmodel_allreduce_fusion_tail_time",
    "costmodel_allreduce_fusion_times", "costmodel_communi_bias", "costmodel_communi_const",
    "costmodel_communi_threshold", "multi_subgraphs", "run_phase",
)  # fmt: skip


def set_cost_model_context(**settings: Any) -> None:
    """Set the weights of the cost model that searches for strategies minimise, under MindSpore's names.

    The cost of a step is alpha * computing + beta * communication + gamma * sums of gradients, all in seconds on the
    described cluster; MindSpore counts bytes instead.

    Args:
        device_memory_capacity: bytes of memory of a device that a plan may use; by default the device's.
        costmodel_alpha, costmodel_beta: weights, 1.0 by default.
        costmodel_gamma: weight of sums that overlap with backward; by default the share of them that a step exposes.
        Other settings of MindSpore have no effect; the first call logs a note.

    Raises:
        InputError: an unknown name, or a value that is not a number of 0 or more; nothing is changed.
    """
    who = "set_cost_model_context"
    _refuse_unknown(who, settings, (*_COST_MODEL, *_UNUSED_COST_MODEL))
    used = {name: value for name, value in settings.items() if name in _COST_MODEL}
    for name, value in used.items():
        check_number(who, name, value)
    _note_unused(who, {name: value for name, value in settings.items() if name not in used})
    _settings.cost_model.update(used)


def get_cost_model_context(name: str) -> Any:
    """Return a setting of `set_cost_model_context`, or its default. Raises InputError for an unknown name."""
    _refuse_unknown("get_cost_model_context", {name: None}, tuple(_COST_MODEL))
    return _settings.cost_model.get(name, _COST_MODEL[name])


def reset_cost_model_context() -> None:
    """Restore the defaults of `set_cost_model_context`."""
    _settings.cost_model = {}


def _refuse_unknown(who: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
            raise InputError(f"{who}: no setting {name!r}.{hint}")


def _note_unused(who: str, settings: Mapping[str, Any]) -> None:
    if settings:
        text = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        note_once(f"{who}: {text}: ignored here; results do not depend on it.")


def check_world(who: str) -> None:
    """Refuse a `device_num` or `global_rank` other than the run's, before any rank waits for another.

    In a parallel mode, first join the run that the environment describes, as a program that does not call `init` means.

    Raises:
        InputError: they disagree.
        LaunchError: see `init`.
    """
    if _settings.values["parallel_mode"] != ParallelMode.STAND_ALONE:
        init_if_described()
    # Both numbers come from the launcher; a script may only repeat them.
    for name, real in (("device_num", current().world_size), ("global_rank", current().rank)):
        value = _settings.values[name]
        if value not in (None, real):
            raise InputError(
                f"{who}: {name}={value} was set, but it is {real} in this run; leave it out, or start "
                f"{'as many ranks' if name == 'device_num' else 'the rank'} that you need."
            )


def _checked(name: str, value: Any) -> Any:
    """Return the value of a setting in the form in which it is kept. Raises InputError."""
    who = "set_auto_parallel_context"
    if name == "parallel_mode":
        value = _SHORT.get(value, value) if isinstance(value, str) else value
        check_choice(who, name, value, _MODES)
    elif name in ("gradients_mean", "parameter_broadcast"):
        check_flags(who, {name: value}, [name])
    elif name == "search_mode":
        check_choice(who, name, value, tuple(SEARCHES))
    elif name == "dataset_strategy":
        # A tuple of cuts is checked by `AutoParallel`, which knows the arguments.
        if not isinstance(value, tuple):
            check_choice(who, name, value, ("data_parallel", "full_batch"))
    elif name == "pipeline_config":
        if not isinstance(value, dict):
            raise InputError(f"{who}: {name}={value!r} must be a dict with {' and '.join(_DEFAULTS[name])}.")
        _refuse_unknown(who, value, tuple(_DEFAULTS[name]))
        value = {**_DEFAULTS[name], **value}
        check_flags(who, value, ["pipeline_interleave"])
        check_choice(who, "pipeline_scheduler", value["pipeline_scheduler"], tuple(PIPELINE_SCHEDULERS))
    elif value is not None or name == "pipeline_stages":
        return check_integer(who, name, value, 0 if name == "global_rank" else 1)
    return value


def _part_of_rank() -> tuple[int, int]:
    return current().rank, current().world_size
