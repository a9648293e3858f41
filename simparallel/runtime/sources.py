"""The user's modules that device processes have imported, and whether a file of theirs has changed since.

Devices that stay warm keep what they imported, as any Python process does; a new one would import it anew.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from types import ModuleType

_TICK_NS = 10_000_000  # the clock of files may be so far behind
# Installed, or our own: nobody edits these while he works with a Cluster.
_FOLDERS = (
    os.path.dirname(os.path.dirname(__file__)),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_NOT_THE_USERS = tuple({form(folder) + os.sep for folder in _FOLDERS for form in (str, os.path.realpath)})


class Imported:
    """Files of the user's modules that this process has imported, each told once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._count = 0

    def new(self) -> list[str]:
        """Those since the last call. `__main__` is none: what is in it travels by value."""
        if len(sys.modules) == self._count:  # asked before every run, and nearly always so
            return []
        self._count = len(sys.modules)
        main = sys.modules.get("__main__")
        found = {_file(module) for module in list(sys.modules.values()) if module is not main}
        files = sorted(file for file in found - self._told if file and not _is_installed(file))
        self._told |= found
        return files


def _file(module: object) -> str:
    if not isinstance(module, ModuleType):
        return ""
    # Not `module.__file__`, which would import what a LazyLoader has put off.
    file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
    return file if isinstance(file, str) else ""


def _is_installed(file: str) -> bool:
    return file.startswith(_NOT_THE_USERS) or os.path.realpath(file).startswith(_NOT_THE_USERS)


class Sources:
    """The files that devices run by, as they were when the devices imported them."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[int, int]] = {}

    def add(self, files: Iterable[str], began_ns: int) -> None:
        """What devices imported in a run that began at `began_ns` [ns since 1970]."""
        for file in set(files) - self._states.keys():
            state = _state(file)
            if state is not None:  # one that was written during the run may have been read before that
                self._states[file] = state if state[0] < began_ns - _TICK_NS else (0, 0)

    def changed(self) -> list[str]:
        """Files that are not as the devices know them; one that is gone cannot be imported anew."""
        return [file for file, state in self._states.items() if _state(file) not in (state, None)]


def _state(file: str) -> tuple[int, int] | None:
    """(time of the last change [ns], size [bytes]), None for no file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size
