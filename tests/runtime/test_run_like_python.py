"""A script under `simparallel run` has the environment of `python script.py`, also at its end."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

import simparallel as sp
from simparallel.cli import main
from simparallel.errors import InputError
from simparallel.runtime.log_folder import forget_former_run, head

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


def run(text: str, *words: str, ranks: int = 1, name: str = "train.py") -> int:
    Path(name).write_text(text)
    return main.main(["run", "-n", str(ranks), name, *words])


# --- the end ----------------------------------------------------------------------------------------


def test_open_files_are_flushed() -> None:
    text = """
import atexit, bz2, gzip, io, logging.handlers, tempfile
import other, simparallel as sp
sp.init()
rank = sp.get_rank()
plain = open(f"plain_{rank}.csv", "w")
print("a,b", file=plain)
binary = open(f"binary_{rank}.bin", "wb")
binary.write(b"abc")
packed = gzip.open(f"packed_{rank}.gz", "wt")
packed.write("packed text")
folder = tempfile.TemporaryDirectory(dir=".", prefix="vanishes_")
memory = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"kept_{rank}.log"))
logging.getLogger("kept").addHandler(memory)
logging.getLogger("kept").warning("a record")
atexit.register(lambda: print("registered", file=open(f"atexit_{rank}.txt", "w")))
"""
    Path("other.py").write_text("import os\nfile = open('module_' + os.environ['RANK'], 'w')\nfile.write('of it')\n")
    assert run(text, ranks=2) == 0
    for rank in range(2):
        assert Path(f"plain_{rank}.csv").read_text() == "a,b\n"
        assert Path(f"binary_{rank}.bin").read_bytes() == b"abc"
        assert gzip.decompress(Path(f"packed_{rank}.gz").read_bytes()) == b"packed text"
        assert Path(f"module_{rank}").read_text() == "of it"
        assert Path(f"kept_{rank}.log").read_text() == "a record\n"
        assert Path(f"atexit_{rank}.txt").read_text() == "registered\n"
    assert not list(Path().glob("vanishes_*"))


def test_threads_and_processes_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
import multiprocessing, threading
from concurrent.futures import ThreadPoolExecutor
go = threading.Event()
def late():
    go.wait(5)
    open("late.txt", "w").write("complete")
    print("the thread has written")
threading.Thread(target=late).start()
executor = ThreadPoolExecutor(2)
executor.submit(late)
def child():
    open("child.txt", "w").write("complete")
multiprocessing.get_context("fork").Process(target=child).start()
threading.Timer(0.05, go.set).start()
print("the script has ended")
"""
    assert run(text) == 0
    assert Path("late.txt").read_text() == Path("child.txt").read_text() == "complete"
    out = capsys.readouterr().out
    assert out.index("the script has ended") < out.index("the thread has written")


def test_thread_without_end_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = "import threading\nthreading.Thread(target=threading.Event().wait, name='endless').start()\n"
    Path("train.py").write_text(text)
    assert main.main(["run", "--timeout", "0.2", "train.py"]) == 1
    assert "train.py ended, but thread 'endless' did not finish within 0.2 s" in capsys.readouterr().err


def test_threads_are_joined_without_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    text = "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(print, 'from a thread')\n"
    Path("train.py").write_text(text)
    assert main.main(["run", "--timeout", "inf", "train.py"]) == 0  # the pool's thread idles until it is told to end
    assert "from a thread" in capsys.readouterr().out


def _leave_open(path: str) -> None:
    global _left
    _left = open(path, "w")  # noqa: SIM115
    _left.write("from a function")


def test_files_of_functions_are_flushed_at_the_end(tmp_path: Path) -> None:
    sp.launch(_leave_open, (str(tmp_path / "launched"),))
    assert (tmp_path / "launched").read_text() == "from a function"
    with sp.Cluster(1) as cluster:
        cluster.run(_leave_open, str(tmp_path / "warm"))
    assert (tmp_path / "warm").read_text() == "from a function"


def test_files_of_a_failed_script_are_flushed() -> None:
    assert run("file = open('so_far.csv', 'w')\nfile.write('1,2')\nraise ValueError('no')\n") == 1
    assert Path("so_far.csv").read_text() == "1,2"


# --- logging ----------------------------------------------------------------------------------------


def test_script_configures_logging() -> None:
    text = """
import logging, simparallel as sp
sp.init()
logging.basicConfig(filename=f"own_{sp.get_rank()}.log", level=logging.DEBUG, format="mine: %(message)s")
logging.debug("a detail")
logging.info("a step")
"""
    assert run(text, ranks=2) == 0
    for rank in range(2):
        assert Path(f"own_{rank}.log").read_text() == "mine: a detail\nmine: a step\n"
        assert Path(f"runs/train/worker_{rank}.log").read_text() == ""
    assert Path("runs/train/scheduler.log").read_text().count("a step") == 2  # records of all ranks as well


