"""Check gradients against central finite differences, without a full Jacobian.

With a fixed random cotangent c, one backward pass gives the gradient of the scalar f(x) = <c, fn(x)>.
Along a direction d it must agree with <c, fn(x + eps d) - fn(x - eps d)> / (2 eps).
Several random directions find an error in large inputs. In small ones every element is checked
by itself, because the position of an error helps more than the time costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Tensor, functions, no_grad, run_backward
from simparallel.backend import is_array, random_normal, to_host
from simparallel.errors import DTypeError, InputError

NUM_DIRECTIONS = 3
# Largest size of inputs that are checked element by element.
SMALL = 64


def check_gradients(
    fn: Callable[..., Tensor], inputs: Sequence[Any], *, eps: float = 1e-6, rtol: float = 1e-6, atol: float = 1e-8
) -> None:
    """Check the gradients of `fn` with respect to its floating-point inputs, in float64.

    Keep the inputs away from kinks (such as 0 for ReLU) by more than `eps`.

    Args:
        fn: takes Tensors, returns a Tensor of dtype float64 and any shape.
        inputs: arrays, numbers or Tensors, one per argument of `fn`. Floating-point ones are
            copied to float64 and differentiated; others (labels, indices) are passed unchanged.
        eps: half the step of the difference, in the units of the inputs.
        rtol: tolerance relative to the larger of the two numbers compared.
        atol: absolute tolerance, for a cotangent of standard normal numbers.

    Raises:
        AssertionError: a gradient is wrong; names the input, the position and both numbers.
        DTypeError: `fn` returned something other than a Tensor of float64.
        InputError: no input can be differentiated, or `eps` is not positive.
    """
    if not eps > 0:
        raise InputError(f"check_gradients: eps={eps!r} must be positive.")
    arrays = [_as_float64(value) for value in inputs]
    wanted = [i for i, array in enumerate(arrays) if array.dtype.kind == "f"]
    if not wanted:
        dtypes = ", ".join(str(array.dtype) for array in arrays)
        raise InputError(f"check_gradients: no floating-point input among the dtypes ({dtypes}).")

    # Copies: `fn` may work in place, and the differences need the original values.
    tensors = [Tensor(array.copy(), requires_grad=i in wanted) for i, array in enumerate(arrays)]
    result = fn(*tensors)
    if not isinstance(result, Tensor) or result.dtype != np.float64:
        found = f"a Tensor of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise DTypeError(f"check_gradients: fn returned {found}, expected a Tensor of float64.")
    cotangent = _random(result.shape, "cotangent")
    gradients = _reverse_mode(result, cotangent)

    for i in wanted:
        gradient = gradients.get(id(tensors[i]), np.zeros(arrays[i].shape))
        if gradient.shape != arrays[i].shape or gradient.dtype != np.float64:
            raise AssertionError(
                f"input {i}: the gradient has shape {gradient.shape} and dtype {gradient.dtype}, "
                f"the input {arrays[i].shape} and float64."
            )
        for where, direction in _directions(arrays[i], i):
            step = eps * direction
            # Central differences have an error of O(eps²), one-sided ones of O(eps).
            above, below = arrays[i] + step, arrays[i] - step
            change = _value(fn, arrays, i, above) - _value(fn, arrays, i, below)
            expected = float(np.sum(cotangent * change)) / (2 * eps)
            # Use the actual step, so that rounding in x + eps does not count as an error.
            actual = float(np.sum(gradient * (above - below))) / (2 * eps)
            if not abs(actual - expected) <= atol + rtol * max(abs(actual), abs(expected)):
                raise AssertionError(
                    f"input {i}, shape {arrays[i].shape}, {where}: backward gives {actual:.12g}, "
                    f"finite differences give {expected:.12g}."
                )


def gradcheck(
    func: Callable[..., Any],
    inputs: Any,
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
) -> bool:
    """Check the gradients of `func`, with the interface of `torch.autograd.gradcheck`.

    Args:
        func: takes the inputs, returns a Tensor or a tuple of them.
        inputs: a Tensor or a tuple; those that require a gradient are checked, in float64.
        eps: as in `check_gradients`.
        atol: as in `check_gradients`.
        rtol: as in `check_gradients`.
        raise_exception: False to return False instead of raising AssertionError.

    Raises:
        AssertionError: a gradient is wrong.
        InputError: no input requires a gradient.
    """
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    wanted = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad]
    if not wanted:
        raise InputError("gradcheck: no input requires a gradient; make one with requires_grad=True.")

    def flat(*checked: Tensor) -> Tensor:
        found = dict(zip(wanted, checked, strict=True))
        result = func(*(found.get(i, x) for i, x in enumerate(given)))
        # One flat output gives one scalar <c, y> for all outputs; integer outputs have no gradient.
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        return functions.concat([y.reshape(-1) for y in outputs if y.dtype.kind == "f"])

    try:
        check_gradients(flat, [given[i].detach() for i in wanted], eps=eps, rtol=rtol, atol=atol)
    except AssertionError:
        if raise_exception:
            raise
        return False
    return True


def _as_float64(value: Any) -> np.ndarray:
    data = value.data if isinstance(value, Tensor) else value
    array = to_host(data) if is_array(data) else np.asarray(data)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _random(shape: tuple[int, ...], stream: str) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    return random_normal(0, f"check_gradients/{stream}", 0, count).reshape(shape)


def _reverse_mode(result: Tensor, cotangent: np.ndarray) -> dict[int, np.ndarray]:
    """Return id(leaf) -> gradient. The `.grad` of all leaves is left unchanged."""
    found: dict[int, np.ndarray] = {}

    def keep(leaf: Tensor, gradient: Any) -> None:
        found[id(leaf)] = np.asarray(gradient)

    # Without a graph, as after `detach` in fn, gradients count as zero, so nonzero differences are an error.
    if result.requires_grad:
        run_backward(result, cotangent, keep)
    return found


def _directions(array: np.ndarray, number: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (description, direction) pairs: single elements first, if the input is small."""
    if array.size <= SMALL:
        for position in np.ndindex(array.shape):
            direction = np.zeros(array.shape)
            direction[position] = 1.0
            yield f"position {position}", direction
    for i in range(NUM_DIRECTIONS):
        yield f"random direction {i}", _random(array.shape, f"direction/{number}/{i}")


def _value(fn: Callable[..., Tensor], arrays: list[np.ndarray], i: int, replacement: np.ndarray) -> Any:
    with no_grad():
        return fn(*(Tensor(replacement if j == i else array) for j, array in enumerate(arrays))).data
