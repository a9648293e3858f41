"""Schedulers in PyTorch's manner: an object beside the optimizer, told when to go on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from simparallel.errors import InputError, StateDictError
from simparallel.optim.checks import check_number
from simparallel.optim.optimizer import Optimizer
from simparallel.optim.schedules import Rate, StepDecay


class LRScheduler:
    """Sets the learning rates of an optimizer; `step()` goes on to the next ones.

    Call `step()` after `optimizer.step()`: once an epoch or once a step, as the schedule counts.
    The rates of number 0 are set at once.

    Args:
        optimizer: whose groups are changed.
        schedule: number -> rate; one for all groups, or a list with one for each.

    Attributes:
        last_epoch: the number whose rates are set; the name is PyTorch's.

    Raises:
        InputError: not as many schedules as groups, a bad rate, or an optimizer whose lr already
            follows a schedule of its own.
    """

    def __init__(self, optimizer: Optimizer, schedule: Rate | Sequence[Rate]) -> None:
        groups = len(optimizer.param_groups)
        self.schedules: list[Rate] = [schedule] * groups if callable(schedule) else list(schedule)
        self.optimizer = optimizer
        self.last_epoch = 0
        if len(self.schedules) != groups:
            raise InputError(
                f"{self._name}: {len(self.schedules)} schedules were given for {groups} parameter groups; "
                "give one for all, or one for each."
            )
        if any(optimizer.schedules):
            raise InputError(
                f"{self._name}: the optimizer already follows the schedule that was given to it as lr; "
                "give it a number, or leave out the scheduler."
            )
        self._set(0)

    def step(self) -> None:
        """Set the next rates. An InputError (a bad rate) leaves everything as it was."""
        self._set(self.last_epoch + 1)

    def get_last_lr(self) -> list[float]:
        """The rates that are set, one for each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the rates themselves are saved with the optimizer's groups."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the other one was, and set its rates.

        Raises:
            StateDictError: no number `last_epoch` of 0 or more in it.
        """
        number = state_dict.get("last_epoch")
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StateDictError(f"{self._name}: last_epoch={number!r} must be an integer of 0 or more.")
        self._set(number)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _set(self, number: int) -> None:
        rates = [schedule(number) for schedule in self.schedules]
        for i, rate in enumerate(rates):
            check_number(self._name, f"lr of group {i} at {number}", rate)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.last_epoch = number


class StepLR(LRScheduler):
    """lr(t) = lr * gamma ** floor(t / step_size), from each group's own lr."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        super().__init__(optimizer, [StepDecay(g["lr"], step_size, gamma) for g in optimizer.param_groups])


class CosineAnnealingLR(LRScheduler):
    """lr(t) = eta_min + (lr - eta_min) (1 + cos(pi t / T_max)) / 2, from each group's own lr.

    As in PyTorch the rate rises again after `T_max`; `schedules.Cosine` stays at `eta_min`.
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> None:
        if isinstance(T_max, bool) or not isinstance(T_max, int) or T_max < 1:
            raise InputError(f"{self._name}: T_max={T_max!r} must be an integer of 1 or more.")
        check_number(self._name, "eta_min", eta_min)

        def schedule(lr: float) -> Rate:
            return lambda t: eta_min + (lr - eta_min) * (1 + math.cos(math.pi * t / T_max)) / 2

        super().__init__(optimizer, [schedule(group["lr"]) for group in optimizer.param_groups])


class LambdaLR(LRScheduler):
    """lr(t) = lr * factor(t), from each group's own lr; one function for all, or a list."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Rate | Sequence[Rate]) -> None:
        groups = optimizer.param_groups
        factors = [lr_lambda] * len(groups) if callable(lr_lambda) else list(lr_lambda)

        def schedule(lr: float, factor: Rate) -> Rate:
            return lambda t: lr * factor(t)

        # Not as many factors as groups: the base class says so.
        pairs = zip(groups, factors, strict=False)
        schedules = [schedule(group["lr"], factor) for group, factor in pairs]
        super().__init__(optimizer, schedules if len(factors) == len(groups) else factors)
