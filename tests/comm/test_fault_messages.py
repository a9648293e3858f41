"""Faults in the middle of algorithms on messages: at each step in which a rank sends or receives."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
from leaks import no_leaks  # noqa: F401 (a fixture)
from refusals import refused
from test_fault_matrix import ACTIONS, SIZES, hurried, run_all  # noqa: F401 (a fixture)

import simparallel as sp
from simparallel.algorithms import names, offers
from simparallel.algorithms.ledger import StepTraffic
from simparallel.algorithms.rehearsal import rehearse
from simparallel.comm.fault_spec import STEP_PHASES, parse
from simparallel.errors import InputError, RunFailedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter",
       "adasum")  # fmt: skip
ELEMENTS = 12  # for each rank


class StepCase(NamedTuple):
    algorithm: str
    op: str
    phase: str
    action: str
    world_size: int
    rank: int
    step: int

    @property
    def call(self) -> tuple[Any, ...]:
        return rounds_by, self.algorithm, self.op

    @property
    def fault(self) -> str:
        return f"rank={self.rank};op={self.op};seq=2;step={self.step};phase={self.phase};action={self.action}"


def rounds_by(algorithm: str, op: str) -> None:
    size = sp.get_world_size()
    for _ in range(3):
        x = np.ones((size, ELEMENTS), np.float32)
        if op == "scatter":
            sp.scatter(list(x) if sp.get_rank() == 0 else None, algorithm=algorithm)
        elif op == "adasum":
            sp.all_reduce(x, "adasum", algorithm=algorithm)
        else:
            getattr(sp, op)(x, algorithm=algorithm)


def does(phase: str, traffic: StepTraffic) -> bool:
    return bool(traffic.sent_messages if phase in ("send", "sent") else traffic.received_messages)


def every_step() -> list[StepCase]:
    """List each end of each message of each algorithm, at 2, 3 and 5 ranks; phases and actions take turns."""
    cases, turns = [], itertools.cycle(range(8))
    for (algorithm, op), size in itertools.product(itertools.product(names()[1:], OPS), SIZES):
        if not offers(algorithm, op) or (op == "adasum" and algorithm == "halving_doubling" and size & (size - 1)):
            continue
        for entry in rehearse(algorithm, op, size, size * ELEMENTS).entries:
            for step, traffic in enumerate(entry.steps, 1):
                for begin, end in (("send", "sent"), ("receive", "received")):
                    if does(begin, traffic):
                        turn = next(turns)
                        phase, action = (begin, end)[turn & 1], ACTIONS[turn // 2]
                        cases.append(StepCase(algorithm, op, phase, action, size, entry.rank, step))
        next(turns)  # so that their cycle does not coincide with the ranks
    return cases


def some_steps(count: int) -> list[StepCase]:
    """Return cases in which every pair of algorithm, op, phase and action that can occur does occur."""
    cases = [case for case in every_step() if case.action != "SIGSTOP"]  # slow cases
    random.Random(0).shuffle(cases)
    pairs = {case: {*itertools.combinations(enumerate(case[:4]), 2)} for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & pairs[case])))
        missing -= pairs[chosen[-1]]
    return chosen + [case for case in cases if case not in set(chosen)][: max(0, count - len(chosen))]


def test_all_algorithms_phases_and_actions_occur() -> None:
    cases = every_step()
    assert {case.phase for case in cases} == set(STEP_PHASES)
    assert {(case.algorithm, case.action) for case in cases} == {*itertools.product(names()[1:], ACTIONS)}
    for size in SIZES:
        ring = {case.step for case in cases if case[:2] == ("ring", "all_reduce") and case.world_size == size}
        assert ring == set(range(1, 2 * size - 1))


@pytest.mark.matrices
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)  # many launches in a row, on a machine that other programs may use
@pytest.mark.usefixtures("hurried")
def test_some_steps(tmp_path: Path) -> None:
    cases = some_steps(15)
    assert len(cases) < 70
    assert run_all(cases, tmp_path)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
def test_stopped_rank_is_named_by_indirect_waiters(tmp_path: Path) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which is stopped."""
    assert run_all([StepCase("ring", "all_reduce", "send", "SIGSTOP", 5, 0, 3)], tmp_path) == []


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("algorithm", names()[1:])
def test_every_step(algorithm: str, tmp_path: Path) -> None:
    run_all([case for case in every_step() if case.algorithm == algorithm], tmp_path)


@pytest.mark.parametrize("phase", ["enter", "published", "reduce", *STEP_PHASES, "leave", "returned"])
def test_fault_acts_at_its_step(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a group and between threads; a fault at a step that does not occur never acts."""

    def program() -> float:
        group = sp.new_group([2, 0, 1])
        return float([sp.all_reduce(np.ones(6), group=group, algorithm="ring")[0] for _ in range(3)][-1])

    place = f"rank=1;group=1;op=all_reduce;seq=3;phase={phase};action=raise"
    in_steps = phase in STEP_PHASES
    monkeypatch.setenv("SIMPARALLEL_FAULT", place + ";step=5" * in_steps)
    if in_steps:
        assert sp.launch(program, world_size=3, transport="inline") == [3.0] * 3
    monkeypatch.setenv("SIMPARALLEL_FAULT", place + ";step=4" * in_steps)
    with pytest.raises(RunFailedError) as caught:
        sp.launch(program, world_size=3, transport="inline")
    trace = caught.value.reports[1]["traceback"]
    assert ("steps(" in trace or "_begin_" in trace) is in_steps or phase in ("sent", "received")


@pytest.mark.parametrize("text", [
    "step=0;phase=send",
    "step=2",
    "step=2;phase=reduce",
])  # fmt: skip
def test_bad_steps_are_refused(text: str) -> None:
    with refused(InputError):
        parse(f"rank=0;action=raise;{text}", 1)
