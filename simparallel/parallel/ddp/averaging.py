"""Model averaging: ranks train independently, and average their weights periodically. PyTorch's names.

Local SGD communicates every `period` steps. Post-local SGD (Lin et al. 2020, "Don't use large mini-batches, use
local SGD") averages gradients in every step at first, and weights afterwards:

    state = PostLocalSGDState(None, subgroup=None, start_localSGD_iter=100)
    ddp.register_comm_hook(state, comm_hooks.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(SGD(ddp.parameters(), 0.1), PeriodicModelAverager(period=4, warmup_steps=100))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.base.checks import check_count, check_integer
from simparallel.base.units import format_type_of
from simparallel.comm import Group, Work, current
from simparallel.errors import InputError
from simparallel.optim import Optimizer
from simparallel.parallel.ddp.buckets import GradBucket, by_dtype


class PeriodicModelAverager:
    """An average of parameters over the ranks, due every `period` calls.

    Args:
        period: calls from one average to the next; 1 averages in each call.
        warmup_steps: number of initial calls that do nothing; the call after them averages.
        process_group: ranks that share the work; by default all.

    Attributes:
        step: calls so far; may be assigned, to the same value on every rank.

    Raises:
        InputError: period is below 1, or warmup_steps below 0.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Group | None = None) -> None:
        self.period = check_count("PeriodicModelAverager", "period", period)
        self.warmup_steps = check_integer("PeriodicModelAverager", "warmup_steps", warmup_steps)
        self.process_group = process_group
        self.step = 0

    def __repr__(self) -> str:
        return f"PeriodicModelAverager(period={self.period}, warmup_steps={self.warmup_steps}, step={self.step})"

    def average_parameters(self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]]) -> None:
        """Count a step; if an average is due, replace the parameters by their mean over the ranks.

        Args:
            params: parameters, or the `param_groups` of an optimizer; of equal shapes on every rank.

        Raises:
            InputError: a parameter is sharded: ranks hold different parts of it.
            CollectiveMismatchError: shapes or dtypes differ by rank; nothing was changed.

        Collective: when an average is due. Cost: 2 (P-1)/P of the parameters' bytes per rank.
        """
        number, self.step = self.step, self.step + 1
        # Counted from the end of the warm-up, so that the first call after it averages.
        if number < self.warmup_steps or (number - self.warmup_steps) % self.period:
            return
        # A dict drops duplicates and keeps the order, which must be the same on all ranks.
        tensors: dict[Tensor, None] = {}
        for entry in params:
            tensors |= dict.fromkeys([entry] if isinstance(entry, Tensor) else entry["params"])
        for i, tensor in enumerate(tensors):
            if tensor.placement is not None and not tensor._is_whole:
                raise InputError(
                    f"PeriodicModelAverager: parameter {i} of shape {tensor.shape} is sharded as {tensor.layout!r}: "
                    "the ranks hold different parts of it, which cannot be averaged."
                )
        with current().for_purpose("PeriodicModelAverager"):
            for part in by_dtype(list(tensors)) if tensors else ():
                collectives.all_reduce(part, "mean", self.process_group)


class PostLocalSGDOptimizer:
    """An optimizer whose parameters are averaged over the ranks after its steps, at the intervals of `averager`.

    Other attributes are forwarded to `optim`. Learning-rate schedulers and checkpoints take `optim` itself.

    Args:
        optim: takes the steps of this rank.
        averager: counts these steps, and averages.

    Raises:
        InputError: `optim` is not an Optimizer, or `averager` not a PeriodicModelAverager.
    """

    def __init__(self, optim: Optimizer, averager: PeriodicModelAverager) -> None:
        if not isinstance(optim, Optimizer):
            raise InputError(f"PostLocalSGDOptimizer: optim is {format_type_of(optim)}, expected an Optimizer.")
        if not hasattr(averager, "average_parameters"):
            raise InputError(
                f"PostLocalSGDOptimizer: averager is {format_type_of(averager)}, expected a PeriodicModelAverager."
            )
        self.optim, self.averager = optim, averager

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, {self.averager!r})"

    def __getattr__(self, name: str) -> Any:
        # Not set yet while the object is being built or unpickled: avoid endless recursion.
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the optimizer, then average if it is due. Collective: when it averages."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and `step` of the averager."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`; if it has no `step`, the averager starts at 0, with a warning."""
        # The state is the wrapped optimizer's with one more key, as in PyTorch.
        own = {name: value for name, value in state_dict.items() if name != "step"}
        self.optim.load_state_dict(own)
        if "step" not in state_dict:
            warnings.warn("PostLocalSGDOptimizer: the state has no step; the averager begins at 0.", stacklevel=2)
        self.averager.step = int(state_dict.get("step", 0))


class PostLocalSGDState:
    """State of `post_localSGD_hook`.

    Args:
        process_group: ranks that average gradients at first; None for the model's group.
        subgroup: ranks that average gradients afterwards; None for the ranks of this rank's node.
        start_localSGD_iter: number of backward passes before the first local one.
        post_local_gradient_allreduce: False leaves gradients unreduced from then on.

    Attributes:
        iter: backward passes so far.
    """

    def __init__(
        self,
        process_group: Group | None,
        subgroup: Group | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = check_integer("PostLocalSGDState", "start_localSGD_iter", start_localSGD_iter)
        self.post_local_gradient_allreduce = bool(post_local_gradient_allreduce)
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Any:
    """Average over all ranks for `start_localSGD_iter` backward passes; then over the subgroup, or not at all.

    Args:
        state: settings and the number of backward passes so far.
        bucket: the gradients.
    """
    number = state.iter
    # A hook is called per bucket; the last bucket ends the backward.
    state.iter += bucket.is_last()
    if number < state.start_localSGD_iter:
        return _mean(bucket, state.process_group or bucket.group)
    if not state.post_local_gradient_allreduce:
        return bucket.buffer()
    if state.subgroup is None:
        # Made at the first local step: all ranks get here in the same backward.
        state.subgroup = current().node_group()
    return _mean(bucket, state.subgroup)


def _mean(bucket: GradBucket, group: Group | None) -> Work:
    work: Work = collectives.all_reduce(bucket.buffer(), "mean", group, async_op=True)
    return work
