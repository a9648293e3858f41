"""Gradients as values: `value_and_grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simparallel.autograd.tape import run_backward
from simparallel.autograd.tensor import Tensor, seed_of
from simparallel.backend import Array, get_namespace
from simparallel.errors import AutogradError


def value_and_grad(
    fn: Callable[..., Any], params: Sequence[Tensor], has_aux: bool = False
) -> Callable[..., tuple[Any, list[Tensor]]]:
    """A function that returns `fn`'s value and its gradients by `params`; `.grad` is not touched.

    Args:
        fn: returns a scalar Tensor, or a tuple whose first entry is one when `has_aux`.
        params: leaves with `requires_grad`. Those that `fn` does not use get zeros.
        has_aux: `fn` returns further values beside the loss; they are passed on.

    Returns:
        `g(*args) -> (value, grads)`; `grads[i]` has shape and dtype of `params[i]`.

    Example:
        >>> x = Tensor([3.0], requires_grad=True)
        >>> value, (dx,) = value_and_grad(lambda: (x * x).sum(), [x])()
        >>> float(value), dx.numpy().tolist()
        (9.0, [6.0])
    """
    params = list(params)
    for i, param in enumerate(params):
        if not (param.is_leaf and param.requires_grad):
            raise AutogradError(f"value_and_grad: params[{i}] is not a leaf with requires_grad=True.")

    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        value = fn(*args, **kwargs)
        loss = value[0] if has_aux else value
        if not isinstance(loss, Tensor):
            raise AutogradError(
                f"value_and_grad: fn returned {type(loss).__name__}, not a Tensor"
                + ("." if has_aux else "; pass has_aux=True if it returns (loss, more).")
            )
        found: dict[int, Array] = {}

        def keep(leaf: Tensor, gradient: Array) -> None:
            found[id(leaf)] = gradient

        run_backward(loss, seed_of(loss, None, True), keep)
        xp = get_namespace(loss.data)
        grads = [found[id(p)] if id(p) in found else xp.zeros(p.data.shape, p.dtype) for p in params]
        placements = [p.placement and p.placement.gradient for p in params]
        return value, [Tensor._slice(grad, place) for grad, place in zip(grads, placements, strict=True)]

    return value_and_gradients
