"""The interpreters of ops that read a stored parameter outside of the module that gathers it.

There it is a slice, or it is whole and nobody would reduce its gradient, or it was freed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.interpreter import AbstractInterpreter, NamedInterpreter
from simparallel.autograd.tensor import Tensor
from simparallel.backend import Array
from simparallel.base.attributes import setting
from simparallel.errors import LayoutError
from simparallel.layout.mesh import Mesh
from simparallel.optim.optimizer import optimizers_of
from simparallel.parallel.operator.interpreter import ShardedInterpreter, implicit_replication


class AbstractOfGroup(AbstractInterpreter):
    """Base of interpreters of a group's parameters."""

    def __init__(self, along: tuple[Mesh, tuple[str, ...]]) -> None:
        self.along = along

    def __reduce__(self) -> Any:
        return interpreter, (type(self), self.along)


class StoredInterpreter(AbstractOfGroup, ShardedInterpreter):
    """Runs ops on stored parameters among themselves, such as a norm; refuses to combine them with activations."""

    def data_of(self, x: Tensor) -> Array:
        """Return the slice, read-only but for an optimizer's update. An array on a GPU has no such flag.

        Other ranks may have a copy, which they gather again after a write that the Tensor notes.
        """
        if not isinstance(x._data, np.ndarray) or any(each.is_updating for each in optimizers_of((x,))):
            return x._data
        return np.broadcast_to(x._data, x._data.shape, subok=True)

    def run(self, op: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Run the op on the slices of this rank.

        Raises:
            LayoutError: a stored parameter meets a plain tensor, which differs between the ranks.
        """
        plain = next((x for x in inputs if x.placement is None and x.shape), None)
        if plain is not None:
            name = next((x.name for x in inputs if x.placement is not None), "") or "a parameter"
            raise LayoutError(
                f"{op.described}: {name} is sharded by fully_shard, and only the forward of its module gathers it. "
                "Call fully_shard for a module that contains all its uses, as for tied weights, or full_tensor() for "
                "its values."
            )
        place = next(x.placement for x in inputs if x.placement is not None)
        with implicit_replication(place.layout.mesh.ranks):
            return super().run(op, inputs)


class WholeInterpreter(AbstractOfGroup):
    """Runs ops whose inputs are all whole parameters; refuses other inputs where a parameter needs a gradient."""

    def run(self, op: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Run the op on the arrays of its inputs; a result that is not a number has this interpreter, too.

        Raises:
            LayoutError: a parameter meets a plain tensor, which differs between the ranks, and needs a gradient.
        """
        own = [x for x in inputs if type(x.interpreter) is WholeInterpreter]
        if not (grad_mode.enabled and any(x.requires_grad for x in own)):
            return None
        if any(type(x.interpreter) is not WholeInterpreter and x.shape for x in inputs):
            name = next((x.name for x in own if x.name), "a parameter")
            raise LayoutError(
                f"{op.described}: the gradient of {name} is reduced by fully_shard only where the forward of its "
                "module reads it. Call fully_shard for a module that contains all its uses, as for tied weights, or "
                "use detach()."
            )
        with setting(*own, interpreter=None):
            y: Tensor = op(*inputs)
        if y.shape and y.requires_grad:
            y.interpreter = self
        return y


class _Freed(NamedInterpreter):
    """Refuses ops on a whole parameter after the forward that read it."""

    def run(self, op: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Refuse the op.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(
            f"{op.described}: a parameter of a module that was given to fully_shard was kept after the forward of its "
            "module, which gathers it for this time alone. Read it from the module in each forward, or keep a "
            "detach().clone()."
        )


FREED = _Freed("FREED")


@cache
def interpreter(kind: type[AbstractOfGroup], along: tuple[Mesh, tuple[str, ...]]) -> AbstractOfGroup:
    """Return the interpreter of this kind for all groups that sum gradients along these axes of a mesh."""
    return kind(along)
