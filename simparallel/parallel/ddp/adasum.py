"""Adasum in training: of gradients, as a communication hook, or of the weight updates that optimizers make.

    ddp.register_comm_hook(None, comm_hooks.adasum_hook)          # gradients
    optimizer = AdasumOptimizer(sp.optim.Adam(model.parameters()))  # deltas of the weights

An optimizer is not linear, so the two differ except for plain SGD; the paper uses the deltas. Adasum is applied to
each parameter separately, however parameters are grouped for communication.

On several nodes, gradients may be averaged inside a node and summed by Adasum across the nodes: `Nodes`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace, to_host
from simparallel.base.checks import check_integer, check_state
from simparallel.clock.memory import OPTIMIZER
from simparallel.comm import Group, Work, current
from simparallel.errors import InputError, StateDictError
from simparallel.optim import GradScaler, LossScaleManager, Optimizer
from simparallel.optim.optimizer import call_closure
from simparallel.parallel.ddp.buckets import Bucket, GradBucket, by_dtype
from simparallel.parallel.ddp.same_model import check_same_tensors
from simparallel.world.rank import get_nodes, get_rank, get_world_size


class Nodes:
    """Ranks on nodes, for Adasum in two stages: the mean inside a node, Adasum across the nodes.

    The parameters are divided among the ranks of a node, each whole, with about equally many elements per rank. Each
    rank combines its parameters with the ranks of the same position on the other nodes, and broadcasts them inside its
    node.

    Args:
        nodes: the global ranks of each node, equally many; their order is the order of the tree. None for the nodes of
            the run.

    Attributes:
        node: the group of this rank's node.
        across: the group of the ranks with the same position on each node.

    Raises:
        InputError: nodes of different sizes, or not every rank of the world on exactly one node.

    Collective: yes, over all ranks of the world.
    """

    def __init__(self, nodes: Sequence[Sequence[int]] | None = None) -> None:
        nodes = get_nodes() if nodes is None else nodes
        self.nodes = tuple(tuple(int(rank) for rank in node) for node in nodes)
        world, sizes = get_world_size(), {len(node) for node in self.nodes}
        if sorted(rank for node in self.nodes for rank in node) != list(range(world)) or len(sizes) != 1:
            raise InputError(
                f"nodes={list(map(list, self.nodes))}: each of the {world} ranks must be on exactly one node, and "
                "the nodes must be equally large."
            )
        rank = get_rank()
        self.node = self.across = current().world
        # `new_group` is a collective: every rank creates all groups, in the same order.
        for ranks in (*self.nodes, *zip(*self.nodes, strict=True)):
            group = collectives.new_group(ranks)
            if rank in ranks:
                # The first groups are the nodes, the others connect equal positions on all nodes.
                self.node, self.across = (group, self.across) if ranks in self.nodes else (self.node, group)
        if len(self.nodes) == 1:
            self.node = current().world
            self._warn_of_one()

    def _warn_of_one(self) -> None:
        if self.node.size > 1 and self.node.rank == 0:
            warnings.warn(
                f"Adasum across nodes: there is one node with all {self.node.size} ranks, so what comes out is the "
                "plain MEAN, no Adasum at all. Give several nodes (boost: device_number in its section common says how "
                "many ranks a node has), or leave `nodes` out for Adasum over all ranks.",
                stacklevel=3,
            )

    def reduce(self, flat: Array, layers: Sequence[int], async_op: bool = False) -> Any:
        """Average inside the node, then apply Adasum across nodes, in place. Collective: yes.

        Args:
            flat: the layers, one after the other, in one array.
            layers: number of elements of each layer.
            async_op: return the `Work` at once.
        """
        work = collectives.all_reduce(flat, "mean", self.node, async_op=True)
        work = work.then(lambda _: self.reduce_across(flat, layers))
        return work if async_op else work.wait()

    def reduce_across(self, flat: Array, layers: Sequence[int]) -> Array:
        """Apply Adasum across nodes, in place, and return the array, which is equal inside each node. Collective: yes.

        Args:
            flat, layers: as for `reduce`.
        """
        if len(self.nodes) == 1:
            return flat
        if self.node.size == 1:
            # With one rank on each node there is nothing to divide.
            return collectives.adasum_layers(flat, layers, self.across)
        # The array is equal inside a node, so each rank combines a share of the layers and the node then collects them.
        parts = shares(layers, self.node.size)
        borders = [0, *np.cumsum(layers).tolist()]
        own = parts[self.node.rank or 0]
        mine = flat[borders[own.start] : borders[own.stop]]
        if mine.size:
            # Whole layers only: Adasum needs the dot products of a complete layer.
            collectives.adasum_layers(mine, layers[own], self.across)
        for part, rank in zip(parts, self.node.ranks, strict=True):
            piece = flat[borders[part.start] : borders[part.stop]]
            if piece.size:
                collectives.broadcast(piece, rank, self.node)
        return flat

    def __repr__(self) -> str:
        return f"Nodes({list(map(list, self.nodes))})"


def shares(layers: Sequence[int], count: int) -> list[slice]:
    """Return `count` runs of consecutive layers, one per rank, with about equally many elements."""
    ends = np.cumsum(layers)
    total = int(ends[-1]) if len(ends) else 0
    # A layer goes to the rank whose equal share of the elements contains the layer's middle.
    middles = ends - np.asarray(layers) / 2
    cuts = [0, *np.searchsorted(middles, [total * i / count for i in range(1, count)]).tolist(), len(layers)]
    return [slice(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


def adasum_hook(state: Any, bucket: GradBucket) -> Work:
    """Combine the ranks' gradients by Adasum, each parameter separately.

    A parameter that a rank did not use counts as zeros, the identity of Adasum: the other rank's gradient is not
    halved.

    Args:
        state: None for all ranks of the model, a group, or `Nodes`: the mean inside a node, Adasum across.
        bucket: gradients of a DistributedDataParallel.
    """
    layers = [view.size for view in bucket.gradients()]
    if isinstance(state, Nodes):
        return state.reduce(bucket.buffer(), layers, async_op=True)
    return collectives.adasum_layers(bucket.buffer(), layers, state or bucket.group, async_op=True)


class AdasumOptimizer:
    """An optimizer whose updates are combined over the ranks by Adasum, every `local_steps` steps.

        delta = weights after - weights before the last `local_steps` steps of this rank
        weights = weights before + T(the ranks' deltas), each parameter separately

    Each rank uses the gradients of its own batch and keeps its own optimizer state (momentum, …), which differs by
    rank; after each exchange the weights are equal on all ranks. The model must not average gradients itself. Each
    slice of a parameter that is cut, as in tensor parallelism, counts as a parameter. Other attributes (`param_groups`,
    `state`, …) are those of the wrapped optimizer.

    Args:
        optimizer: this rank's; on every rank it has the same parameters in the same order.
        group: ranks that share the work; by default all.
        nodes: `Nodes`, or the ranks of each node: gradients are averaged inside a node before each step, so that
            the node acts as one worker, and the deltas are combined across the nodes.
        local_steps: steps of each rank between two exchanges, 1 or more.
        init_sync: compare the parameters, and broadcast the first rank's now.

    Raises:
        InputError: both group and nodes are given, `local_steps` is below 1, or the ranks hold different slices of a
            parameter that is cut.
        CollectiveMismatchError: the ranks' parameters differ in shapes or dtypes.

    Collective: yes, the constructor and every `local_steps`-th step (with `nodes` every step).
    Cost: 2 (P-1)/P of the parameters' bytes per rank and exchange; memory for two more copies of them.

    Example:
        >>> model = sp.nn.Linear(2, 1)
        >>> sp.parallel.AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=0.1), local_steps=4)
        AdasumOptimizer(SGD: deltas of 4 steps, 2 parameters one by one, over 1 ranks)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        group: Group | None = None,
        nodes: Nodes | Sequence[Sequence[int]] | None = None,
        local_steps: int = 1,
        init_sync: bool = True,
    ) -> None:
        if group is not None and nodes is not None:
            raise InputError("AdasumOptimizer: give either a group or nodes, which cover all ranks.")
        self.optimizer = optimizer
        self.local_steps = check_integer("AdasumOptimizer", "local_steps", local_steps, 1)
        self.nodes = nodes if nodes is None or isinstance(nodes, Nodes) else Nodes(nodes)
        self.group = group
        self.steps_since_exchange = 0
        params = optimizer._params()
        if init_sync:
            named = ((f"parameter {i}", param, "trained") for i, param in enumerate(params))
            check_same_tensors("AdasumOptimizer", named, current(), group, "group")
            first = (group or current().world).ranks[0]
            for param in params:
                collectives.broadcast(param, first, group)
        communicator, parts = current(), by_dtype(params)
        # The weights before the local steps, and their changes.
        # In buckets, so that one collective per dtype exchanges all deltas.
        self._starts = [Bucket(part, communicator, OPTIMIZER) for part in parts]
        self._deltas = [Bucket(part, communicator, OPTIMIZER) for part in parts]

    # --- the optimizer interface --------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Not set yet while the object is being built or unpickled: avoid endless recursion.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of this rank's optimizer; after `local_steps` steps, exchange. Collective: at the exchange.

        Args:
            closure: as for `Optimizer.step`; its gradients are this rank's.
        """
        loss = call_closure(closure)
        if self.nodes is not None and self.nodes.node.size > 1:
            self._average_in_node()
        self._begin()
        self.optimizer.step()
        self._stepped()
        return loss

    def __call__(self, grads: Sequence[Tensor | Array | None]) -> None:
        """Take one step with these gradients, in the order of `parameters`. Collective: as `step`."""
        if self.nodes is None or self.nodes.node.size == 1:
            self._begin()
            self.optimizer(grads)
            self._stepped()
            return
        for param, grad in zip(self.optimizer.parameters, grads, strict=True):
            param.grad = grad if grad is None or isinstance(grad, Tensor) else param._gradient(grad)
        self.step()

    def _average_in_node(self) -> None:
        """Average the node's gradients; a missing gradient counts as zeros."""
        assert self.nodes is not None
        works = []
        # The delta buckets are unused until the exchange, so they serve as gradient buffers here.
        for bucket in self._deltas:
            for param, view in zip(bucket.tensors, bucket.views, strict=True):
                view[...] = 0 if param.grad is None else param.grad.data
            works.append(collectives.all_reduce(bucket.flat, "mean", self.nodes.node, async_op=True))
        for bucket, work in zip(self._deltas, works, strict=True):
            work.wait()
            for param, view in zip(bucket.tensors, bucket.views, strict=True):
                if param.grad is None:
                    param.grad = param._gradient(view.copy())
                else:
                    param.grad.data[...] = view

    def _begin(self) -> None:
        # Loaded at the first step and not after the exchange: the user may have changed the weights in between.
        if self.steps_since_exchange == 0:
            for bucket in self._starts:
                bucket.load()

    def _stepped(self) -> None:
        self.steps_since_exchange += 1
        if self.steps_since_exchange == self.local_steps:
            self.exchange()

    def exchange(self) -> None:
        """Combine the updates since the last exchange now. Collective: yes."""
        steps, self.steps_since_exchange = self.steps_since_exchange, 0
        if self._num_ranks == 1 or not steps:
            return
        works = []
        for start, delta in zip(self._starts, self._deltas, strict=True):
            for param, before, view in zip(delta.tensors, start.views, delta.views, strict=True):
                # Straight into the bucket that is sent.
                get_namespace(view).subtract(param.data, before, out=view)
            layers = [view.size for view in delta.views]
            if self.nodes is None:
                works.append(collectives.adasum_layers(delta.flat, layers, self.group, async_op=True))
            else:
                self.nodes.reduce_across(delta.flat, layers)
        for work in works:
            work.wait()
        for start, delta in zip(self._starts, self._deltas, strict=True):
            # `delta` now holds the combined update.
            # Added to the saved weights, not to the current ones, which contain this rank's own update.
            start.flat += delta.flat
            start.store()

    @property
    def _num_ranks(self) -> int:
        return (self.group or current().world).size

    # --- saving and loading ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's optimizer and its progress between two exchanges. Differs by rank."""
        # Just after an exchange the weights are the model's, which the checkpoint has anyway.
        starts = [to_host(bucket.flat).copy() for bucket in self._starts] if self.steps_since_exchange else []
        return {
            "optimizer": self.optimizer.state_dict(), "steps_since_exchange": self.steps_since_exchange,
            "starts": starts, "ranks": self._num_ranks,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state of this rank; load the model's parameters first.

        Raises:
            StateDictError: the state is of another optimizer or of other parameters, or was saved between two exchanges
                on another number of ranks.
        """
        check_state("AdasumOptimizer", state_dict, ("optimizer", "steps_since_exchange", "starts", "ranks"))
        starts = state_dict["starts"]
        sizes, wanted = [len(start) for start in starts], [bucket.flat.size for bucket in self._starts]
        if starts and sizes != wanted:
            raise StateDictError(f"AdasumOptimizer: the saved weights have {sizes} elements, expected {wanted}.")
        steps, ranks = state_dict["steps_since_exchange"], state_dict["ranks"]
        # Deltas in progress belong to the weights of one rank and cannot be redistributed.
        if steps and ranks != self._num_ranks:
            raise StateDictError(
                f"AdasumOptimizer: saved {steps} steps after an exchange, when each of {ranks} ranks had its own "
                f"weights; this run has {self._num_ranks} ranks. Use {ranks} ranks, or call exchange() before saving."
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.steps_since_exchange = int(state_dict["steps_since_exchange"])
        for bucket, start in zip(self._starts, starts, strict=False):
            bucket.flat[...] = get_namespace(bucket.flat).asarray(start)

    def __repr__(self) -> str:
        count = sum(len(bucket.tensors) for bucket in self._starts)
        where = f"over {self._num_ranks} ranks"
        if self.nodes is not None:
            where = f"across {len(self.nodes.nodes)} nodes, averaged over the {self.nodes.node.size} ranks of each"
        steps = f"{self.local_steps} steps" if self.local_steps > 1 else "each step"
        return (
            f"AdasumOptimizer({type(self.optimizer).__name__}: deltas of {steps}, {count} parameters one by one, "
            f"{where})"
        )


class DistributedGradScaler(GradScaler):
    """A `GradScaler` shared by all ranks: they have one scale, and all ranks or none take a step.

    Adasum commutes with a common scale, T(S g) / S = T(g), but not with different scales. Where ranks step with their
    own gradients, as with `AdasumOptimizer`, all ranks must know of each rank's overflow before the update.

    Args:
        manager: as for `GradScaler`; with the same settings on every rank.
        group: ranks that share the work; by default all.

    Raises:
        InputError: the ranks' scales differ.

    Collective: yes, the constructor, every `unscale_` (or `step`) and `load_state_dict`.
    """

    def __init__(self, manager: LossScaleManager | None = None, group: Group | None = None) -> None:
        super().__init__(manager, self._on_any_rank)
        self._group = group
        self._check_shared()

    def _on_any_rank(self, overflow: bool) -> bool:
        # If one rank overflows, all skip, or the ranks' scales would differ from then on.
        flag = np.array([overflow])
        return bool(collectives.all_reduce(flag, "or", self._group)[0])

    def _check_shared(self) -> None:
        # Compared once: from equal scales, equal decisions keep them equal.
        scales = collectives.all_gather(np.array([self.get_scale()]), group=self._group)
        if not (scales == scales[0]).all():
            raise InputError(
                f"DistributedGradScaler: the ranks' loss scales differ: {scales.tolist()}. Adasum and means need one "
                "scale; create the managers with the same settings."
            )

    def load_state_dict(self, state_dict: Any) -> None:
        """Resume from another scaler's state. Collective: yes."""
        super().load_state_dict(state_dict)
        self._check_shared()
