"""The pytest plugin's part that needs the package: warm ranks of a test session, and reports by rank.

The hooks are in `pytest_simparallel`, a module beside the package.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import cloudpickle
import pytest

from simparallel.base.callsite import is_inside
from simparallel.errors import InputError, LaunchError, RunFailedError
from simparallel.runtime.launcher.launch import Cluster, Results
from simparallel.runtime.module_watch import is_installed
from simparallel.runtime.ranks.labels import labelled_output
from simparallel.testing.leaks import belongings, new_belongings, start_blas_threads
from simparallel.testing.ranks import Ranks

# Seconds that processes and threads may take to go at the end of a session.
LIMIT_S = 3.0
# Kinds of `leaks.belongings` that the end of a session checks; a test session has descriptors of its own.
_CHECKED = ("processes", "shared memory", "threads")
_INNER = "_simparallel_inner_test"


class Pools:
    """The warm ranks of a test session, by transport."""

    def __init__(self) -> None:
        start_blas_threads()
        found = belongings()
        self._before = {kind: found[kind] for kind in _CHECKED}
        self._ranks: dict[Any, Ranks] = {}

    def ranks(self, transport: str | None, **settings: Any) -> Ranks:
        """Return the warm ranks with this transport and these settings of `Cluster`; make them if there are none."""
        key = transport, repr(sorted(settings.items()))
        if key not in self._ranks:
            self._ranks[key] = _TestRanks(transport, **{"echo": True, **settings})
        return self._ranks[key]

    def call(self, item: pytest.Function, marker: pytest.Mark) -> bool | None:
        """Run the body of a marked test on ranks; of a Hypothesis test, its body for each example."""
        size, settings = _checked(item, marker)
        ranks = self.ranks(**settings)
        handle = getattr(item.obj, "hypothesis", None)
        if handle is not None:
            inner = getattr(handle, _INNER, handle.inner_test)
            setattr(handle, _INNER, inner)

            def example(*args: Any, **kwargs: Any) -> None:
                __tracebackhide__ = True
                ranks.run(size, inner, *args, **kwargs)

            handle.inner_test = example
            return None
        __tracebackhide__ = True
        names = item._fixtureinfo.argnames
        try:
            ranks.run(size, item.obj, **{name: item.funcargs[name] for name in names})
        except LaunchError as error:
            error.add_note(f"Each rank gets its fixtures: {', '.join(names) or 'none'}.")
            raise
        return True

    def close(self) -> str:
        """End the ranks; return the resources that are left behind as a text, "" for none."""
        while self._ranks:
            self._ranks.popitem()[1].close()
        left = new_belongings(self._before, LIMIT_S)
        return "; ".join(f"{kind}: {', '.join(sorted(left[kind]))}" for kind in left)


def _checked(item: pytest.Function, marker: pytest.Mark) -> tuple[int, dict[str, Any]]:
    settings = dict(marker.kwargs)
    size = marker.args[0] if marker.args else settings.pop("size", None)
    if not isinstance(size, int) or len(marker.args) > 1:
        raise InputError(f"{item.name}: the marker is world(SIZE, transport=..., ...), such as world(4).")
    # Plugins for such tests wrap the function.
    if inspect.iscoroutinefunction(inspect.unwrap(item.obj)):
        raise InputError(
            f"{item.name}: ranks run plain functions, not async ones; call asyncio.run inside of the test."
        )
    return size, {"transport": None, **settings}


class _TestRanks(Ranks):
    """Ranks for tests: each run is in a fork of their processes, and each line of output begins with the rank."""

    def cluster(self, world_size: int, **settings: Any) -> Cluster:
        cluster = super().cluster(world_size, **settings)
        cluster.forks = True
        return cluster

    def run(self, world_size: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        __tracebackhide__ = True
        # The launcher labels the output of processes itself.
        is_inline = self.transport == "inline"
        with _by_value(), labelled_output(sys.stdout) if is_inline else nullcontext():
            return super().run(world_size, fn, *args, **kwargs)


def _is_of_tests(module: Any) -> bool:
    """Return whether a module is a test module: pytest also rewrites installed packages that have plugins."""
    names = getattr(module, "__dict__", {})
    file = names.get("__file__")
    return "@pytest_ar" in names and isinstance(file, str) and not is_installed(file) and not is_inside(file)


@contextmanager
def _by_value() -> Iterator[None]:
    """Send functions of test modules with their globals: ranks cannot import modules that pytest has rewritten."""
    known = cloudpickle.list_registry_pickle_by_value()
    modules = [m for m in list(sys.modules.values()) if _is_of_tests(m) and m.__name__ not in known]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def show_ranks(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException], report: pytest.TestReport) -> None:
    """Give the report of a failed run a section for each rank that failed, with its traceback and its output."""
    error = excinfo.value
    if not isinstance(error, RunFailedError):
        return
    output = _output_by_rank(report)
    if report.when == "call" and item.get_closest_marker("world") is not None:
        # The lines of the test are in the sections; the frames here are those of the launcher.
        head = error.args[0].partition("\n\nTraceback of rank")[0]
        short = RunFailedError("\n".join([head, *getattr(error, "__notes__", ())]), **error.facts)
        report.longrepr = pytest.ExceptionInfo.from_exc_info((type(short), short, excinfo.tb)).getrepr(style="value")
    for rank, failure in sorted(error.facts["reports"].items()):
        if not failure["secondary"]:
            title = f"rank {rank} failed: {failure['summary'].splitlines()[0]}"
            report.sections.append(
                (title, "\n".join(filter(None, [failure["places"] or failure["summary"], output.get(rank)])))
            )


def _output_by_rank(report: pytest.TestReport) -> dict[int, str]:
    """Return rank -> its lines of captured output."""
    found: dict[int, list[str]] = {}
    for name, text in report.sections:
        if name.startswith("Captured std"):
            for line in text.splitlines():
                head, bracket, rest = line.partition("] ")
                if head.startswith("[rank ") and bracket and head[6:].isdigit():
                    found.setdefault(int(head[6:]), []).append(rest)
    return {rank: "Output:\n" + "\n".join(lines) for rank, lines in found.items()}
