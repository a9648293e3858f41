"""`ZeroRedundancyOptimizer`: each rank keeps the state of some parameters, updates them, and sends them to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.comm import Group, current
from simparallel.errors import InputError
from simparallel.optim.optimizer import Optimizer
from simparallel.optim.owners import longest_first


class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer whose state is divided over the ranks, with PyTorch's names: ZeRO-1 by whole parameters.

    The model and its gradients are whole on every rank, and equal, as `DistributedDataParallel` makes them. A rank has
    the state of its own parameters alone; after a step they are broadcast. The largest parameter goes to the rank with
    the fewest elements so far, the first of them, and so on: a rank has at most one parameter more than the mean.

    The results are those of `optimizer_class`, bit for bit. In everything else this is an `optimizer_class`. See
    `fully_shard(module, parameter="R", gradient="P", state="S")` for slices of equal sizes and less communication.

    Args:
        params: as for `optimizer_class`; the same on every rank, in the same order.
        optimizer_class: such as `sp.optim.Adam`.
        process_group: ranks that share the work; None for all.
        settings: of `optimizer_class`.

    Attributes:
        owners: parameter -> position in the group of the rank that updates it.

    Raises:
        InputError: a sharded parameter; and the errors of `optimizer_class`.

    Collective: `step` and `consolidate_state_dict`.
    Cost: a step receives the parameters of the other ranks, in addition to 2 (P-1)/P for the reduction of gradients.

    Example:
        >>> net = sp.nn.Linear(3, 2)
        >>> optimizer = sp.parallel.ZeroRedundancyOptimizer(net.parameters(), sp.optim.Adam, lr=0.01)
        >>> list(optimizer.owners.values())
        [0, 0]
    """

    def __new__(cls, params: Any, optimizer_class: Any, *args: Any, **settings: Any) -> ZeroRedundancyOptimizer:
        # In everything else it is an optimizer of this class.
        return object.__new__(type(cls.__name__, (cls, optimizer_class), {"__module__": cls.__module__}))

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        optimizer_class: type[Optimizer],
        *,
        process_group: Group | None = None,
        **settings: Any,
    ) -> None:
        self.owners: dict[Tensor, int] = {}
        self._group = process_group or current().world
        self._loads = [0] * self._group.size
        self._whole_state: dict[int, Any] | None = None
        optimizer_class.__init__(self, params, **settings)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add parameters with their own settings, and choose their owners. Raise InputError, see the class."""
        super().add_param_group(group)
        params = self.param_groups[-1]["params"]
        self.owners.update(zip(params, longest_first([p.size for p in params], self._loads), strict=True))

    def _check_param(self, i: int, param: Any, known: set[Tensor]) -> None:
        super()._check_param(i, param, known)
        if param.placement is not None:
            raise InputError(
                f"ZeroRedundancyOptimizer: params[{i}] is sharded, and so is its state: use optimizer_class itself."
            )

    def _step(self, grads: list[Any]) -> None:
        params, rank = self._params(), self._group.rank
        super()._step([g if self.owners[p] == rank else None for p, g in zip(params, grads, strict=False)])
        self._whole_state = None
        if self._group.size > 1:
            ranks, group = self._group.ranks, self._group
            for work in [collectives.broadcast(p, ranks[self.owners[p]], group, async_op=True) for p in params]:
                work.wait()

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the state of all parameters on one rank, for its `state_dict()`. Collective: yes.

        Args:
            to: a rank of the run; None for all ranks of the group, as a CheckpointManager needs it.
        """
        own, group = super().state_dict()["state"], self._group
        gather_to_all = collectives.all_gather_object
        parts = gather_to_all(own, group) if to is None else collectives.gather_object(own, to, group)
        self._whole_state = None if parts is None else {i: state for part in parts for i, state in part.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as `optimizer_class` does.

        Raises:
            InputError: it was not collected on this rank since the last step.
        """
        found = super().state_dict()
        if self._group.size > 1:
            if self._whole_state is None:
                raise InputError(
                    "ZeroRedundancyOptimizer: this rank has the state of its own parameters alone; all ranks call "
                    "consolidate_state_dict(to=rank) after the last step, or to=None to have it on all."
                )
            found["state"] = dict(sorted(self._whole_state.items()))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load settings, and the state of this rank's parameters. Arguments and errors as `Optimizer` has them."""
        super().load_state_dict(state_dict)
        self.state = {p: state for p, state in self.state.items() if self.owners[p] == self._group.rank}
