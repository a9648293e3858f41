"""The project on macOS and Windows, as far as a Linux machine can show it: see `no_linux/sitecustomize.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests" / "no_linux"
SYSTEMS = ("darwin", "win32")
TOLD = 'simparallel: device processes do not run on Windows, so ranks are threads that take turns (transport="inline").'
LESSONS = sorted(path.stem for path in (ROOT / "tutorials").glob("[0-9][0-9]_*.py"))
systems = pytest.mark.parametrize("system", SYSTEMS)


def run(
    folder: Path, system: str, *arguments: str, limit_s: float = 100, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, on another system by its own account."""
    environment = {**os.environ, "PYTHONPATH": f"{FAKE}{os.pathsep}{ROOT}", "NO_LINUX": system, "MPLBACKEND": "Agg"}
    environment |= {"MPLCONFIGDIR": str(folder), **variables}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False,
        encoding=variables.get("PYTHONIOENCODING", "utf-8"),
    )  # fmt: skip


def said(folder: Path, system: str, program: str, **variables: str) -> str:
    done = run(folder, system, "-c", program, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_stand_ins_lack_what_the_system_lacks(tmp_path: Path) -> None:
    """A control of the control: the calls are gone for the project, and not for the standard library."""
    text = """
import os, signal, subprocess, sys
found = [sys.platform, os.name, hasattr(os, "fork"), hasattr(os, "memfd_create"), hasattr(signal, "SIGKILL")]
try:
    import fcntl
except ModuleNotFoundError:
    found.append("no fcntl")
try:
    from os import preadv
except ImportError:
    found.append("no preadv")
try:
    open("/proc/self/stat")
except FileNotFoundError:
    found.append("no /proc")
print(*found, subprocess.run([sys.executable, "-c", "print('started')"], capture_output=True, text=True).stdout.strip())
"""
    assert said(tmp_path, "darwin", text) == "darwin posix True False True no /proc started\n"
    assert said(tmp_path, "win32", text) == "win32 nt False False False no fcntl no preadv no /proc started\n"


@pytest.mark.process
@systems
def test_every_module_is_imported(tmp_path: Path, system: str) -> None:
    """Also on a processor whose stores others may see in another order."""
    text = """
import importlib, pkgutil, simparallel
names = [found.name for found in pkgutil.walk_packages(simparallel.__path__, "simparallel.")]
for name in [*names, "pytest_simparallel"]:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
    assert int(said(tmp_path, system, text, NO_LINUX_MACHINE="arm64")) > 500


TRAIN = """
import sys
import numpy as np
import simparallel as sp
from simparallel.data.imagefile import read_npy

def train():
    sp.set_seed(1)
    net = sp.parallel.DistributedDataParallel(sp.nn.Linear(3, 1))
    optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
    x = sp.Tensor(np.ones((4, 3), np.float32) * sp.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        optimizer.step()
    manager = sp.CheckpointManager("checkpoints")
    if sp.get_rank() == 0:
        print("saved", sp.get_world_size())
    manager.save(sp.get_world_size(), model=net, optimizer=optimizer)
    manager.restore(model=net, optimizer=optimizer)
    return float(sp.all_reduce(loss.detach()).item())

if __name__ == "__main__":
    results = sp.launch(train, world_size=2, transport="inline")
    assert len(set(results)) == 1
    with sp.testing.no_leaks():
        assert sp.launch(train, world_size=2) == results
    np.save("image.npy", np.zeros((2, 2), np.uint8))
    assert read_npy("image.npy").shape[:2] == (2, 2)
    with sp.Cluster(2, log_dir="logs") as cluster:
        print(cluster.transport, cluster.run(pow, 2, 5))
    if sys.platform == "win32":
        try:
            sp.launch(train, world_size=2, transport="shm")
        except sp.errors.LaunchError as error:
            print(error)
    for _ in range(20):  # more than a laptop has, if runs kept their memory
        assert sp.launch(sp.get_rank, world_size=16, transport="inline") == list(range(16))
"""


@pytest.mark.process
@systems
def test_training(tmp_path: Path, system: str) -> None:
    """By threads and, where the system has them, by processes; the same losses, checkpoints, no word but one line."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(tmp_path, system, "train.py")
    assert done.returncode == 0, done.stderr
    if system == "darwin":
        assert "shm [32, 32]" in done.stdout
        assert done.stderr == ""
        assert (tmp_path / "logs" / "worker_1.log").exists()
    else:
        assert "inline [32, 32]" in done.stdout
        assert done.stderr == f"{TOLD}\n"
        assert 'device processes do not run on Windows; use transport="inline": ranks are threads.' in done.stdout


COMMANDS = {
    "doctor": "Runs work here.",
    "zoo": "both_receive_first",
    "zoo both_receive_first": "rank 0",
    "predict -n 2 train.py": "simulated",
    "plan mlp -n 4 --cluster a100": "CrossEntropy",
}
# In a process of its own each, which says once that ranks are threads.
RUNS = {("demo -n 2 --epochs 1",): "test accuracy", ("run -n 2 train.py",) * 2: "saved 3"}
ALL_COMMANDS = """
import sys
from simparallel.cli import main
for command in sys.argv[1:]:
    print("$", command, flush=True)
    assert main.main(command.split()) == 0
"""


@pytest.mark.process
@pytest.mark.slow
def test_commands_on_windows(tmp_path: Path) -> None:
    """To a pipe, whose encoding there lacks µ in Chinese; a run a second time over the files of the first."""
    (tmp_path / "train.py").write_text(
        "import simparallel as sp\nsp.init()\nsp.all_reduce(sp.Tensor([1.0]))\nprint('saved 3')\n"
    )
    for commands, told in RUNS.items():
        done = run(tmp_path, "win32", "-c", ALL_COMMANDS, *commands, PYTHONIOENCODING="gbk")
        assert done.returncode == 0, (commands, done.stderr)
        assert done.stdout.count(told) >= len(commands), commands
        assert ".log" not in done.stdout.partition("written")[2], commands
        assert done.stderr.count(TOLD) == 1, commands
        assert "Traceback" not in done.stderr, commands
    done = run(tmp_path, "win32", "-c", ALL_COMMANDS, *COMMANDS, PYTHONIOENCODING="gbk")
    assert done.returncode == 0, (done.stdout, done.stderr)
    shown = dict(part.split("\n", 1) for part in done.stdout.split("$ ")[1:])
    assert {command: told in shown[command] for command, told in COMMANDS.items()} == dict.fromkeys(COMMANDS, True)
    assert ".log" not in done.stdout
    assert TOLD not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
@systems
def test_marked_tests(tmp_path: Path, system: str) -> None:
    """On Windows their ranks are threads; on macOS no test sees what an earlier one left in a process."""
    (tmp_path / "test_mine.py").write_text("""
import threading
import pytest
import simparallel as sp

@pytest.mark.world(2)
@pytest.mark.parametrize("number", [1, 2])
def test_state(number):
    sp.barrier()
    is_process = threading.current_thread() is threading.main_thread()
    before, threading.left_here = getattr(threading, "left_here", 0), number
    assert before == 0 or not is_process
    assert sp.get_rank() < number
""")
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "pytest_simparallel", "test_mine.py"]
    done = run(tmp_path, system, "-m", "pytest", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "rank 1 failed: AssertionError" in done.stdout


@pytest.mark.process
@systems
def test_what_needs_linux_says_so(tmp_path: Path, system: str) -> None:
    (tmp_path / "one.py").write_text("import simparallel as sp\nsp.init()\n")
    node = "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 one.py"
    for done in (
        run(tmp_path, system, "-m", "simparallel", *node.split()),
        run(tmp_path, system, "one.py", RANK="0", WORLD_SIZE="2", MASTER_PORT="29871"),
    ):
        assert done.returncode != 0
        assert "find each other only on Linux" in done.stderr
        assert not [line for line in done.stderr.splitlines() if "AttributeError" in line]


def test_names_of_files_fit_every_system() -> None:
    """No two differ by case alone, and none is reserved or has a character that Windows refuses."""
    folders = ("simparallel", "tests", "tutorials", "docs", "figures", "benchmarks", "tools")
    names = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*")]
    assert len(names) > 1000
    assert not [name for name, count in Counter(map(str.lower, names)).items() if count > 1]
    reserved = re.compile(r'[<>:"|?*\\]|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)|[. ](/|$)', re.IGNORECASE)
    assert not [name for name in names if reserved.search(name)]


def test_text_files_name_their_encoding() -> None:
    """Without one, Windows reads and writes them in an encoding of its language."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", "PLW1514"]
    names = "simparallel", "pytest_simparallel.py", "benchmarks"
    done = subprocess.run([*command, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- lessons, tutorials and exercises -------------------------------------------------------------------


# The first one with the documents, all of them with `-m systems`.
@pytest.mark.systems
@pytest.mark.process
@systems
@pytest.mark.parametrize("name", [pytest.param(LESSONS[0], marks=pytest.mark.documents), *LESSONS[1:]])
def test_lesson_runs(tmp_path: Path, system: str, name: str) -> None:
    done = run(tmp_path, system, str(ROOT / "tutorials" / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("pictures/**/*.png"))) >= 4
    assert done.stderr.count("ranks are threads") <= (system == "win32")


TUTORIALS = {
    "data_parallel_mnist": "['main'](log_dir='logs')",
    "operator_parallel": "['main'](log_dir='logs')",
    "auto_parallel_resnet": "['main'](log_dir='logs')",
    "one_step": "",
}


@pytest.mark.systems
@pytest.mark.process
@systems
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_runs(tmp_path: Path, system: str, name: str) -> None:
    script, mode = ROOT / "tutorials" / f"{name}.py", "tutorial" if TUTORIALS[name] else "__main__"
    said(tmp_path, system, f"import runpy; runpy.run_path({str(script)!r}, run_name={mode!r}){TUTORIALS[name]}")


@pytest.mark.process
@pytest.mark.parametrize(
    "system", [pytest.param("win32", marks=pytest.mark.documents), pytest.param("darwin", marks=pytest.mark.systems)]
)
def test_exercises_are_checked(tmp_path: Path, system: str) -> None:
    """Each solution is right, and no answer is not."""
    text = f"""
import runpy
from pathlib import Path
import matplotlib.pyplot as plt
from simparallel import exercises
folder = Path({str(ROOT)!r}, "tutorials", "solutions")
written = {{int(path.name[:2]): runpy.run_path(str(path)) for path in folder.glob("*.py")}}
for name in exercises.names():
    assert exercises.check(name, written[exercises.get(name).lesson][name]), name
    assert not exercises.check(name, lambda *_: None), name
    plt.close("all")
print(len(exercises.names()), "exercises")
"""
    assert (
        said(tmp_path, system, text).splitlines()[-1] == f"{len(__import__('simparallel').exercises.names())} exercises"
    )
