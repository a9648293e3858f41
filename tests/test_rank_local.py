"""Variables of which each rank has its own."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel import backend, rank_local
from simparallel.arrays.captures import running
from simparallel.base.pickling import dumps
from simparallel.rank_local import RankLocal, begin_run, per_rank


class Values(RankLocal):
    number = 0
    names: list[str] = per_rank(list)


class Kept(RankLocal):
    outlasts_runs = True
    names: list[str] = per_rank(list)


@pytest.fixture
def locals_(monkeypatch: pytest.MonkeyPatch) -> tuple[Values, Kept]:
    monkeypatch.setattr(RankLocal, "_of_runs", list(RankLocal._of_runs))
    return Values(), Kept()


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_each_thread_begins_with_the_defaults(locals_) -> None:
    values, _ = locals_
    values.number = 3
    values.names.append("a")
    assert in_a_thread(lambda: (values.number, values.names)) == (0, [])
    assert (values.number, values.names) == (3, ["a"])


def test_subclass_has_the_variables_of_its_parent(locals_) -> None:
    class More(Values):
        sizes: dict[str, int] = per_rank(dict)

    more = More()
    assert (more.number, more.names, more.sizes) == (0, [], {})


def test_run_begins_with_the_defaults(locals_) -> None:
    values, kept = locals_
    values.number = 3
    values.names.append("a")
    kept.names.append("b")
    in_a_thread(begin_run)  # of that thread alone
    assert (values.number, values.names) == (3, ["a"])
    begin_run()
    assert (values.number, values.names, kept.names) == (0, [], ["b"])


def leave_everything_open() -> None:
    """Change all that a rank may change, and restore nothing."""
    sp.manual_seed(7)
    sp.nn.Dropout()(np.ones(2))
    sp.no_grad().__enter__()
    sp.device("sim:1").__enter__()
    sp.set_auto_parallel_context(parallel_mode="data_parallel")
    sp.no_init_parameters().__enter__()


def differing() -> dict[str, Any]:
    """Return the variables of this rank that differ from those of a thread that has just begun, by class."""

    def values() -> dict[str, Any]:
        return {type(each).__name__: dict(vars(each)) for each in RankLocal._of_runs}

    mine, new = values(), in_a_thread(values)
    return {name: (mine[name], new[name]) for name in new if mine[name] != new[name]}


def before_and_after() -> tuple[Any, Any]:
    before = set(differing()), backend.random_state.snapshot()
    leave_everything_open()
    return before, (set(differing()), backend.random_state.snapshot())


def test_variables_are_pickled_by_name() -> None:
    """So a function that is sent to ranks by value may read them."""
    for local in RankLocal._of_runs:
        assert pickle.loads(dumps(local)) is local
    sent = pickle.loads(dumps(in_no_step))
    assert sent is not in_no_step
    assert sent() is True


def in_no_step() -> bool:
    return running.step == ""


@pytest.mark.process
def test_warm_rank_begins_as_a_new_one() -> None:
    with sp.Cluster(1) as cluster:
        first, second = cluster.run(before_and_after)[0], cluster.run(before_and_after)[0]
    before, after = first
    assert second == first
    # The first run did change them.
    assert {"_GradMode", "_CurrentDevice", "_Deferring"} <= after[0] - before[0]
    assert before[1] == (0, 0, 0, {}) != after[1]


def test_no_other_thread_locals() -> None:
    """A variable of a rank is a `RankLocal`, so that every run begins with the defaults."""
    folder = Path(rank_local.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if "threading.local" in path.read_text()}
    # The stand-in for CuPy has variables of host threads, as CUDA has.
    assert {name for name in found if not name.startswith("strict")} == {"rank_local.py"}
