"""What `ps` and `top` show of a process: which rank it is, and of what.

`ps -e`, `top` and `pgrep` show a name of 15 bytes, `ps -ef` the command line, whose bytes Linux reads from the memory
of the process. They can be replaced there, as far as there is room.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

NAME_BYTES = 15


def set_name(rank: int, program: str) -> None:
    """Name this process "rank 3 train.py"; nothing happens where there is no /proc."""
    text = f"rank {rank} {os.path.basename(program.partition(' ')[0])}".rstrip()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(text.encode(errors="replace")[:NAME_BYTES])


def set_title(text: str) -> None:
    """Replace the command line by `text`, or by the beginning of it that fits. Linux only.

    Only for a process whose arguments have been read: the host, and the devices that are forked from it.
    """
    if sys.platform != "linux":
        return
    try:
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, 0 where they are hidden
    size = end - start
    if start <= 0 or size < 2:
        return
    # A zero at the end says that the text has not grown beyond its place.
    ctypes.memmove(start, text.encode(errors="replace")[: size - 1].ljust(size, b"\0"), size)


def set_program(rank: int, world_size: int, program: str = "") -> None:
    """Show "simparallel rank 3 of 8: train.py", and as the name "rank 3 train.py".

    Args:
        rank, world_size: which rank the process is.
        program: what runs on it; "" while it waits for work.
    """
    told = f": {program}" * bool(program)
    set_title(f"simparallel rank {rank} of {world_size}{told}")
    set_name(rank, program)
