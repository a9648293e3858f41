"""Programs and task graphs: synchronous sends, calls that do not match."""

from __future__ import annotations

import pytest
from hypothesis import given
from oracles_simulate import programs_of, scripts
from refusals import refused

from simparallel.clock.algebra import solve
from simparallel.clock.program import RankProgram
from simparallel.clock.recorder import COMPUTE
from simparallel.clock.task_graph import task_graph
from simparallel.errors import CollectiveMismatchError, DeadlockError, InputError


def test_synchronous_send_ends_with_its_receive():
    sender, receiver = RankProgram("rank 0"), RankProgram("rank 1")
    sent = sender.send("there", 0, 5)
    sender.wait(sent, sender.receive("back", 0))
    receiver.compute(70)
    received = receiver.receive("there", 0)
    receiver.reply(received, "back", 0)
    receiver.wait(received)

    graph = task_graph([sender, receiver], {})
    times = solve(graph)

    assert [int(times.ends[tasks[-1]]) for tasks in graph.tasks] == [70, 70]
    assert int(times.ends[graph.tasks[0][sent]]) == 5


@given(scripts())
def test_graph_orders_tasks_after_what_they_wait_for(script):
    programs = programs_of(script)
    graph = task_graph(programs, dict(enumerate(script.groups)))

    assert [len(tasks) for tasks in graph.tasks] == [len(program) for program in programs]
    assert all(other < task for task, before in enumerate(graph.before) for other in before if other < len(graph))
    for task, (program, place) in enumerate(graph.first):
        assert graph.tasks[program][place] == task
    assert sorted(map(len, graph.after)) == sorted(
        sum(b.count(task) for b in graph.before) for task in range(len(graph))
    )


def test_no_programs_take_no_time():
    for programs in ([], [RankProgram()]):
        assert solve(task_graph(programs, {})).makespan_ps == 0


# --- calls that do not match ----------------------------------------------------------------------------


def ranks(count):
    return [RankProgram(f"rank {rank}") for rank in range(count)]


def test_missing_member_is_named():
    programs = ranks(3)
    for program in programs[:2]:
        program.collective("dp", 0, 10, size_bytes=64, key="all_reduce")
    with refused(CollectiveMismatchError, group="dp", seq=0):
        task_graph(programs, {"dp": (0, 1, 2)})


def test_strangers_call_is_refused():
    programs = ranks(2)
    for program in programs:
        program.collective("dp", 0, 10)
    with refused(CollectiveMismatchError):
        task_graph(programs, {"dp": (1,)})


@pytest.mark.parametrize("change", [{"duration_ps": 20}, {"size_bytes": 32}, {"key": "broadcast"}])
def test_different_calls_are_refused(change):
    programs = ranks(2)
    usual = {"duration_ps": 10, "size_bytes": 64, "key": "all_reduce"}
    programs[0].collective("dp", 0, **usual)
    programs[1].collective("dp", 0, **(usual | change))
    with refused(CollectiveMismatchError):
        task_graph(programs, {"dp": (0, 1)})


def test_call_made_twice_is_refused():
    programs = ranks(6)
    for program in (*programs, programs[2]):
        program.collective("dp", 0, 10)
    with refused(CollectiveMismatchError):
        task_graph(programs, {"dp": range(6)})


def test_lone_ends_of_messages_are_refused():
    programs = ranks(2)
    programs[0].send((0, 1), 0, 10)
    with refused(CollectiveMismatchError):
        task_graph(programs, {})
    programs[1].receive((0, 1), 0)
    task_graph(programs, {})
    programs[1].receive((0, 1), 0)
    with refused(CollectiveMismatchError):
        task_graph(programs, {})


def test_circle_of_waits_is_an_error():
    programs = ranks(2)
    for program, groups in zip(programs, ("ab", "ba"), strict=True):
        for group in groups:
            program.wait(program.collective(group, 0, 10))
    with refused(DeadlockError):
        task_graph(programs, dict.fromkeys("ab", (0, 1)))


def test_long_circle_is_shortened():
    programs = ranks(8)
    for rank, program in enumerate(programs):
        program.wait(program.receive((rank - 1) % 8, 0))
        program.send(rank, 0, 10)
    with refused(DeadlockError):
        task_graph(programs, {})


def test_bad_actions_are_refused():
    (program,) = ranks(1)
    program.collective("dp", 0, 10)
    with refused(InputError):
        task_graph([program], {})
    for duration_ps, after in ((-1, ()), (1.5, ()), (1, (0,)), (1, (-1,))):
        (program,) = ranks(1)
        program.add(COMPUTE, duration_ps, after)
        with refused(InputError):
            task_graph([program], {})
