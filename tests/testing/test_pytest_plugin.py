"""The pytest plugin: tests on ranks, reports by rank, and the check for leaks at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simparallel.testing import marked
from simparallel.testing.ranks import Ranks

OPTIONS = ("-p", "pytest_simparallel", "-p", "no:cacheprovider", "-p", "no:randomly", "--strict-markers", "-q")
TRANSPORTS = ("inline", pytest.param("shm", marks=pytest.mark.process))
HEAD = """
import numpy as np
import pytest
import simparallel as sp

def world(size):
    return pytest.mark.world(size, transport={transport!r})
"""


@pytest.fixture
def check(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a test file in a session of its own, and return its result."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(text: str, transport: str = "inline", *options: str) -> pytest.RunResult:
        pytester.makepyfile(HEAD.replace("{transport!r}", repr(transport)) + text)
        return pytester.runpytest_inprocess(*OPTIONS, *options)

    return run


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_body_runs_on_ranks(check, transport):
    """Fixtures are sent, functions and constants of the test module too; methods and parametrised tests work."""
    result = check(
        """
        CONSTANT = 3

        def helper():
            return CONSTANT

        @pytest.fixture
        def number():
            return 4

        @world(2)
        @pytest.mark.parametrize("more", [0, 1])
        def test_function(number, more, tmp_path):
            assert number + more in (4, 5) and helper() == 3 and tmp_path.exists()
            assert sp.all_reduce(np.ones(1))[0] == sp.get_world_size() == 2

        class TestClass:
            @world(3)
            def test_method(self):
                assert sp.get_world_size() == 3

        def test_without_marker():
            assert sp.get_world_size() == 1
        """.replace("\n        ", "\n"),
        transport,
    )
    result.assert_outcomes(passed=4)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failed_ranks_have_sections(check, transport):
    result = check(
        """
        @world(3)
        def test_wrong():
            print("output of", sp.get_rank())
            sp.barrier()
            assert sp.get_rank() != 1, "on purpose"
        """.replace("\n        ", "\n"),
        transport,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "rank 1 of 3 failed: AssertionError: on purpose",
        "*- rank 1 failed: AssertionError: on purpose -*",
        '    assert sp.get_rank() != 1, "on purpose"',
        "Output:",
        "output of 1",
        "FAILED test_failed_ranks_have_sections.py::test_wrong - *",
    ])  # fmt: skip
    # Ranks that were stopped because of it have no section, and no frames of the launcher are shown.
    result.stdout.no_fnmatch_line("*- rank 0 failed*")
    result.stdout.no_fnmatch_line("*launch.py*")


def test_hang_is_reported_by_rank(check):
    result = check(
        """
        @world(2)
        def test_circle():
            sp.recv(np.empty(1), 1 - sp.get_rank())
        """.replace("\n        ", "\n")
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*every rank waits for another one*", "*- rank 0 failed: *Deadlock*", "*- rank 1 *"])


def test_examples_of_hypothesis_run_on_ranks(check):
    """All ranks get the same example, and the smallest failing one is named."""
    result = check(
        """
        from hypothesis import given, settings, strategies as st

        @world(2)
        @settings(database=None)
        @given(st.integers(0, 9))
        def test_right(n):
            assert sp.all_gather_object(n) == [n, n]

        @world(2)
        @settings(database=None)
        @given(st.integers(0, 9))
        def test_wrong(n):
            assert n < 3
        """.replace("\n        ", "\n")
    )

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["rank ? of 2 failed: AssertionError: assert 3 < 3*", "*    n=3,"])


@pytest.mark.process
def test_fixture_gives_warm_ranks(check):
    result = check(
        """
        import os

        pids = []

        @pytest.mark.parametrize("n", range(3))
        def test_pids(world, n):
            def own():
                return os.getppid()

            pids.append(tuple(world.run(2, own)))
            assert len(set(pids)) == 1, "each run is forked from the same two"

        def test_failure(world):
            world.run(2, lambda: 1 / sp.get_rank())
        """.replace("\n        ", "\n")
    )

    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*- rank 0 failed: ZeroDivisionError: division by zero -*"])


@pytest.mark.process
def test_tests_do_not_see_each_other(check):
    """A test changes what it likes on its ranks, which begin with what fixtures have set in the session's process."""
    result = check(
        """
        import os

        @pytest.fixture
        def value(request, monkeypatch, tmp_path):
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("OF_A_FIXTURE", request.node.name)
            return request.node.name, str(tmp_path)

        @world(2)
        @pytest.mark.parametrize("n", range(2))
        def test_change(monkeypatch, value, n):
            assert (os.environ["OF_A_FIXTURE"], os.getcwd()) == value
            assert "OF_A_TEST" not in os.environ
            monkeypatch.setenv("OF_A_TEST", "1")
            monkeypatch.setattr(sp, "all_reduce", None)

        @world(2)
        def test_clean():
            assert "OF_A_FIXTURE" not in os.environ and "OF_A_TEST" not in os.environ
            assert sp.all_reduce(np.ones(1)) == 2
        """.replace("\n        ", "\n"),
        "shm",
    )

    result.assert_outcomes(passed=3)


