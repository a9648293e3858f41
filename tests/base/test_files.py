"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os

import pytest
from crashing_files import HookedFiles, fails_at

from simparallel.base import files
from simparallel.base.files import Files, make_directories, open_file, read_into, remove_tree, write_atomically


@pytest.mark.parametrize("sync", [False, True])
def test_file_is_replaced_in_one_move(tmp_path, sync):
    path = tmp_path / "new" / "deeper" / "file"
    for content in (b"first", b"", [b"in ", memoryview(b"pieces")]):
        write_atomically(path, content, sync=sync)

    assert path.read_bytes() == b"in pieces"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("sync", [False, True])
def test_failed_write_keeps_the_old_file(tmp_path, sync):
    """A failed write leaves the old file and no temporary file, and the error names the target."""
    path = tmp_path / "file"
    counted = HookedFiles(write_bytes=256)
    write_atomically(path, b"old", sync=sync, files=counted)
    before_the_move = counted.done - sync  # the name is synced after the rename
    for target in range(before_the_move):
        with pytest.raises(OSError, match="No space") as caught:
            write_atomically(path, b"new", sync=sync, files=fails_at(target, errno.ENOSPC))
        assert caught.value.filename == str(path)  # not the temporary name
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_existing_temporary_name_is_kept(tmp_path, monkeypatch, kind):
    """A file or link that has the temporary name is not overwritten."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "known")
    taken, victim = tmp_path / ".file.known.tmp", tmp_path / "victim"
    victim.write_text("mine")
    taken.symlink_to(victim) if kind == "link" else taken.write_text("mine")

    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", b"new")
    assert victim.read_text() == taken.read_text() == "mine"
    assert taken.is_symlink() == (kind == "link")
    assert not (tmp_path / "file").exists()


def test_pipes_stay_pipes(tmp_path):
    """As /dev/null and /dev/stdout: a rename would put a file in their place."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(OSError, match="No such device or address") as caught:
            write_atomically(path, b"nobody reads")
        assert caught.value.filename == str(path)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (pipe, link):
            write_atomically(path, [b"in ", memoryview(b"pieces")])
            assert os.read(reader, 100) == b"in pieces"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_temporary_names_are_unpredictable(tmp_path):
    names = set()

    class Watching(Files):
        def create(self, path):
            names.add(path.name)
            return super().create(path)

    for _ in range(9):
        write_atomically(tmp_path / "file", b"new", files=Watching())
    assert len(names) == 9


def test_remove_tree_does_not_follow_links(tmp_path):
    (tmp_path / "kept" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "file").touch()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "tree")

    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["inner"]


def test_new_directories_are_for_the_owner_alone(tmp_path):
    make_directories(tmp_path / "a" / "b")
    make_directories(tmp_path / "a" / "b")

    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.parametrize("kind", ["none", "directory", "link", "pipe"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "file"
    make = {"none": lambda: None, "directory": path.mkdir, "link": lambda: path.symlink_to(__file__)}
    make.get(kind, lambda: os.mkfifo(path))()
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="No such file|directory|regular|symbolic links"):
        open_file(path, links=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_stops_at_end_of_file(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    buffer = bytearray(4)
    with open_file(tmp_path / "file") as file:
        assert (read_into(file.fileno(), 3, buffer), bytes(buffer)) == (4, b"3456")
        assert (read_into(file.fileno(), 8, buffer), bytes(buffer[:2])) == (2, b"89")
