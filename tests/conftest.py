"""Hypothesis profiles: "default", "fast" for `-m fast`, and "thorough" for nightly runs (HYPOTHESIS_PROFILE=thorough).

Examples of the first two are the same in every run, so a test that fails fails because of a change; nightly runs look
for new ones.

Tests marked `documents`, `faults`, `matrices`, `soak` or `systems` run only where `-m` names a mark of theirs.
Tests marked `gpu` are skipped where CuPy finds no GPU; all others see a machine without one, see array_backends.py.
Tests that a change can reach are also marked `fast`, if they have none of these; see reach.py.

`--rewrite-golden` writes the texts of errors anew; see refusals.py.
"""

from __future__ import annotations

import atexit
import compileall
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import array_backends
import cloudpickle
import pytest
import reach
import refusals
from hypothesis import HealthCheck, given, settings, strategies as st
from oracles import TRANSPORTS, World, close_processes

import simparallel
from simparallel.base.blas import limit_threads
from simparallel.clock.recorder import current_recorder, set_recorder
from simparallel.rank_local import begin_run

pytest_plugins = ["pytest_simparallel", "pytester"]

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker looks for leaks in its own folder
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-of-simparallel-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    # The workers use all cores: further threads of BLAS only wait for each other, and busily.
    limit_threads(1)
else:  # once for all workers: a host process that has to compile takes twice as long to start
    compileall.compile_dir(Path(simparallel.__file__).parent, quiet=2)

# Pytest keeps what it makes of a test's file, as it does by default: making that of all files takes five seconds.
sys.dont_write_bytecode = False

# A calibration of this machine changes every prediction for "this-host"; tests start without one.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="configuration-of-simparallel-")
    atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

# No deadline: tests share slow machines, so the time of one example means nothing.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=9,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fast", settings.get_profile("default"), max_examples=5)
settings.register_profile(
    "thorough",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "1000")),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Marks of tests that run only where `-m` names them.
ON_DEMAND = "documents", "faults", "matrices", "soak", "systems"


@pytest.fixture(scope="module")
def inline():
    with World("inline") as world:
        yield world


@pytest.fixture(scope="module", params=TRANSPORTS)
def world(request):
    with World(request.param) as world:
        yield world


@pytest.fixture(scope="module")
def processes():
    """Warm ranks that are processes: a launch of its own takes as long as thousands of collectives."""
    with World("shm") as world:
        yield world


@pytest.fixture(scope="session", params=array_backends.ARRAYS)
def arrays(request):
    """The array library in place of NumPy: the stand-in for CuPy, and CuPy where there is a GPU."""
    return request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the texts of errors anew")
    parser.addoption("--record-reach", action="store_true", help="record which files each test uses, for -m fast")
    parser.addoption("--since", default="HEAD", help="-m fast: what has changed since this revision")


def pytest_configure(config: pytest.Config) -> None:
    if "SIMPARALLEL_TEST_MPI" not in os.environ:
        refusals.golden = refusals.Golden(refusals.FOLDER, config.getoption("--rewrite-golden"))
    if config.getoption("--record-reach") and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(config.cache.mkdir("reach"))
    if config.option.markexpr == "fast":
        settings.load_profile("fast")
        if not any(config.cache.mkdir("reach").glob("*.json")):
            raise pytest.UsageError("-m fast needs a record of what each test uses; run: pytest --record-reach")


@given(st.none())
def _first_example(_: None) -> None:
    """Let Hypothesis make its generators of random numbers, while there is little in which it looks for their users.

    After `gc.freeze` it would not find that they are used.
    """


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Hide what collecting makes from the garbage collector: walking 10,000 tests takes it half a second each time."""
    _first_example()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # With the default of 700 objects, collecting takes 8 percent of the time of properties.
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.option.markexpr
    if refusals.golden is not None:
        whole = [str(Path(arg).resolve()) for arg in config.args if "::" not in arg]
        files = {item.path for item in items if any(str(item.path).startswith(arg) for arg in whole)}
        refusals.golden.collected(map(golden_id, items), (str(file.relative_to(refusals.TESTS)) for file in files))
    if wanted == "fast":
        mark_fast(config, items)
    left_out, kept = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        # The part of a matrix that needs a GPU belongs to `-m gpu`, too.
        is_left_out = marks.intersection(ON_DEMAND) and not any(mark in wanted for mark in marks & {*ON_DEMAND, "gpu"})
        (left_out if is_left_out else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    array_backends.skip_without_gpu(items)


def mark_fast(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the changes since a revision can reach."""
    record = reach.load(config.cache.mkdir("reach"))
    changed = reach.changes(config.getoption("--since"))
    found = reach.reached((item.nodeid for item in items), changed, record) if changed else set()
    slow = ("slow", *ON_DEMAND, "mpi", "gpu")
    for item in items:
        if item.nodeid in found and not any(item.get_closest_marker(mark) for mark in slow):
            item.add_marker("fast")


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.option.markexpr != "fast":
        return None
    since = config.getoption("--since")
    return f"fast: {len(reach.changes(since)) or 'no'} files differ from {since}"


recorder: reach.Recorder | None = None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Send what tests run on ranks by value: ranks need import neither the test's module nor pytest and Hypothesis."""
    global recorder
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)
    if session.config.getoption("--record-reach") and session.items:
        recorder = reach.Recorder(session.config.cache.mkdir("reach"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[object]:
    if recorder is None:
        return (yield)
    recorder.begin(item.nodeid)
    try:
        return (yield)
    finally:
        item.stash[_SETUP] = recorder.take()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[object]:
    if recorder is not None:
        recorder.end(item.nodeid, item.stash[_SETUP], recorder.take())
    return (yield)


_SETUP = pytest.StashKey[list[str]]()


def golden_id(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if refusals.golden is None or getattr(item.obj, "is_hypothesis_test", False):
        return (yield)
    with refusals.golden.of(golden_id(item)):
        return (yield)


# The file of the test before.
_last_path: Path | None = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Only tests marked `gpu` see the GPUs of this machine.

    What earlier files left alive is hidden from the garbage collector: each rank on a GPU and each check for leaks
    collects, which would take 0.2 s late in the suite.
    """
    global _last_path
    if item.path != _last_path:
        _last_path = item.path
        gc.collect()
        gc.freeze()
        if recorder is not None:
            close_processes()  # a process records for the file that started it
    with nullcontext() if item.get_closest_marker("gpu") is not None else array_backends.gpus_hidden():
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the golden files; a worker of xdist sends its part instead. Write the record of reach. End warm ranks."""
    close_processes()
    if recorder is not None:
        recorder.save()
    golden = refusals.golden
    if golden is not None and golden.rewrite:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["golden"] = golden.written, sorted(golden.gone)
        else:
            golden.save()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that has crashed sends nothing.
    written, gone = getattr(node, "workeroutput", {}).get("golden", ({}, ()))
    refusals.golden.written |= written
    refusals.golden.gone |= set(gone)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a lambda by its source, so that the cases of tests say what they call."""
    return refusals.source_of_lambda(val) if getattr(val, "__name__", "") == "<lambda>" else None


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Begin with the same random numbers, and without a context or a device that another test set outside a run."""
    before = current_recorder()
    begin_run()
    simparallel.manual_seed(0)
    yield
    set_recorder(before)
