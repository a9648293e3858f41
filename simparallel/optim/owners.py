"""Owners: one rank for each tensor, for computations on whole tensors whose ranks have slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace
from simparallel.clock.memory import BUFFERS
from simparallel.clock.recorder import observer_of
from simparallel.comm import Group


def longest_first(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Return an owner for each cost: the largest goes to the owner with the smallest load, and so on.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": the largest load is at most 4/3 of the least
    possible one.

    Args:
        costs: of any unit.
        loads: those so far, one for each owner; they are increased.
    """
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = owners[i] = loads.index(min(loads))
        loads[owner] += costs[i]
    return owners


def on_owners(
    compute: Callable[[int, Array], Array], tensors: Sequence[Tensor], slices: Sequence[Array], costs: Sequence[int],
    group: Group,
) -> list[Array]:  # fmt: skip
    """Return this rank's slices of `compute(i, whole)` for whole arrays, each computed on one rank.

    Args:
        compute: number of a tensor, whole array -> new array of its shape and dtype.
        tensors: these have the layouts.
        slices: this rank's, of one dtype.
        costs: of `compute` for each of the tensors.
        group: the ranks that have all slices of each of them, see `AbstractInterpreter.slice_group`.

    Collective: two uneven all_to_alls, one to the owners, and one back.
    """
    xp, me, size = get_namespace(*slices), group.rank, group.size
    owners = longest_first(costs, [0] * size)
    order = sorted(range(len(tensors)), key=owners.__getitem__)
    own = [i for i in order if owners[i] == me]
    layouts = [tensors[i].placement.layout for i in own]  # type: ignore[union-attr]
    # Of each rank, where its slices are in this rank's own tensors.
    places = [
        [layout.slices(rank, tensors[i].shape) for i, layout in zip(own, layouts, strict=True)] for rank in group.ranks
    ]
    counts = [sum(slices[i].size for i in order if owners[i] == owner) for owner in range(size)]
    own_counts = [sum(_size(index) for index in of_rank) for of_rank in places]

    def exchange(parts: list[Array], sends: list[int], receives: list[int]) -> Array:
        sent = _held(xp.concatenate([slices[0].reshape(-1)[:0], *parts]), tensors[0])
        return _held(collectives.all_to_all(sent, group=group, input_splits=sends, output_splits=receives), tensors[0])

    received = exchange([slices[i].reshape(-1) for i in order], counts, own_counts)
    whole = [_held(xp.empty(tensors[i].shape, received.dtype), tensors[i]) for i in own]
    start = 0
    for of_rank in places:
        for array, index in zip(whole, of_rank, strict=True):
            part = array[index]
            part[...] = received[start : start + part.size].reshape(part.shape)
            start += part.size
    results = [compute(i, array) for i, array in zip(own, whole, strict=True)]
    parts = [array[index].reshape(-1) for of_rank in places for array, index in zip(results, of_rank, strict=True)]
    returned = exchange(parts, own_counts, counts)
    found, start = {}, 0
    for i in order:
        found[i] = returned[start : start + slices[i].size].reshape(slices[i].shape)
        start += slices[i].size
    return [found[i] for i in range(len(tensors))]


def _size(index: tuple[slice, ...]) -> int:
    return int(np.prod([part.stop - part.start for part in index], dtype=np.int64))


def _held(array: Array, of: Tensor) -> Array:
    observer_of(of._device).memory.hold(array, BUFFERS)
    return array
