"""DistributedDataParallel: every rank has the whole model and a part of each batch.

Backward makes gradients from the last layer to the first. They are laid into flat buckets, in
that order, and as soon as a bucket is full its all-reduce begins, while backward goes on (Li et
al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training"). The buckets
lie in the device's shared memory, so that peers read the gradients where they are, and
`parameter.grad` is a view of its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, at_backward_end
from simparallel.backend import Array, random_state, to_host
from simparallel.comm import Communicator, Group, Work, current
from simparallel.errors import CollectiveMismatchError, InputError, UnusedParameterError
from simparallel.events import current_recorder
from simparallel.memory import GRADIENTS
from simparallel.nn import Module

MIB = 1 << 20


class Bucket:
    """Gradients of some parameters, in one flat array.

    Attributes:
        flat: the array; shape (number of elements,), the parameters' dtype.
        views: for each parameter its part of `flat`, in the parameter's shape.
    """

    def __init__(self, parameters: list[Tensor], communicator: Communicator) -> None:
        self.parameters = parameters
        dtype = parameters[0].dtype
        size = sum(parameter.size for parameter in parameters)
        if isinstance(parameters[0].data, np.ndarray):
            self.flat: Array = communicator.empty(size, dtype)
        else:
            self.flat = type(parameters[0].data)((size,), dtype)  # on the parameter's own GPU
        recorder = current_recorder()
        if recorder is not None:
            recorder.memory.hold(self.flat, GRADIENTS)
        self.views: list[Array] = []
        start = 0
        for parameter in parameters:
            self.views.append(self.flat[start : start + parameter.size].reshape(parameter.shape))
            start += parameter.size
        self.missing: set[int] = set()
        self.work: Work | None = None


def make_buckets(parameters: Sequence[Tensor], cap_bytes: float, communicator: Communicator) -> list[Bucket]:
    """Parameters in reverse order, cut where a bucket would exceed `cap_bytes` or the dtype changes.

    A parameter that is larger than the cap has a bucket of its own.
    """
    buckets: list[list[Tensor]] = []
    filled = 0
    for parameter in reversed(parameters):
        size_bytes = parameter.size * parameter.dtype.itemsize
        fits = buckets and filled + size_bytes <= cap_bytes and buckets[-1][0].dtype == parameter.dtype
        if not fits:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size_bytes
    return [Bucket(bucket, communicator) for bucket in buckets]


class DistributedDataParallel(Module):
    """A model whose gradients are averaged over the ranks during backward.

    Parameters and buffers of rank 0 are copied to all ranks at the beginning. After
    `loss.backward()` every rank has the same gradients, bit for bit: the mean of the ranks', which
    for equal parts of a batch and a mean loss is the gradient of the whole batch.

    Args:
        module: the model; the same structure on every rank.
        group: ranks that share the work; by default all.
        bucket_cap_mb: largest bucket [MiB].

    Raises:
        InputError: no parameter requires a gradient, or a bad cap.
        CollectiveMismatchError: the ranks' models differ in names, shapes or dtypes.
        UnusedParameterError: (in backward) parameters that got no gradient.

    Collective: yes, the constructor and every backward.
    Cost: 2 (P-1)/P of the parameters' bytes per rank and step.

    Example:
        >>> model = DistributedDataParallel(Linear(3, 2))
        >>> model.module.weight.shape
        (2, 3)
    """

    def __init__(self, module: Module, *, group: Group | None = None, bucket_cap_mb: float = 25.0) -> None:
        super().__init__()
        if not bucket_cap_mb > 0:
            raise InputError(f"bucket_cap_mb={bucket_cap_mb!r} must be more than 0.")
        self.module = module
        self._communicator = current()
        self._group = group
        self._names = {id(p): name for name, p in module.named_parameters()}
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise InputError("DistributedDataParallel: no parameter of the module requires a gradient.")
        self._check_same_model()
        self._copy_from_first()
        self._buckets = make_buckets(parameters, bucket_cap_mb * MIB, self._communicator)
        self._running = False
        self._next = 0
        for bucket in self._buckets:
            for i, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(_Arrival(self, bucket, i))
        self._start_over()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._running:  # the last backward was left by an error
            self._start_over()
        group = self._group or self._communicator.world
        before, random_state.part = random_state.part, (group.rank or 0, group.size)
        try:
            return self.module(*inputs, **kwargs)
        finally:
            random_state.part = before

    def extra_repr(self) -> str:
        sizes = ", ".join(str(bucket.flat.nbytes) for bucket in self._buckets)
        return f"buckets of {sizes} bytes"

    # --- before training ----------------------------------------------------------------------------

    def _check_same_model(self) -> None:
        own = [
            (name, p.shape, str(p.dtype), "trained" if p.requires_grad else "frozen")
            for name, p in self.module.named_parameters()
        ]
        models = self._communicator.all_gather_object(own, self._group)
        for rank, other in enumerate(models):
            if other != models[0]:
                differing = [f"{a} vs {b}" for a, b in zip(models[0], other, strict=False) if a != b][:3]
                counts = f"{len(models[0])} and {len(other)} parameters"
                raise CollectiveMismatchError(
                    f"DistributedDataParallel: the models of rank 0 and rank {rank} differ: {counts}; "
                    f"first differences: {'; '.join(differing) or 'none but the number'}. Build the same model "
                    "on every rank.",
                    group="world", seq=0, calls={},
                )  # fmt: skip

    def _copy_from_first(self) -> None:
        first = self._group.ranks[0] if self._group else 0
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            collectives.broadcast(tensor, src=first, group=self._group)

    # --- during backward ------------------------------------------------------------------------------

    def _start_over(self) -> None:
        self._running = False
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.parameters)))
            bucket.work = None

    def _arrived(self, bucket: Bucket, i: int, parameter: Tensor) -> None:
        """A gradient is finished: lay it into its bucket, and send off what is full."""
        if not self._running:
            self._running = True
            at_backward_end(self._finish)
        view = bucket.views[i]
        assert parameter.grad is not None
        if parameter.grad.data is not view:
            view[...] = parameter.grad.data
            parameter.grad.data = view
        bucket.missing.discard(i)
        # In the order of the buckets, which is the same on every rank; gradients may not be.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            ready = self._buckets[self._next]
            ready.work = collectives.all_reduce(ready.flat, "mean", group=self._group, async_op=True)
            self._next += 1
        self._communicator.progress()

    def _finish(self) -> None:
        """The end of backward: wait for the buckets that are on their way."""
        unused = [
            self._names[id(bucket.parameters[i])] for bucket in self._buckets for i in sorted(bucket.missing)
        ]
        works = [bucket.work for bucket in self._buckets if bucket.work is not None]
        self._start_over()
        if unused:
            raise UnusedParameterError(
                f"DistributedDataParallel, rank {self._communicator.rank}: no gradient reached "
                f"{', '.join(unused)}, so its bucket can never be reduced. Use every parameter in the loss, or "
                "call requires_grad_(False) on those that are meant to stay.",
                names=unused,
            )
        for work in works:
            work.wait()


class _Arrival:
    """Tells the wrapper which gradient has come."""

    def __init__(self, owner: DistributedDataParallel, bucket: Bucket, i: int) -> None:
        self._owner, self._bucket, self._i = owner, bucket, i

    def __call__(self, parameter: Tensor) -> None:
        self._owner._arrived(self._bucket, self._i, parameter)


def max_difference_between_ranks(module: Module, group: Group | None = None) -> float:
    """The largest difference of any parameter element between any two ranks. Collective: yes."""
    largest = 0.0
    for parameter in module.parameters():
        high, low = np.array(to_host(parameter.data)), np.array(to_host(parameter.data))
        collectives.all_reduce(high, "max", group)
        collectives.all_reduce(low, "min", group)
        if high.size:
            largest = max(largest, float((high - low).max()))
    return largest
