"""The pytest plugin of simparallel: tests on ranks that stay warm, failures by rank, and a leak check.

    @pytest.mark.world(4)  # the body runs on four ranks
    def test_mean():
        assert sp.all_reduce(np.ones(2), "mean").tolist() == [1.0, 1.0]

    def test_sum(world):  # from outside
        assert world.run(2, lambda: float(sp.all_reduce(np.ones(1))[0])) == [2.0, 2.0]

It is a module beside the package, so that a test session that does not use it does not import the package.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from simparallel.testing.marked import Pools

_MARKER = (
    "world(size, transport=None, **settings): run the body of the test on `size` ranks, which stay warm between "
    "tests; each test is forked from them. Fixtures are sent to each rank. transport='inline' for threads; settings "
    "are those of Cluster"
)
_LEFT = "left behind by simparallel"
_pools: pytest.StashKey[Pools] = pytest.StashKey()
_left: pytest.StashKey[str] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def _pools_of(config: pytest.Config) -> Pools:
    """Return the warm ranks of the session, made with the first test that asks for them."""
    if _pools not in config.stash:
        from simparallel.testing.marked import Pools

        config.stash[_pools] = Pools()
    return config.stash[_pools]


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Any:
    """Return warm ranks: `world.run(4, fn, *args)` calls `fn` on four processes; see `simparallel.testing.Ranks`.

    Each run is forked from them, so that no run sees what an earlier one changed in its process.
    """
    return _pools_of(pytestconfig).ranks(None)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if the test leaves processes, descriptors, threads, shared memory or temporary files behind.

    The ranks of the fixture `world` and of the marker stay by design: use it in tests that start their own.
    """
    from simparallel.testing import no_leaks

    with no_leaks():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("world")
    return None if marker is None else _pools_of(pyfuncitem.config).call(pyfuncitem, marker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and "simparallel.testing.marked" in sys.modules:
        from simparallel.testing.marked import show_ranks

        show_ranks(item, call.excinfo, report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    if _pools in stash and (left := stash[_pools].close()):
        stash[_left] = left
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[_LEFT] = left  # a worker of xdist
    if _left in stash:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if left := getattr(node, "workeroutput", {}).get(_LEFT):
        node.config.stash[_left] = left


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _left in config.stash:
        terminalreporter.section("left behind by the ranks of the session", red=True)
        terminalreporter.line(config.stash[_left])
