"""Random scripts of several ranks, valid by construction; their programs, and their times by the recorder's rules.

A script is one list for all ranks, in an order in which it can run: no rank waits for a call before the other ranks
have made theirs. Each rank's program is what the script has of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from simparallel.clock import program

COMPUTE, COLLECTIVE, SEND, RECEIVE, WAIT = range(5)


class WrittenProgram(program.RankProgram):
    """A program of a test.

    Attributes:
        shown: numbers of its work and its calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[int] = []

    def _show(self, *action: Any) -> int:
        self.shown.append(self.add(*action))
        return self.shown[-1]

    def launch(self, duration_ps: int) -> tuple[int, ...]:
        """Let the interpreter start an action; return what the action comes after."""
        before = self.last(program.LAUNCHER)
        self.add(program.LAUNCHER, duration_ps)
        return (before,)

    def compute(self, duration_ps: int, after: tuple[int, ...] = ()) -> int:
        return self._show("compute", duration_ps, after)

    def collective(
        self,
        group: Any,
        seq: Any,
        duration_ps: int,
        size_bytes: int = 0,
        latency_ps: int = 0,
        after: tuple[int, ...] = (),
    ) -> int:
        call = program.Communication(program.COLLECTIVE, group, seq, size_bytes, latency_ps)
        return self._show(("comm", group), duration_ps, (self.last(), *after), call)

    def send(
        self,
        channel: Any,
        seq: Any,
        duration_ps: int,
        size_bytes: int = 0,
        latency_ps: int = 0,
        after: tuple[int, ...] = (),
    ) -> int:
        call = program.Communication(program.SEND, channel, seq, size_bytes, latency_ps)
        return self._show(("send", channel), duration_ps, (self.last(), *after), call)

    def receive(self, channel: Any, seq: Any, after: tuple[int, ...] = ()) -> int:
        call = program.Communication(program.RECEIVE, channel, seq)
        return self._show(("recv", channel), 0, (self.last(), *after), call)


class Line(NamedTuple):
    """What a rank does. `where`: number of the group, or the peer; `number`: of the call there, or of the call to wait
    for among the rank's calls; `size`: duration of work, or size of a call."""

    kind: int
    rank: int
    where: int = 0
    number: int = 0
    size: int = 0


class Script(NamedTuple):
    num_ranks: int
    groups: tuple[tuple[int, ...], ...]
    lines: tuple[Line, ...]

    def channels(self) -> list[tuple[int, int]]:
        return sorted({(line.rank, line.where) for line in self.lines if line.kind == SEND})


@st.composite
def scripts(draw, max_ranks=4, max_lines=30, max_size=9):
    """Draw scripts: work, collectives and messages in flight at once, waited for in any order or at the end."""
    num_ranks = draw(st.integers(1, max_ranks))
    members = st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True).map(tuple)
    groups = (tuple(range(num_ranks)), *draw(st.lists(members, max_size=3)))
    lines: list[Line] = []
    # (kind, where, ...) of every call, the sizes of a group's or channel's calls, and how many each rank has made.
    sizes: dict[Any, list[int]] = {}
    made: dict[tuple[Any, int], int] = {}
    calls: list[list[tuple[Any, int]]] = [[] for _ in range(num_ranks)]
    open_calls: list[list[int]] = [[] for _ in range(num_ranks)]

    def call(kind: int, rank: int, where: int, size: int) -> None:
        place = where if kind == COLLECTIVE else (rank, where) if kind == SEND else (where, rank)
        number = made.get((place, kind, rank), 0)
        made[place, kind, rank] = number + 1
        known = sizes.setdefault(place, [])
        if number == len(known):
            known.append(size)
        open_calls[rank].append(len(calls[rank]))
        calls[rank].append((kind, place, number))
        lines.append(Line(kind, rank, where, number, known[number]))

    def is_ready(rank: int, handle: int) -> bool:
        """Whether all ranks have made their part of a call."""
        kind, place, number = calls[rank][handle]
        if kind == COLLECTIVE:
            return all(made.get((place, kind, member), 0) > number for member in groups[place])
        return kind == SEND or made.get((place, SEND, place[0]), 0) > number

    def wait(rank: int, handle: int) -> None:
        open_calls[rank].remove(handle)
        lines.append(Line(WAIT, rank, 0, handle))

    for choice in draw(st.lists(st.integers(0, 2**20), max_size=max_lines)):
        kind, rank, other, size = choice % 5, choice // 5 % num_ranks, choice // 64, choice // 512 % (max_size + 1)
        own = [i for i, group in enumerate(groups) if rank in group]
        ready = [handle for handle in open_calls[rank] if is_ready(rank, handle)]
        if kind == COLLECTIVE:
            call(kind, rank, own[other % len(own)], size)
        elif kind in (SEND, RECEIVE):
            call(kind, rank, other % num_ranks, size)
        elif kind == WAIT and ready:
            wait(rank, ready[other % len(ready)])
        else:
            lines.append(Line(COMPUTE, rank, size=size))
    # Make the calls that are missing, and wait for all.
    for place, known in list(sizes.items()):
        parts = (
            [(COLLECTIVE, rank, place) for rank in groups[place]]
            if isinstance(place, int)
            else [(SEND, *place), (RECEIVE, *place[::-1])]
        )
        for kind, rank, where in parts:
            while made.get((place, kind, rank), 0) < len(known):
                call(kind, rank, where, 0)
    for rank in range(num_ranks):
        for handle in list(open_calls[rank]):
            wait(rank, handle)
    return Script(num_ranks, groups, tuple(lines))


Price = Callable[[Line], int]


def size_of(line: Line) -> int:
    return line.size


def programs_of(
    script: Script, price: Price = size_of, latency: Price | None = None, steps: int = 1
) -> list[WrittenProgram]:
    """Return the programs of a script that runs `steps` times. Groups have the keys 0, 1, …, channels (src, dst)."""
    programs = [WrittenProgram() for _ in range(script.num_ranks)]
    for step in range(steps):
        _add_lines(programs, script, price, latency, step)
    return programs


def _add_lines(programs: list[WrittenProgram], script: Script, price: Price, latency: Price | None, step: int) -> None:
    handles: list[list[int]] = [[] for _ in programs]
    for line in script.lines:
        kind, rank, where, number, size = line
        written, own = programs[rank], handles[rank]
        numbers = {"size_bytes": size, "latency_ps": latency(line) if latency else 0}
        if kind == COMPUTE:
            written.compute(size)
        elif kind == COLLECTIVE:
            own.append(written.collective(where, (step, number), price(line), **numbers))
        elif kind == SEND:
            own.append(written.send((rank, where), (step, number), price(line), **numbers))
        elif kind == RECEIVE:
            own.append(written.receive((where, rank), (step, number)))
        else:
            written.wait(own[number])


def clocks_of(script: Script, price: Price = size_of) -> list[list[tuple[int, int]]]:
    """Return the (start, end) of each rank's work and calls, in the order of the script, by the recorder's rules.

    One pass with a clock for each stream: a call has its times once the last rank has made its part.
    """
    now = [0] * script.num_ranks
    clock: dict[Any, int] = {}
    issued: dict[Any, dict[int, int]] = {}
    times: list[list[Any]] = [[] for _ in now]
    calls: list[list[list[int]]] = [[] for _ in now]
    sent: dict[Any, int] = {}
    cost: dict[Any, int] = {}
    waiting: dict[Any, tuple[int, list[int]]] = {}

    def deliver(key: Any) -> None:
        (src, dst, _), (issued_ps, found) = key, waiting[key]
        end = max(issued_ps, sent[key] + cost[key])
        found += [min(max(issued_ps, sent[key], clock.get(("recv", src, dst), 0)), end), end]
        clock["recv", src, dst] = end

    for line in script.lines:
        kind, rank, where, number, size = line
        if kind == COMPUTE:
            times[rank].append([now[rank], now[rank] + size])
            now[rank] += size
            continue
        if kind == WAIT:
            now[rank] = max(now[rank], calls[rank][number][1])
            continue
        found: list[int] = []
        times[rank].append(found)
        calls[rank].append(found)
        if kind == COLLECTIVE:
            known = issued.setdefault((where, number), {})
            known[rank] = now[rank]
            waiting["of", where, number, rank] = 0, found
            if len(known) == len(script.groups[where]):
                start = max(*known.values(), clock.get(where, 0))
                clock[where] = start + price(line)
                for member in known:
                    waiting["of", where, number, member][1].extend([start, clock[where]])
        elif kind == SEND:
            key = rank, where, number
            start = max(now[rank], clock.get(("send", *key[:2]), 0))
            sent[key], cost[key] = start, price(line)
            clock[("send", *key[:2])] = start + price(line)
            found += [start, start + price(line)]
            if key in waiting:
                deliver(key)
        else:
            key = where, rank, number
            waiting[key] = now[rank], found
            if key in sent:
                deliver(key)
    return [[tuple(found) for found in own] for own in times]
