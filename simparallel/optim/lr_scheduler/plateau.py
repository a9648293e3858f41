"""`ReduceLROnPlateau`: lowers the learning rates when a metric stops improving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from simparallel.base.checks import check_choice, check_integer, check_number
from simparallel.errors import InputError, StateDictError
from simparallel.optim.lr_scheduler.base import LRScheduler
from simparallel.optim.optimizer import Optimizer


class ReduceLROnPlateau(LRScheduler):
    """lr = max(lr * factor, min_lr) when a metric has not improved for more than `patience` epochs.

    Args:
        optimizer: its groups' learning rates are changed.
        mode: "min", smaller is better, or "max".
        factor: 0 or more, below 1.
        patience: consecutive epochs without improvement that are tolerated, 0 or more.
        threshold: an improvement must exceed this.
        threshold_mode: unit of the threshold: "rel", share of the best value, or "abs".
        cooldown: epochs after a change that do not count as bad.
        min_lr: the lowest rate, for all groups or a list.
        eps: changes of the rate up to this are skipped.

    Attributes:
        last_epoch: number of metrics given to `step`.
        best: the best of them.
        num_bad_epochs: consecutive epochs without improvement.
        cooldown_counter: remaining epochs of the cooldown.

    Raises:
        InputError: a setting out of range, or an optimizer whose lr is a schedule.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        check_choice(self._name, "mode", mode, ("min", "max"))
        check_choice(self._name, "threshold_mode", threshold_mode, ("rel", "abs"))
        check_number(self._name, "factor", factor, below=1.0)
        check_number(self._name, "threshold", threshold)
        check_number(self._name, "eps", eps)
        check_integer(self._name, "patience", patience)
        check_integer(self._name, "cooldown", cooldown)
        for number in self._one_each("min_lr", min_lr, optimizer):
            check_number(self._name, "min_lr", number)
        self._check_free(optimizer)
        self.optimizer, self.last_epoch = optimizer, 0
        self.mode, self.factor, self.patience, self.threshold = mode, factor, patience, threshold
        self.threshold_mode, self.cooldown, self.min_lr, self.eps = threshold_mode, cooldown, min_lr, eps
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = 0

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        """Record the metric of an epoch: a number, or a Tensor or array of one element. NaN is never better.

        Raises:
            InputError: not a number, or a group was added and `min_lr` is a list; nothing has changed.
        """
        try:
            current = float(metrics)
        except (TypeError, ValueError):
            raise InputError(f"{self._name}: step(metrics) needs a number, got {metrics!r}.") from None
        lowest = self._one_each("min_lr", self.min_lr, self.optimizer)
        is_better, in_cooldown = self._is_better(current), self.cooldown_counter > 0
        # Compute everything first and assign last: an error leaves the state unchanged.
        bad = 0 if is_better or in_cooldown else self.num_bad_epochs + 1
        rates = self.get_last_lr()
        if bad > self.patience:
            for i, lr in enumerate(rates):
                check_number(self._name, f"lr of group {i}", lr)
                lower = max(lr * self.factor, lowest[i])
                rates[i] = lower if lr - lower > self.eps else lr
        self._set(self.last_epoch + 1, rates)
        self.best = current if is_better else self.best
        self.cooldown_counter -= in_cooldown
        self.num_bad_epochs = bad
        if bad > self.patience:
            self.num_bad_epochs, self.cooldown_counter = 0, self.cooldown

    def _is_better(self, current: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        if self.threshold_mode == "rel":
            bar = self.best * (1 + sign * self.threshold)
        else:
            bar = self.best + sign * self.threshold
        return current > bar if self.mode == "max" else current < bar

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: the counters, the best metric, and the rates."""
        return {
            "last_epoch": self.last_epoch, "best": self.best, "num_bad_epochs": self.num_bad_epochs,
            "cooldown_counter": self.cooldown_counter, "rates": self.get_last_lr(),
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume another scheduler's state, and set its rates.

        Raises:
            StateDictError: the state of another kind of scheduler, or of other groups.
            InputError: a bad rate.
        """
        number = self._saved_number(state_dict)
        names = "best", "num_bad_epochs", "cooldown_counter"
        missing = [name for name in names if not isinstance(state_dict.get(name), (int, float))]
        if missing:
            raise StateDictError(
                f"{self._name}: no numbers {', '.join(missing)} in the state, which belongs to another scheduler."
            )
        self._set(number, self._saved_rates(state_dict, "rates", self.get_last_lr()))
        self.best = float(state_dict["best"])
        self.num_bad_epochs, self.cooldown_counter = (int(state_dict[name]) for name in names[1:])
