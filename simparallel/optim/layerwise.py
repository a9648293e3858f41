"""LARS and LAMB: a rate for each parameter tensor, scaled by a ratio of norms, for large batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from simparallel.autograd import Tensor
from simparallel.backend import Array, fused, get_namespace, is_array
from simparallel.base.checks import check_flags, check_number
from simparallel.optim.adam import Adam, advance_moments
from simparallel.optim.blocks import decayed, widened
from simparallel.optim.norms import norm
from simparallel.optim.optimizer import Group, Optimizer


def _rate(
    lr: float, step: Array, p_norm: Any, other: Any, factor: float = 1.0, weight_decay: float = 0.0, eps: float = 0.0
) -> Any:
    """Return lr factor |p| / (other + weight_decay |p| + eps), or lr where a norm is 0.

    For norms on a GPU it is a 0-d array, without a host synchronization.
    """
    numbers = map(float, (lr, factor, weight_decay, eps))
    if is_array(p_norm):
        return fused(get_namespace(step), _rate_on_gpu, dtype=step.dtype)(p_norm, other, *numbers)
    if not (p_norm > 0 and other > 0):
        return lr
    return lr * (factor * p_norm / (other + weight_decay * p_norm + eps))


def _rate_on_gpu(
    xp: Any, p_norm: Array, other: Array, lr: float, factor: float, weight_decay: float, eps: float, *, dtype: Any
) -> Array:
    is_on, below = (p_norm > 0) & (other > 0), other + weight_decay * p_norm + eps
    return (lr * xp.where(is_on, factor * p_norm / xp.where(is_on, below, 1.0), 1.0)).astype(dtype)


class LARS(Optimizer):
    """r = coefficient |p| / (|g| + weight_decay |p| + eps);   v = momentum v + lr r (g + weight_decay p);   p = p - v

    where r = 1 if |p| or |g| is 0. You et al. 2017, "Large batch training of convolutional
    networks", algorithm 1; as there, the learning rate is inside v. |.| is the Euclidean norm
    over one parameter tensor.

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        momentum: decay factor of v, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.
        coefficient: trust coefficient, the factor of the ratio of norms, 0 or more.
        eps: keeps the quotient finite, 0 or more.
        adapt: False sets r = 1, for groups of biases and norm weights.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        coefficient: float = 1e-3,
        eps: float = 1e-8,
        adapt: bool = True,
    ) -> None:
        settings = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "coefficient": coefficient,
            "eps": eps, "adapt": adapt,
        }  # fmt: skip
        super().__init__(params, settings)

    def check(self, group: Group) -> None:
        for name in ("lr", "momentum", "weight_decay", "coefficient", "eps"):
            check_number("LARS", name, group[name])
        check_flags("LARS", group, ("adapt",))

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        xp, p, grad = get_namespace(param.data), widened(param.data), widened(grad)
        weight_decay, rate = float(group["weight_decay"]), float(group["lr"])
        is_first = param not in self.state
        v = self._remembered(param, group)["momentum_buffer"]
        step = fused(xp, decayed)(p, grad, weight_decay, self._temporary(param))
        if group["adapt"]:
            p_norm, g_norm = norm(p, param), norm(grad, param)
            rate = _rate(rate, step, p_norm, g_norm, group["coefficient"], weight_decay, group["eps"])
        fused(xp, _lars, is_first=is_first)(param.data, v, step, rate, float(group["momentum"]))

    def work(self, group: Group) -> tuple[int, int]:
        # decay 2, rate 1, v 2, p 1, and two norms; read p and grad, write p, read and write v
        return 6 + 4 * bool(group["adapt"]), 5 + 2 * bool(group["adapt"])


def _lars(xp: Any, p: Array, v: Array, step: Array, rate: Any, momentum: float, *, is_first: bool) -> None:
    step *= rate
    if is_first:
        v[...] = step
    else:
        v *= momentum
        v += step
    p -= v


class LAMB(Adam):
    """r = m' / (sqrt(v') + eps) + weight_decay p;   p = p - lr (|p| / |r|) r

    with m' and v' as in `Adam`; the ratio is 1 if |p| or |r| is 0. You et al. 2020 (2019
    as a preprint), "Large batch optimization for deep learning: training BERT in 76 minutes",
    algorithm 2 with phi the identity. |.| is the Euclidean norm over one parameter tensor.

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        betas: (b1, b2), each in [0, 1).
        eps: keeps the quotient finite, 0 or more.
        weight_decay: factor of the weights in r, 0 or more.
        adapt: False sets the ratio to 1, for groups of biases and norm weights.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_options = ()
    flags = ("adapt",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        Optimizer.__init__(self, params, settings)

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        xp, p, (beta1, beta2) = get_namespace(param.data), widened(param.data), group["betas"]
        (m, v), t = self._moments(param, group)
        corrections = 1 - beta1**t, math.sqrt(1 - beta2**t)
        settings = 1 - beta1, beta2, 1 - beta2, *corrections, group["eps"], group["weight_decay"]
        decays, rate = bool(group["weight_decay"]), float(group["lr"])
        others = self._temporary(param), self._temporary(param, 1) if decays else None
        r = fused(xp, _lamb, decays=decays)(p, widened(grad), m, v, *map(float, settings), *others)
        if group["adapt"]:
            rate = _rate(rate, r, norm(p, param), norm(r, param))
        fused(xp, _lamb_step)(param.data, r, rate)

    def work(self, group: Group) -> tuple[int, int]:
        adapt = bool(group["adapt"])
        # As Adam, but for a product and a quotient instead of one product; read and write also for both norms.
        return 14 + 2 * bool(group["weight_decay"]) + 4 * adapt, 7 + 2 * adapt


def _lamb(
    xp: Any, p: Array, g: Array, m: Array, v: Array, new1: float, beta2: float, new2: float,
    correction1: float, correction2: float, eps: float, weight_decay: float,
    temporary: Array | None, other: Array | None, *, decays: bool,
) -> Array:  # fmt: skip
    """Update m and v, and return r = m' / (sqrt(v') + eps) + weight_decay p, with the corrections as numbers."""
    advance_moments(xp, m, v, g, new1, beta2, new2, temporary)
    r = xp.sqrt(v, out=temporary)
    r /= correction2
    r += eps
    r = xp.divide(m, r, out=temporary)
    r /= correction1
    if decays:
        r += xp.multiply(p, weight_decay, out=other)
    return r


def _lamb_step(xp: Any, p: Array, r: Array, rate: Any) -> None:
    r *= rate
    p -= r
