"""The progress line of a long dry run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from simparallel.clock.recorder import Recorder

# Shorter runs say nothing.
QUIET_S, EVERY_S = 3.0, 0.5


@contextmanager
def progress(world_size: int, recorders: Mapping[int, Recorder]) -> Iterator[None]:
    """Show on a terminal how far a dry run is, in one line of stderr, which is cleared at the end.

    Args:
        world_size: number of ranks.
        recorders: rank -> its recorder; filled by the run.
    """
    ended, began_s, stream = threading.Event(), time.monotonic(), sys.stderr
    if stream is None or not stream.isatty():
        yield
        return

    def tell() -> None:
        text = ""
        while not ended.wait(EVERY_S):
            took_s, found = time.monotonic() - began_s, list(recorders.values())
            if took_s >= QUIET_S:
                steps = min((recorder.step for recorder in found), default=0)
                text = f"dry run: {len(found):,} of {world_size:,} ranks run, {steps:,} steps done, {took_s:.0f} s"
                print(f"\r{text}", end="", file=stream, flush=True)
        print(f"\r{' ' * len(text)}\r" if text else "", end="", file=stream)

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
