"""Loss scaling: keep small float16 gradients from becoming 0, and skip a step after an overflow.

Micikevicius et al. 2018, "Mixed precision training", section 3.2. The loss is multiplied by a scale
before backward and the gradients are divided by it before the update. The managers hold the
scale (MindSpore's names and meaning); `GradScaler` applies it (PyTorch's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simparallel.arrays.seam import for_each, totals
from simparallel.autograd import Tensor
from simparallel.autograd.tensor import scale_loss
from simparallel.backend import Array, get_namespace, has_data
from simparallel.base.checks import check_count, check_number, check_state
from simparallel.clock.recorder import observer_of
from simparallel.errors import InputError
from simparallel.optim.blocks import widened
from simparallel.optim.norms import over_slices, scale
from simparallel.optim.optimizer import Optimizer

# Consecutive overflows; after more, no scale will help.
LONGEST_OVERFLOW = 1000


class LossScaleManager:
    """Base of managers: holds the scale, and adapts it to overflows."""

    loss_scale: float

    def get_loss_scale(self) -> float:
        """Return the scale of the current step."""
        return self.loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return whether a step with overflowed gradients is skipped."""
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Report whether the step overflowed; call it once per step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and counters as plain data."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load another manager's state. Raises StateDictError if the names differ."""
        check_state(type(self).__name__, state_dict, vars(self))
        vars(self).update(state_dict)


