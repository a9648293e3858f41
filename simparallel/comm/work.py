"""`Work`, the handle of a communication, and `Lane`, the order in which communications run.

A communication is a generator: it yields the `Condition` it has to wait for, and returns its result. No thread runs
in the background. A work advances when its rank touches its lane: at the call, at `wait()`, when the rank asks
whether it is done, and whenever another communication of the rank waits or starts. The works of one lane (one group,
or one direction to one peer) run strictly one after the other, because a group has two sets of headers and no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import cache
from typing import Any

from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.errors import CommError

Steps = Generator[Condition, None, Any]
# The longest time between two polls that counts as polling; in a longer one the rank did something else.
LONGEST_LOOK_S = 1.0


class Work:
    """A communication that was started with `async_op=True`.

    Once finished, it is part of no reference cycle: its arrays are freed with the last reference to it, without the
    garbage collector.

    Made by the collective.

    Attributes:
        result: the result of the blocking call, once it is finished.
    """

    def __init__(self, lane: Lane, steps: Steps | None) -> None:
        self._lane = lane
        self._steps = steps
        self.finished = False
        self.result: Any = None
        self.sim_end_ps = self.sim_busy_ps = 0

    def wait(self) -> Any:
        """Finish the communication and return its result. May be called again.

        Collective: yes, as the call that made it.

        Raises:
            The errors of the blocking call.
        """
        if not self.finished:
            self._lane.finish(self)
        # The device waits in simulated time where the program waits, not where the work happened to advance.
        if self._lane.join is not None:
            self._lane.join(self.sim_end_ps, self.sim_busy_ps)
            # Once, also if the program waits again.
            self.sim_busy_ps = 0
        return self.result

    def is_completed(self) -> bool:
        """Advance as far as possible without waiting; return whether the result is available.

        Raises:
            The errors of `wait`; DeadlineError after `timeout_s` of asking in vain. A deadlock is not detected for
            ranks that only ask, because they may do something else instead.
        """
        if not self.finished:
            self._lane.look(self)
        return self.finished

    def steps(self) -> Generator[Condition, None, None]:
        """Yield the conditions that are left, as a part of another communication."""
        # The lane may have gone on to works behind this one: then the condition is theirs.
        while not self.finished:
            condition = self._lane.advance()
            if condition is not None and not self.finished:
                yield condition

    def then(self, change: Callable[[Any], Any]) -> Work:
        """Return a work whose `wait()` returns `change(result)`.

        `change` runs in the first `wait()` and never earlier: communication in it then happens at the same place of
        the program on every rank, and not whenever peers are done.
        """
        return _Changed(self, change)

    def get_future(self) -> Future:
        """Return the work as PyTorch's future."""
        return Future(lambda: [self.wait()])

    def needs(self, condition: Condition) -> Condition:
        """Return the condition of this work while its lane waits for `condition`."""
        return condition

    def source_rank(self) -> int:
        """Return the sender of the received message; waits for it.

        Raises:
            CommError: this is no receive.
        """
        raise CommError(f"source_rank: {self.describe()} receives no message.")

    def describe(self) -> str:
        """Describe the communication and its call site."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"Work({self.describe()}, {'finished' if self.finished else 'running'})"


class Future:
    """A result to come; `get_future()` of a work makes it.

    Args:
        find: waits for the value.
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        self.wait = self.value = cache(find)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future with the value `callback(self)`, which runs in its `wait()`."""
        return Future(lambda: callback(self))


class _Changed(Work):
    """A communication whose result is changed before it is returned."""

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
    """A queue of works; the first one is running.

    Args:
        transport: used to wait.
        others: the lanes of this rank that have work, in the order they began; while one of them waits, the others
            are advanced.
        join: called with the simulated end of a work that is waited for, and the time that it keeps a core busy.
    """

    def __init__(
        self, transport: AbstractTransport, others: dict[Lane, None], join: Callable[[int, int], None] | None
    ) -> None:
        self.transport = transport
        self.join = join
        self._others = others
        self._queue: deque[Work] = deque()
        self._waiting_for: Condition | None = None
        self._error: BaseException | None = None
        # The condition that the last poll found missing, the time of that poll, and for how long it has been polled.
        self._looked_for: Condition | None = None
        self._looked_at = self._looked_s = 0.0
        # The rank's thread, known after the first `submit`.
        self._thread = 0

    def submit(self, work: Work) -> Work:
        """Append a communication, and advance the lane."""
        self._thread = threading.get_ident()
        self._queue.append(work)
        # A dict serves as an ordered set: lanes are advanced in the order in which they began.
        self._others[self] = None
        self.advance()
        return work

    def advance(self) -> Condition | None:
        """Run until a condition is missing and return it, or None if no work is left.

        After an error the lane is in an unknown state: it raises the error that broke it again.
        """
        if self._error is not None:
            raise self._error
        try:
            while self._queue:
                if self._waiting_for is not None:
                    # The first work is suspended at a condition; resume it only when that is met.
                    if not self.transport.met(self._waiting_for):
                        return self._waiting_for
                    self._waiting_for = None
                work = self._queue[0]
                try:
                    self._waiting_for = next(work._steps)  # type: ignore[arg-type]
                except StopIteration as end:
                    # The generator's frame refers to the call and its arrays: drop it.
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
        """Raise this error from now on, at the latest at the end of the run."""
        self._error = error
        # The lane stays listed, so the error is also raised if the program never touches the lane again.
        self._others[self] = None

    def finish(self, work: Work | None = None) -> None:
        """Advance this lane, and meanwhile all others, until `work` is finished (None: all works)."""
        while conditions := self._missing(work):
            self.transport.wait(conditions, (work or self._queue[-1]).describe)

    def look(self, work: Work) -> None:
        """Advance once without waiting; other ranks get a chance to run, and the errors of waiting are raised."""
        conditions = self._missing(work)
        if conditions:
            now = time.monotonic()
            # Time counts only while the same condition is missing: a changed one is progress.
            if conditions[0] == self._looked_for:
                self._looked_s += min(now - self._looked_at, LONGEST_LOOK_S)
            else:
                self._looked_for, self._looked_s = conditions[0], 0.0
            self._looked_at = now
            self.transport.looked(conditions[0], work.describe, self._looked_s)
            self.advance()

    def _missing(self, work: Work | None) -> list[Condition]:
        """Advance all lanes; return their conditions, this lane's first, or nothing if `work` is finished.

        Raises:
            CommError: the calling thread is not the rank's, which may be advancing `work` itself.
        """
        if work is not None and threading.get_ident() != self._thread:
            raise CommError(
                f"rank {self.transport.rank}: thread {threading.current_thread().name!r} waits for {work.describe()}, "
                "which belongs to the thread that runs the rank's function. Wait for it there, and pass on the result."
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
                # A receive from any rank may finish through another lane.
                if work is not None and work.finished:
                    return []
                # While the other lanes advanced, ours may have become free: look again before sleeping.
                if self.transport.met(condition):
                    continue
            return conditions
