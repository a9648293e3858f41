"""What a change can reach: by a record of the files that tests enter or read, and by git."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reach

RECORD = {
    "tests/a/test_x.py::test_one": {"simparallel/a/one.py", "tests/helper.py"},
    "tests/a/test_x.py::test_two": {"simparallel/a/two.py", "docs/page.md"},
    "tests/b/test_y.py::test_both": {"simparallel/a/one.py", "simparallel/a/two.py"},
}
ONE, TWO, BOTH = RECORD


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"simparallel/a/one.py"}, {ONE, BOTH}),
        ({"tests/helper.py"}, {ONE}),
        ({"docs/page.md"}, {TWO}),
        ({"docs/other.txt"}, set()),
        ({"simparallel/a/table.json"}, {ONE, TWO, BOTH}),
        ({"tests/b/test_y.py"}, {BOTH}),
        ({"tests/golden/a.txt"}, {ONE, TWO}),
    ],
)
def test_users_of_a_changed_file_are_reached(changed, expected):
    assert reach.reached(RECORD, changed, RECORD) == expected
    new = "tests/a/test_x.py::test_new"
    assert reach.reached([*RECORD, new], changed, RECORD) == expected | {new}


def test_changes_are_those_of_git(tmp_path):
    def git(*words):
        settings = ("-c", "user.name=a", "-c", "user.email=a@a.example")
        subprocess.run(["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("kept.py", "changed.py", "gone.py"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    assert reach.changes("HEAD", str(tmp_path)) == set()
    (tmp_path / "changed.py").write_text("2")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "é new.py").write_text("")
    assert reach.changes("HEAD", str(tmp_path)) == {"changed.py", "gone.py", "é new.py"}


def load(folder: Path, name: str, text: str):
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_watch_finds_what_is_entered_or_read(tmp_path, monkeypatch):
    """Not what an import runs; and once more after `again`."""
    monkeypatch.setattr(reach, "ROOT", str(tmp_path))
    used = load(tmp_path, "used", "def f():\n    return 1\n")
    (tmp_path / "page.md").write_text("")
    found = []
    watch = reach.Watch(found.append)
    before = sys.gettrace()
    sys.settrace(watch._trace)
    try:
        load(tmp_path, "imported", "def f():\n    return 1\nf()\n")
        used.f()
        used.f()
        watch._audit("open", (str(tmp_path / "page.md"), "r", 0))
        watch.again()
        used.f()
    finally:
        sys.settrace(before)
    names = [os.path.basename(name) for name in found]
    assert names == ["used.py", "page.md", "used.py"]


@pytest.mark.process
def test_started_process_records_too(tmp_path):
    (file := tmp_path / "found").touch()
    folders = os.pathsep.join((os.path.join(reach.ROOT, "tests", "recorded"), reach.ROOT))
    environment = {**os.environ, "PYTHONPATH": folders, "RECORDED_REACH": str(file)}
    program = "import simparallel as sp\nsp.launch(sp.get_rank, world_size=2)"
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True)
    found = {os.path.relpath(name, reach.ROOT) for name in file.read_text().splitlines()}
    assert {"simparallel/runtime/launcher/launch.py", "simparallel/runtime/ranks/device.py"} <= found
    assert "simparallel/optim/adam.py" not in found
