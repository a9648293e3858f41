"""Make this project's code believe that it runs on macOS or Windows: set NO_LINUX to "darwin" or "win32".

With this folder on PYTHONPATH, Python imports the file when it starts, and so do all processes that it starts. Modules
of the project, scripts and lessons then get stand-ins for `sys`, `os`, `signal` and others, in which the platform has
the other name, and every name is missing that typeshed says that system lacks. The standard library and installed
packages get the real modules, which know Linux alone. NO_LINUX_MACHINE names another processor, such as arm64.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SYSTEM = os.environ.get("NO_LINUX", "")
# Modules whose names differ from system to system.
MODULES = ("sys", "platform", "os", "signal", "mmap", "socket", "select", "time", "stat", "errno", "faulthandler",
           "asyncio", "fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "posix", "readline",
           "curses", "crypt", "msvcrt", "winreg")  # fmt: skip
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Windows backs every anonymous mapping by memory or its paging file: what a laptop may have left.
COMMIT_LIMIT_BYTES = 8 << 30
# The value of F_FULLFSYNC.
_FULL_SYNC = 51


def _value(node: ast.expr, platform: str) -> Any:
    """Return the value of a condition of typeshed on `sys.platform` and `sys.version_info`."""
    code = compile(ast.Expression(node), "typeshed", "eval")
    told = types.SimpleNamespace(platform=platform, version_info=sys.version_info, implementation=sys.implementation)
    return eval(code, {"sys": told})


def _names(body: list[ast.stmt], platform: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _names(node.body if _value(node.test, platform) else node.orelse, platform)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    yield from names_of(str(getattr(node, "module", "")), platform)
                if alias.asname == alias.name:  # exported
                    yield alias.name


@cache
def names_of(module: str, platform: str) -> frozenset[str]:
    """Return the names of a standard module on a platform, by the stubs that come with mypy."""
    found = next((Path(path, "mypy", "typeshed", "stdlib") for path in sys.path if Path(path, "mypy").is_dir()), None)
    assert found is not None, "mypy is not installed, whose stubs say what systems have"
    file = found / f"{module}.pyi"
    file = file if file.exists() else found / module / "__init__.pyi"
    return frozenset(_names(ast.parse(file.read_text("utf-8")).body, platform)) if file.exists() else frozenset()


def lacking(module: str) -> frozenset[str]:
    """Return the names of a module that Linux has and the other system lacks."""
    return names_of(module, "linux") - names_of(module, SYSTEM)


class StandIn(types.ModuleType):
    """A module of the standard library as the other system has it. Names that are set are set in the real one."""

    def __init__(self, real: types.ModuleType, gone: frozenset[str], **changed: Any) -> None:
        super().__init__(real.__name__)
        for name, value in {"_real": real, "_gone": gone, **changed}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self._gone:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on {SYSTEM}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._real, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return stand_in, (self.__name__,)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._real) if name not in self._gone]


class WindowsMmap(importlib.import_module("mmap").mmap):  # type: ignore[misc]
    """`mmap.mmap` as on Windows: other arguments, no `madvise`, and memory without a file is committed at once."""

    committed_bytes = 0

    def __new__(cls, fileno: int, length: int, tagname: str | None = None, access: int = 0, offset: int = 0) -> Any:
        if fileno < 0:
            if cls.committed_bytes + length > COMMIT_LIMIT_BYTES:
                raise OSError(1455, "The paging file is too small for this operation to complete")
            WindowsMmap.committed_bytes += length
        made = super().__new__(cls, fileno, length, access=access, offset=offset)
        made.size_bytes = length if fileno < 0 else 0
        return made

    def __del__(self) -> None:
        WindowsMmap.committed_bytes -= getattr(self, "size_bytes", 0)

    @property
    def madvise(self) -> Any:
        raise AttributeError("madvise")


def _control(fd: int, command: int, *args: Any) -> Any:
    """`fcntl.fcntl` with macOS's command for a full sync."""
    import fcntl

    return os.fsync(fd) if command == _FULL_SYNC else fcntl.fcntl(fd, command, *args)


