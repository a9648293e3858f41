"""The parameters of one call of `fully_shard`: stored in slices, gathered together, reduced together.

A parameter is a leaf that has this rank's slice, laid out over the axis of slices; that is what the optimizer,
clipping and checkpoints see. The slices of a group are views of one array:

    parameter "S"   by rank, as on the wire: this rank's chunks alone
    parameter "R"   by tensor: whole parameters, whose other slices are gathered again after a step
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from simparallel import collectives
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.tape import is_written_since
from simparallel.backend import Array, get_namespace
from simparallel.clock.memory import BUFFERS, PARAMETERS
from simparallel.clock.recorder import current_recorder
from simparallel.comm import Work, current
from simparallel.nn import Module
from simparallel.nn.deferred import is_deferred, materialize
from simparallel.nn.parameter import Parameter
from simparallel.parallel.ddp.buckets import empty_like
from simparallel.parallel.sharded.axes import Axes
from simparallel.parallel.sharded.letters import Letters
from simparallel.parallel.sharded.rows import FlatRows
from simparallel.parallel.sharded.stored import STORED

# A module, and the name under which it has a parameter.
Place = tuple[Module, str]


class Gathering(NamedTuple):
    """An all-gather under way: the slices that it sends, when it began, and what it fills."""

    sent: Sequence[Array]
    begun: int
    by_rank: Array
    work: Work


class ShardedGroup:
    """The parameters of a module that are not in a group of a child.

    Args:
        name: path of the module, for messages; the same on every rank.
        places: each parameter, and the modules and names under which it is used.
        axes: the ranks.
        letters: where parameters, gradients and state are.

    Attributes:
        parameters: the leaves.
        reshards: the whole parameters are freed after forward, and gathered again in backward; None until it is known
            whether this group is the outermost.
        syncs: backward reduces the gradients of forward passes that begin now.
        partial: gradients that are not reduced yet: numbers of the parameters, the gradients by rank, and which of the
            parameters have one.
        next: "forward" or "backward" -> the group that was used after this one.
    """

    def __init__(self, name: str, places: dict[Parameter, list[Place]], axes: Axes, letters: Letters) -> None:
        self.name, self.places, self.axes, self.letters = name, list(places.values()), axes, letters
        self.parameters = list(places)
        self.rows = FlatRows([p.shape for p in self.parameters], axes.size)
        self.rows_of = lru_cache(maxsize=4)(self._rows_of)
        self.reshards: bool | None = None
        self.syncs = True
        self.partial: tuple[tuple[int, ...], Array, set[int]] | None = None
        self.next: dict[str, ShardedGroup] = {}
        self._ahead: Gathering | None = None
        # The time at which all ranks' slices of a whole array were the present ones; None before the first.
        self._gathered_at: int | None = None
        self._store([p._data for p in self.parameters], [p.shape for p in self.parameters])

    # --- slices ---------------------------------------------------------------------------------------

    def _new_array(self, size: int, category: str, *, is_shared: bool = True) -> Array:
        """Return a flat array; one that is shared can be read by peers in place."""
        like = self.parameters[0]._data
        array = empty_like(like, size, current()) if is_shared else get_namespace(like).empty(size, like.dtype)
        recorder = current_recorder()
        if recorder is not None:
            what = f"parameters of {self.name}"
            recorder.of(self.parameters[0]._device or recorder.device).memory.hold(array, category, what=what)
        return array

    def _store(self, values: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> None:
        """Move the parameters to one array; `values` are whole, or this rank's slices, and have these whole shapes."""
        keeps_whole, rank = self.letters.keeps_whole, self.axes.rank
        self.flat = self._new_array(self.rows.size * (self.axes.size if keeps_whole else 1), PARAMETERS)
        self.flat[...] = 0
        own = self.rows.own_chunks_by_tensor if keeps_whole else self.rows.own_chunks
        self.slices = own(self.flat, rank)
        spans = self.rows.spans(rank)
        for p, value, shape, own_slice, (first, last) in zip(
            self.parameters, values, shapes, self.slices, spans, strict=True
        ):
            if is_deferred(p):
                # Random numbers depend on the index of the element: a rank draws its rows alone.
                value = materialize(p, (slice(first, last), *(slice(0, size) for size in shape[1:])))
            elif value.shape != own_slice.shape:
                value = value[first:last]
            own_slice[...] = value
            p._data = own_slice
            if self.axes.shard is not None:
                p.placement, p.interpreter = self.axes.placement(shape), STORED
        self._gathered_at = None

    def _follow_values(self) -> None:
        """Take over arrays that the program has assigned to the parameters.

        The array in use stays as it is: a forward that awaits its backward reads it.
        """
        if any(p._data is not own for p, own in zip(self.parameters, self.slices, strict=True)):
            self._store([p._data for p in self.parameters], self.rows.shapes)

    # --- gathering --------------------------------------------------------------------------------------

    def gather_ahead(self) -> None:
        """Start to gather the parameters for their next use. Collective: yes."""
        if self._ahead is None and self.axes.shard is not None and not self.letters.keeps_whole:
            self._follow_values()
            self._ahead = self._start(self.slices)

    def forget_ahead(self) -> None:
        """Drop parameters that were gathered ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.work.wait()

    def gather(self, stored: Sequence[Array] | None = None) -> Array:
        """Return the whole parameters, by tensor.

        Args:
            stored: the slices to gather; by default the present ones.

        Collective: yes, unless every rank has the whole parameters.
        """
        if stored is None:
            self._follow_values()
            stored = self.slices
        if self.axes.shard is None:
            return self.flat
        if self.letters.keeps_whole:
            if self._gathered_at is None or is_written_since(self.flat, self._gathered_at):
                self._finish(self._start(stored), self.flat)
                self._gathered_at = next(grad_mode.numbers)
            return self.flat
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # A step since then makes it worthless; this is so on all ranks.
            is_same = all(a is b for a, b in zip(ahead.sent, stored, strict=True))
            if is_same and not is_written_since(self.flat, ahead.begun):
                return self._finish(ahead)
            ahead.work.wait()
        return self._finish(self._start(stored))

    def _start(self, stored: Sequence[Array]) -> Gathering:
        begun, wire = next(grad_mode.numbers), self.flat
        if self.letters.keeps_whole or any(a is not b for a, b in zip(stored, self.slices, strict=True)):
            wire = self._new_array(self.rows.size, BUFFERS)
            wire[...] = 0
            for own, value in zip(self.rows.own_chunks(wire, self.axes.rank), stored, strict=True):
                own[...] = value
        by_rank = self._new_array(self.rows.size * self.axes.size, BUFFERS, is_shared=False)
        with current().for_purpose(f"parameters of {self.name}"):
            work = collectives.all_gather(wire, 0, self.axes.shard, async_op=True, out=by_rank)
        return Gathering(stored, begun, by_rank, work)

    def _finish(self, gathering: Gathering, flat: Array | None = None) -> Array:
        gathering.work.wait()
        flat = self._new_array(self.rows.size * self.axes.size, PARAMETERS, is_shared=False) if flat is None else flat
        recorder = current_recorder()
        start_ns = 0 if recorder is None else recorder.now_ns()
        self.rows.to_tensors(gathering.by_rank, flat)
        if recorder is not None:
            recorder.work("gather_parameters", "forward", start_ns, 0, 2 * flat.nbytes, flat.itemsize)
        return flat

    # --- gradients --------------------------------------------------------------------------------------

    def _rows_of(self, numbers: tuple[int, ...]) -> FlatRows:
        """Return the places of these parameters' gradients."""
        return FlatRows([self.rows.shapes[i] for i in numbers], self.axes.size)

    def reduce(self, by_rank: Array) -> Work:
        """Start to average gradients over all ranks, and return the work; its result are the means of this rank's rows.

        Collective: yes.
        """
        with current().for_purpose(f"gradients of {self.name}"):
            if self.axes.shard is None:
                return collectives.all_reduce(by_rank, "mean", self.axes.replicas, async_op=True)
            return collectives.reduce_scatter(by_rank, 0, "mean", self.axes.shard, async_op=True)

    def reduce_replicas(self, own: Array) -> Work | None:
        """Start to average reduced rows over the ranks that have the same ones. Collective: yes."""
        if self.axes.shard is None or self.axes.replicas is None:
            return None
        with current().for_purpose(f"gradients of {self.name}"):
            return collectives.all_reduce(own, "mean", self.axes.replicas, async_op=True)
