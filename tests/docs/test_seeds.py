"""`docs/seeds.md`: every name and every test in it exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "seeds.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if "::test_" in line and line.startswith("|")]
NAMES = sorted(set(re.findall(r"`((?:mindspore|torch)\.[\w.]+)", TABLE)))


RESOLVE = """
import sys
from importlib import import_module
from simparallel.compat import install

for front in ("mindspore", "torch"):
    install(front)
for name in sys.argv[1:]:
    first, *parts = name.split(".")
    found = import_module(first)
    for i, part in enumerate(parts, 1):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join([first, *parts[:i]]))
            except ModuleNotFoundError:
                print(name)
                break
"""


def unknown(*names: str) -> list[str]:
    """Return which of these names are neither modules of a framework's front nor members of one."""
    found = subprocess.run(
        [sys.executable, "-c", RESOLVE, *names], capture_output=True, text=True, check=True, timeout=60
    )
    return found.stdout.split()


def missing(reference: str) -> bool:
    file, _, test = reference.partition("::")
    path = next(TESTS.rglob(file), None)
    return path is None or f"def {test}(" not in path.read_text()


def test_names_exist() -> None:
    assert len(NAMES) > 50
    assert unknown(*NAMES) == []


def test_tests_exist():
    references = re.findall(r"test_\w+\.py::test_\w+", TABLE)
    assert len(references) > 250
    assert [reference for reference in references if missing(reference)] == []


def test_missing_rows_are_found():
    assert missing("test_seeds.py::test_nothing")
    assert missing("test_nothing.py::test_seeds")
    assert unknown("mindspore.nn.Nothing", "torch.nn", "torch.nothing.nn") == [
        "mindspore.nn.Nothing",
        "torch.nothing.nn",
    ]
