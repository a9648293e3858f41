"""Where the time of a schedule goes: idle times by their reasons, and critical paths."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings, strategies as st
from test_pipeline_schedules import schedules

import simparallel as sp
from simparallel.errors import ScheduleError
from simparallel.parallel.pipeline import Schedule


@st.composite
def timed(draw):
    """Draw a schedule, with integer times of each stage and a latency; some are 0."""
    schedule = draw(schedules())
    each = st.lists(st.integers(0, 5), min_size=schedule.num_stages, max_size=schedule.num_stages)
    kinds = "forward", "input_gradient", "weight_gradient"
    return schedule, {**{kind: draw(st.integers(1, 5) | each) for kind in kinds}, "message": draw(st.integers(0, 6))}


def _cell(schedule, rank, text):
    """Return the actions of a cell of a rank's list."""
    return schedule._lists.cells[rank][schedule.actions[rank].index(text)]


@settings(max_examples=4 * settings.default.max_examples)
@given(timed())
def test_bubbles_and_work_add_up(case):
    schedule, times = case
    makespan = schedule.cost(**times).makespan
    bubbles = schedule.bubbles(**times)
    assert len(bubbles) == schedule.ranks
    for ran, bubble in zip(schedule.spans(**times), bubbles, strict=True):
        assert min(bubble) >= 0
        assert bubble.total == makespan - sum(end - start for start, end in ran)
        assert bubble.warmup == ran[0].start
        assert bubble.barrier == makespan - ran[-1].end


@settings(max_examples=2 * settings.default.max_examples)
@given(timed(), st.data())
def test_memory_is_the_time_of_a_forward_run_earlier(case, data):
    """Move the next forward in front of each cell that waits for a gradient: it starts so much before that cell."""
    schedule, times = case
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    cells, ran, memory = schedule._lists.cells[rank], schedule.spans(**times)[rank], 0
    for number in range(1, len(cells)):
        forward = next((action for cell in cells[number:] for action in cell if action.kind == "F"), None)
        waits = ran[number].start > ran[number - 1].end and any(action.kind in "IB" for action in cells[number])
        if forward is None or not waits:
            continue
        rest = [[str(action) for action in cell if action != forward] for cell in cells]
        rest.insert(number, [str(forward)])
        rows = list(schedule.actions)
        rows[rank] = ["(" + "+".join(cell) + ")" if len(cell) == 2 else cell[0] for cell in rest if cell]
        try:
            moved = schedule.with_actions(rows).spans(**times)[rank][number]
        except ScheduleError:  # its input needs the cell that waits
            continue
        memory += max(0, ran[number].start - moved.start)
    assert memory == schedule.bubbles(**times)[rank].memory


@settings(max_examples=4 * settings.default.max_examples)
@given(timed())
def test_critical_path_is_a_chain(case):
    schedule, times = case
    path, duration = schedule.critical_path(**times), schedule.duration(**times)
    actions = [_cell(schedule, rank, text) for rank, text, _ in path]
    assert [end - start for _, _, (start, end) in path] == [sum(map(duration, cell)) for cell in actions]
    assert (path[0][2].start, path[-1][2].end) == (0, schedule.cost(**times).makespan)
    total = sum(sum(map(duration, cell)) for cell in actions)
    for (before, first, span), (rank, then, after), cell in zip(path, path[1:], actions[1:], strict=False):
        latency = times["message"] if before != rank else 0
        assert after.start == span.end + latency
        total += latency
        if before == rank:
            assert (first, then) in pairwise(schedule.actions[rank])
        else:
            needed = {str(other) for action in cell for each in schedule._lists.needs(action) for other in each}
            assert needed & set(first.strip("()").split("+"))
    assert total == schedule.cost(**times).makespan


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(2, 7), st.integers(1, 28), st.integers(1, 5), st.integers(1, 5), st.integers(0, 6))
def test_no_limit_of_memory_in_gpipe(ranks, microbatches, forward, backward, message):
    """No forward is left when it waits for gradients: they take a forward and a backward of each stage behind."""
    times = {"forward": forward, "input_gradient": backward, "weight_gradient": 0, "message": message}
    for r, bubble in enumerate(sp.pipeline_schedule("gpipe", ranks, microbatches).bubbles(**times)):
        behind, fill = ranks - 1 - r, forward + message
        assert bubble == (r * fill, 0, behind * (forward + backward + 2 * message), 0, r * (backward + message))


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(2, 7), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_first_rank_of_1f1b_lacks_memory(ranks, rounds, forward, backward):
    """Inputs of its forwards are always there: whenever one is left, only live activations hold it back."""
    schedule = sp.pipeline_schedule("1f1b", ranks, rounds * ranks)
    bubble = schedule.bubbles(forward, backward, 0, 1)[0]
    gaps = [after.start - before.end for before, after in pairwise(schedule.spans(forward, backward, 0, 1)[0])]
    last = max(number for number, action in enumerate(schedule.actions[0]) if "F" in action)
    assert (bubble.memory, bubble.gradient) == (sum(gaps[:last]), sum(gaps[last:]))


def test_live_activations_replace_waits():
    """With messages that take time, 1F1B waits for memory: twice the warm-up is faster."""
    short, long = (sp.pipeline_schedule(name).bubbles(message=1) for name in ("1f1b", "eager_1f1b"))
    assert (short[0].memory, long[0].memory) == (16, 9)
    assert [each.total for each in short] == [25] * 4
    assert [each.total for each in long] == [15] * 4
    # The last rank waits for activations that the first ones were not allowed to compute.
    assert (short[3].activation, long[3].activation) == (10, 0)


def test_pair_waits_for_what_comes_last():
    """The forward of a pair has its input: the rank waits for the gradient, and could run the forward alone."""
    rows = [["0F0", "(0F1+0B0)", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = Schedule("pairs", 2, 2, 1, "loop", rows)
    assert schedule.bubbles()[0] == (0, 0, 3, 3, 0)
    assert schedule.critical_path() == [
        (0, "0F0", (0, 1)), (1, "1F0", (1, 2)), (1, "1B0", (2, 4)), (0, "(0F1+0B0)", (4, 7)), (1, "1F1", (7, 8)),
        (1, "1B1", (8, 10)), (0, "0B1", (10, 12)),
    ]  # fmt: skip


def test_table_of_bubbles():
    lines = str(sp.pipeline_schedule("1f1b", 2, 3).bubbles(message=0.5)).splitlines()
    assert lines[0].split() == ["warm-up", "activation", "gradient", "memory", "barrier", "bubble"]
    assert [line.split()[0] for line in lines[1:]] == ["r0", "r1"]
    assert lines[1].split()[1:] == ["0", "0", "2", "3", "0", "5"]


def test_schedule_without_actions():
    empty = Schedule("empty", 2, 1, 1, "loop", ((), ()))
    assert empty.critical_path() == []
    assert [each.total for each in empty.bubbles()] == [0, 0]
