"""Callbacks: monitors, early stopping, learning rates, and checkpoints while training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.base.checks import check_choice, check_integer, check_number
from simparallel.comm import Group
from simparallel.errors import InputError
from simparallel.train.callback import Callback, CallbackParams, RunContext
from simparallel.train.checkpoint import CheckpointManager
from simparallel.train.ddp_wrappers import bare, of_first_rank


class LossMonitor(Callback):
    """A callback that prints `epoch: 1 step: 10, loss is 2.3025851`; each rank prints its own loss.

    Args:
        per_print_times: steps between lines; 0 prints none. With a data sink, lines come only at the ends of epochs.

    Raises:
        InputError: a bad number.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        self.per_print_times = check_integer("LossMonitor", "per_print_times", per_print_times, 0)
        self._last_print_time = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        self._last_print_time = 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        # Numbers within an epoch begin with 1, as MindSpore prints them.
        step = (params.cur_step_num - 1) % params.batch_num + 1
        if self.per_print_times and params.cur_step_num - self._last_print_time >= self.per_print_times:
            self._last_print_time = params.cur_step_num
            print(f"epoch: {params.cur_epoch_num} step: {step}, loss is {params.net_outputs}", flush=True)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        results = params.get("eval_results")
        if results:
            print(f"Eval result: epoch {params.cur_epoch_num}, metrics: {results}", flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"last_print_time": self._last_print_time}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_print_time = state_dict["last_print_time"]


class TimeMonitor(Callback):
    """A callback that prints `Train epoch time: 520.1 ms, per step time: 5.2 ms` per epoch: this rank's wall time.

    Args:
        data_size: number of steps to divide the epoch's time by; None uses the number of steps done.

    Attributes:
        epoch_times_s: seconds of each epoch so far.
    """

    def __init__(self, data_size: int | None = None) -> None:
        self.data_size = None if data_size is None else check_integer("TimeMonitor", "data_size", data_size, 1)
        self.epoch_times_s: list[float] = []
        self._started_s, self._steps = 0.0, 0

    def on_train_begin(self, run_context: RunContext) -> None:
        self.epoch_times_s = []

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._started_s = time.perf_counter()
        self._steps = run_context.original_args().cur_step_num

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        took_s = time.perf_counter() - self._started_s
        steps = self.data_size or max(1, run_context.original_args().cur_step_num - self._steps)
        self.epoch_times_s.append(took_s)
        print(f"Train epoch time: {took_s * 1e3:5.3f} ms, per step time: {took_s * 1e3 / steps:5.3f} ms", flush=True)


