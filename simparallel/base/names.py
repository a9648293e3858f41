"""Look things up by name; the error for an unknown name suggests similar ones. Show names of users safely."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from simparallel.errors import UnknownNameError

T = TypeVar("T")


def printable(text: str) -> str:
    """Return a text with control characters and lone surrogates as escapes, such as \\x1b; tabs and line ends stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\t\n" else repr(c)[1:-1] for c in text)


def find(known: Mapping[str, T], name: str, module: str, kind: str) -> T:
    """Return the value of a name.

    Args:
        known: name -> value.
        name: the name.
        module: name of the module whose `names()` lists them, for the error.
        kind: word for one of them, such as "exercise", for the error.

    Raises:
        UnknownNameError: there is no such name.
    """
    if name in known:
        return known[name]
    hint = did_you_mean(str(name), known)
    raise UnknownNameError(f"{module}: there is no {kind} {name!r}.{hint} {module}.names() lists all {len(known)}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean x or y?" for the known names similar to `name`, to be appended to an error; "" for none.

    Similar are names that contain it or that it contains, such as dgx-h100 for h100; without one, those spelt alike.
    """
    plain: dict[str, str] = {}
    for word in known:
        plain.setdefault(_plain(word), word)
    asked = _plain(name)
    near = [asked] if asked in plain else []
    near = near or sorted((x for x in plain if len(asked) > 1 and asked in x or len(x) > 2 and x in asked), key=len)
    near = near[:3] or get_close_matches(asked, plain, 3, 0.7)
    return f" Did you mean {' or '.join(plain[x] for x in near)}?" if near else ""


def _plain(name: str) -> str:
    return name.strip("-").replace("_", "-").casefold()