def test_script_sets_the_log_level() -> None:
    text = """
import logging, os
settings = [{}, {"level": "INFO"}, {"level": "ERROR"}][int(os.environ["RANK"])]
logging.basicConfig(**settings)
logging.info('a step')
"""
    assert run(text, ranks=3) == 0
    logs = [Path(f"runs/train/worker_{rank}.log").read_text() for rank in range(3)]
    assert logs == ["", "INFO:root:a step\n", ""]


def test_default_logging_shows_warnings_once() -> None:
    """As in a plain interpreter: info records go to the log file, and warnings are shown as well."""
    text = "import logging\nlog = logging.getLogger('lib')\nlog.info('a step')\nlog.warning('a fall')\n"
    assert run(text) == 0
    assert Path("runs/train/worker_0.log").read_text() == "WARNING lib: a fall\n"
    kept = Path("runs/train/scheduler.log").read_text()
    assert kept.count("a step") == kept.count("a fall") == 1


# --- the beginning ----------------------------------------------------------------------------------


def test_script_after_chdir_keeps_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
import inspect, os, sys
os.chdir("/")
print(os.path.exists(__file__), "inspect" in inspect.getsource(sys.modules["__main__"]))
def f(x: int): ...
print(f.__annotations__)
"""
    assert run(text) == 0
    out = capsys.readouterr().out
    assert "True True" in out
    assert "{'x': <class 'int'>}" in out


@pytest.mark.parametrize("words", [["--", "--"], ["train.py", "--", "a"]])
def test_arguments_are_passed_on_unchanged(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import sys\nprint(sys.argv)\n", *words) == 0
    assert f"{['train.py', *words]}" in capsys.readouterr().out


def test_module_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("package/near.py").write_text("value = 42\n")
    Path("package/train.py").write_text(
        "import sys\nfrom .near import value\nprint(__name__, __package__, __spec__.name, value, sys.argv)\n"
    )
    Path("package/__main__.py").write_text("from . import near\nprint('all of', __package__)\n")
    assert main.main(["run", "-m", "package.train", "--lr", "1"]) == 0
    file = str(Path.cwd() / "package/train.py")
    assert f"__main__ package package.train 42 {[file, '--lr', '1']}" in capsys.readouterr().out
    assert Path("runs/train/worker_0.log").exists()
    assert main.main(["run", "-m", "package"]) == 0
    assert "all of package" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "told"), [("missing.train", "no module missing"), ("json.missing", "no such module")])
def test_missing_module_is_reported(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "-m", name]) != 0
    assert told in capsys.readouterr().err


def test_python_m_finds_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "simparallel", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "simparallel")


# --- the log directory ------------------------------------------------------------------------------


def test_logs_of_a_former_larger_run_are_removed() -> None:
    text = "import simparallel as sp\nsp.init()\nprint(sp.get_world_size(), 'ranks')\n"
    assert run(text, "--nothing", ranks=4) == 0
    Path("runs/train/notes.txt").write_text("mine")
    Path("runs/train/rank.3/notes.txt").write_text("mine")
    assert run(text, ranks=2) == 0
    logs = sorted(Path("runs/train").glob("**/worker_*.log"))
    assert [path.read_text() for path in logs] == ["2 ranks\n"] * 2
    assert sorted(path.name for path in Path("runs/train").glob("rank.*")) == ["rank.0", "rank.1", "rank.3"]
    assert Path("runs/train/notes.txt").exists()
    assert Path("runs/train/rank.3/notes.txt").exists()


def test_only_own_files_are_removed(tmp_path: Path) -> None:
    kept = ["worker_x.log", "worker.log", "loss.png", "trace.json", "node_0/worker_0.log", "rank.0/stdout"]
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "worker_7.log").symlink_to(tmp_path / "loss.png")
    forget_former_run(tmp_path)  # which were not written by this run
    (tmp_path / "scheduler.log").write_text(head(["metrics.json", "../mine", "node_0"]))
    (tmp_path / "metrics.json").write_text("ours")
    (tmp_path / "error_rank0.json").write_text("{}")
    (tmp_path.parent / "mine").write_text("mine")
    forget_former_run(tmp_path)
    assert not (tmp_path / "metrics.json").exists()
    assert (tmp_path / "error_rank0.json").exists()
    assert (tmp_path.parent / "mine").exists()
    assert all((tmp_path / name).read_text() == "mine" for name in kept)
    assert (tmp_path / "worker_7.log").is_symlink()


def test_file_in_place_of_a_link_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/1/rank.0").mkdir(parents=True)
    Path("out/1/rank.0/stdout").write_text("of mpirun")
    Path("train.py").write_text("")
    assert main.main(["run", "--output-filename", "out", "train.py"]) == 2
    told = "log directory 'out' cannot be used: 1/rank.0/stdout is a file of yours, not a link of an earlier run."
    assert told in capsys.readouterr().err
    assert Path("out/1/rank.0/stdout").read_text() == "of mpirun"


def test_empty_logs_of_a_former_run_are_removed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("scheduler.log", "worker_0.log", "worker_5.log"):
        Path(name).write_text("")
    Path("train.py").write_text("print('hello')")
    assert main.main(["run", "--log-dir", ".", "train.py"]) == 0
    assert Path("worker_0.log").read_text() == "hello\n"
    assert not Path("worker_5.log").exists()


def test_links_may_be_in_another_folder(tmp_path: Path) -> None:
    links = str(tmp_path / "links" / "r{rank}.txt")
    for _ in range(2):
        assert sp.launch(sp.get_rank, world_size=2, log_dir=tmp_path / "log", log_links=links) == [0, 1]
    assert sorted(p.name for p in (tmp_path / "links").iterdir()) == ["r0.txt", "r1.txt"]
    (tmp_path / "links" / "r0.txt").unlink()
    (tmp_path / "links" / "r0.txt").write_text("mine")
    with refused(InputError):
        sp.launch(sp.get_rank, world_size=2, log_dir=tmp_path / "log", log_links=links)


USERS_OWN = [
    "timeline.png", "trace.json", "loss.png", "metrics.json", "worker_0.log", "worker_7.log", "scheduler.log",
    "error_rank1.json", "rank.0/stdout", "rank.1",
]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", USERS_OWN)
def test_folder_with_user_files_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is changed; also the folder of a former run to which a file was added."""
    Path("train.py").write_text("")
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("mine")
    before = contents(Path.cwd())
    assert main.main(["run", "-n", "2", "--log-dir", ".", "train.py"]) == 2
    assert f"log directory '.' cannot be used: {name} is a file of yours" in capsys.readouterr().err
    assert contents(Path.cwd()) == before


