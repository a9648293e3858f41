"""The recipes of CONTRIBUTING.md for an algorithm, a schedule and a preset, followed in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simparallel.algorithms import names

ROOT = Path(__file__).parents[2]
TEXT = ROOT.joinpath("CONTRIBUTING.md").read_text()
SECTION = TEXT.partition("## How to add an algorithm, a schedule, a preset")[2].partition("\n## ")[0]
# The name of what is added -> its part of the section.
RECIPES = {part.partition("**")[0]: part for part in SECTION.split("\n**")[1:]}

# The number of the example may be taken by now.
NEXT_NUMBER = len(names())

pytestmark = pytest.mark.documents


def run(command: str, checkout: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *shlex.split(command), "-q", *more],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_recipes_are_found() -> None:
    assert list(RECIPES) == ["An algorithm", "A schedule", "A preset"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_works_as_written(name: str, tmp_path: Path) -> None:
    """Its command passes with the code and its record, and without the record a test fails."""
    for folder in ("simparallel", "tests"):  # compiled: that takes longer than the tests
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("setup.cfg", "pyproject.toml", "pytest_simparallel.py"):
        shutil.copy(ROOT / file, tmp_path)
    (command,) = re.findall(r"^`(pytest .*?)` checks it", RECIPES[name], re.MULTILINE)
    block = re.compile(r"`((?:simparallel|tests)/[\w/]+\.py)`.*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    (code_file, code), (record_file, record) = block.findall(RECIPES[name])
    with tmp_path.joinpath(code_file).open("a") as file:
        file.write("\n\n" + code.replace("number=5)", f"number={NEXT_NUMBER})"))
    words = command.split()
    first = next(number for number, word in enumerate(words) if word.startswith("tests/"))
    without = run(" ".join(words[: first + 1]), tmp_path, "-k", "has_a_record")
    assert "1 failed" in without.stdout, without.stdout
    with tmp_path.joinpath(record_file).open("a") as file:
        file.write(f"\n\n{record}")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout
