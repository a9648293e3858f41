"""Our lists of actions beside the lists that PyTorch's schedules generate, and files in both directions."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace

import pytest

import simparallel as sp
from simparallel.errors import InputError, ScheduleError
from simparallel.parallel.pipeline import Schedule

pytest.importorskip("torch")
from torch.distributed.pipelining import schedules as torch_schedules

LOOPED = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
}
ON_A_V = {"zbv": "ScheduleZBVZeroBubble", "dualpipe_v": "ScheduleDualPipeV"}


def theirs(name, ranks, microbatches, chunks=None):
    """Return PyTorch's schedule, on stages that are numbers only; without `chunks`, a schedule of single stages."""
    facts = {"num_stages": ranks * (chunks or 1), "group_size": ranks, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=chunk * ranks, **facts) for chunk in range(chunks or 1)]
    return getattr(torch_schedules, name)(stages if chunks else stages[0], microbatches)


def csv_of(schedule):
    """Return its lists as CSV, without idle steps and the reduction of gradients at the end of a stage."""
    rows = schedule.pipeline_order.values()
    kept = ([str(action) for action in row if action and "REDUCE_GRAD" not in str(action)] for row in rows)
    return "".join(",".join(row) + "\n" for row in kept)


@pytest.mark.parametrize(("name", "chunks"), [*product(LOOPED, (1, 2, 3)), *product(ON_A_V, (2,))])
def test_torch_makes_the_same_lists(name, chunks):
    """Both make equal lists, or both refuse the numbers."""
    for ranks, microbatches in product(range(1, 7), range(1, 20)):
        try:
            expected = csv_of(theirs({**LOOPED, **ON_A_V}[name], ranks, microbatches, chunks))
        except ValueError:
            with pytest.raises(InputError):
                sp.pipeline_schedule(name, ranks, microbatches, chunks)
        else:
            assert sp.pipeline_schedule(name, ranks, microbatches, chunks).to_csv() == expected, (ranks, microbatches)


# Our rules of single stages take any number of micro-batches, PyTorch's at least as many as ranks.
SINGLE = [(ranks, microbatches) for ranks in range(1, 7) for microbatches in range(ranks, 20)]


def test_torch_makes_the_same_gpipe():
    for ranks, microbatches in SINGLE:
        assert csv_of(theirs("ScheduleGPipe", ranks, microbatches)) == (
            sp.pipeline_schedule("gpipe", ranks, microbatches).to_csv()
        )


def test_torch_numbers_1f1b_of_the_last_rank_from_1():
    """PyTorch lists F1 to FM there instead of F0 to F(M-1), though it executes them rightly; our check refuses it."""
    for ranks, microbatches in SINGLE:
        expected = csv_of(theirs("Schedule1F1B", ranks, microbatches)).splitlines()
        *rows, last = sp.pipeline_schedule("1f1b", ranks, microbatches).to_csv().splitlines()
        assert expected[:-1] == rows
        assert expected[-1] == re.sub(r"F(\d+)", lambda forward: f"F{int(forward[1]) + 1}", last)
        with pytest.raises(ScheduleError):
            Schedule.from_csv("\n".join(expected)).check()


@pytest.mark.parametrize("name", [*LOOPED, *ON_A_V])
@pytest.mark.parametrize("ranks", [2, 4])
def test_files_are_read_by_each_other(name, ranks, tmp_path):
    ours, path = sp.pipeline_schedule(name, ranks, 2 * ranks, 2), tmp_path / f"{name}.csv"
    schedule = theirs({**LOOPED, **ON_A_V}[name], ranks, 2 * ranks, 2)
    schedule._dump_csv(path, format="compute_only")
    assert Schedule.load_csv(path, placement=ours.placement) == ours
    ours.save_csv(path)
    runtime = theirs("_PipelineScheduleRuntime", ranks, 2 * ranks, 2)
    runtime._load_csv(path)
    assert csv_of(runtime) == ours.to_csv()
    assert runtime.stage_index_to_group_rank == {stage: ours.rank_of(stage) for stage in range(2 * ranks)}
