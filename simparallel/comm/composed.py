"""Collectives of what is no array: a list of arrays travels as one vector, an object as bytes.

Their headers say what they stand for, so that they match nothing else: neither a flat array as long as all arrays of
the list, nor the collectives of arrays that carry an object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from simparallel.comm import header as h
from simparallel.comm.arguments import check_array, check_out, is_same_place, position_of
from simparallel.comm.call import CallPlan
from simparallel.comm.contract import AbstractCommunicator
from simparallel.comm.reduction import LOGICAL, truth
from simparallel.summation import check_dtype

LAYERS = "adasum of layers"


class Composed(AbstractCommunicator):
    """These collectives, from the parts of which `Communicator` makes its others."""

    asker: str = ""  # see `asked_by`

    @contextmanager
    def asked_by(self, asker: str) -> Iterator[None]:
        """Name the op or reducer that makes the collectives inside the block; the innermost name counts.

        The name is compared as everything else about a call: ranks whose calls look alike, but are made for
        different purposes, all raise CollectiveMismatchError, which shows the first 64 bytes of each name.
        Calls with different names are planned separately, so a name must not change from step to step.

        Args:
            asker: the same on every rank of the group, for the same purpose; "" for none.
        """
        before, self.asker = self.asker, asker
        try:
            yield
        finally:
            self.asker = before

    def _group(self, op: str, group: Any, algorithm: str | None = "direct") -> Any:
        raise NotImplementedError

    def all_reduce_list(
        self, x: np.ndarray, shapes: Sequence[tuple[int, ...]], op: str = "sum", group: Any = None,
        async_op: bool = False, algorithm: str | None = None,
    ) -> Any:  # fmt: skip
        name = "adasum" if op == "adasum" else "all_reduce"
        group = self._group(name, group, algorithm)
        check_array(name, x, written=True)
        out = None
        if op in LOGICAL:
            x, out = truth(op, x, name), x
        key = name, op, x.dtype, tuple(shapes), self.asker
        plan = group.plans.get(key)
        if plan is None:
            op = LAYERS if op == "adasum" else op
            plan = self._add_reduction(group, key, x, op, tuple(map(math.prod, shapes)), shapes)
        return group.run(plan, x, async_op) if out is None else instead(group, plan, x, async_op, out)

    def _add_reduction(
        self, group: Any, key: tuple[Any, ...], x: np.ndarray, op: str, sizes: tuple[int, ...],
        listed: Sequence[tuple[int, ...]] = (),
    ) -> Any:  # fmt: skip
        """Plan what replaces x by a reduction.

        Args:
            group: of ranks.
            key: the plan's.
            x: arrays look like this.
            op: of the reduction.
            sizes: what the headers compare: the shape of x, or the sizes of what lies in it.
            listed: shapes of what lies in it.
        """
        if op in ("adasum", LAYERS):
            check_dtype("x", x.dtype)
            body = group.adasum(x, sizes if op == LAYERS else (x.size,))
        else:
            body = group.all_reduce(x, op)
        header = h.encode("all_reduce", op, dtype=x.dtype, shape=sizes, listed=listed)
        return group.add_plan(key, header, body, x, x.nbytes)

    def all_gather_object(self, value: Any, group: Any = None) -> list[Any]:
        sizes, padded = self._padded("all_gather_object", value, None, group)
        rows = self._carry("all_gather", "all_gather_object", padded, None, group).reshape(len(sizes), -1)
        return [self.unpack(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_object(self, value: Any = None, src: int = 0, group: Any = None) -> Any:
        data = self.pack(value) if self.rank == src else np.empty(0, np.uint8)
        size = self._carry("broadcast", "broadcast_object", np.array([data.size]), src, group)
        data = data if self.rank == src else np.empty(int(size[0]), np.uint8)
        self._carry("broadcast", "broadcast_object", data, src, group)
        return value if self.rank == src else self.unpack(data)

    def gather_object(self, value: Any, dst: int = 0, group: Any = None) -> list[Any] | None:
        sizes, padded = self._padded("gather_object", value, dst, group)
        rows = self._carry("gather", "gather_object", padded, dst, group)
        if rows is None:
            return None
        return [self.unpack(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def _padded(self, name: str, value: Any, root: int | None, group: Any) -> tuple[np.ndarray, np.ndarray]:
        """The sizes of all ranks' objects, and the bytes of this one, as many as the largest has."""
        data = self.pack(value)
        sizes = self._carry("all_gather", name, np.array([data.size]), root, group)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: data.size] = data
        return sizes, padded

    def _carry(self, op: str, name: str, x: np.ndarray, root: int | None, group: Any) -> Any:
        """One collective `op` of arrays that carries objects, for one that is called `name`."""
        self._group(name, group)
        group = self._group(op, group, None)
        position = 0 if root is None else position_of(name, group, root)
        key = op, name, position, x.dtype, x.shape, self.asker
        plan = group.plans.get(key)
        if plan is None:
            header = h.encode(name, root=root or 0, dtype=x.dtype, shape=x.shape)
            body, count, exposes = group.all_gather(0), group.size, True
            if op == "gather":
                body = group.gather(x, position)
            elif op == "broadcast":
                body, count, exposes = group.broadcast(position), 1, position == group.rank
            plan = group.add_plan(key, header, body, x, x.nbytes * count, position, exposes=exposes)
        return group.run(plan, x)


def instead(group: Any, plan: CallPlan, x: np.ndarray, async_op: bool, out: np.ndarray) -> Any:
    """Run what works in place, with another place for its result."""
    check_out(plan.op, out, x.shape, x.dtype)
    if is_same_place(x, out):
        return group.run(plan, out, async_op)
    # An all_reduce in place shows others its results in x.
    is_apart = plan.op != "reduce" or np.may_share_memory(x, out)
    return group.run(plan, x, async_op, out, is_apart=is_apart)