class History(Callback):
    """The results of each epoch; `Model.train` and `Model.fit` return one.

    Attributes:
        epoch: numbers of the epochs, from 1.
        history: "loss" and the "eval_…" names -> values, one for each epoch that had one.
            A metric with a number per class yields a list.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        self.epoch, self.history = [], {}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        self.epoch.append(params.cur_epoch_num)
        for name, value in params.epoch_results.items():
            # Plain Python numbers, so that the history can be saved in a checkpoint and as JSON.
            plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
            self.history.setdefault(name, []).append(plain)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": list(self.epoch), "history": {name: list(v) for name, v in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.history = list(state_dict["epoch"]), dict(state_dict["history"])

    def __repr__(self) -> str:
        return f"History({len(self.epoch)} epochs: {', '.join(self.history)})"


_HIGHER_IS_BETTER = ("acc", "f1", "precision", "recall", "top")


class EarlyStopping(Callback):
    """A callback that ends the training when a result has not improved for `patience` epochs.

    A run resumed from a checkpoint that was saved after the stop ends at once, unless `patience` is now larger.

    Args:
        monitor: "loss", or "eval_" and the name of a metric that yields one number.
        min_delta: an improvement must exceed this, 0 or more.
        patience: epochs without improvement before the stop; 0 acts as 1.
        verbose: print a line at the stop.
        mode: "min", "max", or "auto" to infer it from the monitor's name.
        baseline: an improvement counts only if the result is also better than this.
        restore_best_weights: load the parameters of the best epoch into the network at the end.

    Attributes:
        best: the best result. stopped_epoch: epoch of the stop, 0 if there was none.

    Raises:
        InputError: a bad setting; (in training) an unknown monitor.
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: bool = False,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        check_choice("EarlyStopping", "mode", mode, ("auto", "min", "max"))
        self.min_delta = check_number("EarlyStopping", "min_delta", min_delta)
        self.monitor, self.verbose = monitor, bool(verbose)
        self.patience = check_integer("EarlyStopping", "patience", patience, 0)
        is_up = mode == "max" or (mode == "auto" and any(word in monitor.lower() for word in _HIGHER_IS_BETTER))
        # With the sign, smaller is better for every monitor.
        self._sign = -1.0 if is_up else 1.0
        self.baseline, self.restore_best_weights = baseline, bool(restore_best_weights)
        # The context during training; None outside of it.
        self._run_context: RunContext | None = None
        self._start_over()

    def _start_over(self) -> None:
        self.wait = self.stopped_epoch = 0
        self.best = self._sign * math.inf
        self.best_weights: dict[str, Any] | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._start_over()
        self._run_context = run_context
        params = run_context.original_args()
        if self.monitor.startswith("eval_") and params.get("valid_dataset") is None:
            raise InputError(
                f"EarlyStopping: monitor={self.monitor!r} needs an evaluation: Model.fit(…, valid_dataset), or "
                "monitor='loss'."
            )

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        value = self._value(params)
        if value is None:
            return
        self.wait += 1
        # A new best result that does not pass the baseline does not reset the patience.
        if self._is_better(value, self.best):
            self.best = value
            if self.restore_best_weights:
                # state_dict() copies, so later steps do not change them.
                self.best_weights = bare(params.network).state_dict()
            if self.baseline is None or self._is_better(value, self.baseline):
                self.wait = 0
        if self._is_to_stop():
            self.stopped_epoch = params.cur_epoch_num
            run_context.request_stop()
            if self.verbose:
                print(
                    f"EarlyStopping: {self.monitor} has not improved on {self.best:g} for {self.wait} epochs.",
                    flush=True,
                )

    def on_train_end(self, run_context: RunContext) -> None:
        self._run_context = None
        if self.best_weights is not None:
            bare(run_context.original_args().network).load_state_dict(self.best_weights)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait": self.wait, "best": self.best, "best_weights": self.best_weights,
            "stopped_epoch": self.stopped_epoch,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait, self.best = state_dict["wait"], state_dict["best"]
        self.best_weights = state_dict["best_weights"]
        self.stopped_epoch = 0
        if self._is_to_stop():
            self.stopped_epoch = state_dict["stopped_epoch"]
            if self._run_context is not None:
                self._run_context.request_stop()

    def _is_to_stop(self) -> bool:
        return self.wait >= max(1, self.patience)

    def _is_better(self, value: float, than: float) -> bool:
        return self._sign * (than - value) > self.min_delta

    def _value(self, params: CallbackParams) -> float | None:
        results = params.epoch_results
        if self.monitor not in results:
            if self.monitor.startswith("eval_") and not params.get("eval_results"):
                # This epoch had no evaluation.
                return None
            raise InputError(f"EarlyStopping: monitor={self.monitor!r} is not among {', '.join(results)}.")
        return float(results[self.monitor])


class LearningRateScheduler(Callback):
    """A callback that sets the learning rate after each step: `learning_rate_function(lr, step) -> lr`.

    Args:
        learning_rate_function: takes the current rate and the number of steps so far; called for each parameter group.

    Raises:
        InputError: (in training) a rate that is not a number of 0 or more, or an optimizer that already follows a
            schedule.
    """

    def __init__(self, learning_rate_function: Callable[[float, int], float]) -> None:
        self.learning_rate_function = learning_rate_function

    def on_train_begin(self, run_context: RunContext) -> None:
        if any(run_context.original_args().optimizer.schedules):
            raise InputError(
                "LearningRateScheduler: the optimizer already follows the schedule that was given to it as "
                "lr; give it a number, or leave out the callback."
            )

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        groups = params.optimizer.param_groups
        rates = [self.learning_rate_function(group["lr"], params.cur_step_num) for group in groups]
        for rate in rates:
            check_number("LearningRateScheduler", f"lr after step {params.cur_step_num}", rate)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


