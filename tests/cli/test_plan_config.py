"""`simparallel plan --config`: the table, the file, and what does not go with it."""

from __future__ import annotations

import json
import re

import pytest

import simparallel as sp
from simparallel.cli.main import main

ARGUMENTS = ["plan", "--config", "gpt2-xl", "-n", "8", "--cluster", "dgx-h100", "--global-batch", "16"]


def test_table_begins_with_a_summary(capsys):
    assert main(ARGUMENTS) == 0
    first, best, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("gpt2-xl: 1.56 billion parameters, 16 sequences of 1,024 tokens on 8 x h100")
    assert best.startswith("best: ")
    assert header.split()[:4] == ["tensor", "context", "data", "pipeline"]
    assert [row.split()[0] for row in rows[:10]] == [str(number) for number in range(1, 11)]
    # On one node there are no links between nodes.
    assert "nodes" not in header


def test_printed_plans_are_arguments(tmp_path, capsys):
    path = tmp_path / "plans.json"
    assert main([*ARGUMENTS, "--json", "--out", str(path)]) == 0
    plans = json.loads(path.read_text())
    assert plans == json.loads(capsys.readouterr().out)
    results = ("data", "step_time_s", "mfu", "memory_bytes", "verdict", "breakdown")
    for plan in plans[:3]:
        told = {name: plan.pop(name) for name in results}
        step = sp.predict_transformer("gpt2-xl", "dgx-h100", 8, **plan)
        assert (step.step_time_s, step.memory_bytes) == (told["step_time_s"], told["memory_bytes"])


def test_memory_limit_is_kept(capsys):
    assert main([*ARGUMENTS, "--json", "--device-memory", "10GB"]) == 0
    assert all(plan["memory_bytes"] < 10**10 for plan in json.loads(capsys.readouterr().out))


def test_check_tells_how_far_a_dry_run_is(capsys):
    """gpt2 is the smallest config; its program trains here as two stages, two replicas or in tensor slices."""
    command = ["plan", "--config", "gpt2", "-n", "2", "--cluster", "dgx-h100", "--global-batch", "4"]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert main([*command, "--check"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(table)
    plan, compared = told.removeprefix(table).splitlines()
    sizes = re.match(r"check: the best plan .*, tensor (\d) x data (\d) x pipeline (\d),", plan)
    assert sorted(map(int, sizes.groups())) == [1, 1, 2]
    time, memory = (float(part) for part in re.findall(r"\(([+-].*?)%\)", compared))
    assert abs(time) <= 3
    assert abs(memory) <= 3
    # The table is a document of its own.
    assert main([*command, "--check", "--json"]) == 0
    streams = capsys.readouterr()
    assert len(json.loads(streams.out)) == 10
    assert streams.err.endswith(told.removeprefix(table))


def test_check_of_a_type_without_a_program_is_refused(capsys):
    assert main([*ARGUMENTS, "--dtype", "float8", "--check"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "float8 is priced alone" in told.err


@pytest.mark.parametrize("more", [["resnet50"], ["--method", "auto"], ["--batch-size", "8"], ["--global-batch", "0"]])
def test_options_of_models_are_refused(more, capsys):
    assert main([*ARGUMENTS, *more]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert more[0].strip("-") in told.err.replace("_", "-") or "what" in told.err


def test_plan_of_nothing_is_refused(capsys):
    assert main(["plan", "--cluster", "dgx-h100"]) == 2
    assert "pass --config" in capsys.readouterr().err
