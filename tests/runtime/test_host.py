"""The host process and its devices: settings, secrets, logs, signals, and permitted callers."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from leaks import finish, no_leaks, start_script  # noqa: F401 (no_leaks is a fixture)
from refusals import refused

import simparallel as sp
from simparallel.cli import main
from simparallel.comm import current
from simparallel.errors import InputError, LaunchError
from simparallel.runtime.launcher.pool import Pool
from simparallel.runtime.logs import READ_BYTES, LogFiles, Tail, last_turn, shown
from simparallel.runtime.ranks.device import LogFile
from simparallel.runtime.ranks.notices import Bar, Notes
from simparallel.view.shown import BACKEND, backend_for_ranks
from simparallel.world import launchers

process = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def _blas_has_its_threads() -> None:
    """BLAS starts a thread when ranks that are threads restore its limit; that is not a leak."""
    sp.launch(sp.get_rank, transport="inline")


HOME = str(Path(sp.__file__).parents[1])

# --- settings ----------------------------------------------------------------------------------------

BAD = {
    "size": {"arena_bytes": "much"},
    "negative size": {"arena_bytes": -5},
    "text for variables": {"environment": "abc"},
    "number in variables": {"environment": {"A": 1}},
    "name of a variable": {"environment": {"A=B": "1"}},
    "null in a variable": {"environment": {"A": "\0"}},
    "null in a path": {"log_dir": "a\0b"},
    "number for a path": {"log_dir": 5},
    "text for threads": {"blas_threads": "4"},
    "no threads": {"blas_threads": 0},
    "number for links": {"log_links": 3},
    "text for files": {"log_files": "trace.json"},
    "number for a file": {"log_files": [3]},
    "number for a rank table": {"rank_table": 3},
    "a script": {"fn": "train.py"},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_the_start(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "__init__", lambda *_, **__: pytest.fail("processes were started"))
    settings = {"fn": sp.get_rank, **BAD[case]}
    with refused(InputError):
        sp.launch(**settings)


def test_secret_is_not_in_the_error() -> None:
    with refused(InputError) as info:
        sp.Cluster(1, environment={"TOKEN": b"hush"})  # type: ignore[dict-item]
    assert "hush" not in str(info.value)


def test_misspelt_argument_suggests_the_right_one() -> None:
    with refused(TypeError):
        sp.launch(sp.get_rank, worldsize=4)
    with refused(TypeError):
        sp.launch(sp.get_rank, zzz=4)


def own_arena() -> int:
    return current().transport.segment.arena_bytes


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=process)])
def test_arena_has_the_size_that_is_asked_for(transport: str) -> None:
    with sp.Cluster(1, arena_bytes="80MB", echo=False, transport=transport) as cluster:
        assert 80_000_000 <= cluster.run(own_arena)[0] < 81_000_000


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=process)])
def test_ranks_inherit_the_launchers_seed(transport: str) -> None:
    def weight() -> np.ndarray:
        return sp.nn.Linear(3, 2).weight.numpy()

    with sp.Cluster(2, transport=transport, echo=False) as cluster:
        try:
            for seed in (7, 0):
                sp.set_seed(seed)
                expected = weight()
                for found in cluster.run(weight):
                    np.testing.assert_array_equal(found, expected)
        finally:
            sp.set_seed(0)


def test_huge_world_size_means_another_launcher() -> None:
    assert launchers.foreign_launcher({"WORLD_SIZE": "9" * 5000})
    assert not launchers.foreign_launcher({"WORLD_SIZE": "0" * 5000})


def test_open_quote_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    assert main.main(["run", "--transport", "mpi", "--mpiexec", "mpiexec 'a", str(script)]) == 2
    assert "is not a command line: No closing quotation." in capsys.readouterr().err


# --- secrets -----------------------------------------------------------------------------------------


@process
def test_secrets_are_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host's nor the devices' command line; and variables may be larger than a command line."""
    monkeypatch.syspath_prepend("/hidden/away")
    secret = "hush-" * 60_000

    def look() -> tuple[bool, str, str]:
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in (os.getpid(), os.getppid())]
        return os.environ["TOKEN"] == secret, sys.path[0], "".join(lines)

    known, path, lines = sp.launch(look, environment={"TOKEN": secret}, echo=False)[0]
    assert known
    assert path == "/hidden/away"
    assert "simparallel" in lines
    assert "hush" not in lines
    assert "hidden" not in lines


