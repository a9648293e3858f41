"""Plans of few waits for tiny tensors: right values, the declared bytes, and only where they pay."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from refusals import refused
from test_redistribution import SHAPE, lacking, layouts_over

import simparallel as sp
from simparallel.clock.recorder import current_recorder
from simparallel.errors import RunFailedError
from simparallel.layout.fewest_waits import TINY_BYTES, estimate_s, plan_quick_redistribution
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import plan_redistribution
from simparallel.layout.sharding import placement
from simparallel.layout.strategy import layout_of_cuts
from simparallel.parallel import distribute_tensor, quick_redistribution
from simparallel.parallel.operator.interpreter import sharder

ROWS, COLUMNS = layout_of_cuts((2, 2), 4), layout_of_cuts((1, 4), 4)  # by messages, without a quick plan


def with_sums(layouts):
    """Yield each layout, also with a pending sum along every axis that cuts nothing."""
    for layout in layouts:
        used = {axis for axes in layout.axes_by_dim for axis in axes}
        yield layout
        if free := [axis for axis in layout.alias_name if axis not in used]:
            yield layout.with_partial(free)


def pairs_over(sizes, step=1):
    layouts = layouts_over(sizes)
    return list(product(with_sums(layouts), layouts))[::step]


@pytest.mark.parametrize(("sizes", "step"), [((2,), 1), ((2, 2), 1), ((2, 2, 2), 7)])
def test_quick_plan_is_never_slower(sizes, step):
    """By the estimate, a quick plan is never slower, and it receives few bytes more."""
    chosen = 0
    for source, target in pairs_over(sizes, step):
        direct = plan_redistribution(source, target, SHAPE)
        for itemsize in (1, 8):
            quick = plan_quick_redistribution(source, target, SHAPE, itemsize)
            assert estimate_s(quick, itemsize) <= estimate_s(direct, itemsize)
            more = [a - b for a, b in zip(quick.received_bytes(itemsize), direct.received_bytes(itemsize), strict=True)]
            assert quick == direct or max(quick.received_bytes(itemsize)) <= TINY_BYTES
            assert quick == direct or "messages" in str(direct) or "reduce_scatter" in str(direct)
            if not source.partial:
                assert min(more) >= 0  # the direct plan receives the least that there is
        chosen += quick != direct
        large = (1 << 10, 1 << 10)
        assert plan_quick_redistribution(source, target, large, 8) == plan_redistribution(source, target, large)
    assert (chosen > 0) == (len(sizes) > 1)


def test_choice_of_quick_plans():
    assert str(plan_redistribution(ROWS, COLUMNS, SHAPE)) == "messages"
    assert str(plan_quick_redistribution(ROWS, COLUMNS, SHAPE, 4)) == "all_gather"
    grid = Layout((2, 2), ("a", "b"))
    summed, rows = grid("None", "None").with_partial(("a", "b")), grid("a", "None")
    assert str(plan_redistribution(summed, rows, SHAPE)) == "reduce_scatter + all_reduce"
    assert str(plan_quick_redistribution(summed, rows, SHAPE, 4)) == "all_reduce + slice"
    assert str(plan_quick_redistribution(summed, rows, (512, 512), 4)) == "reduce_scatter + all_reduce"


def run_all(pairs):
    """Check the values of quick plans; return the bytes that they declare for all ranks, and those of direct plans."""
    x = np.arange(prod(SHAPE), dtype=np.float64).reshape(SHAPE)
    said = least = 0
    with quick_redistribution():
        for source, target in pairs:
            rank, mesh = sp.get_rank(), source.mesh
            addend = x * 2.0 ** sum(mesh.coordinate(rank)[mesh.axis_names.index(axis)] for axis in source.partial)
            mine = addend[source.slices(rank, SHAPE)].copy()
            y = sharder().carry(mine, placement(source, SHAPE), placement(target, SHAPE))
            whole = x * 3.0 ** len(source.partial)  # 1 + 2 along each axis of the sum
            np.testing.assert_array_equal(y, whole[target.slices(rank, SHAPE)])
            said += sum(plan_quick_redistribution(source, target, SHAPE, 8).received_bytes(8))
            least += sum(plan_redistribution(source, target, SHAPE).received_bytes(8))
    return said, least


@pytest.mark.parametrize(("sizes", "step"), [((2,), 1), ((2, 2), 1), ((2, 2, 2), 11)])
def test_quick_plans_move_right_values_and_bytes(sizes, step):
    results = sp.launch(run_all, (pairs_over(sizes, step),), world_size=prod(sizes), transport="inline")

    ((said, least),) = set(results)
    counted = sum(e.sent_bytes for e in results.trace.events if e.kind in ("collective", "p2p"))
    assert counted == said
    assert (said > least) == (len(sizes) > 1)


@pytest.mark.process
def test_between_processes(processes):
    assert processes.run(4, run_all, pairs_over((2, 2), 5))


def test_fewest_bytes_outside_the_block():
    """The default, also after the block, and for the same tensor as inside it."""

    def device():
        x = np.arange(64.0).reshape(SHAPE)
        recorder = current_recorder()
        laid, counts = distribute_tensor(x, ROWS, requires_grad=True), []
        for quick in (False, True, False):
            start = len(recorder.events)
            if quick:
                with quick_redistribution():
                    y = laid.redistribute(COLUMNS)
            else:
                y = laid.redistribute(COLUMNS)
            counts.append(sum(e.sent_bytes for e in recorder.events[start:] if e.name != "new_group"))
            np.testing.assert_array_equal(y.data, x[COLUMNS.slices(sp.get_rank(), SHAPE)])
        return counts

    least = sum(8 * lacking(ROWS, COLUMNS, rank) for rank in range(4))
    assert [sum(counts) for counts in zip(*sp.launch(device, world_size=4, transport="inline"), strict=True)] == [
        least,
        4 * 3 * 16 * 8,
        least,
    ]


def test_disagreeing_ranks_are_reported():
    def device():
        laid = distribute_tensor(np.ones(SHAPE), ROWS)
        if sp.get_rank() == 0:
            return laid.redistribute(COLUMNS)
        with quick_redistribution():
            return laid.redistribute(COLUMNS)

    with refused(RunFailedError):
        sp.launch(device, world_size=4, transport="inline")
