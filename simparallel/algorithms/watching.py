"""Watch an algorithm without a run: its messages, and which ranks' values each rank holds after each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from simparallel.algorithms.reduction import Combine
from simparallel.algorithms.rehearsal import Actor, play
from simparallel.base.checks import check_choice, check_integer

# Collectives whose first argument is one flat vector for the input and the result. True: it reduces.
_WATCHED = {"all_reduce": True, "reduce_scatter": True, "reduce": True, "all_gather": False, "broadcast": False}
# An int64 has a bit for each rank.
_MOST_RANKS = 62


class ChunkMessage(NamedTuple):
    """A message of a watched collective.

    Attributes:
        step: number of the step in which it is sent, from 0.
        src, dst: positions in the group.
        start, stop: the chunks of the vector that it carries, `stop` excluded.
    """

    step: int
    src: int
    dst: int
    start: int
    stop: int


@dataclass(frozen=True)
class Watched:
    """The messages and states of one collective, on a vector of one chunk for each rank.

    Attributes:
        algorithm, op: such as "ring" and "all_reduce".
        num_ranks: size of the group, and number of chunks.
        messages: all messages, by step, sender and chunk.
        states: `states[k][rank, chunk]` after k steps is the sum of 2^i over the ranks i whose values that chunk
            contains; `states[0]` is the input.
    """

    algorithm: str
    op: str
    num_ranks: int
    messages: tuple[ChunkMessage, ...]
    states: tuple[np.ndarray, ...]

    @property
    def num_steps(self) -> int:
        return len(self.states) - 1

    @property
    def share(self) -> float:
        """The largest message of each step, summed over the steps, as a share of the vector: the bandwidth term's n."""
        return sum(self.step_shares)

    @property
    def step_shares(self) -> tuple[float, ...]:
        """The largest message of each step, as a share of the vector."""
        chunks = [
            max((m.stop - m.start for m in self.messages if m.step == k), default=0) for k in range(self.num_steps)
        ]
        return tuple(count / self.num_ranks for count in chunks)

    def counts(self, step: int) -> np.ndarray:
        """Return the number of ranks whose values each chunk contains after `step` steps: (rank, chunk)."""
        return np.bitwise_count(self.states[step]).astype(int)


class _Watcher(Actor):
    """A position that records its messages, and its vector after each step."""

    def __init__(self, rank: int, size: int, matcher: Any, x: np.ndarray) -> None:
        super().__init__(rank, size, matcher)
        self.messages: list[ChunkMessage] = []
        self.states = [x.copy()]
        self._x = x

    def steps(self, count: int) -> Iterator[int]:
        for step in super().steps(count):
            yield step
            self.states.append(self._x.copy())

    def start_send(self, x: np.ndarray, dst: int) -> Any:
        # Every message is a view of the vector, so its address tells the number of its first chunk.
        start = (x.ctypes.data - self._x.ctypes.data) // x.itemsize
        self.messages.append(ChunkMessage(len(self.traffic) - 1, self.rank, dst, start, start + x.size))
        return super().start_send(x, dst)


def watch(algorithm: str, op: str = "all_reduce", num_ranks: int = 4, root: int = 0) -> Watched:
    """Run one collective in this thread, and record each message and each rank's vector after each step.

    Args:
        algorithm: such as "ring", "tree", "halving_doubling", "naive".
        op: "all_reduce", "reduce_scatter", "reduce", "all_gather" or "broadcast".
        num_ranks: size of the group.
        root: position of the root, for collectives that have one.

    Raises:
        InputError: no such algorithm or collective, or a number out of range.

    Example:
        >>> from simparallel.algorithms.watching import watch
        >>> watch("ring", num_ranks=4).counts(3).tolist()
        [[4, 3, 2, 1], [1, 4, 3, 2], [2, 1, 4, 3], [3, 2, 1, 4]]
    """
    check_choice("watch", "op", op, _WATCHED)
    check_integer("watch", "num_ranks", num_ranks, 1, high=_MOST_RANKS)
    check_integer("watch", "root", root, high=num_ranks - 1)
    combine = Combine("sum", np.dtype(np.int64), num_ranks)
    vectors = [np.zeros(num_ranks, np.int64) for _ in range(num_ranks)]
    for rank, x in enumerate(vectors):
        own = slice(rank, rank + 1) if op == "all_gather" else slice(None)
        if op != "broadcast" or rank == root:
            x[own] = 1 << rank
    rooted = {"broadcast": (root,), "reduce": (root, combine)}
    rest: tuple[Any, ...] = rooted.get(op, (combine,) if _WATCHED[op] else ())
    watchers: list[_Watcher] = []

    def make_actor(rank: int, size: int, matcher: Any) -> _Watcher:
        watchers.append(_Watcher(rank, size, matcher, vectors[rank]))
        return watchers[-1]

    play(algorithm, op, [(x, *rest) for x in vectors], make_actor)
    for watcher, x in zip(watchers, vectors, strict=True):
        # Some algorithms write their result after the last step.
        watcher.states[-1] = x.copy()
    messages = sorted(message for watcher in watchers for message in watcher.messages)
    states = tuple(np.stack(rows) for rows in zip(*(watcher.states for watcher in watchers), strict=True))
    return Watched(algorithm, op, num_ranks, tuple(messages), states)
