"""Initial values: functions that fill a tensor (PyTorch's names), and initializers by name (MindSpore's).

Each call of a random initializer draws one stream of counter-based random numbers. The n-th call after
`manual_seed(s)` gives the same values on every rank and in every process, independently of other random numbers that
the program draws. Of a sharded tensor a rank writes its slice of the whole tensor's values, so all ranks make the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.tape import mark_changed
from simparallel.backend import filled, is_array, random_normal, random_state, random_uniform, to_device_like
from simparallel.base.dry_new import uninitialized
from simparallel.base.hints import answer_unknown_names
from simparallel.comm import current
from simparallel.errors import DTypeError, InputError, LayoutError, ShapeError
from simparallel.nn.deferred import Recipe, deferring, draw as drawn, is_deferred, placeholder, recipe_of
from simparallel.nn.module import Parameter

__all__ = [
    "Constant", "HeNormal", "HeUniform", "Initializer", "Normal", "One", "Orthogonal", "TruncatedNormal", "Uniform",
    "XavierNormal", "XavierUniform", "Zero", "as_initializer", "calculate_gain", "constant_", "copy_", "fans",
    "initializer", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "orthogonal_", "trunc_normal_",
    "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
]  # fmt: skip


# Acklam's rational approximations of the normal quantile, relative error below 1.2e-9: a function of p - 1/2 in the
# middle, of sqrt(-2 ln p) in the tails.
_MIDDLE = (
    (-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.3577518672690, -30.66479806614716,
     2.506628277459239),
    (-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0),
)  # fmt: skip
_TAIL = (
    (-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968,
     2.938163982698783),
    (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0),
)  # fmt: skip
_TAIL_BEGINS = 0.02425

_GAINS = {"linear": 1.0, "conv": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2.0)}


def constant_(tensor: T, value: float) -> T:
    """Set every element to `value`; returns `tensor`, as all of these functions do."""
    number = np.asarray(value, tensor.dtype)
    return _write(tensor, lambda start, count: number)


def copy_(tensor: T, value: Any) -> T:
    """Copy the elements of an array or Tensor of the same shape, cast to the tensor's dtype.

    Args:
        tensor: any shape, floating point.
        value: the elements, in the shape of `tensor`; of a sharded Tensor, its whole values.

    Collective: yes, if `value` is sharded.

    Raises:
        ShapeError: another shape.
        DTypeError: neither floating point nor integers.
    """
    if tuple(value.shape) != tensor.shape:
        raise ShapeError(f"initial values have shape {tuple(value.shape)}, the parameter has {tensor.shape}.")
    if np.dtype(value.dtype).kind not in "fiub":
        raise DTypeError(f"initial values have dtype {value.dtype}, expected numbers for a {tensor.dtype} parameter.")
    is_cut = isinstance(value, Tensor) and value.placement is not None
    return _write(tensor, recipe_of(value.full_tensor() if is_cut else value))


def zeros_(tensor: T) -> T:
    """Set every element to 0.

    Args:
        tensor: any shape; written, and returned.
    """
    return constant_(tensor, 0)


def ones_(tensor: T) -> T:
    """Set every element to 1.

    Args:
        tensor: any shape; written, and returned.
    """
    return constant_(tensor, 1)


def uniform_(tensor: T, low: float = 0.0, high: float = 1.0) -> T:
    """Draw from the uniform distribution in [low, high).

    Raises:
        InputError: `low` above `high`, or not finite.
        DTypeError: the tensor is not floating point.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InputError(f"uniform_: low={low!r} and high={high!r} must be finite, low not above high.")
    return _fill(tensor, "uniform", lambda *part: low + (high - low) * random_uniform(*part))


def normal_(tensor: T, mean: float = 0.0, std: float = 1.0) -> T:
    """Draw from the normal distribution with this mean and standard deviation.

    Raises:
        InputError: `std` below 0, or a number that is not finite.
        DTypeError: the tensor is not floating point.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise InputError(f"normal_: mean={mean!r} and std={std!r} must be finite, std 0 or more.")
    return _fill(tensor, "normal", lambda *part: mean + std * random_normal(*part))


def kaiming_uniform_(tensor: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> T:
    """Draw uniformly in ±gain * sqrt(3 / fan): He et al. 2015, "Delving deep into rectifiers".

    Args:
        tensor: shape (out, in, ...), floating point.
        a: negative slope, for `nonlinearity="leaky_relu"`.
        mode: "fan_in" keeps the variance in forward, "fan_out" in backward.
        nonlinearity: "leaky_relu", "relu", "tanh", "sigmoid", "linear" or "conv".

    Raises:
        ShapeError: fewer than two dims.
        InputError: unknown `mode` or `nonlinearity`.
    """
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> T:
    """Draw from the normal distribution with std gain / sqrt(fan). Arguments and errors as for `kaiming_uniform_`."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))


