"""The times of schedules and the depths of their mailboxes, against walks of their lists that know no graph."""

from __future__ import annotations

from collections import Counter
from itertools import count, product

import pytest
from hypothesis import given, settings
from refusals import refused
from test_pipeline_attribution import timed
from test_pipeline_schedules import schedules

import simparallel as sp
from simparallel.errors import InputError, ScheduleError
from simparallel.parallel.pipeline import Schedule
from simparallel.parallel.pipeline.rules import RULES


def walked(schedule, message=0, **times):
    """Return the spans of all cells: sweep over the ranks, and run each next cell whose results are known."""
    duration, order = schedule.duration(**times), schedule._lists
    ended, found = {}, [[] for _ in order.cells]
    while any(len(ran) < len(cells) for ran, cells in zip(found, order.cells, strict=True)):
        for rank, cells in enumerate(order.cells):
            for cell in cells[len(found[rank]) :]:
                needs = [each for action in cell for each in order.needs(action) if each[0] not in cell]
                known = [next((ended[other] for other in each if other in ended), None) for each in needs]
                if None in known:
                    break
                free = found[rank][-1][1] if found[rank] else 0
                start = end = max([free, *(time if source == rank else time + message for source, time in known)])
                for action in cell:
                    end += duration(action)
                ended.update(dict.fromkeys(cell, (rank, end)))
                found[rank].append((start, end))
    return found


@settings(max_examples=60)
@given(timed())
def test_spans_are_those_of_a_walk(case):
    schedule, times = case
    assert schedule.spans(**times) == walked(schedule, **times)


TIMES = (
    {},
    {"forward": 3, "input_gradient": 4, "weight_gradient": 2, "message": 7},
    {"forward": 1.1, "input_gradient": 1.3, "weight_gradient": 0.7, "message": 0.35},
)


@pytest.mark.matrices
@pytest.mark.parametrize("name", RULES)
def test_all_numbers_of_ranks_and_chunks(name):
    """Equal to the last bit, also for times whose sums are rounded."""
    cases = 0
    for ranks, microbatches, chunks in product(
        (2, 4, 8), (4, 6, 8, 12, 16, 24, 32), (None,) if RULES[name].chunks else range(1, 5)
    ):
        try:
            schedule = sp.pipeline_schedule(name, ranks, microbatches, chunks)
        except InputError:
            continue
        for times in TIMES:
            assert schedule.spans(**times) == walked(schedule, **times)
            cases += 1
    assert cases >= 9


# --- mailboxes --------------------------------------------------------------------------------------------


def depth_by_steps(schedule):
    """Return the least depth: let each rank receive, compute and send as far as it can, until nothing moves."""
    order = schedule._lists
    rank_of = {action: rank for rank, cells in enumerate(order.cells) for cell in cells for action in cell}
    inputs = {a: [n for each in order.needs(a) for n in each if n in rank_of] for a in rank_of}
    target = {n: rank_of[a] for a, needs in inputs.items() for n in needs if rank_of[n] != rank_of[a]}
    steps = []
    for rank, cells in enumerate(order.cells):
        own = []
        for cell in cells:
            own += [("receive", n) for a in cell for n in inputs[a] if rank_of[n] != rank]
            own += [("send", a) for a in cell if a in target]
        steps.append(own)

    def finishes(depth):
        at, boxes, moved = [0] * len(steps), Counter(), True
        arrived = set()
        while moved:
            moved = False
            for rank, own in enumerate(steps):
                while at[rank] < len(own):
                    what, action = own[at[rank]]
                    box = rank_of[action], target[action]
                    if what == "send" and boxes[box] < depth:
                        boxes[box] += 1
                        arrived.add(action)
                    elif what == "send" and steps[box[1]][at[box[1]] :][:1] == [("receive", action)]:
                        at[box[1]] += 1
                    elif what == "receive" and action in arrived:
                        boxes[box] -= 1
                    else:
                        break
                    at[rank] += 1
                    moved = True
        return all(number == len(own) for number, own in zip(at, steps, strict=True))

    return next(depth for depth in count() if finishes(depth))


@settings(max_examples=40)
@given(schedules())
def test_mailboxes_are_as_deep_as_needed(schedule):
    assert schedule.mailbox_depth == depth_by_steps(schedule)


# --- cycles -----------------------------------------------------------------------------------------------


def test_cycle_of_a_pair_is_named():
    rows = [["(0F1+0B0)", "0F0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    with refused(ScheduleError):
        Schedule("mine", 2, 2, 1, "loop", rows).cost()


def test_cycle_within_a_rank_is_named():
    rows = [["0F0", "0W0", "0I0"], ["1F0", "1B0"]]
    with refused(ScheduleError, rank=0, cell=1):
        Schedule("mine", 2, 1, 1, "loop", rows).cost()


def test_first_of_an_action_done_twice_counts():
    assert Schedule("mine", 1, 1, 1, "loop", [["0F0", "0B0", "0F0"]]).cost().makespan == 4
    with refused(ScheduleError):
        Schedule("mine", 1, 1, 1, "loop", [["0F0", "0W0", "0I0", "(0I0+0W0)"]]).cost()


def test_mailbox_of_a_cycle_is_refused():
    rows = [["0B0", "0F0"], ["1F0", "1B0"]]
    with refused(ScheduleError, rank=0):
        Schedule("mine", 2, 1, 1, "loop", rows).mailbox_depth  # noqa: B018
