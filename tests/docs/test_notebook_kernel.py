"""The lessons as notebooks: their badge, their first cell, and a real kernel that is interrupted or killed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from leaks import MARK, marked, wait_for
from test_lessons import BUILD, LESSONS, TUTORIALS
from test_readme import ROOT

SOURCE = BUILD["source_address"]()
LIMIT_S = 60.0


def stored(name: str) -> list[nbformat.NotebookNode]:
    return nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4).cells


@pytest.mark.parametrize("name", LESSONS)
def test_badge_opens_the_lesson_itself(name: str) -> None:
    (address,) = re.findall(r"\]\((https://colab\.research\.google\.com/github/[^)]*)\)", stored(name)[0].source)
    start = f"{SOURCE.replace('https://github.com', 'https://colab.research.google.com/github')}/blob/main/"
    assert (ROOT / address.removeprefix(start)) == TUTORIALS / f"{name}.ipynb"


@pytest.mark.parametrize("missing", [{"simparallel", "hypothesis", "pytest"}, {"hypothesis"}, set()])
def test_first_cell_installs_what_is_missing(missing: set[str], monkeypatch, capsys) -> None:
    """Nothing where all is there, and no other package. Then it prints one line about the machine."""
    calls: list[list[str]] = []
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    exec(stored("02_collectives")[1].source, {"__name__": "__main__"})
    packages = {"simparallel": f"git+{SOURCE}", "hypothesis": "hypothesis", "pytest": "pytest"}
    command = [sys.executable, "-m", "pip", "install", "-q"]
    assert calls == ([[*command, *(packages[name] for name in packages if name in missing)]] if missing else [])
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ cores, [\d.]+ .B of memory available, ranks are processes, (no|\d+) GPU", line)


# --- a real kernel ----------------------------------------------------------------------------------------

BUSY = """
def busy():
    sp.barrier()
    if sp.get_rank() == 0:
        print("started", flush=True)
    while True:
        sp.barrier()

sp.launch(busy, world_size=3)
"""


class Kernel:
    """An IPython kernel, and what its cells printed and showed."""

    def __init__(self, folder: Path, mark: str) -> None:
        from jupyter_client.manager import KernelManager

        self.mark = mark
        self.manager = KernelManager(kernel_name="python3")
        environment = {MARK: mark, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, **environment})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, code: str, at: str = "", then: Callable[[], None] | None = None) -> tuple[str, str, list[str]]:
        """Run a cell; return its text, the name of its error, and the kinds of what it showed.

        Args:
            code: the cell.
            at, then: when its text contains `at`, `then` is called once.
        """
        self.client.execute(code)
        text, error, kinds, calls = "", "", [], [then] if then else []
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=LIMIT_S)
            kind, content = message["msg_type"], message["content"]
            text += content.get("text", "") if kind == "stream" else ""
            error = content["ename"] if kind == "error" else error
            kinds += content["data"] if kind in ("display_data", "execute_result") else []
            if calls and at in text:
                calls.pop()()
            if kind == "status" and content["execution_state"] == "idle":
                return text, error, kinds


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    pytest.importorskip("ipykernel")
    pytest.importorskip("jupyter_client")
    mark = uuid.uuid4().hex
    found = Kernel(tmp_path, mark)
    yield found
    found.client.stop_channels()
    found.manager.shutdown_kernel(now=True)
    wait_for(lambda: not marked(mark))


@pytest.mark.documents
@pytest.mark.process
def test_interrupted_lesson_leaves_nothing(kernel: Kernel) -> None:
    """The first cells of a lesson, a run that is interrupted, the cells after it, and a kernel that is killed."""
    start, first = [cell.source for cell in stored("02_collectives") if cell.cell_type == "code"][:2]
    text, error, _ = kernel.run(start)
    assert error == ""
    assert "ranks are processes" in text
    alone = marked(kernel.mark)
    text, error, _ = kernel.run(f"import simparallel as sp\n{BUSY}", "started", kernel.manager.interrupt_kernel)
    assert error == "KeyboardInterrupt", text
    wait_for(lambda: marked(kernel.mark) == alone)
    text, error, _ = kernel.run(first)
    assert error == ""
    assert "rank 3: [30. 31. 32. 33.] -> [60. 64. 68. 72.]" in text
    picture = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nsp.view.save_figure(plt.gcf(), 'a.png')"
    assert "image/png" in kernel.run(picture)[2]
    kernel.client.execute(BUSY)
    wait_for(lambda: len(marked(kernel.mark)) > len(alone) + 2)
    kernel.manager.shutdown_kernel(now=True)
    wait_for(lambda: not marked(kernel.mark))