class CheckpointConfig:
    """Settings of `ModelCheckpoint`: when to save, and how many checkpoints to keep.

    Args:
        save_checkpoint_steps: steps between saves; 0 uses the seconds only.
        save_checkpoint_seconds: seconds between saves, measured on rank 0; used if the steps are 0. The ranks agree in
            each step, which costs a broadcast.
        keep_checkpoint_max: number of checkpoints to keep, 1 or more.

    Raises:
        InputError: a bad setting, or neither steps nor seconds.
    """

    def __init__(
        self, save_checkpoint_steps: int = 1, save_checkpoint_seconds: float = 0, keep_checkpoint_max: int = 5
    ) -> None:
        who = "CheckpointConfig"
        self.save_checkpoint_steps = check_integer(who, "save_checkpoint_steps", save_checkpoint_steps, 0)
        self.save_checkpoint_seconds = check_number(who, "save_checkpoint_seconds", save_checkpoint_seconds)
        self.keep_checkpoint_max = check_integer(who, "keep_checkpoint_max", keep_checkpoint_max, 1)
        if not (self.save_checkpoint_steps or self.save_checkpoint_seconds):
            raise InputError(f"{who}: give save_checkpoint_steps or save_checkpoint_seconds.")


class ModelCheckpoint(Callback):
    """A callback that saves network, optimizer, loss scale, random state, data position and all callbacks' states.

    Only complete steps are saved, after all other callbacks have seen them. The last step is always saved, also after
    a stop in the middle of an epoch: a resumed run continues right there.
    With a data sink, only the ends of epochs are seen. The ranks save together, see
    `CheckpointManager`; `Model.train(..., resume=True)` resumes from the last checkpoint.

    Args:
        prefix: name of the folder in `directory`. If only some ranks train together (`process_group` of
            `DistributedDataParallel`), they use a subfolder such as `ranks_0_1`.
        directory: the parent of that folder; None for the working directory.
        config: when to save; None takes `CheckpointConfig()`, which saves every step.

    Raises:
        InputError: `prefix` is not a plain name; CheckpointError: (in training) saving fails.

    Collective: yes, when it saves.
    """

    is_last = True

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | os.PathLike[str] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        if prefix in ("", "..") or prefix != Path(prefix).name:
            raise InputError(
                f"ModelCheckpoint: prefix={prefix!r} must be the name of a folder, without '/'; its parent folder is "
                "`directory`."
            )
        self.config = CheckpointConfig() if config is None else config
        self._folder = Path(directory or ".") / prefix
        self.save_with(None)
        self._saved_step: int | None = None
        self._saved_s = 0.0

    def save_with(self, group: Group | None) -> None:
        """Choose the folder for the ranks that save together; None for all ranks."""
        folder = self._folder if group is None else self._folder / f"ranks_{'_'.join(map(str, group.ranks))}"
        self.manager = CheckpointManager(folder, keep=self.config.keep_checkpoint_max)

    def on_train_begin(self, run_context: RunContext) -> None:
        # A monotonic clock: the wall clock may be set during training.
        self._saved_step, self._saved_s = run_context.original_args().cur_step_num, time.monotonic()

    def on_train_step_end(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        assert self._saved_step is not None
        if params.training.ends_here():
            # Save now, not in on_train_end: callbacks may load other weights there (restore_best_weights).
            due = True
        elif self.config.save_checkpoint_steps:
            # Save if a multiple of `every` was passed since the last save: with a data sink one call covers many steps.
            every = self.config.save_checkpoint_steps
            due = params.cur_step_num // every > self._saved_step // every
        else:
            waited_s = time.monotonic() - self._saved_s
            # Clocks differ between ranks, so the first one decides for all.
            due = of_first_rank(waited_s >= self.config.save_checkpoint_seconds, params.training.saving_group)
        if due:
            self._save(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        # The last step is saved already, unless the stop was requested at the end of an epoch.
        if run_context.original_args().cur_step_num != self._saved_step:
            self._save(run_context)

    def _save(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        # Set it before saving: it is part of the saved state.
        self._saved_step = params.cur_step_num
        params.training.save(self.manager)
        self._saved_s = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"saved_step": self._saved_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_step = state_dict["saved_step"]
