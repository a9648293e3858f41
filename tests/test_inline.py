"""Ranks as threads of one process: how they end, whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaks import finish, no_leaks, start_script  # noqa: F401 (a fixture)

import simparallel as sp
from simparallel.errors import RunFailedError
from simparallel.runtime import threads


@pytest.mark.parametrize("world_size", [1, 2])
def test_ctrl_c_waits_for_every_rank(tmp_path: Path, world_size: int) -> None:
    """A rank in the middle of a computation finishes that first, and is not left to go on alone."""
    text = f"""
import os, signal, threading
import simparallel as sp
from simparallel.comm import current
from simparallel.comm.segment import ABORT_INTERRUPT
left = threading.Event()
def work():
    if sp.get_rank() < {world_size} - 1:
        return
    os.kill(os.getpid(), signal.SIGINT)
    transport = current().transport
    while transport.words[transport.segment.map.abort()] != ABORT_INTERRUPT:
        left.wait(0.001)
    print("left" if left.wait(0.2) else "waited for")
try:
    sp.launch(work, world_size={world_size}, transport="inline")
except KeyboardInterrupt:
    left.set()
    print("interrupted", threading.active_count())
"""
    assert finish(start_script(tmp_path, text)) == ("waited for\ninterrupted 1\n", "")


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_an_exception_that_refuses_to_be_pickled(transport: str, how: type[BaseException]) -> None:
    class Evil(Exception):
        def __reduce__(self) -> Any:
            raise how

    def fail() -> None:
        if sp.get_rank() == 1:
            raise Evil("the original text")
        sp.barrier()

    with pytest.raises(RunFailedError) as caught:
        sp.launch(fail, world_size=2, transport=transport, echo=False)
    assert "rank 1 of 2 failed: " in str(caught.value)
    assert "the original text" in str(caught.value)
    assert "Stopped because of it: rank 0." in str(caught.value)


@pytest.mark.process
def test_a_result_that_refuses_to_be_pickled() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(RunFailedError, match="its result, a Evil, cannot be sent back: KeyboardInterrupt"):
        sp.launch(Evil, world_size=2, echo=False)


def test_the_others_go_on_whatever_a_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    play_rank = threads.play_rank

    def play(call: Any, transport: Any, *arguments: Any, **settings: Any) -> Any:
        if transport.rank == 1:
            raise KeyboardInterrupt
        return play_rank(call, transport, *arguments, **settings)

    monkeypatch.setattr(threads, "play_rank", play)
    with pytest.raises(RunFailedError) as caught:
        sp.launch(lambda: sp.all_reduce(np.ones(1)), world_size=3, transport="inline")
    assert "rank 1: KeyboardInterrupt was raised while its end was noted" in str(caught.value)
    assert "Stopped because of it: ranks 0, 2." in str(caught.value)
