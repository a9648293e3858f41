"""`AbstractLink`: how the members of a group exchange arrays on their GPUs.

`comm.call` compares headers, marks arrivals and watches the other ranks, on the host. Only the body of a call runs on
the GPU, on a stream of the group. It starts after the operations that the compute stream had at the call, and the
compute stream waits for it where the program calls `wait()`. The host does not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simparallel.algorithms.reduction import Reduction
from simparallel.arrays.cuda.device import Gpu
from simparallel.backend import Array
from simparallel.comm.call import Body, Call, Settings
from simparallel.comm.collective import COLLECTIVES
from simparallel.comm.gpu.watchdog import NOTHING
from simparallel.comm.group import Group
from simparallel.comm.validate import own_piece
from simparallel.comm.work import Steps
from simparallel.errors import CommError

# The collectives that run on GPUs; the others copy through host memory.
ON_GPU = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class AbstractLink:
    """The connection of one rank's GPU to the GPUs of a group.

    Each collective is the method of that name, built on `gathered` or `exchanged`. A link overrides those that it can
    run faster. Reductions follow the order of the group, so they give the bits of a run on the host.

    Args:
        group: the group.
        gpu: this rank's GPU.

    Attributes:
        stream: the stream of the group's collectives.
    """

    name = "alone"

    def __init__(self, group: Group, gpu: Gpu) -> None:
        self.group, self.gpu, self.xp = group, gpu, gpu.xp
        self.stream = gpu.cuda.Stream(non_blocking=True)
        # (event, arrays): memory that the stream may still read or write.
        self._in_use: list[tuple[Any, tuple[Array, ...]]] = []

    def hold(self, event: Any, *arrays: Array) -> None:
        """Keep arrays alive until the stream has passed an event."""
        self._in_use.append((event, arrays))

    def let_go(self, event: Any = None) -> None:
        """Release arrays whose event has passed, and the arrays of `event`: the compute stream waits for it."""
        passed = self.gpu.has_passed
        self._in_use = [entry for entry in self._in_use if entry[0] is not event and not passed(entry[0])]

    def finish_reading(self) -> None:
        """Mark the point of the stream from which on this rank no longer reads other ranks' memory."""

    def check(self) -> None:
        """Raise CommError if the exchange has failed on the GPU."""

    def abort(self) -> None:
        """Abort GPU operations that wait for other ranks."""

    # Errors of the library that exchanges the arrays.
    failures: tuple[type[Exception], ...] = ()

    def error(self, error: Exception) -> CommError:
        """Return the error to raise for one of `failures`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for this rank's collectives, at its end; others may still read its memory."""
        event = self.gpu.mark(self.stream)
        self.gpu.wait(lambda: self.gpu.has_passed(event), f"the collectives of {self.group.name}")

    def release(self) -> None:
        """Free the link's memory; call it only once no member uses it."""
        self._in_use.clear()

    # --- exchanges ------------------------------------------------------------------------------------

    def gathered(self, call: GpuCall) -> Steps:
        """Return every member's x, in the order of the group, for reading on the stream."""
        yield from ()
        return [call.x]

    def exchanged(self, call: GpuCall) -> Steps:
        """Return every member's part of x for this rank; `call.piece(position)` is the part for a position."""
        xs = yield from self.gathered(call)
        return [x[call.piece(self.group.position)] for x in xs]

    # --- collectives ----------------------------------------------------------------------------------

    def all_reduce(self, call: GpuCall) -> Steps:
        call.fold((yield from self.gathered(call)))

    def reduce(self, call: GpuCall) -> Steps:
        xs = yield from self.gathered(call)
        if call.plan.body.is_root:
            call.fold(xs)

    def broadcast(self, call: GpuCall) -> Steps:
        xs = yield from self.gathered(call)
        if not call.plan.body.is_root:
            with self.stream:
                call.result_array[...] = xs[call.plan.root]

    def all_gather(self, call: GpuCall) -> Steps:
        call.join_parts((yield from self.gathered(call)))

    def reduce_scatter(self, call: GpuCall) -> Steps:
        call.fold((yield from self.exchanged(call)))

    def all_to_all(self, call: GpuCall) -> Steps:
        call.join_parts((yield from self.exchanged(call)))


