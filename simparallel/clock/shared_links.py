"""The rule of time where transfers share links, and where computing and communicating slow each other.

A running task has work left, in picoseconds at full speed, and a speed of at most 1; whenever a task starts or ends,
the speeds of the tasks that share a link or a rank with it are recomputed. Where nothing is shared all speeds are 1,
and every time is that without sharing, to the picosecond.

Links are shared as by the fluid model of SimGrid (Casanova et al. 2014): speeds are max-min fair, which means that a
transfer can only get more of a link from one that has no more. Its latency is paid before a transfer uses links.

The order of events that occur at one time is fixed, and times are rounded to picoseconds at every event, so equal
inputs give equal times, bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import NamedTuple

from simparallel.clock.event import COMPUTE
from simparallel.clock.task_graph import ProgramGraph, Times
from simparallel.errors import InputError
from simparallel.machine.cluster import picoseconds

# Name of a link -> its capacity [bytes/s], and the bytes that pass it for each byte of a communication.
Links = Mapping[Hashable, tuple[float, float]]
# At one time, tasks end before others start.
END, START = 0, 1
# Speeds that differ by less are equal.
ROUNDING = 1 + 1e-12


class Interference(NamedTuple):
    """How computing and communicating slow each other on a rank.

    Attributes:
        compute: factor on the time of work during a communication of the rank.
        communication: factor on the time of a communication while one of its ranks computes.
    """

    compute: float = 1.0
    communication: float = 1.0


NONE = Interference()


class LinkTransfer(NamedTuple):
    """A communication on its links.

    Attributes:
        limit: the highest speed, 1 for full speed.
        rate: bytes that it moves in a picosecond at full speed.
        links: (link, fraction of its capacity that full speed uses), ...
    """

    limit: float
    rate: float
    links: tuple[tuple[Hashable, float], ...]


@lru_cache(maxsize=4096)
def fair_speeds(transfers: tuple[LinkTransfer, ...]) -> tuple[float, ...]:
    """Return max-min fair speeds.

    All speeds rise together, in bytes per second, until a transfer reaches its limit or a link is full; those that it
    stops keep their speed, and the others rise on (Bertsekas and Gallager 1992, "Data Networks", 6.5.2).
    """
    speeds = [0.0] * len(transfers)
    left = dict.fromkeys((link for transfer in transfers for link, _ in transfer.links), 1.0)
    rising = list(range(len(transfers)))
    while rising:
        # Each byte per picosecond of the common level takes this fraction of a link.
        slopes = dict.fromkeys(left, 0.0)
        for i in rising:
            for link, fraction in transfers[i].links:
                slopes[link] += fraction / transfers[i].rate
        stops = {link: left[link] / slope for link, slope in slopes.items() if slope > 0}
        full = min(stops.values(), default=math.inf)
        level = ROUNDING * min(full, *(transfers[i].limit * transfers[i].rate for i in rising))
        stopped = []
        for i in rising:
            limit, rate, links = transfers[i]
            if limit * rate <= level:
                # Exactly the limit, so that a transfer which shares no link keeps the integers of its time.
                speeds[i] = limit
            elif any(stops[link] <= level for link, _ in links):
                speeds[i] = min(stops[link] for link, _ in links) / rate
            else:
                continue
            stopped.append(i)
            for link, fraction in links:
                left[link] -= speeds[i] * fraction
        rising = [i for i in rising if i not in stopped]
    return tuple(speeds)


class _Running:
    """A task in progress: work left [ps at full speed], and its speed since a time [ps]."""

    __slots__ = ("later", "left", "since", "speed")

    def __init__(self, left: int, later: int, now: int) -> None:
        self.left: float = left
        # Work on links, after the latency.
        self.later = later
        self.speed: float = 0
        self.since = now


class SharedLinks:
    """The state of a run of programs at the time `now` [ps].

    Args:
        graph: the tasks.
        links, interference: see `solver.solve`.

    Attributes:
        heap: events to come, as (time, END or START, task, version).
        version: task -> the version of its END that is valid; another speed makes a new one.
        running: tasks in progress whose speed may change.
        transfers: the rate and the links of those that are on links.
        users: link -> its transfers.
        on_program: program -> tasks in progress that slow others.
        changed, changed_links: tasks, and links, whose speeds have to be recomputed.
    """

    def __init__(self, graph: ProgramGraph, links: Mapping[Hashable, Links], interference: Interference) -> None:
        if not all(1 <= factor < math.inf for factor in interference):
            raise InputError(f"{interference}: these factors on times must be finite and 1 or more.")
        self.graph, self.links = graph, links
        # The integer 1 is full speed: products of integers are exact.
        self.slow_compute, self.slow_communication = (1 if factor == 1 else 1 / factor for factor in interference)
        self.has_interference = interference != NONE
        self.now = 0
        self.heap: list[tuple[int, int, int, int]] = []
        self.version = [0] * len(graph)
        self.running: dict[int, _Running] = {}
        self.transfers: dict[int, LinkTransfer] = {}
        self.users: dict[Hashable, dict[int, None]] = {}
        self.on_program: list[dict[int, None]] = [{} for _ in graph.tasks]
        self.changed: dict[int, None] = {}
        self.changed_links: dict[Hashable, None] = {}
        self.loads: dict[Hashable, list[tuple[int, float]]] = {}

    def run(self) -> Times:
        """Return the times of all tasks."""
        after, missing = self.graph.after, list(map(len, self.graph.before))
        starts, ends = [0] * len(missing), [0] * len(missing)
        for task, count in enumerate(missing):
            if count == 0:
                self.push(0, START, task)
        while self.heap:
            self.now = self.heap[0][0]
            while self.heap and self.heap[0][0] == self.now:
                _, what, task, version = heapq.heappop(self.heap)
                if what == START:
                    starts[task] = self.now
                    self.start(task)
                elif version == self.version[task] and self.end(task):
                    ends[task] = self.now
                    for other in after[task]:
                        missing[other] -= 1
                        if missing[other] == 0:
                            self.push(self.now, START, other)
            if self.changed or self.changed_links:
                self.find_speeds()
        return Times(starts, ends, self.loads)

    def push(self, time_ps: int, what: int, task: int, version: int = 0) -> None:
        """Add an event."""
        heapq.heappush(self.heap, (time_ps, what, task, version))

    def start(self, task: int) -> None:
        """Start a task."""
        action, duration_ps = self.graph.actions[task], self.graph.durations[task]
        call = action.call
        used = self.links.get(call.group, {}) if call is not None and call.size_bytes else {}
        slows = self.has_interference and (call is not None or action.stream == COMPUTE)
        if duration_ps == 0 or not (used or slows):
            self.push(self.now + duration_ps, END, task)
            return
        latency_ps, transfer_ps = duration_ps, 0
        if call is not None and used:
            latency_ps = min(call.latency_ps, duration_ps)
            # The time that each link needs for the bytes; a slow link makes the transfer longer than its price.
            need = {link: picoseconds(share * call.size_bytes / capacity) for link, (capacity, share) in used.items()}
            transfer_ps, slowest_ps = duration_ps - latency_ps, max(need.values())
            # Durations and needs are rounded separately, so a tiny difference does not mean a slow link.
            if slowest_ps > transfer_ps and not math.isclose(slowest_ps, transfer_ps, rel_tol=1e-12, abs_tol=1):
                transfer_ps = slowest_ps
            if transfer_ps:
                fractions = tuple((link, min(1.0, need_ps / transfer_ps)) for link, need_ps in need.items() if need_ps)
                self.transfers[task] = LinkTransfer(1, call.size_bytes / transfer_ps, fractions)
        self.running[task] = _Running(latency_ps, transfer_ps, self.now)
        self.changed[task] = None
        if slows:
            for program in self.graph.parties[task]:
                self.changed.update(self.on_program[program])
                self.on_program[program][task] = None

    def end(self, task: int) -> bool:
        """Note that a task has done its work, or a transfer its latency; return whether the task has ended."""
        running = self.running.get(task)
        if running is None:
            return True
        if running.later:
            running.left, running.later, running.speed, running.since = running.later, 0, 0, self.now
            self.changed[task] = None
            for link, _ in self.transfers[task].links:
                self.users.setdefault(link, {})[task] = None
            return False
        self.version[task] = -1
        del self.running[task]
        self.changed.pop(task, None)
        if task in self.transfers:
            for link, _ in self.transfers.pop(task).links:
                del self.users[link][task]
                self.changed_links[link] = None
        if self.has_interference:
            for program in self.graph.parties[task]:
                del self.on_program[program][task]
                self.changed.update(self.on_program[program])
        return True

    def limit(self, task: int) -> float:
        """Return the highest speed of a task, given the other tasks that run on its programs."""
        if not self.has_interference:
            return 1
        is_work = self.graph.actions[task].call is None
        slow = self.slow_compute if is_work else self.slow_communication
        others = (other for program in self.graph.parties[task] for other in self.on_program[program])
        return slow if any((self.graph.actions[other].call is None) != is_work for other in others) else 1

    def find_speeds(self) -> None:
        """Give new speeds to the tasks that changed, and to all transfers that share links with them."""
        links = self.changed_links
        todo = [task for task in self.changed if task in self.transfers and not self.running[task].later]
        todo += [task for link in links for task in self.users[link]]
        found = set(todo)
        while todo:
            for link, _ in self.transfers[todo.pop()].links:
                if link not in links:
                    links[link] = None
                    todo += [task for task in self.users[link] if task not in found]
                    found.update(self.users[link])
        order = sorted(found)
        transfers = tuple(self.transfers[task]._replace(limit=self.limit(task)) for task in order)
        loads = dict.fromkeys(links, 0.0)
        for task, transfer, speed in zip(order, transfers, fair_speeds(transfers), strict=True):
            self.set_speed(task, speed)
            for link, fraction in transfer.links:
                loads[link] += speed * fraction
        for link, load in loads.items():
            self.loads.setdefault(link, []).append((self.now, load))
        for task in self.changed:
            if task not in found:
                self.set_speed(task, self.limit(task))
        self.changed.clear()
        links.clear()

    def set_speed(self, task: int, speed: float) -> None:
        """Continue a task at another speed."""
        running = self.running[task]
        if speed == running.speed:
            return
        running.left -= running.speed * (self.now - running.since)
        running.speed, running.since = speed, self.now
        self.version[task] += 1
        left_ps = round(running.left if speed == 1 else running.left / speed)
        self.push(self.now + left_ps, END, task, self.version[task])
