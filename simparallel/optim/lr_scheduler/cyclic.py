"""Cyclic learning rates, with momentum moving in the opposite direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simparallel.base.checks import check_choice, check_count, check_number
from simparallel.errors import InputError
from simparallel.optim.lr_scheduler.base import LRScheduler
from simparallel.optim.optimizer import Optimizer


class MomentumScheduler(LRScheduler):
    """Base: also sets the momentum (or beta 1) of the groups. A subclass defines `_momentum`."""

    # None leaves momentum unchanged.
    _momentum_name: str | None = None

    def _momentum(self, i: int, number: int) -> float:
        """Return the momentum of group i at a number."""
        raise TypeError(f"{self._name} does not define _momentum")

    def _take_momentum(self, optimizer: Optimizer, **limits: float | Sequence[float]) -> list[tuple[float, ...]]:
        """Find the name of the momentum setting; return these limits of it for each group.

        Raises:
            InputError: the optimizer has neither momentum nor betas, or a limit is out of range.
        """
        self._momentum_name = next((name for name in ("betas", "momentum") if name in optimizer.defaults), None)
        if self._momentum_name is None:
            raise InputError(
                f"{self._name}: {type(optimizer).__name__} has neither momentum nor betas; give cycle_momentum=False."
            )
        each = [self._numbers(name, value, optimizer, 1.0) for name, value in limits.items()]
        return list(zip(*each, strict=True))

    def _set(self, number: int, rates: Sequence[float]) -> None:
        super()._set(number, rates)
        if self._momentum_name is None:
            return
        for i, group in enumerate(self.optimizer.param_groups):
            momentum = self._momentum(i, number)
            is_beta = self._momentum_name == "betas"
            # For Adam's betas only beta 1 acts as momentum.
            group[self._momentum_name] = (momentum, *group["betas"][1:]) if is_beta else momentum

    def _numbers(self, name: str, value: Any, optimizer: Optimizer, below: float = math.inf) -> list[float]:
        """Return the setting as one checked number for each group."""
        values = self._one_each(name, value, optimizer)
        for number in values:
            check_number(self._name, name, number, below=below)
        return values


class CyclicLR(MomentumScheduler):
    """Linear cycles from `base_lr` up to `max_lr` and back.

    Smith 2017, "Cyclical learning rates for training neural networks", as in PyTorch. The momentum (or beta 1)
    moves from `max_momentum` down to `base_momentum` and back. Call `step()` after each step of the optimizer.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        base_lr, max_lr: the lowest and the highest rate, for all groups or lists.
        step_size_up, step_size_down: steps up and down; None uses step_size_up for both.
        mode: height of the cycles: "triangular" constant, "triangular2" halved with each cycle,
            "exp_range" gamma ** t at step t.
        gamma: base of "exp_range".
        scale_fn: replaces `mode`: returns the factor of the height.
        scale_mode: argument of `scale_fn`: "cycle", the cycle's number from 1, or "iterations", the step.
        cycle_momentum: False leaves momentum unchanged.
        base_momentum, max_momentum: the lowest and the highest momentum, for all groups or lists.

    Raises:
        InputError: a setting out of range; also as for `LRScheduler`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | Sequence[float],
        max_lr: float | Sequence[float],
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[int], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.8,
        max_momentum: float | Sequence[float] = 0.9,
        last_epoch: int = -1,
    ) -> None:
        check_number(self._name, "gamma", gamma)
        self.step_size_up = check_count(self._name, "step_size_up", step_size_up)
        down = step_size_up if step_size_down is None else step_size_down
        self.step_size_down = check_count(self._name, "step_size_down", down)
        check_choice(self._name, "mode", mode, ("triangular", "triangular2", "exp_range"))
        check_choice(self._name, "scale_mode", scale_mode, ("cycle", "iterations"))
        self.mode, self.gamma, self.scale_mode = mode, gamma, scale_mode
        self._scale_fn = scale_fn
        lowest = self._numbers("base_lr", base_lr, optimizer)
        self._max_lrs = self._numbers("max_lr", max_lr, optimizer)
        if cycle_momentum:
            limits = {"base_momentum": base_momentum, "max_momentum": max_momentum}
            self._momentums = self._take_momentum(optimizer, **limits)
        self._begin(optimizer, last_epoch, lowest)

    def _rate(self, i: int, number: int) -> float:
        return self.base_lrs[i] + (self._max_lrs[i] - self.base_lrs[i]) * self._height(number)

    def _momentum(self, i: int, number: int) -> float:
        low, high = self._momentums[i]
        return high - (high - low) * self._height(number)

    def _height(self, number: int) -> float:
        """Return the position between the lowest rate (0) and the highest (1)."""
        # `before` complete cycles, then `step` steps into the current one.
        before, step = divmod(number, self.step_size_up + self.step_size_down)
        up, down = self.step_size_up, self.step_size_down
        height = step / up if step <= up else (up + down - step) / down
        return height * self._scale(before + 1, number)

    def _scale(self, cycle: int, number: int) -> float:
        if self._scale_fn is not None:
            return self._scale_fn(cycle if self.scale_mode == "cycle" else number)
        if self.mode == "triangular2":
            return 0.5 ** (cycle - 1)
        return self.gamma**number if self.mode == "exp_range" else 1.0


