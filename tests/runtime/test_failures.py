"""Failures: each is reported with its cause, ends in bounded time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import inspect
import io
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaks import belongings, finish, marked, no_leaks, start_script, wait_for  # noqa: F401 (a fixture)
from refusals import refused

import simparallel as sp
from simparallel.errors import ClusterError, InputError, LaunchError, RunFailedError
from simparallel.runtime.launcher import pool, run

AS_ON_MACOS = "memfd,futex,pidfd,fork"

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def warm() -> Iterator[sp.Cluster]:
    """Three devices for failures that kill no process."""
    with sp.Cluster(3, echo=False) as cluster:
        cluster.run(sp.get_rank)
        yield cluster


def failure(run: Callable[..., Any], *arguments: Any, limit_s: float = 10.0, **settings: Any) -> RunFailedError:
    """Return the error of a run that has to fail, soon."""
    start = time.monotonic()
    with refused(RunFailedError) as caught:
        run(*arguments, **settings)
    assert time.monotonic() - start < limit_s
    return caught.value


def works(cluster: sp.Cluster) -> bool:
    total = cluster.run(lambda: sp.all_reduce(np.ones(2)))
    return all((part == cluster.world_size).all() for part in total)


# --- exceptions ----------------------------------------------------------------------------------


def test_exception_on_one_rank(warm: sp.Cluster) -> None:
    def fail() -> None:
        sp.barrier()
        if sp.get_rank() == 1:
            raise KeyError("the key")  # the line itself
        sp.barrier()

    error = failure(warm.run, fail)
    first, *rest = str(error).splitlines()
    assert first == "rank 1 of 3 failed: KeyError: 'the key'"
    text = "\n".join(rest)
    assert 'raise KeyError("the key")  # the line itself' in text
    assert f'File "{__file__}"' in text
    assert f"in {fail.__name__}" in text
    assert "simparallel/runtime" not in text  # starts with the user's code
    assert "Stopped because of it: ranks 0, 2." in text
    assert (error.rank, error.exit_code) == (1, 1)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("the key",)
    assert {rank: report["secondary"] for rank, report in error.reports.items()} == {0: True, 1: False, 2: True}
    assert "barrier" in error.reports[0]["summary"]
    assert works(warm)


def test_errors_of_simparallel_keep_their_facts(warm: sp.Cluster) -> None:
    def mismatch() -> None:
        sp.all_reduce(np.ones(2 + sp.get_rank() % 2))

    error = failure(warm.run, mismatch)
    assert isinstance(error.__cause__, sp.errors.CollectiveMismatchError)
    assert error.__cause__.facts
    assert isinstance(error, RuntimeError)


def exceptions() -> dict[str, tuple[Callable[[], BaseException], bool]]:
    """Return name -> (how to make it, whether it can be pickled)."""

    class Plain(Exception):
        pass

    class TwoArguments(Exception):
        def __init__(self, what: str, number: int) -> None:
            super().__init__(f"{what} {number}")

    class WithLock(Exception):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.lock = threading.Lock()

    class Exits(Exception):
        def __reduce__(self) -> tuple:
            return sys.exit, (3,)

    class NoText(Exception):
        def __str__(self) -> str:
            raise ValueError("no text for you")

    return {
        "local class": (lambda: Plain("original text"), True),
        "base exception": (lambda: BaseException("original text"), True),
        "group": (lambda: ExceptionGroup("original text", [ValueError(1)]), True),
        "cannot be unpickled": (lambda: TwoArguments("original text", 3), False),
        "cannot be pickled": (lambda: WithLock("original text"), False),
        "exits when unpickled": (lambda: Exits("original text"), False),
        "without text": (lambda: NoText("original text"), True),
        "not ascii, long": (lambda: Plain("original text \U0001f600" * 3000), True),
        "lone surrogate": (lambda: Plain("original text \udc80"), True),
    }


@pytest.mark.parametrize("kind", exceptions())
def test_any_exception_is_reported(warm: sp.Cluster, kind: str) -> None:
    make, can_be_sent = exceptions()[kind]

    def fail() -> None:
        if sp.get_rank() == 2:
            raise make()
        sp.barrier()

    error = failure(warm.run, fail)
    assert ("original text" in str(error)) == (kind != "without text")
    if can_be_sent:
        assert type(error.__cause__).__name__ == type(make()).__name__
    else:
        assert error.__cause__ is None
    assert works(warm)


@pytest.mark.parametrize("kind", exceptions())
def test_threads_raise_the_original_exception(kind: str) -> None:
    """It need not be picklable; objects in its frames are released."""
    make, _ = exceptions()[kind]
    held = []

    class Held:
        pass

    def fail() -> None:
        if sp.get_rank() == 1:
            in_hand = Held()
            held.append((weakref.ref(in_hand), error := make()))
            try:
                raise KeyError("before")
            except KeyError:
                raise error from None
        sp.barrier()

    error = failure(partial(sp.launch, world_size=2, transport="inline"), fail)
    reference, original = held[0]
    assert error.__cause__ is original
    gc.collect()
    assert reference() is None


def test_exception_while_arguments_are_unpickled(warm: sp.Cluster) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return int, ("not a number",)

    failure(warm.run, print, Bomb())
    assert works(warm)


def bad_results() -> dict[str, Callable[[], Any]]:
    class Bomb:
        def __init__(self, *call: Any) -> None:
            self.call = call

        def __reduce__(self) -> tuple:
            function, *arguments = self.call
            return function, tuple(arguments)

    class ExitsWhenPickled:
        def __reduce__(self) -> tuple:
            sys.exit(0)

    return {
        "generator": lambda: (i for i in range(3)),
        "lock": threading.Lock,
        "file": lambda: open(os.devnull, "w"),
        "exits when pickled": ExitsWhenPickled,
        "raises when unpickled": lambda: Bomb(int, "not a number"),
        "raises OSError when unpickled": lambda: Bomb(open, "/nowhere/at/all"),
        "exits when unpickled": lambda: Bomb(sys.exit, 3),
    }


@pytest.mark.parametrize("kind", bad_results())
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_unpicklable_result(warm: sp.Cluster, kind: str) -> None:
    make = bad_results()[kind]
    error = failure(warm.run, lambda: make() if sp.get_rank() == 1 else 5)
    assert (error.rank, list(error.reports)) == (1, [1])
    assert isinstance(error.__cause__, LaunchError)
    assert works(warm)


class SlowError(ValueError):
    """Another rank waits for its text, and fails before the text is complete."""

    def __str__(self) -> str:
        began, other = map(Path, self.args)
        began.touch()
        deadline = time.monotonic() + 5
        while not other.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        return "first"


def test_two_ranks_fail_and_the_earliest_is_the_cause(warm: sp.Cluster, tmp_path: Path) -> None:
    began, other = tmp_path / "began", tmp_path / "other"

    def fail() -> None:
        if sp.get_rank() == 2:
            raise SlowError(str(began), str(other))
        if sp.get_rank() == 0:
            while not began.exists():
                time.sleep(0.001)
            try:
                raise TypeError("second")
            finally:
                other.touch()
        sp.barrier()

    failure(warm.run, fail)


def test_sys_exit(warm: sp.Cluster) -> None:
    def leave(code: Any) -> str:
        if sp.get_rank() == 1:
            sys.exit(code)
        return "stayed"

    for normal in (0, None):
        assert warm.run(leave, normal) == ["stayed", None, "stayed"]
    for code, exit_code in ((3, 3), ("text", 1), (1, 1)):
        error = failure(warm.run, leave, code)
        assert str(error).startswith(f"rank 1 of 3 failed: sys.exit({code!r})")
        assert (error.rank, error.exit_code, list(error.reports)) == (1, exit_code, [1])
    assert works(warm)


def test_leaving_while_others_wait(warm: sp.Cluster) -> None:
    def leave() -> None:
        if sp.get_rank() == 1:
            sys.exit(0)
        sp.barrier()

    error = failure(warm.run, leave)
    assert error.rank in (0, 2)


# --- deaths --------------------------------------------------------------------------------------


def test_death_of_a_rank_while_others_wait(warm: sp.Cluster) -> None:
    """Each time the same cluster continues, with new processes."""

    def die(how: str) -> None:
        sp.barrier()
        if sp.get_rank() == 1:
            if how == "SIGSEGV":
                ctypes.string_at(0)
            elif how.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, how))
            else:
                os._exit(int(how))
        sp.barrier()

    with sp.Cluster(3, echo=False) as cluster:
        pids = cluster.run(os.getpid)
        for how, exit_code in (("SIGKILL", 137), ("SIGSEGV", 139), ("SIGTERM", 143), ("0", 1), ("7", 7)):
            error = failure(cluster.run, die, how, limit_s=3)
            words = f"killed by {how}" if how.startswith("SIG") else f"process ended with exit code {how} in the"
            assert str(error).startswith(f"rank 1 of 3 failed: {words}")
            assert ("out-of-memory" in str(error)) == (how == "SIGKILL")
            assert (error.rank, error.exit_code, error.__cause__) == (1, exit_code, None)
            assert error.reports[1]["pid"] == pids[1]
            assert "rank 1" in error.reports[0]["summary"]
            new = cluster.run(os.getpid)
            assert not {*new} & {*pids}
            pids = new
            assert works(cluster)


def test_output_of_a_dead_rank_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        print("last words")
        sys.stdout.write("and the very last")
        sys.stdout.flush()
        os._exit(1)

    failure(sp.launch, die)
    assert capsys.readouterr().out == "[rank 0] last words\n[rank 0] and the very last\n"


@pytest.mark.parametrize("disabled", ["", "pidfd", AS_ON_MACOS])
def test_death_of_a_rank_that_had_children(disabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children hold copies of its descriptors, so no end of file reports its death."""
    monkeypatch.setenv("SIMPARALLEL_DISABLE", disabled)

    def die() -> None:
        if sp.get_rank() == 1:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        sp.barrier()

    failure(sp.launch, die, world_size=2, echo=False)


