"""The interpreter of ops that read a stored parameter: outside of the module that gathers it, there is only a slice."""

from __future__ import annotations

from typing import Any

from simparallel.autograd.tensor import Tensor
from simparallel.errors import LayoutError
from simparallel.parallel.operator.interpreter import ShardedInterpreter


class _Stored(ShardedInterpreter):
    """Runs ops on stored parameters among themselves, such as a norm; refuses to combine them with activations."""

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
        return super().run(op, inputs)


STORED = _Stored("STORED")
