"""The programs of ranks, from the calls that a clock in lockstep gets."""

from __future__ import annotations

from itertools import count

import numpy as np
from oracles_simulate import WrittenProgram

from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph


class LockstepPrograms:
    """Writes the programs of ranks by the methods of `Lockstep`; its own clocks stand still."""

    def __init__(self, num_ranks):
        self.now = np.zeros(num_ranks, np.int64)
        self.programs = [WrittenProgram() for _ in range(num_ranks)]
        self._seqs = count()

    def compute(self, ps):
        for program, each in zip(self.programs, np.broadcast_to(ps, len(self.programs)).tolist(), strict=True):
            program.compute(each)

    def collective(self, groups, ps):
        running = []
        for group, each in zip(groups, ps, strict=True):
            seq = next(self._seqs)
            running.append({rank: self.programs[rank].collective(group, seq, each) for rank in group})
        return running

    def wait(self, running):
        for each in running:
            for rank, action in each.items():
                self.programs[rank].wait(action)

    def messages(self, pairs, ps):
        messages = [(source, target, next(self._seqs), each) for (source, target), each in zip(pairs, ps, strict=True)]
        issued = []
        # As in a run, all receives first.
        for source, target, seq, _ in messages:
            issued.append({target: self.programs[target].receive((source, target), seq)})
        for source, target, seq, each in messages:
            issued.append({source: self.programs[source].send((source, target), seq, each)})
        self.wait(issued)

    def solved(self):
        """Return the time [ps] of each rank after its program, by the solver."""
        lasts = [program.last() for program in self.programs]
        graph = ProgramGraph(self.programs)
        ends = solve(graph).ends
        return [ends[tasks[last]] for tasks, last in zip(graph.tasks, lasts, strict=True)]