@pytest.mark.process
def test_what_cannot_be_sent_is_named(check):
    result = check(
        """
        import threading

        @pytest.fixture
        def lock():
            return threading.Lock()

        @pytest.mark.world(2)
        def test_lock(lock):
            pass
        """.replace("\n        ", "\n")
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*cannot be sent to the device processes*", "*gets its fixtures: lock*"])


@pytest.mark.parametrize("marker", ["pytest.mark.world", "pytest.mark.world('4')", "pytest.mark.world(2, 3)"])
def test_marker_without_a_size_is_refused(check, marker):
    result = check(f"\n@{marker}\ndef test_it():\n    pass\n")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_it: the marker is world(SIZE, transport=..., ...), such as world(4).*"])


def test_async_body_is_refused(check):
    """Its coroutine would never run."""
    result = check("\n@world(2)\nasync def test_it():\n    assert False\n")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_it: ranks run plain functions, not async ones*"])


@pytest.mark.process
def test_leak_fails_the_session(check, monkeypatch):
    """Ranks that do not end are found when the session ends."""
    text = "\n@pytest.mark.world(2)\ndef test_it():\n    pass\n"
    left: list[Ranks] = []
    close = Ranks.close
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "close", lambda ranks: left.append(ranks))
        patch.setattr(marked, "LIMIT_S", 0.05)
        result = check(text)
    for ranks in left:
        close(ranks)

    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*left behind by the ranks of the session*", "processes: pid *"])
    assert check(text).ret == pytest.ExitCode.OK


def test_leaks_of_one_test(check):
    result = check(
        """
        import threading

        event = threading.Event()

        def test_leak(no_leaks, monkeypatch):
            threading.Thread(target=event.wait).start()

        def test_end(no_leaks):
            event.set()
        """.replace("\n        ", "\n")
    )
    result.assert_outcomes(passed=2, errors=1)


def test_modules_of_tests_alone_are_sent_by_value():
    """Where the package is installed, pytest rewrites it as well, because it has a plugin."""
    rewritten = {"@pytest_ar": None}
    files = {__file__: True, marked.__file__: False, np.__file__: False}
    modules = [types.SimpleNamespace(__file__=file, **rewritten) for file in files]

    assert [marked._is_of_tests(module) for module in modules] == list(files.values())
    assert not marked._is_of_tests(types.SimpleNamespace(__file__=__file__))


@pytest.mark.process
def test_no_cost_where_it_is_not_used(pytester):
    """Registered twice, it is one plugin; a session without its marker and fixtures does not import the package."""
    pytester.makeconftest("pytest_plugins = ['pytest_simparallel']")
    pytester.makepyfile("""
        import sys

        def test_it(request):
            assert request.config.pluginmanager.has_plugin("pytest_simparallel")
            assert "simparallel" not in sys.modules
    """)

    pytester.runpytest_subprocess("-p", "pytest_simparallel").assert_outcomes(passed=1)


@pytest.mark.process
def test_block_of_the_guide(pytester):
    """The page's tests for pytest run as they stand."""
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    (block,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    pytester.makepyfile(block)

    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=3)


KNOWN = [
    "\n  Benchmarks are automatically disabled because xdist plugin is active.",
    'The configuration option "asyncio_default_fixture_loop_scope" is unset.\nThe event loop scope',
]


@pytest.mark.process
@pytest.mark.parametrize("texts", [KNOWN, ["another one"]], ids=["known", "other"])
def test_suite_starts_beside_other_plugins(tmp_path, texts):
    """Its settings turn warnings into errors, but not those that pytest-benchmark and pytest-asyncio give at once."""
    plugin = (
        f"import warnings\n\ndef pytest_configure(config):\n    for text in {texts}:\n        warnings.warn(text)\n"
    )
    (tmp_path / "of_a_test.py").write_text(plugin)
    root = Path(__file__).parents[2]
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    words = ["-n", "0", "-p", "of_a_test", "-p", "no:cacheprovider", "--collect-only", "-c", "setup.cfg"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, tmp_path / "test_it.py"],
        cwd=root, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}, capture_output=True, timeout=60,
    )  # fmt: skip

    assert (done.returncode == 0) == (texts is KNOWN), done.stdout.decode() + done.stderr.decode()
