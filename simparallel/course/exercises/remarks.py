"""Remarks about answers, in English and in Chinese.

A judge returns a `Remark`, which is its English text; plain texts are shown as they are in every language. Labels and
the names of parameters are those of the picture, which is in English: Matplotlib has no Chinese font.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# The template in English -> in Chinese.
CHINESE: dict[str, str] = json.loads(Path(__file__).with_name("remarks_zh.json").read_text("utf-8"))


class Remark(str):
    """A text in English that can be translated: a template as for `str.format`, with its arguments."""

    def __new__(cls, template: str, *arguments: Any) -> Remark:
        made = super().__new__(cls, template.format(*arguments))
        made._parts = template, *arguments
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self._parts

    _parts: tuple[Any, ...]


def translated(text: str, language: str) -> str:
    """Return a text in a language, "en" or "zh"; a plain text, or one that is in no table, as it is."""
    if language == "en" or not isinstance(text, Remark) or text._parts[0] not in CHINESE:
        return str(text)
    template, *arguments = text._parts
    return CHINESE[template].format(*(translated(x, language) if isinstance(x, str) else x for x in arguments))


def language_of(text: str | None) -> str:
    """Return "zh" for a text with Chinese characters, else "en"."""
    return "zh" if re.search("[\u4e00-\u9fff]", text or "") else "en"
