"""Activation checkpointing: keep the inputs of a part of the network, and compute the rest again.

Chen et al. 2016, "Training deep nets with sublinear memory cost". The part runs forward without a
tape; backward runs it once more, with one, and goes on through that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from simparallel.autograd import Tensor, no_grad, run_backward
from simparallel.autograd.tape import Node, Reversible, grad_mode
from simparallel.backend import Array, random_state
from simparallel.errors import AutogradError


def checkpoint(part: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`part(*inputs)`, with only the inputs kept for backward.

    Args:
        part: a Module, or a function of Tensors; it runs twice and must do the same both times.
            Random numbers it draws from this rank's state are the same both times.
        inputs: Tensors, or anything else that is passed on.

    Returns:
        What `part` returns: one Tensor.

    Raises:
        AutogradError: `part` returned something else.

    Cost: one more forward pass of `part`; memory for its inputs instead of its activations.
    """
    drawn, shared = random_state.snapshot(), random_state.part
    with no_grad():
        y = part(*inputs)
    if not isinstance(y, Tensor):
        raise AutogradError(f"checkpoint: the part returned {type(y).__name__}, it must return one Tensor.")
    parameters = list(part.parameters()) if hasattr(part, "parameters") else []
    sources = [x for x in inputs if isinstance(x, Tensor)] + parameters
    needs = tuple(source.requires_grad for source in sources)
    if not (grad_mode.enabled and any(needs)):
        return y
    context = SimpleNamespace(needs=needs, inputs=inputs, drawn=drawn, part=shared, outdated=False)
    node = Node(_Recompute(part, parameters), context, sources)  # type: ignore[arg-type]
    return Tensor._result(y.data, node, y._device)


class _Recompute(Reversible):
    """Stands on the tape for a part that will be computed again."""

    def __init__(self, part: Callable[..., Tensor], parameters: Sequence[Tensor]) -> None:
        self._part = part
        self._parameters = parameters

    def run_backward(self, context: Any, dy: Array) -> list[Array | None]:
        tensors = [x for x in context.inputs if isinstance(x, Tensor)]
        leaves = {id(x): Tensor(x, requires_grad=x.requires_grad) for x in tensors}
        inputs = [leaves.get(id(x), x) if isinstance(x, Tensor) else x for x in context.inputs]
        found: dict[int, Array] = {}
        # Parameters of a replica come from an op: here they are leaves, and what is behind them waits.
        nodes = [p._node for p in self._parameters]
        try:
            for p in self._parameters:
                p._node = None
            y = self._again(inputs, context)
            run_backward(y, dy, lambda leaf, gradient: found.update({id(leaf): gradient}))
        finally:
            for p, node in zip(self._parameters, nodes, strict=True):
                p._node = node
        # A tensor that was given twice is one leaf: its gradient belongs to its first place.
        return [found.pop(id(leaves[id(x)]), None) for x in tensors] + [
            found.get(id(p)) for p in self._parameters
        ]

    def _again(self, inputs: Sequence[Any], context: Any) -> Tensor:
        """The forward pass once more, with the random numbers of the first time, on the tape."""
        before, part, was_enabled = random_state.snapshot(), random_state.part, grad_mode.enabled
        random_state.restore(context.drawn)
        random_state.part = context.part
        grad_mode.enabled = grad_mode.recomputing = True
        try:
            return self._part(*inputs)
        finally:
            random_state.restore(before)
            random_state.part = part
            grad_mode.enabled, grad_mode.recomputing = was_enabled, False

    def __repr__(self) -> str:
        return f"checkpoint({self._part!r})"
