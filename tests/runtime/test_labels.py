"""Output of ranks that are threads, with the rank before each line."""

from __future__ import annotations

import io
import threading

from hypothesis import given, strategies as st

from simparallel.runtime.ranks.labels import labelled_output

TEXTS = st.lists(st.text(st.sampled_from("ab\n"), max_size=5), max_size=6)


def write(name: str, texts: list[str]) -> None:
    thread = threading.Thread(target=lambda: [print(text, end="") for text in texts], name=name)
    thread.start()
    thread.join()


def lines(texts: list[str]) -> list[str]:
    found = "".join(texts).split("\n")
    return found if found[-1] else found[:-1]


@given(TEXTS, TEXTS)
def test_each_line_has_its_rank(zero: list[str], one: list[str]) -> None:
    out = io.StringIO()
    with labelled_output(out):
        print("the caller's")
        write("rank 0", zero)
        write("rank 1", one)
    told = out.getvalue().splitlines()
    assert told[0] == "the caller's"
    for rank, texts in enumerate((zero, one)):
        assert [line[9:] for line in told if line.startswith(f"[rank {rank}] ")] == lines(texts)
    assert len(told) == 1 + len(lines(zero)) + len(lines(one))


@given(TEXTS, st.integers(0, 30), st.booleans())
def test_a_rank_that_runs_again_is_shown_once(texts: list[str], cut: int, repeats: bool) -> None:
    """The first run may have ended anywhere."""
    out, first = io.StringIO(), ["".join(texts)[:cut]]
    with labelled_output(out, repeats):
        for run in (first, texts, texts):
            write("rank 0", run)
    told = [line[9:] for line in out.getvalue().splitlines()]
    assert told == (lines(texts) if repeats else lines(first) + 2 * lines(texts))
