"""`Communicator`: the collectives, messages and groups of one rank, on any transport.

Arguments are checked here, before anything is published, so bad input is an error on its rank alone and changes
nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
import simparallel.comm.collective as c
from simparallel.algorithms.reduction import LOGICAL, truth
from simparallel.base.attributes import setting
from simparallel.base.checks import check_seconds
from simparallel.clock.recorder import Recorder
from simparallel.comm.blocks import run_objects
from simparallel.comm.collective import Collective
from simparallel.comm.group import Algorithm, Group, Medium
from simparallel.comm.grouping import GroupRegistry
from simparallel.comm.inline import InlineTransport, RoundRobin
from simparallel.comm.mailbox import Mailbox
from simparallel.comm.memory.segment import THREAD_ARENA_BYTES, SharedSegment
from simparallel.comm.plan import Settings
from simparallel.comm.shm.medium import SHARED_MEMORY
from simparallel.comm.transport import AbstractTransport
from simparallel.comm.uneven import exchange_uneven, gather_uneven, scatter_uneven
from simparallel.comm.validate import (
    check_array,
    check_dim,
    check_layers,
    check_only_at,
    check_out,
    check_parts,
    check_result,
    check_splits,
    is_same_place,
    position_of,
)
from simparallel.errors import InputError
from simparallel.rank_local import RankLocal

LAYERS = "adasum of layers"


class Communicator(Mailbox):
    """The collectives and messages of one rank.

    The functions of the same names in `simparallel.collectives` take Tensors and CuPy arrays, too; arrays here are
    NumPy arrays of any shape, any strides and any dtype but object; masked arrays and np.matrix are refused. New
    arrays are in this machine's byte order. Reductions run in the order of the group's ranks, so every rank gets the
    same bits on every run. Nothing is written before the calls of all ranks are known to agree.

    Args:
        transport: this rank's access to shared memory.
        recorder: clocks and events of this rank, or None to keep none.
        default_algorithm: used for the collectives that it has; the others run by `direct`.
        medium: how payloads travel.

    Attributes:
        kept: objects that higher layers keep for this rank until its run ends, keyed by their class.
        groups: all groups made so far, the world first; also those without this rank.
        media: type of arrays that are not in host memory -> their collectives, see `gpu.calls`.
        purpose: name of the op or reducer that makes the collectives, see `for_purpose`.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        recorder: Recorder | None = None,
        default_algorithm: str = "direct",
        medium: Medium = SHARED_MEMORY,
    ) -> None:
        super().__init__(transport, recorder)
        self.default_algorithm, self.purpose = default_algorithm, ""
        self.kept: dict[type, Any] = {}
        self.media: dict[type, Any] = {}
        if transport.faults is not None:
            from simparallel.comm.faults.calls import FaultyCall

            medium = medium._replace(call=FaultyCall)
        self._medium, self._groups = medium, GroupRegistry(self, medium)
        self.world, self.groups = self._groups.world, self._groups.made
        # The algorithm of calls that name neither a group nor an algorithm; None if it lacks some collectives.
        self._usual = self.world.direct if default_algorithm == "direct" else None

    @contextmanager
    def for_purpose(self, purpose: str) -> Iterator[None]:
        """Name the op or reducer that makes the collectives inside the block; the innermost name counts.

        Ranks compare the name like everything else about a call: if calls look alike but have different purposes, all
        ranks raise CollectiveMismatchError, which shows the first 64 bytes of each name. Calls with different names
        have separate plans, so a name must not change from step to step.

        Args:
            purpose: the same on every rank of the group, for the same purpose; "" for none.
        """
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    # --- collectives ----------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: np.ndarray,
        op: str = "sum",
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Replace x on every rank by the reduction of the ranks' x.

        The ranks are reduced in the order of the group (by "direct"; each algorithm on messages states its own order).

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank; written. Or a list of
                them, of one dtype, which travels as one vector; their shapes are the same on every rank.
            op: "sum", "mean", "prod", "max", "min"; for integers and bools also bitwise "and", "or", "xor" (PyTorch's
                "band", "bor", "bxor") and "land", "lor", "lxor", which give 1 or 0. float16 is summed in float32
                (on messages: rounded at each step). Or "adasum", see `sp.adasum`, for floating-point x: each array of a
                list is combined separately. By "ring" that is a left fold, whose result differs from the others.
            group: from `new_group`; by default all ranks.
            async_op: return a `Work` at once; `work.wait()` returns x.
            algorithm: "direct", or on messages: "naive", "ring", "tree", "halving_doubling". Every collective with this
                keyword accepts the algorithms that implement it. None: the default of the `Cluster`.
            out: array or Tensor like x that receives the result; x is left unchanged. In every collective with this
                keyword it may be x or overlap it: the result is as if x had been copied before.

        Returns:
            x, or out; bitwise equal on all ranks.

        Collective: yes - every rank of the group, in the same order.
        Cost: 2 (P-1)/P * x.nbytes [bytes] per rank; for others than "direct" and "ring", see `algorithms`.

        Raises:
            InputError, DTypeError: bad arguments; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        if op == "adasum":
            return self.adasum(x, None, group, async_op, algorithm, out=out)
        return self._run(c.ALL_REDUCE, x, group, async_op, algorithm, out, op)

    def all_reduce_list(
        self,
        x: np.ndarray,
        shapes: Sequence[tuple[int, ...]],
        op: str = "sum",
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
    ) -> Any:
        """Run `all_reduce` on a flat x that holds arrays of these shapes, the same on every rank. Returns x.

        With op "adasum", each array is combined separately.
        """
        what, op = (c.ADASUM, LAYERS) if op == "adasum" else (c.ALL_REDUCE, op)
        sizes = tuple(map(math.prod, shapes))
        return self._run(what, x, group, async_op, algorithm, None, op, sizes=sizes, listed=tuple(shapes))

    def adasum(
        self,
        x: np.ndarray,
        layers: Sequence[int] | None = None,
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Replace x on every rank by Adasum over the ranks' x. Returns x, or out.

        Args:
            x: floating point, with the same shape and dtype on every rank; written.
            layers: sizes of the parts of a flat x, each of which is combined separately; None takes x as one part.
            group, async_op, algorithm, out: as in `all_reduce`.

        Collective, Cost, Raises: as `all_reduce`.
        """
        op, sizes = ("adasum", None) if layers is None else (LAYERS, check_layers(x, layers))
        return self._run(c.ADASUM, x, group, async_op, algorithm, out, op, sizes=sizes)

    def broadcast(
        self,
        x: np.ndarray,
        src: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
    ) -> Any:
        """Replace x on every rank by x of rank `src`. Returns x.

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank; written except on `src`.
            src: a global rank that is in the group.
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.

        Collective: yes. Cost: x.nbytes [bytes] per rank, along a chain of ranks.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments, or x is read-only; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        return self._run(c.BROADCAST, x, group, async_op, algorithm, root=src)

    def reduce(
        self,
        x: np.ndarray,
        dst: int = 0,
        op: str = "sum",
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Replace x on rank `dst` by the reduction of the ranks' x; other ranks keep theirs. Returns x, or out.

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank.
            dst: a global rank that is in the group.
            op: as in `all_reduce`, without "adasum".
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.
            out: array or Tensor like x that receives the result; only `dst` passes one.

        Collective: yes. Cost: x.nbytes [bytes] per rank, along a chain of ranks; `dst` sends nothing.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments, or an op undefined for the dtype; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        return self._run(c.REDUCE, x, group, async_op, algorithm, out, op, root=dst)

    def scan(
        self, x: np.ndarray, op: str = "sum", group: Group | None = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        """Replace x by the reduction of x of this rank and of the ranks before it in the group. Returns x, or out.

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank.
            op: as in `all_reduce`, without "mean" and "adasum".
            group: from `new_group`; by default all ranks.
            async_op: return a `Work` at once.
            out: array or Tensor like x that receives the result; x is left unchanged.

        Collective: yes. Cost: ceil(log2 P) steps, in each of which a rank sends x.nbytes [bytes] or nothing.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments, or an op undefined for the dtype; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        return self._scan(c.SCAN, x, op, group, async_op, out)

    def exscan(
        self, x: np.ndarray, op: str = "sum", group: Group | None = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        """Run `scan` without this rank's own x.

        The first rank gets the identity of the reduction: 0 of a sum, 1 of a product, the smallest value of a maximum.
        """
        return self._scan(c.EXSCAN, x, op, group, async_op, out)

    def _scan(self, what: Collective, x: np.ndarray, op: str, group: Any, async_op: bool, out: Any) -> Any:
        if op in ("mean", "adasum"):
            raise InputError(f"{what.name}: op={op!r} is not defined for a part of the ranks; use 'sum', and divide.")
        return self._run(what, x, group, async_op, "direct", out, op)

    def all_gather(
        self,
        x: np.ndarray,
        dim: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
        uneven: bool = False,
    ) -> Any:
        """Concatenate the ranks' x along `dim` in the order of the group: np.concatenate(xs, axis=dim).

        Args:
            x: array or Tensor, at least 1-D, any numeric dtype, with the same shape and dtype on every rank; unchanged.
            dim: x of shape (..., d, ...) gives (..., P d, ...) for P ranks.
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.
            out: array or Tensor of the result's shape and dtype that receives it. x may be this rank's part of
                out, which saves a copy.
            uneven: the ranks' x may have different sizes along `dim`. Excludes `out` and `algorithm`.

        Returns:
            A new array with the dtype of x, or out; bitwise equal on all ranks.

        Collective: yes. Cost: (P-1) * x.nbytes [bytes] per rank.

        Raises:
            AutogradError: x is a Tensor that needs a gradient, and there is no out: use `functions.all_gather`. The
                same holds for reduce_scatter, all_to_all, gather (`gather_to`) and scatter (`scatter_from`).
            InputError, ShapeError, DTypeError: bad arguments, or x is 0-D; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        if uneven:
            direct = self._only_direct("all_gather", group, algorithm, out)
            return gather_uneven(c.ALL_GATHER, direct, x, dim, None, self.purpose, async_op)
        return self._run(c.ALL_GATHER, x, group, async_op, algorithm, out, dims=(dim,))

    def reduce_scatter(
        self,
        x: np.ndarray,
        dim: int = 0,
        op: str = "sum",
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
        input_splits: Sequence[int] | None = None,
    ) -> Any:
        """Reduce the ranks' x and return this rank's part along `dim`: np.split(sum(xs), P, axis=dim)[rank].

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank; unchanged.
            dim: x of shape (..., P d, ...) gives (..., d, ...) for P ranks.
            op: as in `all_reduce`, without "adasum".
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.
            out: array or Tensor of the result's shape and dtype that receives it; it may be that part of x.
            input_splits: P sizes along `dim`, one for each receiver, the same on every rank, that add up to the size of
                x; by default all parts are equal. Excludes `algorithm`.

        Collective: yes. Cost: (P-1)/P * x.nbytes [bytes] per rank.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments, or P does not divide the size of the dim and there are no
                input_splits; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        if input_splits is not None:
            direct = self._only_direct("reduce_scatter", group, algorithm)
            if type(x) not in self.media:
                check_array("reduce_scatter", x)
            dim = check_dim("reduce_scatter", x, dim)
            input_splits = check_splits("reduce_scatter", x, dim, input_splits, direct.group.size)
            algorithm = "direct"
        return self._run(c.REDUCE_SCATTER, x, group, async_op, algorithm, out, op, dims=(dim,), sizes=input_splits)

    def all_to_all(
        self,
        x: np.ndarray,
        split_dim: int = 0,
        concat_dim: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
    ) -> Any:
        """Cut every rank's x into P equal parts and return part r of each on rank r, joined in the order of the group.

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank; unchanged.
            split_dim: dim along which x is cut; its size is divided by P.
            concat_dim: dim along which the parts are joined; its size is multiplied by P.
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.
            out: array or Tensor of the result's shape and dtype that receives it.
            input_splits: sizes of this rank's parts along split_dim, by receiver; then x may differ in size by rank.
            output_splits: sizes that this rank expects, by sender: they are compared, and all ranks raise if any do not
                match. Either all ranks pass input_splits or output_splits, or none does; then concat_dim must be
                split_dim, and `out` and `algorithm` are excluded.

        Returns:
            A new array with the dtype of x, or out; it differs by rank.

        Collective: yes. Cost: (P-1)/P * x.nbytes [bytes] per rank.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments, or P does not divide the size of split_dim; nothing was
                sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        if input_splits is None and output_splits is None:
            return self._run(c.ALL_TO_ALL, x, group, async_op, algorithm, out, dims=(split_dim, concat_dim))
        direct = self._only_direct("all_to_all", group, algorithm, out)
        return exchange_uneven(direct, x, split_dim, concat_dim, input_splits, output_splits, self.purpose, async_op)

    def gather(
        self,
        x: np.ndarray,
        dst: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
        uneven: bool = False,
    ) -> Any:
        """Return the ranks' x as a list on rank `dst`, in the order of the group; None elsewhere.

        Args:
            x: array or Tensor, any numeric dtype, with the same shape and dtype on every rank; unchanged.
            dst: a global rank that is in the group.
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.
            out: a list of P arrays or Tensors like x, or an array (P, ...), that receives them; only `dst` passes it.
            uneven: the ranks' x may have different sizes along dim 0. Excludes `out` and `algorithm`.

        Collective: yes. Cost: x.nbytes [bytes] per rank; `dst` sends nothing.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments; nothing was sent.
            CollectiveMismatchError: ranks made different calls; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        if uneven:
            direct = self._only_direct("gather", group, algorithm, out)
            return gather_uneven(c.GATHER, direct, x, 0, dst, self.purpose, async_op)
        return self._run(c.GATHER, x, group, async_op, algorithm, out, root=dst)

    def scatter(
        self,
        arrays: Sequence[np.ndarray] | None = None,
        src: int = 0,
        group: Group | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        *,
        out: Any = None,
        uneven: bool = False,
    ) -> Any:
        """Return entry r of the list of rank `src` on the r-th rank of the group: a new array, or out.

        Args:
            arrays: on `src` a list of P arrays or Tensors of one shape and numeric dtype; elsewhere None.
            src: a global rank that is in the group.
            group: from `new_group`; by default all ranks.
            async_op, algorithm: as in `all_reduce`.
            out: array or Tensor like the entries that receives this rank's entry.
            uneven: (on `src`) the entries may have different sizes along dim 0; they travel by "direct".

        Collective: yes. Cost: (P-1) * part.nbytes [bytes] from `src`; the others send nothing.

        Raises:
            InputError, ShapeError, DTypeError: bad arguments; nothing was sent.
            CollectiveMismatchError: ranks made different calls, or out has another shape or dtype than this rank's
                entry; no data was changed.
            RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
        """
        chosen = self._algorithm("scatter", group, algorithm)
        group = chosen.group
        root = position_of("scatter", group, src)
        parts = None
        if root == group.rank:
            parts = check_parts(arrays, group.size, uneven=uneven)
        elif arrays is not None:
            raise InputError(f"scatter: only rank {src} passes a list; rank {self.rank} must pass None.")
        if out is not None:
            check_array("scatter", out, written=True, name="out")
            if parts is not None:  # the other ranks check theirs against the source's description
                check_out("scatter", out, parts[root].shape, parts[root].dtype)
        if parts is not None and uneven:
            return scatter_uneven(chosen, parts, root, out, self.purpose, async_op)
        return group.run(chosen.plan_scatter(root, parts, self.purpose), parts, async_op, out)

    def all_gather_object(self, value: Any, group: Group | None = None) -> list[Any]:
        """Return every rank's value, in the order of the group. See `sp.all_gather_object`."""
        return self._objects(c.ALL_GATHER, value, None, group)

    def broadcast_object(self, value: Any = None, src: int = 0, group: Group | None = None) -> Any:
        """Return the value of rank `src` on every rank."""
        found = self._objects(c.BROADCAST, value, src, group)
        return value if self.rank == src else found[0]

    def gather_object(self, value: Any, dst: int = 0, group: Group | None = None) -> list[Any] | None:
        """Return every rank's value on `dst`, in the order of the group; None elsewhere."""
        return self._objects(c.GATHER, value, dst, group) or None

    def _objects(self, what: Collective, value: Any, root: int | None, group: Group | None) -> list[Any]:
        direct = self._algorithm(f"{what.name}_object", group, "direct")
        return run_objects(what, direct, value, root, self.purpose)

    # --- from arguments to a plan ---------------------------------------------------------------------

    def _run(
        self,
        what: Collective,
        x: Any,
        group: Group | None,
        async_op: bool = False,
        algorithm: str | None = None,
        out: Any = None,
        op: str = "-",
        root: int | None = None,
        dims: tuple[int, ...] = (),
        sizes: Sequence[int] | None = None,
        listed: tuple[tuple[int, ...], ...] = (),
    ) -> Any:
        """Find the plan of earlier equal calls, or check the arguments and make it; and run the collective."""
        name = what.name
        if group is None and algorithm is None and self._usual is not None:
            chosen = self._usual
        else:
            chosen = self._algorithm(name, group, algorithm)
        if type(x) is not np.ndarray:
            medium = self.media.get(type(x))
            if medium is not None:
                return medium.run(what, x, chosen.group, async_op, out, op, root, dims, sizes, listed)
            check_array(name, x)
        key: tuple[Any, ...] = name, op, root, dims, sizes, listed, x.dtype, x.shape, self.purpose
        if dims or root is not None:  # 1, 1.0 and True are equal, but only one of them is a dim or a rank
            key = *key, type(root), *map(type, dims)
        try:
            plan = chosen.plans.get(key)
        except TypeError:  # an argument that cannot be hashed is refused below
            plan = None
        if plan is None:
            plan = chosen.plan_array(what, key, x, self.purpose)
        group = chosen.group
        if out is None:
            if plan.writes and not x.flags.writeable:
                check_array(name, x, written=True)
            if op not in LOGICAL:
                return group.run(plan, x, async_op)
        elif what.root:
            check_only_at(name, plan.root, group, out)
        # A logical op reduces the truth of x, a new array; its result goes to x as it would to `out`.
        if op in LOGICAL:
            given, x = x, truth(op, x, name)
            if out is None:
                return group.run(plan, x, async_op, given if what.in_place else None)
        must_copy = check_result(what, group, x, out, plan.body.settings)
        if what.in_place and is_same_place(x, out):  # no copy is needed
            return group.run(plan, out, async_op)
        return group.run(plan, x, async_op, out, must_copy=must_copy)

    def _only_direct(self, op: str, group: Group | None, algorithm: str | None, out: Any = None) -> Algorithm:
        """Return the group's direct algorithm for a call with uneven parts; refuse any other one and an `out`."""
        if algorithm not in (None, "direct") or out is not None:
            what = "out" if out is not None else f"algorithm={algorithm!r}"
            raise InputError(f"{op}: {what} does not support parts of different sizes; leave it out.")
        return self._algorithm(op, group, "direct")

    def _algorithm(self, op: str, group: Group | None, algorithm: str | None) -> Algorithm:
        """Return the algorithm by which the group runs this collective."""
        if self._forbidden:
            self.check_allowed(op)
        if group is None:
            group = self.world
        elif not isinstance(group, Group):
            raise InputError(f"{op}: group={group!r} is not a group; use new_group(ranks).")
        elif group.transport is not self.transport:
            raise InputError(
                f"{op}: {group.name} belongs to another world than rank {self.rank} of {self.world_size} here: to an "
                f"earlier run, an outer one, or another thread. Create it in this run: new_group({list(group.ranks)})."
            )
        if group.rank is None:
            raise InputError(f"{op}: rank {self.rank} is not a member of {group.name}; only its members may call this.")
        if (algorithm or self.default_algorithm) == "direct":
            return group.direct
        from simparallel.comm.direct.by_messages import choose  # rarely needed, and the import takes time

        return choose(group, op, algorithm, self.default_algorithm)

    # --- groups ---------------------------------------------------------------------------------------

    def barrier(self, group: Group | None = None, async_op: bool = False) -> Any:
        """Wait until every rank of the group has called it."""
        direct = self._algorithm("barrier", group, "direct")
        key = "barrier", self.purpose
        if (plan := direct.plans.get(key)) is None:
            plan = direct.add_plan(key, h.encode("barrier"), Settings(), purpose=self.purpose)
        return direct.group.run(plan, None, async_op)

    def monitored_barrier(self, group: Group | None = None, timeout_s: float | None = None) -> None:
        """Wait as `barrier`, with a time limit of its own."""
        self.check_allowed("monitored_barrier")
        limit_s = self.transport.timeout_s
        if timeout_s is not None:
            limit_s = check_seconds("monitored_barrier", "timeout_s", timeout_s)
        with setting(self.transport, timeout_s=limit_s):
            self.barrier(group)

    def new_group(self, ranks: Sequence[int], use_local_synchronization: bool = False) -> Group:
        """Create a group of these ranks, in this order.

        Every rank of the world calls it, member or not; with `use_local_synchronization` only its members do.
        """
        self.check_allowed("new_group")
        group = self._groups.new(ranks, self.purpose, use_local_synchronization)
        for medium in self.media.values():
            medium.connect(group)
        return group

    def node_group(self) -> Group:
        """Return the group of this rank's node, in order. Collective over all ranks at the first call, then free."""
        return self._groups.of_node(self.new_group)

    def forbid(self, why: str, *, memory: bool = False) -> None:
        super().forbid(why, memory=memory)
        self._usual = None

    def release(self) -> None:
        """Free this run's staging memory. Only when all ranks have ended."""
        super().release()
        self._groups.release()
        for medium in self.media.values():
            medium.release()


# --- the communicator of a thread --------------------------------------------------------------------------


class _CurrentCommunicator(RankLocal):
    communicator: Communicator | None = None
    alone: Communicator | None = None  # the one made outside of a run


_current = _CurrentCommunicator()
# The communicator of the rank that this whole process is, or was last.
_of_process: Communicator | None = None


def current() -> Communicator:
    """Return the communicator of this rank; outside of a run, one of a world of one.

    In a process that is a rank, a thread that the rank's function started gets a communicator whose collectives and
    messages raise CommError. Where ranks are threads themselves, such a thread cannot be told from others; it counts
    as outside of the run.
    """
    if (communicator := _current.communicator) is None:
        if _of_process is not None:
            return _of_process.beside()
        communicator = _current.communicator = _current.alone = alone()
    return communicator


def is_running() -> bool:
    """Return whether this thread, or the whole process, is a rank of a run."""
    return _current.communicator is not _current.alone or _of_process is not None


def alone() -> Communicator:
    """Create a communicator for a world of one rank in this thread. A forked process gets a copy of its own."""
    segment = SharedSegment(1, arena_bytes=THREAD_ARENA_BYTES, is_private=True)
    return Communicator(InlineTransport(segment, 0, RoundRobin(1)))


def join_run(communicator: Communicator) -> None:
    """Make `communicator` the current one of this thread and of the process, which become a rank of a run."""
    global _of_process
    _current.communicator = _of_process = communicator


@contextmanager
def use_communicator(communicator: Communicator, *, of_process: bool = False) -> Iterator[Communicator]:
    """Make `communicator` this thread's current one inside the block.

    `of_process`: the whole process becomes the rank, and remains it until it joins another run.
    """
    global _of_process
    if of_process:
        _of_process = communicator
    with setting(_current, communicator=communicator):
        yield communicator


def _after_fork() -> None:
    of_thread = None if _current.communicator is _current.alone else _current.communicator
    for communicator in filter(None, (of_thread, _of_process)):
        communicator.silence_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
