"""Owners: one rank for each tensor, to compute on whole tensors of which the ranks have slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    compute: Callable[[int, Array], Array],
    tensors: Sequence[Tensor],
    slices: Sequence[Array],
    costs: Sequence[int],
    group: Group,
) -> None:
    """Replace this rank's slices by those of `compute(i, whole)`, which one rank computes for each whole array.

    Args:
        compute: number of a tensor, whole array -> array of its shape and dtype.
        tensors: these have the layouts.
        slices: this rank's, of one dtype, in C order; they are written.
        costs: of `compute` for each of the tensors.
        group: the ranks that have all slices of each of them, see `AbstractInterpreter.slice_group`.

    Collective: two all_to_alls, to the owners and back.
    """
    owners = longest_first(costs, [0] * group.size)
    order = sorted(range(len(tensors)), key=owners.__getitem__)
    own = [i for i in order if owners[i] == group.rank]
    xp, hold = get_namespace(*slices), observer_of(tensors[0]._device).memory.hold
    wholes = [xp.empty(tensors[i].shape, slices[i].dtype) for i in own]

    def parts(arrays: Sequence[Array]) -> list[list[Array]]:
        layouts = [(tensors[i].placement.layout, tensors[i].shape) for i in own]  # type: ignore[union-attr]
        return [
            [array[layout.slices(rank, shape)] for array, (layout, shape) in zip(arrays, layouts, strict=True)]
            for rank in group.ranks
        ]

    def exchange(given: list[list[Array]], taken: list[list[Array]]) -> None:
        sends, receives = ([sum(x.size for x in of_rank) for of_rank in each] for each in (given, taken))
        sent = xp.concatenate([slices[0].reshape(-1)[:0], *(x.reshape(-1) for of_rank in given for x in of_rank)])
        hold(sent, BUFFERS)
        received = collectives.all_to_all(sent, group=group, input_splits=sends, output_splits=receives)
        hold(received, BUFFERS)
        start = 0
        for x in (x for of_rank in taken for x in of_rank):
            x[...] = received[start : start + x.size].reshape(x.shape)
            start += x.size

    own_slices = [[slices[i] for i in order if owners[i] == owner] for owner in range(group.size)]
    for whole in wholes:
        hold(whole, BUFFERS)
    exchange(own_slices, parts(wholes))
    exchange(parts([compute(i, whole) for i, whole in zip(own, wholes, strict=True)]), own_slices)
