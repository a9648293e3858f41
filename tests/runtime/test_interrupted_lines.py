"""Lines of interrupted ranks: after a deadline, after another rank's failure, at Ctrl-C."""

from __future__ import annotations

import importlib
import re
import signal
from pathlib import Path

import pytest
from leaks import finish, no_leaks, start_script  # noqa: F401 (no_leaks is a fixture)
from refusals import refused

import simparallel as sp
from simparallel.errors import DeadlineError, RunFailedError
from simparallel.runtime.reports import MAX_PLACES, failure_report, where_stopped

pytestmark = pytest.mark.process

LOOP = """
import sys
import simparallel as sp

def busy():
    sp.barrier()
    if sp.get_rank() == 0:
        print("started", flush=True)
        while True:
            pass
    sp.barrier()

if __name__ == "__main__":
    {what}
"""


def busy() -> None:
    if sp.get_rank() == 0:
        while True:
            sum(range(100))
    sp.barrier()


def test_deadline_names_the_line_of_the_busy_rank() -> None:
    with refused(RunFailedError) as info:
        sp.launch(busy, world_size=3, timeout_s=0.5, echo=False)
    first = busy.__code__.co_firstlineno
    line = rf"({first + 2}|{first + 3})"
    assert isinstance(info.value.__cause__, DeadlineError)
    assert re.search(rf"^rank 0 was at .*{Path(__file__).name}:{line} in busy$", str(info.value), re.MULTILINE)
    assert re.search(f":{line} in busy$", info.value.reports[0]["at"])


@pytest.mark.parametrize("way", ["launch", "run"])
def test_ctrl_c_names_the_lines_of_the_ranks(tmp_path: Path, way: str) -> None:
    what = {"launch": "sp.launch(busy, world_size=3)", "run": "sp.init(); busy()"}[way]
    text = LOOP.format(what=what)
    if way == "run":
        (tmp_path / "loop.py").write_text(text.removeprefix("\n"))
        text = 'from simparallel.cli.main import main\nraise SystemExit(main(["run", "-n", "3", "loop.py"]))'
    script = start_script(tmp_path, text, PYTHONUNBUFFERED="1")
    assert script.stdout is not None
    assert "started" in script.stdout.readline()
    script.send_signal(signal.SIGINT)
    _, err = finish(script)
    told = re.findall(r"^ranks? ([\d, ]+) w\w+ at .* in busy$", err, re.MULTILINE)
    assert sorted(", ".join(told).split(", ")) == ["0", "1", "2"]
    assert "/run.py" not in err  # where the launcher waited


def test_lines_of_the_import_system_are_skipped() -> None:
    with pytest.raises(ModuleNotFoundError) as info:
        importlib.import_module("no_such_module")
    assert failure_report(info.value)["at"].endswith("in test_lines_of_the_import_system_are_skipped")


def test_places_are_listed_once_and_limited() -> None:
    def report(number: int) -> dict[str, object]:
        return {**failure_report(KeyboardInterrupt()), "at": f"train.py:{number} in step"}

    assert where_stopped({0: None, 1: failure_report(ValueError())}) == ""
    assert where_stopped({0: report(1), 2: report(1)}) == "ranks 0, 2 were at train.py:1 in step"
    lines = where_stopped({rank: report(rank) for rank in range(100)}).splitlines()
    assert len(lines) == MAX_PLACES + 1
    assert lines[-1] == f"and {100 - MAX_PLACES} more places"
