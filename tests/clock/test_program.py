"""Programs and task graphs: several devices as in the recorder, synchronous sends, cycles."""

from __future__ import annotations

from hypothesis import given, strategies as st
from oracles_simulate import programs_of, scripts
from refusals import refused

from simparallel.clock.event import COMPUTE
from simparallel.clock.program import RankProgram
from simparallel.clock.recorder import Recorder
from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph
from simparallel.errors import DeadlockError
from simparallel.machine.cluster import describe, picoseconds
from simparallel.machine.devices import Device

SPEC = describe(1, devices_per_rank=3)
LAUNCH_PS = picoseconds(SPEC.device.launch_s)
# (what, device, other device, size)
STEPS = st.tuples(
    st.sampled_from(["compute", "copy", "synchronize"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)
)
BLOCKS = st.lists(st.tuples(st.booleans(), st.lists(STEPS, max_size=6)), max_size=4)


@given(BLOCKS, st.booleans())
def test_devices_share_an_interpreter_as_recorded(blocks, has_one):
    """Work on three devices of a rank, copies between them, and blocks of one thread for each device."""
    recorder, program = Recorder(0, SPEC), RankProgram("rank 0")
    recorder.compute("first", "forward", 0, 0, (LAUNCH_PS, 0, 0))
    program.compute(LAUNCH_PS)
    devices = [Device("sim", i) for i in range(1 if has_one else 3)]
    recorders = [recorder.of(each) for each in devices]
    if not has_one:
        program.launch_from(range(3), LAUNCH_PS)

    def run(step):
        what, src, dst, size = step
        src, dst = (0, 0) if has_one else (src, dst)
        if what == "compute":
            recorders[src].compute("work", "forward", 0, 0, (size * LAUNCH_PS // 4, 0, 0))
            program.compute(size * LAUNCH_PS // 4, device=src)
        elif what == "synchronize":
            recorder.synchronize(devices[src])
            program.synchronize(src)
        elif src != dst:
            recorders[src].copy_to(recorders[dst], "copy", 0, 0, size)
            program.copy(src, dst, SPEC.copy(size).time_ps)

    for has_threads, steps in blocks:
        if has_threads:
            with recorder.threads(devices), program.threads(range(len(devices))):
                for step in steps:
                    run(step)
        else:
            for step in steps:
                run(step)

    # The end of the last action of each stream.
    clocks = {
        (action.device, action.stream): end_ps
        for action, end_ps in zip(program.actions, solve(ProgramGraph([program])).ends, strict=True)
    }
    for i, each in enumerate(recorders):
        found = {name: time_ps for (number, name), time_ps in clocks.items() if number == i}
        assert found == {name: time_ps for name, time_ps in each.clock_ps.items() if time_ps or name in found}
        assert clocks.get((i, COMPUTE), 0) == each.now_ps


def test_synchronous_send_ends_with_its_receive():
    sender, receiver = RankProgram("rank 0"), RankProgram("rank 1")
    sent = sender.send("there", 0, 5)
    sender.wait(sent, sender.receive("back", 0))
    receiver.compute(70)
    received = receiver.receive("there", 0)
    receiver.reply(received, "back", 0)
    receiver.wait(received)

    graph = ProgramGraph([sender, receiver])
    times = solve(graph)

    assert [times.ends[tasks[-1]] for tasks in graph.tasks] == [70, 70]
    assert times.ends[graph.tasks[0][sent]] == 5


@given(scripts())
def test_graph_has_a_task_for_each_call(script):
    programs = programs_of(script)
    graph = ProgramGraph(programs)

    assert [len(tasks) for tasks in graph.tasks] == [len(program) for program in programs]
    for tasks, program in zip(graph.tasks, programs, strict=True):
        for task, action in zip(tasks, program.actions, strict=True):
            assert graph.actions[task][:2] == action[:2]
    assert sorted((b, a) for a, each in enumerate(graph.before) for b in each) == [
        (b, a) for b, each in enumerate(graph.after) for a in sorted(each)
    ]


def test_no_programs_take_no_time():
    for programs in ([], [RankProgram()]):
        assert solve(ProgramGraph(programs)).makespan == 0


def test_pipeline_bubble_is_as_published():
    """GPipe: p - 1 of m + p - 1 slots are a bubble on every stage (Huang et al. 2019)."""
    stages, micro_batches = 4, 6
    programs = [RankProgram(f"stage {stage}") for stage in range(stages)]
    for stage, program in enumerate(programs):
        for number in range(micro_batches):
            if stage:
                program.wait(program.receive(stage - 1, number))
            program.compute(10)
            if stage < stages - 1:
                program.send(stage, number, 0)

    assert solve(ProgramGraph(programs)).makespan == 10 * (micro_batches + stages - 1)


def test_cycle_is_an_error():
    programs = [RankProgram(f"rank {rank}") for rank in range(2)]
    for program, groups in zip(programs, ("ab", "ba"), strict=True):
        for group in groups:
            program.wait(program.collective(group, 0, 10))
    with refused(DeadlockError):
        solve(ProgramGraph(programs))
