"""The zoo: every mistake is found, every mended program passes, and the page is that of the records."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import zoo
from simparallel.backend import random_state
from simparallel.cli.main import main
from simparallel.course.zoo.given import X
from simparallel.errors import NotEquivalentError, UnknownNameError

sys.path.append(str(Path(__file__).parents[3] / "docs" / "extensions"))
from zoo_page import page

PAGE = Path(__file__).parents[3] / "docs" / "zoo.md"

ENTRIES = [pytest.param(zoo.get(name), id=name) for name in zoo.names()]


@pytest.mark.timeout(5)
@pytest.mark.parametrize("entry", ENTRIES)
def test_mistake_is_found(entry):
    finding = entry.find()
    assert finding is not None
    assert isinstance(finding.error, entry.raises or NotEquivalentError)
    assert entry.says in str(finding)
    zoo.check(entry.name, entry.mended)


@pytest.mark.parametrize("entry", ENTRIES)
def test_record_is_complete(entry):
    assert 1 <= entry.lesson <= 11
    assert entry.title[-1] != "."
    assert entry.says
    for text in (entry.seen, entry.elsewhere):
        assert text.endswith((".", ").")), text
    assert entry.source != entry.mended_source
    assert len(entry.source.splitlines()) < 40
    for source in (entry.source, entry.mended_source):
        assert not re.search(r"# \+ |  # -$", source, re.MULTILINE)


def test_there_are_enough():
    assert len(zoo.names()) >= 30
    assert len({entry.values[0].title for entry in ENTRIES}) == len(ENTRIES)


def test_error_names_line_of_source():
    entry = zoo.get("different_roots")
    line = 1 + entry.source.splitlines().index("    sp.broadcast(weights, src=sp.get_rank())")
    assert f"at different_roots.py:{line} in different_roots" in entry.told


def test_source_is_whole_program():
    names = {}
    exec(zoo.get("divided_twice").mended_source, names)
    sp.testing.assert_equivalent(names["divided_twice"], world_size=3)


def test_check_refuses_wrong_program():
    entry = zoo.get("divided_twice")
    with pytest.raises(AssertionError, match="(?s)divided_twice: your program has a mistake still.*0.5 times"):
        zoo.check("divided_twice", entry.program)


def broken():
    raise ValueError("not yet")


def test_check_refuses_failing_program():
    with pytest.raises(AssertionError, match="(?s)your program has a mistake still.*ValueError: not yet"):
        zoo.check("different_roots", broken)


@pytest.mark.parametrize("result", [None, np.zeros(4), [np.ones(4)], X])
def test_check_refuses_other_result(result):
    with pytest.raises(AssertionError, match="different_roots: the mistake is gone, but your program returns"):
        zoo.check("different_roots", lambda: result if sp.get_rank() == 1 else np.ones(4))


def test_check_takes_another_way():
    def weights():
        return sp.scatter([np.zeros(4)] * 2 if sp.get_rank() == 0 else None, src=0)

    zoo.check("different_roots", weights)


def test_unknown_name_is_refused():
    with refused(UnknownNameError):
        zoo.get("no_all_reduction")
    with refused(UnknownNameError):
        zoo.check("xyzzy", broken)


def test_texts_show_the_record():
    entry = zoo.get("no_set_epoch")
    html = entry._repr_html_()
    for text in (str(entry), html):
        assert "sampler.set_epoch(epoch)" in text
        assert entry.seen in text
        assert "Found by the run" in text
    assert "\n-" not in entry.source
    assert "PyTorch&#x27;s" in html
    assert "failed: UserWarning: DistributedSampler" in entry.find()._repr_html_()
    assert repr(entry) == "WrongProgram('no_set_epoch')"


def same_everywhere(text):
    """Return the text without numbers that other machines round differently, and without the rank that was first."""
    return re.sub(r"\brank \d", "rank R", re.sub(r"-?\d+\.\d+(e-\d+)?", "N", text))


def test_page_is_that_of_the_records():
    assert same_everywhere(PAGE.read_text()) == same_everywhere(page()), (
        "python docs/extensions/zoo_page.py docs/zoo.md"
    )


def test_seed_of_the_caller_changes_nothing():
    """With other initial weights, the calls would first differ in another place."""
    entry = zoo.get("largest_gradient_first")
    told = entry.told
    sp.manual_seed(5)
    assert str(entry.find()) == told
    assert random_state.seed == 5


def test_command_lists_and_shows(capsys):
    assert main(["zoo"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in zoo.names())
    assert main(["zoo", "swapped_tags"]) == 0
    assert "DeadlockError: every rank waits" in capsys.readouterr().out
    assert main(["zoo", "swapped_tags", "--source"]) == 0
    assert capsys.readouterr().out == zoo.get("swapped_tags").source
    assert main(["zoo", "--source"]) != 0
    assert "simparallel zoo NAME --source" in capsys.readouterr().err
    assert main(["zoo", "swaped_tag"]) != 0
    assert "Did you mean swapped_tags" in capsys.readouterr().err
