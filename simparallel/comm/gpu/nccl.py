"""Exchange by NCCL, where each rank has a GPU of its own, also on several machines.

Rendezvous and errors use the host: the first member of a group creates NCCL's identifier, and a collective of the host
sends it to the others. NCCL waits forever for a missing peer. So its communicator is created in a thread, while the
rank watches the others, and connects to all peers at once; its collectives start only after all members have made the
same call, and the host polls for their end while it watches the other ranks. If one fails, the communicator is aborted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import Any

from simparallel.algorithms.reduction import Reduction
from simparallel.arrays.cuda.device import Gpu
from simparallel.backend import Array
from simparallel.comm.blocks import exchange_objects
from simparallel.comm.gpu.link import AbstractLink, GpuCall
from simparallel.comm.group import Group
from simparallel.comm.work import Steps
from simparallel.errors import CommError

# dtype.char -> NCCL's name. Other dtypes travel as bytes.
TYPES = {
    "b": "INT8", "B": "UINT8", "i": "INT32", "I": "UINT32", "l": "INT64", "q": "INT64", "L": "UINT64", "Q": "UINT64",
    "e": "FLOAT16", "f": "FLOAT32", "d": "FLOAT64",
}  # fmt: skip
REDUCTIONS = {"add": "SUM", "multiply": "PROD", "maximum": "MAX", "minimum": "MIN"}


class NcclLink(AbstractLink):
    """The link of ranks with one GPU each. NCCL's reductions have an order of their own, the same on all ranks."""

    name = "NCCL"

    def __init__(self, group: Group, gpu: Gpu) -> None:
        super().__init__(group, gpu)
        self.nccl, self.failures = gpu.nccl, (gpu.nccl.NcclError,)
        # Make all connections with the communicator: later ones would block inside a collective.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        identifier = exchange_objects(group, self.nccl.get_unique_id() if group.position == 0 else b"")[0]
        self._comm = self._watched(lambda: self.nccl.NcclCommunicator(group.size, identifier, group.position))

    def _watched(self, make: Callable[[], Any]) -> Any:
        """Call a function that waits for the other ranks, in a thread, while this rank watches them."""
        found: list[Any] = []

        def run() -> None:
            try:
                with self.gpu.cuda.Device(self.gpu.number):
                    found.append(make())
            except Exception as error:
                found.append(error)

        thread = Thread(target=run, daemon=True, name="NCCL")
        thread.start()
        self.gpu.wait(lambda: not thread.is_alive(), f"NCCL's communicator of {self.group.name}")
        if isinstance(found[0], Exception):
            raise self.error(found[0])
        return found[0]

    def error(self, error: Exception) -> CommError:
        return CommError(
            f"rank {self.group.transport.rank}: NCCL failed in {self.group.name}: {error}. NCCL_DEBUG=INFO prints the "
            "reason; SIMPARALLEL_GPU_LINK=host copies through host memory instead."
        )

    def check(self) -> None:
        try:
            self._comm.check_async_error()
        except Exception as error:
            raise self.error(error) from None

    def abort(self) -> None:
        self._comm.abort()

    def release(self) -> None:
        super().release()
        # Unlike `destroy`, it waits for no rank.
        self._comm.abort()

    # --- exchanges ------------------------------------------------------------------------------------

    def gathered(self, call: GpuCall) -> Steps:
        yield from ()
        with self.stream:
            x = self.xp.ascontiguousarray(call.x)
            xs = self.xp.empty((self.group.size, *x.shape), x.dtype)
        self._comm.allGather(*pointers(x, xs), x.nbytes, self.nccl.NCCL_UINT8, self.stream.ptr)
        return list(xs)

    def exchanged(self, call: GpuCall) -> Steps:
        yield from ()
        everyone, xp, stream = range(self.group.size), self.xp, self.stream
        with stream:
            given = [xp.ascontiguousarray(call.x[call.piece(position)]) for position in everyone]
            taken = [xp.empty(given[self.group.position].shape, call.x.dtype) for _ in everyone]
        self.nccl.groupStart()
        for position, (part, room) in enumerate(zip(given, taken, strict=True)):
            self._comm.send(*pointers(part), part.nbytes, self.nccl.NCCL_UINT8, position, stream.ptr)
            self._comm.recv(*pointers(room), room.nbytes, self.nccl.NCCL_UINT8, position, stream.ptr)
        self.nccl.groupEnd()
        return taken

    # --- NCCL's own collectives ---------------------------------------------------------------------

    def _reduction(self, rule: Reduction, call: GpuCall) -> tuple[int, int] | None:
        """Return NCCL's codes of the dtype and the reduction; None if it lacks either, or gives other values."""
        kind, name = TYPES.get(call.x.dtype.char), REDUCTIONS.get(rule.ufunc.__name__)
        # NCCL adds float16 in float16, and its maximum of floats ignores NaN.
        is_other = call.x.dtype == "float16" or (call.x.dtype.kind == "f" and name in ("MAX", "MIN"))
        if kind is None or name is None or is_other:
            return None
        name = "AVG" if rule.is_mean else name
        return getattr(self.nccl, f"NCCL_{kind}"), getattr(self.nccl, f"NCCL_{name}")

    def all_reduce(self, call: GpuCall) -> Steps:
        numbers = self._reduction(call.rule, call)
        if numbers is None:
            yield from super().all_reduce(call)
            return
        x, out = self._dense(call.x), self._dense(call.result_array)
        self._comm.allReduce(*pointers(x, out), x.size, *numbers, self.stream.ptr)
        self._give(out, call.result_array)

    def reduce(self, call: GpuCall) -> Steps:
        numbers = self._reduction(call.rule, call)
        if numbers is None:
            yield from super().reduce(call)
            return
        x = self._dense(call.x)
        out = self._dense(call.result_array) if call.plan.body.is_root else x  # only the root's is written
        self._comm.reduce(*pointers(x, out), x.size, *numbers, call.plan.root, self.stream.ptr)
        if call.plan.body.is_root:
            self._give(out, call.result_array)

    def broadcast(self, call: GpuCall) -> Steps:
        yield from ()
        x = self._dense(call.result_array)
        self._comm.broadcast(*pointers(x, x), x.nbytes, self.nccl.NCCL_UINT8, call.plan.root, self.stream.ptr)
        if not call.plan.body.is_root:
            self._give(x, call.result_array)

    def all_gather(self, call: GpuCall) -> Steps:
        out = call.result_array
        if call.gpu_body.settings.dims[-1] or not out.flags.c_contiguous:
            yield from super().all_gather(call)
            return
        x = self._dense(call.x)
        self._comm.allGather(*pointers(x, out), x.nbytes, self.nccl.NCCL_UINT8, self.stream.ptr)

    def reduce_scatter(self, call: GpuCall) -> Steps:
        numbers, out, settings = self._reduction(call.rule, call), call.result_array, call.gpu_body.settings
        if numbers is None or settings.dims[0] or settings.sizes is not None or not out.flags.c_contiguous:
            yield from super().reduce_scatter(call)
            return
        x = self._dense(call.x)
        self._comm.reduceScatter(*pointers(x, out), out.size, *numbers, self.stream.ptr)

    def _dense(self, x: Array) -> Array:
        """Return x if it is contiguous, else a contiguous copy."""
        with self.stream:
            return self.xp.ascontiguousarray(x)

    def _give(self, dense: Array, target: Array) -> None:
        """Copy the result to `target`, unless NCCL has written it there."""
        if dense is not target and not target.flags.c_contiguous:
            with self.stream:
                target[...] = dense


def pointers(*arrays: Array) -> tuple[int, ...]:
    return tuple(array.data.ptr for array in arrays)
