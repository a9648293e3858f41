"""`tools/gpu_check.sh`, from its first part to its summary: on the stand-in for CuPy, and without any GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def run_check(out: Path, python: str = sys.executable, **environment: str) -> tuple[int, list[str]]:
    """Run the script; return its exit code and the lines of its summary."""
    kept = {name: value for name, value in os.environ.items() if name != "SIMPARALLEL_STAND_IN"}
    command = ["bash", str(TOOLS / "gpu_check.sh"), str(out)]
    ended = subprocess.run(
        command, env=kept | {"PYTHON": python} | environment, capture_output=True, text=True, timeout=110
    )
    lines = (out / "summary.txt").read_text().splitlines()
    assert ended.stdout.endswith("\n".join(lines) + "\n")
    assert len(lines) <= 40
    return ended.returncode, lines


@pytest.mark.documents
def test_check_ends_on_the_stand_in(tmp_path: Path) -> None:
    code, lines = run_check(tmp_path, SIMPARALLEL_STAND_IN="stand_in.strict")
    assert code == 0, lines
    assert sum(", right; " in line for line in lines) == 4
    assert sum("done in" in line for line in lines) == 4
    assert sum("skipped: a stand-in computes" in line for line in lines) == 3
    assert any("LeNet-5" in line and "Conv2d" in line for line in lines)
    assert not (tmp_path / "config").exists()


@pytest.mark.documents
def test_failed_parts_are_named(tmp_path: Path) -> None:
    """With a Python that fails, the parts are tried one by one, and each is named."""
    code, lines = run_check(tmp_path, python="false")
    assert code == 1
    assert [line.split()[0] for line in lines if "FAILED" in line] == [
        "doctor", "captured", "ranks", "where", "calibration", "steps",
    ]  # fmt: skip


@pytest.fixture
def programs() -> Any:
    spec = spec_from_file_location("gpu_programs", TOOLS / "gpu_programs.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("found", [1.001, np.nan])
def test_wrong_values_fail(programs: Any, found: float) -> None:
    one = [np.ones(3)]
    assert programs.tell("step", one, one, "")
    assert not programs.tell("step", [np.array([1, 1, found])], one, "")
