"""The critical path of a program."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from oracles_simulate import programs_of, scripts

from simparallel.clock.algebra import solve
from simparallel.clock.critical_path import critical_path
from simparallel.clock.events import Interference, simulate
from simparallel.clock.program import RankProgram
from simparallel.clock.task_graph import task_graph


@given(scripts(max_lines=60), st.booleans())
def test_critical_path_has_no_gap(script, is_slowed):
    graph = task_graph(programs_of(script), dict(enumerate(script.groups)))
    times = simulate(graph, interference=Interference(1.5, 1.25)) if is_slowed else solve(graph)

    path = critical_path(graph, times)

    is_receive = np.isin(path, graph.receives[:, 0])
    lengths = np.where(is_receive, 0, times.ends[path] - times.starts[path])
    ends = np.append(0, times.ends[path])
    np.testing.assert_array_equal(np.diff(ends), lengths)
    assert ends[-1] == times.makespan_ps
    assert all(one in graph.before[other] for one, other in zip(path, path[1:], strict=False))


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

    graph = task_graph(programs, {})
    times = solve(graph)

    assert times.makespan_ps == 10 * (micro_batches + stages - 1)
    work = [graph.action(task).duration_ps for task in critical_path(graph, times)]
    assert sum(work) == times.makespan_ps


def test_program_without_work_has_no_critical_path():
    empty = task_graph([RankProgram()], {})
    assert critical_path(empty, solve(empty)) == []
