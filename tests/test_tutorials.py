"""The tutorials run as scripts, warnings being errors, and what they promise is what happens."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from test_readme import ROOT, run_in

TUTORIALS = ROOT / "tutorials"


@pytest.mark.process
def test_data_parallel_mnist(tmp_path: Path) -> None:
    """Eight devices on MNIST files: from ln 10 downwards, as one device does, with a line in every rank's log.

    The tutorial itself asserts that Model makes the same steps, and how near one device is.
    """
    script = TUTORIALS / "data_parallel_mnist.py"
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='tutorial')['main'](log_dir='logs')"
    done = run_in(tmp_path, sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "differences of parameters: between ranks 0," in done.stdout
    firsts = set()
    for rank in range(8):
        text = (tmp_path / "logs" / f"worker_{rank}.log").read_text()
        lines = re.findall(r"^epoch: (\d+) step: (\d+), loss is (\d\.\d+)$", text, re.MULTILINE)
        steps = [(int(epoch), int(step)) for epoch, step, _ in lines]
        assert steps[:12] == [(epoch, step) for epoch in range(6) for step in (0, 10)]
        losses = [float(loss) for _, _, loss in lines[:12]]
        assert f"{losses[0]:.1f}" == "2.3"
        assert losses[-1] < 0.5 * losses[0]
        firsts.add(losses[0])
    assert len(firsts) == 8  # each rank has samples of its own
