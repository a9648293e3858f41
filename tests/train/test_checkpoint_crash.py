"""A save cut off anywhere leaves the old checkpoint or the new one: never a mix, never neither."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import cloudpickle
import crashing_files
import numpy as np
import pytest
from crashing_files import SMALL, HookedFiles, JournalFiles, Killed, dies_at, fails_at, killed_at
from refusals import refused

import simparallel as sp
from simparallel.errors import CheckpointError, RunFailedError
from simparallel.train import CheckpointManager

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(crashing_files)

OLD, NEW = 1, 2  # the states of a training, distinguished by every number in them


class State:
    """A part with a sample of everything that a checkpoint holds; all of it is `value`."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict:
        sizes = {"weight": (3, 4), "bias": (3,), "scale": (), "none": (0, 2)}
        arrays = {name: np.full(shape, self.value, np.float32) for name, shape in sizes.items()}
        return {**arrays, "value": self.value, 0: [{"lr": float(self.value), "betas": (self.value, "x" * 40)}]}

    def load_state_dict(self, state: dict) -> None:
        values = {int(x) for key in ("weight", "bias", "scale") for x in np.ravel(state[key])}
        values |= {state["value"], int(state[0][0]["lr"]), state[0][0]["betas"][0]}
        assert len(values) == 1, f"a mix of {values}"
        (self.value,) = values


def save(directory: Path, value: int, files: HookedFiles | None = None, keep: int = 2) -> None:
    CheckpointManager(directory, keep, files=files or HookedFiles()).save(
        value, model=State(value), optimizer=State(value), extra=value, tensors={"more": np.full(5, value)}
    )


def found(directory: Path) -> int:
    """Return the state that can be restored whole; check that every other named one is whole too."""
    manager = CheckpointManager(directory)
    for step in (*manager.steps(), None):
        model, optimizer = State(0), State(0)
        restored = manager.restore(step, model=model, optimizer=optimizer)
        with manager.open(step) as reader:
            more = int(reader.read("more").sum()) // 5
        assert {model.value, optimizer.value, restored.step, restored.extra, more} == {model.value}
        assert step in (None, model.value)
    return model.value


def count_calls(tmp_path: Path, write_bytes: int, keep: int) -> int:
    """Count the file operations of a second save."""
    files = HookedFiles(write_bytes=write_bytes)
    save(tmp_path / "count", OLD)
    save(tmp_path / "count", NEW, files, keep)
    return files.done


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("torn", [False, True])
def test_killed_save_leaves_old_or_new_state(tmp_path, keep, torn):
    """Killed at any file operation, a save leaves the old state or the new one: each case takes every fourth."""
    calls = count_calls(tmp_path, SMALL, keep)
    seen = []
    for target in (*range(2 * torn + keep - 1, calls - 1, 4), calls - 1):
        directory = tmp_path / str(target)
        save(directory, OLD)
        with pytest.raises(Killed):
            save(directory, NEW, dies_at(target, torn), keep)
        seen.append(found(directory))

        save(directory, 3)  # the next save succeeds, and cleans up
        assert found(directory) == 3
        assert all(path.is_dir() and ".tmp-" not in path.name for path in directory.iterdir())

    assert calls > 100  # with the four parameter sets more than 200 points
    assert seen == sorted(seen)  # one moment separates old from new
    assert set(seen) == {OLD, NEW}


def test_killed_first_save_leaves_nothing_or_new(tmp_path):
    files = HookedFiles(write_bytes=SMALL)
    save(tmp_path / "count" / "deeper", NEW, files)
    seen = []
    for target in range(files.done):
        directory = tmp_path / str(target) / "deeper"
        with pytest.raises(Killed):
            save(directory, NEW, dies_at(target))
        seen.append(CheckpointManager(directory).latest())
        if seen[-1] is None:
            with pytest.raises(CheckpointError):
                found(directory)
        else:
            assert found(directory) == NEW

    assert set(seen) == {None, NEW}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.filterwarnings("ignore:.*an old checkpoint stays:RuntimeWarning")
def test_disk_error_keeps_the_old_state(tmp_path, error):
    """A disk error at any call raises, and the old state stays."""
    calls = count_calls(tmp_path, 256, keep=1)
    outcomes = []
    for target in range(calls):
        directory = tmp_path / str(target)
        save(directory, OLD)
        failed = refusal(directory, fails_at(target, error))
        outcomes.append((failed is not None, found(directory)))
        left = [path for path in directory.iterdir() if ".tmp-" in path.name]
        if failed is not None:
            assert failed.path.startswith(str(directory))
            assert os.strerror(error) in str(failed)
            assert not left

    # Refused until the new one has its name; afterwards at most an old one stays.
    assert set(outcomes) == {(True, OLD), (True, NEW), (False, NEW)}
    assert outcomes.count((True, NEW)) == 1  # the name may be lost in a power cut
    assert outcomes.count((True, OLD)) > 20


def refusal(directory: Path, files: HookedFiles) -> CheckpointError | None:
    try:
        save(directory, NEW, files, keep=1)
    except CheckpointError as error:
        return error
    return None


