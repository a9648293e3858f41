"""Learning rates as pure functions of the step: `schedule(t)` is the rate of step t = 0, 1, ….

A schedule is given to an optimizer (`SGD(params, lr=Cosine(0.1, 1000))`), expanded into a list
(`schedule.rates(1000)`), or driven by a scheduler (`LRScheduler(optimizer, schedule)`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from simparallel.autograd import Tensor
from simparallel.backend import is_array, to_host
from simparallel.base.checks import check_count, check_integer, check_number
from simparallel.base.hints import answer_unknown_names
from simparallel.errors import InputError

Rate = Callable[[int], float]


class Schedule:
    """Base of schedules: a subclass defines `__call__`, the rate of a step."""

    _checks: ClassVar[Mapping[str, Callable[[str, str, Any], Any]]] = {}

    def __call__(self, step: int) -> float:
        raise TypeError(f"{type(self).__name__} does not define __call__")

    def rates(self, num_steps: int) -> list[float]:
        """Return the rates of steps 0 … num_steps-1."""
        return [self(step) for step in range(num_steps)]

    def __post_init__(self) -> None:
        for name, check in self._checks.items():
            check(type(self).__name__, name, getattr(self, name))


@dataclass(frozen=True)
class Constant(Schedule):
    """lr(t) = lr"""

    _checks = {"lr": check_number}

    lr: float

    def __call__(self, step: int) -> float:
        return float(self.lr)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """lr(t) = lr * gamma ** floor(t / step_size)

    Args:
        lr: the first rate.
        step_size: steps between two decays, 1 or more.
        gamma: factor of each decay, 0 or more.

    Raises:
        InputError: a setting out of range, as in all schedules.
    """

    _checks = {"lr": check_number, "gamma": check_number, "step_size": check_count}

    lr: float
    step_size: int
    gamma: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.lr * self.gamma ** (step // self.step_size))


@dataclass(frozen=True)
class Warmup(Schedule):
    """lr(t) = start + (lr - start) t / warmup_steps for t < warmup_steps, and `after(u)` from then on.

    Base of schedules with a linear warm-up: Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2. A subclass
    defines `after`, the decay. Its argument u = (t - warmup_steps) / (total_steps - warmup_steps) rises from 0 to 1 at
    `total_steps`, and stays 1.

    Args:
        lr: the highest rate, reached at step `warmup_steps`.
        total_steps: step at which the rate reaches `end`, 1 or more.
        warmup_steps: steps of the warm-up, 0 … total_steps.
        start: the rate of step 0, if there is a warm-up.
        end: the rate of step `total_steps` and later.
    """

    _checks = {
        **dict.fromkeys(("lr", "start", "end"), check_number), "total_steps": check_count,
        "warmup_steps": check_integer,
    }  # fmt: skip

    lr: float
    total_steps: int
    warmup_steps: int = 0
    start: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps > self.total_steps:
            raise InputError(
                f"{type(self).__name__}: warmup_steps={self.warmup_steps} is more than "
                f"total_steps={self.total_steps}; the total includes the warm-up."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return float(self.start + (self.lr - self.start) * step / self.warmup_steps)
        rest = self.total_steps - self.warmup_steps
        return float(self.after(min(1.0, (step - self.warmup_steps) / rest) if rest else 1.0))

    def after(self, over: float) -> float:
        """Return the rate at u = `over`, the fraction of the steps after the warm-up that is done: 0 to 1."""
        raise TypeError(f"{type(self).__name__} does not define after")


@dataclass(frozen=True)
class Linear(Warmup):
    """A linear warm-up, then a linear decay: lr(t) = lr - (lr - end) u. Arguments and u as for `Warmup`."""

    def after(self, over: float) -> float:
        return self.lr - (self.lr - self.end) * over


@dataclass(frozen=True)
class WarmupCosine(Warmup):
    """A linear warm-up, then a half cosine: lr(t) = end + (lr - end) (1 + cos(pi u)) / 2. Else as for `Warmup`."""

    def after(self, over: float) -> float:
        return self.end + (self.lr - self.end) * (1 + math.cos(math.pi * over)) / 2


@dataclass(frozen=True)
class Cosine(Schedule):
    """lr(t) = eta_min + (lr - eta_min) (1 + cos(pi t / total_steps)) / 2, eta_min afterwards.

    Loshchilov and Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", equation 5.

    Args:
        lr: the rate of step 0.
        total_steps: step at which the rate reaches `eta_min`, 1 or more.
        eta_min: the last rate, 0 or more.
    """

    _checks = {"lr": check_number, "eta_min": check_number, "total_steps": check_count}

    lr: float
    total_steps: int
    eta_min: float = 0.0

    def __call__(self, step: int) -> float:
        over = min(1.0, step / self.total_steps)
        return float(self.eta_min + (self.lr - self.eta_min) * (1 + math.cos(math.pi * over)) / 2)


class Rates(Schedule):
    """lr(t) = rates[t]: an explicit list.

    Args:
        rates: numbers of 0 or more, one a step; a list, or a 1-D array or Tensor.
        who: name of the caller in errors.

    Raises:
        InputError: an empty list or a bad rate; when called, a step beyond the end.
    """

    def __init__(self, rates: Any, who: str = "Rates") -> None:
        if isinstance(rates, Tensor):
            rates = rates.data
        self._rates = to_host(rates).tolist() if is_array(rates) else list(rates)
        self._who = who
        if not self._rates:
            raise InputError(f"{who}: the list of learning rates is empty; give one for each step.")
        for step, rate in enumerate(self._rates):
            check_number(who, f"lr[{step}]", rate)

    def __call__(self, step: int) -> float:
        if step >= len(self._rates):
            raise InputError(
                f"{self._who}: the list of learning rates has {len(self._rates)} entries, but this is step {step} "
                "(counted from 0). Make it as long as the training, or use a schedule such as Cosine."
            )
        return float(self._rates[step])


def as_schedule(who: str, lr: Any, step: int) -> tuple[Any, Rate | None]:
    """Return the rate of `step` and, unless `lr` is a plain number, its schedule.

    A value that is neither a number, a list, a 1-D array nor a callable is returned unchanged; the check of
    the settings refuses it.

    Args:
        who: name of the caller in errors.
        lr: a number, a list, a 1-D array or a callable of the step.
        step: number of the step, from 0.
    """
    # A 0-d array is a plain number; 1-D arrays and lists become `Rates`; other callables are schedules already.
    data = lr.data if isinstance(lr, Tensor) else lr
    if is_array(data) and data.ndim == 0:
        return data.item(), None
    if is_array(data) or (isinstance(data, Sequence) and not isinstance(data, (str, bytes))):
        schedule: Rate = Rates(data, who)
    elif callable(data):
        schedule = data
    else:
        return lr, None
    return schedule(step), schedule


answer_unknown_names(__name__)