def xavier_uniform_(tensor: T, gain: float = 1.0) -> T:
    """Draw uniformly in ±gain * sqrt(6 / (fan_in + fan_out)): Glorot and Bengio 2010.

    Args:
        tensor: shape (out, in, ...), floating point.
        gain: factor of the standard deviation, see `calculate_gain`.

    Raises:
        ShapeError: fewer than two dims.
    """
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: T, gain: float = 1.0) -> T:
    """Draw from the normal distribution with std gain * sqrt(2 / (fan_in + fan_out)).

    Errors as for `xavier_uniform_`.

    Args:
        tensor: shape (out, in, ...), floating point.
        gain: factor of the standard deviation, see `calculate_gain`.
    """
    return normal_(tensor, 0.0, _xavier_std(tensor, gain))


def trunc_normal_(tensor: T, mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0) -> T:
    """Draw from the normal distribution restricted to low … high (not in units of std), by its inverse CDF.

    Raises:
        InputError: `std` not positive, `low` not below `high`, or `mean` not finite.
        DTypeError: the tensor is not floating point.
    """
    if not (std > 0 and low < high and math.isfinite(mean)):
        raise InputError(f"trunc_normal_: std={std!r} must be positive, low={low!r} below high={high!r}.")
    first, last = (0.5 + 0.5 * math.erf((limit - mean) / (std * math.sqrt(2.0))) for limit in (low, high))

    def draw(*part: Any) -> np.ndarray:
        values = _normal_quantile(first + (last - first) * random_uniform(*part))
        return np.clip(mean + std * values, low, high)

    return _fill(tensor, "trunc_normal", draw)


def orthogonal_(tensor: T, gain: float = 1.0) -> T:
    """Fill with orthonormal rows (or columns, if these are fewer), times `gain`: Saxe et al. 2014.

    Args:
        tensor: shape (out, in, ...), floating point; treated as a matrix (out, in * …).
        gain: factor.

    Raises:
        ShapeError: fewer than two dims.
    """
    # Called for its check: it refuses fewer than two dims.
    fans(tensor)
    matrix = normal_(Tensor(np.empty(tensor.shape))).numpy().reshape(tensor.shape[0], -1)
    wide = matrix.shape[0] < matrix.shape[1]
    q, r = np.linalg.qr(matrix.T if wide else matrix)
    # A positive diagonal of r makes the decomposition unique, and q uniformly distributed.
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return _write(tensor, recipe_of((q.T if wide else q) * gain))


def fans(tensor: Tensor) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a weight of shape (out, in, ...); kernel dims count for both.

    Args:
        tensor: the weight.

    Raises:
        ShapeError: fewer than two dims.
    """
    if tensor.ndim < 2:
        raise ShapeError(f"fan_in and fan_out need a weight (out, in, ...), got shape {tensor.shape}.")
    kernel = math.prod(tensor.shape[2:])
    return tensor.shape[1] * kernel, tensor.shape[0] * kernel


def calculate_gain(nonlinearity: str, a: float = 0.0) -> float:
    """Return the gain of weights before `nonlinearity`, a factor of their std. Raises InputError for an unknown name.

    Args:
        nonlinearity: a name that `kaiming_uniform_` accepts.
        a: negative slope, for "leaky_relu".
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1.0 + a * a))
    if nonlinearity not in _GAINS:
        known = ", ".join(["leaky_relu", *_GAINS])
        raise InputError(f"nonlinearity={nonlinearity!r} has no known gain; choose from {known}.")
    return _GAINS[nonlinearity]


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise InputError(f"mode={mode!r} must be 'fan_in' or 'fan_out'.")
    fan = fans(tensor)[mode == "fan_out"]
    # A weight with a fan of 0 has no elements, so any value will do.
    return calculate_gain(nonlinearity, a) / math.sqrt(max(fan, 1))


