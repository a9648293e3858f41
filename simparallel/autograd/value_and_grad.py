"""Gradients as values: `value_and_grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from simparallel.autograd.hooks import changed_by
from simparallel.autograd.tape import node_of, run_backward
from simparallel.autograd.tensor import Tensor, as_tensor, seed_of
from simparallel.backend import Array, get_namespace
from simparallel.base.units import format_type_of
from simparallel.errors import AutogradError, InputError, ShapeError

WHO = "value_and_grad"


def value_and_grad(
    fn: Callable[..., Any], grad_position: Any = 0, weights: Any = None, has_aux: bool = False, *, params: Any = None
) -> Callable[..., tuple[Any, Any]]:
    """Make a function that returns `fn`'s value and gradients; `.grad` is not touched.

    There are two spellings: MindSpore's `value_and_grad(fn, None, weights, has_aux=True)`, and a short one
    with the parameters in second place, `value_and_grad(fn, params, has_aux=True)`.

    Args:
        fn: returns a scalar Tensor or, with `has_aux`, a tuple that begins with one. A tuple of Tensors
            without `has_aux` is differentiated as in MindSpore: as the sum of all elements of all of
            them. This is seldom intended, so the first call warns.
        grad_position: positional arguments to differentiate with respect to: a number, a tuple of numbers,
            or None for none of them. Or the parameters: a Tensor or several.
        weights: leaves with `requires_grad`, a Tensor or several. The gradient of an unused one is zeros.
        has_aux: `fn` returns further values beside the loss; they are passed on and have no part in the gradient.
        params: another name of `weights`.

    Returns:
        `g(*args) -> (value, grads)`. For weights, grads is a list, or one Tensor if `weights` is one. For
        arguments, it is one Tensor for a number and a tuple for a tuple. For both, it is the pair (of arguments,
        of weights). A gradient has the shape and dtype of its argument or weight.

    Raises:
        InputError: fn is not a function, there is nothing to differentiate with respect to, or a position is bad.
        AutogradError: weights that are not leaves, and (when called) a result that is not a Tensor or depends on
            nothing that requires a gradient, or an argument that is not floating point.
        ShapeError: (when called) a result of more than one element.

    Example:
        >>> x = sp.Tensor([3.0], requires_grad=True)
        >>> value, (dx,) = sp.value_and_grad(lambda: (x * x).sum(), [x])()
        >>> float(value), dx.numpy().tolist()
        (9.0, [6.0])
        >>> sp.value_and_grad(lambda a, b: (a * b).sum(), 1)([2.0], [5.0])[1].numpy().tolist()
        [2.0]
    """
    if not callable(fn):
        raise InputError(f"{WHO}: fn is {format_type_of(fn)}, expected a function that returns the loss.")
    # The short spelling, with has_aux in third place.
    if isinstance(weights, bool):
        weights, has_aux = None, weights
    given = [value for value in (weights, params) if value is not None]
    if not (grad_position is None or _is_position(grad_position)):
        given, grad_position = [grad_position, *given], None
    elif params is not None and grad_position == 0:
        grad_position = None
    if len(given) > 1:
        raise InputError(f"{WHO}: the parameters were given twice; write {WHO}(fn, None, weights).")
    positions = _positions(grad_position)
    leaves = _leaves(given[0]) if given else []
    if not positions and not given:
        raise InputError(
            f"{WHO}: there is nothing to differentiate with respect to: give the positions of arguments, or "
            "parameters as weights."
        )

    has_warned = False

    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        nonlocal has_warned
        inputs = _fresh_leaves(args, positions)
        value = fn(*(inputs.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        several = isinstance(value, (tuple, list)) and len(value) > 0
        loss = value[0] if several and has_aux else value
        if several and not has_aux and all(isinstance(entry, Tensor) for entry in value):
            if len(value) > 1 and not has_warned:
                has_warned = True
                warnings.warn(_of_all(fn, value), stacklevel=2)
            loss = _together(value)
        if not isinstance(loss, Tensor):
            raise AutogradError(
                f"{WHO}: fn returned {type(loss).__name__}, not a Tensor"
                + ("." if has_aux else "; pass has_aux=True if it returns (loss, more).")
            )
        if loss.requires_grad and loss.size != 1:
            raise ShapeError(f"{WHO}: fn returned shape {loss.shape}; return a scalar, such as loss.mean().")
        found: dict[int, Array] = {}

        def keep(leaf: Tensor, gradient: Array) -> None:
            found[id(leaf)] = changed_by(leaf._hooks, leaf, gradient)

        run_backward(loss, seed_of(loss, None, not several or has_aux), keep)
        xp = get_namespace(loss.data)

        def gradient_of(leaf: Tensor) -> Tensor:
            gradient = found[id(leaf)] if id(leaf) in found else xp.zeros(leaf.data.shape, leaf.dtype)
            return leaf._gradient(gradient)

        by_arguments = tuple(gradient_of(inputs[i]) for i in positions)
        by_weights: Any = [gradient_of(leaf) for leaf in leaves]
        if given and isinstance(given[0], Tensor):
            by_weights = by_weights[0]
        if not positions:
            return value, by_weights
        of_arguments = by_arguments if isinstance(grad_position, tuple) else by_arguments[0]
        return value, (of_arguments, by_weights) if given else of_arguments

    return value_and_gradients


def _together(outputs: Sequence[Tensor]) -> Tensor:
    """Return a Tensor with the gradients of the sum of all elements of all outputs; its value is 0, not the sum."""
    for output in outputs:
        if output.requires_grad and not output.shape:
            # Called for its check that the loss is finite.
            seed_of(output, None, True)
    xp, needs = get_namespace(outputs[0].data), tuple(y.requires_grad for y in outputs)
    ones = [xp.ones_like(y.data) if y.requires_grad else None for y in outputs]
    node = node_of(outputs, lambda ctx, dy: ones, needs) if any(needs) else None
    return Tensor._result(xp.zeros((), "float32"), node)


def _of_all(fn: Any, value: Sequence[Any]) -> str:
    shapes = ", ".join(str(entry.shape) for entry in value)
    return (
        f"{WHO}: {getattr(fn, '__name__', 'fn')} returns {len(value)} Tensors, of shapes {shapes}, and has_aux is "
        "False: the gradient is that of the sum of all their elements, as in MindSpore. If only the first one is the "
        "loss, write has_aux=True."
    )


def _is_position(value: Any) -> bool:
    """Return whether `value` is an integer or a tuple of integers."""
    entries = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries)


def _positions(grad_position: Any) -> tuple[int, ...]:
    if grad_position is None:
        return ()
    positions = grad_position if isinstance(grad_position, tuple) else (grad_position,)
    if min(positions) < 0 or len(set(positions)) < len(positions):
        raise InputError(f"{WHO}: grad_position={grad_position!r} must be distinct integers of 0 or more.")
    return positions


def _leaves(params: Any) -> list[Tensor]:
    if not isinstance(params, (Tensor, Iterable)) or isinstance(params, (str, bytes)):
        raise InputError(f"{WHO}: expected Tensors or positions of arguments, got {params!r}.")
    leaves = [params] if isinstance(params, Tensor) else list(params)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.is_leaf and leaf.requires_grad):
            raise AutogradError(f"{WHO}: params[{i}] is not a leaf with requires_grad=True.")
    return leaves


def _fresh_leaves(args: tuple[Any, ...], positions: tuple[int, ...]) -> dict[int, Tensor]:
    """Return position -> the argument as a new leaf with the same data."""
    if positions and max(positions) >= len(args):
        raise InputError(
            f"{WHO}: the gradient of argument {max(positions)} was requested, but only {len(args)} arguments were "
            "given."
        )
    leaves = {i: as_tensor(args[i]).detach() for i in positions}
    for i, leaf in leaves.items():
        if leaf.dtype.kind not in "fc":
            raise AutogradError(f"{WHO}: argument {i} has dtype {leaf.dtype}, expected floating point.")
        leaf.requires_grad = True
    return leaves