class GpuBody(Body):
    """The body of a collective on GPUs: it calls the link's method of that name."""

    by_messages = copied = True
    others: Sequence[Any] = []

    def __init__(
        self, link: AbstractLink, call_type: type[GpuCall], group: Group, x: Array, settings: Settings
    ) -> None:
        super().__init__(group, x, settings)
        self.link, self.call_type = link, call_type

    def expose(self, call: Call) -> tuple[int, int]:
        """Allocate the result, and record an event on the compute stream; expose nothing."""
        assert isinstance(call, GpuCall)
        gpu = self.link.gpu
        self.link.let_go()
        if call.must_copy:
            call.x = call.x.copy()
        call.result_array = call.make_result()
        # After the allocation, whose memory earlier operations of the stream may still use.
        call.issued = gpu.mark(gpu.cuda.get_current_stream())
        return 0, call.plan.payload_bytes

    def run(self, call: Call) -> Steps:
        assert isinstance(call, GpuCall)
        link = self.link
        link.stream.wait_event(call.issued)
        clock = getattr(self.group.recorder, "clock", None)
        start_ns = clock.now(link.stream) if clock is not None else 0
        try:
            yield from getattr(link, call.plan.op)(call)
        except link.failures as error:
            # Another rank's failure is the reason, if there is one.
            self.group.transport.check_health(NOTHING, call.describe)
            raise link.error(error) from None
        link.finish_reading()
        if clock is not None:
            call.wall_ns = start_ns, clock.now(link.stream)
        call.ended = link.gpu.mark(link.stream)
        link.hold(call.ended, call.x, call.result_array)
        return call.result_array


class GpuCall(Call):
    """A collective on GPUs.

    Attributes:
        issued, ended: events of the current stream at the call, and of the link's stream at its end.
        result_array: the array that receives the result.
    """

    issued: Any = None
    ended: Any = None
    result_array: Array = None

    @property
    def gpu_body(self) -> GpuBody:
        assert isinstance(self.plan.body, GpuBody)
        return self.plan.body

    @property
    def rule(self) -> Reduction:
        return self.gpu_body.rule

    def make_result(self) -> Array:
        """Return the array for the result: `out`, x for a collective in place, or a new one on the compute stream."""
        what, settings, group = COLLECTIVES[self.plan.op], self.gpu_body.settings, self.group
        if self.out is not None or what.in_place:
            return self.target
        shape = what.result_shape(self.x, group.position, group.size, settings.dims, settings.sizes)
        return self.gpu_body.link.xp.empty(shape, self.x.dtype)

    def piece(self, position: int) -> tuple[slice, ...]:
        """Return the index of the part of x for a member."""
        settings = self.gpu_body.settings
        return own_piece(self.x, settings.dims[0], self.group, settings.sizes, position)

    def fold(self, parts: Sequence[Array]) -> None:
        """Reduce arrays of all members into the result, on the link's stream."""
        with self.gpu_body.link.stream:
            fold(self.gpu_body.link.xp, self.rule, parts, self.result_array)

    def join_parts(self, parts: Sequence[Array]) -> None:
        """Join the parts of all members along the last dim of the call into the result, on the link's stream."""
        link, dim, start = self.gpu_body.link, self.gpu_body.settings.dims[-1], 0
        with link.stream:
            for part in parts:
                stop = start + part.shape[dim]
                self.result_array[(slice(None),) * dim + (slice(start, stop),)] = part
                start = stop

    def wait(self) -> Array:
        """Finish the call on the host, and let the compute stream wait for its end."""
        result = super().wait()
        self._join()
        return result

    def is_completed(self) -> bool:
        """Advance without waiting; return whether the GPU has the result."""
        if not super().is_completed():
            return False
        link = self.gpu_body.link
        if self.ended is not None and not link.gpu.has_passed(self.ended):
            # Another rank may have to run first.
            self.group.transport.looked(NOTHING, self.describe, 0.0)
            return False
        self._join()
        return True

    def _join(self) -> None:
        """Let the current stream and the rank's compute stream wait for the result."""
        if self.ended is not None:
            link = self.gpu_body.link
            current, compute = link.gpu.cuda.get_current_stream(), link.gpu.compute
            current.wait_event(self.ended)
            if current is not compute:
                compute.wait_event(self.ended)
            # From here on, new uses of this memory come behind the collective.
            link.let_go(self.ended)
            self.ended = None


def fold(xp: Any, rule: Reduction, parts: Sequence[Array], out: Array) -> None:
    """Reduce arrays in their order into `out`, which may be one of them, as `algorithms.reduction` on the host."""
    ufunc = getattr(xp, rule.ufunc.__name__)
    total = parts[0].astype(rule.accumulate)  # a copy
    for part in parts[1:]:
        ufunc(total, part, out=total)
    if rule.is_mean:
        total /= len(parts)
    out[...] = total
