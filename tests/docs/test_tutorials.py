"""The tutorials run as scripts, with warnings as errors, and keep their promises."""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
from pathlib import Path

import pytest
from test_readme import ROOT, run_in

TUTORIALS = ROOT / "tutorials"


@pytest.mark.documents
@pytest.mark.process
def test_data_parallel_mnist(tmp_path: Path) -> None:
    """Eight devices on MNIST files: the loss falls from ln 10 as on one device, and every rank writes a log.

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
    assert len(firsts) == 8  # each rank has different samples


@pytest.mark.documents
@pytest.mark.process
def test_operator_parallel(tmp_path: Path) -> None:
    """Both programs on eight devices: the losses of one device, falling from ln 10, and a log of every worker."""
    script = TUTORIALS / "operator_parallel.py"
    program = f"import runpy; print(runpy.run_path({str(script)!r}, run_name='tutorial')['main'](log_dir='logs'))"
    done = run_in(tmp_path, sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout.splitlines()[-1])
    for name in ("tuples", "layouts"):
        assert losses[name] == pytest.approx(losses["alone"], rel=1e-4)
    assert losses["alone"][0] == pytest.approx(math.log(10), abs=0.05)
    assert losses["alone"][-1] < 0.8 * losses["alone"][0]
    for directory in ("logs", "advanced_logs"):
        for rank in range(8):
            text = (tmp_path / directory / f"worker_{rank}.log").read_text()
            assert re.findall(r"^epoch: 0 step: (\d+), loss is 2\.\d+$", text, re.MULTILINE)[:3] == ["0", "10", "20"]
        assert (tmp_path / directory / "scheduler.log").exists()
    assert "x[0:16, 392:588]" in done.stdout  # the table that the tutorial leaves empty


@pytest.mark.documents
@pytest.mark.process
def test_auto_parallel_resnet(tmp_path: Path) -> None:
    """Data parallel and automatic parallel train as one device does, which can continue from a checkpoint of eight."""
    script = TUTORIALS / "auto_parallel_resnet.py"
    program = f"import runpy; print(runpy.run_path({str(script)!r}, run_name='tutorial')['main'](log_dir='logs'))"
    done = run_in(tmp_path, sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout.splitlines()[-1])
    for name in ("data_parallel", "auto_parallel", "continued alone"):
        assert losses[name][:2] == pytest.approx(losses["stand_alone"], rel=1e-3)
    assert sorted(losses["continued alone"], reverse=True) == losses["continued alone"]
    for mode in ("data_parallel", "auto_parallel"):
        for rank in range(8):
            text = (tmp_path / "logs" / mode / f"worker_{rank}.log").read_text()
            assert re.findall(r"^epoch: (\d) step: 5, loss is 2\.\d+$", text, re.MULTILINE) == ["1", "2"]
        assert len(list((tmp_path / "logs" / mode / "CKP").glob("ckpt-*/rank_7.safetensors"))) == 2
    # The tables: a million classes are cut, a thousand are not.
    chosen = re.findall(r"^  chosen +(\(.*\))", done.stdout, re.MULTILINE)
    assert [ast.literal_eval(text.split("  ")[0])[1][0] for text in chosen] == [1, 8]


@pytest.mark.documents
@pytest.mark.process
def test_adasum_resnet(tmp_path: Path) -> None:
    """Two nodes of two devices train a small residual network and stay equal; one node is reported to be a mean."""
    script = TUTORIALS / "adasum_resnet.py"
    for nodes, said in ((2, "parameters of the devices differ by 0"), (4, "plain MEAN")):
        options = f"--net small --epochs 2 --sink-size 8 --batch-size 8 --device-number {nodes}".split()
        done = run_in(tmp_path, sys.executable, str(script), *options)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout + done.stderr
        assert "Starting Training" in done.stdout
        assert re.search(r"epoch: 2 step: 8, loss is \d\.\d+", done.stdout)


@pytest.mark.documents
@pytest.mark.process
def test_adasum_resnet50(tmp_path: Path) -> None:
    """The seed's network and all its settings, for two steps of two nodes: amp O2, loss scale 1024, Adasum."""
    script = TUTORIALS / "adasum_resnet.py"
    options = "--net resnet50 --devices 2 --device-number 1 --image-size 16 --batch-size 4 --sink-size 1"
    options += " --test-images 8"
    done = run_in(tmp_path, sys.executable, str(script), *options.split())
    assert done.returncode == 0, done.stderr
    assert "parameters of the devices differ by 0" in done.stdout
    assert "plain MEAN" not in done.stdout + done.stderr
    assert re.search(r"epoch: 2 step: 1, loss is \d+\.\d+", done.stdout)


def test_adasum_resnet_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, its last cell takes the defaults, not the arguments of the kernel."""
    source = (TUTORIALS / "adasum_resnet.py").read_text()
    cell = 'if __name__ == "__main__":' + source.split('if __name__ == "__main__":')[1].split("# %%")[0]
    calls: list[dict[str, object]] = []
    names = {"__name__": "__main__", "argparse": argparse, "sys": sys, "main": lambda **given: calls.append(given)}
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "/run/kernel.json"])
    monkeypatch.setitem(sys.modules, "ipykernel", ast)
    exec(cell, names)
    assert calls[0]["devices"] == 4
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setattr(sys, "argv", ["adasum_resnet.py", "--devices", "8"])
    exec(cell, names)
    assert calls[1]["devices"] == 8
