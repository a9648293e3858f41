"""Ranks as threads of one process: how they end, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from leaks import finish, no_leaks, start_script  # noqa: F401 (a fixture)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ctrl_c_waits_for_every_rank(tmp_path: Path, world_size: int) -> None:
    """A rank in the middle of a computation finishes that first, and is not left to go on alone."""
    text = f"""
import os, signal, threading
import simparallel as sp
from simparallel.comm import current
from simparallel.comm.segment import ABORT_INTERRUPT
left = threading.Event()
def work():
    if sp.get_rank() < {world_size} - 1:
        return
    os.kill(os.getpid(), signal.SIGINT)
    transport = current().transport
    while transport.words[transport.segment.map.abort()] != ABORT_INTERRUPT:
        left.wait(0.001)
    print("left" if left.wait(0.2) else "waited for")
try:
    sp.launch(work, world_size={world_size}, transport="inline")
except KeyboardInterrupt:
    left.set()
    print("interrupted", threading.active_count())
"""
    assert finish(start_script(tmp_path, text)) == ("waited for\ninterrupted 1\n", "")
