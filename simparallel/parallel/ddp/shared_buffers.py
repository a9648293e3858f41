"""The buffers of a model in DistributedDataParallel: equal on all ranks, without gradients."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_not

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.backend import to_host
from simparallel.comm import Communicator, Group
from simparallel.nn import Module
from simparallel.parallel.ddp.buckets import Bucket, by_dtype


class SharedBuffers:
    """The buffers of a model, which ranks synchronize.

    Args:
        module: the model.
        communicator, group: of this rank, and the ranks that share the work; None for all.
        purpose: name of this object in the errors of its collectives.

    Attributes:
        registries: the buffers of each module.
        are_due: whether the ranks may have different buffers, because the last forward pass was one whose backward
            reduces.
    """

    def __init__(self, module: Module, communicator: Communicator, group: Group | None, purpose: str) -> None:
        self.registries = [m._buffers for m in module.modules()]
        self._communicator, self._group = communicator, group
        self._purpose = purpose
        self._known: list[Tensor] = []
        self._made: list[Bucket] | None = None
        self.are_due = True

    def broadcast(self, source: int) -> None:
        """Copy all buffers of rank `source` to all ranks, one collective for each dtype. Collective: yes."""
        if (self._group or self._communicator.world).size == 1:
            return
        for bucket in self._buckets():
            if self._communicator.rank == source:
                # Only the source's values count, so the others do not pack theirs.
                bucket.load()
            with self._communicator.for_purpose(self._purpose):
                collectives.broadcast(bucket.flat, src=source, group=self._group)
            if self._communicator.rank != source:
                bucket.store()

    def _buckets(self) -> list[Bucket]:
        """Return buckets with the buffers that the model has now: a forward pass may have replaced some."""
        buffers = [x for registry in self.registries for x in registry.values() if x is not None]
        # Keep the buckets while the model has the same tensors, and swap only their entries if new tensors have the
        # same shapes. Other shapes need new shared memory.
        known = self._made
        if known is None or len(buffers) != len(self._known) or any(map(is_not, buffers, self._known)):
            self._known = buffers
            # A buffer that two modules share is sent once.
            parts = by_dtype(list(dict.fromkeys(buffers)))
            shapes = [[(x.data.shape, x.dtype) for x in part] for part in parts]
            if known is not None and shapes == [[(x.data.shape, x.dtype) for x in b.tensors] for b in known]:
                for bucket, part in zip(known, parts, strict=True):
                    bucket.tensors = part
            else:
                known = self._made = [Bucket(part, self._communicator) for part in parts]
        return known


def broadcast_parameters(parameters: Iterable[Tensor], group: Group | None = None, src: int | None = None) -> None:
    """Copy the tensors of rank `src` to all ranks of the group, in place.

    Args:
        parameters: the same shapes and dtypes on every rank.
        group: by default all ranks.
        src: a global rank; by default the group's first.

    Collective: yes.
    """
    source = (group.ranks[0] if group else 0) if src is None else src
    for tensor in parameters:
        collectives.broadcast(tensor, src=source, group=group)


def max_difference_between_ranks(module: Module, group: Group | None = None) -> float:
    """Return the largest difference of any parameter element between any two ranks. Collective: yes.

    Args:
        module: the same model on every rank.
        group: the ranks to compare; by default all.
    """
    largest = np.float64(0)
    for parameter in module.parameters():
        high, low = to_host(parameter.data).copy(), to_host(parameter.data).copy()
        collectives.all_reduce(high, "max", group)
        # Maximum and minimum over the ranks give the largest difference of any pair without gathering the parameters.
        collectives.all_reduce(low, "min", group)
        if high.size:
            largest = np.maximum(largest, (high - low).max())
    return largest.item()
