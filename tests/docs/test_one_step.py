"""`tutorials/one_step.py`: one data-parallel step stays within its budget, and its paths can be followed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from test_readme import ROOT, run_in

import simparallel as sp
from simparallel.trace import CallTrace

# A reader follows one step in an hour: this may fall, and not rise.
CALLS, FUNCTIONS, FILES = 299, 120, 30


@pytest.fixture(scope="module")
def one_step() -> Iterator[ModuleType]:
    folder = str(ROOT / "tutorials")
    sys.path.insert(0, folder)  # devices import it, too
    yield importlib.import_module("one_step")
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def step(one_step: ModuleType):
    # Some calls come in between, such as those of a garbage collection: the step with the fewest has none.
    return min((sp.launch(one_step.train, world_size=2)[0] for _ in range(4)), key=lambda step: step.total()[0])


@pytest.mark.process
def test_step_stays_within_its_budget(step) -> None:
    calls, functions, files = step.total()
    assert calls <= CALLS
    assert functions <= FUNCTIONS
    assert files <= FILES


@pytest.mark.process
def test_every_phase_is_counted(step) -> None:
    assert set(step.calls) == {"forward", "loss", "zero_grad", "backward", "optimizer"}
    assert all(step.total(phase)[0] > 0 for phase in step.calls)


@pytest.mark.process
def test_one_more_call_is_counted() -> None:
    def program() -> list[tuple[int, int, int]]:
        totals, x = [], sp.Tensor([1.0])
        sp.functions.relu(x)  # plans
        for count in (1, 2):
            step = CallTrace()
            with step.phase("forward"):
                for _ in range(count):
                    sp.functions.relu(x)
            totals.append(step.total("forward"))
        return totals

    once, twice = sp.launch(program, world_size=1)[0]
    assert twice[0] > once[0] > 0
    assert twice[1:] == once[1:]


@pytest.mark.process
def test_paths_lead_from_backward_to_the_bytes(step, one_step: ModuleType) -> None:
    assert set(step.paths) == set(one_step.ENDS)
    for name, path in step.paths.items():
        assert path[0][2] == "backward"
        assert f"{path[-1][0]}:{path[-1][2]}" == one_step.ENDS[name][0]


@pytest.mark.process
def test_script_prints_the_paths(tmp_path) -> None:
    done = run_in(tmp_path, sys.executable, "-W", "error", str(ROOT / "tutorials" / "one_step.py"))
    assert done.returncode == 0, done.stderr
    assert "run_backward(self, seed" in done.stdout
    assert done.stdout.count("autograd/tensor.py:") == 4
