"""`Work`, the handle of a communication, and `Lane`, the order in which they run.

A communication is written as a generator: it yields the `Condition` it has to wait for and
returns its result. Nobody runs in the background. A work advances when its rank touches its
lane: at the call, at `wait()`, when it is asked whether it is done, and whenever another
communication of the rank waits or starts. Works of one lane (one group, or one direction to
one peer) run strictly one after the other, because the headers of a group are double-buffered
and not more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.errors import CommError

Steps = Generator[Condition, None, Any]
LONGEST_LOOK_S = 1.0  # between two questions whether a work is done; what is longer was something else


class Work:
    """A communication that was started with `async_op=True`.

    Nothing that it holds leads back to it once it is finished: its arrays are free when its last user forgets it,
    and not when the collector of cycles comes by.

    Attributes:
        result: what the blocking call would have returned, once it is finished.
    """

    def __init__(self, lane: Lane, steps: Steps | None) -> None:
        self._lane = lane
        self._steps = steps
        self.finished = False
        self.result: Any = None
        self.sim_end_ps = 0

    def wait(self) -> Any:
        """Finish the communication and return its result. May be called again.

        Collective: yes, as the call that made it.

        Raises:
            What the blocking call raises.
        """
        if not self.finished:
            self._lane.finish(self)
        if self._lane.join is not None:
            self._lane.join(self.sim_end_ps)
        return self.result

    def is_completed(self) -> bool:
        """Advance as far as possible without waiting; True when the result is there.

        Raises:
            What `wait` raises, a DeadlineError after `timeout_s` of asking in vain. Ranks that ask are not known
            to wait for each other: they may go on with something else.
        """
        if not self.finished:
            self._lane.look(self)
        return self.finished

    def steps(self) -> Generator[Condition, None, None]:
        """What is left of it, as a part of another communication's steps."""
        while not self.finished:
            condition = self._lane.advance()
            if condition is not None and not self.finished:
                yield condition

    def then(self, change: Callable[[Any], Any]) -> Work:
        """This work with another result: `wait()` gives `change(result)`.

        `change` runs in the first `wait()` and never earlier: what it communicates comes at a place
        of the program, which is the same on every rank, and not whenever peers happen to be done.
        """
        return _Changed(self, change)

    def needs(self, condition: Condition) -> Condition:
        """What it waits for while its lane waits for `condition`."""
        return condition

    def source_rank(self) -> int:
        """The rank that sent the message which this receives; waits for it.

        Raises:
            CommError: it receives no message.
        """
        raise CommError(f"source_rank: {self.describe()} receives no message.")

    def describe(self) -> str:
        """What it is, and the user's line that began it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"Work({self.describe()}, {'finished' if self.finished else 'running'})"


class _Changed(Work):
    """A communication whose result is changed before it is handed out."""

    def __init__(self, work: Work, change: Callable[[Any], Any]) -> None:
        super().__init__(work._lane, None)
        self._work, self._change = work, change

    def wait(self) -> Any:
        if not self.finished:
            self.result = self._change(self._work.wait())
            self.finished = True
        return self.result

    def is_completed(self) -> bool:
        return self.finished or self._work.is_completed()

    def source_rank(self) -> int:
        self.wait()
        return self._work.source_rank()

    def describe(self) -> str:
        return self._work.describe()

    def steps(self) -> Generator[Condition, None, None]:
        yield from self._work.steps()
        self.wait()


class Lane:
    """Works in their order; the first one is the one that runs.

    Args:
        transport: to wait with.
        others: the lanes of this rank that have something to do, in the order they began; they
            are advanced while one of them waits.
        join: told the simulated end of a work that is waited for.
    """

    def __init__(
        self, transport: AbstractTransport, others: dict[Lane, None], join: Callable[[int], None] | None
    ) -> None:
        self.transport = transport
        self.join = join
        self._others = others
        self._queue: deque[Work] = deque()
        self._waiting_for: Condition | None = None
        self._error: BaseException | None = None
        self._looked_for: Condition | None = None  # in vain; when that was last, and for how long
        self._looked_at = self._looked_s = 0.0
        self._thread = 0  # that of the rank, once it has begun something

    def submit(self, work: Work) -> Work:
        """Put a communication at the end, and advance."""
        self._thread = threading.get_ident()
        self._queue.append(work)
        self._others[self] = None
        self.advance()
        return work

    def advance(self) -> Condition | None:
        """Run until something is missing; return that, or None if nothing is left to do.

        After an error the lane is in an unknown state and repeats the error.
        """
        self.check()
        try:
            while self._queue:
                if self._waiting_for is not None:
                    if not self.transport.met(self._waiting_for):
                        return self._waiting_for
                    self._waiting_for = None
                work = self._queue[0]
                try:
                    self._waiting_for = next(work._steps)  # type: ignore[arg-type]
                except StopIteration as end:
                    work.result, work.finished, work._steps = end.value, True, None
                    self._queue.popleft()
        except BaseException as error:
            self.fail(error)
            raise
        self._others.pop(self, None)
        return None

    def check(self) -> None:
        """Raise the error that broke the lane, if there was one."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """From now on, repeat this error, at the latest at the end of the run."""
        self._error = error
        self._others[self] = None

    def finish(self, work: Work | None = None) -> None:
        """Advance this lane, and meanwhile all others, until `work` is finished (None: everything)."""
        while conditions := self._missing(work):
            self.transport.wait(conditions, (work or self._queue[-1]).describe)

    def look(self, work: Work) -> None:
        """The same once, without waiting; other ranks get their chance, and what waiting would raise is raised."""
        conditions = self._missing(work)
        if conditions:
            now = time.monotonic()
            if conditions[0] == self._looked_for:
                self._looked_s += min(now - self._looked_at, LONGEST_LOOK_S)
            else:
                self._looked_for, self._looked_s = conditions[0], 0.0
            self._looked_at = now
            self.transport.looked(conditions[0], work.describe, self._looked_s)
            self.advance()

    def _missing(self, work: Work | None) -> list[Condition]:
        """Advance all lanes as far as they go: what they wait for, this one first; empty if `work` is finished.

        Raises:
            CommError: another thread than that of the rank waits for `work`, which the rank may be advancing.
        """
        if work is not None and threading.get_ident() != self._thread:
            raise CommError(
                f"rank {self.transport.rank}: thread {threading.current_thread().name!r} waits for {work.describe()}, "
                "which belongs to the thread that runs the rank's function. Wait for it there, and hand on the result."
            )
        while True:
            condition = self.advance()
            if condition is None or (work is not None and work.finished):
                return []
            condition = (work or self._queue[-1]).needs(condition)
            conditions = [condition]
            if len(self._others) > 1:
                for lane in tuple(self._others):
                    if lane is not self:
                        other = lane.advance()
                        if other is not None:
                            conditions.append(other)
                if work is not None and work.finished:  # it may come by several lanes
                    return []
                if self.transport.met(condition):
                    continue
            return conditions
