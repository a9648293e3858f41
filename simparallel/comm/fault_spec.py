"""Fault injection: `SIMPARALLEL_FAULT="rank=1;op=all_reduce;seq=17;phase=copy_out;action=SIGKILL"`.

The variable is read and checked by the process that launches a run, at every run. Fields, in any order:

    action   SIGKILL SIGSTOP SIGTERM SIGINT SIGSEGV, raise, MemoryError, exit0, exit3 (sys.exit),
             os._exit(0), loop (for ever), sleep(S) (idle S seconds), slow(S) (busy S seconds),
             hold_gil(S) (S seconds in C without releasing the GIL, so that Ctrl-C has no effect),
             corrupt(W) (damages word W, 0 … 15, of the published header; only in phase enter)
    rank     the rank that fails; required
    op       all_reduce, …, new_group, send, recv, adasum (all_reduce with op="adasum"); default * (any)
    group    world, the number of a group, or p2p; default *
    seq      number of the collective in its group, or of the message to or from that peer, from 1; default *
    step     of a collective that runs as messages, from 1, in the order of its ledger; default *
    phase    enter      before anything is published (default)
             copy_in    the payload is half copied, nothing of it published
             published  the others can see the call
             reduce     all have arrived and agree; nothing was read from them
             copy_out   results are read; of a recv: half of them
             leave      before the others learn that this rank is done
             returned   after the end of the call
             (send has enter, copy_in, published, returned; recv has enter, copy_out, leave, returned)
             A collective that runs as messages has no copy_in and copy_out; instead, each step that sends
             or receives has
             send       before a message is sent
             sent       the message is on its way
             receive    before a receive starts
             received   the message has arrived

Several faults are separated by `|`. Each writes a line to stderr, with the monotonic clock, before it acts.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from simparallel.comm.call_header import COMPARED
from simparallel.comm.collective import COLLECTIVES, OBJECT_OPS
from simparallel.errors import InputError

VARIABLE = "SIMPARALLEL_FAULT"
PHASES = ("enter", "copy_in", "published", "reduce", "copy_out", "leave", "returned")
STEP_PHASES = ("send", "sent", "receive", "received")
FAULT_OPS = (*(name for name in COLLECTIVES if name not in OBJECT_OPS), "send", "recv")
_FIELDS = ("rank", "group", "op", "seq", "step", "phase", "action")
_TIMED = re.compile(r"(sleep|slow|hold_gil)\((\d+(?:\.\d+)?)\)")
_CORRUPT = re.compile(r"corrupt\((\d+)\)")
_DAMAGE = 0x5A5A5A5A5A5A  # XORed into a damaged word


class InjectedFault(RuntimeError):
    """The exception of the action `raise`."""


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(kind: type[BaseException]) -> None:
    raise kind("a fault was asked for")


def _slow(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _hold_gil(seconds: float) -> None:
    # Unlike CDLL, PyDLL keeps the GIL.
    sleep = ctypes.PyDLL(None).usleep
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        sleep(ctypes.c_uint(int(seconds * 1e6)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_TIMED_ACTIONS: dict[str, Callable[[float], None]] = {"sleep": time.sleep, "slow": _slow, "hold_gil": _hold_gil}
_ACTIONS: dict[str, Callable[[], Any]] = {
    **{
        name: _signal(getattr(signal, name))
        for name in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT")
        if hasattr(signal, name)  # some systems lack some of them
    },
    "SIGSEGV": partial(ctypes.string_at, 0),
    "raise": lambda: _raise(InjectedFault),
    "MemoryError": lambda: _raise(MemoryError),
    "exit0": lambda: sys.exit(0),
    "exit3": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "loop": partial(_slow, math.inf),
}
# With S for seconds and W for the number of a word.
ACTIONS = (*_ACTIONS, *(f"{name}(S)" for name in _TIMED_ACTIONS), "corrupt(W)")
# Would end, stop or interrupt the launcher if ranks are threads.
_ONLY_PROCESSES = ("SIG", "os._exit")


@dataclass(frozen=True)
class Fault:
    """One injected fault; `None` matches anything.

    Attributes:
        rank: the rank that it hits.
        action: one of `ACTIONS`, such as "SIGKILL" or "sleep(0.5)".
        group: name of a group, such as "world".
        op: name of a collective, such as "all_reduce".
        seq: number of the call in its group, from 1.
        phase: one of `PHASES`: the moment in the life of the call.
        step: step of an algorithm.
    """

    rank: int
    action: str
    group: str | None = None
    op: str | None = None
    seq: int | None = None
    phase: str = "enter"
    step: int | None = None

    @property
    def word(self) -> int | None:
        """The word of the header that it damages, or None for another action."""
        found = _CORRUPT.fullmatch(self.action)
        return int(found[1]) if found else None

    def act(self) -> None:
        timed = _TIMED.fullmatch(self.action)
        if timed is None:
            _ACTIONS[self.action]()
        else:
            _TIMED_ACTIONS[timed[1]](float(timed[2]))


def parse(text: str, world_size: int, *, threads: bool = False) -> list[Fault]:
    """Parse the faults that a text requests; none for an empty text.

    Args:
        text: in the format above.
        world_size: ranks must be below it.
        threads: ranks are threads of the launcher, so none may be killed.

    Raises:
        InputError: names the bad field.
    """
    return [_parse_one(part, world_size, threads) for part in text.split("|") if part.strip()]


def _parse_one(text: str, world_size: int, threads: bool) -> Fault:
    fields: dict[str, str] = {}
    for item in text.split(";"):
        if not item.strip():
            continue
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if name not in _FIELDS or not equals or name in fields:
            what = "is given twice" if name in fields else "is not a field with a value"
            raise InputError(f"{VARIABLE}: {item.strip()!r} {what}; the fields are {', '.join(_FIELDS)}.")
        fields[name] = value

    def optional(name: str) -> str | None:
        return None if fields.get(name, "*") == "*" else fields[name]

    rank, group, op = fields.get("rank", ""), optional("group"), optional("op")
    seq, step = optional("seq"), optional("step")
    phase, action = fields.get("phase", "enter"), fields.get("action", "")
    corrupt, is_timed = _CORRUPT.fullmatch(action), _TIMED.fullmatch(action) is not None
    timed = ", ".join(f"{name}(SECONDS)" for name in _TIMED_ACTIONS)
    # (field, whether its value is allowed, the rule for the error); the first that is broken is reported.
    rules = (
        ("rank", _is_count(rank) and int(rank) < world_size, f"one of 0 … {world_size - 1}"),
        ("group", group in (None, "world", "p2p") or _is_count(group), "world, p2p, the number of a group, or *"),
        ("op", op in (None, *FAULT_OPS), f"one of {', '.join(FAULT_OPS)}, or *"),
        ("seq", seq is None or _is_count(seq) and int(seq) > 0, "a number from 1, or *"),
        ("step", step is None or _is_count(step) and int(step) > 0, "a number from 1, or *"),
        ("phase", phase in PHASES + STEP_PHASES, f"one of {', '.join(PHASES + STEP_PHASES)}"),
        ("phase", step is None or phase in STEP_PHASES, f"one of {', '.join(STEP_PHASES)} if a step is given"),
        ("action", not corrupt or int(corrupt[1]) < COMPARED, f"corrupt(WORD) of a word 0 … {COMPARED - 1}"),
        ("action", not corrupt or (phase == "enter" and op != "recv"),
         "a different one here: a header is corrupted at phase=enter, and recv has none"),
        ("action", corrupt or is_timed or action in _ACTIONS, f"one of {', '.join(_ACTIONS)}, {timed}, corrupt(WORD)"),
        ("action", not (threads and action.startswith(_ONLY_PROCESSES)),
         "one that spares the process, because with transport='inline' ranks are threads"),
    )  # fmt: skip
    for name, is_allowed, rule in rules:
        if not is_allowed:
            got = repr(fields[name]) if name in fields else "nothing"
            raise InputError(f"{VARIABLE}: {name} must be {rule}, got {got} in {text!r}.")
    return Fault(
        int(rank), action, group, op, None if seq is None else int(seq), phase, None if step is None else int(step)
    )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


class Faults:
    """The faults of one rank, checked at every phase of its communication."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults

    def at(self, phase: str, group: str, op: str, seq: int, step: int = 0) -> None:
        """Act if a fault is due here.

        Args:
            phase: one of `PHASES`, or of `STEP_PHASES` with a step.
            group: "world", the number of a group, or "p2p".
            op: name of the collective, "send" or "recv".
            seq: its number, from 1.
            step: of an algorithm on messages, from 1.
        """
        for fault in self._due(phase, group, op, seq, step):
            if fault.word is None:
                _tell(fault, f"{phase} of {op} #{seq} of {group}{f', step {step}' * bool(step)}")
                fault.act()

    def corrupt(self, words: memoryview[int] | array[int], start: int, group: str, op: str, seq: int) -> None:
        """Damage a header that is about to be published, if that is due here.

        Args:
            words: memory that contains the header.
            start: index of its first word.
            group, op, seq: as in `at`.
        """
        for fault in self._due("enter", group, op, seq, 0):
            if fault.word is not None:
                _tell(fault, f"{op} #{seq} of {group}")
                words[start + fault.word] ^= _DAMAGE

    def _due(self, phase: str, group: str, op: str, seq: int, step: int) -> list[Fault]:
        place = phase, group, op, seq, step
        return [
            fault
            for fault in self._faults
            if (fault.phase, fault.group or group, fault.op or op, fault.seq or seq, fault.step or step) == place
        ]


def _tell(fault: Fault, where: str) -> None:
    text = f"fault: rank {fault.rank} {fault.action} in {where}, clock_ns={time.monotonic_ns()}\n"
    os.write(2, text.encode())


def faults_of(faults: Iterable[Fault], rank: int) -> Faults | None:
    """Return the faults of `rank`, or None: then no phase is checked."""
    mine = [fault for fault in faults if fault.rank == rank]
    return Faults(mine) if mine else None
