"""A check before long measurements that their results can be written."""

from __future__ import annotations

import os

import pytest

from benchmarks.writable import check_writable


def test_check_writable_reports_in_advance(tmp_path):
    check_writable(tmp_path / "new" / "file")
    assert os.listdir(tmp_path / "new") == []
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"
    for bad in (tmp_path, "/proc/file", tmp_path / "old" / "file"):
        with pytest.raises(OSError, match="directory|exists") as caught:
            check_writable(bad)
        assert caught.value.filename in (str(bad), str(tmp_path / "old"))
