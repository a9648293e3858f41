"""The API of the site: every public name is documented once, and its docstring says what a caller has to know."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest
from test_readme import ROOT

import simparallel as sp
from simparallel.errors import SimParallelError

sys.path.append(str(ROOT / "docs" / "extensions"))
import api_pages
import docstrings
from public_names import main_names, main_path, public_names

THINGS = {
    name.path: name.thing for name in main_names() if inspect.isclass(name.thing) or inspect.isroutine(name.thing)
}
VERBS = re.compile(r"^(?!(?:A|An|The|This|Returns?s)\b)[A-Z]\w*(?:[^s\W]|ss)\b")
FORMULA = re.compile(r"^[-\w(|].* [=+*-] ")
# A quantity whose name has no unit, such as `latency_s` has.
QUANTITY = re.compile(r"(^|_)(time|times|latency|bandwidth|timeout|delay|interval|memory|message|memory_limit)$")
UNIT = re.compile(
    r"bytes?\b|[kMGT]i?B\b|seconds?\b|\[\w+\]|\bunit\b|\bas\b|\bsee\b|micro-batches|steps|Results.memory|B/s"
)


def text_of(thing: Any) -> str:
    """Return the docstring; "" if it has none of its own."""
    return inspect.getdoc(thing) or "" if thing.__doc__ else ""


@cache
def by_last_part() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for path, thing in THINGS.items():
        found.setdefault(path.rpartition(".")[2], []).append(thing)
    return found


def told(thing: Any, seen: set[int] | None = None) -> str:
    """Return the docstring and those of the public names that it refers to, such as `Conv2d` for `conv2d`."""
    seen = set() if seen is None else seen
    seen.add(id(thing))
    texts = [text_of(thing)]
    for word in re.findall(r"`(?:\w+\.)*(\w+)(?:\(\))?`", texts[0]):
        texts += [told(other, seen) for other in by_last_part().get(word, ()) if id(other) not in seen]
    return "\n".join(texts)


def unexplained(thing: Any) -> list[str]:
    """Return the parameters that neither the docstring nor one that it refers to mentions."""
    if api_pages.MADE.search(text_of(thing)):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in inspect.signature(thing).parameters.values() if p.kind not in kinds]
    words = set(re.findall(r"\w+", told(thing)))
    return [name for name in named if not name.startswith("_") and name not in words]


def unnamed_errors(thing: Any) -> list[str]:
    """Return the errors of this package that the body raises, and that no docstring mentions."""
    code = thing.__init__ if inspect.isclass(thing) else inspect.unwrap(thing)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return []
    text = told(thing)
    ours = {cls.__name__ for cls in by_class(SimParallelError)}
    return sorted(name for name in set(re.findall(r"\braise (\w+)\(", source)) & ours if name not in text)


def by_class(cls: type) -> list[type]:
    return [cls, *(other for child in cls.__subclasses__() for other in by_class(child))]


def without_unit(text: str) -> list[str]:
    """Return the arguments that are a time or a size, and have a unit neither in their names nor in their text."""
    entries = [
        entry for title, body in docstrings.sections(text) if title == "Args" for entry in docstrings.items(body)
    ]
    return [names for names, told in entries if QUANTITY.search(names) and not UNIT.search(told)]


def is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def test_all_names_are_found() -> None:
    assert {"sp.launch", "sp.nn.Linear", "sp.functions.conv2d", "sp.ops.Conv2d", "sp.nn.init.zeros_"} <= {*THINGS}
    assert len(THINGS) > 600
    assert main_path(sp.train.Callback) == "sp.Callback"


def test_names_are_documented() -> None:
    assert [path for path, thing in THINGS.items() if not text_of(thing)] == []


def test_functions_begin_with_a_verb() -> None:
    first = {path: text_of(thing).partition("\n")[0] for path, thing in THINGS.items() if inspect.isfunction(thing)}
    assert [path for path, line in first.items() if not VERBS.match(line) and not FORMULA.match(line)] == []


def test_arguments_are_explained() -> None:
    called = {path: thing for path, thing in THINGS.items() if not is_error(thing)}
    assert {path: names for path, thing in called.items() if (names := unexplained(thing))} == {}


def test_raised_errors_are_named() -> None:
    assert {path: names for path, thing in THINGS.items() if (names := unnamed_errors(thing))} == {}


def test_quantities_have_units() -> None:
    texts = {path: text_of(thing) for path, thing in THINGS.items()}
    assert {path: names for path, text in texts.items() if (names := without_unit(text))} == {}


def test_undocumented_facts_are_found() -> None:
    """Red controls of the checks above."""

    def wrong(size: int, time: float) -> None:
        """Returns nothing.

        Args:
            time: how long it takes.
        """
        raise SimParallelError("no")

    assert unexplained(wrong) == ["size"]
    assert unnamed_errors(wrong) == ["SimParallelError"]
    assert without_unit(text_of(wrong)) == ["time"]
    assert not VERBS.match(text_of(wrong))
    assert VERBS.match("Pass on.")


def test_every_name_has_one_entry() -> None:
    entries = Counter(
        path
        for page, names in api_pages.pages().items()
        for path in re.findall(
            r"^`+\{py:\w+\} ((?:sp|simparallel)\.[\w.]+)", api_pages.page_text(page, names), re.MULTILINE
        )
    )
    assert entries == Counter(name.path for name in public_names())


def test_op_shows_its_rule_and_source() -> None:
    text = api_pages.page_text("ops/conv", api_pages.pages()["ops/conv"])
    assert "{py:obj}`Rule <sp.ops.Op>`: `n c <h> <w>, o c {kh} {kw}, o -> n o <h> <w>`" in text
    assert re.search(r"\{source\}`simparallel/autograd/ops/conv.py:\d+`", text)


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("Return a_b.   x: (N, a_b)   y: (N,)", "Return a\\_b.&emsp;`x: (N, a_b)`&emsp;`y: (N,)`"),
        ("y = x @ w.   x: (m, k)", "`y = x @ w`\n\n`x: (m, k)`"),
        ("Do.\n\nArgs:\n    a, b: of\n        <i>.", "Do.\n\n:Args:\n  - **`a, b`**: of \\<i>."),
        ("Do.\n\nExample:\n    >>> 1\n    1", "Do.\n\n```pycon\n>>> 1\n1\n```"),
        ("Do.\n\nReturns:\n    A\n    B.\n\nCost: no.", "Do.\n\n:Returns:\n  A B.\n\n**Cost:** no."),
    ],
)  # fmt: skip
def test_docstring_becomes_markdown(text: str, markdown: str) -> None:
    assert docstrings.to_markdown(text) == markdown