def _xavier_std(tensor: Tensor, gain: float) -> float:
    return gain * math.sqrt(2.0 / max(sum(fans(tensor)), 1))


def _fill(tensor: T, purpose: str, draw: Callable[[int, str, int, int], np.ndarray]) -> T:
    """Fill the tensor from a new random stream: `draw(seed, stream, start, count)` returns a run of elements."""
    if tensor.dtype.kind != "f":
        raise DTypeError(f"{purpose}_: expected a floating-point tensor, got dtype {tensor.dtype}.")
    return _write(tensor, partial(draw, random_state.seed, random_state.next_stream(purpose)))


def _write(tensor: T, recipe: Recipe) -> T:
    """Write the values now, or store the recipe in a parameter that is to be drawn later. Of slices, write this rank's.

    Raises:
        LayoutError: the tensor is an unfinished sum.
    """
    place, data = tensor.placement, tensor._data
    if isinstance(tensor, Parameter) and place is None and (deferring.active or is_deferred(tensor)):
        tensor.initial = recipe
        tensor.data = placeholder(tensor.shape, tensor.dtype)
        return tensor
    if place is not None and place.layout.partial:
        raise LayoutError(
            f"init: the tensor is laid out as {place.layout!r}, an unfinished sum, and its addends have no initial "
            "values. Finish it first: full_tensor() or redistribute()."
        )
    # Ranks outside of the layout have nothing to draw.
    if data.size:
        index = None if place is None else place.layout.slices(current().rank, tensor.shape)
        own = filled(data.shape, data.dtype, data, lambda: drawn(recipe, tensor.shape, data.dtype, index))
        data[...] = to_device_like(own, data)
        mark_changed((tensor,))
    return tensor


def _normal_quantile(p: np.ndarray) -> np.ndarray:
    """Return the quantile of the standard normal distribution; p in (0, 1)."""
    middle = p - 0.5
    square = middle * middle
    inner = middle * np.polyval(_MIDDLE[0], square) / np.polyval(_MIDDLE[1], square)
    tail = np.sqrt(-2.0 * np.log(np.maximum(np.minimum(p, 1 - p), np.finfo(float).tiny)))
    outer = np.polyval(_TAIL[0], tail) / np.polyval(_TAIL[1], tail)
    return np.where(abs(middle) <= 0.5 - _TAIL_BEGINS, inner, np.where(middle < 0, outer, -outer))


T = TypeVar("T", bound=Tensor)


class Initializer:
    """Base of initializers: a subclass defines `__call__(tensor)`, which fills the tensor in place and returns it.

    Example:
        >>> layer = sp.nn.Linear(784, 512, weight_init=sp.nn.init.Normal(0.02), bias_init="zeros")
    """

    # A function of the tensor and the settings, in their order; or the subclass defines `__call__`.
    _fill: ClassVar[Callable[..., Any] | None] = None

    def __call__(self, tensor: T) -> T:
        if self._fill is None:
            raise TypeError(f"{type(self).__name__} does not define __call__")
        return self._fill(tensor, *vars(self).values())


@dataclass(frozen=True)
class Zero(Initializer):
    """Every element 0; its name is "zeros"."""

    _fill = staticmethod(zeros_)


