"""Algorithms without a run: all positions of a group in one thread, to count or to watch their messages.

A rehearsal is stricter than a run: a message is delivered only when the other side receives it, so an algorithm that
needs buffers for messages in flight deadlocks here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from simparallel.algorithms.algorithm import check_algorithm, find
from simparallel.algorithms.ledger import Entry, Ledger
from simparallel.algorithms.point_to_point import PointToPoint, Steps
from simparallel.algorithms.reduction import Combine
from simparallel.base.checks import check_integer
from simparallel.errors import DeadlockError, InputError


class _Request:
    """One side of a message: a send or a receive."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x
        self.finished = False


class _Matcher:
    """Match sends with receives. `progress` counts requests, so that a deadlock is noticed."""

    def __init__(self) -> None:
        self.progress = 0
        # (source, destination) -> sends and receives that have no counterpart yet.
        self._unmatched: dict[tuple[int, int], tuple[deque[_Request], deque[_Request]]] = {}

    def begin(self, src: int, dst: int, x: np.ndarray, *, is_receive: bool) -> _Request:
        self.progress += 1
        request, sides = _Request(x), self._unmatched.setdefault((src, dst), (deque(), deque()))
        sides[is_receive].append(request)
        # Both sides must be there: nothing is buffered, so an algorithm that relies on buffers deadlocks.
        while sides[0] and sides[1]:
            sending, receiving = sides[0].popleft(), sides[1].popleft()
            if (sending.x.shape, sending.x.dtype) != (receiving.x.shape, receiving.x.dtype):
                raise InputError(
                    f"positions {src} -> {dst}: {sending.x.dtype} {sending.x.shape} was sent, but "
                    f"{receiving.x.dtype} {receiving.x.shape} is expected."
                )
            receiving.x[...] = sending.x
            sending.finished = receiving.finished = True
        return request


class Actor(PointToPoint):
    """One position of the group."""

    def __init__(self, rank: int, size: int, matcher: _Matcher) -> None:
        super().__init__(rank, size)
        self._matcher = matcher

    def start_send(self, x: np.ndarray, dst: int) -> _Request:
        return self._matcher.begin(self.rank, dst, x, is_receive=False)

    def start_recv(self, x: np.ndarray, src: int) -> _Request:
        return self._matcher.begin(src, self.rank, x, is_receive=True)

    def until(self, begun: _Request) -> Steps:
        while not begun.finished:
            yield


# Makes the actor of a position: (position, size of the group, matcher) -> actor.
MakeActor = Callable[[int, int, _Matcher], Actor]


def play(algorithm: str, op: str, arguments: list[tuple[Any, ...]], make_actor: MakeActor = Actor) -> Ledger:
    """Run one collective on arrays; `arguments[i]` belong to position i, and are written.

    Raises:
        InputError: no such algorithm; or the two sides of a message disagree on its shape or dtype.
        DeadlockError: all positions wait for each other.
    """
    check_algorithm("play", algorithm, op)
    size, matcher = len(arguments), _Matcher()
    actors = [make_actor(rank, size, matcher) for rank in range(size)]
    running = {i: find(algorithm, op)(actor, *arguments[i]) for i, actor in enumerate(actors)}
    while running:
        before = matcher.progress, len(running)
        # Advance each position in turn, so that all proceed at the same pace.
        for rank, generator in tuple(running.items()):
            if next(generator, StopIteration) is StopIteration:
                del running[rank]
        # A whole round in which no message was delivered and no position ended: none ever will.
        if before == (matcher.progress, len(running)):
            waiting = dict.fromkeys(running, f"{op} by {algorithm}")
            raise DeadlockError(
                f"{op} by {algorithm} deadlocks: positions {sorted(running)} of {size} wait for each other; where two "
                "positions exchange data, use sendrecv.",
                waiting=waiting,
            )
    return Ledger(Entry(actor.rank, "rehearsal", 1, op, algorithm, tuple(actor.traffic)) for actor in actors)


def rehearse(
    algorithm: str,
    op: str,
    num_ranks: int,
    num_elements: int,
    dtype: Any = np.float32,
    root: int = 0,
    make_actor: MakeActor = Actor,
) -> Ledger:
    """Return the ledger of one collective on a vector of zeros: the messages of each rank in each step.

    Args:
        algorithm, op: such as "ring" and "all_reduce".
        num_ranks: size of the group.
        num_elements: size of the whole vector: the argument of all_reduce, adasum (here one layer), broadcast, reduce,
            reduce_scatter and all_to_all, the result of all_gather and gather, the whole list of scatter.
        dtype: dtype of the elements.
        root: position of the root, for collectives that have one.
        make_actor: makes the actor of each position, for callers that watch its messages.

    Raises:
        InputError: no such algorithm; or the ranks do not divide a vector that has to be cut evenly.

    Example:
        >>> from simparallel.algorithms.rehearsal import rehearse
        >>> rehearse("tree", "broadcast", 4, 100).total.sent_messages
        3
    """
    check_algorithm("rehearse", algorithm, op)
    check_integer("rehearse", "num_ranks", num_ranks, 1)
    check_integer("rehearse", "root", root, high=num_ranks - 1)
    if op not in ("all_reduce", "adasum", "broadcast", "reduce") and num_elements % num_ranks:
        raise InputError(f"rehearse: {op} cuts {num_elements} elements, which is not divisible by {num_ranks} ranks.")
    combine = Combine("sum", np.dtype(dtype), num_ranks)

    def arguments() -> tuple[Any, ...]:
        x = np.zeros(num_elements, dtype)
        parts = list(x.reshape(num_ranks, -1)) if num_elements % num_ranks == 0 else []
        return {
            "all_reduce": (x, combine), "adasum": (x, (num_elements,)), "reduce_scatter": (x, combine),
            "all_gather": (x,), "broadcast": (x, root),
            "reduce": (x, root, combine), "gather": (parts, root), "scatter": (parts, root),
            "all_to_all": (parts, [part.copy() for part in parts]),
        }[op]  # fmt: skip

    return play(algorithm, op, [arguments() for _ in range(num_ranks)], make_actor)
