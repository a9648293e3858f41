"""SyncBatchNorm: batch norm with the statistics of the whole batch, over all ranks.

The arithmetic is in the op `BatchNorm`, which asks its context to complete sums over the batch dim. Here the
context sums over the ranks of a group; that is the only difference.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, Self

import numpy as np

from simparallel import collectives
from simparallel.arrays.host.arrays import HostArrays
from simparallel.autograd import BatchNorm, Context, Plan
from simparallel.backend import Array, has_data
from simparallel.comm import Group, current
from simparallel.errors import InputError
from simparallel.nn.module import Module
from simparallel.nn.normalization import AbstractBatchNorm

# A count is sent with the sums, as two digits in this base: each digit is exact in float32.
_DIGIT = 4096


class SyncContext(Context):
    """The context of a batch norm with a batch that is cut over the ranks of a group, in parts of any sizes.

    Its collectives use the group of the model's gradients. That cannot deadlock: every rank calls them in the same
    order, that of the layers in forward and that of the autograd graph in backward. The same walk over the graph starts
    the all-reduces of gradient buckets, so their order among these collectives is fixed as well (if ranks may have
    different graphs, `Reducer` starts them after the walk). But a sum of a few numbers waits for the buckets that were
    started before it; with a group of its own, `process_group=sp.new_group(...)`, it does not.
    """

    def __init__(self, arrays: HostArrays, needs: tuple[bool, ...], plan: Plan, group: Group | None) -> None:
        super().__init__(arrays, needs, plan)
        self._group = group
        self._num_summed: int | None = None

    def sum_over(self, dims: str, x: Array, group_size: int | None = None) -> Array:
        """Sum over the batch; the first exchange also counts the elements, on all ranks."""
        names = dims.split()
        # Sums without the batch dim are complete on this rank.
        if "n" not in names:
            return x
        if self._num_summed is not None:
            return collectives.all_reduce(self.xp.ascontiguousarray(x), "sum", self._group)
        count = prod(self.plan.sizes[name] for name in names)
        digits = self.xp.asarray(divmod(count, _DIGIT), dtype=x.dtype)
        both = collectives.all_reduce(self.xp.concatenate([x.reshape(-1), digits]), "sum", self._group)
        if has_data(both):
            self._num_summed = int(both[-2]) * _DIGIT + int(both[-1])
        else:
            # Without data the count affects no result, so other ranks' parts, which may differ, are taken as equal.
            self._num_summed = count * (self._group or current().world).size
        return both[:-2].reshape(x.shape)

    def sizes(self, dims: str, group_size: int | None = None) -> int:
        """Return the number of elements in a sum over the batch, on all ranks; their parts may differ in every dim."""
        if self._num_summed is None or "n" not in dims.split():
            return super().sizes(dims)
        return self._num_summed


class SyncBatchNorm(AbstractBatchNorm):
    """Batch norm over a batch that is cut over ranks: x is (n, c, ...), this rank's part, of any n.

    In training, y, the gradient of x and the running statistics are as on one device with the whole batch; parts may
    be uneven, or empty. The gradients of weight and bias are sums over this rank's part, as in every layer:
    DistributedDataParallel reduces them. After `eval()`, and on one rank, it equals `BatchNorm1d` or `BatchNorm2d`.

    Args:
        num_features, eps, momentum, affine, track_running_stats, dtype, weight_init, bias_init, running_mean_init,
            running_var_init: as for `BatchNorm2d`.
        process_group: ranks that share the batch; None for all.

    Raises:
        InputError: a bad setting. When called, ShapeError for other dims or channels, and if the whole batch has one
            element per channel.

    Collective: yes, every forward in training (2 small all-reduces) and its backward (1).
    Cost: 2 c + 2 numbers in forward and 2 c in backward, per rank.

    Example:
        >>> layer = sp.nn.SyncBatchNorm(3)
        >>> layer(np.ones((2, 3, 4, 4), np.float32)).shape
        (2, 3, 4, 4)
    """

    _dims = (2, 3, 4, 5)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group | None = None,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
        running_mean_init: Any = 0.0,
        running_var_init: Any = 1.0,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, dtype, weight_init=weight_init,
            bias_init=bias_init, running_mean_init=running_mean_init, running_var_init=running_var_init,
        )  # fmt: skip
        self.process_group = process_group
        self._op_here = BatchNorm(self.eps)
        self._op.context_type = partial(SyncContext, group=process_group)

    def _batch_op(self) -> BatchNorm:
        """Return the op for batch statistics.

        Outside training the statistics are this rank's own, because other ranks might not call the layer.
        """
        return self._as_set(self._op if self.training else self._op_here)

    def _replica(self) -> Self:
        raise InputError(
            "SyncBatchNorm: its statistics are exchanged between ranks, which the threads of one rank cannot do. Use "
            "DistributedDataParallel in place of DataParallel, or BatchNorm."
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: Group | None = None) -> Module:
        """Replace every BatchNorm of a model by a SyncBatchNorm, in place.

        Parameters and buffers are the same objects as before, so existing optimizers stay valid.

        Args:
            module: the model, or a BatchNorm itself.
            process_group: ranks that share the batch; None for all. Layers that are SyncBatchNorm already get it, too.

        Returns:
            The model; for a BatchNorm its replacement.

        Collective: no. Convert before the model is wrapped.
        """
        done: dict[int, Module] = {}

        def convert(old: Module) -> Module:
            if not isinstance(old, AbstractBatchNorm):
                return old
            if isinstance(old, cls) and old.process_group is process_group:
                return old
            # A layer that appears twice is converted once.
            if id(old) not in done:
                done[id(old)] = cls._in_place_of(old, process_group)
            return done[id(old)]

        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                parent._modules[name] = None if child is None else convert(child)
        return convert(module)

    @classmethod
    def _in_place_of(cls, old: AbstractBatchNorm, process_group: Group | None) -> SyncBatchNorm:
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_group)
        # Share the old tensors instead of the new ones, under the old names.
        new.__dict__.update(_renamed=old._renamed, _parameters={**old._parameters}, _buffers={**old._buffers})
        for name in ("_weight_init", "_bias_init", "_mean_init", "_var_init", "_path"):
            new.__dict__[name] = getattr(old, name)
        new.training = old.training
        return new


convert_sync_batchnorm = SyncBatchNorm.convert_sync_batchnorm
