"""Benchmarks of the tests have environments of their own."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import environments


@pytest.fixture(autouse=True)
def bench_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMPARALLEL_BENCH_DIR", str(tmp_path / "bench"))
    return tmp_path / "bench"


@pytest.fixture
def torch_here(bench_directory):
    """Return a function that makes this interpreter, which has torch, the environment of a peer."""

    def make(peer):
        binaries = bench_directory / "torch" / "bin"
        binaries.mkdir(parents=True)
        (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (binaries / "python").chmod(0o755)
        (binaries.parent / environments.READY).write_text(json.dumps(peer.requirements))

    return make
