"""LARS and LAMB: a rate for each parameter tensor, scaled by a ratio of norms, for large batches."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any

from simparallel.arrays.host.sums import wider
from simparallel.arrays.seam import arrays_of, device_of
from simparallel.autograd import Tensor
from simparallel.backend import Array, fused, get_namespace
from simparallel.optim.adam import Adam, advance_moments
from simparallel.optim.blocks import decayed
from simparallel.optim.norms import norm, squares
from simparallel.optim.optimizer import Group, Optimizer, settings_among


class Layerwise(Optimizer):
    """Base of LARS and LAMB: the rate of a parameter p depends on |p| / |x|, where x is its gradient or its step.

    A subclass defines `phases` and `rate_numbers`. On a GPU, the norms and the rates of all parameters that are not
    sharded are computed together, and the host does not wait for them.
    """

    def phases(self, param: Tensor, grad: Array, group: Group) -> Generator[Array, Any, None]:
        """Update a parameter, as a generator: it yields x, is sent the rate, and then changes the parameter."""
        raise TypeError(f"{self._name} does not define phases")

    def rate_numbers(self, group: Group) -> tuple[float, ...]:
        """Return lr, factor, weight_decay and eps of the rate lr factor |p| / (|x| + weight_decay |p| + eps)."""
        raise TypeError(f"{self._name} does not define rate_numbers")

    # Bytes of the arrays x that wait for their rates.
    _queued_bytes = 0

    def update(self, param: Tensor, grad: Array, group: Group) -> None:
        phases = self.phases(param, grad, group)
        x, numbers, is_whole = next(phases), tuple(map(float, self.rate_numbers(group))), param.placement is None
        key = _rates, device_of(param.data), wider(param.dtype), bool(group["adapt"]), is_whole, numbers
        arrays = arrays_of(x)
        if not arrays.joins_updates or self._queued is None:
            self._finish(key, [(param, x, phases)])
            return
        self._queued.setdefault(key, []).append((param, x, phases))
        # Limits the memory of LAMB, whose x are new arrays. Slices of sharded parameters do not count: their sizes
        # differ by rank, but all ranks have to compute their norms, which are collectives, at the same time.
        self._queued_bytes += x.nbytes if is_whole else 0
        if self._queued_bytes > arrays.work_bytes:
            self._compute_queued()

    def _compute_queued(self) -> None:
        self._queued_bytes = 0
        queued, self._queued = self._queued or {}, {}
        started = {key: queued.pop(key) for key in [*queued] if key[0] is _rates}
        self._queued = queued
        super()._compute_queued()
        for key, entries in started.items():
            self._finish(key, entries)
        super()._compute_queued()

    def _finish(self, key: tuple[Any, ...], started: list[tuple[Tensor, Array, Any]]) -> None:
        """Compute the rates of parameters on one device, and finish their updates.

        Args:
            key: what they share: the function, device, dtype, whether rates adapt, whether parameters are whole, and
                the numbers of `_rate`.
            started: each parameter, its r, and its `phases`, which wait for the rate.
        """
        _, device, dtype, adapts, is_whole, numbers = key
        if not adapts:
            rates = [numbers[0]] * len(started)
        elif device is None or not is_whole:
            rates = [_rate(norm(param.data, param), norm(x, param), *numbers) for param, x, _ in started]
        else:
            params, xs, _ = zip(*started, strict=True)
            with params[0].data.device:
                arrays, num = arrays_of(params[0].data), len(params)
                found = arrays.sums(squares, [*(param.data for param in params), *xs])
                together = fused(arrays.xp, _rates, dtype=dtype)(found[:num], found[num:], *numbers)
                rates = [together[i, ...] for i in range(num)]
        for (_, _, phases), rate in zip(started, rates, strict=True):
            with suppress(StopIteration):
                phases.send(rate)


def _rate(p_norm: float, x_norm: float, lr: float, factor: float, weight_decay: float, eps: float) -> float:
    """Return lr factor |p| / (|x| + weight_decay |p| + eps), or lr where a norm is 0."""
    if not (p_norm > 0 and x_norm > 0):
        return lr
    return lr * (factor * p_norm / (x_norm + weight_decay * p_norm + eps))


def _rates(
    xp: Any, p_squares: Array, squares: Array, lr: float, factor: float, weight_decay: float, eps: float, *, dtype: Any
) -> Array:
    """Return `_rate` for many parameters at once, from the squared norms of each parameter and of its r."""
    p_norm, x_norm = xp.sqrt(p_squares), xp.sqrt(squares)
    is_on, divisor = (p_norm > 0) & (x_norm > 0), x_norm + weight_decay * p_norm + eps
    return (lr * xp.where(is_on, factor * p_norm / xp.where(is_on, divisor, 1.0), 1.0)).astype(dtype)


class LARS(Layerwise):
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
    numbers = ("lr", "momentum", "weight_decay", "coefficient", "eps")
    flags = ("adapt",)

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
        super().__init__(params, settings_among(locals()))

    def phases(self, param: Tensor, grad: Array, group: Group) -> Generator[Array, Any, None]:
        is_first = param not in self.state
        v = self._remembered(param, group)["momentum_buffer"]
        rate = yield grad
        numbers = group["weight_decay"], group["momentum"], rate
        self._apply(_lars, param, grad, [v], numbers, 1, is_first=is_first)

    def rate_numbers(self, group: Group) -> tuple[float, ...]:
        return group["lr"], group["coefficient"], group["weight_decay"], group["eps"]

    def work(self, group: Group) -> tuple[int, int]:
        # decay 2, rate 1, v 2, p 1, and two norms; read p and grad, write p, read and write v
        return 6 + 4 * bool(group["adapt"]), 5 + 2 * bool(group["adapt"])


def _lars(
    xp: Any, p: Array, g: Array, v: Array, weight_decay: float, momentum: float, rate: Any,
    temporary: Array | None = None, *, is_first: bool,
) -> None:  # fmt: skip
    step = decayed(xp, p, g, weight_decay, temporary)
    step *= rate
    if is_first:
        v[...] = step
    else:
        v *= momentum
        v += step
    p -= v


class LAMB(Layerwise, Adam):
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
        Optimizer.__init__(self, params, settings_among(locals()))

    def phases(self, param: Tensor, grad: Array, group: Group) -> Generator[Array, Any, None]:
        (beta1, beta2), ((m, v), t) = group["betas"], self._moments(param, group)
        corrections = 1 - beta1**t, math.sqrt(1 - beta2**t)
        numbers = 1 - beta1, beta2, 1 - beta2, *corrections, group["eps"], group["weight_decay"]
        r = self._temporary(param)
        if r is None:
            r = get_namespace(m).empty_like(m)
        self._apply(_lamb, param, grad, [m, v, r], numbers, 1, decays=bool(group["weight_decay"]))
        rate = yield r
        self._apply(_lamb_step, param, r, [], [rate], 1)

    def rate_numbers(self, group: Group) -> tuple[float, ...]:
        return group["lr"], 1.0, 0.0, 0.0

    def work(self, group: Group) -> tuple[int, int]:
        adapt = bool(group["adapt"])
        # m 3, v 4, denominator 3, quotients 2, update 2, two norms 4; read grad, read and write p, m and v, and for the
        # norms read p and r
        return 14 + 2 * bool(group["weight_decay"]) + 4 * adapt, 7 + 2 * adapt


def _lamb(
    xp: Any, p: Array, g: Array, m: Array, v: Array, r: Array, new1: float, beta2: float, new2: float,
    correction1: float, correction2: float, eps: float, weight_decay: float, temporary: Array | None = None,
    *, decays: bool,
) -> None:  # fmt: skip
    """Update m and v, and write r = m' / (sqrt(v') + eps) + weight_decay p, with the corrections as numbers."""
    advance_moments(xp, m, v, g, new1, beta2, new2, temporary)
    xp.sqrt(v, out=r)
    r /= correction2
    r += eps
    r = xp.divide(m, r, out=r)
    r /= correction1
    if decays:
        r += xp.multiply(p, weight_decay, out=temporary)


def _lamb_step(xp: Any, p: Array, r: Array, rate: Any, temporary: Array | None = None) -> None:
    p -= xp.multiply(r, rate, out=temporary)
