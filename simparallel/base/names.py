"""Look things up by name; the error for an unknown name suggests similar ones. Show names of users safely."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from simparallel.errors import UnknownNameError

T = TypeVar("T")


def printable(text: str) -> str:
    """Return a text with control characters and lone surrogates as escapes, such as \\x1b; tabs and line ends stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else repr(c)[1:-1] for c in text)


def find(known: Mapping[str, T], name: str, room: str, kind: str) -> T:
    """Return the value of a name.

    Args:
        known: name -> value.
        name: the name.
        room: module of `names()`, which lists them, for the error.
        kind: word for one of them, such as "exercise", for the error.

    Raises:
        UnknownNameError: there is no such name.
    """
    if name in known:
        return known[name]
    near = get_close_matches(str(name), known, 3, 0.4)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UnknownNameError(f"{room}: there is no {kind} {name!r}. {hint}{room}.names() lists all {len(known)}.")