def test_power_cut_leaves_old_or_new_state(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    files = JournalFiles(root)
    save(root / "run", OLD, files, keep=1)
    saved = len(files.journal)
    save(root / "run", NEW, files, keep=1)

    draw = random.Random(0)
    policies = [lambda: False, lambda: True, *[lambda: draw.random() < 0.7] * 6]
    seen = {OLD: 0, NEW: 0}
    for calls, (number, keep) in itertools.product(range(saved, len(files.journal) + 1), enumerate(policies)):
        left = tmp_path / f"{calls}-{number}"
        files.after_power_cut(calls, left, keep)
        value = found(left / "run")
        seen[value] += 1
        if calls == len(files.journal):
            assert value == NEW  # save has returned: the new state is safe, whichever unsynced changes are lost

    assert seen[OLD] > 50
    assert seen[NEW] > 5


def test_power_cut_without_sync_loses_the_state(tmp_path):
    """Red control: the model of the disk loses unsynced data."""
    root = tmp_path / "disk"
    root.mkdir()
    files = JournalFiles(root, honest=False)
    save(root / "run", NEW, files)
    files.after_power_cut(len(files.journal), tmp_path / "left", lambda: False)

    with refused(CheckpointError):
        found(tmp_path / "left" / "run")

    first = iter(range(9))  # the names, and a part of a file
    files.after_power_cut(len(files.journal), tmp_path / "half", lambda: next(first, None) is not None)
    assert list((tmp_path / "half").rglob("rank_0.safetensors"))
    with refused(CheckpointError):
        found(tmp_path / "half" / "run")


CHILD = """
import json, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(os.pathsep)
from crashing_files import SMALL, HookedFiles, killed_at
from test_checkpoint_crash import NEW, OLD, count_calls, found, save
root = Path(sys.argv[2])
calls = count_calls(root, SMALL, 1)
seen = []
for target in range(0, calls, max(1, calls // 60)):
    directory = root / str(target)
    save(directory, OLD)
    child = os.fork()
    if child == 0:
        save(directory, NEW, killed_at(target), 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    seen.append((os.WTERMSIG(status), found(directory)))
print(json.dumps(seen))
"""


@pytest.mark.process
def test_killed_process_leaves_old_or_new_state(tmp_path):
    arguments = [sys.executable, "-c", CHILD, os.pathsep.join(map(str, Path(__file__).parents[:2])), str(tmp_path)]
    # One thread, so that it can fork.
    done = subprocess.run(
        arguments, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, timeout=60
    )

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) > 50
    assert {number for number, _ in seen} == {9}
    assert {value for _, value in seen} == {OLD, NEW}


def test_rename_follows_sync_and_is_synced(tmp_path, monkeypatch):
    """The rename follows the sync of all bytes, and is synced itself."""
    CheckpointManager(tmp_path).save(OLD, model=State(OLD))
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])

    CheckpointManager(tmp_path, keep=1).save(NEW, model=State(NEW))

    # File, manifest, their directory; the name; the parent directory; the old one's name, and again.
    assert calls == ["fsync"] * 3 + ["replace", "fsync", "replace", "fsync"]


# --- several ranks ----------------------------------------------------------------------------------


def save_together(directory: str, rank: int, files: HookedFiles) -> str:
    sp.init()
    manager = CheckpointManager(directory, 1, files=files if sp.get_rank() == rank else HookedFiles())
    whole = np.full((6, 4), NEW, np.float32)
    part = slice(sp.get_rank() * 3, sp.get_rank() * 3 + 3)
    try:
        manager.save(
            NEW,
            model=State(NEW),
            optimizer=State(NEW),
            extra=NEW,
            tensors={"more": np.full(5, NEW), "cut": ((6, 4), (part, slice(None)), whole[part])},
        )
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_dead_rank_leaves_old_or_new_state(tmp_path, rank):
    with sp.Cluster(2, transport="inline", echo=False) as cluster:
        files = HookedFiles(write_bytes=SMALL)
        cluster.run(save_together, tmp_path / "count", rank, files)
        seen = []
        for target in range(0, files.done, 3):
            directory = tmp_path / str(target)
            save(directory, OLD)
            with pytest.raises((RunFailedError, Killed)):
                cluster.run(save_together, directory, rank, dies_at(target))
            seen.append(found(directory))
            save(directory, 3)
            assert found(directory) == 3

    assert set(seen) == ({OLD, NEW} if rank == 0 else {OLD})


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, 1])
def test_dead_process_of_two_leaves_the_old_state(tmp_path, rank):
    save(tmp_path, OLD)

    with pytest.raises(RunFailedError):
        sp.launch(save_together, (str(tmp_path), rank, killed_at(5)), world_size=2, echo=False)

    assert found(tmp_path) == OLD


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.filterwarnings("ignore:.*an old checkpoint stays:RuntimeWarning")
def test_disk_error_of_one_rank_raises_on_all(tmp_path, rank):
    """All ranks raise the same error."""
    with sp.Cluster(2, transport="inline", echo=False) as cluster:
        for target in range(0, 12):
            directory = tmp_path / str(target)
            save(directory, OLD)
            texts = cluster.run(save_together, directory, rank, fails_at(target, errno.ENOSPC))
            assert len(set(texts)) == 1
            if texts[0]:
                assert texts[0].startswith(f"rank {rank}: {directory}")
                assert "No space left on device" in texts[0]
                assert not [path for path in directory.iterdir() if ".tmp-" in path.name]
            assert found(directory) == (OLD if texts[0] else NEW)
