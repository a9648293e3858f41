"""Uneven inputs: ranks without inputs shadow the communication of the others."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.errors import InputError, UnevenInputsError
from simparallel.rank_local import RankLocal, per_rank

if TYPE_CHECKING:
    from simparallel.parallel.ddp.distributed import DistributedDataParallel


class _Open(RankLocal):
    """The `join` blocks that this rank is inside."""

    joins: list[Join] = per_rank(list)


_open = _Open()


class Turn(NamedTuple):
    """The communication of the next forward pass and its backward."""

    # Its backward reduces gradients.
    reduces: bool
    sends_buffers: bool


class Join:
    """A block around a training loop in which ranks may have different numbers of inputs.

    Before each forward pass of the model, every rank reports whether it has an input. A rank that has left its loop
    takes part in the communication of the others and contributes zeros. Once all ranks have left, one of the last ranks
    broadcasts its parameters and buffers; optimizer states are not copied, so ranks that left early have taken fewer
    steps.

    Inside the block, each forward pass of the model is reported (under `no_sync()` or `no_grad()` as well), and each
    backward belongs to one forward. The model must not communicate by itself (as `SyncBatchNorm` does): only the
    wrapper's communication is shadowed. Use `throw_on_early_termination` for such models.

    Args:
        model: the wrapped model.
        divide_by_initial_world_size: divide gradients by the number of ranks; else by the number of ranks that still
            have inputs, so that each input has the same weight within its step.
        enable: False makes the block a no-op.
        throw_on_early_termination: all ranks raise `UnevenInputsError` as soon as one rank has no more inputs.

    Raises:
        InputError: gradients are to be divided by the number of ranks left, but a hook reduces them; on entry, this
            rank is already inside another block.
        UnevenInputsError: see above.

    Collective: yes, every forward, and the end of the block. An error inside the block ends it at once.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> None:
        self._model = model
        self._divide_by_all = divide_by_initial_world_size
        self._enable = enable
        self._throw = throw_on_early_termination
        self._source = model._share.ranks[0]
        if enable and not divide_by_initial_world_size and model._reducer.hook is not None:
            raise InputError(
                "join: the model's communication hook divides gradients in its own way, which "
                "divide_by_initial_world_size=False cannot change. Use only one of the two."
            )

    def __enter__(self) -> Join:
        if self._enable:
            if _open.joins:
                which = "this model" if self._model._join is not None else "another model"
                raise InputError(
                    f"join: {which} is inside of a join() block already, and a rank without inputs could not know "
                    "which model comes next. Put both into one module, wrap that, and join it."
                )
            self._model._join = self
            _open.joins.append(self)
        return self

    def announce(self, turn: Turn) -> int:
        """Report that this rank has an input; return the rank whose buffers are broadcast. Collective: yes."""
        active, _ = self._exchange(turn)
        # None divides by all ranks, as without the block.
        self._model._reducer.num_active = None if self._divide_by_all else len(active)
        return self._source

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enable:
            return
        model = self._model
        try:
            # Shadow the steps of the other ranks until none has inputs. After an error, leave at once.
            while error is None:
                active, turn = self._exchange(None)
                if not active:
                    # Ranks that left early have missed steps; one of the last active ranks has taken them all.
                    model._copy_from(self._source)
                    break
                model._reducer.num_active = None if self._divide_by_all else len(active)
                model._shadow(turn, self._source)
        finally:
            model._join = None
            _open.joins.remove(self)
            model._reducer.num_active = None

    def _exchange(self, turn: Turn | None) -> tuple[list[int], Turn]:
        """Return the ranks that have inputs, and their next turn. `turn` is None if this rank has no input."""
        share = self._model._share
        # One row per rank: has an input, reduces gradients, sends buffers.
        # Small integers instead of objects: this exchange happens in every step.
        own = np.array([turn is not None, *(turn or Turn(False, False))], np.int64)
        rows = collectives.all_gather(own, group=self._model.process_group).reshape(share.size, -1)
        active = [rank for rank, row in zip(share.ranks, rows, strict=True) if row[0]]
        left = [rank for rank in share.ranks if rank not in active]
        # Every rank has the same rows, so all raise together.
        if self._throw and active and left:
            raise UnevenInputsError(
                f"join: rank {left[0]} has no more inputs, while {len(active)} of {share.size} ranks still have some "
                "(throw_on_early_termination=True). Give every rank the same number of inputs.",
                ranks=left,
            )
        # Ranks without inputs shadow one turn, so all active ranks must agree on it.
        turns = {tuple(row[1:].tolist()) for row in rows if row[0]}
        if len(turns) > 1:
            raise InputError(
                f"join: ranks {active} continue, some inside of no_sync() or no_grad() and some not; use "
                "these blocks in the same steps on all ranks."
            )
        if active:
            # Unchanged once no rank has inputs: it then names a rank that has taken all steps.
            self._source = active[0]
        return active, Turn(*map(bool, turns.pop())) if turns else Turn(False, False)
