"""Texts of errors stand in `tests/golden`, in a file for each folder of tests, and not in the tests.

A test says which error it expects, `with refused(ShapeError, layer="fc1"): ...`. The text must be an entry of the test
in the file of its folder; an entry that the test does not use is a failure, too. `pytest --rewrite-golden` writes the
texts of the tests that it runs, and removes those of tests that no longer exist. The diff is reviewed as prose.

Only the type and the facts are compared in a test of Hypothesis, where the text depends on the example, and on a rank
in a process of its own, which does not have the files.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import simparallel
from simparallel.errors import (
    CollectiveMismatchError,
    DeadlineError,
    DeadlockError,
    RankFailedError,
    RunFailedError,
    SimParallelError,
)

TESTS = Path(__file__).resolve().parent
FOLDER = TESTS / "golden"
HEAD = """\
Texts of errors, as users read them: under the names of the tests that cause an error, its type and its text.
Written by `pytest --rewrite-golden`; review the diff as prose. <tmp>, <line>, <pid> ... stand for what changes.
"""
# What depends on the machine or changes with every run, and its name in the files.
_PLACEHOLDERS = [
    (re.compile(pattern), name)
    for pattern, name in (
        (rf"{re.escape(str(Path(simparallel.__file__).parent))}/", "simparallel/"),
        (rf"{re.escape(str(TESTS.parent))}/", ""),
        (rf"{re.escape(sysconfig.get_path('stdlib'))}/", "<python>/"),
        (rf"{re.escape(str(Path(sys.executable).parent))}/python[\d.]*", "<python>"),
        (rf"{re.escape(tempfile.gettempdir())}/(pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?)?[\w-]+", "<tmp>"),
        (rf"{re.escape(tempfile.gettempdir())}(?![\w/-])", "<tmp>"),
        (r"(?m)^(Traceback of rank \d+) .*\n(.+\n)*.+$", r"\1: <traceback>"),
        (r"(\w\.py):\d+", r"\1:<line>"),
        (r"\b(pid|process) \d+", r"\1 <pid>"),
        (r"\b0x[0-9a-f]{6,}", "<address>"),
        (r"cannot pickle '(?:\w+\.)*(\w+)' (?:object|instances)", r"cannot pickle '\1' object"),  # by Python's version
        (r"(too many values to unpack \(expected \d+), got \d+", r"\1"),
        (r"(cannot be read as tar\.gz: ).*", r"\1<the reason>."),
        (r"(\d\.\d\d\d)\d{3,}", r"\1..."),
        (r"(.{2,24}?)\1{15,}", r"\1..."),
    )
]


def rendered(error: BaseException) -> str:
    """Return an entry: type and text, placeholders for what changes, lines of up to 116 characters."""
    text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", lambda found: repr(found[0])[1:-1], text)  # control characters
    for pattern, name in _PLACEHOLDERS:
        text = pattern.sub(name, text)
    wrap = textwrap.TextWrapper(110, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    lines = [part for line in text.rstrip().splitlines() for part in wrap.wrap(line.rstrip()) or [""]]
    return "\n".join([lines[0], *(f"  {line}".rstrip() for line in lines[1:])])


class Golden:
    """The files, and the running test's part in them. Entries belong to tests: "optim/test_sgd.py::test_x[case]".

    Attributes:
        entries: test -> its texts, sorted.
        written: texts of the tests that have run, when the files are to be rewritten.
        gone: tests that have entries but no longer exist, of the files that were collected.
    """

    def __init__(self, folder: Path, rewrite: bool = False) -> None:
        self.folder, self.rewrite = folder, rewrite
        self.entries: dict[str, list[str]] = {}
        for file in sorted(folder.rglob("*.txt")):
            self.entries |= parse(file.read_text("utf-8"))
        self.written: dict[str, list[str]] = {}
        self.gone: set[str] = set()
        self._test: str | None = None
        self._seen: set[str] = set()

    @contextmanager
    def of(self, test: str) -> Iterator[None]:
        """Compare the texts of `test`, which runs inside. Unused entries fail at the end."""
        self._test, self._seen = test, set()
        try:
            yield
        finally:
            self._test = None
        if self.rewrite:
            self.written[test] = sorted(self._seen)
        elif unused := set(self.entries.get(test, ())) - self._seen:
            raise AssertionError(f"{test} no longer causes\n{_indented(unused)}\n{self._way_out(test)}")

    def compare(self, error: BaseException) -> None:
        from hypothesis import currently_in_test_context  # not above: ranks import this file

        if self._test is None or currently_in_test_context():
            return
        text = rendered(error)
        self._seen.add(text)
        expected = self.entries.get(self._test, [])
        if not self.rewrite and text not in expected:
            old = difflib.get_close_matches(text, expected, 1, 0) or [""]
            changes = "\n".join(difflib.ndiff(old[0].splitlines(), text.splitlines()))
            file = file_of(self._test)
            raise AssertionError(f"another text than in golden/{file}:\n{changes}\n{self._way_out(self._test)}")

    def _way_out(self, test: str) -> str:
        return f'If this is right, run: pytest -n 0 --rewrite-golden "tests/{test}", and review the diff.'

    def collected(self, tests: Iterable[str], whole: Iterable[str]) -> None:
        """Find entries whose tests are gone: not in `tests`, although `whole` files were collected."""
        tests, whole = set(tests), set(whole)
        for test in self.entries.keys() - tests:
            file = test.split("::")[0]
            if file in whole or not (TESTS / file).exists():
                self.gone.add(test)

    def save(self) -> None:
        """Write the files anew whose texts have changed."""
        files: dict[str, dict[str, list[str]]] = {}
        for test in self.entries.keys() | self.written.keys():
            texts = [] if test in self.gone else self.written.get(test, self.entries.get(test, []))
            files.setdefault(file_of(test), {})[test] = texts
        for name, entries in files.items():
            file, text = self.folder / name, formatted(entries)
            if not any(entries.values()):
                file.unlink(missing_ok=True)
            elif not file.exists() or file.read_text("utf-8") != text:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text.encode())


def file_of(test: str) -> str:
    """Return the name of the file that has a test's entry: that of its folder, "parallel/ddp.txt"."""
    return f"{test.split('::')[0].rpartition('/')[0] or 'tests'}.txt"


