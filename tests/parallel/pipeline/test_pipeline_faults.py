"""Pipelines that fail: the error names stage and micro-batch, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest
from leaks import no_leaks  # noqa: F401 (a fixture)
from refusals import refused

import simparallel as sp
from simparallel import nn
from simparallel.errors import DeadlockError, RunFailedError, ScheduleError, ShapeError
from simparallel.parallel import Pipeline
from simparallel.parallel.pipeline.step import PipelineStep

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks")]


class Part(nn.Module):
    """Fails on rank 2 in its third call."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer, self.fault, self.calls = nn.Linear(4, 4), fault, 0

    def forward(self, x):
        self.calls += sp.get_rank() == 2
        if self.calls == 3 and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and self.fault == "raise":
            raise ValueError("a fault")
        y = self.layer(x)
        return y[:, :3] if self.fault == "shape" else y


def _square(y, labels):
    return ((y - labels) ** 2).sum(-1).mean()


def _train(fault):
    network = nn.Sequential(*[Part(fault if i == 2 else "") for i in range(4)])
    pipeline = Pipeline(network, _square, 8)
    if fault == "tag" and sp.get_rank() == 1:
        tag = PipelineStep._tag
        PipelineStep._tag = lambda step, direction, value, m: tag(step, direction, value, m if m != 3 else 5)
    x = np.ones((16, 4), np.float32)
    pipeline.step(x, x)


def _failed(fault):
    # Where the other ranks are stopped depends on their speed, so the text is not compared.
    with pytest.raises(RunFailedError) as info:
        sp.launch(_train, (fault,), world_size=4, echo=False)
    return info.value


def test_a_killed_stage():
    """The others tell for which values of its stage they waited."""
    error = _failed("kill")
    assert error.facts["rank"] == 2
    for rank in (0, 1, 3):
        (note,) = error.facts["reports"][rank]["notes"]
        kinds = "forward|backward"
        assert re.match(rf"In the pipeline: {rank}[FB]\d, ({kinds}) of micro-batch \d in stage {rank} \({rank}\)", note)
        assert re.search(r" Tag \d+ is .*value 0 of stage \d for stage \d, micro-batch \d\.$", note)
        assert note in str(error)


def test_an_error_in_a_stage():
    error = _failed("raise")
    assert error.facts["rank"] == 2
    assert error.__cause__.__notes__ == ["In the pipeline: 2F2, forward of micro-batch 2 in stage 2 (2), rank 2."]


def test_a_wrong_shape():
    error = _failed("shape")
    assert isinstance(error.__cause__, ShapeError)
    assert error.__cause__.facts["layer"] == "3.layer"


def test_a_wrong_tag():
    error = _failed("tag")
    assert isinstance(error.__cause__, DeadlockError)
    (note,) = error.__cause__.__notes__
    assert re.search(r"Tag \d+ is value 0 of stage 0 for stage 1, micro-batch 5\.", note)
    assert re.search(r"Tag \d+ is value 0 of stage 0 for stage 1, micro-batch 3\.", note)


def test_a_schedule_that_deadlocks():
    """Refused before anything runs."""
    schedule = sp.pipeline_schedule("gpipe", ranks=2, microbatches=2)
    stuck = schedule.with_actions([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    with refused(RunFailedError) as info:
        sp.launch(_step, (stuck,), world_size=2, transport="inline")
    cause = info.value.__cause__
    assert isinstance(cause, ScheduleError)
    assert cause.facts.keys() >= {"rank", "cell", "stage", "microbatch"}


def _step(schedule):
    Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), _square, 2, schedule)
