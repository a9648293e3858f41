"""Schedulers that scale the current rate of a group, so that several may work on one optimizer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from functools import partial

from simparallel.base.checks import check_count, check_integer, check_number
from simparallel.optim.lr_scheduler.base import LRScheduler
from simparallel.optim.optimizer import Optimizer


def check_each(who: str, name: str, values: Iterable[int]) -> None:
    """Raise InputError unless all values are integers of 0 or more."""
    for i, value in enumerate(values):
        check_integer(who, f"{name}[{i}]", value)


class Relative(LRScheduler):
    """Base of schedulers that compute rates in closed form, from the initial rate and the number of the step.

    If a program or another scheduler has changed the rate, the next one is derived from the current rate, as in
    PyTorch.
    """

    def _first(self, i: int) -> float:
        lr = self.optimizer.param_groups[i]["lr"]
        return self._rate(i, 0) if lr == self.base_lrs[i] else self._start(lr)

    def _next(self, i: int, number: int) -> float:
        lr = self.optimizer.param_groups[i]["lr"]
        # The closed form accumulates no rounding errors. It holds if nobody else has changed the rate.
        if lr == self._rate(i, self.last_epoch):
            return self._rate(i, number)
        check_number(self._name, f"lr of group {i}", lr)
        return self._continued(i, lr, number)

    def _start(self, lr: float) -> float:
        """Return the first rate of a group whose rate another scheduler has changed to `lr`."""
        raise TypeError(f"{self._name} does not define _start")

    def _continued(self, i: int, lr: float, number: int) -> float:
        """Return the rate of group i at this number, given its rate `lr` at the previous number."""
        raise TypeError(f"{self._name} does not define _continued")


class Factor(Relative):
    """Base of schedulers with lr(t) = lr * factor(t), from each group's own lr. A subclass defines `factor`."""

    def factor(self, number: int) -> float:
        raise TypeError(f"{self._name} does not define factor")

    def _rate(self, i: int, number: int) -> float:
        return self.base_lrs[i] * self.factor(number)

    def _start(self, lr: float) -> float:
        return lr * self.factor(0)

    def _continued(self, i: int, lr: float, number: int) -> float:
        # Scale by the ratio of successive factors; equal factors must leave the rate bit-identical.
        before, after = self.factor(number - 1), self.factor(number)
        return lr if before == after else lr * after / before if before else 0.0


class StepLR(Factor):
    """lr(t) = lr * gamma ** floor(t / step_size), from each group's own lr.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        step_size: epochs (or steps) between two decays, 1 or more.
        gamma: factor of each decay, 0 or more.
    """

    settings = {"step_size": check_count, "gamma": check_number}

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = step_size, gamma
        self._begin(optimizer, last_epoch)

    def factor(self, number: int) -> float:
        return self.gamma ** (number // self.step_size)


class MultiStepLR(Factor):
    """lr(t) = lr * gamma ** (number of milestones that are t or less), from each group's own lr.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        milestones: epochs (or steps), 0 or more; duplicates count repeatedly.
        gamma: factor of each decay, 0 or more.
    """

    settings = {"milestones": check_each, "gamma": check_number}

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = list(milestones), gamma
        self._begin(optimizer, last_epoch)

    def _check_settings(self) -> None:
        super()._check_settings()
        self.milestones = sorted(self.milestones)

    def factor(self, number: int) -> float:
        return self.gamma ** bisect_right(self.milestones, number)


class ExponentialLR(Factor):
    """lr(t) = lr * gamma ** t, from each group's own lr; gamma is 0 or more, `last_epoch` as in `LRScheduler`."""

    settings = {"gamma": check_number}

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        self._begin(optimizer, last_epoch)

    def factor(self, number: int) -> float:
        return self.gamma**number


class LinearLR(Factor):
    """lr(t) = lr * (start_factor + (end_factor - start_factor) min(t / total_iters, 1)), from each group's own lr.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        start_factor: above 0, at most 1.
        end_factor: 0 to 1.
        total_iters: the epoch (or step) at which `end_factor` is reached, 1 or more.
    """

    settings = {
        "start_factor": partial(check_number, above=0.0, high=1.0), "end_factor": partial(check_number, high=1.0),
        "total_iters": check_count,
    }  # fmt: skip

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        self._begin(optimizer, last_epoch)

    def factor(self, number: int) -> float:
        over = min(number, self.total_iters) / self.total_iters
        return self.start_factor + (self.end_factor - self.start_factor) * over


class ConstantLR(Factor):
    """lr(t) = lr * factor while t < total_iters, then lr; from each group's own lr.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        factor: 0 to 1.
        total_iters: the epoch (or step) at which the factor ends, 0 or more.
    """

    def __init__(
        self, optimizer: Optimizer, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        check_number(self._name, "factor", factor, high=1.0)
        check_integer(self._name, "total_iters", total_iters)
        self._factor, self.total_iters = factor, total_iters
        self._begin(optimizer, last_epoch)

    def factor(self, number: int) -> float:
        return self._factor if number < self.total_iters else 1.0


class PolynomialLR(Factor):
    """lr(t) = lr * (1 - min(t / total_iters, 1)) ** power, from each group's own lr.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        total_iters: the epoch (or step) at which the rate reaches 0, 1 or more.
        power: 0 or more.
    """

    settings = {"total_iters": check_count, "power": check_number}

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters, self.power = total_iters, power
        self._begin(optimizer, last_epoch)

    def factor(self, number: int) -> float:
        return (1.0 - min(number, self.total_iters) / self.total_iters) ** self.power


class CosineAnnealingLR(Relative):
    """lr(t) = eta_min + (lr - eta_min) (1 + cos(pi t / T_max)) / 2, from each group's own lr.

    As in PyTorch the rate rises again after `T_max`, unlike `schedules.Cosine`, which stays at `eta_min`.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        T_max: half a period, 1 or more.
        eta_min: the lowest rate, 0 or more.
    """

    settings = {"T_max": check_count, "eta_min": check_number}

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max, self.eta_min = T_max, eta_min
        self._begin(optimizer, last_epoch)

    def _rate(self, i: int, number: int) -> float:
        return self.eta_min + (self.base_lrs[i] - self.eta_min) * self._wave(number) / 2

    def _start(self, lr: float) -> float:
        return lr

    def _continued(self, i: int, lr: float, number: int) -> float:
        if (number - 1) % (2 * self.T_max) == self.T_max:
            # The previous rate is the minimum: its wave is 0, so there is no ratio to scale by.
            return lr + (self.base_lrs[i] - self.eta_min) * self._wave(number) / 2
        return self.eta_min + (lr - self.eta_min) * self._wave(number) / self._wave(number - 1)

    def _wave(self, number: int) -> float:
        return 1 + math.cos(math.pi * number / self.T_max)
