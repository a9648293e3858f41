"""The user's modules that device processes have imported, and a check whether their files have changed since.

Warm devices keep the modules that they imported, as any Python process does; only a new process imports again.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterable
from importlib.util import cache_from_source
from types import ModuleType

from simparallel.base.callsite import PACKAGE

# Time of the last change [ns] and size [bytes] of a file.
State = tuple[int, int]
# File times may lag behind the clock by this much.
_TICK_NS = 10_000_000
# Folders of installed packages and of this one: users do not edit these while they work with a Cluster.
_FOLDERS = (
    str(PACKAGE),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
# As written and with links resolved: a module's file may be given either way. Frozen modules have no file.
_NOT_THE_USERS = ("<frozen ", *{form(folder) + os.sep for folder in _FOLDERS for form in (str, os.path.realpath)})


class Imported:
    """Files of the user's modules that this process has imported, each reported once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._state: tuple[int, str] = (0, "")

    def new(self) -> list[str]:
        """Return the files imported since the last call, without `__main__`, whose contents travel by value."""
        # Fast path: asked after every run, and rarely anything is new. Modules are added at the end, so a removed and
        # an added one change the last name.
        state = len(sys.modules), next(reversed(sys.modules))
        if state == self._state:
            return []
        self._state = state
        main = sys.modules.get("__main__")
        found = {_file(module) for module in list(sys.modules.values()) if module is not main}
        files = sorted(file for file in found - self._reported if file and not is_installed(file))
        self._reported |= found
        return files


def _file(module: object) -> str:
    if not isinstance(module, ModuleType):
        return ""
    # Plain attribute access would trigger the deferred import of a LazyLoader's module.
    file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
    return file if isinstance(file, str) else ""


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to this one, and not to the user."""
    return file.startswith(_NOT_THE_USERS) or os.path.realpath(file).startswith(_NOT_THE_USERS)


def is_of_installed(name: str) -> bool:
    """Return whether an imported module has a file that is not the user's."""
    file = _file(sys.modules.get(name))
    return bool(file) and is_installed(file)


class Sources:
    """The files that devices have imported, as they were at that time."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[State | None, bytes]] = {}

    def add(self, files: Iterable[str], began_ns: int) -> None:
        """Add files that devices imported in a finished run, which began at `began_ns` [ns since 1970]."""
        for file in set(files) - self._states.keys():
            state = _state(file)
            if state is not None:
                # A file that was written during the run may have been imported before or after that write: unknown,
                # unless the bytecode cache says so.
                is_sure = not began_ns - _TICK_NS < state[0] <= time.time_ns() or _was_read(file, state)
                self._states[file] = (state, _digest(file)) if is_sure else (None, b"")

    def changed(self) -> list[str]:
        """Return files that changed since their import. Deleted files are left out: they cannot be imported again."""
        return [file for file in self._states if self._is_changed(file)]

    def _is_changed(self, file: str) -> bool:
        state, digest = self._states[file]
        now = _state(file)
        if now in (state, None):
            return False
        # The file was saved again with the same contents.
        if digest and _digest(file) == digest:
            self._states[file] = now, digest
            return False
        return True


def _state(file: str) -> State | None:
    """Return (time of the last change [ns], size [bytes]); None if there is no such file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def _digest(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return hashlib.sha256(opened.read()).digest()
    except OSError:
        return b""


def _was_read(file: str, state: State) -> bool:
    """Return whether the bytecode cache shows that this state was imported: it holds time [s] and size (PEP 552)."""
    try:
        with open(cache_from_source(file), "rb") as opened:
            head = opened.read(16)
    except (OSError, NotImplementedError):
        return False
    words = [int.from_bytes(head[at : at + 4], "little") for at in (4, 8, 12)]
    return words == [0, state[0] // 10**9 & 0xFFFFFFFF, state[1] & 0xFFFFFFFF]
