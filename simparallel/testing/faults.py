"""Fault injection for tests: a rank that dies, raises, hangs or sends garbage at a given point of a given call.

    with faults.inject(rank=1, op="all_reduce", seq=3, action="SIGKILL"):
        with pytest.raises(sp.errors.RunFailedError):
            world.run(4, train)

`help(simparallel.comm.fault_spec)` lists actions and phases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from simparallel.comm.fault_spec import ACTIONS, FAULT_OPS, PHASES, STEP_PHASES, VARIABLE, Fault, InjectedFault, parse

__all__ = ["ACTIONS", "FAULT_OPS", "PHASES", "STEP_PHASES", "Fault", "InjectedFault", "inject", "parse"]


@contextmanager
def inject(
    rank: int,
    action: str = "raise",
    *,
    op: str = "*",
    seq: int | str = "*",
    phase: str = "enter",
    group: int | str = "*",
    step: int | str = "*",
) -> Iterator[None]:
    """Make a rank fail in the runs that begin inside the block. Blocks may be nested, for several faults.

    Args:
        rank: the rank that fails.
        action: "raise" (an `InjectedFault`), "MemoryError", "exit3", "SIGKILL", "SIGSTOP", "SIGSEGV", "loop",
            "sleep(1.5)", "slow(1.5)", "corrupt(3)" (damages a word of the header), ...; see `ACTIONS`. Ranks that are
            threads cannot get signals.
        op: "all_reduce", "send", ...; "*" for any.
        seq: number of the call in its group, from 1; "*" for any.
        phase: "enter", "copy_in", "published", "reduce", "copy_out", "leave" or "returned"; in a step of a collective
            that runs as messages, "send", "sent", "receive" or "received".
        group: "world", "p2p", or the number of a group; "*" for any.
        step: number of such a step, from 1; "*" for any.

    Raises:
        InputError: (when a run begins) a field is wrong.
    """
    before = os.environ.get(VARIABLE)
    fields = {"rank": rank, "action": action, "op": op, "seq": seq, "phase": phase, "group": group, "step": step}
    text = ";".join(f"{name}={value}" for name, value in fields.items())
    os.environ[VARIABLE] = text if not before else f"{before}|{text}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
