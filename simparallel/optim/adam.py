"""Adam, AdamW, Adamax (maximum norm), NAdam (Nesterov momentum) and RAdam (rectified start)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.base.checks import check_number
from simparallel.errors import InputError
from simparallel.optim.blocks import decayed
from simparallel.optim.optimizer import Group, Optimizer, settings_among


class Adam(Optimizer):
    """m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g²;   p = p - lr m' / (sqrt(v') + eps)

    where m' = m / (1 - b1^t) and v' = v / (1 - b2^t) at step t, and g = grad + weight_decay p:
    Kingma and Ba 2015, "Adam: a method for stochastic optimization". With `amsgrad` (Reddi et al. 2018, "On the
    convergence of Adam and beyond") v' has the largest v so far in place of v.

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        betas: (b1, b2), each in [0, 1).
        eps: keeps the quotient finite, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.
        amsgrad: use the largest v so far, so that no element's effective rate rises again.
        maximize: maximize the loss: reverse the sign of the gradient.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_names = ("exp_avg", "exp_avg_sq")  # PyTorch's names for m and v
    state_options: ClassVar[tuple[str, ...]] = ("max_exp_avg_sq",)
    state_counts = ("step",)
    numbers: ClassVar[tuple[str, ...]] = ("lr", "eps", "weight_decay")
    flags: ClassVar[tuple[str, ...]] = ("amsgrad", "maximize")
    # Decay the weights directly instead of through the gradient.
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_among(locals()))

    def check(self, group: Group) -> None:
        super().check(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise InputError(f"{self._name}: betas={betas!r} must be two numbers, for example (0.9, 0.999).")
        for i, beta in enumerate(betas):
            check_number(self._name, f"betas[{i}]", beta, below=1.0)

    def remembers(self, group: Group) -> tuple[str, ...]:
        return (*self.state_names, *self.state_options) if group.get("amsgrad") else self.state_names

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        lr, weight_decay, betas = group["lr"], group["weight_decay"], group["betas"]
        arrays, t = self._moments(param, group)
        # Fold the bias corrections of m and v into scalars, so that m' and v' need no arrays.
        correction1, correction2 = 1 - betas[0] ** t, math.sqrt(1 - betas[1] ** t)
        decay = "" if not weight_decay else "weights" if self.decoupled else "gradient"
        factor = 1 - lr * weight_decay if self.decoupled else weight_decay
        numbers = factor, 1 - betas[0], betas[1], 1 - betas[1], correction2, group["eps"], lr / correction1
        state = arrays if len(arrays) > 2 else [*arrays, None]
        # Only decay of the gradient needs a second work array: `grad` itself must not change.
        num_scratch = 1 + (decay == "gradient")
        self._apply(_adam, param, grad, state, numbers, num_scratch, self._plans[id(group)].factor, decay=decay)

    def _moments(self, param: Tensor, group: Group) -> tuple[list[Array], int]:
        """Return m, v (and the largest v so far), which start as zeros, and the number of this step, incremented."""
        state = self._remembered(param, group)
        state["step"] += 1
        return [state[name] for name in self.remembers(group)], state["step"]

    def work(self, group: Group) -> tuple[int, int]:
        decay = (1 if self.decoupled else 2) if group["weight_decay"] else 0
        # m 3, v 4, denominator 3, quotient and update 3; read grad, read and write p, m and v
        amsgrad = group["amsgrad"]
        return 13 + decay + amsgrad + group["maximize"], 7 + 2 * amsgrad


class AdamW(Adam):
    """Adam with decoupled weight decay: p = p - lr weight_decay p before the update.

    Loshchilov and Hutter 2019, "Decoupled weight decay regularization". Arguments as for
    `Adam`; `weight_decay` is 0.01 by default.
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


def _adam(
    xp: Any, p: Array, g: Array, m: Array, v: Array, largest: Array | None,
    factor: float, new1: float, beta2: float, new2: float, correction2: float, eps: float, rate: float,
    temporary: Array | None = None, other: Array | None = None, *, decay: str,
) -> None:  # fmt: skip
    g = decay_applied(xp, p, g, factor, other, decay)
    advance_moments(xp, m, v, g, new1, beta2, new2, temporary)
    if largest is not None:
        # amsgrad: the denominator uses the running maximum of v.
        v = xp.maximum(largest, v, out=largest)
    quotient = xp.sqrt(v, out=temporary)
    quotient /= correction2
    quotient += eps
    quotient = xp.divide(m, quotient, out=temporary)
    quotient *= rate
    p -= quotient


def decay_applied(xp: Any, p: Array, g: Array, factor: float, other: Array | None, decay: str) -> Array:
    """Decay the weights in place, or return the gradient with weight decay added; `decay` says which, or "" neither."""
    if decay == "weights":
        p *= factor
    return decayed(xp, p, g, factor, other) if decay == "gradient" else g


def advance_moments(
    xp: Any, m: Array, v: Array, g: Array, new1: float, beta2: float, new2: float, temporary: Array | None
) -> None:
    """Update m and v with this step's gradient, in place; `new1` is 1 - beta1, `new2` is 1 - beta2."""
    # m + (1 - beta1) (g - m) needs one work array; the textbook form needs two products.
    change = xp.subtract(g, m, out=temporary)
    change *= new1
    m += change  # = beta1 m + (1 - beta1) g
    square = xp.multiply(g, g, out=temporary)
    square *= new2
    v *= beta2
    v += square


class Adamax(Adam):
    """m = b1 m + (1 - b1) g;   u = max(b2 u, |g| + eps);   p = p - lr / (1 - b1^t) m / u

    at step t, with g = grad + weight_decay p: Kingma and Ba 2015, section 7.1. Arguments as for `Adam`.
    """

    state_names = ("exp_avg", "exp_inf")  # PyTorch's names for m and u
    state_options = ()
    flags = ("maximize",)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        Optimizer.__init__(self, params, settings_among(locals()))

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        arrays, t = self._moments(param, group)
        (beta1, beta2), weight_decay = group["betas"], group["weight_decay"]
        numbers = weight_decay, 1 - beta1, beta2, group["eps"], group["lr"] / (1 - beta1**t)
        self._apply(_adamax, param, grad, arrays, numbers, 2, self._plans[id(group)].factor, decays=bool(weight_decay))

    def work(self, group: Group) -> tuple[int, int]:
        # m 3, u 4, quotient and update 3; read grad, read and write p, m and u
        return 10 + 2 * bool(group["weight_decay"]) + group["maximize"], 7


def _adamax(
    xp: Any, p: Array, g: Array, m: Array, u: Array, weight_decay: float, new1: float, beta2: float, eps: float,
    rate: float, temporary: Array | None = None, other: Array | None = None, *, decays: bool,
) -> None:  # fmt: skip
    if decays:
        g = decayed(xp, p, g, weight_decay, other)
    change = xp.subtract(g, m, out=temporary)
    change *= new1
    m += change
    size = xp.absolute(g, out=temporary)
    size += eps
    u *= beta2
    xp.maximum(u, size, out=u)
    quotient = xp.divide(m, u, out=temporary)
    quotient *= rate
    p -= quotient


class AbstractMomentAdam(Adam):
    """Base of NAdam and RAdam: Adam's moments, with optional decoupled weight decay."""

    state_options: ClassVar[tuple[str, ...]] = ()
    flags = ("decoupled_weight_decay", "maximize")

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        (m, v), t = self._moments(param, group)
        weight_decay, betas = group["weight_decay"], group["betas"]
        is_decoupled = group["decoupled_weight_decay"]
        decay = "" if not weight_decay else "weights" if is_decoupled else "gradient"
        factor = 1 - group["lr"] * weight_decay if is_decoupled else weight_decay
        of_step = self._factors(param, group, t)
        numbers = factor, 1 - betas[0], betas[1], 1 - betas[1], *of_step
        settings = {"decay": decay, "divides": of_step[2] != 0}
        self._apply(_moment_adam, param, grad, [m, v], numbers, 2, self._plans[id(group)].factor, **settings)

    def _factors(self, param: Tensor, group: Group, t: int) -> tuple[float, float, float, float]:
        """Return a, b, c and e of the step (a g + b m) / (c sqrt(v) + e); c = 0 means no denominator."""
        raise TypeError(f"{self._name} does not define _factors")

    def work(self, group: Group) -> tuple[int, int]:
        decay = (1 if group["decoupled_weight_decay"] else 2) if group["weight_decay"] else 0
        # m 3, v 4, step 3, denominator 3, quotient, update; read grad, read and write p, m and v
        return 15 + decay + group["maximize"], 7


def _moment_adam(
    xp: Any, p: Array, g: Array, m: Array, v: Array, factor: float, new1: float, beta2: float, new2: float,
    of_gradient: float, of_moment: float, of_root: float, eps: float,
    temporary: Array | None = None, other: Array | None = None, *, decay: str, divides: bool,
) -> None:  # fmt: skip
    g = decay_applied(xp, p, g, factor, other, decay)
    advance_moments(xp, m, v, g, new1, beta2, new2, temporary)
    # "other" is free from here on: it now holds the step, a weighted sum of g and m.
    step = xp.multiply(g, of_gradient, out=other)
    step += xp.multiply(m, of_moment, out=temporary)
    if divides:
        quotient = xp.sqrt(v, out=temporary)
        quotient *= of_root
        quotient += eps
        step /= quotient
    p -= step


class NAdam(AbstractMomentAdam):
    """Adam with Nesterov momentum: Dozat 2016, "Incorporating Nesterov momentum into Adam"; as in PyTorch.

    p = p - lr ((1 - k_t) g / (1 - K_t) + k_(t+1) m / (1 - K_(t+1))) / (sqrt(v / (1 - b2^t)) + eps)
    with k_t = b1 (1 - 0.96^(t momentum_decay) / 2) and K_t = k_1 k_2 … k_t.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as for `Adam`.
        momentum_decay: speed at which k_t approaches b1, 0 or more.
        decoupled_weight_decay: decay the weights directly instead of through the gradient.
    """

    state_numbers: ClassVar[Mapping[str, float]] = {"mu_product": 1.0}
    numbers = ("lr", "eps", "weight_decay", "momentum_decay")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        Optimizer.__init__(self, params, settings_among(locals()))

    def _factors(self, param: Tensor, group: Group, t: int) -> tuple[float, float, float, float]:
        (beta1, beta2), state = group["betas"], self.state[param]
        # k_t and k_(t+1) of the docstring; `mu_product` is K_t, updated by each step.
        now, later = (beta1 * (1 - 0.5 * 0.96 ** (n * group["momentum_decay"])) for n in (t, t + 1))
        state["mu_product"] *= now
        product, lr = state["mu_product"], group["lr"]
        root = 1 / math.sqrt(1 - beta2**t)
        return lr * (1 - now) / (1 - product), lr * later / (1 - product * later), root, group["eps"]


class RAdam(AbstractMomentAdam):
    """Adam with a rectified rate in the first steps: Liu et al. 2020, "On the variance of the adaptive rate".

    r_t = r - 2 t b2^t / (1 - b2^t) with r = 2 / (1 - b2) - 1. While r_t is at most 5, p = p - lr m / (1 - b1^t);
    then Adam's step times sqrt((r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t)), where eps is added to sqrt(v) before the
    correction.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as for `Adam`.
        decoupled_weight_decay: decay the weights directly instead of through the gradient.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        Optimizer.__init__(self, params, settings_among(locals()))

    def _factors(self, param: Tensor, group: Group, t: int) -> tuple[float, float, float, float]:
        beta1, beta2 = group["betas"]
        lr, kept = group["lr"] / (1 - beta1**t), beta2**t
        # `longest` and `length` are r and r_t of the docstring.
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * t * kept / (1 - kept)
        # The variance of the rate is not tractable yet: step with the momentum alone.
        if length <= 5:
            return 0.0, lr, 0.0, 0.0
        numerator, denominator = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
        root = 1 / math.sqrt(1 - kept)
        return 0.0, lr * math.sqrt(numerator / denominator), root, root * group["eps"]
