"""The README's code runs and keeps its promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import simparallel

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "docs" / "running.md").read_text()
((BLOCK, SHOWN),) = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", README, re.DOTALL)


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.process
def test_block_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCK)
    done = run_in(tmp_path, sys.executable, "-W", "error", "block.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == SHOWN
    assert (tmp_path / "train.html").stat().st_size > 0


def test_shown_prediction_is_that_of_its_page() -> None:
    """`docs/prediction.md` runs the program; the README shows the first lines of its table."""
    (table,) = re.findall(r"```\n(64 x a100.*?)```", README, re.DOTALL)
    assert table in (ROOT / "docs" / "prediction.md").read_text()


@pytest.mark.process
def test_script_runs_on_four_devices(tmp_path: Path) -> None:
    """The script of the page on running, and the output shown below it."""
    found = re.search(r"```python\n(# train\.py\n.*?)```.*?\n```\n(\[rank.*?)```", RUNNING, re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(found.group(1))
    done = run_in(tmp_path, sys.executable, "-m", "simparallel", "run", "-n", "4", "train.py")
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("[rank"))
    assert told == found.group(2).splitlines()
    done = run_in(tmp_path, sys.executable, "-m", "simparallel", "trace", "runs/train/trace.json")
    assert "4 x a100" in done.stdout


@pytest.mark.process
def test_shown_error_text_is_right(tmp_path: Path) -> None:
    """The example of a mismatch in the README and the page on failures, made again."""
    (tmp_path / "train.py").write_text(
        "import numpy as np\nimport simparallel as sp\n\nsp.init()\n\n"
        "def step():\n    sp.all_reduce(np.ones(20 if sp.get_rank() == 0 else 10))\n\nstep()\n"
    )
    done = run_in(tmp_path, sys.executable, "-m", "simparallel", "run", "-n", "2", "train.py")
    assert done.returncode == 1
    told = done.stderr.replace("rank 1 of 2 failed", "rank 0 of 2 failed")  # either rank may notice first
    for text in (README, (ROOT / "docs" / "when_it_fails.md").read_text()):
        shown = re.search(r"```\n(rank 0 of 2 failed.*?)\n```", text, re.DOTALL)
        assert shown is not None
        assert shown.group(1) in told


def test_shown_plan_is_right() -> None:
    call, shown = re.search(r"`(sp\.ops\.MatMul.*?)`.*?```\n(.*?)```", README, re.DOTALL).groups()  # type: ignore[union-attr]
    assert shown in f"{eval(call, {'sp': simparallel})}\n"


def test_shown_schedule_is_right() -> None:
    assert str(simparallel.pipeline_schedule("zb_h1", 3, 4)) in README


def test_commands_match_ci() -> None:
    section = README.split("## Install and run")[1]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    assert block.group(1).splitlines() == ["pip install . && simparallel demo", 'pip install ".[test]" && pytest']
