"""Strategies of ops: `shard` declares how an op is cut, `plan` shows what follows from it."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np


class Shardable:
    """The strategy of an op. `parallel.operator` runs and plans it."""

    named: Any  # name and settings of the op
    in_strategy: tuple[Any, ...] | None = None
    out_strategy: Any = None
    # Source line of the call of `shard`.
    _place = ""

    def shard(self, in_strategy: tuple[Any, ...], out_strategy: Any = None) -> Self:
        """Declare how this op is cut over the devices. This changes the op itself, so make one op for each strategy.

        The strategy applies to sharded inputs, and inside of `AutoParallel`. On plain tensors outside of it a run of
        several ranks raises StrategyError; one rank computes whole tensors.

        Args:
            in_strategy: for each input, a tuple with the number of slices per dim, or a `Layout` called with its dims.
            out_strategy: layout of the output, if a cut dim is summed or the output has a dim that no input has: a
                tuple of cuts or a `Layout`. By default the sum is all-reduced; if the summed axes cut a dim of the
                output, it is reduce-scattered. A new dim, such as the classes of `OneHot`, is whole by default; if it
                is cut, each rank computes its part of it.

        Returns:
            The op itself.

        Raises:
            StrategyError: neither tuples nor Layouts. Whether the strategy is legal depends on the shapes (see `plan`).
        """
        # Imported here, because few programs cut ops by hand, and imports take time.
        from simparallel.base.callsite import user_line
        from simparallel.layout.strategy import check_form

        self.in_strategy, self.out_strategy = check_form(type(self).__name__, in_strategy, out_strategy)
        self._place = user_line()
        return self

    def plan(self, *shapes: tuple[int, ...], device_num: int | None = None, dtype: Any = np.float32) -> Any:
        """Plan the strategy of `shard` for inputs of these global shapes, as an `OpPlan`.

        The plan has the slice of each rank, the communication in forward and backward, and its bytes. It can be
        printed and drawn, and notebooks show it. Nothing is computed, and no process is started.

        Args:
            shapes: global shapes of the inputs.
            device_num: number of devices; by default the devices of the run, or of the strategy's Layouts.
            dtype: dtype of the inputs, or one for each.

        Raises:
            StrategyError: the strategy is not legal; names the broken rule and the nearest legal strategies.
            InputError: shapes, dtypes or the number of devices are malformed.
        """
        from simparallel.parallel.operator.explain import explain_op

        return explain_op(self, shapes, device_num, dtype)  # type: ignore[arg-type]  # every Shardable is an Op

    # Dims in the order of the device matrix, if it differs from the rule.
    axis_order: ClassVar[tuple[str, ...]] = ()

    @property
    def repeat(self) -> str:
        """Position in the device matrix of the axis left over by a tuple strategy: "right" (last) or "left" (first)."""
        return "right"

    @property
    def strategy_text(self) -> str:
        """The call ".shard(...)" as text; empty without a strategy."""
        if self.in_strategy is None:
            return ""
        out = "" if self.out_strategy is None else f", {self.out_strategy!r}"
        return f".shard({self.in_strategy!r}{out})"

    @property
    def described(self) -> str:
        """Name and settings, and the source line of `shard`, for messages."""
        return f"{self.named}{f' ({self._place})' if self._place else ''}"
