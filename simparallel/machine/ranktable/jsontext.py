"""A JSON parser that knows the line of every value and warns about tolerated deviations from JSON.

Rank tables are written by hand, and published ones have trailing commas. The standard parser reports no
lines, silently keeps the last of two equal keys and accepts NaN. Limits bound time and memory for any file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# The worst file of this size takes half a second.
MAX_BYTES = 1 << 19
# The parser recurses, and `int` takes time that grows with the square of the digits.
MAX_DEPTH = 64
MAX_DIGITS = 30


# Possessive quantifiers (++) never give back what they matched, so no text makes the match slower than linear.
_TOKEN = re.compile(
    r'(?P<space>[ \t\r\n]++)|(?P<comment>//[^\n]*+)|(?P<string>"(?:[^"\\\x00-\x1f]++|\\.)*+")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)|(?P<word>[A-Za-z_]++)|(?P<mark>[{}\[\],:])"
)
_WORDS = {"true": True, "false": False, "null": None}


class Node(NamedTuple):
    """A value and the line where it begins. Members of objects and arrays are nodes, too."""

    value: Any
    line: int


class Problem(NamedTuple):
    """A problem and its line."""

    line: int
    text: str


class JsonError(ValueError):
    """The text cannot be read."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def parse(data: bytes, warn: Callable[[Problem], None]) -> Node:
    """Parse `data`.

    Args:
        data: UTF-8, at most `MAX_BYTES`.
        warn: called for each tolerated deviation: a byte order mark, comments from // to the end of the line, a
            comma before a closing bracket.

    Raises:
        JsonError: any other deviation from JSON, or a file beyond the limits.
    """
    if len(data) > MAX_BYTES:
        raise JsonError(1, f"has more than {MAX_BYTES} bytes, the most that is read")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JsonError(line, f"is not UTF-8: byte 0x{data[error.start]:02x}") from None
    if text.startswith("\ufeff"):
        warn(Problem(1, "a byte order mark is not JSON; left out"))
        text = text[1:]
    return _Parser(text, warn).whole()


class _Parser:
    def __init__(self, text: str, warn: Callable[[Problem], None]) -> None:
        self._warn = warn
        self._tokens = self._split(text)
        self._advance()

    def whole(self) -> Node:
        node = self._value(0)
        if self._kind != "end":
            raise JsonError(self._line, f"the value ends here, but {self._shown()} follows")
        return node

    def _split(self, text: str) -> Iterator[tuple[str, str, int]]:
        """Yield (kind, text, line) of each token."""
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                what = "a text that is not closed in its line" if text[at] == '"' else ascii(text[at])
                raise JsonError(line, f"{what} is not JSON")
            kind, at = match.lastgroup or "", match.end()
            # Only white space has line breaks: texts may not contain them, and a comment ends before them.
            if kind == "space":
                line += match[0].count("\n")
            elif kind == "comment":
                self._warn(Problem(line, "comments are not JSON; left out"))
            else:
                yield kind, match[0], line
        yield "end", "", line

    def _advance(self) -> None:
        self._kind, self._text, self._line = next(self._tokens)

    def _shown(self) -> str:
        text = self._text if len(self._text) <= 40 else self._text[:37] + "..."
        return ascii(text) if self._kind != "end" else "the end of the file"

    def _value(self, depth: int) -> Node:
        kind, text, line = self._kind, self._text, self._line
        if text in ("{", "[") and kind == "mark":
            if depth == MAX_DEPTH:
                raise JsonError(line, f"is nested deeper than {MAX_DEPTH} levels")
            self._advance()
            return Node(self._members(depth) if text == "{" else self._items(depth), line)
        if kind == "string":
            value: Any = self._decoded()
        elif kind == "number":
            if len(text) > MAX_DIGITS:
                raise JsonError(line, f"number {text[:10]}... has more than {MAX_DIGITS} digits")
            # As in `json`: a number with a fraction or an exponent is a float.
            value = float(text) if set(text) & set(".eE") else int(text)
        elif kind == "word" and text in _WORDS:
            value = _WORDS[text]
        else:
            raise JsonError(line, f"a value is expected, not {self._shown()}")
        self._advance()
        return Node(value, line)

    def _decoded(self) -> str:
        try:
            text: str = json.loads(self._text)
            # Raises UnicodeEncodeError, a ValueError, for a lone surrogate.
            text.encode()
        except ValueError:
            raise JsonError(self._line, f"{self._shown()} has an escape that is not a character") from None
        return text

    def _items(self, depth: int) -> list[Node]:
        items: list[Node] = []
        while not self._closes("]", bool(items)):
            items.append(self._value(depth + 1))
        return items

    def _members(self, depth: int) -> dict[str, Node]:
        members: dict[str, Node] = {}
        while not self._closes("}", bool(members)):
            if self._kind != "string":
                raise JsonError(self._line, f'a "key" is expected, not {self._shown()}')
            key, line = self._decoded(), self._line
            if key in members:
                raise JsonError(line, f"key {ascii(key)} appears twice, first in line {members[key].line}")
            self._advance()
            if (self._kind, self._text) != ("mark", ":"):
                raise JsonError(self._line, f"a : is expected after {ascii(key)}, not {self._shown()}")
            self._advance()
            members[key] = self._value(depth + 1)
        return members

    def _closes(self, bracket: str, has_before: bool) -> bool:
        """Consume a comma between two members, or the closing bracket; return whether it was the bracket."""
        # A trailing comma is tolerated, so first consume the comma and then look for the bracket.
        comma = self._line if has_before and (self._kind, self._text) == ("mark", ",") else 0
        if comma:
            self._advance()
        if (self._kind, self._text) == ("mark", bracket):
            if comma:
                self._warn(Problem(comma, f"a comma before {bracket} is not JSON; left out"))
            self._advance()
            return True
        if has_before and not comma:
            raise JsonError(self._line, f"a comma or {bracket} is expected, not {self._shown()}")
        return False
