"""Buckets: tensors one after the other in one array, so that one collective communicates all of them.

The arrays are in the device's shared memory. Peers read a large array in place; a small one is copied to the staging
memory of its group first, which costs less than waiting until all peers have read it (`comm/direct/direct.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import Array, assign, filled, get_namespace, views_of
from simparallel.clock.memory import BUFFERS, GRADIENTS
from simparallel.clock.recorder import current_recorder, observer_of
from simparallel.comm import Communicator, Group, Work
from simparallel.errors import InputError
from simparallel.machine.devices import FIRST


class Bucket:
    """Tensors of one dtype and device in one array.

    Attributes:
        device: the simulated device of the tensors.
        tensors: the tensors, in their order.
        flat: the array; shape (number of elements,), dtype of the tensors.
        views: the part of `flat` for each tensor, in the shape of its data.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        communicator: Communicator,
        category: str = BUFFERS,
        dtype: np.dtype | None = None,
    ) -> None:
        self.tensors = list(tensors)
        # Of a sharded tensor this is the rank's slice.
        size = sum(tensor.data.size for tensor in tensors)
        self.flat = empty_like(tensors[0].data, size, communicator, dtype)
        self.device = tensors[0]._device or FIRST
        observer_of(self.device).memory.hold(self.flat, category)
        self.views = views_of(self.flat, [tensor.data.shape for tensor in tensors])

    def load(self) -> None:
        """Copy the data of the tensors into the bucket."""
        for tensor, view in zip(self.tensors, self.views, strict=True):
            view[...] = tensor.data

    def store(self) -> None:
        """Copy the bucket into the data of the tensors."""
        for tensor, view in zip(self.tensors, self.views, strict=True):
            tensor._data = assign(tensor._data, ..., view)


