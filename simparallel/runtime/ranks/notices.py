"""Messages of running ranks to the launcher: progress, and figures to show."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simparallel.base.files import write_atomically


class Notes:
    """Handler of the messages of one run.

    Args:
        folder: directory for figures outside of notebooks; None for the current directory.

    Attributes:
        bar: the progress bar.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder or ".")
        self.bar = Bar()

    def __call__(self, note: dict[str, Any]) -> None:
        if note["kind"] == "figure":
            with self.bar.hidden():
                self._show(note["rank"], note["png"])
        else:
            self.bar(note)

    def _show(self, rank: int, png: bytes) -> None:
        # A notebook shows the picture; a terminal, even IPython's, gets a file. IPython is not imported for that.
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if getattr(shell, "kernel", None) is not None:
            from IPython.display import Image, display

            display(Image(data=png))
            return
        # Pictures of earlier runs stay: take the first free number.
        names = (self._folder / f"rank{rank}_figure{number}.png" for number in itertools.count(1))
        path = next(path for path in names if not path.exists())
        try:
            write_atomically(path, png)
        except OSError as error:
            print(f"[rank {rank}] plt.show(): the figure cannot be written: {error}", file=sys.stderr)
            return
        print(f"[rank {rank}] plt.show(): {path}", flush=True)


def _quiet_tqdm() -> type:
    """Return tqdm without its monitor thread, which would stay, and without its process lock.

    That lock would fix the start method of the user's `multiprocessing`.
    """
    from tqdm import tqdm

    class QuietBar(tqdm):
        monitor_interval = 0

    QuietBar.set_lock(threading.RLock())
    return QuietBar


class Bar:
    """The progress bar of a run, drawn by the launcher from the messages of rank 0."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._description: str | None = None

    def __call__(self, note: dict[str, Any]) -> None:
        # Another text, or a count that does not grow, is the next loop of the program.
        if self._bar is None or note["description"] != self._description or note["done"] <= self._bar.n:
            self.close()
            self._description = note["description"]
            self._bar = _quiet_tqdm()(total=note["total"], desc=self._description or None, file=sys.stderr)
        self._bar.update(note["done"] - self._bar.n)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Clear the bar from the console inside of the block, to print other lines there."""
        # Both share the console: a line printed now would be appended to the bar.
        if self._bar is not None:
            self._bar.clear()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
