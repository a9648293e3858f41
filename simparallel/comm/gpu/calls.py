"""`GpuCalls`: the collectives of a rank whose arrays are on a GPU, and the choice of how each group exchanges them.

    NCCL                 every member has a GPU of its own, and CuPy has NCCL
    shared GPU memory    the members are on one machine, and share a GPU or can access each other's GPU memory
    host memory          otherwise: the collectives run on the host, with copies there and back

The members exchange the places of their GPUs when the group is made, so all make the same choice; a note says which.
SIMPARALLEL_GPU_LINK=nccl, ipc or host chooses instead.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from simparallel.algorithms.reduction import LOGICAL, truth
from simparallel.arrays.cuda.device import Gpu
from simparallel.arrays.seam import named_range
from simparallel.backend import Array, gpu_of
from simparallel.clock.notes import note_once
from simparallel.comm.blocks import exchange_objects
from simparallel.comm.call_header import ON_GPUS
from simparallel.comm.collective import Collective
from simparallel.comm.communicator import Communicator
from simparallel.comm.faults.calls import FaultyCall
from simparallel.comm.gpu.ipc import IpcLink
from simparallel.comm.gpu.link import ON_GPU, AbstractLink, GpuBody, GpuCall
from simparallel.comm.gpu.nccl import NcclLink
from simparallel.comm.gpu.staging import PinnedStaging
from simparallel.comm.gpu.watchdog import NOTHING, Watchdog
from simparallel.comm.group import Algorithm, Group
from simparallel.comm.validate import check_form, check_only_at
from simparallel.errors import DeadlineError, DeviceMismatchError, InputError

LINKS = {"nccl": NcclLink, "ipc": IpcLink, "host": None}
VARIABLE = "SIMPARALLEL_GPU_LINK"


class FaultyGpuCall(FaultyCall, GpuCall):
    """A collective on GPUs that checks for faults in each phase."""


class GpuCalls:
    """The collectives of one rank on its GPU.

    Args:
        communicator: this rank's communicator; calls on the GPU use its headers, arrivals and errors.
        gpu: the rank's GPU. From now on, the host watches the other ranks while it waits for this GPU. The
            constructor connects the GPUs of the world, so all ranks make their `GpuCalls` together.

    Attributes:
        staging: host copies, for collectives that do not run on GPUs.
    """

    def __init__(self, communicator: Communicator, gpu: Gpu) -> None:
        self._communicator, self._gpu = communicator, gpu
        # By slot of the group; None where arrays are copied through host memory.
        self._links: dict[int, AbstractLink | None] = {}
        self._algorithms: dict[int, Algorithm] = {}
        self.staging = PinnedStaging(communicator.transport.arena, gpu)
        self._watchdog: Watchdog | None = None
        gpu.wait = self.wait
        self.connect(communicator.world)

    def takes(self, op: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether `run` takes a collective with these arguments."""
        if op not in ON_GPU or arguments.get("uneven") or arguments.get("op") == "adasum":
            return False
        splits = arguments.get("output_splits"), arguments.get("input_splits")
        if op == "all_to_all" and splits != (None, None):
            return False
        if (arguments.get("algorithm") or self._communicator.default_algorithm) != "direct":
            return False
        group = arguments.get("group") or self._communicator.world
        return isinstance(group, Group) and self._links.get(group.slot) is not None

    def run(
        self,
        what: Collective,
        x: Array,
        group: Group,
        async_op: bool,
        out: Array | None,
        op: str,
        root: int | None,
        dims: tuple[int, ...],
        sizes: Sequence[int] | None,
        listed: tuple[tuple[int, ...], ...],
    ) -> Any:
        """Run a collective that `takes` accepted, with the arguments and the result of `Communicator._run`."""
        link, algorithm, purpose = self._links[group.slot], self._algorithms[group.slot], self._communicator.purpose
        assert link is not None
        for name, array in (("x", x), ("out", out)):
            if array is not None and gpu_of(array) != self._gpu.number:
                raise DeviceMismatchError(
                    f"{what.name}: {name} is on cuda:{gpu_of(array)}, but rank {self._communicator.rank} communicates "
                    f"from cuda:{self._gpu.number}; move it there with .to('cuda:{self._gpu.number}')."
                )
        sizes = None if sizes is None else tuple(sizes)
        key = what.name, op, root, dims, sizes, listed, x.dtype, x.shape, purpose, type(root), *map(type, dims)
        plan = algorithm.plans.get(key) or algorithm.plan_array(what, key, x, purpose)
        if out is not None:
            settings = plan.body.settings
            if what.root:
                check_only_at(what.name, plan.root, group, out)
            shape = what.result_shape(x, group.position, group.size, settings.dims, settings.sizes)
            check_form(what.name, out, shape, x.dtype)
        # A logical op reduces the truth of x, a new array; in place, x then receives the result like an `out`.
        if op in LOGICAL:
            given, x = x, truth(op, x, what.name)
            out = given if out is None and what.in_place else out
        must_copy = out is not None and out is not x and bool(self._gpu.xp.may_share_memory(x, out))
        with named_range(what.name):
            return group.run(plan, x, async_op, out, must_copy=must_copy)

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait on the host until `is_done()`, and watch the other ranks meanwhile; errors quote `what`.

        Raises:
            RankFailedError, CommError: a rank or NCCL failed; GPU operations that wait for other ranks are aborted.
            DeadlineError: it takes longer than `timeout_s`.
        """
        transport, start_s = self._communicator.transport, time.monotonic()
        try:
            while not is_done():
                transport.looked(NOTHING, lambda: what, 0.0)
                # The GPU may wait for a rank that waits for another collective of this one.
                self._communicator.progress()
                for link in self._open_links():
                    link.check()
                if time.monotonic() - start_s > transport.timeout_s:
                    raise DeadlineError(
                        f"rank {transport.rank} waited {transport.timeout_s:g} s for its GPU: {what}. Another rank's "
                        "GPU may be late, or the work may take longer: raise timeout_s (--timeout).",
                        rank=transport.rank,
                        missing=[],
                        timeout_s=transport.timeout_s,
                    )
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort GPU operations that wait for other ranks; called when this rank has failed."""
        for link in self._open_links():
            link.abort()

    def _open_links(self) -> list[AbstractLink]:
        return [link for link in self._links.values() if link is not None]

    def finish(self) -> None:
        """Wait for the GPU at the end of this rank; others may go on to read its memory."""
        for link in self._open_links():
            link.finish()
        self._gpu.synchronize("the end of the run")
        if self._watchdog is not None:
            self._watchdog.stop()

    def release(self) -> None:
        """Free the links and their memory; call it only after all ranks have ended."""
        if self._watchdog is not None:
            self._watchdog.stop()
        parts: list[Any] = [*self._open_links(), self.staging]
        self._links.clear()
        for part in parts:
            # After a CUDA error every call fails, and the run has raised the error itself.
            with suppress(Exception):
                part.release()

    # --- the choice -----------------------------------------------------------------------------------

    def connect(self, group: Group) -> None:
        """Connect the GPUs of a new group: collective over its members; other ranks do nothing."""
        if group.rank is None:
            return
        link = self._links[group.slot] = self._link_of(group)
        if link is not None:
            call_type = GpuCall if group.transport.faults is None else FaultyGpuCall
            bodies = {name: partial(GpuBody, link, call_type) for name in ON_GPU}
            self._algorithms[group.slot] = Algorithm(group, bodies, ON_GPUS)
        if isinstance(link, NcclLink) and group.views.is_shared and self._watchdog is None:
            self._watchdog = Watchdog(group.transport, self.abort)

    def _link_of(self, group: Group) -> AbstractLink | None:
        if group.size == 1:
            return AbstractLink(group, self._gpu)
        members = exchange_objects(group, self._place())
        kind, why = choose(members, shares_memory=group.views.is_shared)
        note_once(f"collectives of GPU arrays in {group.name} use {_NAMES[kind]}: {why}.")
        link_type = LINKS[kind]
        return None if link_type is None else link_type(group, self._gpu)

    def _place(self) -> dict[str, Any]:
        """Return what `choose` compares: this rank's host, its GPU, the GPUs that it can access, and its settings."""
        runtime, number = self._gpu.cuda.runtime, self._gpu.number
        buses = [runtime.deviceGetPCIBusId(i) for i in range(runtime.getDeviceCount())]
        reached = [bus for i, bus in enumerate(buses) if i == number or runtime.deviceCanAccessPeer(number, i)]
        return {
            "host": platform.node(),
            "bus": buses[number],
            "reached": reached,
            "nccl": bool(self._gpu.nccl.available),
            "asked": os.environ.get(VARIABLE, ""),
        }


