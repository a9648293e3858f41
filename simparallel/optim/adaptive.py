"""Adagrad, Adadelta and RMSprop: learning rates from sums or means of squared gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.base.checks import check_number
from simparallel.optim.blocks import decayed
from simparallel.optim.optimizer import Group, Optimizer, settings_among


class Adagrad(Optimizer):
    """s = s + g²;   p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    at step t, with g = grad + weight_decay p: Duchi et al. 2011, "Adaptive subgradient methods".

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        lr_decay: speed at which the rate falls, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.
        initial_accumulator_value: initial value of s, 0 or more.
        eps: keeps the quotient finite, 0 or more.
        maximize: maximize the loss: reverse the sign of the gradient.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_names = ("sum",)
    state_counts = ("step",)
    numbers = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    flags = ("maximize",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_among(locals()))

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        state, weight_decay = self._remembered(param, group), group["weight_decay"]
        # State arrays start as zeros; the first step sets the initial accumulator.
        if state["step"] == 0:
            state["sum"].fill(group["initial_accumulator_value"])
        lr = group["lr"] / (1 + state["step"] * group["lr_decay"])
        state["step"] += 1
        numbers, decays = (weight_decay, group["eps"], lr), bool(weight_decay)
        self._apply(_adagrad, param, grad, [state["sum"]], numbers, 2, self._plans[id(group)].factor, decays=decays)

    def work(self, group: Group) -> tuple[int, int]:
        # s 2, root, eps, quotient, update 2; read grad, read and write p and s
        return 7 + 2 * bool(group["weight_decay"]) + group["maximize"], 5


def _adagrad(
    xp: Any, p: Array, g: Array, s: Array, weight_decay: float, eps: float, lr: float,
    temporary: Array | None = None, other: Array | None = None, *, decays: bool,
) -> None:  # fmt: skip
    if decays:
        g = decayed(xp, p, g, weight_decay, other)
    s += xp.multiply(g, g, out=temporary)
    quotient = xp.sqrt(s, out=temporary)
    quotient += eps
    quotient = xp.divide(g, quotient, out=temporary)
    quotient *= lr
    p -= quotient


class Adadelta(Optimizer):
    """v = rho v + (1 - rho) g²;   d = g sqrt(u + eps) / sqrt(v + eps);   u = rho u + (1 - rho) d²;   p = p - lr d

    with g = grad + weight_decay p: Zeiler 2012, "ADADELTA: an adaptive learning rate method".

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        rho: decay factor of v and u, 0 to 1.
        eps: added under the roots, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.
        maximize: maximize the loss: reverse the sign of the gradient.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_names = ("square_avg", "acc_delta")  # PyTorch's names for v and u
    state_counts = ("step",)
    numbers = ("lr", "eps", "weight_decay")
    flags = ("maximize",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_among(locals()))

    def check(self, group: Group) -> None:
        super().check(group)
        check_number(self._name, "rho", group["rho"], high=1.0)

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        state, rho, weight_decay = self._remembered(param, group), group["rho"], group["weight_decay"]
        state["step"] += 1
        arrays = [state[name] for name in self.state_names]
        numbers = weight_decay, rho, 1 - rho, group["eps"], group["lr"]
        self._apply(
            _adadelta, param, grad, arrays, numbers, 3, self._plans[id(group)].factor, decays=bool(weight_decay)
        )

    def work(self, group: Group) -> tuple[int, int]:
        # v and u 4 each, two roots of sums, d 2, update 2; read grad, read and write p, v and u
        return 16 + 2 * bool(group["weight_decay"]) + group["maximize"], 7


def _adadelta(
    xp: Any, p: Array, g: Array, v: Array, u: Array, weight_decay: float, rho: float, new: float, eps: float, lr: float,
    d: Array | None = None, temporary: Array | None = None, other: Array | None = None, *, decays: bool,
) -> None:  # fmt: skip
    if decays:
        g = decayed(xp, p, g, weight_decay, other)
    v *= rho
    square = xp.multiply(g, g, out=temporary)
    square *= new
    v += square
    # d = g sqrt(u + eps) / sqrt(v + eps), built up in the work array d.
    d = xp.sqrt(xp.add(u, eps, out=d), out=d)
    d /= xp.sqrt(xp.add(v, eps, out=temporary), out=temporary)
    d *= g
    u *= rho
    square = xp.multiply(d, d, out=temporary)
    square *= new
    u += square
    d *= lr
    p -= d


class RMSprop(Optimizer):
    """v = alpha v + (1 - alpha) g²;   b = momentum b + g / (sqrt(v) + eps);   p = p - lr b

    where g = grad + weight_decay p. With `centered`, v - a² replaces v in the quotient, a = alpha a + (1 - alpha) g.
    Hinton 2012, "Lecture 6.5: rmsprop"; centered: Graves 2013, "Generating sequences with recurrent neural
    networks"; in PyTorch's form, with eps outside the root.

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        alpha: decay factor of v, 0 or more.
        eps: keeps the quotient finite, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.
        momentum: decay factor of b, 0 or more.
        centered: divide by the deviation from the mean gradient. Negative v - a² (by rounding) counts as 0.
        maximize: maximize the loss: reverse the sign of the gradient.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_names = ("square_avg",)  # PyTorch's names for v, and for a and b below
    state_options = ("grad_avg", "momentum_buffer")
    state_counts = ("step",)
    numbers = ("lr", "alpha", "eps", "weight_decay", "momentum")
    flags = ("centered", "maximize")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_among(locals()))

    def remembers(self, group: Group) -> tuple[str, ...]:
        wanted = bool(group["centered"]), bool(group["momentum"])
        return (*self.state_names, *(name for name, is_on in zip(self.state_options, wanted, strict=True) if is_on))

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        lr, alpha, momentum, weight_decay = (group[name] for name in ("lr", "alpha", "momentum", "weight_decay"))
        names, state = self.remembers(group), self._remembered(param, group)
        state["step"] += 1
        v, a, b = (state[name] if name in names else None for name in (*self.state_names, *self.state_options))
        numbers = weight_decay, alpha, 1 - alpha, group["eps"], momentum, lr
        decays = bool(weight_decay)
        self._apply(_rmsprop, param, grad, [v, a, b], numbers, 1 + decays, self._plans[id(group)].factor, decays=decays)

    def work(self, group: Group) -> tuple[int, int]:
        centered, has_momentum = bool(group["centered"]), bool(group["momentum"])
        flops = 9 + 2 * bool(group["weight_decay"]) + 6 * centered + 2 * has_momentum + group["maximize"]
        # v 4, root, eps, quotient and update 2; read grad, read and write p, v and any further state
        return flops, 5 + 2 * centered + 2 * has_momentum


def _rmsprop(
    xp: Any, p: Array, g: Array, v: Array, a: Array | None, b: Array | None,
    weight_decay: float, alpha: float, new: float, eps: float, momentum: float, lr: float,
    temporary: Array | None = None, other: Array | None = None, *, decays: bool,
) -> None:  # fmt: skip
    if decays:
        g = decayed(xp, p, g, weight_decay, other)
    square = xp.multiply(g, g, out=temporary)
    square *= new
    v *= alpha
    v += square
    if a is not None:
        # centered: the denominator uses the variance v - a², clamped because rounding may make it negative.
        change = xp.subtract(g, a, out=temporary)
        change *= new
        a += change
        v = xp.subtract(v, xp.multiply(a, a, out=temporary), out=temporary)
        v = xp.maximum(v, 0, out=temporary)
    quotient = xp.sqrt(v, out=temporary)
    quotient += eps
    quotient = xp.divide(g, quotient, out=temporary)
    if b is not None:
        b *= momentum
        b += quotient
        quotient = xp.multiply(b, lr, out=temporary)
    else:
        quotient *= lr
    p -= quotient
