"""The command: exit codes, messages, files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simparallel as sp
from simparallel.cli import main
from simparallel.clock.recorder import Recorder
from simparallel.machine.cluster import describe

PNG = b"\x89PNG\r\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


@pytest.mark.process
def test_demo_keeps_its_promises(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, launch = [], sp.launch

    def launch_noting_threads(*args: Any, **settings: Any) -> Any:
        threads.append(settings.get("blas_threads"))
        return launch(*args, **settings)

    monkeypatch.setattr(sp, "launch", launch_noting_threads)
    assert main.main(["demo"]) == 0

    # On a busy machine, a second thread makes products of this size many times slower.
    assert threads == [None, 1]
    out = capsys.readouterr().out
    numbers = json.loads(Path("runs/demo/metrics.json").read_text())
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    shown = re.search(r"```\n(largest.*?)\n(largest.*?) 8.6e-06.*?\n```", readme, re.DOTALL)
    assert shown is not None
    assert shown[1] in out
    # Its last digit depends on the kernels of the BLAS.
    assert re.search(re.escape(shown[2]) + r" \d\.\de-06 \(sums in another order\)", out)
    assert numbers["test_accuracy"] >= 0.95
    assert numbers["difference_between_ranks"] == 0
    assert numbers["difference_to_one_device"] < 1e-5
    assert numbers["samples"] == [7200] * 4
    assert [row["steps"] for row in numbers["ranks"]] == [240] * 4
    written = ["scheduler.log", *(f"worker_{r}.log" for r in range(4)), "trace.json", "trace.html", "timeline.png"]
    for name in (*written, "loss.png", "metrics.json"):
        assert Path("runs/demo", name).stat().st_size > 0
        assert f"runs/demo/{name}" in out
    assert Path("runs/demo/timeline.png").read_bytes().startswith(PNG)
    assert "epoch 19: loss" in Path("runs/demo/worker_3.log").read_text()
    assert "[rank 3]" in Path("runs/demo/scheduler.log").read_text()


@pytest.mark.process
def test_demo_timeline_is_the_same_on_every_run() -> None:
    pictures = []
    for folder in ("a", "b"):
        assert main.main(["demo", "-n", "2", "--epochs", "1", "--out", folder]) == 0
        pictures.append(Path(folder, "timeline.png").read_bytes())
    assert pictures[0] == pictures[1]
    first, second = (sp.Trace.load(f"{folder}/trace.json") for folder in ("a", "b"))
    fields = [(e.rank, e.stream, e.name, e.sim_start_ps, e.sim_end_ps, e.sent_bytes) for e in first.events]
    assert fields == [(e.rank, e.stream, e.name, e.sim_start_ps, e.sim_end_ps, e.sent_bytes) for e in second.events]


@pytest.mark.process
def test_run_writes_a_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "train.py",
        "import sys, logging, simparallel as sp\n"
        "sp.init()\n"
        "sp.log(loss=1.5, part=sp.get_rank(), bad=float('nan'))\n"
        "sp.barrier()\n"
        "print(sys.argv, __name__, __file__)\n"
        "logging.getLogger('mine').warning('take care')\n",
    )
    assert main.main(["run", "-n", "2", script, "--lr", "0.1"]) == 0
    out = capsys.readouterr().out
    for rank in range(2):
        assert f"[rank {rank}] ['train.py', '--lr', '0.1'] __main__ {Path.cwd() / 'train.py'}" in out
    directory = Path("runs/train")
    assert {path.name for path in directory.iterdir()} == {
        "scheduler.log",
        "worker_0.log",
        "worker_1.log",
        "rank.0",
        "rank.1",
        "trace.json",
        "timeline.png",
        "loss.png",
        "metrics.json",
    }
    merged = (directory / "scheduler.log").read_text()
    assert "take care" in merged
    assert merged.splitlines()[-1].endswith("all device processes have ended")
    numbers = json.loads((directory / "metrics.json").read_text())
    assert numbers["metrics"] == {"loss": [[0, 1.5]], "part": [[0, 0.5]], "bad": [[0, None]]}
    assert main.main(["trace", "runs/train/trace.json", "--picture", "t.png", "--clock", "wall"]) == 0
    assert Path("t.png").read_bytes().startswith(PNG)


@pytest.mark.process
def test_script_finds_its_neighbours() -> None:
    Path("lib").mkdir()
    write("lib/helper.py", "VALUE = 7\n")
    script = write("lib/train.py", "import helper\nassert helper.VALUE == 7\n")
    assert main.main(["run", "-n", "2", script]) == 0


def test_trace_picture_shows_two_steps_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(0, describe(1))
    for step in range(9):
        recorder.work("SGD.step", "optimizer", 0, 10 + step, 10, 4)
        recorder.next_step()
    sp.Trace(recorder.events, recorder.cluster).save("t.json")
    for arguments, told in (
        ([], "(of 9 steps: 4, 5); --steps N,… or --all-steps choose others"),
        (["--steps", "7,8,0"], "(of 9 steps: 7, 8, 0)\n"),
        (["--all-steps"], "t.png\n"),
    ):
        assert main.main(["trace", "t.json", "--picture", "t.png", *arguments]) == 0
        assert told in capsys.readouterr().out
    assert main.main(["trace", "t.json", "--picture", "t.png", "--steps", "9"]) == 2
    assert "no events of step [9]; there are steps 0–8" in capsys.readouterr().err


BAD_INPUT = {
    "no device": (["run", "-n", "0", "ok.py"], 2, "-n 0: must be at least 1."),
    "negative": (["demo", "-n", "-3"], 2, "-n -3: must be at least 1."),
    "missing script": (["run", "missing.py"], 2, "missing.py cannot be read: No such file"),
    "directory": (["run", "."], 2, "is a directory"),
    "syntax error": (["run", "syntax.py"], 2, "syntax.py:2: syntax error"),
    "unknown device": (["run", "--cluster", "tpu", "ok.py"], 2, "'tpu' is not a preset of hardware; choose"),
    "unknown device of the demo": (["demo", "--cluster", "tpu"], 2, "'tpu' is not a preset"),
    "batch larger than the data": (
        ["demo", "--batch-size", "100000"],
        2,
        "a batch of 100000 samples is more than all 14",
    ),
    "no batch": (["demo", "--batch-size", "0"], 2, "--batch-size 0"),
    "module with .py": (["run", "-m", "ok.py"], 2, "-m ok.py: name the module without .py: -m ok"),
    "notebook": (["run", "lesson.ipynb"], 2, "lesson.ipynb is a notebook: call sp.launch in it"),
    "endless": (["run", "--timeout", "-1", "ok.py"], 2, "--timeout -1: must be a number above 0"),
    "no servers": (["rank-table", "make", "--servers", "0"], 2, "--servers 0: must be at least 1"),
    "steps of no picture": (["trace", "t.json", "--steps", "3,4"], 2, "--steps applies to the picture"),
    "clock without a picture": (["trace", "t.json", "--clock", "wall"], 2, "--clock applies to the picture"),
    "batch smaller than the world": (["demo", "--batch-size", "2"], 2, "2"),
    "batch not divisible": (["demo", "--batch-size", "30"], 2, "30"),
    "no epochs": (["demo", "--epochs", "0"], 2, "--epochs 0"),
    "no trace": (["trace", "missing.json"], 2, "missing.json"),
    "not a trace": (["trace", "syntax.py"], 2, "syntax.py"),
}


@pytest.mark.parametrize("case", BAD_INPUT, ids=str)
def test_bad_input_is_refused_before_the_start(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("ok.py", "")
    write("syntax.py", "x = 1\ndef f(:\n")
    arguments, code, text = BAD_INPUT[case]
    assert main.main(arguments) == code
    assert text in capsys.readouterr().err
    assert not Path("runs").exists()


USAGE = {
    "no script": (["run"], "run: error: the following arguments are required: script\n"),
    "unknown option": (["trace", "t.json", "--pgn", "x"], "usage: simparallel trace"),
    "unknown option of run": (["run", "--rank", "3", "ok.py"], "usage: simparallel run"),
    "no number": (
        ["trace", "t.json", "--picture", "t.png", "--steps", "2,a"],
        "'a' is not an integer; write integers between commas, such as 2,4,8",
    ),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_of_the_command_is_shown(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = USAGE[case]
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_shown_usage_is_right() -> None:
    """Options with several values do not swallow the following argument."""
    found = main.parser().parse_args(["trace", "--picture", "t.png", "--steps", "3,4", "t.json"])
    assert (found.steps, found.file) == ([3, 4], ["t.json"])


CANNOT_BE_WRITTEN = {
    "trace": ["trace", "trace.json", "--picture", "/proc/picture.png"],
    "rank-table": ["rank-table", "make", "--out", "/proc/picture"],
}


@pytest.mark.parametrize("command", CANNOT_BE_WRITTEN)
def test_unwritable_output_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line with the name of the file."""
    sp.launch(sp.barrier, world_size=2, transport="inline").trace.save("trace.json")
    assert main.main(CANNOT_BE_WRITTEN[command]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"simparallel: {CANNOT_BE_WRITTEN[command][-1]}")
    assert error.count("\n") == 1