def _indented(texts: Iterable[str]) -> str:
    return "\n".join(textwrap.indent(text, "    ") for text in sorted(texts))


def formatted(entries: dict[str, list[str]]) -> str:
    """Return a file: sorted by test; tests of one file that cause the same texts share them."""
    files: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for test in sorted(test for test, texts in entries.items() if texts):
        file, name = test.split("::", 1)
        files.setdefault(file, {}).setdefault(tuple(entries[test]), []).append(name)
    parts = [HEAD]
    for file, groups in files.items():
        parts.append(f"\n\n=== {file}\n")
        parts += ["\n" + "\n".join(names) + f"\n{_indented(texts)}\n" for texts, names in groups.items()]
    return "".join(parts)


def parse(text: str) -> dict[str, list[str]]:
    """Return the entries of a file that `formatted` wrote."""
    entries: dict[str, list[str]] = {}
    for part in text.split("\n\n\n=== ")[1:]:
        file, rest = part.split("\n", 1)
        for block in re.split(r"\n\n(?=\S)", rest):
            names, texts = re.fullmatch(r"((?:\S.*\n)+)((?:    .*\n|\n)*)", block.strip("\n") + "\n").groups()
            found = re.split(r"\n(?=\S)", textwrap.dedent(texts).rstrip("\n"))
            entries |= {f"{file}::{name}": found for name in names.splitlines()}
    return entries


golden: Golden | None = None  # of this session; None in processes of ranks


def check_refusal(error: BaseException | None, kind: type[BaseException], **facts: Any) -> None:
    """Compare an error with the type and facts that a test expects, and its text with the golden files.

    Of an error that a rank raised, the files have the text alone, without the launcher's part; and nothing where it is
    chance which ranks had come to wait, or which text another rank's error has in a rank that it stopped.
    """
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
    found = {name: getattr(error, name, "no such fact") for name in facts}
    assert found == facts
    while isinstance(error, RunFailedError) and isinstance(error.__cause__, SimParallelError):
        run, error = error, error.__cause__
        others = "Failed in the same way" in str(run) or "Also failed, later" in str(run)
        is_of_one = others and f"rank {run.rank}" in str(error)
        if isinstance(error, (DeadlineError, DeadlockError, RankFailedError)):
            return
        # It is chance which of several ranks was the first to fail.
        if is_of_one and not isinstance(error, CollectiveMismatchError):
            error = type(error)(str(error).replace(f"rank {run.rank}", "rank <rank>"))
    if golden is not None and "Failed in the same way" not in str(error):
        golden.compare(error)


class refused:
    """Expect an error of just this type, like `pytest.raises`, with these facts and the text of the golden files."""

    def __init__(self, kind: type[BaseException], **facts: Any) -> None:
        self._kind, self._facts = kind, facts
        self._raises = pytest.raises(kind)

    def __enter__(self) -> pytest.ExceptionInfo[Any]:
        return self._raises.__enter__()

    def __exit__(self, *error: Any) -> bool:
        is_expected = self._raises.__exit__(*error)
        if is_expected:
            check_refusal(error[1], self._kind, **self._facts)
        return is_expected


@cache
def _lambdas(path: str) -> list[tuple[int, tuple[int, int], str]]:
    """Return the lambdas of a file: the line, the place of the first character of the body, and the body."""
    # Not by `ast.get_source_segment`, which splits the file into lines for each of them. Columns count bytes.
    lines = Path(path).read_bytes().splitlines(keepends=True)
    found = []
    for node in ast.walk(ast.parse(b"".join(lines))):
        if isinstance(node, ast.Lambda):
            body = node.body
            *others, last = lines[body.lineno - 1 : body.end_lineno]
            text = b"".join((*others, last[: body.end_col_offset]))[body.col_offset :]
            found.append((node.lineno, (body.lineno, body.col_offset), text.decode()))
    return found


def source_of_lambda(function: Any) -> str | None:
    """Return the source of a lambda's body on one line, shortened; None if it cannot be found."""
    code = function.__code__
    places = {(line, column) for line, _, column, _ in code.co_positions() if line and column is not None}
    lambdas = _lambdas(code.co_filename)
    # Python 3.12 has no place for a body that is a constant.
    of_line = [text for line, _, text in lambdas if line == code.co_firstlineno]
    found = [text for _, place, text in lambdas if place in places] or of_line * (len(of_line) == 1)
    return textwrap.shorten(max(found, key=len), 60, placeholder=" ...") if found else None