class CosineAnnealingWarmRestarts(LRScheduler):
    """lr(t) = eta_min + (lr - eta_min) (1 + cos(pi s / S)) / 2, at step s of a cycle of S steps, repeated.

    Loshchilov and Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", as in PyTorch.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        T_0: length of the first cycle, 1 or more.
        T_mult: factor of the length from one cycle to the next, 1 or more.
        eta_min: the lowest rate, 0 or more.

    Attributes:
        T_cur: position in the cycle; fractional after `step(epoch)` with a fraction.
        T_i: length of the cycle.
    """

    settings = {"T_0": check_count, "T_mult": check_count, "eta_min": check_number}

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        self._place = float(last_epoch + 1)
        self._begin(optimizer, last_epoch)

    def step(self, epoch: float | None = None) -> None:
        """Advance by 1, or to any position, such as `epoch + step / steps_per_epoch`. An InputError changes nothing."""
        self._check_groups()
        place = self._place + 1 if epoch is None else epoch
        check_number(self._name, "epoch", place)
        place = float(place)
        self._set(math.floor(place), [self._at(i, place) for i in range(len(self.base_lrs))])
        self._place = place

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: the position, and the initial and current rates of each group."""
        return {**super().state_dict(), "place": self._place}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume another scheduler's state. Raises as `LRScheduler.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._place = float(state_dict.get("place", self.last_epoch))

    @property
    def T_cur(self) -> float:
        return self._cycle(self._place)[0]

    @property
    def T_i(self) -> int:
        return self._cycle(self._place)[1]

    def _rate(self, i: int, number: int) -> float:
        return self._at(i, float(number))

    def _at(self, i: int, place: float) -> float:
        step, length = self._cycle(place)
        return self.eta_min + (self.base_lrs[i] - self.eta_min) * (1 + math.cos(math.pi * step / length)) / 2

    def _cycle(self, place: float) -> tuple[float, int]:
        if self.T_mult == 1:
            return place % self.T_0, self.T_0
        # Cycles grow by T_mult: subtract complete cycles until the position is inside one.
        length = self.T_0
        while place >= length:
            place, length = place - length, length * self.T_mult
        return place, length


Point = tuple[float, int]  # step, and index of the level (lowest, initial or highest rate) reached there
LAST, FIRST, TOP = range(3)


class OneCycleLR(MomentumScheduler):
    """One cycle from max_lr / div_factor up to `max_lr`, and down to max_lr / div_factor / final_div_factor.

    Smith and Topin 2018, "Super-convergence", as in PyTorch. The momentum (or beta 1) moves from `max_momentum` down
    to `base_momentum` and back. Call `step()` after each step of the optimizer. Call number `total_steps`
    keeps the last rate; one more call is an error.

    Args:
        optimizer, last_epoch: see `LRScheduler`.
        max_lr: the highest rate, for all groups or a list.
        total_steps: steps of the whole cycle; alternatively give the next two.
        epochs, steps_per_epoch: total_steps = epochs * steps_per_epoch.
        pct_start: share of the steps with a rising rate, 0 to 1.
        anneal_strategy: "cos" or "linear".
        cycle_momentum: False leaves momentum unchanged.
        base_momentum, max_momentum: the lowest and the highest momentum, for all groups or lists.
        div_factor: the initial rate is max_lr / div_factor.
        final_div_factor: the last rate is the initial rate / final_div_factor.
        three_phase: descend to the initial rate as fast as the ascent, and from there to the last rate.

    Raises:
        InputError: a setting out of range; also as for `LRScheduler`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise InputError(f"{self._name}: give total_steps, or epochs and steps_per_epoch.")
            per_epoch = check_count(self._name, "steps_per_epoch", steps_per_epoch)
            total_steps = check_count(self._name, "epochs", epochs) * per_epoch
        check_count(self._name, "total_steps", total_steps)
        check_number(self._name, "pct_start", pct_start, high=1.0)
        check_choice(self._name, "anneal_strategy", anneal_strategy, ("cos", "linear"))
        for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
            check_number(self._name, name, factor, above=0.0)
        self.total_steps, self.anneal_strategy = total_steps, anneal_strategy
        self._points = _points(float(pct_start), total_steps, three_phase)
        tops = self._numbers("max_lr", max_lr, optimizer)
        # Levels for each group, in the order of LAST, FIRST, TOP.
        self._lrs = [(top / div_factor / final_div_factor, top / div_factor, top) for top in tops]
        if cycle_momentum:
            limits = self._take_momentum(optimizer, max_momentum=max_momentum, base_momentum=base_momentum)
            self._momentums = [(high, high, low) for high, low in limits]
        self._begin(optimizer, last_epoch, [first for _, first, _ in self._lrs])

    def _rate(self, i: int, number: int) -> float:
        if number > self.total_steps:
            raise InputError(
                f"{self._name}: step {number} is beyond the cycle of {self.total_steps}; make total_steps as long as "
                "the training."
            )
        return self._at(number, self._lrs[i])

    def _momentum(self, i: int, number: int) -> float:
        return self._at(number, self._momentums[i])

    def _at(self, number: int, levels: tuple[float, float, float]) -> float:
        """Return the value of the curve at step `number`; `levels` are the values at LAST, FIRST and TOP."""
        # Find the segment of the curve that contains the step.
        i = 1
        while number > self._points[i][0] and i < len(self._points) - 1:
            i += 1
        (start, from_level), (end, to_level) = self._points[i - 1 : i + 1]
        over = min(max((number - start) / (end - start), 0.0), 1.0) if end != start else 1.0
        first, last = levels[from_level], levels[to_level]
        if self.anneal_strategy == "linear":
            return first + (last - first) * over
        return last + (first - last) / 2 * (math.cos(math.pi * over) + 1)


def _points(pct_start: float, total_steps: int, three_phase: bool) -> list[Point]:
    """Return the turning points of the curve, for the arguments of `OneCycleLR`."""
    # Steps count from 0, so the top is one less than its share of the steps; the way back is as long as the way up.
    top = pct_start * total_steps - 1
    back = [(2 * pct_start * total_steps - 2, FIRST)] if three_phase else []
    return [(0.0, FIRST), (top, TOP), *back, (total_steps - 1.0, LAST)]
