"""The programs of ranks, from the calls that a clock in lockstep gets."""

from __future__ import annotations

from itertools import count

import numpy as np
from oracles_simulate import WrittenProgram

from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph


class LockstepPrograms:
    """Writes the programs of ranks by the methods of `Lockstep`; its own clocks stand still."""

    def __init__(self, num_ranks, issue_ps=None):
        self.now, self.host_ps = np.zeros(num_ranks, np.int64), 0
        self._issue_ps = None if issue_ps is None else np.broadcast_to(issue_ps, num_ranks).tolist()
        self.programs = [WrittenProgram() for _ in range(num_ranks)]
        self._seqs = count()

    def _issue(self, rank):
        """Return what a communication of a rank comes after."""
        return () if self._issue_ps is None else self.programs[rank].launch(self._issue_ps[rank])

    def compute(self, ps, host_ps=0):
        times = (np.broadcast_to(each, len(self.programs)).tolist() for each in (ps, host_ps))
        for program, each, host in zip(self.programs, *times, strict=True):
            program.compute(each, () if self._issue_ps is None else program.launch(host))

    def collective(self, groups, ps):
        running = []
        for group, each in zip(groups, ps, strict=True):
            seq = next(self._seqs)
            running.append(
                {rank: self.programs[rank].collective(group, seq, each, after=self._issue(rank)) for rank in group}
            )
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
            issued.append({target: self.programs[target].receive((source, target), seq, self._issue(target))})
        for source, target, seq, each in messages:
            send = self.programs[source].send((source, target), seq, each, after=self._issue(source))
            issued.append({source: send})
        self.wait(issued)

    def solved(self):
        """Return the time [ps] of each rank after its program, by the solver."""
        lasts = [program.last() for program in self.programs]
        graph = ProgramGraph(self.programs)
        ends = solve(graph).ends
        return [ends[tasks[last]] for tasks, last in zip(graph.tasks, lasts, strict=True)]
