"""Collectives whose parts have different sizes along one dim: all_gather, gather, scatter, all_to_all.

A rank's payload begins with an int64 table: the number of parts, the number of expected sizes, the size of each part
along the dim, and the sizes that the rank expects. The parts follow, one after the other. Everything else about the
parts is equal on all ranks and in the header, which has -1 as the size along the dim. So every rank of the group sees
all sizes, and all of them raise if two do not match.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

import simparallel.comm.call_header as h
from simparallel.backend import has_data
from simparallel.clock.recorder import Recorder
from simparallel.comm.call import Body, Call, into
from simparallel.comm.collective import ALL_TO_ALL, SCATTER, Collective
from simparallel.comm.group import Algorithm
from simparallel.comm.memory.segment import LINE, round_up
from simparallel.comm.plan import Settings
from simparallel.comm.validate import check_array, check_dim, check_sizes, check_splits, native, position_of
from simparallel.comm.views import Place, Views
from simparallel.comm.work import Steps
from simparallel.errors import InputError
from simparallel.machine.cluster import Traffic

_WORD = np.dtype(np.int64)
ANY = -1  # a size that differs by rank


class PartSpec(NamedTuple):
    """The properties that all parts share; their size along `dim` is ANY."""

    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int


class UnevenParts(NamedTuple):
    """One rank's parts: a single one for all receivers, or one for each; they differ in their size along `dim` only."""

    arrays: Sequence[np.ndarray]
    dim: int
    expected: tuple[int, ...] = ()

    def table(self) -> np.ndarray:
        sizes = [array.shape[self.dim] for array in self.arrays]
        return np.array([len(sizes), len(self.expected), *sizes, *self.expected], _WORD)


class Table(NamedTuple):
    """A rank's table: sizes of its parts, sizes that it expects, and the offset of its first part."""

    sizes: list[int]
    expected: list[int]
    start: int

    def find(self, number: int, spec: PartSpec, views: Views) -> tuple[tuple[int, ...], int]:
        """Return shape and offset of the part with this number."""
        before, after = spec.shape[: spec.dim], spec.shape[spec.dim + 1 :]
        # Parts of one rank differ along `dim` only, so a unit of that dim has as many bytes in each of them. A message
        # has this rank's part alone.
        unit = prod((*before, *after)) * spec.dtype.itemsize
        first = sum(self.sizes[:number]) if views.is_shared else 0
        return (*before, self.sizes[number], *after), self.start + unit * first


def head_bytes(table: np.ndarray) -> int:
    """Return the offset of the first part: it begins on a cache line."""
    return round_up(table.nbytes, LINE)


def read_table(place: Place) -> Table:
    count, expected = place(_WORD, 0, 2).tolist()
    found = place(_WORD, 0, 2 + count + expected)
    sizes = found[2:].tolist()
    return Table(sizes[:count], sizes[count:], head_bytes(found))


