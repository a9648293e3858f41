"""`LRScheduler`: sets the learning rates of an optimizer's groups, epoch by epoch or step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

from simparallel.base.checks import check_integer, check_number
from simparallel.errors import InputError, StateDictError
from simparallel.optim.optimizer import Optimizer
from simparallel.optim.schedules import Rate


class LRScheduler:
    """Base of the schedulers: sets the learning rates of an optimizer; `step()` advances to the next ones.

    Call `step()` after `optimizer.step()`: once per epoch or once per step, in the unit of the schedule.
    The first rates are set at construction.

    Args:
        optimizer: its groups' learning rates are changed.
        schedule: number of the epoch (or step) -> rate; one for all groups, or a list with one for each.
        last_epoch: the last number done. -1 starts anew and stores the rate of each group as its
            "initial_lr", unless it has one (from an earlier scheduler, or loaded). Otherwise continue with
            `last_epoch` + 1, from the "initial_lr" that must then exist.

    Attributes:
        last_epoch: the number of the current rates; PyTorch's name.
        base_lrs: the initial rate of each group.

    Raises:
        InputError: not one schedule for each group, a bad rate, an optimizer whose lr is a schedule, or no
            "initial_lr" to continue from.
    """

    # Attributes that belong to the state, and their checks.
    settings: ClassVar[Mapping[str, Callable[[str, str, Any], Any]]] = {}

    optimizer: Optimizer
    schedules: Sequence[Rate]
    base_lrs: list[float]
    last_epoch: int

    def __init__(self, optimizer: Optimizer, schedule: Rate | Sequence[Rate], last_epoch: int = -1) -> None:
        self.schedules = self._one_each("schedules", schedule, optimizer)
        self._begin(optimizer, last_epoch)

    def step(self) -> None:
        """Set the next rates. An InputError (a bad rate, added groups) leaves everything unchanged."""
        self._check_groups()
        number = self.last_epoch + 1
        self._set(number, [self._next(i, number) for i in range(len(self.base_lrs))])

    def get_last_lr(self) -> list[float]:
        """Return the current rates, one for each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: the current number, the initial and current rates of each group, and the settings."""
        settings = {name: copy(getattr(self, name)) for name in self.settings}
        return settings | {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs), "rates": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume another scheduler's state: its number, settings and rates.

        Raises:
            StateDictError: `last_epoch` is not a number of 0 or more, or the rates belong to other groups.
            InputError: a bad rate or setting; nothing has changed.
        """
        number = self._saved_number(state_dict)
        self._check_groups()
        bases = self._saved_rates(state_dict, "base_lrs", self.base_lrs)
        # Set everything, check, and roll back on any error, so that a refused state changes nothing.
        before = {name: getattr(self, name) for name in ("base_lrs", *self.settings)}
        saved = {name: copy(state_dict[name]) for name in self.settings if name in state_dict}
        try:
            vars(self).update(saved, base_lrs=bases)
            self._check_settings()
            computed = [self._rate(i, number) for i in range(len(bases))]
            self._set(number, self._saved_rates(state_dict, "rates", computed))
        except BaseException:
            vars(self).update(before)
            raise
        for group, base in zip(self.optimizer.param_groups, bases, strict=True):
            group["initial_lr"] = base

    # --- hooks for subclasses ------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Raise InputError for settings out of range."""
        for name, check in self.settings.items():
            check(self._name, name, getattr(self, name))

    def _rate(self, i: int, number: int) -> float:
        """Return the rate of group i at a number."""
        return self.schedules[i](number)

    def _first(self, i: int) -> float:
        """Return the rate of group i when the scheduler starts."""
        return self._rate(i, 0)

    def _next(self, i: int, number: int) -> float:
        """Return the rate of group i at the number after `last_epoch`."""
        return self._rate(i, number)

    # --- internals -----------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _begin(self, optimizer: Optimizer, last_epoch: int, bases: Sequence[float] | None = None) -> None:
        """Finish construction: set the first rates, from `bases` or from the groups' own rates."""
        self._check_settings()
        check_integer(self._name, "last_epoch", last_epoch, -1)
        self._check_free(optimizer)
        groups = optimizer.param_groups
        if last_epoch >= 0 and not all("initial_lr" in group for group in groups):
            raise InputError(
                f"{self._name}: last_epoch={last_epoch}, but not every parameter group has an 'initial_lr' to continue "
                "from. Load the optimizer's state first, or give the groups one."
            )
        # A new scheduler starts from the groups' rates; a continued one from the stored initial rates.
        is_new = last_epoch == -1
        if bases is None or not is_new:
            bases = [group["initial_lr"] if "initial_lr" in group else group["lr"] for group in groups]
        for i, base in enumerate(bases):
            check_number(self._name, f"lr of group {i}", base)
        self.optimizer, self.base_lrs = optimizer, [float(base) for base in bases]
        number = int(last_epoch) + 1
        self._set(number, [self._first(i) if is_new else self._rate(i, number) for i in range(len(groups))])
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["initial_lr"] = base

    def _check_free(self, optimizer: Optimizer) -> None:
        if any(optimizer.schedules):
            raise InputError(
                f"{self._name}: the optimizer was made with a schedule as its lr, which a scheduler would overwrite; "
                "make it with a number as lr, or leave out the scheduler."
            )

    def _one_each(self, what: str, value: Any, optimizer: Optimizer) -> list[Any]:
        """Return a setting for each group: the given list, or the single value repeated."""
        groups = len(optimizer.param_groups)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
        if len(values) != groups:
            raise InputError(
                f"{self._name}: {len(values)} {what} were given for {groups} parameter groups; "
                "give one for all, or one for each."
            )
        return values

    def _check_groups(self) -> None:
        groups, known = len(self.optimizer.param_groups), len(self.base_lrs)
        if groups != known:
            raise InputError(
                f"{self._name}: the optimizer has {groups} parameter groups, the scheduler was made for {known}. "
                'Give the new group an "initial_lr" (add_param_group({"params": …, "lr": …, "initial_lr": …})) and '
                f"make a scheduler again, with last_epoch={self.last_epoch - 1}."
            )

    def _saved_number(self, state_dict: Any) -> int:
        if not isinstance(state_dict, Mapping):
            raise StateDictError(
                f"{self._name}: load_state_dict needs the dict that state_dict() returned, got a "
                f"{type(state_dict).__name__}."
            )
        number = state_dict.get("last_epoch")
        return check_integer(self._name, "last_epoch", number, error=StateDictError)

    def _saved_rates(self, state_dict: Mapping[str, Any], name: str, default: list[float]) -> list[float]:
        """Return the saved rates of all groups, checked; old states lack them and use the default."""
        rates = state_dict.get(name, default)
        if not isinstance(rates, (list, tuple)) or len(rates) != len(self.optimizer.param_groups):
            raise StateDictError(
                f"{self._name}: {name}={rates!r} must be {len(self.optimizer.param_groups)} numbers, one for each "
                "parameter group."
            )
        for i, rate in enumerate(rates):
            check_number(self._name, f"{name}[{i}]", rate)
        return list(rates)

    def _set(self, number: int, rates: Sequence[float]) -> None:
        for i, rate in enumerate(rates):
            check_number(self._name, f"lr of group {i} at {number}", rate)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.last_epoch = number


class LambdaLR(LRScheduler):
    """lr(t) = lr * factor(t), from each group's own lr; one function for all groups, or a list.

    Args:
        optimizer: the optimizer whose rates it sets.
        lr_lambda: step number to factor; one function, or one for each parameter group.
        last_epoch: number of the last step; -1 to begin.
    """

    def __init__(self, optimizer: Optimizer, lr_lambda: Rate | Sequence[Rate], last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)

    def _rate(self, i: int, number: int) -> float:
        return self.base_lrs[i] * self.schedules[i](number)
