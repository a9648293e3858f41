"""`docs/seeds.md`: every name and every test in it exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "seeds.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if "::test_" in line and line.startswith("|")]
NAMES = sorted(set(re.findall(r"`((?:mindspore|torch)\.[\w.]+)", TABLE)))


def resolve(name: str) -> object:
    """Return the object of a dotted name in a framework's front: a module, or a member of one."""
    parts = name.split(".")
    found = import_module(f"simparallel.compat.{parts[0]}")
    for i, part in enumerate(parts[1:], 1):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(f"simparallel.compat.{'.'.join(parts[: i + 1])}")
    return found


def missing(reference: str) -> bool:
    file, _, test = reference.partition("::")
    path = next(TESTS.rglob(file), None)
    return path is None or f"def {test}(" not in path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name):
    assert resolve(name) is not None


def test_tests_exist():
    references = re.findall(r"test_\w+\.py::test_\w+", TABLE)
    assert len(references) > 250
    assert [reference for reference in references if missing(reference)] == []


def test_missing_rows_are_found():
    assert missing("test_seeds.py::test_nothing")
    assert missing("test_nothing.py::test_seeds")
    with pytest.raises(ModuleNotFoundError):
        resolve("mindspore.nn.Nothing")
