"""Notes for the user about requests that have no effect here. Each is printed once."""

from __future__ import annotations

import sys

from simparallel.clock.recorder import current_recorder

_given: set[str] = set()


def note_once(text: str) -> None:
    """Print `simparallel: note: <text>` to standard error, on rank 0, unless this process has done so before."""
    # One rank speaks for all: they run the same program.
    recorder = current_recorder()
    if text not in _given and (recorder is None or recorder.rank == 0):
        _given.add(text)
        print(f"simparallel: note: {text}", file=sys.stderr, flush=True)


def forget_notes() -> None:
    """Forget which notes were printed; called at the start of a new run in a warm process."""
    _given.clear()
