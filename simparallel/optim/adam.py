"""Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace
from simparallel.errors import InputError
from simparallel.optim.checks import check_number
from simparallel.optim.optimizer import Group, Optimizer


class Adam(Optimizer):
    """m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g²;   p = p - lr m' / (sqrt(v') + eps)

    where m' = m / (1 - b1^t) and v' = v / (1 - b2^t) at step t, and g = grad + weight_decay p:
    Kingma and Ba 2015, "Adam: a method for stochastic optimization".

    Args:
        params: Tensors, or dicts with a group's own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        betas: (b1, b2), each in [0, 1).
        eps: keeps the quotient finite, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    state_names = ("exp_avg", "exp_avg_sq")  # m and v, by PyTorch's names
    state_counts = ("step",)
    decoupled: ClassVar[bool] = False  # decay the weights themselves, not through the gradient

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]], lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def check(self, group: Group) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(self._name, name, group[name])
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise InputError(f"{self._name}: betas={betas!r} must be two numbers, for example (0.9, 0.999).")
        for i, beta in enumerate(betas):
            check_number(self._name, f"betas[{i}]", beta, below=1.0)

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        xp = get_namespace(param.data)
        lr, weight_decay = group["lr"], group["weight_decay"]
        m, v, t = self._moments(param)
        correction1, correction2 = 1 - group["betas"][0] ** t, math.sqrt(1 - group["betas"][1] ** t)
        needs_decayed = bool(weight_decay) and not self.decoupled
        for pieces in self._pieces([param.data, grad, m, v], num_scratch=1 + needs_decayed):
            p, g, m_part, v_part, temporary = pieces[:5]
            if weight_decay and self.decoupled:
                p *= 1 - lr * weight_decay
            elif weight_decay:
                g = xp.add(xp.multiply(p, weight_decay, out=pieces[5]), g, out=pieces[5])
            advance_moments(xp, m_part, v_part, g, group["betas"], temporary)
            quotient = xp.sqrt(v_part, out=temporary)
            quotient /= correction2
            quotient += group["eps"]
            xp.divide(m_part, quotient, out=quotient)
            quotient *= lr / correction1
            p -= quotient

    def _moments(self, param: Tensor) -> tuple[Array, Array, int]:
        """m, v and the number of this step; zeros at the first."""
        state = self.state.get(param)
        if state is None:
            xp = get_namespace(param.data)
            m, v = (xp.zeros_like(param.data, order="C") for _ in range(2))
            state = self.state[param] = {"step": 0, "exp_avg": m, "exp_avg_sq": v}
        state["step"] += 1
        return state["exp_avg"], state["exp_avg_sq"], state["step"]

    def work(self, group: Group) -> tuple[int, int]:
        decay = (1 if self.decoupled else 2) if group["weight_decay"] else 0
        # m 3, v 4, denominator 3, quotient and update 3; read grad, read and write p, m and v
        return 13 + decay, 7


class AdamW(Adam):
    """Adam with the weights decayed by themselves: p = p - lr weight_decay p before the update.

    Loshchilov and Hutter 2019, "Decoupled weight decay regularization". Arguments as for
    `Adam`; `weight_decay` is 0.01 by default.
    """

    decoupled = True

    def __init__(
        self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]], lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay)


def advance_moments(
    xp: Any, m: Array, v: Array, g: Array, betas: tuple[float, float], temporary: Array
) -> None:
    """m and v after this step's gradient, in place."""
    beta1, beta2 = betas
    change = xp.subtract(g, m, out=temporary)
    change *= 1 - beta1
    m += change  # = beta1 m + (1 - beta1) g
    square = xp.multiply(g, g, out=temporary)
    square *= 1 - beta2
    v *= beta2
    v += square
