"""The clocks of ranks in lockstep: the times that the solver gives for their programs."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from oracles_lockstep import LockstepPrograms

from simparallel.clock.lockstep import Lockstep

TIMES = st.integers(0, 9)


@st.composite
def calls_of_ranks(draw):
    """Draw a number of ranks, and calls: (method, arguments), or ("wait", numbers of collectives)."""
    num_ranks = draw(st.integers(1, 4))
    ranks = st.integers(0, num_ranks - 1)
    members = st.lists(ranks, min_size=1, unique=True).map(tuple)
    # Few groups, so that their streams have several collectives; groups may share ranks.
    known = st.sampled_from(draw(st.lists(members, min_size=1, max_size=3)))
    compute = TIMES | st.lists(TIMES, min_size=num_ranks, max_size=num_ranks).map(tuple)
    pairs = st.tuples(ranks, ranks)

    def timed(what):
        """Return arguments: up to six of these, and the time of each."""
        return st.lists(st.tuples(what, TIMES), max_size=6).map(
            lambda each: [[*column] for column in zip(*each, strict=True)] or [[], []]
        )

    call = st.one_of(
        st.tuples(st.just("compute"), st.tuples(compute, compute)),
        st.tuples(st.just("collective"), timed(known)),
        st.tuples(st.just("wait"), st.lists(st.integers(0, 20), max_size=3)),
        st.tuples(st.just("messages"), timed(pairs)),
    )
    issue_ps = draw(st.none() | compute)
    return num_ranks, issue_ps, draw(st.lists(call, max_size=3) | st.lists(call, min_size=12, max_size=30))


def run(clock, calls):
    """Make the calls, and wait for all collectives at the end."""
    running = []
    for method, arguments in calls:
        if method == "wait":
            clock.wait([running[number] for number in arguments if number < len(running)])
        else:
            running += getattr(clock, method)(*arguments) or []
    clock.wait(running)
    return clock


@settings(max_examples=60)
@given(calls_of_ranks())
def test_lockstep_equals_batch(drawn):
    num_ranks, issue_ps, calls = drawn

    clock, programs = run(Lockstep(num_ranks, issue_ps), calls), run(LockstepPrograms(num_ranks, issue_ps), calls)
    assert clock.now.tolist() == programs.solved()


def test_stream_runs_one_call_at_a_time():
    clock = Lockstep(3)
    clock.compute((5, 1, 0))
    first, other = clock.collective(((0, 1), (1, 2)), (10, 3))
    (second,) = clock.collective(((0, 1),), (10,))

    clock.wait([other])
    assert clock.now.tolist() == [5, 4, 4]
    clock.wait([second, first])
    assert clock.now.tolist() == [25, 25, 4]


def test_messages_of_one_direction_queue():
    clock = Lockstep(2)
    clock.compute((0, 100))

    clock.messages([(0, 1), (1, 0), (0, 1)], [7, 3, 7])

    assert clock.now.tolist() == [103, 103]
    clock.messages([(1, 0), (1, 0)], [2, 2])
    assert clock.now.tolist() == [107, 107]
