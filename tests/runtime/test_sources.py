"""Warm devices, and modules that the user edits meanwhile."""

from __future__ import annotations

import importlib
import os
import py_compile
import sys
import sysconfig
import time
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import simparallel as sp
from simparallel.runtime.module_watch import Imported, Sources

LONG_AGO_NS = 10**18


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "lesson.py", "def f(): return 1\n")
    write(tmp_path / "part.py", "VALUE = 1\n")
    yield importlib.import_module("lesson")
    for name in ("lesson", "part"):
        sys.modules.pop(name, None)


def write(path: Path, text: str, time_ns: int = LONG_AGO_NS) -> None:
    path.write_text(text)
    os.utime(path, ns=(time_ns, time_ns))


def of_part() -> tuple[int, int]:
    import part

    return part.VALUE, os.getpid()


@pytest.mark.process
def test_edited_module_runs_its_new_code(lesson: ModuleType) -> None:
    with sp.Cluster(2) as cluster:
        assert cluster.run(lesson.f) == [1, 1]
        write(Path(lesson.__file__), "def f(): return 2222\n")
        importlib.reload(lesson)
        with pytest.warns(UserWarning, match=r"lesson\.py changed since the devices imported it") as caught:
            assert cluster.run(lesson.f) == [2222, 2222]
        assert caught[0].filename == __file__
        assert cluster.run(lesson.f) == [2222, 2222]  # no warning, which would be an error


@pytest.mark.process
def test_edited_module_imported_by_devices_only(lesson: ModuleType, tmp_path: Path) -> None:
    with sp.Cluster(2) as cluster:
        before = cluster.run(of_part)
        write(tmp_path / "lesson.py", "def f(): return 2222\n")  # not imported by the devices
        assert cluster.run(of_part) == before
        write(tmp_path / "part.py", "VALUE = 2\n", LONG_AGO_NS + 10**9)
        with pytest.warns(UserWarning, match=r"part\.py changed"):
            assert [value for value, _ in cluster.run(of_part)] == [2, 2]


@pytest.mark.process
def test_module_edited_during_a_run(lesson: ModuleType) -> None:
    def edit() -> None:
        import part

        os.utime(part.__file__)

    with sp.Cluster(1) as cluster:
        cluster.run(edit)
        with pytest.warns(UserWarning, match=r"part\.py changed"):
            cluster.run(sp.get_rank)


def test_which_files_count_as_changed(tmp_path: Path) -> None:
    names = ("same", "longer", "other", "again", "gone", "young", "read", "future", "never")
    files = {name: tmp_path / f"{name}.py" for name in names}
    before, hour_ns = LONG_AGO_NS - 10**9, 3600 * 10**9
    times = {"young": LONG_AGO_NS + 1, "read": LONG_AGO_NS + 1, "future": time.time_ns() + hour_ns}
    for name in files.keys() - {"never"}:
        write(files[name], "x = 1", times.get(name, before))
    py_compile.compile(str(files["read"]), doraise=True)  # as after an import of this state
    sources = Sources()
    sources.add(map(str, files.values()), LONG_AGO_NS)
    assert sources.changed() == [str(files["young"])]  # it may have been read before this write
    write(files["longer"], "x = 22", before)
    write(files["other"], "x = 2", before + 1)
    for _ in range(2):
        write(files["again"], "x = 1", before + 1)  # as code generators do
        files["gone"].unlink(missing_ok=True)
        assert sorted(sources.changed()) == sorted(str(files[name]) for name in ("longer", "other", "young"))


@pytest.mark.process
def test_freshly_compiled_module_keeps_the_devices(lesson: ModuleType, tmp_path: Path) -> None:
    def count() -> int:
        import fresh

        fresh.calls.append(1)
        return len(fresh.calls)

    with sp.Cluster(1) as cluster:
        cluster.run(sp.get_rank)
        (tmp_path / "fresh.py").write_text("calls = []\n")
        py_compile.compile(str(tmp_path / "fresh.py"))  # records the source that was read
        assert [cluster.run(count)[0] for _ in range(3)] == [1, 2, 3]


@pytest.mark.process
def test_warning_as_error_is_raised_once(lesson: ModuleType) -> None:
    with sp.Cluster(1) as cluster:
        cluster.run(lesson.f)
        write(Path(lesson.__file__), "def f(): return 2222\n")
        importlib.reload(lesson)
        with pytest.raises(UserWarning, match="changed since"):
            cluster.run(lesson.f)
        assert cluster.run(lesson.f) == [2222]


def test_only_user_modules_are_watched(lesson: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = Imported()
    first = imported.new()
    assert lesson.__file__ in first
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(sp.__file__))
    assert not [file for file in first if file.startswith(installed)]
    assert imported.new() == []
    importlib.import_module("part")
    nameless = types.ModuleType("nameless")
    monkeypatch.setitem(sys.modules, "nameless", nameless)
    monkeypatch.setitem(sys.modules, "no_module", object())
    assert [os.path.basename(file) for file in imported.new()] == ["part.py"]


def test_module_imported_for_a_removed_one_is_seen(lesson: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nameless", types.ModuleType("nameless"))
    imported = Imported()
    imported.new()
    monkeypatch.delitem(sys.modules, "nameless")
    importlib.import_module("part")
    assert [os.path.basename(file) for file in imported.new()] == ["part.py"]
