"""Standard output of ranks that are threads: each line begins with its rank, as the launcher prints those of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO


@contextmanager
def labelled_output(out: TextIO, repeats: bool = False) -> Iterator[None]:
    """Inside the block, `print` writes to `out`, and `[rank N]` stands before the lines of threads that are ranks.

    Args:
        out: the stream.
        repeats: whether a rank that runs again repeats itself: then only lines beyond those it has written are shown.
    """
    labelled: Any = _Labelled(out, repeats)
    try:
        with redirect_stdout(labelled):
            yield
    finally:
        labelled.finish()


class _Labelled:
    """The stream of `labelled_output`."""

    def __init__(self, out: TextIO, repeats: bool) -> None:
        self._out, self._repeats = out, repeats
        # By name of the rank: its thread, its line without an end, the number of its lines, and of those shown.
        self._threads: dict[str, threading.Thread] = {}
        self._begun: dict[str, str] = {}
        self._lines: dict[str, int] = {}
        self._shown: dict[str, int] = {}

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        name = thread.name
        if not name.startswith("rank "):
            return self._out.write(text)
        if self._threads.get(name) is not thread:
            if not self._repeats:
                self._end(name)
                self._shown[name] = 0
            self._threads[name], self._lines[name], self._begun[name] = thread, 0, ""
        *lines, self._begun[name] = (self._begun[name] + text).split("\n")
        for line in lines:
            self._show(name, line)
        return len(text)

    def finish(self) -> None:
        """Write the lines that do not end in a newline."""
        for name in self._begun:
            self._end(name)

    def _end(self, name: str) -> None:
        if self._begun.get(name):
            self._show(name, self._begun[name])

    def _show(self, name: str, line: str) -> None:
        self._lines[name] += 1
        if self._lines[name] > self._shown.get(name, 0):
            self._shown[name] = self._lines[name]
            self._out.write(f"[{name}] {line}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
