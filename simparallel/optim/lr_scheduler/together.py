"""Combine several schedulers of one optimizer: in sequence, or all at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from simparallel.base.checks import check_integer
from simparallel.errors import InputError, StateDictError
from simparallel.optim.lr_scheduler.base import LRScheduler
from simparallel.optim.lr_scheduler.plateau import ReduceLROnPlateau
from simparallel.optim.optimizer import Optimizer


class ComposedScheduler(LRScheduler):
    """Base: holds schedulers of one optimizer, and includes their states in its own."""

    def _hold(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None) -> None:
        self._schedulers = list(schedulers)
        if not self._schedulers:
            raise InputError(f"{self._name}: give at least one scheduler.")
        for i, scheduler in enumerate(self._schedulers):
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
                raise InputError(
                    f"{self._name}: schedulers[{i}] is a {type(scheduler).__name__}, expected an LRScheduler whose "
                    "step() takes no number."
                )
            if scheduler.optimizer is not (optimizer or self._schedulers[0].optimizer):
                raise InputError(f"{self._name}: schedulers[{i}] belongs to another optimizer.")
        self.optimizer = self._schedulers[0].optimizer
        self.base_lrs = list(self._schedulers[0].base_lrs)
        self.last_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: the current number, the rates, and the states of the schedulers."""
        return {**super().state_dict(), "schedulers": [one.state_dict() for one in self._schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume another object's state, and set its rates.

        Raises:
            StateDictError: the state of other schedulers; InputError: a bad rate.
        """
        number, states = self._saved_number(state_dict), state_dict.get("schedulers")
        if not isinstance(states, (list, tuple)) or len(states) != len(self._schedulers):
            raise StateDictError(f"{self._name}: expected the states of {len(self._schedulers)} schedulers.")
        rates = self._saved_rates(state_dict, "rates", self.get_last_lr())
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self._set(number, rates)


class SequentialLR(ComposedScheduler):
    """Schedulers in sequence: each starts at its milestone, with its own t = 0, from the initial rates.

    Args:
        optimizer: the optimizer of all schedulers.
        schedulers: schedulers made for it.
        milestones: epoch (or step) at which each scheduler but the first takes over, ascending.
        last_epoch: must be -1; load a state to resume.

    Raises:
        InputError: the number of milestones is not the number of schedulers - 1, milestones do not ascend, or a
            scheduler belongs to another optimizer or needs a metric.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int], last_epoch: int = -1
    ) -> None:
        self._hold(schedulers, optimizer)
        self.milestones = list(milestones)
        for i, milestone in enumerate(self.milestones):
            check_integer(self._name, f"milestones[{i}]", milestone, 1)
        rises = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        if len(self.milestones) != len(self._schedulers) - 1 or not rises:
            raise InputError(
                f"{self._name}: milestones={self.milestones} for {len(self._schedulers)} schedulers; expected one "
                "less, in increasing order."
            )
        if last_epoch != -1:
            raise InputError(
                f"{self._name}: last_epoch={last_epoch}; to continue, create it without last_epoch and load its state."
            )
        self._restart(0)

    def step(self) -> None:
        """Set the next rates. An InputError (a bad rate, added groups) leaves everything unchanged."""
        self._check_groups()
        number = self.last_epoch + 1
        current = bisect_right(self.milestones, number)
        # At its milestone a scheduler starts from its first rates instead of stepping.
        if current and self.milestones[current - 1] == number:
            self._restart(current)
        else:
            self._schedulers[current].step()
        self.last_epoch = number

    def _restart(self, i: int) -> None:
        scheduler = self._schedulers[i]
        scheduler._set(0, [scheduler._rate(j, 0) for j in range(len(scheduler.base_lrs))])


class ChainedScheduler(ComposedScheduler):
    """Several schedulers that all take each step, in turn, so that their factors multiply.

    Args:
        schedulers: schedulers made for one optimizer.
        optimizer: that optimizer; None takes it from the schedulers.

    Raises:
        InputError: no scheduler, schedulers of different optimizers, or one that needs a metric.
    """

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        self._hold(schedulers, optimizer)

    def step(self) -> None:
        """Let each scheduler set its next rates. Raises InputError for a bad rate or added groups."""
        self._check_groups()
        for scheduler in self._schedulers:
            scheduler.step()
        self.last_epoch += 1
