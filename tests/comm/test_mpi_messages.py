"""The MPI transport's messages without MPI: a part of the contract's tests on a stand-in between threads."""

from __future__ import annotations

import json
import sys
import weakref

import numpy as np
import pytest
import test_collectives as contract
import test_collectives_out as into
import test_differentiable_collectives as tape
import test_messages as messages
import test_mismatch as mismatch
import test_objects as objects
import test_polling as polling
import test_uneven as uneven
from fake_mpi import MODULE
from oracles import World
from refusals import check_refusal, refused

import simparallel as sp
from simparallel.clock.recording import Recorded
from simparallel.errors import DeadlineError, InputError, RunFailedError
from simparallel.runtime.ranks import script_rank as rank
from simparallel.runtime.reports import Outcome


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mpi4py", MODULE)
    with World("messages") as world:
        world.max_size, world.examples = 4, 8
        yield world


@pytest.mark.parametrize(
    "name", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
)
def test_matches_numpy(world, name):
    contract.test_matches_numpy(world, name)


@pytest.mark.parametrize("name", into.NAMES)
def test_matches_numpy_into_out(world, name):
    into.test_matches_numpy(world, name)


@pytest.mark.parametrize(
    "test",
    [
        into.test_large_arrays_in_every_place, into.test_every_dtype_moves, into.test_adasum,
        into.test_mismatched_calls_write_nothing, into.test_tensors,
        contract.test_messages_arrive_by_tag_and_in_order, contract.test_scalars_come_as_arrays,
        contract.test_objects, contract.test_every_collective_is_one_event_on_every_rank,
        contract.test_collective_starts_with_its_last_rank,
        contract.test_groups_overlap_on_the_clock,
        contract.test_barrier_waits_for_all_ranks, mismatch.test_groups_of_other_ranks,
        mismatch.test_right_programs_run, mismatch.test_group_is_for_its_members,
        polling.test_other_ranks_progress_during_polling, polling.test_polling_rank_may_do_other_work,
        polling.test_polling_raises_the_errors_of_waiting, objects.test_objects_arrive_on_every_rank,
        uneven.test_matches_numpy, uneven.test_reduces_parts_of_different_sizes,
        uneven.test_bad_sizes_are_reported_on_all_ranks, uneven.test_scatter_into_out,
        uneven.test_members_alone_make_groups, uneven.test_members_must_name_the_same_ranks,
        uneven.test_missing_member_of_local_group_is_a_deadlock, uneven.test_gradients_of_different_sizes,
        uneven.test_reductions_have_the_names_of_pytorch, tape.test_gradients_flow_through_a_network,
        messages.test_any_source_with_a_tag_leaves_the_others, messages.test_named_source_beside_any,
        messages.test_messages_to_oneself, messages.test_tensors_go_both_ways,
        messages.test_answer_comes_after_the_receive, messages.test_mutual_ssend_is_a_deadlock,
        messages.test_probe_leaves_the_message, messages.test_probe_loop_lets_others_run,
        messages.test_all_others_have_left, messages.test_one_sender_leaves_and_another_sends,
        messages.test_message_of_another_shape,
    ],
    ids=lambda test: test.__name__,
)  # fmt: skip
def test_contract(world, test):
    test(world)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_scans_match_numpy(world, op):
    uneven.test_scans_match_numpy(world, op, (3,))
    uneven.test_scans_match_numpy(world, op, (uneven.LARGE, 2))


@pytest.mark.parametrize("is_async", [False, True])
def test_any_source_and_any_tag(world, is_async):
    messages.test_any_source_and_any_tag(world, is_async)


@pytest.mark.parametrize("call", [lambda: sp.recv(np.ones(1)), lambda: sp.probe()])
def test_receive_without_possible_sender(world, call):
    messages.test_receive_without_possible_sender(world, call)


@pytest.mark.parametrize("what", ["name", "shape", "root"])
def test_every_rank_reports_both_calls_and_places(world, what):
    mismatch.test_every_rank_reports_both_calls_and_places(world, what)


