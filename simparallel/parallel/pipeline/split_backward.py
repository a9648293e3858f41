"""Backward in two parts: the gradient of a stage's input now, those of its weights later.

Between ranks only the input's gradient is on the critical path (Qi et al. 2023, "Zero bubble pipeline parallelism",
arXiv 2401.10241). Every op computes the gradients that its context asks for, so it is asked twice. A part that is
recomputed runs again once: what is left for later are nodes of the graph that this run records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from simparallel.autograd import Tensor, run_backward
from simparallel.autograd.tape import Node, Reversible, node_of, nodes_behind
from simparallel.backend import Array, get_namespace

Deliver = Callable[[Tensor, Array], None]
# An op, the inputs whose gradients are still to be computed, and the gradient of its result.
Late = tuple[Node, tuple[bool, ...], Array]


def joined(ends: Sequence[tuple[Tensor, Array]], xp: Any) -> tuple[Tensor, Array]:
    """Return a root from which backward reaches all these tensors with their gradients, and the root's own gradient."""
    if len(ends) == 1:
        return ends[0]
    zero = xp.zeros((), np.float32)
    tensors, gradients = [x for x, _ in ends], [gradient for _, gradient in ends]
    return Tensor._result(zero, node_of(tensors, lambda ctx, dy: gradients) if ends else None), zero


class _First(Reversible):
    """A stand-in for an op with weights: it computes the other inputs' gradients, and keeps the rest for later."""

    def __init__(self, node: Node, needs: tuple[bool, ...], late: list[Late]) -> None:
        self._op, self._needs, self._late = node.op, needs, late
        # Backward clears the node itself.
        self._node = copy(node)
        # They have seen the gradient that is kept for later.
        self._node.hooks = None

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        if True in ctx.needs and self._op.runs_modules:
            wanted = {id(x) for x, needed in zip(ctx.sources, ctx.needs, strict=True) if needed}
            ctx.prepare = partial(_defer, wanted=wanted, late=self._late)
        else:
            self._late.append((self._node, self._needs, dy))
        return self._op.run_backward(ctx, dy) if True in ctx.needs else (None,) * len(self._node.inputs)

    def __repr__(self) -> str:
        return repr(self._op)


def input_gradient(root: Tensor, seed: Array, leaves: Sequence[Tensor], deliver: Deliver) -> Callable[[], None]:
    """Run backward from `root` to these leaves; return a function that computes the gradients of all others.

    Args:
        root: the result of the stage.
        seed: its gradient.
        leaves: the values that the stage started from.
        deliver: gets each leaf with its gradient; a leaf with uses in both parts, twice.
    """
    late: list[Late] = []
    _defer(root, {id(x) for x in leaves}, late)
    run_backward(root, seed, deliver)

    def weight_gradients() -> None:
        ends = []
        for node, needs, dy in late:
            assert node.ctx is not None
            node.ctx.needs = needs
            ends.append((Tensor._result(dy, node), dy))
        late.clear()
        if ends:
            run_backward(*joined(ends, get_namespace(seed)), deliver)

    return weight_gradients


def _defer(root: Tensor, wanted: set[int], late: list[Late]) -> None:
    """Make all ops that lead to `root` keep the gradients of their leaves, except the wanted ones, for later."""
    for node in nodes_behind([root]):
        assert node.ctx is not None
        needs = node.ctx.needs
        of_leaves = tuple(
            n and not isinstance(x, Node) and id(x) not in wanted for x, n in zip(node.inputs, needs, strict=True)
        )
        if True in of_leaves:
            node.op = _First(node, of_leaves, late)  # type: ignore[assignment]
            node.ctx.needs = tuple(n and not leaf for n, leaf in zip(needs, of_leaves, strict=True))
