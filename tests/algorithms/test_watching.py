"""Watched algorithms: what each chunk contains after each step, and the messages in between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

from simparallel.algorithms.rehearsal import rehearse
from simparallel.algorithms.watching import watch
from simparallel.errors import InputError

PAIRS = [(name, op) for name in ("ring", "halving_doubling") for op in ("all_reduce", "reduce_scatter", "all_gather")]
PAIRS += [(name, op) for name in ("tree", "naive") for op in ("all_reduce", "reduce", "broadcast")]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PAIRS), st.integers(1, 9), st.integers(0, 8))
def test_watched_collective_ends_as_it_should(pair, size, number):
    algorithm, op = pair
    root = number % size if op in ("reduce", "broadcast") else 0
    watched = watch(algorithm, op, size, root)
    end, everybody = watched.states[-1], 2**size - 1
    if op == "all_reduce":
        assert (end == everybody).all()
    elif op == "all_gather":
        assert end.tolist() == [[2**i for i in range(size)]] * size
    elif op == "broadcast":
        assert (end == 2**root).all()
    elif op == "reduce":
        assert (end[root] == everybody).all()
    else:
        assert (np.diag(end) == everybody).all()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["ring", "tree", "halving_doubling", "naive"]), st.integers(1, 9))
def test_watched_messages_are_those_of_the_ledger(algorithm, size):
    watched = watch(algorithm, num_ranks=size)
    ledger = rehearse(algorithm, "all_reduce", size, size, np.int64)
    assert watched.num_steps == len(ledger.entries[0].steps)
    for entry in ledger.entries:
        own = [8 * (m.stop - m.start) for m in watched.messages if m.src == entry.rank]
        assert (len(own), sum(own)) == (entry.total.sent_messages, entry.total.sent_bytes)


def test_share_is_the_bandwidth_term():
    shares = {name: watch(name, num_ranks=4).share for name in ("ring", "tree", "halving_doubling", "naive")}
    assert shares == {"ring": 1.5, "tree": 4, "halving_doubling": 1.5, "naive": 6}


@pytest.mark.parametrize("arguments", [("ring", "gather"), ("ring", "all_reduce", 0), ("tree", "reduce", 4, 4)])
def test_bad_watch_is_refused(arguments):
    with refused(InputError):
        watch(*arguments)
