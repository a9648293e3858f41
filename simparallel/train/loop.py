"""`Training`: the loop over epochs and steps, its callbacks, saving and resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.comm import Group
from simparallel.errors import CheckpointError
from simparallel.runtime import progress
from simparallel.train.batch_stream import BatchStream
from simparallel.train.callback import Callback, CallbackList, CallbackParams, RunContext
from simparallel.train.checkpoint import CheckpointManager, TensorSlice
from simparallel.train.control import History
from simparallel.train.ddp_wrappers import hook_states, saving_group, wrappers
from simparallel.train.step import TrainStep
from simparallel.world.rank import get_rank, get_world_size


class Training:
    """A training run in progress. `Model.train` creates one.

    Args:
        step: runs one batch.
        params: the state for callbacks; completed here.
        callbacks: one `Callback`, several, or None.
        dataset: yields the batches.
        epochs: number of epochs in all; epoch `initial_epoch` (from 0) is the first one.
        steps_per_epoch: 0 for one pass through the dataset. Otherwise each epoch continues after the previous one's
            last batch.
        is_sink: call the hooks of a step only before the first and after the last step of an epoch.
        evaluate: maps the number of a finished epoch (from 1) to results by name; empty for no evaluation.
        is_parallel: the ranks of `group` agree on losses and stops.
        group: ranks that train together; None for all.
    """

    def __init__(
        self,
        step: TrainStep,
        params: CallbackParams,
        callbacks: Any,
        dataset: Any,
        *,
        epochs: int,
        initial_epoch: int,
        steps_per_epoch: int,
        is_sink: bool,
        evaluate: Callable[[int], dict[str, Any]],
        is_parallel: bool,
        group: Group | None,
    ) -> None:
        self.step, self.params = step, params
        self.stream = BatchStream(dataset)
        self.epochs, self.epoch = epochs, initial_epoch
        self.steps_per_epoch = steps_per_epoch or self.stream.pass_size
        self.is_sink, self.is_parallel, self.group = is_sink, is_parallel, group
        self.evaluate = evaluate
        self.step_in_epoch = 0
        # The callbacks' states from before the end of an epoch, while its evaluation and end hooks run.
        self._before_end: dict[str, _State] | None = None
        # Sum of the epoch's losses and their number; an array, because the ranks hold different values.
        self.losses = np.zeros(2)
        self.history = History()
        self.context = RunContext(params)
        self.callbacks = CallbackList(callbacks, self.context)
        # The history runs first, so that the user's callbacks find the results of this epoch in it.
        self.callbacks.callbacks.insert(0, self.history)
        params.update(
            training=self,
            cur_epoch_num=initial_epoch,
            cur_step_num=initial_epoch * self.steps_per_epoch,
            epoch_num=epochs,
            batch_num=self.steps_per_epoch,
            net_outputs=None,
            epoch_results={},
            eval_results={},
        )

    def run(self, resume_from: CheckpointManager | None, show_progress: bool) -> History:
        """Train to the end. Collective: yes, if the ranks train together."""
        network = self.params.network
        was_training = network.training
        network.train()
        try:
            self.callbacks("on_train_begin")
            if resume_from is not None:
                self._resume(resume_from)
                # A restored callback may request a stop, on some ranks only.
                self._agree_to_stop()
            count = max(0, (self.epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch)
            steps = progress(range(count), "training") if show_progress else iter(range(count))
            while self.epoch < self.epochs and not self.context.get_stop_requested():
                self._run_epoch(steps)
            if self.epoch == self.epochs:
                # One more `next` completes the progress bar.
                next(steps, None)
            self.callbacks("on_train_end")
            for wrapper in wrappers(network):
                # Afterwards one rank alone can predict, because no forward pass has a broadcast left to do.
                wrapper.sync_buffers()
        finally:
            network.train(was_training)
        self.stream.close()
        return self.history

    def _run_epoch(self, steps: Iterator[int]) -> None:
        params, callbacks = self.params, self.callbacks
        params.update(cur_epoch_num=self.epoch + 1, epoch_results={}, eval_results={})
        callbacks("on_train_epoch_begin")
        # Fewer than steps_per_epoch after a resume in the middle of an epoch.
        left = self.steps_per_epoch - self.step_in_epoch
        if self.is_sink and left:
            callbacks("on_train_step_begin")
        for _ in islice(steps, left):
            params.train_dataset_element = fields = self.stream.next()
            if not self.is_sink:
                callbacks("on_train_step_begin")
            loss = self.step(fields)
            params.net_outputs = loss
            params.cur_step_num += 1
            self.step_in_epoch += 1
            # Sum and count instead of a mean, so that a resumed epoch continues it.
            self.losses += np.concatenate([loss.numpy().reshape(1), np.ones(1)])
            # In sink mode this hook runs once per epoch, after its last step.
            is_over = self.step_in_epoch == self.steps_per_epoch or self.context.get_stop_requested()
            if not self.is_sink or is_over:
                callbacks("on_train_step_end")
            if self.context.get_stop_requested():
                break
        # A checkpoint saved from here on resumes before the end of this epoch, or with the rest of it after a stop.
        # So keep the callbacks' states from before their end hooks.
        self._before_end = {name: _State(callback.state_dict()) for name, callback in self._named_callbacks().items()}
        params.eval_results = self.evaluate(self.epoch + 1)
        params.epoch_results = {"loss": self._mean_loss(), **params.eval_results}
        callbacks("on_train_epoch_end")
        self._agree_to_stop()
        # After a stop in the middle of an epoch the position stays, for a later resume.
        if self.step_in_epoch == self.steps_per_epoch:
            self.epoch += 1
            self.step_in_epoch = 0
            self.losses[:] = 0
            self._before_end = None

    def ends_here(self) -> bool:
        """Return whether this is the last step, as far as known at this point."""
        is_last = self.epoch + 1 == self.epochs and self.step_in_epoch == self.steps_per_epoch
        return is_last or self.context.get_stop_requested()

    def _mean_loss(self) -> float:
        """Return the mean over the epoch's steps and over the ranks that train together."""
        losses = self.losses.copy()
        if self.is_parallel:
            # One reduction per epoch, not per step.
            losses = collectives.all_reduce(losses, group=self.group)
        return (losses[0] / losses[1]).item()

    def _agree_to_stop(self) -> None:
        if self.is_parallel:
            wants = np.array([self.context.get_stop_requested()], np.int64)
            # A callback may stop on one rank only (its own loss); the others would wait for that rank in the next
            # epoch.
            asked = collectives.all_reduce(wants, "max", self.group)
            if asked[0]:
                self.context.request_stop()

    # --- saving and resuming -------------------------------------------------------------------------

    @property
    def saving_group(self) -> Group | None:
        """The ranks that save together; None for all."""
        return saving_group(self.params.network, self.group)

    def save(self, manager: CheckpointManager) -> Path:
        """Write a checkpoint of the whole training, between two steps. Collective: yes."""
        return manager.save(self.params.cur_step_num, **self._parts(self._before_end or self._named_callbacks()))

    def _resume(self, manager: CheckpointManager) -> None:
        manager.restore(**self._parts(self._named_callbacks()))

    def _parts(self, callbacks: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a checkpoint, by their names in `CheckpointManager.save`."""
        network, own = self.params.network, {**callbacks, **hook_states(self.params.network)}
        objects = {"model": network, "optimizer": self.params.optimizer, "scaler": self.step.scaler, "sampler": self}
        return {**objects, "own": own, "group": self.saving_group}

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the steps' state. Callbacks are saved separately, because they may differ by rank."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "steps_per_epoch": self.steps_per_epoch,
            "step": self.params.cur_step_num,
            "data": self.stream.state_dict(),
            "losses": self._losses_of_all(),
            "boost": self.step.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            CheckpointError: the position is in the middle of an epoch with another number of steps or other data.
            StateDictError: the state belongs to another kind of step.
        """
        steps, done = state_dict["steps_per_epoch"], state_dict["step_in_epoch"]
        if done not in (0, steps) and steps != self.steps_per_epoch:
            raise CheckpointError(
                f"Model: the checkpoint was saved after {done} of {steps} steps of an epoch, which has "
                f"{self.steps_per_epoch} steps now. Use the dataset, batch size and sink_size of the saved run."
            )
        self.step.load_state_dict(state_dict.get("boost", {}))
        self.epoch = state_dict["epoch"]
        # After the last step only the end of the epoch (evaluation, hooks) is left to do.
        self.step_in_epoch = self.steps_per_epoch if done == steps else done
        self.params.cur_step_num = state_dict["step"]
        self.stream.load_state_dict(state_dict["data"])
        self.losses[:] = self._own_losses(state_dict["losses"])

    def _losses_of_all(self) -> np.ndarray | TensorSlice:
        """Return a tensor with a row for each rank of the training; this rank contributes its own."""
        # As slices of one tensor, so that the state is the same on all ranks and is saved once.
        row, rank = self.losses[None].copy(), get_rank(self.saving_group)
        if not self.is_parallel:
            return row
        return TensorSlice((get_world_size(self.saving_group), 2), (slice(rank, rank + 1), slice(0, 2)), row)

    def _own_losses(self, saved: Any) -> np.ndarray:
        """Return this rank's row; on another number of ranks the mean of all rows, so that each step counts once."""
        if isinstance(saved, TensorSlice):
            # Our own state_dict(), in a roll-back.
            saved = saved.array[0]
        group = self.saving_group
        rank, size = (get_rank(group), get_world_size(group)) if self.is_parallel else (0, 1)
        return saved[rank] if len(saved) == size else saved.mean(0)

    def _named_callbacks(self) -> dict[str, Callback]:
        """Return the callbacks, keyed by class name and position among callbacks of that class."""
        named: dict[str, Callback] = {}
        for callback in self.callbacks.callbacks:
            name = type(callback).__name__
            number = sum(known.rpartition(".")[0] == name for known in named)
            named[f"{name}.{number}"] = callback
        return named


class _State:
    """A snapshot of a callback's state, to be saved in place of the callback."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state = dict(state_dict)
