"""Scripts that tests start, and the leak check around every test of a file that imports `no_leaks`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import simparallel
from simparallel.testing import leaks
from simparallel.testing.leaks import MARK, belongings, descendants, marked, new_belongings

__all__ = [
    "MARK", "belongings", "descendants", "finish", "marked", "new_belongings", "no_leaks", "start_script", "wait_for",
]  # fmt: skip
HEADER = (  # on one line: tests name the lines below it
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    with leaks.no_leaks():
        yield


def wait_for(what: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)


def start_script(folder: Path, text: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `text` as a script in its own process group, as a shell would.

    SIGINT and SIGHUP are set to Python's defaults first: background jobs ignore one, nohup the other.
    """
    path = folder / "script.py"
    path.write_text(HEADER + text)
    home = str(Path(simparallel.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": home, **environment},
        process_group=0,
    )


def finish(script: subprocess.Popen[str], limit_s: float = 30.0) -> tuple[str, str]:
    """Return (stdout, stderr) of a script, which may not take longer than the limit."""
    try:
        return script.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        script.kill()
        said = script.communicate()
        raise AssertionError(f"the script did not end: {said}") from None
