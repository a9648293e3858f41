"""Collectives that run as messages: a group as `Communicator` sees it, with another algorithm.

The life of a collective is that of `Group`: publish the header, arrive, wait for all, compare.
Only then the algorithm runs; so a wrong call is found before any message of it is sent. Messages
of algorithms go through the same mailboxes as the user's, under tags that no user can name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.cluster import Traffic
from simparallel.comm import header as h
from simparallel.comm.algorithms import ALGORITHMS, PointToPoint, Steps, check_algorithm, find, offers
from simparallel.comm.call import Body, Call
from simparallel.comm.group import Group
from simparallel.comm.ledger import Entry, open_ledgers
from simparallel.comm.reduction import Combine
from simparallel.comm.work import Work
from simparallel.events import Recorder

if TYPE_CHECKING:
    from simparallel.comm.communicator import Communicator

# A tag is this + the group's number * SEQ_SPAN + the number of the collective in its group.
FIRST_TAG, SEQ_SPAN = 2**62, 2**40


class Letters(PointToPoint):
    """Sends and receives of one collective, through the mailboxes of this rank."""

    def __init__(self, communicator: Communicator, call: Call) -> None:
        group = call.group
        super().__init__(group.rank or 0, group.size)
        self._communicator = communicator
        self._ranks = group.ranks
        self._site = call._site
        self._tag = FIRST_TAG + group._slot * SEQ_SPAN + call.seq % SEQ_SPAN

    def start_send(self, x: np.ndarray, dst: int) -> Work:
        return self._communicator.outbox(self._ranks[dst]).send(x, self._tag, self._site)

    def start_recv(self, x: np.ndarray, src: int) -> Work:
        return self._communicator.inbox(self._ranks[src]).receive(x, self._tag, self._site)

    def until(self, begun: Work) -> Steps:
        return begun.steps()


class MessageCall(Call):
    """A collective whose payload travels in messages, and that knows what it sent."""

    sent_bytes = 0

    @property
    def algorithm(self) -> str:
        return ALGORITHMS[self.plan.header[h.ALGORITHM]]

    def _expose(self) -> tuple[int, int]:
        """Peers read nothing; the size is for the network model."""
        return 0, 0 if self._payload is None else self._payload.nbytes

    def _price(self, recorder: Recorder) -> tuple[int, Traffic]:
        """Time by the formula of the algorithm; bytes by the ledger, also where chunks are uneven."""
        plan, group = self.plan, self.group
        size_bytes = plan.vector_bytes
        if size_bytes < 0:
            size_bytes = self.words_of(plan.root)[h.NBYTES]
        cost = recorder.cluster.collective(plan.op, size_bytes, group.ranks, algorithm=self.algorithm)
        return size_bytes, Traffic(cost.time_ps, self.sent_bytes)


class ByMessages:
    """One collective of a group by a named algorithm. What `Communicator` uses of `Group` is here too."""

    def __init__(self, communicator: Communicator, group: Group, algorithm: str) -> None:
        self.rank, self.ranks, self.size, self.name = group.rank, group.ranks, group.size, group.name
        self._communicator = communicator
        self._group = group
        self._algorithm = algorithm
        self._ledgers = open_ledgers()

    def submit(
        self, op: str, key: tuple[Any, ...], make_header: Callable[[], array[int]],
        payload: np.ndarray | None, body: Callable[[Call], Body], traffic: tuple[int, int],
    ) -> Work:  # fmt: skip
        def header() -> array[int]:
            words = make_header()
            words[h.ALGORITHM] = ALGORITHMS.index(self._algorithm)
            return words

        key = (*key, self._algorithm)
        return self._group.submit(op, key, header, payload, body, traffic, MessageCall)

    # --- bodies: flat private copies in, so that a failure in the middle leaves the user's array alone ---

    def all_reduce(self, call: Call, x: np.ndarray, op: str) -> Body:
        flat = _flat(x)
        yield from self._run(call, flat, Combine(op, x.dtype, self.size))
        x[...] = flat.reshape(x.shape)
        return x

    def broadcast(self, call: Call, x: np.ndarray, root: int) -> Body:
        flat = _flat(x)
        yield from self._run(call, flat, root)
        if self.rank != root:
            x[...] = flat.reshape(x.shape)
        return x

    def reduce(self, call: Call, x: np.ndarray, op: str, root: int) -> Body:
        flat = _flat(x)
        yield from self._run(call, flat, root, Combine(op, x.dtype, self.size))
        if self.rank == root:
            x[...] = flat.reshape(x.shape)
        return x

    def all_gather(self, call: Call, x: np.ndarray, dim: int) -> Body:
        parts = np.empty((self.size, *x.shape), x.dtype)
        parts[self.rank] = x
        yield from self._run(call, parts.reshape(-1))
        return np.concatenate(parts, axis=dim)

    def reduce_scatter(self, call: Call, x: np.ndarray, dim: int, op: str) -> Body:
        parts = np.array(np.split(x, self.size, dim), x.dtype)  # `stack` would change the byte order
        yield from self._run(call, parts.reshape(-1), Combine(op, x.dtype, self.size))
        return parts[self.rank].copy()

    def all_to_all(self, call: Call, x: np.ndarray, split_dim: int, concat_dim: int) -> Body:
        given = np.split(x, self.size, split_dim)
        taken = [np.empty_like(part, order="C") for part in given]
        yield from self._run(call, given, taken)
        return np.concatenate(taken, axis=concat_dim)

    def gather(self, call: Call, x: np.ndarray, root: int) -> Body:
        parts = [np.array(x, order="C") for _ in range(self.size if self.rank == root else 1)]
        yield from self._run(call, parts if self.rank == root else parts * self.size, root)
        return parts if self.rank == root else None

    def scatter(self, call: Call, root: int) -> Body:
        shape, dtype = h.decode_given(call.words_of(root))
        given = call._payload
        rows = range(self.size)
        parts = [np.empty(shape, dtype) if given is None else given[i, ...] for i in rows]
        yield from self._run(call, parts, root)
        return np.array(parts[self.rank or 0])

    def _run(self, call: Call, *arguments: Any) -> Body:
        assert isinstance(call, MessageCall)
        letters = Letters(self._communicator, call)
        yield from find(self._algorithm, call.plan.op)(letters, *arguments)
        group = self._group
        entry = Entry(
            group.ranks[letters.rank],
            group.name,
            call.seq,
            call.plan.op,
            self._algorithm,
            tuple(letters.traffic),
        )
        call.sent_bytes = entry.total.sent_bytes
        for ledger in self._ledgers:
            ledger.entries.append(entry)


def choose(communicator: Communicator, group: Group, op: str, algorithm: str | None) -> Group | ByMessages:
    """What runs `op`: by this algorithm; if None by the communicator's own where it has `op`, else `direct`.

    Raises:
        InputError: no such algorithm, or it has not this collective.
    """
    check_algorithm(op, algorithm or communicator.default_algorithm, op if algorithm else None)
    algorithm = algorithm or communicator.default_algorithm
    return ByMessages(communicator, group, algorithm) if offers(algorithm, op) else group


def _flat(x: np.ndarray) -> np.ndarray:
    return np.array(x, order="C").reshape(-1)