# --- callers -----------------------------------------------------------------------------------------


@process
def test_child_that_multiprocessing_spawned_launches(tmp_path: Path) -> None:
    text = """
import multiprocessing
import simparallel as sp

class Found:
    rank = -1

def train():
    found = Found()
    found.rank = sp.get_rank()
    return found

def child():
    found = sp.launch(train, world_size=2)
    print([one.rank for one in found], {type(one) is Found for one in found})

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
"""
    assert finish(start_script(tmp_path, text)) == ("[0, 1] {True}\n0\n", "")


@process
def test_caller_that_ignores_or_blocks_signals(tmp_path: Path) -> None:
    """Ends of devices are still reported, and the devices can be interrupted."""
    text = """
import os, signal
import simparallel as sp
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])

def die():
    if sp.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        pass

try:
    sp.launch(die, world_size=2, echo=False)
except sp.errors.RunFailedError as error:
    print(error.reports[1]["summary"][:18], error.reports[0]["summary"])
"""
    out, err = finish(start_script(tmp_path, text))
    assert (out, err) == ("killed by SIGKILL, KeyboardInterrupt\n", "")


@process
def test_rank_that_cannot_start_says_why() -> None:
    with pytest.raises(LaunchError, match=r"Rank 0 said:\n(.|\n)*TypeError"):
        Pool([[0]], environment={"NUMBER": 1})  # type: ignore[dict-item]


