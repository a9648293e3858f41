"""The interface of algorithms on messages: send, receive, both at once, and a ledger of the traffic.

An algorithm is a generator, so it can pause where a message is missing while its rank does something else
(`async_op=True`). Each call is therefore made with `yield from`:

    for step in p2p.steps(p2p.size - 1):
        yield from p2p.sendrecv(x, right, received, left)

The yielded objects concern the transport only; an algorithm never looks at them. A transport implements three
methods: `start_send`, `start_recv` and `until`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from simparallel.algorithms.ledger import StepTraffic

Steps = Generator[Any, None, None]


class PointToPoint:
    """One rank's access to a group, for one collective.

    Attributes:
        rank: this rank's position in the group.
        size: number of members.
        traffic: messages and bytes so far, one entry for each step.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic: list[StepTraffic] = []

    # --- for algorithms -----------------------------------------------------------------------------

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over 0 … count - 1; each is a new line of the ledger. Every rank takes all steps, idle ones too."""
        for step in range(count):
            self.traffic.append(StepTraffic())
            yield step

    def send(self, x: np.ndarray, dst: int) -> Steps:
        """Send x to position `dst`; x may be changed afterwards."""
        sending = self._begin_send(x, dst)
        yield from self.until(sending)

    def recv(self, x: np.ndarray, src: int) -> Steps:
        """Fill x with the next message from position `src`, which must have its shape and dtype."""
        receiving = self._begin_recv(x, src)
        yield from self.until(receiving)

    def sendrecv(self, x: np.ndarray, dst: int, received: np.ndarray, src: int) -> Steps:
        """Send and receive at once: two ranks that exchange data never wait for each other."""
        sending, receiving = self._begin_send(x, dst), self._begin_recv(received, src)
        yield from self.until(sending)
        yield from self.until(receiving)

    def _begin_send(self, x: np.ndarray, dst: int) -> Any:
        self.traffic[-1] += (1, x.nbytes, 0, 0)
        return self.start_send(x, dst)

    def _begin_recv(self, x: np.ndarray, src: int) -> Any:
        self.traffic[-1] += (0, 0, 1, x.nbytes)
        return self.start_recv(x, src)

    # --- for transports -----------------------------------------------------------------------------

    def start_send(self, x: np.ndarray, dst: int) -> Any:
        """Start a send; return a handle to wait for."""
        raise NotImplementedError

    def start_recv(self, x: np.ndarray, src: int) -> Any:
        """Start a receive; return a handle to wait for."""
        raise NotImplementedError

    def until(self, begun: Any) -> Steps:
        """Yield until a begun send or receive is finished."""
        raise NotImplementedError


def split(x: np.ndarray, count: int) -> list[np.ndarray]:
    """Return `count` views of a flat array, as even as possible: sizes differ by one element at most."""
    return [x[x.size * i // count : x.size * (i + 1) // count] for i in range(count)]
