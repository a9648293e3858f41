"""The parameters of one call of `fully_shard`: stored in slices, gathered together, reduced together.

A parameter is a leaf that has this rank's slice, laid out over the axis of slices; that is what the optimizer,
clipping and checkpoints see. The slices of a group are views of one array. What else it holds depends on the argument
`parameter` of `fully_shard`:

    "S", sharded      nothing: this rank's chunks alone, in the order in which they are sent
    "R", replicated   the whole parameters, one after the other; the slices of other ranks are gathered again after each
                      step. With another dtype to compute in, these are in a second array.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.tape import is_written_since
from simparallel.backend import Array, get_namespace
from simparallel.clock.memory import BUFFERS, GATHERED, GRADIENTS, PARAMETERS
from simparallel.clock.recorder import current_recorder, observer_of
from simparallel.comm import Work, current
from simparallel.errors import InputError
from simparallel.nn.deferred import Recipe, is_deferred, materialize, placeholder
from simparallel.nn.parameter import Parameter
from simparallel.parallel.ddp.buckets import empty_like
from simparallel.parallel.ddp.mixed_precision import MixedPrecision
from simparallel.parallel.operator.interpreter import SHARDED
from simparallel.parallel.sharded.axes import Axes
from simparallel.parallel.sharded.letters import Letters
from simparallel.parallel.sharded.rows import FlatRows, flat_rows
from simparallel.parallel.sharded.stored import StoredInterpreter, WholeInterpreter, interpreter

# The parameters of a module, and the name of one; not the module, which refers to its group.
Place = tuple[dict[str, Any], str]


class Gathering(NamedTuple):
    """An all-gather under way: the slices that it sends, when it began, and what it fills; no work for one slice.

    It keeps `wire`, the array that is sent, until it is waited for: a work drops its arrays as soon as the other ranks
    have come, which is at another operation on each rank.
    """

    sent: Sequence[Array]
    begun: int
    wire: Array
    by_rank: Array
    work: Work | None


def is_reduced_already(p: Tensor) -> bool:
    """Return whether a parameter has a gradient other than one of this rank alone, which its group will reduce."""
    grad = p._grad
    if grad is None or p.placement is not None:
        return grad is not None and grad.placement is p.placement.gradient  # type: ignore[union-attr]
    # A whole parameter has no placement that tells. Only `wait`, which keeps gradients of this rank alone, gives them
    # the interpreter of the parameter.
    return p.interpreter is None or grad.interpreter is not p.interpreter


def _shifted(recipe: Recipe, first: int, start: int, count: int) -> Any:
    return recipe(first + start, count)


class ShardedGroup:
    """The parameters of a module that are not in a group of a child.

    Args:
        name: path of the module, for messages; the same on every rank.
        places: each parameter, and the registries and names under which it is used; none for a module whose parameters
            are all in groups of children.
        axes: the ranks.
        letters: where parameters, gradients and state are.
        precision: dtypes to compute and to reduce in; None for that of the parameters.

    Collective: yes, with replicas: they begin with the values of the first.

    Attributes:
        parameters: the leaves.
        dtype: of the whole parameters, None without any; `casts`: it is another one than that of the slices, and
            inputs are cast to it; `travel_dtype`: of the gradients that are reduced; `sum_dtype`: of those of
            several micro-batches that are not reduced yet, the wider one of that and the parameters' dtype.
        computed: for each parameter its placement where ops read it, None if this rank then has all of it.
        kept: whole parameters that stay from step to step, by tensor; None if each use gathers its own.
        reshards: the whole parameters are freed after forward, and gathered again in backward; None until it is known
            whether this group is the outermost.
        syncs: backward reduces the gradients of forward passes that begin now.
        next: "forward" or "backward" -> the group that was used after this one, unless that had its parameters.
    """

    def __init__(
        self,
        name: str,
        places: dict[Parameter, list[Place]],
        axes: Axes,
        letters: Letters,
        precision: MixedPrecision | None = None,
    ) -> None:
        self.name, self.places, self.axes, self.letters = name, list(places.values()), axes, letters
        self.parameters = list(places)
        self._stored_dtype: Any = self.parameters[0].dtype if places else None
        self.dtype: Any = (precision and precision.param_dtype) or self._stored_dtype
        self.casts = self.dtype != self._stored_dtype
        self.reshards: bool | None = None
        self.syncs = True
        self.next: dict[str, weakref.ref[ShardedGroup]] = {}
        self._ahead: Gathering | None = None
        if not places:
            return
        stored = self.parameters[0].dtype
        self.travel_dtype = (precision and precision.travel_dtype) or stored
        self.sum_dtype = np.promote_types(stored, self.travel_dtype)
        # Whole parameters of the stored dtype contain the slices.
        self._holds_slices = letters.keeps_whole and not self.casts
        self.kept: Array | None = None
        self.computed = [p.placement for p in self.parameters]
        self._stored = [axes.stored(p) for p in self.parameters]
        self.rows = flat_rows(tuple(p._data.shape for p in self.parameters), axes.size)
        # The time at which all ranks' slices of a whole array were the present ones; None before the first.
        self._gathered_at: int | None = None
        if axes.shard is not None:
            axes.shard.transport.segment.need([axes.shard.ranks[rank] for rank in self.rows.uneven_ranks])
        # A pipeline draws the parameters of its own stages alone.
        if axes.has_others and axes.replicas is None and all(map(is_deferred, self.parameters)):
            self._defer()
        else:
            self._store([p._data for p in self.parameters], self.rows.shapes)
        if axes.replicas is not None:
            # Reductions keep replicas equal, but do not make them so.
            with current().for_purpose(f"parameters of {name}"):
                collectives.broadcast(self.flat, axes.replicas.ranks[0], axes.replicas)

    # --- slices ---------------------------------------------------------------------------------------

    def _new_array(self, size: int, category: str, *, is_shared: bool = False) -> Array:
        """Return a flat array to compute with; one of the stored dtype that peers read in place, if it is shared."""
        like = self.parameters[0]._data
        array = empty_like(like, size, current()) if is_shared else get_namespace(like).empty(size, self.dtype)
        observer_of(self.parameters[0]._device).memory.hold(array, category, what=f"parameters of {self.name}")
        return array

    def _place(self, i: int, own_slice: Array) -> None:
        """Let parameter number `i` be this slice."""
        p, stored = self.parameters[i], self._stored[i]
        p._data = own_slice
        kind = WholeInterpreter if stored is None else StoredInterpreter
        p.placement, p.interpreter = stored, interpreter(kind, (self.axes.mesh, self.axes.names))

    def _defer(self) -> None:
        """Let each parameter be a slice without data, whose initializer fills this slice alone."""
        self.slices = []
        for i, (p, (first, last)) in enumerate(zip(self.parameters, self.rows.spans(self.axes.rank), strict=True)):
            p.initial = partial(_shifted, p.initial, first * prod(p._data.shape[1:]))  # type: ignore[arg-type]
            self.slices.append(p._data[first:last])
            self._place(i, self.slices[-1])

    def _store(self, values: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> None:
        """Move the parameters to one array; `values` are whole, or this rank's slices, and have these whole shapes."""
        rank, size = self.axes.rank, self.rows.size * (self.axes.size if self._holds_slices else 1)
        self.flat = self._new_array(size, PARAMETERS, is_shared=True)
        self.flat[...] = 0
        self.slices = self.rows.own_chunks(self.flat, rank, by_tensor=self._holds_slices)
        if self._holds_slices or (self.axes.shard is None and not self.casts):
            self.kept = self.flat
        spans = self.rows.spans(rank)
        for i, (value, shape, own_slice, (first, last)) in enumerate(
            zip(values, shapes, self.slices, spans, strict=True)
        ):
            p, is_slice = self.parameters[i], value.shape == own_slice.shape
            if is_deferred(p):
                # Random numbers depend on the index of the element: a rank draws its rows alone.
                rows = slice(first, last), *(slice(0, size) for size in shape[1:])
                value = materialize(p, None if is_slice else rows)
            elif not is_slice:
                value = value[first:last]
            own_slice[...] = value
            self._place(i, own_slice)
        self._gathered_at = None

    def _follow_values(self) -> None:
        """Take over arrays that the program has assigned to the parameters.

        The array in use stays as it is: a forward that awaits its backward reads it. Another dtype is refused.
        """
        if any(p._data is not own or is_deferred(p) for p, own in zip(self.parameters, self.slices, strict=True)):
            other = next((p for p in self.parameters if p._data.dtype != self._stored_dtype), None)
            if other is not None:
                raise InputError(
                    f"fully_shard: {other.name or 'a parameter'} of {self.name} is {other._data.dtype} now, and was "
                    f"{self._stored_dtype}. Convert the model before fully_shard, or compute in another dtype by "
                    "mp_policy=MixedPrecision(param_dtype=...)."
                )
            self._store([p._data for p in self.parameters], self.rows.shapes)

    def check_places(self) -> None:
        """Refuse modules in which the program has replaced a parameter. Raises InputError."""
        for p, own in zip(self.parameters, self.places, strict=True):
            for registry, name in own:
                if registry.get(name) is not p:
                    raise InputError(
                        f"fully_shard: {p.name or name} of {self.name} was replaced by another tensor, which no group "
                        "has. Write values by load_full_state_dict() or p.data = ..., and replace parameters before "
                        "fully_shard."
                    )

    def tensor(self, i: int, array: Array, node: Any = None) -> Tensor:
        """Return parameter number `i` as the module computes with it: on a slice of its own, if it is cut."""
        place = self.computed[i]
        interpreter = None if place is None else SHARDED
        return Tensor._result(array, node, self.parameters[i]._device, place, interpreter)

    def placeholders(self) -> list[Tensor]:
        """Return tensors without data in place of the whole parameters."""
        return [self.tensor(i, placeholder(shape, self.dtype)) for i, shape in enumerate(self.rows.shapes)]

    # --- gathering --------------------------------------------------------------------------------------

    def gather_ahead(self) -> None:
        """Start to gather the parameters for their next use, unless they are whole already. Collective: yes."""
        if self._ahead is None and self.axes.shard is not None:
            self._follow_values()
            if not self._is_whole():
                self._ahead = self._start(self.slices, GATHERED)

    def forget_ahead(self) -> None:
        """Drop parameters that were gathered ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.work is not None:
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
        if self.axes.shard is None and self.kept is self.flat:
            return self.flat
        if not self._is_whole():
            ahead = self._ahead
            # A step since it was gathered makes it worthless; this is so on all ranks.
            is_same = ahead is not None and all(a is b for a, b in zip(ahead.sent, stored, strict=True))
            if ahead is None or not is_same or is_written_since(self.flat, ahead.begun):
                self.forget_ahead()
                ahead = self._start(stored)
            self._ahead = None
            if not self.letters.keeps_whole:
                return self._finish(ahead)
            self.kept = self._finish(ahead, self.flat if self._holds_slices else None)
            self._gathered_at = ahead.begun
        assert self.kept is not None
        return self.kept

    def _is_whole(self) -> bool:
        """Return whether the parameters are whole from step to step, and no slice has changed since."""
        return self._gathered_at is not None and not is_written_since(self.flat, self._gathered_at)

    def _start(self, stored: Sequence[Array], category: str = BUFFERS) -> Gathering:
        """Start to gather these slices of the ranks; return the running gather.

        Args:
            stored: this rank's slices.
            category: of the memory account for what arrives; GATHERED if it is gathered ahead of its use.
        """
        begun, wire = next(grad_mode.numbers), self.flat
        is_flat = not self._holds_slices and all(a is b for a, b in zip(stored, self.slices, strict=True))
        if not is_flat or self.casts:
            # Nobody reads the padding.
            wire = self._new_array(self.rows.size, BUFFERS)
            for own, value in zip(self.rows.own_chunks(wire, self.axes.rank), stored, strict=True):
                own[...] = value
        if self.axes.shard is None:
            return Gathering(stored, begun, wire, wire, None)
        by_rank = self._new_array(self.rows.size * self.axes.size, category)
        with current().for_purpose(f"parameters of {self.name}"):
            work = collectives.all_gather(wire, 0, self.axes.shard, async_op=True, out=by_rank)
        return Gathering(stored, begun, wire, by_rank, work)

    def _finish(self, gathering: Gathering, flat: Array | None = None) -> Array:
        if gathering.work is None:
            return gathering.by_rank
        gathering.work.wait()
        flat = self._new_array(self.rows.size * self.axes.size, GATHERED) if flat is None else flat
        recorder = current_recorder()
        start_ns = 0 if recorder is None else recorder.now_ns()
        self.rows.to_tensors(gathering.by_rank, flat)
        if recorder is not None:
            itemsize = recorder.cluster.itemsize(flat.dtype)
            recorder.work("gather_parameters", "forward", start_ns, 0, 2 * flat.size * itemsize, itemsize)
        return flat

    # --- gradients --------------------------------------------------------------------------------------

    def is_waiting(self, i: int) -> bool:
        """Return whether parameter number `i` has a gradient in `.grad` that a reduction includes."""
        p = self.parameters[i]
        return p._grad is not None and (p.placement is None or p._grad.placement is not p.placement.gradient)

    def take_waiting(self, i: int) -> Array | None:
        """Return the gradient of parameter number `i` that waits in `.grad`, and set that to None; None without one."""
        if not self.is_waiting(i):
            return None
        p = self.parameters[i]
        grad, p._grad = p._grad, None
        assert grad is not None
        is_addend = grad.placement is None or grad.placement.layout.partial
        # Whoever reads a sum, such as full_tensor(), finishes it on all ranks.
        return grad._data if is_addend else grad._data / self.axes.part[1]

    def wait(self, i: int, gradient: Array, is_own: bool) -> None:
        """Keep the gradient of a whole parameter, of this rank alone, in `.grad`, and add a reduced one from there.

        Args:
            i: number of the parameter.
            gradient: it.
            is_own: nothing else uses this array.
        """
        p = self.parameters[i]
        whole = gradient if is_own else gradient.astype(self.sum_dtype, order="C")
        if p._grad is not None:
            # A mean over the ranks is one of as many addends, of which this rank has a slice.
            first, last = self.rows.spans(self.axes.rank)[i]
            whole[first:last] += p._grad._data * self.axes.size
        observer_of(p._device).memory.hold(whole, GRADIENTS)
        place = None if p.placement is None else self.axes.partial(self.computed[i], p.shape)
        p._grad = Tensor._result(whole, None, p._device, place, p.interpreter)

    def rows_of(self, numbers: tuple[int, ...]) -> FlatRows:
        """Return the places of these parameters' gradients."""
        return flat_rows(tuple(self.rows.shapes[i] for i in numbers), self.axes.size)

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
