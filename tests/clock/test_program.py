"""Programs and task graphs: synchronous sends, cycles."""

from __future__ import annotations

from hypothesis import given
from oracles_simulate import WrittenProgram, programs_of, scripts
from refusals import refused

from simparallel.clock.program import RECEIVE, SEND, Communication
from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph
from simparallel.errors import DeadlockError


def test_synchronous_send_ends_with_its_receive():
    sender, receiver = WrittenProgram(), WrittenProgram()
    sent = sender.send("there", 0, 5)
    sender.wait(sent, sender.add(None, 0, (), Communication(RECEIVE, "back", 0)))
    receiver.compute(70)
    received = receiver.receive("there", 0)
    # The reply takes no time and is on no stream.
    receiver.add(None, 0, (received,), Communication(SEND, "back", 0))
    receiver.wait(received)

    graph = ProgramGraph([sender, receiver])
    times = solve(graph)

    assert [times.ends[tasks[-1]] for tasks in graph.tasks] == [70, 70]
    assert times.ends[graph.tasks[0][sent]] == 5


@given(scripts())
def test_graph_has_a_task_for_each_call(script):
    programs = programs_of(script)
    graph = ProgramGraph(programs)

    assert [len(tasks) for tasks in graph.tasks] == [len(program.actions) for program in programs]
    for tasks, program in zip(graph.tasks, programs, strict=True):
        for task, action in zip(tasks, program.actions, strict=True):
            assert graph.actions[task][:2] == action[:2]
    assert sorted((b, a) for a, each in enumerate(graph.before) for b in each) == [
        (b, a) for b, each in enumerate(graph.after) for a in sorted(each)
    ]


def test_no_programs_take_no_time():
    for programs in ([], [WrittenProgram()]):
        assert solve(ProgramGraph(programs)).makespan == 0


def test_pipeline_bubble_is_as_published():
    """GPipe: p - 1 of m + p - 1 slots are a bubble on every stage (Huang et al. 2019)."""
    stages, micro_batches = 4, 6
    programs = [WrittenProgram() for _ in range(stages)]
    for stage, program in enumerate(programs):
        for number in range(micro_batches):
            if stage:
                program.wait(program.receive(stage - 1, number))
            program.compute(10)
            if stage < stages - 1:
                program.send(stage, number, 0)

    assert solve(ProgramGraph(programs)).makespan == 10 * (micro_batches + stages - 1)


def test_cycle_is_an_error():
    programs = [WrittenProgram() for _ in range(2)]
    for program, groups in zip(programs, ("ab", "ba"), strict=True):
        for group in groups:
            program.wait(program.collective(group, 0, 10))
    with refused(DeadlockError):
        solve(ProgramGraph(programs))
