"""Whose call it was: the innermost frame outside of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parent) + os.sep
_BENCH = _PACKAGE + "bench" + os.sep  # its programs are in the place of a user's


def is_inside(file: str) -> bool:
    """Whether code of this file belongs to the package, so that its caller is meant."""
    return file.startswith(_PACKAGE) and not file.startswith(_BENCH)


def user_line() -> str:
    """ "file:line" of the user's line; "" where the package runs alone."""
    frame, _ = _user_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_level() -> int:
    """`stacklevel` that makes the user's line the place of a warning; for the function that warns."""
    return _user_frame()[1]


def _user_frame() -> tuple[FrameType | None, int]:
    """The frame, and how many calls it is above the one that asks for its line or level."""
    frame: FrameType | None = sys._getframe(1)
    level = 0
    while frame is not None and is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level
