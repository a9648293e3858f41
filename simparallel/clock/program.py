"""Programs: all that one rank computes and communicates, in the order in which the rank issues it.

A program is a list of actions. Each belongs to a stream of a device, as in `clock.recorder`: "compute", one for each
group, one for each direction of messages between two ranks, which queue there. One rule gives the time of every action:

    It starts as soon as its stream has finished the action before it, all actions that it comes after have ended,
    and, in a collective, every other member is as far.

So an asynchronous call comes after the work before it, and nothing comes after the call until the program waits for it.
Two kinds of action need a word more. A message begins when its sender is ready, whether or not the receive has been
issued; a receive ends when the message has arrived, but not before it was issued, and does not wait for its stream.
A wait is an action of the compute stream that takes no time.

Programs are data: they have durations and no times. `solver.solve` finds the times.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import NamedTuple

from simparallel.clock.event import COMPUTE

COLLECTIVE, SEND, RECEIVE = "collective", "send", "receive"
# The stream of the interpreter, where it does not start each operation when the one before it has ended.
LAUNCHER = "launcher"


class Communication(NamedTuple):
    """The part of an action that concerns other ranks.

    Attributes:
        kind: COLLECTIVE, SEND or RECEIVE.
        group: key of the group, or of the channel from one rank to another.
        seq: key of the collective or message in it, the same for all ranks that take part.
        size_bytes: size of the vector or the message.
        latency_ps: the part of the duration in which no bytes move [ps].
    """

    kind: str
    group: Hashable
    seq: Hashable
    size_bytes: int = 0
    latency_ps: int = 0


class ProgramAction(NamedTuple):
    """One action of a program.

    Attributes:
        stream: name of the stream; actions of a device's stream run one after the other. None for no stream.
        duration_ps: time that it takes [ps].
        after: numbers of earlier actions of the program that end before it starts.
        call: the part that concerns other ranks; None for work of this rank alone.
        device: number of the device in the rank.
    """

    stream: Hashable
    duration_ps: int
    after: tuple[int, ...] = ()
    call: Communication | None = None
    device: int = 0


class RankProgram:
    """The actions of one rank; methods that append one return its number.

    Attributes:
        actions: the actions so far.
        lock: held while an action is appended; several threads may drive the devices of a rank.
    """

    def __init__(self) -> None:
        self.actions: list[ProgramAction] = []
        self.lock = threading.RLock()
        # (stream, device) -> its last action.
        self._last: dict[tuple[Hashable, int], int] = {}

    def add(
        self,
        stream: Hashable,
        duration_ps: int,
        after: tuple[int, ...] = (),
        call: Communication | None = None,
        device: int = 0,
    ) -> int:
        """Append an action; the arguments are the attributes of `ProgramAction`."""
        with self.lock:
            number = len(self.actions)
            self.actions.append(ProgramAction(stream, duration_ps, after, call, device))
            self._last[stream, device] = number
            return number

    def last(self, stream: Hashable = COMPUTE, device: int = 0) -> int:
        """Return the last action of a stream; on an unused stream, an action that takes no time is added."""
        number = self._last.get((stream, device))
        return self.add(stream, 0, device=device) if number is None else number

    def wait(self, *actions: int, device: int = 0) -> int:
        """Let a device wait for earlier actions."""
        return self.add(COMPUTE, 0, actions, device=device)
