"""Process titles: `ps` and `top` show a process's rank and program.

`ps -e`, `top` and `pgrep` show a name of 15 bytes. `ps -ef` shows the command line, which Linux reads from the
memory of the process; we overwrite it there, up to its original length.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from simparallel.base.system import process_fields

NAME_BYTES = 15


def set_name(rank: int, program: str) -> None:
    """Name this process "rank 3 train.py"; a no-op without /proc."""
    # The script without its arguments: the kernel keeps 15 bytes.
    text = f"rank {rank} {os.path.basename(program.partition(' ')[0])}".rstrip()
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(text.encode(errors="replace")[:NAME_BYTES])


def set_title(text: str) -> None:
    """Replace the command line by as much of `text` as fits. Linux only, otherwise a no-op.

    Call it only after the process has read its arguments: in the host, and in the devices forked from it.
    """
    fields = process_fields("self")
    if not fields:
        return
    # Fields arg_start and arg_end of proc(5), 0 if the kernel hides them.
    start, end = int(fields[45]), int(fields[46])
    size = end - start
    if start <= 0 or size < 2:
        return
    # The last byte must stay zero: otherwise Linux assumes that the title has grown into the environment.
    ctypes.memmove(start, text.encode(errors="replace")[: size - 1].ljust(size, b"\0"), size)


def set_program(rank: int, world_size: int, program: str = "") -> None:
    """Set the title "simparallel rank 3 of 8: train.py" and the name "rank 3 train.py".

    Args:
        rank, world_size: the rank of the process, and the number of ranks.
        program: the program that it runs; "" while it waits for work.
    """
    suffix = f": {program}" * bool(program)
    set_title(f"simparallel rank {rank} of {world_size}{suffix}")
    set_name(rank, program)