def test_death_of_the_host() -> None:
    def kill_host() -> None:
        if sp.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        while True:
            time.sleep(0.01)

    with sp.Cluster(2, echo=False) as cluster:
        with refused(LaunchError):
            cluster.run(kill_host)
        assert works(cluster)


@pytest.mark.parametrize("what", ["computes", "sleeps", "refuses SIGINT", "refuses SIGINT and SIGTERM"])
def test_ranks_that_never_communicate_are_stopped(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = [(delay_s / 5, number) for delay_s, number in run.ESCALATION]
    monkeypatch.setattr(run, "ESCALATION", tuple(soon))

    def fail() -> None:
        if sp.get_rank() == 0:
            raise ValueError("root")
        if "SIGTERM" in what:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            with contextlib.suppress(KeyboardInterrupt if "refuses" in what else ()):
                while what == "computes":
                    pass
                time.sleep(60)

    error = failure(sp.launch, fail, world_size=2, echo=False, limit_s=8)
    assert isinstance(error.__cause__, ValueError)


def test_stopped_rank_is_called_stopped() -> None:
    def stop() -> None:
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        sp.barrier()

    error = failure(sp.launch, stop, world_size=2, echo=False, timeout_s=1, limit_s=8)
    assert error.rank == 1
    assert error.reports[0]["missing"] == [1]
    assert f"rank 1 (pid {error.reports[1]['pid']}) is stopped (SIGSTOP or a debugger)" in str(error)


def test_stopped_rank_is_no_cause_of_another_error() -> None:
    def stop() -> None:
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("of its own")

    error = failure(sp.launch, stop, world_size=2, echo=False, timeout_s=60, limit_s=8)
    assert error.rank == 0
    assert isinstance(error.__cause__, ValueError)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launcher look ten times as often for stopped ranks."""
    for module in (pool, run):
        monkeypatch.setattr(module, "LOOK_S", 0.1)


def test_stopped_rank_ends_the_run(often: None) -> None:
    """A stopped rank ends the run even if no rank waits for it."""

    def stop() -> None:
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with sp.Cluster(3, echo=False, timeout_s=0.5) as cluster:
        error = failure(cluster.run, stop)
        assert list(error.reports) == [1]
        assert error.exit_code == 1
        assert works(cluster)


@pytest.mark.parametrize("goes_on", [False, True])
def test_rank_stopped_while_sending_its_result(often: None, monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """The launcher has read a part of the result, and waits for the rest."""
    size, pids, stopped = 16 << 20, [], []
    readv, fields_of = os.readv, run.process_fields

    def readv_and_stop(fd: int, buffers: list[memoryview]) -> int:
        count = readv(fd, buffers)
        if len(buffers[0]) >= size > count and not stopped:
            os.kill(pids[0], signal.SIGSTOP)
            stopped.append(pids[0])
        return count

    def fields_and_go_on(pid: int) -> list[str]:
        fields = fields_of(pid)
        if goes_on and fields[:1] == ["T"]:
            os.kill(pid, signal.SIGCONT)
        return fields

    with sp.Cluster(1, echo=False, timeout_s=0.5) as cluster:
        pids += cluster.run(os.getpid)
        monkeypatch.setattr(os, "readv", readv_and_stop)
        monkeypatch.setattr(run, "process_fields", fields_and_go_on)
        if goes_on:
            assert len(cluster.run(bytes, size)[0]) == size
        else:
            assert "process is stopped (SIGSTOP)" in str(failure(cluster.run, bytes, size))
    assert stopped == pids


def test_rank_stopped_while_receiving_a_payload(often: None) -> None:
    with sp.Cluster(2, echo=False, timeout_s=0.5) as cluster:
        os.kill(cluster.run(os.getpid)[1], signal.SIGSTOP)
        failure(cluster.run, len, bytes(8 << 20))


# --- functions and settings that cannot be started -----------------------------------------------


def unsendable() -> dict[str, Any]:
    class Refuses:
        def __reduce__(self) -> tuple:
            raise RuntimeError("I stay here")

    return {
        "lock": threading.Lock(),
        "generator": (i for i in range(3)),
        "file": io.BufferedWriter(io.BytesIO()),
        "frame": sys._getframe(),
        "object that refuses": Refuses(),
    }


@pytest.mark.parametrize("kind", unsendable())
@pytest.mark.parametrize("place", ["closure", "argument"])
def test_unpicklable_function(kind: str, place: str) -> None:
    thing = unsendable()[kind]
    call = (lambda: thing,) if place == "closure" else (print, thing)
    with sp.Cluster(2) as cluster:
        before = belongings()
        with refused(LaunchError):
            cluster.run(*call)
        assert belongings() == before  # no process was started


def test_warning_about_a_big_payload(warm: sp.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PAYLOAD_WARNING_BYTES", 1 << 20)
    with pytest.warns(UserWarning, match="are 2 MiB, copied to every rank"):
        assert warm.run(len, bytes(2 << 20)) == [2 << 20] * 3
    assert warm.run(len, bytes(1 << 19)) == [1 << 19] * 3  # no warning, which would be an error


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"world_size": 0}, ClusterError),
        ({"world_size": -1}, ClusterError),
        ({"world_size": 1.5}, ClusterError),
        ({"world_size": True}, ClusterError),
        ({"world_size": "2"}, ClusterError),
        ({"device": "abacus"}, ClusterError),
        ({"transport": "pigeon"}, InputError),
        ({"timeout_s": 0}, InputError),
        ({"timeout_s": -1.0}, InputError),
        ({"timeout_s": float("nan")}, InputError),
        ({"timeout_s": "5"}, InputError),
        ({"start_timeout_s": None}, InputError),
        ({"log_dir": os.devnull}, InputError),
        ({"log_dir": "/proc/nowhere"}, InputError),
        ({"fn": 3}, InputError),
        ({"fn": None}, InputError),
        ({"args": 2}, InputError),
        ({"args": "ab"}, InputError),
        ({"args": np.ones(2)}, InputError),
        ({"kwargs": 3}, InputError),
        ({"wrold_size": 2}, TypeError),
    ],
)
def test_bad_arguments(settings: dict[str, Any], error: type[Exception]) -> None:
    with refused(error):
        sp.launch(**{"fn": sp.get_rank, **settings})


def test_help_of_launch_shows_the_settings() -> None:
    shown = inspect.signature(sp.launch).parameters
    assert list(shown)[:4] == ["fn", "args", "kwargs", "world_size"]
    of_cluster = inspect.signature(sp.Cluster).parameters
    assert set(shown) == {"fn", "args", "kwargs", *of_cluster}
    assert shown["timeout_s"] == of_cluster["timeout_s"]


def test_unpicklable_closures_are_reported(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        file.write("a line")
        with refused(LaunchError):
            sp.launch(print, (file,), world_size=2)
    with (tmp_path / "file").open() as file:
        assert sp.launch(lambda: file.read()) == ["a line"]


def test_half_made_log_directory(tmp_path: Path) -> None:
    (tmp_path / "worker_1.log").mkdir()  # after two files were opened
    with refused(InputError):
        sp.launch(sp.get_rank, world_size=2, log_dir=tmp_path)


def test_unwritable_report_does_not_hide_failure(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("root")

    (tmp_path / "log").touch()
    error = failure(sp.launch, fail, log_dir=tmp_path / "log", transport="inline")
    assert "could not be written" in error.__notes__[0]


def test_too_few_descriptors(tmp_path: Path) -> None:
    """At whatever step the limit is hit, it is a LaunchError and nothing stays open."""
    text = """
import os, resource
import simparallel as sp
sp.launch(sp.get_rank)
before = len(os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for more in range(16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + more, hard))
    try:
        sp.launch(sp.get_rank, world_size=2)
        text = "started"
    except (sp.errors.LaunchError, sp.errors.SharedMemoryError) as error:
        text = f"{type(error).__name__} {'Too many open files' in str(error)}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(more, text, len(os.listdir("/proc/self/fd")) - before)
"""
    out, err = finish(start_script(tmp_path, text))
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == 16
    for line in lines:
        assert line.endswith((" SharedMemoryError True 0", " LaunchError True 0"))


def test_host_start_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with refused(LaunchError):
        sp.launch(sp.get_rank)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with refused(LaunchError):
        sp.launch(sp.get_rank)


def test_refused_start_does_not_blame_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pool.subprocess, "Popen", refuse)
    with refused(LaunchError):
        sp.launch(sp.get_rank)


@pytest.mark.parametrize("missing", ["memfd", "futex", "fork"])
def test_without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> tuple[list[str], bool, float]:
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        total = 0.0
        for _ in range(50):
            total += sp.all_reduce(np.ones(3))[0]
        from simparallel.comm.shm.transport import Futex

        return [os.path.basename(name) for name in files], Futex(0).available, total

    monkeypatch.setenv("SIMPARALLEL_DISABLE", missing)
    for names, has_futex, total in sp.launch(look, world_size=3, echo=False):
        assert total == 150
        assert has_futex == (missing != "futex")
        assert any(name.startswith("memfd:simparallel") for name in names) == (missing != "memfd")


# --- the launcher --------------------------------------------------------------------------------

RANKS = """
import ctypes, os, sys, time
from pathlib import Path
import simparallel as sp
mode = sys.argv[1]
def work():
    rank = sp.get_rank()
    Path(f"pid{rank}").write_text(str(os.getpid()))
    try:
        Path(f"started{rank}").touch()
        if mode == "collective" and rank > 0: sp.barrier()
        while mode == "compute": sum(range(99))  # an empty loop has no place where Python 3.13 finds its finally
        if mode == "hold the interpreter": ctypes.PyDLL(None).sleep(60)
        while mode != "stubborn": time.sleep(60)
        while True:
            try: time.sleep(60)
            except KeyboardInterrupt: Path(f"refused{rank}").touch()
    finally:
        Path(f"finally{rank}").touch()
"""


def started(folder: Path, what: str = "started") -> None:
    wait_for(lambda: len(list(folder.glob(f"{what}?"))) == 2)


@pytest.mark.parametrize(
    ("mode", "how", "disabled"),
    [
        ("sleep", signal.SIGKILL, ""), ("compute", signal.SIGHUP, ""), ("collective", signal.SIGTERM, ""),
        ("hold the interpreter", signal.SIGKILL, ""), ("collective", signal.SIGKILL, AS_ON_MACOS),
    ],
)  # fmt: skip
def test_killed_launcher(tmp_path: Path, mode: str, how: signal.Signals, disabled: str) -> None:
    """It gets SIGHUP when its terminal is closed."""
    script = start_script(
        tmp_path, RANKS + "sp.launch(work, world_size=2)", mode, SIMPARALLEL_TEST_MARK="killed",
        SIMPARALLEL_DISABLE=disabled,
    )  # fmt: skip
    started(tmp_path)
    assert len(marked("killed")) == 4  # launcher, host, two devices
    script.send_signal(how)
    script.communicate(timeout=10)
    wait_for(lambda: not marked("killed"), 5)
    assert not list(tmp_path.glob("finally?"))


@pytest.mark.parametrize("disabled", ["", AS_ON_MACOS])
def test_killed_launcher_with_living_forked_child(tmp_path: Path, disabled: str) -> None:
    """The child holds a copy of the life pipe."""
    text = (
        RANKS
        + """
import threading
def fork():
    while not Path("started1").exists() or not Path("started0").exists(): time.sleep(0.01)
    if os.fork() == 0:
        Path("child").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
import warnings; warnings.simplefilter("ignore")
threading.Thread(target=fork, daemon=True).start()
sp.launch(work, world_size=2)
"""
    )
    script = start_script(tmp_path, text, "sleep", SIMPARALLEL_TEST_MARK="forked", SIMPARALLEL_DISABLE=disabled)
    wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
    child = int((tmp_path / "child").read_text())
    try:
        script.kill()
        script.wait(10)
        wait_for(lambda: marked("forked") <= {child}, 2)
    finally:
        os.kill(child, signal.SIGKILL)
        script.communicate(timeout=10)


@pytest.mark.parametrize("mode", ["collective", "compute"])
def test_ctrl_c(tmp_path: Path, mode: str) -> None:
    script = start_script(tmp_path, RANKS + "sp.launch(work, world_size=2)", mode)
    started(tmp_path)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    _, err = finish(script)
    assert script.returncode == -signal.SIGINT
    _, _, told = err.partition("\nKeyboardInterrupt\n")
    assert told.startswith("rank")  # their places
    assert len(list(tmp_path.glob("finally?"))) == 2
    assert "[rank" not in err


def test_ctrl_c_twice(tmp_path: Path) -> None:
    script = start_script(tmp_path, RANKS + "sp.launch(work, world_size=2)", "stubborn")
    started(tmp_path)
    script.send_signal(signal.SIGINT)
    started(tmp_path, "refused")
    script.send_signal(signal.SIGINT)
    finish(script)
    assert script.returncode == -signal.SIGINT


def test_ctrl_c_while_devices_start(tmp_path: Path) -> None:
    """Nothing stays behind, also where the traceback is kept, as in notebooks."""
    text = """
import os, sys, time
from pathlib import Path
import simparallel as sp
from simparallel.runtime.launcher import pool, run
wait = pool.Pool._wait_until_ready
def slowly(self):
    Path("starting").touch()
    time.sleep(60)
pool.Pool._wait_until_ready = slowly
try:
    sp.launch(print, world_size=2)
except KeyboardInterrupt as error:
    kept = error
children = Path(f"/proc/self/task/{os.getpid()}/children")
print("children:", children.read_text() if children.exists() else "")
print("sockets:", sum("socket" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")))
"""
    script = start_script(tmp_path, text)
    wait_for((tmp_path / "starting").exists)
    script.send_signal(signal.SIGINT)
    out, err = finish(script)
    assert err == ""
    assert out.split() == ["children:", "sockets:", "0"]


def test_ctrl_c_on_a_warm_cluster(tmp_path: Path) -> None:
    text = (
        RANKS
        + """
import numpy as np
cluster = sp.Cluster(2)
pids = cluster.run(os.getpid)
try:
    cluster.run(work)
except KeyboardInterrupt:
    print("interrupted")
print(cluster.run(lambda: int(sp.all_reduce(np.ones(1))[0])), cluster.run(os.getpid) == pids)
"""
    )
    script = start_script(tmp_path, text, "collective")
    started(tmp_path)
    script.send_signal(signal.SIGINT)
    assert finish(script) == ("interrupted\n[2, 2] True\n", "")
    assert len(list(tmp_path.glob("finally?"))) == 2


def test_ctrl_c_while_a_payload_is_half_sent(tmp_path: Path) -> None:
    """Half a message must never be read as the beginning of the next one."""
    text = """
import os, signal, sys, time
import simparallel as sp
cluster = sp.Cluster(2)
pids = cluster.run(os.getpid)
os.kill(pids[1], signal.SIGSTOP)
print("stopped", flush=True)
try:
    cluster.run(len, bytes(8 << 20))
except KeyboardInterrupt:
    print("interrupted")
print(cluster.run(len, b"12345"))
"""
    script = start_script(tmp_path, text)
    assert script.stdout is not None
    assert script.stdout.readline() == "stopped\n"
    wait_for(lambda: "sock" in Path(f"/proc/{script.pid}/wchan").read_text() or time.sleep(0.5) is None)
    script.send_signal(signal.SIGINT)
    assert finish(script) == ("interrupted\n[5, 5]\n", "")


def test_many_launches_do_not_add_up() -> None:
    sp.launch(sp.get_rank, world_size=2)
    before = belongings()
    for number in range(3):
        if number == 1:
            failure(sp.launch, os._exit, (1,), world_size=2, echo=False)
        else:
            sp.launch(sp.get_rank, world_size=2)
        now = belongings()
        assert {kind: len(now[kind]) for kind in now} == {kind: len(before[kind]) for kind in before}


def test_error_file(tmp_path: Path) -> None:
    def fail() -> None:
        if sp.get_rank() == 1:
            raise ValueError("ünicode \x00")
        sp.barrier()

    failure(sp.launch, fail, world_size=2, log_dir=tmp_path, echo=False)
    reports = [json.loads((tmp_path / f"error_rank{rank}.json").read_text()) for rank in range(2)]
    assert reports[1]["summary"] == "ValueError: ünicode \x00"
    assert [report["secondary"] for report in reports] == [True, False]
    assert reports[1]["time_ns"] < reports[0]["time_ns"]