class GradBucket(Bucket):
    """The gradients of some parameters; the argument of a communication hook.

    Made by `DistributedDataParallel`.

    Attributes:
        group: the ranks that share the work; None for all.
        communicator: of this rank.
        pending: (of the reducer) number of gradients still missing in the running backward.
        arrived: (of the reducer) for each parameter, whether its gradient has arrived in the running backward.
        used: (of the reducer) for each parameter, whether it got a gradient since the last reduction.
        used_by_any: (of the reducer) the same over all ranks; None if the ranks did not compare.
        expected: (of the reducer) for each parameter, whether a static graph uses it; None before that is known.
        work: (of the reducer) the reduction that was started.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        communicator: Communicator,
        index: int = 0,
        is_last: bool = True,
        group: Group | None = None,
        dtype: np.dtype | None = None,
    ) -> None:
        super().__init__(parameters, communicator, GRADIENTS, dtype)
        self.communicator, self.group = communicator, group
        self._scratch: dict[str, Array] = {}
        self._twins: dict[np.dtype, GradBucket] = {}
        self._index, self._is_last = index, is_last
        self.pending = 0
        self.arrived = bytearray(len(parameters))
        self.used = bytearray(len(parameters))
        self.used_by_any: bytes | None = None
        self.expected: bytes | None = None
        self.work: Any = None

    def index(self) -> int:
        """Return the bucket's number; bucket 0 is reduced first and has the last parameters of the model."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a backward."""
        return self._is_last

    def buffer(self) -> Array:
        """Return all its gradients in one array, shape (number of elements,), not divided yet: no copy."""
        return self.flat

    def set_buffer(self, array: Any) -> None:
        """Copy an array (or Tensor) of as many elements into the buffer."""
        data = array.data if isinstance(array, Tensor) else array
        if data is self.flat:
            return
        if getattr(data, "size", None) != self.flat.size:
            raise InputError(
                f"bucket {self._index}: a hook gave {getattr(data, 'shape', type(data).__name__)}, the bucket has "
                f"{self.flat.size} elements; return bucket.buffer(), or an array of its shape."
            )
        self.flat[...] = data.reshape(self.flat.shape)

    def gradients(self) -> list[Array]:
        """Return the part of the buffer for each parameter, in the parameter's shape (views)."""
        return list(self.views)

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients()`."""
        return list(self.tensors)

    def scratch(self, name: str, size: int, dtype: Any = None) -> Array:
        """Return a flat work array in shared memory: the same one at every call with this name.

        At first its content is arbitrary. Collective: no.
        """
        dtype = np.dtype(self.flat.dtype if dtype is None else dtype)
        array = self._scratch.get(name)
        if array is None or (array.size, array.dtype) != (size, dtype):
            array = self._scratch[name] = empty_like(self.flat, size, self.communicator, dtype)
        return array

    def twin(self, dtype: np.dtype) -> GradBucket:
        """Return a bucket of the same parameters in another dtype: the same one at every call. Collective: no."""
        twin = self._twins.get(dtype)
        if twin is None:
            twin = self._twins[dtype] = GradBucket(
                self.tensors, self.communicator, self._index, self._is_last, self.group, dtype
            )
        return twin

    def reduce_as(self, dtype: np.dtype, reduce: Callable[[GradBucket], Any]) -> Any:
        """Call `reduce(bucket)` with these gradients in another dtype, and convert its result back.

        Args:
            dtype: the dtype to reduce in; for the dtype of the gradients, this bucket itself is reduced.
            reduce: starts the reduction; returns a Work or an array, or None if it wrote into the bucket.
        """
        if dtype == self.flat.dtype:
            return reduce(self)
        # Both buckets stay: the twin is sent, this one holds the results in the dtype of the parameters.
        twin = self.twin(dtype)
        _cast(self.flat, twin.flat)

        def cast_back(result: Any) -> Array:
            if result is not None:
                twin.set_buffer(result)
            _cast(twin.flat, self.flat)
            return self.flat

        work = reduce(twin)
        # `then` runs at the end of backward, when the reduction is awaited.
        return work.then(cast_back) if isinstance(work, Work) else cast_back(work)


def _cast(source: Array, target: Array) -> None:
    """Copy `source` to `target`, which has another dtype; the simulated clock counts it."""
    recorder = current_recorder()
    start_ns = 0 if recorder is None else recorder.now_ns()
    target[...] = source
    if recorder is not None:
        read, written = (recorder.cluster.itemsize(x.dtype) for x in (source, target))
        recorder.work("cast_gradients", "backward", start_ns, source.size, source.size * (read + written), written)


def empty_like(like: Array, size: int, communicator: Communicator, dtype: Any = None) -> Array:
    """Return a new flat array of the type of `like`, shared with the peers if that is in host memory."""
    dtype = like.dtype if dtype is None else dtype
    # Peers can map host memory only; a GPU's array is copied to the host for communication.
    if isinstance(like, np.ndarray):
        return filled((size,), dtype, like, lambda: communicator.empty(size, dtype))
    with like.device:
        return get_namespace(like).empty(size, dtype=dtype)


def partition(tensors: Sequence[Tensor], cap_bytes: float, first_cap_bytes: float | None = None) -> list[list[Tensor]]:
    """Split tensors, in their order, where a part would exceed its cap, and where dtype or device change.

    A tensor that is larger than the cap is a part alone.
    """
    parts: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        size_bytes = tensor.data.size * tensor.dtype.itemsize
        # While the first part is being filled, the list has one entry.
        cap = first_cap_bytes if first_cap_bytes is not None and len(parts) == 1 else cap_bytes
        if not (parts and filled + size_bytes <= cap and _alike(parts[-1][0], tensor)):
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += size_bytes
    return parts


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a._device is b._device


def make_buckets(
    parameters: Sequence[Tensor],
    cap_bytes: float,
    communicator: Communicator,
    group: Group | None = None,
    first_cap_bytes: float | None = None,
) -> list[GradBucket]:
    """Make buckets for the gradients, in the order in which backward computes them: from the last parameter.

    Args:
        parameters: in the order of the model.
        cap_bytes: largest size of a bucket.
        communicator: of this rank.
        group: ranks that share the work.
        first_cap_bytes: largest size of the first bucket; None for the same.
    """
    # Backward reaches the last layers first. In the order of the model, the first bucket would be full only at the end
    # of backward, and nothing would overlap.
    parts = partition(list(reversed(parameters)), cap_bytes, first_cap_bytes)
    last = len(parts) - 1
    return [GradBucket(part, communicator, i, i == last, group) for i, part in enumerate(parts)]


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype, device and type of array, in the order of the first tensor of each group."""
    parts: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        # Arrays of NumPy and CuPy of one dtype cannot share a bucket.
        parts.setdefault((tensor.dtype, tensor._device, type(tensor.data)), []).append(tensor)
    return list(parts.values())
