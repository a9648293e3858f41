"""Faults at every phase of every call: survivors name rank, cause, call and line, soon, and nothing is left behind.

By default a subset runs in which every pair of settings occurs; `pytest -m faults` runs all of them
(about 1,900 runs) and prints the survivors' delays.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
from leaks import no_leaks, wait_for  # noqa: F401 (a fixture)

import simparallel as sp
from simparallel.comm.fault_spec import PHASES
from simparallel.errors import RunFailedError
from simparallel.runtime.launcher import run

cloudpickle.register_pickle_by_value(sys.modules[__name__])

COLLECTIVES = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather",
    "scatter", "new_group",
)  # fmt: skip
PHASES_OF = {
    **dict.fromkeys(COLLECTIVES, PHASES),
    "send": ("enter", "copy_in", "published", "returned"),
    "recv": ("enter", "copy_out", "leave", "returned"),
}
ACTIONS = ("SIGKILL", "SIGSTOP", "raise", "os._exit(0)")
SIZES = (2, 3, 5)
HOW = {
    "SIGKILL": r"\(pid \d+\) was killed by SIGKILL \(often the out-of-memory killer\)",
    "os._exit(0)": r"\(pid \d+\) exited with code 0",
    "raise": "failed with simparallel.comm.fault_spec.InjectedFault: a fault was asked for",
    "SIGSTOP": r"\(pid \d+\) is stopped \(SIGSTOP or a debugger\)",
    "SIGTERM": r"\(pid \d+\) was killed by SIGTERM",
    "SIGSEGV": r"\(pid \d+\) was killed by SIGSEGV",
    "SIGINT": "failed with KeyboardInterrupt",
    "MemoryError": "failed with MemoryError: a fault was asked for",
    "exit3": r"failed with sys\.exit\(3\)",
    "exit0": "returned from its function",
    "loop": r"\(pid \d+\) is running user code",
    "hold_gil(1000)": r"\(pid \d+\) sleeps or waits",
}
FIRST = {
    "SIGKILL": "killed by SIGKILL",
    "os._exit(0)": "process ended with exit code 0",
    "raise": "simparallel.comm.fault_spec.InjectedFault",
    "SIGTERM": "killed by SIGTERM",
    "SIGSEGV": "killed by SIGSEGV",
    "SIGINT": "KeyboardInterrupt",
    "MemoryError": "MemoryError",
    "exit3": "sys.exit(3)",
}
SILENT = ("SIGSTOP", "loop", "hold_gil(1000)")  # reported by the timeout only
SPARED = ("raise", "MemoryError", "exit3", "exit0", "SIGINT", "loop")  # the process survives
STOP_TIMEOUT_S = 0.5
LIMIT_S = 20.0  # for a whole run with new processes, on a busy machine


class Case(NamedTuple):
    op: str
    phase: str
    action: str
    world_size: int
    victim: str  # "first" or "last" rank
    payload: str  # "small": a slot; "large": staging memory; "shared": read in place

    @property
    def rank(self) -> int:
        return 0 if self.victim == "first" else self.world_size - 1

    @property
    def call(self) -> tuple[Any, ...]:
        """Return the function that meets the fault, and its arguments."""
        return rounds, self.op, self.payload

    @property
    def fault(self) -> str:
        group = "p2p" if self.op in ("send", "recv") else "world"
        return f"rank={self.rank};group={group};op={self.op};seq=2;phase={self.phase};action={self.action}"


def rounds(op: str, payload: str) -> None:
    """Make the same call three times; where it is a message, a barrier ends each round."""
    me, size = sp.get_rank(), sp.get_world_size()
    x = sp.empty((size, 3 if payload == "small" else 5000), shared=payload == "shared")
    x[...] = 1
    for _ in range(3):
        if op in ("send", "recv"):
            sent = sp.isend(x, (me + 1) % size)
            sp.recv(np.empty_like(x), (me - 1) % size)
            sent.wait()
            sp.barrier()
        elif op == "new_group":
            sp.new_group(range(size))
        elif op == "barrier":
            sp.barrier()
        elif op == "scatter":
            sp.scatter(list(x) if me == 0 else None)
        else:
            getattr(sp, op)(x)


def every_case() -> list[Case]:
    payloads = itertools.cycle(("small", "large", "shared"))
    return [
        Case(op, phase, action, size, victim, next(payloads))
        for op, phases in PHASES_OF.items()
        for phase, action, size, victim in itertools.product(phases, ACTIONS, SIZES, ("first", "last"))
    ]


def pairwise(count: int) -> list[Case]:
    """Return cases in which every pair of settings occurs, filled up at random to `count`."""
    dice = random.Random(0)
    cases = every_case()
    dice.shuffle(cases)
    missing = {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(missing & {*itertools.combinations(enumerate(case), 2)}))
        chosen.append(best)
        missing -= {*itertools.combinations(enumerate(best), 2)}
    rest = [case for case in cases if case not in set(chosen) and case.action != "SIGSTOP"]  # slow cases
    return chosen + rest[: max(0, count - len(chosen))]


# --- one run -----------------------------------------------------------------------------------------


class FaultyCluster(sp.Cluster):
    """Has its fault as an attribute, because threads share the environment."""

    fault = ""

    def _fault_text(self) -> str:
        return self.fault


class Runner:
    """Runs cases of one world size, on clusters that stay warm unless the fault kills a rank."""

    def __init__(self, world_size: int, timeout_s: float, folder: Path) -> None:
        self.folder = folder
        self.cluster = FaultyCluster(world_size, timeout_s=timeout_s, echo=False, log_dir=folder)
        self.delays_ms: list[float] = []

    def check(self, case: Any) -> None:
        cluster = self.cluster
        cluster.fault = case.fault
        start = time.monotonic()
        with pytest.raises(RunFailedError) as caught:
            cluster.run(*case.call)
        assert time.monotonic() - start < LIMIT_S
        error = caught.value
        survivors = set(range(case.world_size)) - {case.rank}
        assert survivors <= set(error.reports)
        for rank in survivors:
            self.check_survivor(case, error.reports[rank]["summary"])
        if case.action == "SIGSTOP" and error.rank == case.rank:  # the launcher noticed that it was stopped
            assert f"rank {case.rank} of {case.world_size} failed: process is stopped (SIGSTOP)" in str(error)
        elif case.action in SILENT or case.action == "exit0":
            assert error.rank in survivors
            assert re.search(f"rank {case.rank} {HOW[case.action]}", str(error))
        else:
            assert str(error).startswith(f"rank {case.rank} of {case.world_size} failed: {FIRST[case.action]}")
            told = (self.folder / f"worker_{case.rank}.log").read_text()
            acted_ns = int(re.findall(r"clock_ns=(\d+)", told)[-1])
            self.delays_ms += [(error.reports[rank]["time_ns"] - acted_ns) / 1e6 for rank in survivors]
        if case.action in SPARED:
            assert cluster.run(sp.get_rank) == list(range(case.world_size))
        else:
            pids = [report["pid"] for report in error.reports.values()]
            wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 2)

    def check_survivor(self, case: Any, summary: str) -> None:
        assert re.search(f"rank {case.rank} {HOW[case.action]}", summary), summary
        function = case.call[0]
        place = rf"at [^ ]*{Path(function.__code__.co_filename).name}:\d+ in {function.__name__}"
        collective = rf"world, collective #\d \w+.*? {place}"
        message = rf"(send|recv)\(float32 .*\) {place}"
        assert re.search(f"{collective}|{message}", summary), summary

    def close(self) -> None:
        self.cluster.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank is killed at the first step; survivors have time to answer, also on a busy machine."""
    ladder = ((0.8, signal.SIGINT), (4, signal.SIGTERM), (5, signal.SIGKILL))
    monkeypatch.setattr(run, "ESCALATION", ladder)