def _lock(fd: int, mode: int, size: int) -> None:
    """`msvcrt.locking`, by the locks of Linux."""
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _refused(file: Any, call: Any, *args: Any, **settings: Any) -> Any:
    """Call with a file, unless it is of Linux's kernel."""
    if str(file).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return call(file, *args, **settings)


@cache
def stand_in(name: str) -> types.ModuleType | None:
    """Return what the project's code gets for a module; None for one that the other system lacks."""
    if name == "msvcrt":
        made = types.ModuleType(name)
        made.locking, made.LK_NBLCK = _lock, 2  # type: ignore[attr-defined]
        return made if SYSTEM == "win32" else None
    if not names_of(name, SYSTEM):
        return None
    real = importlib.import_module(name)
    changed: dict[str, dict[str, Any]] = {
        "sys": {"platform": SYSTEM},
        "platform": {"system": lambda: {"darwin": "Darwin", "win32": "Windows"}[SYSTEM]},
        "os": {"listdir": lambda folder=".": _refused(folder, os.listdir)},
    }
    if machine := os.environ.get("NO_LINUX_MACHINE"):
        changed["platform"]["machine"] = lambda: machine
    if SYSTEM == "darwin" and name == "fcntl":
        changed["fcntl"] = {"F_FULLFSYNC": _FULL_SYNC, "fcntl": _control}
    if SYSTEM == "win32":
        changed["os"]["name"] = "nt"
        changed["mmap"] = {"mmap": WindowsMmap}
    return StandIn(real, lacking(name), **changed.get(name, {}))


def is_ours(names: Any) -> bool:
    """Return whether these globals belong to the project, a script or a cell, not to Python or an installed package."""
    file = str((names or {}).get("__file__") or "")
    kept = str((names or {}).get("__name__")).partition(".")[0] in ("sitecustomize", "_pytest", "pytest")
    return not kept and not file.startswith((*INSTALLED, "<frozen"))


def begin() -> None:
    """Replace `import` by one that hands out the stand-ins, and take the libraries away that Windows has not."""
    real_import = builtins.__import__
    own = globals()

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        root, _, rest = name.partition(".")
        names, given = globals, fromlist
        if level == 0 and root in MODULES and names is not own and is_ours(names):
            found = stand_in(root)
            if found is None:
                raise ModuleNotFoundError(f"No module named {root!r} on {SYSTEM}", name=root)
            if rest and given:
                return real_import(name, globals, locals, fromlist, level)
            for each in given or ():
                # `from os import fork` has to be an ImportError.
                if each != "*" and not hasattr(found, each):
                    raise ImportError(f"cannot import name {each!r} from {root!r} on {SYSTEM}", name=root)
            return found
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    real_open = io.open

    def opened(file: Any, *args: Any, **settings: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"] == "pathlib":
            frame = frame.f_back
        if is_ours(frame.f_globals):
            return _refused(file, real_open, *args, **settings)
        return real_open(file, *args, **settings)

    builtins.open = io.open = opened
    if SYSTEM == "win32":
        import ctypes

        real_library = ctypes.CDLL.__init__

        def library(self: Any, name: str | None, *args: Any, **settings: Any) -> None:
            if name is None:
                raise TypeError("Windows has no library without a name")
            real_library(self, name, *args, **settings)

        ctypes.CDLL.__init__ = library  # type: ignore[method-assign]
        from multiprocessing import context

        for method in ("fork", "forkserver"):
            context._concrete_contexts.pop(method, None)  # type: ignore[attr-defined]
        # Installed for systems with fork alone.
        sys.modules["multiprocessing_logging"] = None  # type: ignore[assignment]


if SYSTEM:
    begin()