FAILING = {
    "raises on one rank": ("if sp.get_rank() == 1: raise ValueError('boo')", 1, "rank 1 of 2 failed: ValueError: boo"),
    "sys.exit(3)": ("import sys\nif sp.get_rank() == 0: sys.exit(3)", 3, "rank 0 of 2 failed: sys.exit(3)"),
    "killed": ("import os\nif sp.get_rank() == 1: os.kill(os.getpid(), 9)", 137, "rank 1 of 2 failed: killed by"),
    "NaN loss": (
        "w = sp.Tensor([1.0], requires_grad=True)\n"
        "opt = sp.optim.SGD([w], lr=0.1)\n"
        "for i in range(5):\n"
        "    loss = (w * (float('nan') if sp.get_rank() == 1 and i == 3 else 1.0)).sum()\n"
        "    opt.zero_grad(); loss.backward(); sp.all_reduce(w.grad); opt.step()",
        1,
        "rank 1, step 3: the loss is nan",
    ),
    "label": (
        "import numpy as np\nsp.functions.cross_entropy(np.zeros((2, 3), 'f4'), np.array([0, 3]))",
        1,
        "label 3 at position 1",
    ),
    "shapes": ("import numpy as np\nsp.all_reduce(np.ones(2 + sp.get_rank()))", 1, "ranks made different calls"),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("case", FAILING, ids=str)
def test_failing_script_gives_root_cause_and_code(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    body, code, text = FAILING[case]
    script = write("train.py", f"import simparallel as sp\nsp.init()\n{body}\nsp.barrier()\n")
    assert main.main(["run", "-n", "2", script]) == code
    error = capsys.readouterr().err
    assert text in error
    assert error.index("failed:") < 40
    records = [json.loads(path.read_text()) for path in Path("runs/train").glob("error_rank*.json")]
    assert any(text.split("failed: ")[-1] in record["summary"] for record in records)
    assert Path("runs/train/trace.json").exists()


READERS = {"run": (["run", "-n", "2", "train.py"], 1), "doctor": (["doctor"], 0), "help": (["run", "--help"], 0)}


@pytest.mark.process
@pytest.mark.parametrize("case", READERS, ids=str)
def test_closed_output_ends_the_command_quietly(case: str) -> None:
    """As in `simparallel run train.py | head -1`, also in the middle of a run, whose ranks are stopped."""
    write("train.py", "import simparallel as sp\nsp.init()\nwhile True:\n    print('on and on')\n    sp.barrier()\n")
    words, lines = READERS[case]
    command = subprocess.Popen(
        [sys.executable, "-m", "simparallel", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with command:
        for _ in range(lines):
            assert command.stdout.readline().endswith(b"on and on\n")
        command.stdout.close()
        assert command.wait(60) == (0 if case == "help" else 128 + signal.SIGPIPE)
        assert command.stderr.read() == b""


def test_other_broken_pipes_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control: only the closed output is silent."""

    def broken(options: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(main, "_code_of", broken)
    with pytest.raises(BrokenPipeError):
        main.main(["doctor"])


def test_script_runs_alone_too() -> None:
    script = write("train.py", "import simparallel as sp\nsp.init()\nassert sp.get_world_size() == 1\n")
    subprocess.run([sys.executable, script], check=True, timeout=30)


def test_foreign_launcher_is_not_ignored() -> None:
    script = write("train.py", "import simparallel as sp\nsp.init()\n")
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "WORLD_SIZE": "4"}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "WORLD_SIZE=4" in done.stderr
