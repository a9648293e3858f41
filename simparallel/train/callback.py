"""`Callback`: hooks that a `Model` calls while it trains, with MindSpore's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simparallel.base.units import format_object
from simparallel.errors import InputError


class CallbackParams(dict[str, Any]):
    """The state of a training run as attributes, for callbacks; `params.get(name)` is None for a missing name.

    | name | meaning |
    |---|---|
    | network, eval_network, loss_fn, optimizer, metrics | of the `Model` |
    | training | the running `Training`; `training.save(manager)` writes a checkpoint |
    | mode | "train" or "eval" |
    | epoch_num, cur_epoch_num | number of epochs, and number of the current one, from 1 |
    | batch_num | steps of an epoch |
    | cur_step_num | steps so far in all epochs, including the current one |
    | net_outputs | loss of the last step, a Tensor; in evaluation the outputs of the network |
    | train_dataset, valid_dataset | the datasets of the `Model` |
    | train_dataset_element | fields of the current batch |
    | eval_results | at the end of an epoch: "eval_" and a metric's name -> value |
    | epoch_results | at the end of an epoch: "loss", the mean of its steps (and ranks), and `eval_results` |
    | parallel_mode, device_number | the run's mode and number of ranks |
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} at this point; there are {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RunContext:
    """The object that every hook receives: the state of the training, and a way to stop it.

    Made by `Model`.
    """

    def __init__(self, original_args: CallbackParams) -> None:
        self._args = original_args
        self._stop = False

    def original_args(self) -> CallbackParams:
        """Return the state of the training, as attributes.

        network, loss_fn, optimizer, metrics, mode ("train" or "eval"), epoch_num and cur_epoch_num (from 1),
        batch_num (steps of an epoch), cur_step_num (in all epochs), net_outputs (loss of the last step),
        train_dataset_element (the current batch), eval_results and epoch_results (at the end of an epoch),
        parallel_mode, device_number, and more: see `simparallel.train.callback.CallbackParams`.
        """
        return self._args

    def request_stop(self) -> None:
        """End the training after this step or epoch. Inside an epoch call it on all ranks alike.

        The request is not saved: if a restored callback finds the training over, its `load_state_dict` must
        request the stop again. If the stop comes in the middle of an epoch, the evaluation and the hooks of the
        epoch's end still run on the steps so far; a resumed run continues with the rest of the epoch as if
        they had not run.
        """
        self._stop = True

    def get_stop_requested(self) -> bool:
        """Return whether a stop was requested."""
        return self._stop


class Callback:
    """Base class of callbacks: override the hooks. Each gets the `RunContext`; its `original_args()` has the state.

    Order: begin; for each epoch: epoch_begin, step_begin and step_end for each batch, the evaluation (if any),
    epoch_end; then end. The names without `on_train_` are MindSpore's older ones, called at the same points.

    Example:
        >>> class Stop(sp.Callback):
        ...     def on_train_step_end(self, run_context):
        ...         if float(run_context.original_args().net_outputs) < 0.1:
        ...             run_context.request_stop()
    """

    __repr__ = format_object

    def on_train_begin(self, run_context: RunContext) -> None:
        """Run before the first step."""
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Run before the first step of an epoch."""
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Run before a step."""
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Run after a step, with updated parameters."""
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Run after the last step of an epoch and its evaluation."""
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """Run after the last epoch, or after a requested stop."""
        self.end(run_context)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Run before an evaluation."""

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Run before the first batch of an evaluation."""

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Run before a batch of an evaluation."""

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """Run after a batch of an evaluation."""

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """Run after the last batch of an evaluation."""

    def on_eval_end(self, run_context: RunContext) -> None:
        """Run after an evaluation."""

    def begin(self, run_context: RunContext) -> None:
        """Run at the same point as `on_train_begin`; its older name."""

    def epoch_begin(self, run_context: RunContext) -> None:
        """Run at the same point as `on_train_epoch_begin`; its older name."""

    def step_begin(self, run_context: RunContext) -> None:
        """Run at the same point as `on_train_step_begin`; its older name."""

    def step_end(self, run_context: RunContext) -> None:
        """Run at the same point as `on_train_step_end`; its older name."""

    def epoch_end(self, run_context: RunContext) -> None:
        """Run at the same point as `on_train_epoch_end`; its older name."""

    def end(self, run_context: RunContext) -> None:
        """Run at the same point as `on_train_end`; its older name."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue unchanged: plain data and arrays."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a `state_dict()`; called after the hook `on_train_begin`, and only if a state was saved.

        A rank gets its own state back; callbacks are matched by class and position among callbacks of that class. On
        another number of ranks it gets the state of the first rank that had such a callback.
        """


class CallbackList:
    """Several callbacks as one, in their order; callbacks with `is_last` run after the others.

    Raises:
        InputError: an entry is not a `Callback`.
    """

    def __init__(self, callbacks: Any, run_context: RunContext) -> None:
        given = () if callbacks is None else callbacks
        listed = list(given) if isinstance(given, Iterable) else [given]
        for i, callback in enumerate(listed):
            if not isinstance(callback, Callback):
                raise InputError(f"callbacks[{i}]={callback!r} is not a Callback; give sp.Callback objects.")
        # sorted() is stable: callbacks keep their order, and savers run after all that change the state.
        self.callbacks: list[Callback] = sorted(listed, key=lambda callback: getattr(callback, "is_last", False))
        self.run_context = run_context

    def __call__(self, hook: str) -> None:
        """Call one hook of all callbacks, such as "on_train_begin"."""
        for callback in self.callbacks:
            getattr(callback, hook)(self.run_context)
