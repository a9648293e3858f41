"""`CallTrace`: the functions of the package that a block of code runs through, and the paths to chosen lines."""

from __future__ import annotations

import linecache
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = str(Path(__file__).parents[1]) + os.sep

Hop = tuple[str, int, str]  # file below the package, line, function


@dataclass
class CallTrace:
    """The calls of functions of the package, by phase, on this rank.

    Python's profiling hook runs at each call, so traced code is slower.

    Args:
        ends: title -> ("file:function", a part of the text of the line in it where the path ends).

    Attributes:
        calls: for each phase, the number of calls of each function, by (file, name).
        paths: for each of `ends` that was reached, the calls that lead there, outermost first: (file, line, function).

    Example:
        >>> from simparallel.trace import CallTrace
        >>> trace = CallTrace()
        >>> with trace.phase("add"):
        ...     y = sp.Tensor([1.0]) + 1
        >>> trace.total("add") > (0, 0, 0)
        True
    """

    ends: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    calls: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)
    paths: dict[str, list[Hop]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the calls of the block."""
        counter = self.calls.setdefault(name, Counter())

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            code = frame.f_code
            # Comprehensions are functions of their own before Python 3.12.
            if event == "call" and _is_of_package(code) and code.co_name[0] != "<":
                counter[_key_of(code)] += 1
                self._note_path(frame)

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note_path(self, frame: FrameType) -> None:
        here = ":".join(_key_of(frame.f_code))
        for name, (end, text) in self.ends.items():
            if here == end and name not in self.paths:
                *path, (file, line, function) = _hops(frame)
                while text not in linecache.getline(_PACKAGE + file, line):
                    line += 1
                self.paths[name] = [*path, (file, line, function)]

    def total(self, *phases: str) -> tuple[int, int, int]:
        """Return the calls, functions and files of these phases together; of all by default."""
        together = sum((self.calls[name] for name in phases or self.calls), Counter())
        return together.total(), len(together), len({file for file, _ in together})

    def table(self) -> str:
        """Format the calls, functions and files of each phase, and of all."""
        rows = [(name, *self.total(name)) for name in self.calls] + [("all", *self.total())]
        lines = [f"{name:<12}{calls:>8}{functions:>11}{files:>7}" for name, calls, functions, files in rows]
        return "\n".join([f"{'phase':<12}{'calls':>8}{'functions':>11}{'files':>7}", *lines])

    def path(self, name: str) -> str:
        """Format a path: for each call the file, the line, the function, and the source of that line."""
        lines = []
        for file, line, function in self.paths[name]:
            source = linecache.getline(_PACKAGE + file, line).strip()
            lines.append(f"  {file}:{line} {function}\n      {source}")
        return "\n".join(lines)


def _is_of_package(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE) and code.co_filename != __file__


def _key_of(code: CodeType) -> tuple[str, str]:
    """Return the file below the package, and the name of the function."""
    return code.co_filename.removeprefix(_PACKAGE), code.co_name


def _hops(frame: FrameType | None) -> Iterator[Hop]:
    """Return the frames of the package, from the user's call to this one, each at its current line."""
    found: list[Hop] = []
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        found.append((*_key_of(frame.f_code)[:1], frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return reversed(found)
