"""`benchmarks ddp`: ratios, refused settings, with torch and without. No timing is asserted."""

from __future__ import annotations

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from refusals import refused

from benchmarks import ddp
from benchmarks.__main__ import main
from benchmarks.contest import Result
from benchmarks.errors import BenchError
from simparallel.errors import InputError

TASK = ddp.TASKS[-1]
OWN = (ddp.OURS, ddp.UNRECORDED, ddp.ONE_RANK, ddp.APART)


def row(**times_s):
    labels = {"ours": ddp.OURS, "unrecorded": ddp.UNRECORDED, "one": ddp.ONE_RANK, "apart": ddp.APART}
    labels["torch"] = ddp.TORCH
    return ddp.Row(TASK, 4, 2, Result(TASK.title, {labels[name]: list(values) for name, values in times_s.items()}))


def test_ratios_are_medians_of_the_rounds():
    four = row(
        ours=(2.0, 4.0, 2.0, 9.0),  # the order of turns affects single rounds, but not pairs of neighbours
        unrecorded=(2.0, 4.0, 2.0, 5.0),
        one=(1.0,) * 4,
        apart=(2.0,) * 4,
        torch=(8.0,) * 4,
    )

    assert four.speedup == pytest.approx(8 / 3)
    assert four.efficiency == pytest.approx(2 / 3)  # 4 ranks on 2 cores may take twice as long as one
    assert four.recording == 1
    assert four.communication == 1.5
    assert ddp.table([four]).splitlines()[1].split()[-7:] == ["2", "s", "2.67", "0.67", "0.67", "+0.0", "%"]


def test_row_without_torch_has_no_ratio_to_it():
    alone = row(ours=(2.0,), unrecorded=(2.0,), one=(1.0,), apart=(2.0,))

    assert alone.speedup is None
    assert alone.document()["speedup_over_torch"] is None
    assert " - " in ddp.table([alone])


@pytest.mark.parametrize("difference", [1e-9, float("nan")])
def test_parameters_that_differ_are_an_error(difference):
    cluster = SimpleNamespace(run=lambda *args: [(0.1, 0.0), (0.2, difference)])
    with refused(BenchError):
        ddp._ours(cluster)(TASK, 1)
    assert ddp._ours(SimpleNamespace(run=lambda *args: [(0.1, 0.0), (0.2, 0.0)]))(TASK, 1) == 0.2


@pytest.mark.parametrize("settings", [{"ranks": [0]}, {"ranks": []}, {"rounds": 0}, {"names": ["VGG"]}])
def test_bad_input_is_refused_before_the_start(settings, monkeypatch):
    monkeypatch.setattr(ddp, "_contenders", None)
    with refused(InputError):
        ddp.main(**settings)


@pytest.mark.process
def test_command_prints_json_and_torch_hint(capsys, monkeypatch):
    monkeypatch.setattr(ddp.main, "__kwdefaults__", {**ddp.main.__kwdefaults__, "turn_s": 0.005})
    assert main(["ddp", "--json", "-n", "2", "--rounds", "1", "--models", "lenet"]) == 0
    out, err = capsys.readouterr()
    (entry,) = json.loads(out)["rows"]

    assert "benchmarks --setup --peers torch" in err
    assert (entry["ranks"], entry["batch_size"]) == (2, 64)
    assert set(entry["median_s"]) == set(OWN)
    assert entry["parallel_efficiency"] > 0


@pytest.mark.matrices
@pytest.mark.process
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_torch_trains_the_same_model_beside_us(torch_here):
    torch_here(ddp.PEER)
    (only,) = ddp.main(ranks=[2], names=["lenet"], rounds=1, turn_s=0.005)

    assert set(only.result.times_s) == {*OWN, ddp.TORCH}
    assert only.speedup > 0