class Uneven(Body):
    """An uneven collective of one rank; its x are `UnevenParts`, or None. `settings.sizes` is the parts' `PartSpec`."""

    def receives(self, op: str, position: int, sender: int) -> bool:
        """Return whether the member at `position` receives from the one at `sender`."""
        return op in ("all_gather", "all_to_all") or self.settings.root == (position if op == "gather" else sender)

    def expose(self, call: Call) -> tuple[int, int]:
        if call.x is None:
            return 0, 0
        return self.show(call, call.x.arrays, call.x.table()), sum(array.nbytes for array in call.x.arrays)

    def show(self, call: Call, arrays: Sequence[np.ndarray], table: np.ndarray, block_bytes: int = 0) -> int:
        """Copy the table and the arrays behind it to where their receivers read them; return the offset.

        `block_bytes`: size of a block, if this is one of several in the same call; else 0.
        """
        views, op, head = self.group.views, call.plan.op, head_bytes(table)
        receivers = (position for position in range(views.size) if self.receives(op, position, self.position))
        offset, call.other_offset, places = views.places_for(
            [head, *(array.nbytes for array in arrays)], receivers, call.seq & 1, block_bytes
        )
        for place, numbers in places:
            place(_WORD, 0, table.size)[...] = table
            at = head
            for array in map(arrays.__getitem__, numbers):
                if array.nbytes and has_data(array):
                    place(array.dtype, at, array.size).reshape(array.shape)[...] = array
                at += array.nbytes
        return offset

    def run(self, call: Call) -> Steps:
        yield from ()
        views, op, me = self.group.views, call.plan.op, self.position
        if op == "scatter":
            return own(call.x.arrays[me])
        if op == "gather" and me != self.settings.root:
            return None
        spec: PartSpec = self.settings.sizes
        places = [views.place_of(position, call.seq & 1) for position in range(views.size)]
        call.kept = tables = list(map(read_table, places))
        if op == "all_to_all":
            self._check_expected(tables)
        parts = []
        for table, place in zip(tables, places, strict=True):
            shape, start = table.find(me if op == "all_to_all" else 0, spec, views)
            size = prod(shape) if spec.dtype.itemsize else 0
            part = place(spec.dtype, start, size).reshape(shape) if size else np.empty(shape, spec.dtype)
            parts.append(call.seen(part))
        return list(map(own, parts)) if op == "gather" else np.concatenate(parts, spec.dim)

    def _check_expected(self, tables: Sequence[Table]) -> None:
        """Raise CollectiveMismatchError, on every rank, if any rank expects another size than it gets."""
        ranks, wrong = self.group.ranks, []
        taken = zip(*(table.sizes for table in tables), strict=True)
        for receiver, (table, sizes) in enumerate(zip(tables, taken, strict=True)):
            if table.expected == list(sizes):
                continue
            for sender, (given, expected) in enumerate(zip(sizes, table.expected, strict=False)):
                if given != expected:
                    wrong.append(
                        f"  rank {ranks[sender]} gives {given} to rank {ranks[receiver]}, which expects {expected}"
                    )
        if wrong:
            more = f"\n  and {len(wrong) - 9} more" if len(wrong) > 9 else ""
            listed = "\n".join(wrong[:9])
            raise self.group.mismatch(
                f": sizes along dim {self.settings.sizes.dim} do not match.\n{listed}{more}\n"
                "The input_splits of the sender and the output_splits of the receiver must agree."
            )

    def price(self, call: Call, recorder: Recorder) -> tuple[int, Traffic]:
        """Price the vector of all parts; for an all_to_all, the most that any rank sends or receives."""
        group, op, root = self.group, call.plan.op, self.settings.root
        # Objects are bytes.
        dtype = self.settings.sizes.dtype if self.settings.sizes else np.dtype(np.uint8)
        item = recorder.cluster.itemsize(dtype)
        given = [size * item // max(dtype.itemsize, 1) for size in call.notes(h.NBYTES)]
        size_bytes = given[root] if op == "scatter" else sum(given)
        if op == "all_to_all":
            shape, _, dim = self.settings.sizes
            unit = item * prod((*shape[:dim], *shape[dim + 1 :]))
            taken = [unit * sum(sizes) for sizes in zip(*(table.sizes for table in call.kept), strict=True)]
            size_bytes = max(*given, *taken)
        cost = recorder.cluster.collective(op, size_bytes, group.ranks, position=group.position, root=root)
        if op == "all_to_all":
            # A rank's part for itself is not sent.
            kept = unit * call.kept[group.position].sizes[group.position]
            cost = Traffic(cost.time_ps, given[group.position] - kept, cost.algorithm)
        return size_bytes, cost


def own(part: np.ndarray) -> np.ndarray:
    """Copy an array, in this machine's byte order."""
    return part.astype(native(part.dtype), order="C")


def run_uneven(
    what: Collective, direct: Algorithm, parts: UnevenParts, purpose: str, async_op: bool, root: int = 0
) -> Any:
    """Run an uneven collective: plan it, or find the plan of earlier equal calls. `root`: position of the root."""
    dim, first, group = parts.dim, parts.arrays[0], direct.group
    spec = PartSpec((*first.shape[:dim], ANY, *first.shape[dim + 1 :]), first.dtype, dim)
    key = what.name, "uneven", root, spec, purpose
    plan = direct.plans.get(key)
    if plan is None:
        rank = group.ranks[root] if what.root else 0
        # The other ranks read from the root's note that the parts differ.
        if what is SCATTER:
            header = h.encode(what.name, root=rank)
            h.encode_given(header, spec.shape, spec.dtype)
        else:
            header = h.encode(what.name, "-", rank, spec.dtype, spec.shape, h.encode_dims(dim))
        settings = Settings(root=root, dims=(dim,), sizes=spec)
        plan = direct.add_plan(key, header, settings, purpose=purpose, body="uneven")
    return group.run(plan, parts, async_op)


def gather_uneven(
    what: Collective, direct: Algorithm, x: np.ndarray, dim: int, root: int | None, purpose: str, async_op: bool
) -> Any:
    """Run an all_gather, or with a root a gather, of x whose sizes along `dim` may differ by rank."""
    position = position_of(what.name, direct.group, root) if what.root else 0
    check_array(what.name, x)
    dim = check_dim(what.name, x, dim)
    return run_uneven(what, direct, UnevenParts([x], dim), purpose, async_op, position)


def scatter_uneven(
    chosen: Algorithm, parts: Sequence[np.ndarray], root: int, out: np.ndarray | None, purpose: str, async_op: bool
) -> Any:
    """Run a scatter of parts that differ in size along dim 0, on their root."""
    if chosen is not chosen.group.direct:
        raise InputError("scatter: parts of different sizes need algorithm='direct'.")
    result = run_uneven(SCATTER, chosen, UnevenParts(parts, 0), purpose, async_op, root)
    if out is None:
        return result
    return result.then(lambda part: into(out, part)) if async_op else into(out, result)


def exchange_uneven(
    direct: Algorithm,
    x: np.ndarray,
    dim: int,
    concat_dim: int,
    input_splits: Sequence[int] | None,
    output_splits: Sequence[int] | None,
    purpose: str,
    async_op: bool,
) -> Any:
    """Run an all_to_all with parts of these sizes; without `input_splits` the parts of this rank are equal."""
    name, size = ALL_TO_ALL.name, direct.group.size
    check_array(name, x)
    dim = check_dim(name, x, dim, divided_by=size if input_splits is None else 1)
    if check_dim(name, x, concat_dim) != dim:
        raise InputError(
            f"{name}: with input_splits or output_splits, concat_dim={concat_dim} must be split_dim={dim}: "
            "parts of different sizes join along that dim only."
        )
    given: Sequence[int] = [x.shape[dim] // size] * size
    if input_splits is not None:
        given = check_splits(name, x, dim, input_splits, size)
    expected = () if output_splits is None else check_sizes(f"{name}: output_splits", output_splits, size)
    # Not `np.split`, which takes longer than a small exchange.
    ends = accumulate(given, initial=0)
    parts = [x[(slice(None),) * dim + (slice(start, stop),)] for start, stop in pairwise(ends)]
    return run_uneven(ALL_TO_ALL, direct, UnevenParts(parts, dim, expected), purpose, async_op)
