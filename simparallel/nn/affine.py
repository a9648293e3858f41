"""`Affine`: the base of layers that have a weight and, mostly, a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simparallel.nn import init
from simparallel.nn.module import Parameter, TensorModule


class Affine(TensorModule):
    """A weight and a bias that begin as `weight_init` and `bias_init` say, or as the subclass does.

    Each may be a name, an `Initializer`, a function that fills a tensor, a number, an array or a Tensor, see
    `nn.initializer`. The one of a parameter that the layer does not have is without effect.
    """

    weight: Parameter | None
    bias: Parameter | None
    _weight_init: Callable[[Any], Any] | None = None
    _bias_init: Callable[[Any], Any] | None = None

    def _begin_as(self, weight_init: Any, bias_init: Any) -> None:
        """Keep what was asked for, and fill the parameters. Raises InputError or ShapeError for what does not fit."""
        who = type(self).__name__
        if weight_init is not None:
            self._weight_init = init.as_initializer(weight_init, f"{who}: weight_init")
        if bias_init is not None:
            self._bias_init = init.as_initializer(bias_init, f"{who}: bias_init")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        begin = {
            "weight": self._weight_init or self._default_weight, "bias": self._bias_init or self._default_bias,
        }  # fmt: skip
        for name, fill in begin.items():
            parameter = self._parameters.get(name)  # an RMSNorm has no bias at all
            if parameter is not None:
                fill(parameter)

    def _default_weight(self, weight: Parameter) -> None:
        init.ones_(weight)

    def _default_bias(self, bias: Parameter) -> None:
        init.zeros_(bias)
