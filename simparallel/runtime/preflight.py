"""Checks before any device process starts: the caller must not be a rank itself, and there must be enough memory.

A rank unpickles its function by importing the module that defines it. If that module launches at its top level,
every rank launches again, and so do their ranks. CHILD_VARIABLE, set in the environment of each rank, stops the
second generation.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from traceback import walk_stack

from simparallel.base.callsite import is_inside, place
from simparallel.base.units import format_bytes
from simparallel.comm.memory.memfd import available_memory
from simparallel.comm.memory.segment import WORD, ControlMap
from simparallel.errors import LaunchError
from simparallel.world.rank import CHILD_VARIABLE

# Limit on the nesting depth of "inline" launches.
MAX_NESTED = 3
# Measured on Linux 6 with NumPy 2.4 in the third step of a small MLP under DDP, on 64 to 256 ranks: each process
# has 10 MiB of its own and 1 MiB of its arena; each peer adds 12 KiB of objects and 8 KiB of page tables.
RANK_BYTES, PEER_BYTES = 11 << 20, 20 << 10


def check_not_in_a_rank() -> None:
    """Refuse to start device processes from a rank, or from a process that a rank started.

    Raises:
        LaunchError: this is such a process. Facts: `rank`.
    """
    mark = os.environ.get(CHILD_VARIABLE)
    if mark is None:
        return
    pid, rank, *_ = mark.split(" ")
    who = "a rank" if pid == str(os.getpid()) else f"process {os.getpid()}, which rank {rank} started,"
    guard = 'Put the launch under `if __name__ == "__main__":`'
    importing = _top_level_line()
    if importing:
        text = f"while it imports {importing}, and each of them would do so again. {guard}."
    else:
        text = (
            f"of its own. {guard}, start a script that launches by itself with python and not with simparallel run, "
            f'or launch with transport="inline". To nest runs on purpose, remove {CHILD_VARIABLE} from os.environ.'
        )
    raise LaunchError(f"launch: {who} would start device processes {text}", rank=rank)


def check_depth(depth: int) -> None:
    """Refuse "inline" launches that are nested deeper than `MAX_NESTED`, such as by a function that launches itself.

    Raises:
        LaunchError: `depth` is more than that. Facts: `depth`.
    """
    if depth > MAX_NESTED:
        raise LaunchError(
            f"launch: runs would be nested {depth} deep, but at most {MAX_NESTED} levels are allowed: a "
            "function that launches itself, or whose module launches when it is imported, does so without end. Put "
            'the launch under `if __name__ == "__main__":`.',
            depth=depth,
        )


def _top_level_line() -> str:
    """Return the running top-level line of the innermost user module that is being imported; "" if there is none."""
    for frame, line in walk_stack(sys._getframe(1)):
        code = frame.f_code
        # The top level of an imported module; a script's own top level is `__main__`.
        is_import = code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        if is_import and not is_inside(code.co_filename):
            return place(code.co_filename, line)
    return ""


def needed_bytes(world_size: int) -> int:
    """Estimate the memory [bytes] of device processes that train a small network, without messages and groups."""
    control = ControlMap(world_size).num_first_words * WORD
    return control + world_size * (RANK_BYTES + world_size * PEER_BYTES)


def room_for_ranks(free_bytes: int) -> int:
    """Return the largest number of ranks whose `needed_bytes` fit into `free_bytes`."""
    # More ranks than their own bytes allow do not fit in any case.
    return bisect_right(range(1, free_bytes // RANK_BYTES + 1), free_bytes, key=needed_bytes)


def check_memory(world_size: int) -> None:
    """Refuse to start more device processes than fit into memory.

    Raises:
        LaunchError: there is too little memory. Facts: `needed_bytes`, `available_bytes`.
    """
    # 0 means that the system does not report its memory.
    needed, free = needed_bytes(world_size), available_memory()
    if 0 < free < needed:
        raise LaunchError(
            f"{world_size} device processes need about {format_bytes(needed)} of memory before they hold any data of "
            f"yours, and {format_bytes(free)} are available: there is room for about {room_for_ranks(free)}. Use fewer "
            'ranks, or transport="inline", whose ranks are threads.',
            needed_bytes=needed,
            available_bytes=free,
        )
