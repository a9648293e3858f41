"""Backward in two parts: the gradient of a stage's input now, those of its weights later.

Between ranks only the input's gradient is on the critical path (Qi et al. 2023, "Zero bubble pipeline parallelism",
arXiv 2401.10241). Every op computes the gradients that its context asks for, so it is asked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from simparallel.autograd import Tensor, run_backward
from simparallel.autograd.tape import Node, Reversible
from simparallel.backend import Array

Deliver = Callable[[Tensor, Array], None]


class _Late(NamedTuple):
    """The gradients of an op's weights that are still to compute."""

    op: Reversible
    ctx: Any
    inputs: Sequence[Tensor]
    needs: tuple[bool, ...]
    dy: Array


class _First(Reversible):
    """In the place of an op with weights: computes the gradients of its other inputs, and keeps the rest for later."""

    def __init__(self, node: Node, needs: tuple[bool, ...], late: list[_Late]) -> None:
        self._op, self._inputs, self._needs, self._late = node.op, node.inputs, needs, late

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        self._late.append(_Late(self._op, ctx, self._inputs, self._needs, dy))
        return self._op.run_backward(ctx, dy) if True in ctx.needs else (None,) * len(self._inputs)

    def __repr__(self) -> str:
        return repr(self._op)


def input_gradient(root: Tensor, seed: Array, leaves: Sequence[Tensor], deliver: Deliver) -> Callable[[], None]:
    """Run backward from `root` to these leaves; return a function that computes the gradients of all others.

    Args:
        root: the result of the stage.
        seed: its gradient.
        leaves: the values that the stage started from.
        deliver: gets each leaf with its gradient; of a leaf with several uses, one for each use.
    """
    late: list[_Late] = []
    _defer(root, {id(x) for x in leaves}, late)
    run_backward(root, seed, deliver)

    def weight_gradients() -> None:
        while late:
            op, ctx, inputs, needs, dy = late.pop(0)
            ctx.needs = needs
            for leaf, needed, gradient in zip(inputs, needs, op.run_backward(ctx, dy), strict=True):  # type: ignore[attr-defined]
                if needed and gradient is not None:
                    deliver(leaf, gradient)

    return weight_gradients


def _defer(root: Tensor, wanted: set[int], late: list[_Late]) -> None:
    """Let all ops behind `root` keep the gradients of their leaves, other than the wanted ones, for later."""
    stack, seen = [root._node], set()
    while stack:
        node = stack.pop()
        if node is None or id(node) in seen or node.ctx is None:
            continue
        seen.add(id(node))
        needs = node.ctx.needs
        of_leaves = tuple(
            n and t._node is None and id(t) not in wanted for t, n in zip(node.inputs, needs, strict=True)
        )
        stack += [t._node for t, needed in zip(node.inputs, needs, strict=True) if needed]
        if True in of_leaves:
            node.op = _First(node, of_leaves, late)  # type: ignore[assignment]
            node.ctx.needs = tuple(n and not leaf for n, leaf in zip(needs, of_leaves, strict=True))
