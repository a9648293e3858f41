"""Momentum: stochastic gradient descent with MindSpore's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.base.checks import check_number
from simparallel.errors import InputError
from simparallel.optim.optimizer import Group
from simparallel.optim.sgd import SGD


class Momentum(SGD):
    """g = grad / loss_scale + weight_decay p;   v = momentum v + g;   p = p - lr v

    With `use_nesterov`, p = p - lr (g + momentum v). MindSpore's `nn.Momentum`; equivalent to `SGD`
    with `momentum`, and with the same settings of groups ("lr", "momentum", "weight_decay").

    Args:
        params: Tensors, or dicts of parameter groups with their own settings. One dict may be
            `{"order_params": Tensors}`: all parameters again, in the order of the gradients
            in `optimizer(grads)`.
        learning_rate: 0 or more; or a list or a callable of the step, see `Optimizer`.
        momentum: decay factor of v, 0 or more.
        weight_decay: factor of the L2 penalty, 0 or more.
        loss_scale: scale of the loss, above 0; the gradients are divided by it.
        use_nesterov: use Nesterov momentum.

    Raises:
        InputError, DTypeError, AutogradError: see `Optimizer`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        learning_rate: Any,
        momentum: float,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
    ) -> None:
        self.loss_scale = check_number("Momentum", "loss_scale", loss_scale, above=0.0)
        entries: Any = params
        order: list[Any] | None = None
        if isinstance(params, Iterable) and not isinstance(params, (Tensor, Mapping)):
            entries = list(params)
            # The entry "order_params" is no group: take it out, and keep its order for `parameters` and `__call__`.
            orders = [entry for entry in entries if isinstance(entry, Mapping) and "order_params" in entry]
            if len(orders) > 1 or any(len(entry) != 1 for entry in orders):
                raise InputError(
                    "Momentum: 'order_params' must be the only key of its dict, and only one dict may have it."
                )
            if orders:
                entries = [entry for entry in entries if entry is not orders[0]]
                order = list(orders[0]["order_params"])
        super().__init__(entries, learning_rate, momentum, 0.0, weight_decay, use_nesterov)
        self._order = order
        if order is not None and (len(order) != len(self._params()) or set(order) != set(self._params())):
            raise InputError(
                f"Momentum: 'order_params' lists {len(order)} parameters, the groups {len(self._params())}; "
                "it must name each parameter of the groups exactly once."
            )

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        super().add_param_group(group)
        if getattr(self, "_order", None) is not None:
            self._order.extend(self.param_groups[-1]["params"])  # type: ignore[union-attr]

    def restricted_to(self, params: Iterable[Tensor]) -> Self:
        wanted = set(params)
        twin = super().restricted_to(wanted)
        if self._order is not None:
            twin._order = [param for param in self._order if param in wanted]
        return twin

    @property
    def parameters(self) -> list[Tensor]:
        return self._params() if self._order is None else list(self._order)

    def __call__(self, grads: Sequence[Tensor | Array | None]) -> None:
        grads = list(grads)
        if self._order is not None and len(grads) == len(self._order):
            # Gradients come in the order of `order_params`; bring them into the order of the groups.
            grad_of = dict(zip(self._order, grads, strict=True))
            grads = [grad_of[param] for param in self._params()]
        super().__call__(grads)

    def _factor(self, group: Group) -> float:
        return 1.0 / self.loss_scale

    def work(self, group: Group) -> tuple[int, int]:
        flops, accesses = super().work(group)
        return flops + (self.loss_scale != 1.0), accesses