class FixedLossScaleManager(LossScaleManager):
    """A constant scale.

    Args:
        loss_scale: above 0.
        drop_overflow_update: skip steps that overflow. With False overflow is not checked,
            and in a `Model` (as in MindSpore) the optimizer divides the gradients itself, so
            give it the same scale: `Momentum(..., loss_scale=1024)`.

    Raises:
        InputError: the scale is not above 0.
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        self.loss_scale = check_number("FixedLossScaleManager", "loss_scale", loss_scale, above=0.0)
        self.drop_overflow_update = bool(drop_overflow_update)

    def get_drop_overflow_update(self) -> bool:
        return self.drop_overflow_update


class DynamicLossScaleManager(LossScaleManager):
    """The largest scale that works: divided at an overflow, multiplied after a period without one.

    scale = max(scale / scale_factor, 1) at an overflow; scale = scale * scale_factor after each
    `scale_window` consecutive steps without one.

    Args:
        init_loss_scale: the first scale, 1 or more.
        scale_factor: above 1.
        scale_window: number of steps, 1 or more.

    Raises:
        InputError: a setting out of range; in `update_loss_scale`, more than 1,000 consecutive overflows.
    """

    def __init__(self, init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000) -> None:
        self.loss_scale = check_number("DynamicLossScaleManager", "init_loss_scale", init_loss_scale, low=1.0)
        self.scale_factor = check_number("DynamicLossScaleManager", "scale_factor", scale_factor, above=1.0)
        self.scale_window = check_count("DynamicLossScaleManager", "scale_window", scale_window)
        self.good_steps = 0  # consecutive, since the last overflow or growth
        self.bad_steps = 0  # consecutive

    def update_loss_scale(self, overflow: bool) -> None:
        if overflow:
            self.loss_scale = max(self.loss_scale / self.scale_factor, 1.0)
            self.good_steps = 0
            self.bad_steps += 1
            if self.bad_steps > LONGEST_OVERFLOW:
                raise InputError(
                    f"DynamicLossScaleManager: {self.bad_steps} steps in a row overflowed, the scale is down "
                    f"to {self.loss_scale:g}. Look for NaN in the inputs, or lower the learning rate."
                )
            return
        self.bad_steps = 0
        self.good_steps += 1
        if self.good_steps == self.scale_window:
            self.good_steps = 0
            # Keep the scale finite.
            larger = self.loss_scale * self.scale_factor
            self.loss_scale = larger if larger < float("inf") else self.loss_scale


def all_finite(arrays: Iterable[Tensor | Array]) -> bool:
    """Return whether no element of any array is NaN or infinite; arrays without data count as finite."""
    observer_of(None).read()
    data = [array.data if isinstance(array, Tensor) else array for array in arrays]
    # Integers are finite, and the kernels take none.
    data = [x for x in data if has_data(x) and x.dtype.kind in "fc"]
    data = [part for x in data for part in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))]
    return all(value == 0 for value in totals(data, _is_infinite, _differences))


def _is_infinite(x: Array) -> bool:
    return not get_namespace(x).isfinite(x).all()


def _differences(xp: Any, x: Array) -> Array:
    """Return 0 for finite elements, NaN for others."""
    return x - x


_OFF = FixedLossScaleManager(1.0, drop_overflow_update=False)
_DEFAULTS = 2.0**16, 2.0, 0.5, 2000


class GradScaler:
    """Mixed-precision helper: scales the loss, unscales the gradients, and steps only if they are finite.

    Example:
        >>> from simparallel import nn, optim
        >>> model = nn.Linear(2, 1)
        >>> optimizer, scaler = optim.SGD(model.parameters()), optim.GradScaler()
        >>> loss = model([[1.0, 2.0]]).sum()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        True
        >>> scaler.update()

    Args:
        manager: holds the scale; None makes `DynamicLossScaleManager(init_scale, growth_factor,
            growth_interval)`. The settings below apply only to that one.
        reduce_overflow: maps this rank's flag to whether any rank overflowed. All ranks must
            skip the same steps, or their weights diverge. Not needed if the gradients
            are all-reduced before unscaling: they are then equal on all ranks.
        init_scale: the first scale, 1 or more.
        growth_factor: factor of the scale after `growth_interval` good steps, above 1.
        backoff_factor: factor at an overflow; must be 1 / growth_factor, because the manager has one factor
            for both. The scale does not go below 1.
        growth_interval: steps without an overflow before the scale grows.
        enabled: False scales by 1 and skips no step, ignoring the other settings, so that the same program runs
            without mixed precision. The state is then empty.

    Raises:
        InputError: a setting out of range; `unscale_` or `step` twice before `update`, a step without any gradient,
            or an optimizer that divides the gradients by its own `loss_scale`.
    """

    def __init__(
        self,
        manager: LossScaleManager | None = None,
        reduce_overflow: Callable[[bool], bool] | None = None,
        *,
        init_scale: float = _DEFAULTS[0],
        growth_factor: float = _DEFAULTS[1],
        backoff_factor: float = _DEFAULTS[2],
        growth_interval: int = _DEFAULTS[3],
        enabled: bool = True,
    ) -> None:
        self._enabled = bool(enabled)
        if not enabled:
            manager, init_scale, growth_factor, backoff_factor, growth_interval = _OFF, *_DEFAULTS
        settings = init_scale, growth_factor, backoff_factor, growth_interval
        if manager is None:
            manager = DynamicLossScaleManager(init_scale, growth_factor, growth_interval)
            if growth_factor * backoff_factor != 1:
                raise InputError(
                    f"GradScaler: growth_factor={growth_factor!r} and backoff_factor={backoff_factor!r} must be "
                    "inverses of each other; for other factors write your own LossScaleManager."
                )
        elif settings != _DEFAULTS:
            raise InputError(f"GradScaler: a {type(manager).__name__} has its own settings; pass them to it.")
        self.manager = manager
        self.reduce_overflow = reduce_overflow
        self._overflow_of: dict[int, bool] = {}  # id of an optimizer with unscaled gradients -> overflow
        self._stepped: set[int] = set()  # ids of optimizers that have stepped since `update`

    def scale(self, loss: Any) -> Any:
        """Return loss * scale, with gradients; for a list or tuple of losses, one of the scaled losses.

        If the manager drops steps that overflow, a finite loss times the scale may be infinite: its gradients are then
        infinite too, and the step is skipped.
        """
        if isinstance(loss, (list, tuple)):
            return type(loss)([self.scale(one) for one in loss])
        if not isinstance(loss, Tensor):
            raise InputError(f"GradScaler: scale needs a Tensor or a list of them, got {type(loss).__name__}.")
        return scale_loss(loss, self.manager.get_loss_scale(), self.manager.get_drop_overflow_update())

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of the optimizer's parameters by the scale, in place.

        Call it to clip between backward and `step`; otherwise `step` calls it. A float16 gradient becomes
        float32 in a new Tensor, because in float16 the small values that the scale saved would become 0 again.
        Collective: yes, if any gradient is sharded: all ranks skip the same steps.

        Returns:
            Whether a gradient (of any rank, see `reduce_overflow`) is NaN or infinite. Always False
            if the manager does not drop such steps.
        """
        self._check_not_stepped("unscale_", optimizer)
        if id(optimizer) in self._overflow_of:
            raise InputError(
                "GradScaler: unscale_ was called already for this optimizer since the last update(); "
                "the gradients would be divided twice."
            )
        own_scale = getattr(optimizer, "loss_scale", 1.0)
        if own_scale != 1.0:
            raise InputError(
                f"GradScaler: {type(optimizer).__name__} divides the gradients itself (loss_scale={own_scale:g}), so "
                "they would be divided twice; give it loss_scale=1."
            )
        # Widen before dividing: in float16 the division would underflow.
        tensors = self._widened(optimizer)
        grads = [tensor.data for tensor in tensors]
        factor = 1.0 / float(self.manager.get_loss_scale())
        for_each(scale, [([grad], [factor]) for grad in grads])
        overflow = False
        if self.manager.get_drop_overflow_update():
            overflow = not all_finite(grads)
            reduce = self.reduce_overflow or (lambda flag: over_slices([flag], tensors, "max")[0] > 0)
            overflow = bool(reduce(overflow))
        self._overflow_of[id(optimizer)] = overflow
        return overflow

    def _widened(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients, widened to at least float32."""
        found = []
        for param in optimizer.parameters:
            if param.grad is None:
                continue
            grad = widened(param.grad.data)
            if grad is not param.grad.data and self._enabled:
                param.grad = param._gradient(grad)
            found.append(param.grad)
        return found

    def step(self, optimizer: Optimizer) -> bool:
        """Call `optimizer.step()`, unless the gradients overflowed. Return whether it stepped."""
        self._check_not_stepped("step", optimizer)
        # If ranks agree on the overflow, a rank may lack gradients, but it must still take part in the exchange.
        needs_one = self._enabled and self.reduce_overflow is None
        # Without a gradient the step would silently do nothing.
        if needs_one and all(param.grad is None for param in optimizer.parameters):
            raise InputError(
                f"GradScaler: no parameter of {type(optimizer).__name__} has a gradient, so there is nothing to step "
                "with; call scaler.scale(loss).backward() first, and zero_grad() after the step."
            )
        if id(optimizer) not in self._overflow_of:
            self.unscale_(optimizer)
        overflow = self._overflow_of[id(optimizer)]
        if not overflow:
            optimizer.step()
        self._stepped.add(id(optimizer))
        return not overflow

    def _check_not_stepped(self, what: str, optimizer: Optimizer) -> None:
        if self._enabled and id(optimizer) in self._stepped:
            raise InputError(
                f"GradScaler: {what}() follows step() of this {type(optimizer).__name__} without an update() in "
                "between; call scaler.update() at the end of each step."
            )

    def update(self) -> None:
        """End the step: report to the manager whether any optimizer's gradients overflowed."""
        overflow = any(self._overflow_of.values())
        self._overflow_of, self._stepped = {}, set()
        self.manager.update_loss_scale(overflow)

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale for the next `scale(loss)`."""
        return self.manager.get_loss_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the manager's state as plain data; save it between steps."""
        return self.manager.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from another scaler's state; a disabled scaler ignores it."""
        if self._enabled:
            self.manager.load_state_dict(state_dict)
