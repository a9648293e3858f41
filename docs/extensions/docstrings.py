"""Docstrings of this project (sections as Google's, prose as Markdown) as MyST Markdown for the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Warns|Example|Cost):[ \t]*$", re.MULTILINE)
LISTS = ("Args", "Attributes", "Raises", "Warns")
ITEM = re.compile(r"^(?P<names>\S.*?):\s", re.MULTILINE)
# "x: (N, C, H, W)": a name and its shape, among others on the line, three spaces apart.
SHAPE = re.compile(r"\b[a-z]\w*: \([^()]*(?:\([^()]*\)[^()]*)*\)(?: or \([^()]*\))*")
FORMULA = re.compile(r"^[\w\[\], ()']+ = \S")


def sections(text: str) -> list[tuple[str, str]]:
    """Return (title, text) of the parts of a docstring, in order; the prose before a section has the title ""."""
    parts = SECTION.split(text)
    found = [("", parts[0].strip())]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        inside, outside = _split_at_margin(body)
        found.append((title, dedent(inside).strip()))
        if outside:
            found.append(("", outside))
    return found


def _split_at_margin(body: str) -> tuple[str, str]:
    """Return the indented lines of a section, and the prose at the margin that follows them."""
    after = re.search(r"^\S", body, re.MULTILINE)
    return (body, "") if after is None else (body[: after.start()], body[after.start() :].strip())


def items(text: str) -> Iterator[tuple[str, str]]:
    """Yield (names, text) of each entry of Args, Attributes or Raises."""
    for entry in re.split(r"\n(?=\S)", text):
        match = ITEM.match(f"{entry} ")
        names = match["names"] if match else entry
        yield names, " ".join(entry[len(names) + 1 :].split())


def to_markdown(text: str) -> str:
    """Return the docstring as MyST Markdown: prose, field lists, examples with a prompt as code."""
    fields, blocks = [], []
    for title, body in sections(text):
        if title in LISTS:
            # Only the names of errors become links.
            mark = "" if title in ("Raises", "Warns") else "**"
            entries = [f"  - {mark}`{names}`{mark}: {_escaped(entry)}" for names, entry in items(body)]
            fields.append("\n".join([f":{title}:", *entries]))
        elif title in ("Returns", "Yields"):
            fields.append(f":{title}:\n  {_escaped(' '.join(body.split()))}")
        elif title == "Example":
            blocks.append(_code(body))
        elif title == "Cost":
            blocks.append(f"**Cost:** {_prose(body)}")
        else:
            blocks.append(_prose(body))
    head, rest = blocks[0], blocks[1:]
    return "\n\n".join(block for block in (head, "\n".join(fields), *rest) if block)


def _prose(text: str) -> str:
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", text) if part.strip())


def _paragraph(text: str) -> str:
    if dedent(text).startswith(">>> "):
        return _code(text)
    if text.startswith("    "):
        return _fenced("text", dedent(text))
    if FORMULA.match(text) and "\n" not in text:
        return "\n\n".join(f"`{part.rstrip('.')}`" for part in re.split(r" {3,}", text))
    words = re.sub(
        r"^(Collective|Cost|Source|Two spellings|Order|Memory|Facts?):", r"**\1:**", _escaped(text), flags=re.M
    )
    return re.sub(r" {3,}", "&emsp;", words)


def _code(text: str) -> str:
    return _fenced("pycon", dedent(text).strip("\n"))


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _escaped(text: str) -> str:
    """Keep `<` and `*` from meaning HTML and emphasis, and show shapes as code; code stays as it is."""
    parts = re.split(rf"(`[^`]*`|{SHAPE.pattern})", text)
    parts[::2] = [re.sub(r"([<*_\\])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [part if part.startswith("`") else f"`{part}`" for part in parts[1::2]]
    return "".join(parts)
