"""Ops with sliding windows, cut along the dims over which the windows slide.

A rank computes its slice of the output, so it reads the rows under these windows: its own and some of its
neighbours'. It fetches the missing rows (the halo), and the op runs on the region under the windows as on any
image. Padding exists only at the borders of the whole image, and the op fills and counts it as usual. In backward the
gradient of fetched rows returns to the rank that holds them, and is added there.

A cut is valid if it divides the image and the number of windows. A halo wider than the neighbour's slice comes from
several ranks; for an empty halo no message is sent.

A rank receives from the replicas with its own number (see `boxes`). So the ranks that hold one copy of the tensor
exchange only among themselves, and the gradients that they return add up to one gradient of the whole tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from simparallel.arrays.host.windows import Windows
from simparallel.autograd import Plan, Spec
from simparallel.backend import Array, get_namespace
from simparallel.layout.boxes import Box, Moves, box_of, boxes_of, intersection, shape_of, within
from simparallel.layout.sharding import Sharding
from simparallel.parallel.operator.redistribute import Move, assemble, by_messages, swap


class WindowCut:
    """The region of the image that each rank reads, and the rank's windows on it.

    Args:
        windows: all windows, on the whole image.
        sharding: the cuts of the op's dims.
        i: index of the image among the inputs.
        dims: dims of the image over which the windows slide -> their names, in the order of `windows`.

    Attributes:
        input: index of the image among the inputs.
        halo: the halo exchange: each rank gets every missing element of the region that it reads once. Regions may
            overlap, and may leave out parts of slices.
    """

    def __init__(self, windows: Windows, sharding: Sharding, i: int, dims: dict[int, str]) -> None:
        self.input = i
        layout, shape = sharding.input_layouts[i], sharding.shapes[i]
        # Number of windows per rank along each dim.
        height, width = (n // sharding.cut(name) for n, name in zip(windows.out, dims.values(), strict=True))
        self._windows: dict[int, Windows] = {}
        needs: dict[int, Box] = {}
        rows, columns = (sharding.mesh.chunks(sharding.cuts.get(name, ())) for name in dims.values())
        # Ranks with the same chunks share their windows: compute these once.
        part = cache(lambda row, column: windows.part((row * height, column * width), (height, width)))
        for (rank, box), row, column in zip(boxes_of(layout, shape).items(), rows, columns, strict=True):
            spans, self._windows[rank] = part(row, column)
            reach = dict(zip(dims, spans, strict=True))
            # The span under the windows along their dims, the rank's own slice along all others.
            needs[rank] = tuple([reach.get(d, own) for d, own in enumerate(box)])
        self.halo = Moves(layout, needs, shape)

    def local(self, plan: Plan, rank: int) -> Plan:
        """Return the op's plan on the region that the rank reads, given the plan on its slices."""
        inputs = list(plan.inputs)
        inputs[self.input] = Spec(shape_of(self.halo.needs[rank]), inputs[self.input].dtype)
        return replace(plan, inputs=tuple(inputs), windows=self._windows[rank])


class HaloMoves(NamedTuple):
    """One rank's part of a halo exchange. Collective: both functions wait for the ranks that it exchanges with.

    Attributes:
        input: index of the image among the op's inputs.
        widen: from the rank's slice to the region that it reads.
        narrow: from the gradient of that region to the gradient of its slice.
    """

    input: int
    widen: Move
    narrow: Move


def window_cut(windows: Windows | None, sharding: Sharding) -> WindowCut | None:
    """Return the WindowCut of an op, if it has windows and a dim over which they slide is cut; else None."""
    for i, tensor in enumerate(sharding.inputs):
        dims = {d: place.names[0] for d, place in enumerate(tensor) if place.kind == "window"}
        if windows is not None and any(sharding.cut(name) > 1 for name in dims.values()):
            return WindowCut(windows, sharding, i, dims)
    return None


def compile_halo(cut: WindowCut, rank: int) -> HaloMoves:
    """Compile the rank's part of the exchange."""
    halo = cut.halo
    have, need = box_of(halo.source, rank, halo.shape), halo.needs[rank]
    # The part that stays on this rank, and the parts that are exchanged.
    own, others = intersection(have, need), [move for move in halo.of(rank) if move.source != move.target]
    gets = {move.source: within(move.box, need) for move in others if move.target == rank}
    gives = {move.target: within(move.box, have) for move in others if move.source == rank}
    own_in_need, own_in_have = within(own, need), within(own, have)
    fetch = by_messages(gives, gets)
    shapes_out = {move.target: shape_of(move.box) for move in others if move.source == rank}

    def widen(x: Array) -> Array:
        # This rank holds everything it reads, but neighbours may need its rows.
        if own == need:
            swap(x, gives, {})
            return x if need == have else x[own_in_have]
        return assemble(x, shape_of(need), (own_in_need, own_in_have), fetch)

    def narrow(dy: Array) -> Array:
        if need == have and not gives:
            return dy
        # The exchange in reverse: return gradients of fetched rows, add the ones that come back.
        dx = get_namespace(dy).zeros_like(dy, shape=shape_of(have))
        dx[own_in_have] = dy[own_in_need]
        for target, part in swap(dy, gets, shapes_out).items():
            dx[gives[target]] += part
        return dx

    return HaloMoves(cut.input, widen, narrow)
