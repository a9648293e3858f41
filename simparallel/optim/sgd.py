"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.base.checks import check_number
from simparallel.errors import InputError
from simparallel.optim.blocks import decayed
from simparallel.optim.optimizer import Group, Optimizer, settings_among


class SGD(Optimizer):
    """g = grad + weight_decay p;   b = momentum b + (1 - dampening) g;   p = p - lr b

    At the first step b = g. With `nesterov`, p = p - lr (g + momentum b); without momentum,
    p = p - lr g. Momentum: Sutskever et al. 2013, "On the importance of initialization and
    momentum in deep learning", in PyTorch's form, where the learning rate is outside of b.

    Args:
        params: Tensors, or dicts of parameter groups with their own settings.
        lr: learning rate, 0 or more; or a list or a callable of the step, see `Optimizer`.
        momentum: share of b that is kept, 0 or more.
        dampening: share of g that is left out of b.
        weight_decay: factor of the L2 penalty, 0 or more.
        nesterov: use Nesterov momentum; needs momentum and no dampening.
        maximize: maximize the loss: reverse the sign of the gradient.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, settings_among(locals()))

    state_names = ("momentum_buffer",)
    numbers = ("lr", "momentum", "weight_decay")
    flags = ("maximize",)

    def check(self, group: Group) -> None:
        super().check(group)
        check_number(self._name, "dampening", group["dampening"], low=float("-inf"))
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise InputError(
                f"{self._name}: nesterov needs momentum above 0 and dampening 0, got momentum={group['momentum']!r} "
                f"and dampening={group['dampening']!r}."
            )

    def remembers(self, group: Group) -> tuple[str, ...]:
        return self.state_names if group["momentum"] else ()

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
        undamped, nesterov = 1 - group["dampening"], group["nesterov"]
        b, is_first = None, False
        if momentum:
            is_first = param not in self.state
            b = self._remembered(param, group)["momentum_buffer"]
        numbers = lr, weight_decay, momentum, undamped
        decays, is_damped = bool(weight_decay), undamped != 1
        num_scratch = 1 + (bool(momentum) and (nesterov or is_damped))
        settings = {"decays": decays, "is_first": is_first, "is_damped": is_damped, "nesterov": nesterov}
        self._apply(_sgd, param, grad, [b], numbers, num_scratch, self._plans[id(group)].factor, **settings)

    def work(self, group: Group) -> tuple[int, int]:
        has_momentum = bool(group["momentum"])
        flops = 2 + 2 * bool(group["weight_decay"]) + 2 * has_momentum + group["maximize"]
        flops += 2 * bool(group["nesterov"]) + (has_momentum and group["dampening"] != 0)
        # Read p and grad, write p; read and write b.
        return flops, 3 + 2 * has_momentum


def _sgd(
    xp: Any, p: Array, g: Array, b: Array | None, lr: float, weight_decay: float, momentum: float, undamped: float,
    temporary: Array | None = None, other: Array | None = None,
    *, decays: bool, is_first: bool, is_damped: bool, nesterov: bool,
) -> None:  # fmt: skip
    step = decayed(xp, p, g, weight_decay, temporary) if decays else g
    if b is not None:
        if is_first:
            b[...] = step
        else:
            b *= momentum
            # `step` may be the gradient, which must not change: the product is written into `other`.
            b += xp.multiply(step, undamped, out=other) if is_damped else step
        step = xp.add(xp.multiply(b, momentum, out=other), step, out=other) if nesterov else b
    p -= xp.multiply(step, lr, out=temporary)
