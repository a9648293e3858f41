"""What a change can reach, for `pytest -m fast`: a record of the files that each test enters or reads.

`pytest --record-reach` makes it, in pytest's cache. It is a heuristic: a test that finds an earlier test's result in a
cache of the package does not enter what made it. `pytest` runs everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
IMPORTS = "<frozen importlib._bootstrap>"


class Watch:
    """Find the files of the checkout that this process enters, by calling a function of theirs, or reads.

    What an import does is no use of a file: `import simparallel` runs lines of all of them.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._outside: set[str] = set()
        self._known: set[str] = set()

    def start(self) -> None:
        sys.addaudithook(self._audit)
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def again(self) -> None:
        """Tell also of files that have been told of before."""
        self._known = set(self._outside)
        if sys.gettrace() is None:
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if name not in self._known:
            self._found(name, frame)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(name := arguments[0], str) and name not in self._known:
            self._found(name if os.path.isabs(name) else os.path.abspath(name), sys._getframe(1))

    def _found(self, name: str, frame: FrameType | None) -> None:
        if not name.startswith(ROOT) or name.endswith(".pyc") or "/.git" in name:
            self._outside.add(name)
            self._known.add(name)
            return
        while frame is not None:
            if frame.f_code.co_filename == IMPORTS:
                return
            frame = frame.f_back
        self._known.add(name)
        self._tell(name)


def append(file: str, name: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{name}\n".encode())
    finally:
        os.close(fd)


class Recorder:
    """The record of a session, in a folder: for each test file, the tests' files, and those of their processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: set[str] = set()
        self._watch = Watch(self._found.add)
        self._file = ""
        self._tests: dict[str, dict[str, list[list[str]]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        recorded = os.path.join(ROOT, "tests", "recorded")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (recorded, os.environ.get("PYTHONPATH"))))
        self._watch.start()

    def begin(self, test: str) -> None:
        self._file = test.split("::")[0]
        os.environ["RECORDED_REACH"] = str(self.folder / f"{self._file.replace('/', '+')}.{os.getpid()}.started")
        self.take()

    def take(self) -> list[str]:
        """Return the files since the last call."""
        found = sorted(os.path.relpath(name, ROOT) for name in self._found.copy())
        self._found.clear()
        self._watch.again()
        return found

    def end(self, test: str, setup: list[str], call: list[str]) -> None:
        self._tests.setdefault(self._file, {})[test] = [setup, call]

    def save(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.folder.joinpath(f"{os.getpid()}.json").write_text(json.dumps(self._tests), "utf-8")


def load(folder: Path) -> dict[str, set[str]]:
    """Return test -> its files: of its call, of the fixtures of its test file, and of processes that this started.

    What every test enters before it begins tells nothing, and is left out.
    """
    setups: dict[str, list[set[str]]] = {}
    record: dict[str, set[str]] = {}
    for part in sorted(folder.glob("*.json")):
        for file, tests in json.loads(part.read_text("utf-8")).items():
            for test, (setup, call) in tests.items():
                setups.setdefault(file, []).append(set(setup))
                record[test] = set(call)
    common = set.intersection(*(one for of_file in setups.values() for one in of_file)) if setups else set()
    shared = {file: set().union(*found) - common for file, found in setups.items()}
    for started in folder.glob("*.started"):
        file = started.name.split(".py.")[0].replace("+", "/") + ".py"
        names = started.read_text("utf-8").splitlines()
        shared.setdefault(file, set()).update(os.path.relpath(name, ROOT) for name in names)
    return {test: files | shared[test.split("::")[0]] for test, files in record.items()}


def changes(since: str, root: str = ROOT) -> set[str]:
    """Return the files that differ from a revision, those that git does not know included."""
    commands = ["diff", "--name-only", "-z", since], ["ls-files", "--others", "--exclude-standard", "-z"]
    found = [
        subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True) for words in commands
    ]
    return {name for done in found for name in done.stdout.split("\0") if name}


def reached(tests: Iterable[str], changed: set[str], record: dict[str, set[str]]) -> set[str]:
    """Return the tests that a change can reach: that use a changed file, are in one, or are not in the record.

    A golden file belongs to the tests of its folder. A file of data that no test opens itself belongs to those that
    use a file of its folder.
    """
    known = set().union(*record.values())
    data = {os.path.dirname(name) for name in changed - known if not name.startswith("tests/")}
    beside = {name for name in known if name.endswith(".py") and os.path.dirname(name) in data}
    golden = {name.removeprefix("tests/golden/") for name in changed if name.startswith("tests/golden/")}
    wanted = (changed & known) | beside
    from refusals import file_of  # not above: it imports the package, which processes of tests do not need

    found = set()
    for test in tests:
        of_file = test.split("::")[0] in changed or file_of(test.removeprefix("tests/")) in golden
        if of_file or test not in record or record[test] & wanted:
            found.add(test)
    return found