def run_all(cases: Sequence[Any], folder: Path, side_by_side: int = 2 * len(SIZES)) -> list[float]:
    """Run the cases by world size, with slow ones separate; return the survivors' delays in ms."""

    def of_kind(kind: tuple[int, bool]) -> tuple[list[float], list[str]]:
        size, stops = kind
        timeout_s = STOP_TIMEOUT_S if stops else 20.0
        failed = []
        with contextlib.closing(Runner(size, timeout_s, folder / f"{size}{stops}")) as runner:
            for case in cases:
                if (case.world_size, case.action in SILENT) == kind:
                    try:
                        runner.check(case)
                    except (Exception, pytest.fail.Exception) as error:
                        failed.append(f"{case}: {type(error).__name__}: {error}")
        return runner.delays_ms, failed

    with ThreadPoolExecutor(side_by_side) as threads:
        results = list(threads.map(of_kind, itertools.product(SIZES, (True, False))))
    failed = [text for _, texts in results for text in texts]
    assert not failed, f"{len(failed)} of {len(cases)}:\n" + "\n".join(failed)
    return [delay for delays, _ in results for delay in delays]


@pytest.mark.matrices
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)  # many launches in a row, on a machine that other programs may use
@pytest.mark.usefixtures("hurried")
def test_pairs(tmp_path: Path) -> None:
    cases = pairwise(80)
    assert 70 < len(cases) <= 90
    delays = run_all(cases, tmp_path)
    assert max(delays) < LIMIT_S * 1000


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("op", PHASES_OF)
def test_whole_matrix(op: str, tmp_path: Path) -> None:
    run_all([case for case in every_case() if case.op == op], tmp_path)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_survivors_raise_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run after the other: 250 ms for 99 of 100, on cores that no other program uses."""
    load = os.getloadavg()[0]
    cases = [case for case in every_case() if case.action != "SIGSTOP"]
    delays = run_all(cases[:: int(os.environ.get("FAULTS_STEP", "4"))], tmp_path, side_by_side=1)
    p50, p99 = np.percentile(delays, [50, 99])
    with capsys.disabled():
        print(
            f"\n{len(delays)} survivors raised after {p50:.0f} ms (p50), {p99:.0f} ms (p99), "
            f"{max(delays):.0f} ms (max); load before: {load:.1f}"
        )
    assert p50 <= 250
    assert p99 <= 250 or load > 1
