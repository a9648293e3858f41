"""Compute on whole tensors of which the ranks have slices: one rank, the owner, gathers and computes each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace, views_of
from simparallel.clock.memory import BUFFERS
from simparallel.clock.recorder import observer_of
from simparallel.comm import Group, current


def longest_first(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Assign jobs to owners by longest processing time first: the costliest job goes to the least loaded owner.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": the largest load is at most 4/3 of the least
    possible one.

    Args:
        costs: of the jobs, in any unit.
        loads: of the owners so far; they are increased.

    Returns:
        The owner of each job.
    """
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = owners[i] = loads.index(min(loads))
        loads[owner] += costs[i]
    return owners


def on_owners(
    compute: Callable[[Tensor, Array, Any], Array],
    jobs: Sequence[tuple[Tensor, Array, Any]],
    costs: Sequence[int],
    group: Group,
) -> None:
    """Replace each array by the result of `compute`, in place: an owner gathers the slices, computes, and scatters.

    Args:
        compute: (tensor, whole array, settings) -> array of the same shape and dtype.
        jobs: (a tensor with the layout of the array, this rank's slice of the array, settings); all arrays have one
            dtype.
        costs: the cost of `compute` for each job.
        group: the ranks that together have all slices of each array, see `AbstractInterpreter.slice_group`.

    Collective: two all_to_alls, to the owners and back.
    """
    owners, communicator = longest_first(costs, [0] * group.size), current()
    purpose = f"{len(jobs)} matrices on owners"
    communicator.transport.segment.need(_unlike(jobs, costs, owners, group), purpose)
    own = [job for job, owner in zip(jobs, owners, strict=True) if owner == group.rank]
    slices = [[x for (_, x, _), owner in zip(jobs, owners, strict=True) if owner == rank] for rank in range(group.size)]
    xp, hold, dtype = get_namespace(jobs[0][1]), observer_of(jobs[0][0]._device).memory.hold, jobs[0][1].dtype

    def parts(wholes: Sequence[Array]) -> list[list[Array]]:
        layouts = [(tensor.placement.layout, tensor.shape) for tensor, _, _ in own]  # type: ignore[union-attr]
        return [
            [array[layout.slices(rank, shape)] for array, (layout, shape) in zip(wholes, layouts, strict=True)]
            for rank in group.ranks
        ]

    def exchange(given: list[list[Array]], taken: list[list[Array]]) -> None:
        sends, receives = ([sum(x.size for x in of_rank) for of_rank in each] for each in (given, taken))
        sent = xp.concatenate([xp.empty(0, dtype), *(x.reshape(-1) for of_rank in given for x in of_rank)])
        hold(sent, BUFFERS)
        with communicator.for_purpose(purpose):
            received = collectives.all_to_all(sent, group=group, input_splits=sends, output_splits=receives)
        hold(received, BUFFERS)
        found = [x for of_rank in taken for x in of_rank]
        for x, part in zip(found, views_of(received, [x.shape for x in found]), strict=True):
            x[...] = part

    wholes = [xp.empty(tensor.shape, dtype) for tensor, _, _ in own]
    for whole in wholes:
        hold(whole, BUFFERS)
    exchange(slices, parts(wholes))
    exchange(parts([compute(tensor, x, of) for (tensor, _, of), x in zip(own, wholes, strict=True)]), slices)


def _unlike(
    jobs: Sequence[tuple[Tensor, Array, Any]], costs: Sequence[int], owners: Sequence[int], group: Group
) -> Iterator[int]:
    """Yield the ranks next to which another one has slices of other sizes, or owns arrays of other costs or slices."""
    places = {tensor.placement for tensor, _, _ in jobs}
    sizes = {place: [prod(place.local_shapes[rank]) for rank in group.ranks] for place in places}  # type: ignore[union-attr]
    owned: list[list[Any]] = [[] for _ in group.ranks]
    for (tensor, _, _), cost, owner in zip(jobs, costs, owners, strict=True):
        owned[owner].append((cost, sizes[tensor.placement]))
    kinds = [([each[number] for each in sizes.values()], own) for number, own in enumerate(owned)]
    for (rank, kind), (next_rank, next_kind) in pairwise(zip(group.ranks, kinds, strict=True)):
        if kind != next_kind:
            yield from (rank, next_rank)