def choose(members: list[dict[str, Any]], *, shares_memory: bool) -> tuple[str, str]:
    """Return how ranks on GPUs at these places exchange arrays, and why.

    Args:
        members: the place of each member, see `GpuCalls._place`.
        shares_memory: whether the ranks share host memory; False for ranks started by MPI.

    Raises:
        InputError: SIMPARALLEL_GPU_LINK is unknown, impossible here, or differs by rank.
    """
    places = {(member["host"], member["bus"]) for member in members}
    asked = sorted({member["asked"] for member in members})
    lacking = {
        "nccl": "CuPy has no NCCL on some rank" * (not all(member["nccl"] for member in members))
        or "ranks share a GPU" * (len(places) < len(members)),
        "ipc": "the ranks were started by MPI" * (not shares_memory)
        or "a rank's GPU cannot access the memory of another's"
        * any(other["bus"] not in member["reached"] for member in members for other in members),
        "host": "",
    }
    if len(asked) > 1:
        raise InputError(f"{VARIABLE} differs by rank: {', '.join(map(repr, asked))}; set it on all of them.")
    if kind := asked[0]:
        if why := lacking.get(kind, f"choose from {', '.join(LINKS)}"):
            raise InputError(f"{VARIABLE}={kind!r} is not possible: {why}.")
        return kind, f"{VARIABLE} asks for it"
    kind = next(kind for kind, why in lacking.items() if not why)
    if kind == "nccl":
        return kind, "each rank has a GPU of its own"
    return kind, "; ".join(why for name, why in lacking.items() if why)


_NAMES = {"nccl": NcclLink.name, "ipc": IpcLink.name, "host": "host memory"}
