"""`simparallel plan`: plans of models and of scripts, files, pictures, errors."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import simparallel as sp
from simparallel.cli import main
from simparallel.search.model_steps import MODELS, ModelStep
from simparallel.search.plan import Plan

MLP = ["plan", "mlp", "--cluster", "dgx-h100", "-n", "4"]
SCRIPT = """
import sys, numpy as np, simparallel as sp
sp.init()
with sp.no_init_parameters():
    net = sp.nn.Linear(1024, 1024)
step = sp.AutoParallel(lambda x: net(x).sum().backward(), "auto")
print("for the user", sys.argv[1:])
step(np.ones((64, 1024), np.float32))
step(np.ones((64, 1024), np.float32))
step(np.ones((32, 1024), np.float32))
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # Scripts add their folder, and replace the arguments.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_plan_of_a_model_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*MLP, "--all-ops", "--out", "plan.json", "--picture", "plan.png"]) == 0

    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "mlp: a training step on 128 samples of shape (784,), cross-entropy, Momentum"
    assert lines[1].startswith("7 ops on 4 devices of 4 x h100; ")
    assert [line.split()[0] for line in lines if line.split()[0].endswith(".Linear")] == [
        "1.Linear",
        "3.Linear",
        "5.Linear",
    ]
    assert 'written: plan.json; to execute it: AutoParallel(step, "auto", plan="plan.json")' in lines
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    # No terminal, no progress.
    assert captured.err == ""


def test_a_plan_begins_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """One row stands for all ops of a kind with the same strategy, so every op is counted once."""
    assert main.main(["plan", "lenet5", "--cluster", "dgx-h100", "-n", "4", "--out", "plan.json"]) == 0
    plan, lines = Plan.load("plan.json"), capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[2:4]] == ["Cut", "memory of a device, as modelled"]
    rows = lines[lines.index(next(line for line in lines if line.startswith("op "))) + 1 : -1]
    alike = Counter((op.op, op.in_strategy, op.out_strategy) for op in plan.ops)
    firsts = {key: next(op.name for op in plan.ops if (op.op, *op[3:5]) == key) for key in alike}
    assert [row.split()[0] for row in rows] == list(firsts.values())
    more = [int(found[1]) if (found := re.search(r" and (\d+) more ", row)) else 0 for row in rows]
    assert more == [count - 1 for count in alike.values()]
    assert max(more) > 0


def test_explanations_follow_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*MLP, "--explain", "5.Linear", "--explain", "ReLU"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("of all other ops:")] == ["5.Linear", "ReLU"]
    assert main.main([*MLP, "--explain", "Linaer"]) == 2
    assert "no op 'Linaer'" in capsys.readouterr().err


def test_the_front_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*MLP, "--batch-size", "4096", "--front", "--out", "plan.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["plan", "memory", "step", "micro-batches", "recomputed", "parts"]
    count = sum(line.startswith("written") for line in lines)
    assert [line.split()[0] for line in lines[2 : 2 + count]] == [str(number + 1) for number in range(count)]
    first, last = Plan.load("plan.json"), Plan.load(f"plan-{count}.json")
    assert first.memory_bytes < last.memory_bytes
    assert first.step_time_ps > last.step_time_ps
    assert first.num_micro_batches > last.num_micro_batches == 1


def test_plan_of_a_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*MLP, "--batch-size", "64", "--out", "plan.json", "--json"]) == 0

    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert plan == Plan.load("plan.json")
    assert plan.device_num == 4
    assert plan.ops[0].shapes == ((64, 784),)


def test_written_plan_can_be_executed() -> None:
    assert main.main([*MLP, "--batch-size", "8", "--out", "plan.json"]) == 0

    def steps(count: int) -> None:
        run = sp.AutoParallel(ModelStep(MODELS["mlp"]), "auto", plan="plan.json")
        for _ in range(count):
            run(np.zeros((8, 784), np.float32), np.zeros(8, np.int64))

    # The first call also compares the shapes of all ranks.
    one, two = (sp.dry_run(steps, (count,), world_size=4, cluster="dgx-h100").makespan_s for count in (1, 2))
    assert two - one == pytest.approx(Plan.load("plan.json").step_time_s)


def test_plans_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    command = ["plan", "--cluster", "dgx-h100", "-n", "4", "--out", "p.json", "train.py", "--", "--epochs", "3"]
    assert main.main(command) == 0

    captured = capsys.readouterr()
    assert captured.err.startswith("[rank 0] for the user ['--epochs', '3']")
    assert "for the user" not in captured.out
    # A step for each shape of the batch: known shapes are not searched again.
    assert [Plan.load(name).ops[0].shapes[0] for name in ("p.json", "p-2.json")] == [(64, 1024), (32, 1024)]
    assert not Path("p-3.json").exists()


def test_a_script_plans_within_the_given_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Its plans fit, or the error says what the least needs."""
    Path("train.py").write_text(SCRIPT)
    command = ["plan", "--cluster", "dgx-h100", "-n", "4", "--out", "p.json", "train.py"]
    assert main.main(command) == 0
    free = Plan.load("p.json").memory_bytes
    assert free is not None
    assert main.main([*command, "--device-memory", f"{free}B"]) == 0
    assert Plan.load("p.json").memory_bytes == free
    capsys.readouterr()
    assert main.main([*command, "--device-memory", "100KB"]) != 0
    assert "no plan fits into 100 kB of memory on a device" in capsys.readouterr().err


def test_progress_of_a_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    Path("train.py").write_text(SCRIPT)
    assert main.main(["plan", "--cluster", "dgx-h100", "-n", "4", "train.py"]) == 0
    assert "\rsearching: 0 %" in capsys.readouterr().err


def test_script_without_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("import simparallel as sp\nsp.init()\n")
    assert main.main(["plan", "train.py", "--cluster", "dgx-h100", "-n", "2"]) == 2
    assert "train.py made no search" in capsys.readouterr().err


REFUSED = {
    "unknown model": (
        ["plan", "resnet5", "--cluster", "a100"],
        "plan: resnet5 is neither a model (mlp, lenet5, resnet18, resnet50, gpt) nor a script. Did you mean resnet50?",
    ),
    "nothing fits": ([*MLP, "--device-memory", "100KB"], "no plan fits into 100 kB of memory on a device; "),
    "no size": ([*MLP, "--device-memory", "much"], "--device-memory='much'"),
    "no method": ([*MLP, "--method", "luck"], "method='luck' is not one of auto, "),
    "no cluster": (["plan", "mlp", "--cluster", "h"], "'h' is not a preset"),
    "no samples": ([*MLP, "--batch-size", "0"], "--batch-size 0: must be at least 1."),
    "arguments of a model": (["plan", "--cluster", "a100", "mlp", "5"], "mlp is a model and takes no arguments"),
    "batch of a script": (
        ["plan", "s.py", "--cluster", "a100", "--batch-size", "4"],
        "--batch-size is an option for models",
    ),
    "missing script": (["plan", "s.py", "--cluster", "a100"], "script s.py cannot be read: No such file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, told = REFUSED[name]
    assert main.main(command) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_progress_is_one_line_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    assert main.main(MLP) == 0
    err = capsys.readouterr().err
    assert "\rsearching: 0 %" in err
    assert err.endswith(" \r")
    assert "\n" not in err
