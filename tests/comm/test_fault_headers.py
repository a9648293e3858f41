"""A rank with a wrong header, whatever the cause: all ranks raise, before data is changed."""

from __future__ import annotations

import re
import sys

import cloudpickle
import numpy as np
import pytest
from oracles import World
from refusals import refused
from test_fault_matrix import COLLECTIVES

import simparallel as sp
from simparallel.comm import call_header as h
from simparallel.errors import CollectiveMismatchError, DeadlockError, RunFailedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

IN_LETTERS = range(h.DTYPE, h.ALGORITHM)  # the words of a message that its receiver compares


def one_call(op: str) -> None:
    """Make the call twice; the second one is wrong, and may write nothing."""
    me, size = sp.get_rank(), sp.get_world_size()
    for number in (1, 2):
        x = np.full((size, 4), me + 1.0)
        try:
            if op == "send":
                sent = sp.isend(x, (me + 1) % size)
                sp.recv(x := np.full((size, 4), me + 1.0), (me - 1) % size)
                sent.wait()
            elif op == "barrier":
                sp.barrier()
            elif op == "new_group":
                sp.new_group(range(size))
            elif op == "scatter":
                sp.scatter(list(x) if me == 0 else None)
            elif op == "all_to_all uneven":
                sp.all_to_all(x, input_splits=[size - 1, 1, *[0] * (size - 2)])
            elif op == "adasum":
                sp.all_reduce(x, "adasum", algorithm="ring")
            else:
                getattr(sp, op)(x)
        except CollectiveMismatchError as error:
            assert number == 2
            assert (x == me + 1).all(), "data was changed"
            raise error from None


@pytest.mark.parametrize("word", range(h.COMPARED))
@pytest.mark.parametrize("op", [*COLLECTIVES, "adasum", "scan", "exscan", "all_to_all uneven"])
def test_wrong_header_is_found_by_all_ranks(op: str, word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise before data is changed."""
    monkeypatch.setenv("SIMPARALLEL_FAULT", f"rank=1;op={op.split()[0]};seq=2;action=corrupt({word})")
    with pytest.raises(RunFailedError) as caught:
        sp.launch(one_call, (op,), world_size=3, transport="inline")
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert set(caught.value.reports) == {0, 1, 2}
    for report in caught.value.reports.values():
        text = report["summary"]
        assert text.startswith("simparallel.errors.CollectiveMismatchError: world, collective #2: ")
        assert re.search(r"differ in: \w+.*No data was changed", text)
        assert re.search(r"rank 1 (called|has 0x[0-9a-f]+ in word)", text)
        assert "test_fault_headers.py" in text


def test_right_header_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control: a fault for another sequence number does nothing."""
    monkeypatch.setenv("SIMPARALLEL_FAULT", "rank=1;seq=4;action=corrupt(1)")
    assert sp.launch(one_call, ("all_reduce",), world_size=3, transport="inline") == [None] * 3


@pytest.mark.parametrize(("op", "word"), [("all_reduce", h.OP), ("broadcast", h.DTYPE), ("all_gather", 12)])
def test_between_processes(world: World, op: str, word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPARALLEL_FAULT", f"rank=0;op={op};seq=2;action=corrupt({word})")
    with refused(RunFailedError) as caught:
        world.run(3, one_call, op)
    for rank in range(3):
        assert "CollectiveMismatchError: world, collective #2" in caught.value.reports[rank]["summary"]


@pytest.mark.parametrize("word", IN_LETTERS)
def test_wrong_message_is_found_by_its_receiver(world: World, word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPARALLEL_FAULT", f"rank=1;op=send;seq=2;action=corrupt({word})")
    with refused(RunFailedError) as caught:
        world.run(3, one_call, "send")
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert caught.value.rank == 2
    assert re.search(r"recv\(float64 \(3, 4\), src=1, tag=0\) at .* rank 1 sent ", str(caught.value))


def test_wrong_tag_leaves_receiver_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        one_call("send")
        sp.barrier()

    monkeypatch.setenv("SIMPARALLEL_FAULT", f"rank=1;op=send;seq=2;action=corrupt({h.TAG})")
    with refused(RunFailedError) as caught:
        world.run(3, program)
    assert isinstance(caught.value.__cause__, DeadlockError)
    assert re.search(r"rank 2 waits in recv\(float64 \(3, 4\), src=1, tag=0\)", str(caught.value))