def test_unrelated_files_are_kept() -> None:
    mine = ["notes.txt", "worker_x.log", "error_rank5.json", "figure.png", "rank.9/stdout"]
    for name in mine:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("mine")
    Path("train.py").write_text("import simparallel as sp\nsp.init()\nsp.log(loss=1.0)\n")
    for _ in range(2):
        assert main.main(["run", "-n", "2", "--log-dir", ".", "train.py"]) == 0
    assert all(Path(name).read_text() == "mine" for name in mine)
    assert Path("loss.png").exists()


def test_devices_keep_pictures_of_others() -> None:
    Path("timeline.png").write_text("mine")
    sp.launch(sp.get_rank, world_size=2, log_dir=".")
    Path("train.py").write_text("")
    assert main.main(["run", "--log-dir", ".", "train.py"]) == 2
    assert Path("timeline.png").read_text() == "mine"


NEVER_BEGIN = {
    "wrong fault": (["-n", "2"], "rank=9"),
    "no mpiexec": (["--transport", "mpi", "--mpiexec", "no-such-command"], ""),
    "no such device": (["--cluster", "tpu"], ""),
}


def test_run_that_never_starts_keeps_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("import simparallel as sp\nsp.init()\nsp.log(loss=1.0)\nsp.barrier()\n", ranks=3) == 0
    before = contents(Path("runs"))
    assert {"train/timeline.png", "train/loss.png", "train/metrics.json"} <= before.keys()
    monkeypatch.setattr("simparallel.comm.mpi.transport.is_available", lambda: True)
    for case, (words, fault) in NEVER_BEGIN.items():
        monkeypatch.setenv("SIMPARALLEL_FAULT", fault)
        assert main.main(["run", *words, "train.py"]) == 2, case
        assert contents(Path("runs")) == before, case


def test_failed_run_removes_former_results() -> None:
    assert run("import simparallel as sp\nsp.init()\nsp.log(loss=1.0)\nsp.barrier()\n", ranks=2) == 0
    assert run("import simparallel as sp\nsp.init()\n1 / 0\n", ranks=2) == 1
    names = {path.name for path in Path("runs/train").iterdir()}
    assert names == {
        "scheduler.log",
        "worker_0.log",
        "worker_1.log",
        "rank.0",
        "rank.1",
        "trace.json",
        "error_rank0.json",
        "error_rank1.json",
    }


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_file_as_log_directory_is_refused(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("mine")
    Path("train.py").write_text("")
    assert main.main(["run", "--log-dir", directory, "train.py"]) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert Path("file").read_text() == "mine"


# --- options of other launchers ---------------------------------------------------------------------


def test_torchrun_options(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("import os\nprint(os.environ['WORLD_SIZE'], 'in all')\n")
    assert main.main(["run", "--standalone", "--nproc-per-node", "auto", "train.py"]) == 0
    assert f"{len(os.sched_getaffinity(0))} in all" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "told"), [(["--nnodes", "1:4"], "give one number, such as 1"),
                                             (["--nproc-per-node", "gpu"], "devices are simulated")])  # fmt: skip
def test_unsupported_torchrun_options_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["run", *words, "train.py"])
    assert told in capsys.readouterr().err


def test_missing_module_is_an_input_error() -> None:
    from simparallel.runtime.ranks.script import check_script

    check_script("json.tool", is_module=True)
    with refused(InputError):
        check_script("nowhere.at.all", is_module=True)
