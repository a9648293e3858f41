"""Executed notebooks as MyST Markdown: their cells, and the outputs that are stored in them. Nothing is run."""

from __future__ import annotations

import re
from typing import Any


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook, and the outputs that are stored in it, as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # A badge is a link whose text is a picture of another host, which the site does not load.
            parts.append(re.sub(r"\[!\[([^\]]*)\]\(https?:[^)]*\)\]", r"[\1]", source))
        elif cell["cell_type"] == "code" and source.strip():
            parts += [_fenced("python", source), *map(_output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _printed("".join(output["text"]))
    if output["output_type"] == "error":
        return _printed(re.sub(r"\x1b\[[\d;]*m", "", "\n".join(output["traceback"])))
    data = output["data"]
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return f"![Output of the code above](data:{kind};base64,{''.join(''.join(data[kind]).split())})"
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return _fenced("{raw} html", "".join(data[kind]))
    return _printed("".join(data["text/plain"]))


def _printed(text: str) -> str:
    return _fenced("{code-block} text\n:class: output\n", text)


def _fenced(language: str, text: str) -> str:
    """Return a fenced block whose fence is longer than any in the text."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
