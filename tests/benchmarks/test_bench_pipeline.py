"""`benchmarks pipeline`: our steps without torch, the table of bubbles, refused settings. No timing is asserted."""

from __future__ import annotations

import json

import pytest
from refusals import refused

from benchmarks import pipeline
from benchmarks.__main__ import main
from simparallel.errors import InputError
from simparallel.parallel.pipeline.rules import RULES


@pytest.mark.process
def test_our_steps_are_measured_without_torch(capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "TURN_S", 0.01)
    assert main(["pipeline", "--rounds", "1", "--json"]) == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert [row["schedule"] for row in document["rows"]] == ["gpipe", "1f1b"]
    assert all(row["times_s"][pipeline.OURS][0] > 0 for row in document["rows"])
    assert "torch is not measured" in told.err


def test_closed_forms_are_the_bubbles():
    rows = pipeline.bubbles()
    assert [name for name, *_ in rows] == list(RULES)
    assert [name for name, bubble, form, *_ in rows if form != bubble] == ["v_half", "v_min"]  # without one


def test_rounds_are_checked():
    with refused(InputError):
        pipeline.main(rounds=0)
