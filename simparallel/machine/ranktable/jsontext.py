"""JSON with the line of each value, and warnings about tolerated deviations from it.

Rank tables are written by hand, and published ones have trailing commas. `json` parses them once deviations are blanked
out. It reports no lines of values, silently keeps the last of two equal keys and accepts NaN; the tokens of the text,
which are in the order of its values, give the lines. Limits bound time and memory for any file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from simparallel.base.files import read_limited
from simparallel.errors import ClusterError, SimParallelError

# The worst file of this size takes half a second.
MAX_BYTES = 1 << 19
# `json` recurses, and `int` takes time that grows with the square of the digits.
MAX_DEPTH = 64
MAX_DIGITS = 30

# A comment, a string, a mark, or a number or word. Possessive quantifiers (++) never give back what they matched, so no
# text makes the match slower than linear.
_TOKEN = re.compile(r'//[^\n]*+|"(?:[^"\\\n]++|\\.)*+"?|[{}\[\],:]|[^\s{}\[\],:"/]++|/')
# Half of a pair, which an escape may name.
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_file(name: str, error: type[SimParallelError] = ClusterError, **facts: Any) -> bytes:
    """Return the contents of a file of at most MAX_BYTES. Raise `error` if it cannot be read."""
    try:
        return read_limited(name, MAX_BYTES)
    except OSError as found:
        raise error(f"{name}: cannot be read: {found.strerror or found}.", path=name, line=None, **facts) from None


def shown(value: Any) -> str:
    """Return a JSON value as text for a message, cut after 60 characters."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(eq=False, repr=False, slots=True)
class JsonNode:
    """A value, the line where it begins, and its place in the object or array around it, which is a node, too."""

    value: Any
    line: int
    around: JsonNode | None = None
    key: str | int = ""

    @property
    def where(self) -> str:
        """The path of the value, such as "server_list[0].device"; "" for that of the whole text."""
        outer = self.around.where if self.around else ""
        if isinstance(self.key, int):
            return f"{outer}[{self.key}]"
        return f"{outer}.{self.key}" if outer else self.key

    def located(self, path: str, text: str, line: int = 0) -> str:
        """Return a text about the value with its path before it, and its line or another one, if known."""
        line, where = line or self.line, self.where
        place = f"{path}:{line}" if line else path
        return f"{place}: {where}: {text}" if where else f"{place}: {text}"


class JsonError(ValueError):
    """The text cannot be read."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class _Members(list[tuple[str, Any]]):
    """The members of an object, with all members of equal keys."""


def parse(data: bytes, warn: Callable[[int, str], None]) -> JsonNode:
    """Parse `data`.

    Args:
        data: UTF-8, at most `MAX_BYTES`.
        warn: called with line and text for each tolerated deviation: a byte order mark, comments from // to the end of
            the line, a comma before a closing bracket.

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
    deviations = []
    if text.startswith("\ufeff"):
        deviations.append((1, "a byte order mark is not JSON; left out"))
        text = text[1:]
    text, tokens = _cleaned(text, deviations)
    try:
        # `_node` refuses longer integers.
        value = json.loads(
            text, object_pairs_hook=_Members, parse_int=lambda digits: int(digits[:MAX_DIGITS]), parse_constant=str
        )
    except json.JSONDecodeError as error:
        raise JsonError(error.lineno, f"is not JSON: {error.msg}: column {error.colno}") from None
    for deviation in deviations:
        warn(*deviation)
    return _node(value, iter(tokens))


def _cleaned(text: str, deviations: list[tuple[int, str]]) -> tuple[str, list[tuple[int, str]]]:
    """Blank out deviations; return (line, token) of each opening bracket, string, number and word, too."""
    characters, tokens = list(text), []
    line, end, depth, comma = 1, 0, 0, (0, 0)
    before = last = ""
    for match in _TOKEN.finditer(text):
        token, start = match[0], match.start()
        line += text.count("\n", end, start)
        end = match.end()
        if token.startswith("//"):
            deviations.append((line, "comments are not JSON; left out"))
            characters[start:end] = " " * len(token)
            continue
        depth += (token in "{[") - (token in "}]")
        if depth > MAX_DEPTH:
            raise JsonError(line, f"is nested deeper than {MAX_DEPTH} levels")
        if token in "}]" and last == "," and before not in "{[,:":
            deviations.append((comma[0], f"a comma before {token} is not JSON; left out"))
            characters[comma[1]] = " "
        if token == ",":
            comma = line, start
        elif token not in "}]:":
            tokens.append((line, token))
        before, last = last, token
    return "".join(characters), tokens


def _node(
    value: Any, tokens: Iterator[tuple[int, str]], around: JsonNode | None = None, key: str | int = ""
) -> JsonNode:
    """Return a value with the lines of its tokens, the next ones of `tokens`."""
    line, token = next(tokens)
    node = JsonNode(value, line, around, key)
    if isinstance(value, _Members):
        members: dict[str, JsonNode] = {}
        node.value = members
        for name, item in value:
            name_line = _node(name, tokens).line
            if name in members:
                raise JsonError(name_line, f"key {ascii(name)} appears twice, first in line {members[name].line}")
            members[name] = _node(item, tokens, node, name)
    elif isinstance(value, list):
        node.value = [_node(item, tokens, node, i) for i, item in enumerate(value)]
    elif isinstance(value, str):
        if token[0] != '"' or _SURROGATE.search(value):
            raise JsonError(
                line,
                f"{ascii(token[:40])} is not a JSON value; use finite numbers, null, and text without lone surrogates",
            )
    elif len(token) > MAX_DIGITS:
        raise JsonError(line, f"number {token[:10]}... has more than {MAX_DIGITS} digits")
    return node
