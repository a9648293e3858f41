"""The call site: the innermost frame outside of this package, and its place in a file or a notebook cell."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import numpy as np

# The folder `simparallel`.
PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGE = str(PACKAGE) + os.sep
# Other packages, and the standard library, which call a method on behalf of the user.
LIBRARIES = str(Path(np.__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep, "<frozen "


def is_inside(file: str) -> bool:
    """Return whether a file belongs to the package, so that the call site is further out."""
    return file.startswith(_PACKAGE)


# {file name: "In[17]"}: notebook cells, sent by the launcher to processes without IPython, such as devices.
cells: dict[str, str] = {}


def cell_of(file: str) -> str | None:
    """Return IPython's name of the cell that it compiled under this file name, "In[17]"; None for any other file."""
    if file in cells:
        return cells[file]
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # Since IPython 8.
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = name_of(file) if name_of is not None else None
    return found[1] if found else None


def place(file: str, line: int) -> str:
    """Return "file:line", or the cell and the line in it."""
    cell = cell_of(file)
    return f"{file}:{line}" if cell is None else f"cell {cell}, line {line}"


def short_place(file: str, line: int, function: str) -> str:
    """Return `place` and the function, with the file relative to the working directory if it is in it."""
    text = f"{place(file, line)} in {function}"
    # The working directory may have been removed.
    with contextlib.suppress(OSError):
        text = text.removeprefix(os.getcwd() + os.sep)
    return text


def frames_of(thread: int | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, innermost first; none if there is no thread with this identifier."""
    if frame := sys._current_frames().get(thread) if thread is not None else None:
        yield from (each for each, _ in walk_stack(frame))


def user_place(thread: int | None) -> str:
    """Return the place of the user's line that a thread is running; "an unknown place" if there is none."""
    for frame in frames_of(thread):
        if not is_inside(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, frame.f_lineno)
    return "an unknown place"


def user_line(libraries: tuple[str, ...] = ()) -> str:
    """Return the place of the user's line, with the base name of the file; "" if no user code is on the stack.

    Lines in the folders `libraries`, of other packages that call this one, are not the user's either.
    """
    first = frame = _user_frame()[0]
    while frame is not None and (is_inside(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(libraries)):
        frame = frame.f_back
    if (frame := frame or first) is None:
        return ""
    text = place(frame.f_code.co_filename, frame.f_lineno)
    return text if text.startswith("cell ") else os.path.basename(text)


def user_level() -> int:
    """Return the `stacklevel` that attributes a warning of the calling function to the user's line."""
    return _user_frame()[1]


def _user_frame() -> tuple[FrameType | None, int]:
    """Return the user's frame, and its distance in calls from the calling function."""
    frame: FrameType | None = sys._getframe(1)
    level = 0
    while frame is not None and is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


def calling_frame() -> tuple[FrameType, int]:
    """Return the frame that calls a method which calls the calling function, and its `stacklevel` there.

    Frames of LIBRARIES do not count: they call on behalf of others.
    """
    # A thread may begin with the method, without any frame around it.
    first = sys._getframe(2).f_back or sys._getframe(2)
    for level, (frame, _) in enumerate(walk_stack(first), 3):
        if is_inside(file := frame.f_code.co_filename) or not file.startswith(LIBRARIES):
            return frame, level
    # All frames are of libraries where the user's program is installed as one.
    return first, 3
