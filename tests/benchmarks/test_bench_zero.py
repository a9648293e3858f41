"""`benchmarks zero`: our steps without torch, and beside it; the table; refused settings. No timing is asserted."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from refusals import refused

from benchmarks import zero
from benchmarks.__main__ import main
from benchmarks.contest import Result
from simparallel.errors import InputError


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(zero, "TURN_S", 0.005)


@pytest.mark.process
def test_our_steps_are_measured_without_torch(capsys):
    assert main(["zero", "-n", "2", "--rounds", "1", "--json"]) == 0
    told = capsys.readouterr()
    rows = json.loads(told.out)["rows"]
    assert [row["title"] for row in rows] == [f"{name}, 2 ranks" for name in zero.METHODS]
    assert all(set(row["times_s"]) == {zero.OURS, zero.DDP} for row in rows)
    assert "torch is not measured" in told.err


@pytest.mark.matrices
@pytest.mark.process
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_torch_trains_sharded_beside_us(torch_here):
    torch_here(zero.PEER)
    assert all(zero.TORCH in each.times_s for each in zero.main(ranks=[2], rounds=1))


def test_table_has_ours_divided_by_the_others():
    result = Result("ZeRO-3, 2 ranks", {zero.OURS: [1.0], zero.DDP: [2.0], zero.TORCH: [4.0]})
    alone = Result("ZeRO-1, 2 ranks", {zero.OURS: [1.0], zero.DDP: [2.0]})
    lines = zero.table([result, alone], zero.OURS).splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [["0.50", "0.25"], ["0.50", "-"]]


@pytest.mark.parametrize("settings", [{"ranks": [0]}, {"ranks": []}, {"rounds": 0}])
def test_bad_settings_are_refused(settings):
    with refused(InputError):
        zero.main(**settings)
