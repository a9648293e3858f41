"""`ps` shows which rank a process is, and what it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import simparallel as sp

pytestmark = pytest.mark.process


def own_title():
    return Path("/proc/self/cmdline").read_bytes().decode().rstrip("\0 ")


def test_functions_are_shown_by_name():
    assert list(sp.launch(own_title, world_size=2, echo=False)) == [
        f"simparallel rank {rank} of 2: own_title" for rank in range(2)
    ]


def test_ps_shows_ranks_by_number_and_script(tmp_path):
    (tmp_path / "train.py").write_text(
        "import simparallel as sp\nfrom pathlib import Path\nsp.init()\n"
        "print(Path('/proc/self/cmdline').read_bytes().decode())\n"
    )
    command = [sys.executable, "-m", "simparallel", "run", "-n", "2", "train.py", "--lr", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "simparallel rank 1 of 2: train.py --lr 1" in ended.stdout, ended.stderr