@process
@pytest.mark.parametrize("words", [["doctor"], ["run", "-n", "2", "hello.py"]])
def test_command_without_standard_output(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "-", sys.executable, "-m", "simparallel", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": HOME}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    if words[0] == "run":
        assert (tmp_path / "runs/hello/worker_1.log").read_text() == "hello\n"


# --- logs --------------------------------------------------------------------------------------------


def test_folder_of_logs_belongs_to_one_run(tmp_path: Path) -> None:
    first = LogFiles(tmp_path, [[0, 1]])
    os.write(first.rank_fds[0], b"mine\n")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.log")}
    with refused(InputError):
        LogFiles(tmp_path, [[0, 1]])
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.log")} == before
    first.close()
    second = LogFiles(tmp_path, [[0]])
    second.close()
    assert (tmp_path / "worker_0.log").read_bytes() == b""
    assert not (tmp_path / "worker_1.log").exists()


def test_forked_process_does_not_keep_a_folder(tmp_path: Path) -> None:
    first = LogFiles(tmp_path, [[0]])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            first.close()  # its copies of the descriptors; the folder stays locked by this process
            os.close(write)
            os.read(read, 1)
        os._exit(0)
    os.close(read)
    with refused(InputError):
        LogFiles(tmp_path, [[0]])
    first.close()
    LogFiles(tmp_path, [[0]]).close()
    os.close(write)
    os.waitpid(pid, 0)


def test_links_do_not_leave_the_folder_by_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank.0").symlink_to(outside)
    with refused(InputError):
        LogFiles(tmp_path / "logs", [[0]])
    assert list(outside.iterdir()) == []


@given(st.binary().map(lambda line: line.replace(b"\n", b"")), st.lists(st.binary().filter(lambda b: b"\n" not in b)))
def test_overwritten_parts_of_a_line_are_dropped(first: bytes, rest: list[bytes]) -> None:
    """A line that arrives in parts is shown as if it had arrived at once."""
    kept = b""
    for part in (first, *rest):
        kept = last_turn(kept + part)
    assert shown(kept) == shown(first + b"".join(rest))


def test_progress_bar_without_end_takes_no_memory(tmp_path: Path) -> None:
    with open(tmp_path / "log", "a+b", buffering=0) as log:
        tail = Tail({0: log.fileno()}, None)
        for i in range(100):
            log.write(b"\r" + b"%4d" % i * 1000)
            tail.show()
        assert len(tail._open_line[0]) <= 4002


def test_line_without_end_is_not_copied_again(tmp_path: Path) -> None:
    """Each part is appended to the same memory, so the work grows with the length and not with its square."""
    with open(tmp_path / "log", "a+b", buffering=0) as log:
        out = io.StringIO()
        tail = Tail({0: log.fileno()}, out)
        held = tail._open_line[0]
        for _ in range(20):
            log.write(b"x" * READ_BYTES)
            tail.show()
            assert tail._open_line[0] is held
        log.write(b"\r" * READ_BYTES + b"end\n")
        tail.show()
    assert out.getvalue() == "[rank 0] end\n"


class Console(io.StringIO):
    """A terminal that shows the cursor's line."""

    def lines(self) -> list[str]:
        shown = []
        for line in self.getvalue().split("\n"):
            cells: dict[int, str] = {}
            for turn in line.split("\r"):
                cells |= dict(enumerate(turn))
            shown.append("".join(cells[i] for i in sorted(cells)).rstrip())
        return shown


def test_bar_and_lines_of_ranks_do_not_share_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    monkeypatch.setattr(sys, "stderr", console)
    bar = Bar()
    with open(tmp_path / "log", "a+b", buffering=0) as log:
        tail = Tail({0: log.fileno()}, console, apart=bar.hidden)
        bar({"kind": "progress", "description": "train", "done": 1, "total": 3})
        log.write(b"loss 3.0\n")
        tail.show()
        bar({"kind": "progress", "description": "train", "done": 3, "total": 3})
    bar.close()
    first, last, empty = console.lines()
    assert first == "[rank 0] loss 3.0"
    assert last.startswith("train: 100%")
    assert empty == ""


@process
def test_full_disk_loses_lines_not_the_run(tmp_path: Path) -> None:
    """A limit on the file size stands in for the disk: both refuse the next byte."""

    def train() -> str:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            for _ in range(5):
                print("x" * 499)
            print("to standard error", file=sys.stderr)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("after")
        return "trained"

    with sp.Cluster(1, log_dir=tmp_path, echo=False) as cluster:
        with pytest.warns(UserWarning, match=r"of rank 0 1\.52 kB \(File too large\)"):
            assert cluster.run(train) == ["trained"]
        cluster.run(print, "again")  # and no warning any more
    assert (tmp_path / "worker_0.log").read_text() == ("x" * 499 + "\n") * 2 + "after\nagain\n"


def test_other_errors_of_a_log_are_raised() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with LogFile(write, "w", closefd=False) as file, pytest.raises(BrokenPipeError):
            file.write(b"x")
    finally:
        os.close(write)


# --- figures -----------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n"


@process
def test_figures_shown_by_a_rank_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the log folder, beside existing files; afterwards pyplot has none left, as after closing a window."""

    def draw() -> list[int]:
        import multiprocessing

        import matplotlib.pyplot as plt

        plt.plot([1, 2])
        plt.figure().show()
        forked = multiprocessing.get_context("fork").Process(target=plt.show)  # it is not a rank, and has no effect
        forked.start()
        forked.join()
        plt.show()
        return plt.get_fignums()

    (tmp_path / "rank0_figure1.png").write_text("mine")
    assert sp.launch(draw, log_dir=tmp_path) == [[]]
    pictures = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert pictures.pop("rank0_figure1.png") == b"mine"
    assert len(pictures) == 3
    assert all(picture.startswith(PNG) for picture in pictures.values())
    assert capsys.readouterr().out.count("[rank 0] plt.show(): ") == 3


def test_figures_appear_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[bytes] = []
    display = SimpleNamespace(display=displayed.append, Image=lambda data: data)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    Notes(str(tmp_path))({"kind": "figure", "rank": 0, "png": PNG})
    assert displayed == [PNG]
    assert list(tmp_path.iterdir()) == []


def test_unwritable_figure_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Notes(os.devnull)({"kind": "figure", "rank": 3, "png": PNG})
    assert "[rank 3] plt.show(): the figure cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "kept"), [(None, False), ("", False), ("module://of.a.notebook", False), ("Agg", True), ("TkAgg", True)]
)
def test_user_backend_is_kept(named: str | None, kept: bool) -> None:
    assert backend_for_ranks(named) == (named if kept else BACKEND)