@pytest.mark.parametrize("program", [polling.nobody_sends, polling.others_wait])
def test_fruitless_polling_ends_at_the_timeout(world, program):
    polling.test_fruitless_polling_ends_at_the_timeout(world, program)


def test_lists_and_objects(world):
    mismatch.test_lists_of_other_shapes(world, (((2, 3), (1,)), ((6,), (1,))), "sum")
    mismatch.test_lists_of_the_same_shapes_are_one_call(world)
    mismatch.test_objects_match_nothing_but_objects(world, "gather_object", "all_gather_object")
    mismatch.test_objects_match_nothing_but_objects(world, "broadcast_object", "broadcast int64 (1,) root 0")


def test_ranks_that_leave_or_fail(world):
    mismatch.test_rank_that_leaves(world, 1, 3)
    mismatch.test_others_stop_and_cause_comes_first(world, 2, "é" * 4000)


@pytest.mark.parametrize(
    ("program", "call", "offset"),
    [
        (mismatch.lonely_recv, "recv", 1), (mismatch.lonely_calls, "all_reduce", 2),
        (mismatch.wrong_tag, "recv", 3), (mismatch.full_ring, "send", 2),
    ],
)  # fmt: skip
def test_ranks_that_wait_for_each_other(world, program, call, offset):
    mismatch.test_ranks_that_wait_for_each_other(world, program, call, offset)


def test_unreceived_message(world):
    with refused(RunFailedError):
        world.run(2, lambda: sp.send(np.ones(3), 1 - sp.get_rank()) if sp.get_rank() == 0 else None)


def test_missing_rank_is_named_at_the_timeout(world):
    def program(done):
        sp.barrier()
        if sp.get_rank() == 1:
            done.wait(20)
            return
        try:
            sp.all_reduce(np.ones(3))
        finally:
            done.set()

    import threading

    with refused(RunFailedError) as caught:
        world.run(2, program, threading.Event(), timeout_s=0.3)
    check_refusal(caught.value.__cause__, DeadlineError)


def test_algorithms_give_same_bits_on_all_ranks(world):
    def program(algorithm):
        x = np.random.default_rng(sp.get_rank()).random(5001, np.float32)
        return sp.all_reduce(x, algorithm=algorithm)

    inline = {"direct": sp.launch(program, ("direct",), world_size=3, transport="inline")[0]}
    for algorithm in ("direct", "naive", "ring", "tree", "halving_doubling"):
        results = world.run(3, program, algorithm)
        for result in results:
            np.testing.assert_array_equal(result, results[0])
            np.testing.assert_allclose(result, inline["direct"], rtol=1e-6)
    np.testing.assert_array_equal(world.run(3, program, "direct")[0], inline["direct"])


@pytest.mark.parametrize("size", [1, 2])
def test_finished_call_frees_its_argument(world, size):
    def program():
        x = np.ones(100_000)
        result = sp.all_gather(x)
        given = weakref.ref(x)
        del x
        return result.size, given() is None

    assert list(world.run(size, program)) == [(size * 100_000, True)] * size


def test_objects_without_pickle(world):
    def program():
        with refused(InputError):
            sp.broadcast_object(print, src=sp.get_rank())
        return sp.gather_object({"rank": sp.get_rank()}, dst=1)

    assert list(world.run(2, program)) == [None, [{"rank": 0}, {"rank": 1}]]


def test_rank_outcome_survives_json(world):
    """JSON turns tuples into lists; the outcome must come back equal, whatever kinds of events it holds."""

    def program():
        sp.all_reduce(np.ones(3))
        sp.Tensor(np.ones(2)) * 2.0
        sp.log(loss=1.5)

    events = [event for event in world.run(2, program).trace.events if event.rank == 1]
    assert {len(event.group) for event in events} == {0, 2}
    outcome = Outcome(1, None, None, Recorded([tuple(event) for event in events]), [(0, "loss", 1.5)], {})
    assert rank.outcome_of(json.loads(json.dumps(rank.fields_of(outcome)))) == outcome
