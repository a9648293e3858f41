"""Communication hooks: other ways to reduce the gradients of a DistributedDataParallel. PyTorch's names.

    ddp.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    ddp.register_comm_hook(PowerSGDState(matrix_approximation_rank=2), comm_hooks.powerSGD_hook)

A hook gets a state and a full `GradBucket`, starts to communicate, and returns a `Work` whose result is the new content
of the bucket. Backward continues meanwhile. Postprocessing of the result goes into `work.then(...)`, which runs at the
end of backward, bucket after bucket.

The state of the simple hooks is the group to reduce over; None is the model's own group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.comm import Work
from simparallel.parallel.ddp.adasum import adasum_hook
from simparallel.parallel.ddp.averaging import PostLocalSGDState, post_localSGD_hook
from simparallel.parallel.ddp.buckets import GradBucket
from simparallel.parallel.ddp.powersgd import PowerSGDState, powerSGD_hook

__all__ = [
    "PostLocalSGDState", "PowerSGDState", "adasum_hook", "allreduce_hook", "fp16_compress_hook",
    "fp16_compress_wrapper", "mean_hook", "post_localSGD_hook", "powerSGD_hook", "sum_hook",
]  # fmt: skip


def mean_hook(state: Any, bucket: GradBucket) -> Work:
    """Average the gradients over the ranks: the default without a hook.

    Args:
        state: the group to reduce over; None for the model's own.
        bucket: the gradients.
    """
    return collectives.all_reduce(bucket.buffer(), "mean", state or bucket.group, async_op=True)


# PyTorch's name.
allreduce_hook = mean_hook


def sum_hook(state: Any, bucket: GradBucket) -> Work:
    """Sum the gradients over the ranks, for losses that are divided by the size of the whole batch.

    A `.grad` that holds an earlier reduction is summed again: call `zero_grad()` after each step.

    Args:
        state: the group to reduce over; None for the model's own.
        bucket: the gradients.
    """
    return collectives.all_reduce(bucket.buffer(), "sum", state or bucket.group, async_op=True)


def fp16_compress_wrapper(hook: Callable[[Any, GradBucket], Any]) -> Callable[[Any, GradBucket], Any]:
    """Wrap `hook`: gradients are rounded to float16 for the communication, and the result is cast back to their dtype.

    Gradients beyond 65504 become infinite (with NumPy's warning), those below 3e-8 become 0.
    """

    def compressed(state: Any, bucket: GradBucket) -> Any:
        return bucket.reduce_as(np.dtype(np.float16), partial(hook, state))

    return compressed


_fp16_mean = fp16_compress_wrapper(mean_hook)


def fp16_compress_hook(state: Any, bucket: GradBucket) -> Work:
    """Average the gradients, rounded to float16: half the bytes of float32.

    Sums are computed in float32 and rounded once more. See `fp16_compress_wrapper`.

    Args:
        state: the group to reduce over; None for the model's own.
        bucket: the gradients.
    """
    return _fp16_mean(state, bucket)
