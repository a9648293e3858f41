"""Counted communication, refused redistributions, injected faults and leaks: on a rank, and around whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import simparallel as sp
from simparallel.comm.fault_spec import VARIABLE
from simparallel.errors import InputError, RunFailedError, StrategyError
from simparallel.testing import CommCounter, expect_no_redistribution, faults, no_leaks


def program():
    rank, x = sp.get_rank(), np.ones(4, np.float32)
    sp.all_reduce(x)
    work = sp.all_reduce(np.ones(2), async_op=True)
    if rank == 0:
        sp.send(x, 1)
    if rank == 1:
        sp.recv(x, 0)
    group = sp.new_group([0, 1])
    if rank < 2:
        sp.all_gather(np.ones(1), group=group)
    work.wait()
    return rank


COUNTS = {"all_reduce": 2, "send": 1, "recv": 1, "new_group": 1, "all_gather": 1}


class TestCommCounter:
    def test_counts_whole_runs(self, world):
        with CommCounter() as comm:
            assert world.run(3, program) == [0, 1, 2]

        assert comm.counts == COUNTS
        assert comm.bytes == {"all_reduce": 32, "send": 16, "recv": 16, "new_group": 0, "all_gather": 16}
        assert comm.of_rank(2) == {"all_reduce": 2, "new_group": 1}
        assert comm.sent_bytes > 0

    def test_counts_a_rank(self):
        def counted():
            sp.barrier()
            with CommCounter() as outer, CommCounter() as comm:
                program()
            sp.barrier()
            assert outer.calls == comm.calls
            return comm.counts

        each = sp.launch(counted, world_size=2, transport="inline")
        assert each[0] == {"all_reduce": 2, "send": 1, "new_group": 1, "all_gather": 1}
        assert each[1] == {"all_reduce": 2, "recv": 1, "new_group": 1, "all_gather": 1}

    def test_counts_ddp_by_line(self):
        def step():
            model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 2))
            loss = model(np.ones((2, 4), np.float32)).sum()
            with CommCounter() as comm:
                loss.backward()
            return comm.counts, list(comm.places)

        ((counts, (place,)),) = {repr(x): x for x in sp.launch(step, world_size=2, transport="inline")}.values()
        assert counts == {"all_reduce": 1}
        line = step.__code__.co_firstlineno + 4
        assert place == f"test_comm_counter.py:{line}"

    def test_several_runs_and_failures(self):
        """A run that fails counts nothing; collectives of two runs are two."""
        with CommCounter() as comm:
            for _ in range(2):
                sp.launch(sp.barrier, world_size=2, transport="inline")
            with pytest.raises(RunFailedError):
                sp.launch(lambda: 1 / 0, world_size=2, transport="inline")
        sp.launch(sp.barrier, world_size=2, transport="inline")

        assert comm.counts == {"barrier": 2}

    def test_shows_itself(self):
        with CommCounter() as comm:
            sp.launch(sp.all_reduce, (np.ones(4),), world_size=2, transport="inline")

        assert str(comm).splitlines()[0].split() == ["call", "count", "payload", "where"]
        assert str(comm).splitlines()[1].split()[:4] == ["all_reduce", "1", "32", "B"]
        assert "<td>all_reduce</td><td>1</td><td>32 B</td>" in comm._repr_html_()
        assert repr(comm) == "CommCounter(all_reduce: 1)"


class TestRedistributions:
    @staticmethod
    def product(fits):
        layout = sp.Layout((2,), ("tp",))
        x = sp.distribute_tensor(np.ones((4, 2)), layout("None", "tp") if fits else layout("tp", "None"))
        w = sp.distribute_tensor(np.ones((2, 4)), layout("tp", "None"))
        return sp.ops.MatMul().shard(((1, 2), (2, 1)))(x, w).shape

    def test_around_a_run(self, world):
        assert world.run(2, self.product, False) == [(4, 4)] * 2
        with expect_no_redistribution():
            assert world.run(2, self.product, True) == [(4, 4)] * 2
            with pytest.raises(RunFailedError) as caught:
                world.run(2, self.product, False)
        assert type(caught.value.__cause__) is StrategyError
        assert world.run(2, self.product, False) == [(4, 4)] * 2

    def test_on_a_rank(self):
        """Also inside of AutoParallel, which is not strict by itself."""

        def network():
            one, other = sp.ops.ReLU().shard(((2, 1),)), sp.ops.ReLU().shard(((1, 2),))
            run = sp.AutoParallel(lambda x: other(one(x)))
            run(np.ones((2, 2)))
            with expect_no_redistribution(), pytest.raises(StrategyError):
                run(np.ones((2, 2)))

        sp.launch(network, world_size=2, transport="inline")


class TestFaults:
    def test_one_call_of_one_rank(self):
        def calls():
            for _ in range(3):
                sp.all_reduce(np.ones(1))

        with faults.inject(rank=1, op="all_reduce", seq=2), pytest.raises(RunFailedError) as caught:
            sp.launch(calls, world_size=2, transport="inline")
        assert caught.value.rank == 1
        assert type(caught.value.__cause__) is faults.InjectedFault
        assert VARIABLE not in os.environ
        sp.launch(calls, world_size=2, transport="inline")

    def test_several(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "rank=0;seq=9;action=raise")
        with faults.inject(1, "slow(0.001)"), faults.inject(0, "MemoryError", phase="returned"):
            assert len(faults.parse(os.environ[VARIABLE], 2)) == 3
        assert os.environ[VARIABLE] == "rank=0;seq=9;action=raise"

    @pytest.mark.process
    def test_killed_rank(self):
        with faults.inject(1, "SIGKILL"), pytest.raises(RunFailedError, match="killed by SIGKILL"):
            sp.launch(sp.barrier, world_size=2, echo=False)

    def test_wrong_action(self):
        assert "SIGKILL" in faults.ACTIONS
        with faults.inject(0, "explode"), pytest.raises(InputError, match="action must be one of"):
            sp.launch(sp.barrier, world_size=2, transport="inline")


class TestLeaks:
    def test_thread_is_found(self):
        event = threading.Event()
        thread = threading.Thread(target=event.wait, name="left")
        try:
            with pytest.raises(AssertionError, match="left"), no_leaks(limit_s=0.05):
                thread.start()
        finally:
            event.set()
            thread.join()

    @pytest.mark.process
    def test_process_is_found_and_killed(self):
        with pytest.raises(AssertionError, match="pid"), no_leaks(limit_s=0.05):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        assert child.wait() < 0
        child.stdin.close()

    def test_nothing_is_left(self):
        with no_leaks():
            sp.launch(sp.barrier, world_size=2, transport="inline")