@dataclass(frozen=True)
class One(Initializer):
    """Every element 1; its name is "ones"."""

    _fill = staticmethod(ones_)


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element `value`."""

    _fill = staticmethod(constant_)

    value: float


@dataclass(frozen=True)
class Normal(Initializer):
    """Values of a normal distribution; the name "normal" means `Normal()`.

    Args:
        sigma: standard deviation.
        mean: mean.
    """

    sigma: float = 0.01
    mean: float = 0.0

    def __call__(self, tensor: T) -> T:
        return normal_(tensor, self.mean, self.sigma)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Values uniform in -scale … scale; the name "uniform" means `Uniform()`."""

    scale: float = 0.07

    def __call__(self, tensor: T) -> T:
        return uniform_(tensor, -self.scale, self.scale)


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal values restricted to mean + a sigma … mean + b sigma; "truncated_normal" means `TruncatedNormal()`."""

    sigma: float = 0.01
    mean: float = 0.0
    a: float = -2.0
    b: float = 2.0

    def __call__(self, tensor: T) -> T:
        low, high = (self.mean + limit * self.sigma for limit in (self.a, self.b))
        return trunc_normal_(tensor, self.mean, self.sigma, low, high)


@dataclass(frozen=True)
class AbstractGain(Initializer):
    """Base of initializers with one setting, the gain."""

    gain: float = 1.0


class XavierUniform(AbstractGain):
    """Values drawn by `xavier_uniform_`; the name "xavier_uniform" means `XavierUniform()`."""

    _fill = staticmethod(xavier_uniform_)


class XavierNormal(AbstractGain):
    """Values drawn by `xavier_normal_`; the name "xavier_normal" means `XavierNormal()`."""

    _fill = staticmethod(xavier_normal_)


class Orthogonal(AbstractGain):
    """Orthonormal rows or columns, by `orthogonal_`; the name "orthogonal" means `Orthogonal()`."""

    _fill = staticmethod(orthogonal_)


@dataclass(frozen=True)
class AbstractHe(Initializer):
    """Base of `HeUniform` and `HeNormal`."""

    negative_slope: float = 0.0
    mode: str = "fan_in"
    nonlinearity: str = "leaky_relu"


class HeUniform(AbstractHe):
    """Values drawn by `kaiming_uniform_`; the name "he_uniform" means `HeUniform()`.

    Args:
        negative_slope: `a` of `kaiming_uniform_`.
        mode, nonlinearity: as in `kaiming_uniform_`.
    """

    _fill = staticmethod(kaiming_uniform_)


class HeNormal(AbstractHe):
    """Values drawn by `kaiming_normal_`; the name "he_normal" means `HeNormal()`.

    Args:
        negative_slope: `a` of `kaiming_uniform_`.
        mode, nonlinearity: as in `kaiming_uniform_`.
    """

    _fill = staticmethod(kaiming_normal_)


_NAMED = {
    "zeros": Zero, "ones": One, "normal": Normal, "uniform": Uniform, "truncated_normal": TruncatedNormal,
    "xavier_uniform": XavierUniform, "xavier_normal": XavierNormal, "he_uniform": HeUniform,
    "he_normal": HeNormal, "orthogonal": Orthogonal,
}  # fmt: skip
# Any spelling of a name or of its class: "xavier_uniform", "XavierUniform", "zero".
_BY_NAME = {name.lower().replace("_", ""): kind for known, kind in _NAMED.items() for name in (known, kind.__name__)}


def as_initializer(init: Any, who: str = "initializer") -> Callable[[Any], Any]:
    """Return a function that fills a tensor.

    Args:
        init: a name, an initializer, a function such as `ones_`, a number, an array or a Tensor.
        who: name of the caller, for messages.

    Raises:
        InputError: another type, or an unknown name.
    """
    if isinstance(init, str):
        kind = _BY_NAME.get(init.lower().replace("_", ""))
        if kind is None:
            raise InputError(f"{who}: init={init!r} is unknown; choose from {', '.join(_NAMED)} or give a number.")
        return kind()
    if isinstance(init, (int, float, np.number)) and not isinstance(init, bool):
        return Constant(float(init))
    if isinstance(init, Tensor) or is_array(init):
        return partial(copy_, value=init)
    if isinstance(init, type) and issubclass(init, Initializer):
        return init()
    if callable(init):
        return init
    raise InputError(
        f"{who}: init={init!r} must be a name ({', '.join(_NAMED)}), an Initializer, a function that fills a tensor, "
        "a number, or an array."
    )


def initializer(init: Any, shape: Any = None, dtype: Any = np.float32) -> Parameter:
    """Make a parameter of this shape, filled by an initializer. MindSpore's `initializer`.

    Args:
        init: a name: "zeros", "ones", "normal" (std 0.01), "uniform" (±0.07), "truncated_normal" (std 0.01),
            "xavier_uniform", "xavier_normal", "he_uniform", "he_normal" or "orthogonal", in any spelling; an
            `Initializer` such as `Normal(0.02)`; a function such as `ones_`; a number; an array or Tensor.
        shape: of the parameter; None takes the shape of an array or Tensor.
        dtype: floating point; None takes float32.

    Raises:
        InputError: unknown initializer, or no shape.
        ShapeError: an array of another shape.
    """
    begin = as_initializer(init)
    if shape is None:
        if not (isinstance(init, Tensor) or is_array(init)):
            raise InputError(f"initializer: init={init!r} needs a shape.")
        shape = init.shape
    shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
    return begin(Parameter(uninitialized(shape, np.dtype(dtype or np.float32))))


answer_unknown_names(__name__)
