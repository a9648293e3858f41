"""Texts of errors in the golden files: a changed, a new and an unused text fail, and the flag rewrites the files."""

from __future__ import annotations

import re

import pytest
import refusals
from hypothesis import given, strategies as st

from simparallel.errors import InputError, ShapeError

OLD = "a/test_x.py::test_y[1]"


@pytest.fixture
def golden(tmp_path, monkeypatch):
    """A golden file that has one text; tests inside see it instead of the real ones."""

    def load(rewrite=False):
        golden = refusals.Golden(tmp_path, rewrite)
        monkeypatch.setattr(refusals, "golden", golden)
        return golden

    (tmp_path / "a.txt").write_text(refusals.formatted({OLD: ["ShapeError: need 3"]}), "utf-8")
    return load


def fail(text, kind=ShapeError, **facts):
    with refusals.refused(ShapeError, **facts):
        raise kind(text, layer="fc1")


def test_known_text_passes(golden):
    with golden().of(OLD):
        fail("need 3", layer="fc1")
        fail("need 3")


@pytest.mark.parametrize("test", [OLD, "a/test_x.py::test_new"])
def test_other_text_fails_with_the_way_out(golden, test):
    with pytest.raises(AssertionError, match="need 4(?s:.*)--rewrite-golden") as caught, golden().of(test):
        fail("need 4")
    assert f'"tests/{test}"' in str(caught.value)


def test_unused_text_fails(golden):
    with pytest.raises(AssertionError, match="no longer causes(?s:.*)need 3"), golden().of(OLD):
        pass


def test_other_type_or_fact_fails(golden):
    with golden().of("a/test_x.py::test_new"):
        with pytest.raises(AssertionError, match="ShapeError instead of InputError"):
            refusals.check_refusal(ShapeError("need 3"), InputError)
        with pytest.raises(AssertionError):
            fail("need 3", layer="fc2")
        with pytest.raises(AssertionError):
            fail("need 3", rank=None)


def test_flag_rewrites_what_ran(golden):
    first = golden(rewrite=True)
    with first.of("a/test_x.py::test_new"):
        fail("need 4\n\n  rank 0 gave 5\nTypeError: why")
        fail("need 3")
    first.save()
    second = golden()
    with second.of("a/test_x.py::test_new"):
        fail("need 4\n\n  rank 0 gave 5\nTypeError: why")
        fail("need 3")
    with second.of(OLD):
        fail("need 3")


def test_each_folder_of_tests_has_a_file(golden, tmp_path):
    first = golden(rewrite=True)
    for test in "a/b/test_x.py::test_y", "test_x.py::test_y":
        with first.of(test):
            fail("need 4")
    before = tmp_path.joinpath("a.txt").stat().st_mtime_ns
    first.save()
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.txt")} == {"a.txt", "a/b.txt", "tests.txt"}
    assert tmp_path.joinpath("a.txt").stat().st_mtime_ns == before
    assert golden().entries == first.entries | first.written


def test_flag_drops_tests_that_are_gone(golden, tmp_path):
    first = golden(rewrite=True)
    first.collected([], [])
    assert first.gone == {OLD}  # there is no such file
    first.save()
    assert not any(tmp_path.iterdir())


def test_entries_of_chosen_tests_stay(golden, monkeypatch, tmp_path):
    monkeypatch.setattr(refusals, "TESTS", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/test_x.py").touch()
    golden = golden()
    golden.collected(["a/test_x.py::test_z"], [])
    assert golden.gone == set()
    golden.collected(["a/test_x.py::test_z"], ["a/test_x.py"])
    assert golden.gone == {OLD}


lines = st.text(st.characters(codec="utf-8", exclude_characters="\x1c\x1d\x1e", exclude_categories=["Cc", "Zl", "Zp"]))
texts = st.lists(lines, min_size=1, max_size=4).map(lambda parts: refusals.rendered(ShapeError("\n".join(parts))))


@given(
    st.dictionaries(
        st.sampled_from([OLD, "a/test_x.py::test_z", "b/test_x.py::test_y[ =]"]),
        st.lists(texts, min_size=1, max_size=3).map(sorted),
    )
)
def test_file_survives_being_parsed(entries):
    assert refusals.parse(refusals.formatted(entries)) == entries


def test_text_is_the_same_on_every_machine(tmp_path):
    text = refusals.rendered(InputError(f"{tmp_path}/x.py: {refusals.TESTS}/test_x.py:12 of pid 123: 0.83466024770"))
    assert text == "InputError: <tmp>/x.py: tests/test_x.py:<line> of pid <pid>: 0.834..."


def test_every_entry_has_its_test():
    """Rewrite the file with `--rewrite-golden` when a test has been renamed or removed."""
    assert refusals.golden is None or refusals.golden.rewrite or refusals.golden.gone == set()


# What a text must not have: its name, and a pattern of one paragraph on one line.
SLIPS = {
    "doubled dots": r"[^\W_][)\]'\"]?\.\.(?!\.)",
    "doubled words": r"(?i)\b([a-z]{2,}) \1\b(?![-=.(\w])",
    "a verb without its end": r"\b(is|are|was|were) (and|or|but)\b",
    "marks side by side": r"\w[,;:] ?[,;]|\w ([,;]|[.:](?= |$))",
    # After a colon stands something to type or an answer, as it is.
    "a last sentence without its end": r"[a-z)\]'\"]\. [A-Z](?!.*(?:[.?!…][)'\"]?|: [^.]+)$)",
}


def slips(text):
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return [name for name, slip in SLIPS.items() if any(re.search(slip, paragraph) for paragraph in paragraphs)]


def test_texts_are_free_of_slips():
    texts = {text for texts in refusals.Golden(refusals.FOLDER).entries.values() for text in texts}
    assert len(texts) > 1000
    assert {text: found for text in texts if (found := slips(text))} == {}


@pytest.mark.parametrize(
    ("text", "slip"),
    [
        ("use item() for a loss.. Return arrays.", "doubled dots"),
        ("need\n  need 3 of the\n  the ranks.", "doubled words"),
        ("a tensor on the tape, which is and cannot be copied.", "a verb without its end"),
        ("give 3,, or 4.", "marks side by side"),
        ("give 3 , or 4.", "marks side by side"),
        ("x has shape (3,). Give it 2 dims", "a last sentence without its end"),
        ("Give it 2 dims.\n\n  The ranks wait. They should not", "a last sentence without its end"),
        ("x[..., 0]: its dims: ... m k -> ... m n. Start ../x.py, or: simparallel run -n N SCRIPT", None),
        ("'..' is no name: 1.5 of 2 (1, ...).", None),
    ],
)
def test_slip_is_found(text, slip):
    assert slips(f"ShapeError: {text}") == [slip] * (slip is not None)


def test_lambdas_are_named_by_their_source():
    assert refusals.source_of_lambda(lambda x: x + 1) == "x + 1"
