"""Schedules of pipelines: the known lists, the closed forms of their times, and checks."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings, strategies as st
from refusals import refused
from schedule_records import RECORDS

import simparallel as sp
from simparallel.errors import InputError, ScheduleError
from simparallel.parallel.pipeline import Schedule
from simparallel.parallel.pipeline.rules import RULES
from simparallel.parallel.pipeline.schedule import ALIASES

GOLDEN = Path(__file__).with_name("golden_schedules.txt")


def _golden():
    blocks = GOLDEN.read_text().split("\n\n")[1:]
    for block in blocks:
        head, *rows = block.strip().splitlines()
        name, microbatches = head.split()
        yield name, int(microbatches), tuple(tuple(row.split()) for row in rows)


@st.composite
def schedules(draw, names=tuple(RULES), ranks=8, microbatches=32):
    """Draw a schedule that its rule allows, of at most about as many ranks and micro-batches."""
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, ranks)), draw(st.integers(1, microbatches))
    chunks = draw(st.integers(1, 3)) if RULES[name].chunks is None else None
    if name in ("dualpipe", "chimera"):
        ranks += ranks % 2
    if name == "chimera":
        microbatches = ranks * max(1, microbatches // ranks)
    if name.startswith("dualpipe"):
        microbatches += 2 * ranks
        microbatches += microbatches % 2
    if name.startswith("interleaved"):
        microbatches -= microbatches % max(1, microbatches // ranks)
    return sp.pipeline_schedule(name, ranks, microbatches, chunks)


@pytest.mark.parametrize(("name", "microbatches", "lists"), list(_golden()), ids=[name for name, _, _ in _golden()])
def test_lists_are_the_published_ones(name, microbatches, lists):
    assert sp.pipeline_schedule(name, 4, microbatches).actions == lists


def test_breadth_first_order():
    row = sp.pipeline_schedule("looped_bfs", 4, 3).actions[1]
    assert " ".join(row) == "1F0 1F1 1F2 5F0 5F1 5F2 5B2 5B1 5B0 1B2 1B1 1B0"


def test_every_schedule_has_a_record():
    assert RECORDS.keys() == RULES.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_costs_are_the_published_ones(name):
    record = RECORDS[name]
    cost = sp.pipeline_schedule(name, 4, record.microbatches).cost()
    assert cost.makespan == record.makespan
    assert record.span is None or cost.span == record.span
    assert cost.peak_live_at_weight_gradient == record.live


def test_chimera_costs():
    schedule = sp.pipeline_schedule("chimera", 4, 4)
    assert schedule.cost(1, 0, 1).makespan == 10


@settings(max_examples=4 * settings.default.max_examples)
@given(schedules())
def test_every_schedule_passes_its_check(schedule):
    cost = schedule.check()
    assert cost.makespan >= cost.work
    assert cost.span_bubble <= cost.bubble
    # All ranks do the same work.
    per_rank = 3 * schedule.microbatches * schedule.chunks // (2 if schedule.placement == "bidirectional" else 1)
    assert cost.work == per_rank


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(2, 7), st.integers(1, 28), st.integers(1, 5), st.integers(1, 7), st.integers(0, 6))
def test_closed_forms_with_latency(ranks, microbatches, forward, backward, message):
    def makespan(name):
        return sp.pipeline_schedule(name, ranks, microbatches).cost(forward, backward, 0, message).makespan

    fill = (microbatches + ranks - 1) * (forward + backward)
    for name in ("gpipe", "gpipe_reversed"):
        assert makespan(name) == fill + 2 * message * (ranks - 1)
    waits = ranks + microbatches - 2 - (microbatches + ranks - 2) // ranks
    assert makespan("1f1b") == fill + 2 * message * waits
    if 2 * message <= forward + backward:
        assert makespan("eager_1f1b") == fill + 2 * message * (ranks - 1)


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_closed_forms_of_split_backwards(ranks, microbatches, forward, first, second):
    assume(microbatches >= ranks)
    cost = sp.pipeline_schedule("zb_h1", ranks, microbatches).cost(forward, first, second)
    assert cost.bubble == (ranks - 1) * max(forward, first, forward + first - second)
    assert cost.peak_live_at_input_gradient == tuple(ranks - r for r in range(ranks))
    if microbatches >= 2 * ranks - 1:
        assert sp.pipeline_schedule("zb_h2", ranks, microbatches).cost().span_bubble == 0
        assert sp.pipeline_schedule("zbv", ranks, microbatches).cost().span_bubble == 0
        assert sp.pipeline_schedule("zbv", ranks, microbatches).cost().bubble == ranks - 1


@settings(max_examples=4 * settings.default.max_examples)
@given(schedules([name for name, rule in RULES.items() if rule.bubble]))
def test_closed_forms_of_all_rules(schedule):
    assume(schedule.microbatches >= 2 * schedule.ranks)
    form = RULES[schedule.name].bubble
    assert schedule.cost().bubble == form(schedule.ranks, schedule.microbatches)


@settings(max_examples=3 * settings.default.max_examples)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_closed_form_of_chimera(half, units, forward, longer):
    """Its slots have no bubble but the first ones; a backward that is longer than a forward adds some in each unit."""
    cost = sp.pipeline_schedule("chimera", 2 * half, 2 * half * units).cost(forward, forward + longer, 0)
    assert cost.bubble == (2 * half - 2) * (forward + units * longer)


@settings(max_examples=3 * settings.default.max_examples)
@given(schedules(), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(0, 3), st.integers(2, 5))
def test_times_scale_and_grow(schedule, times, message, factor):
    cost = schedule.cost(*times, message)
    larger = schedule.cost(*(factor * t for t in times), factor * message)
    assert larger.makespan == factor * cost.makespan
    assert schedule.cost(times[0] + 1, *times[1:], message).makespan >= cost.makespan
    assert schedule.cost(*times, message + 1).makespan >= cost.makespan
    each = [[t] * schedule.num_stages for t in times]
    assert schedule.cost(*each, message) == cost


@settings(max_examples=3 * settings.default.max_examples)
@given(schedules())
def test_messages_are_counted(schedule):
    ranks, m, stages = schedule.ranks, schedule.microbatches, schedule.num_stages
    if schedule.placement == "loop":
        expected = 2 * m * (stages - 1) if ranks > 1 else 0
    else:
        expected = 4 * m * (ranks - 1) if schedule.placement == "v" else 2 * m * (ranks - 1)
    assert schedule.cost().messages == expected


@settings(max_examples=3 * settings.default.max_examples)
@given(schedules())
def test_csv_round_trip(schedule):
    again = Schedule.from_csv(schedule.to_csv(), placement=schedule.placement, name=schedule.name)
    assert again == schedule
    assert schedule.diff(again) == []


def test_csv_of_pytorch():
    """Idle steps are empty cells, and pairs are marked."""
    text = "0F0,,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"
    schedule = Schedule.from_csv(text)
    assert schedule.actions[0] == ("0F0", "0F1", "(0F2+0B0)", "0B1", "0B2")
    assert (schedule.ranks, schedule.microbatches, schedule.chunks) == (2, 3, 1)
    schedule.check()


@settings(max_examples=3 * settings.default.max_examples)
@given(schedules(), st.data())
def test_mutations_are_refused(schedule, data):
    """A missing action, one that is done twice, and a backward before its forward."""
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    rows = [list(row) for row in schedule.actions]
    number = data.draw(st.integers(0, len(rows[rank]) - 1))
    kind = data.draw(st.sampled_from(["delete", "double", "swap"]))
    if kind == "delete":
        del rows[rank][number]
    elif kind == "double":
        rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), rows[rank][number])
    else:
        forward = data.draw(
            st.sampled_from([i for i, text in enumerate(rows[rank]) if "F" in text and "+" not in text])
        )
        stage, m = rows[rank][forward].split("F")
        backward = next(
            i
            for i, text in enumerate(rows[rank])
            for kind in "BI"
            if f"{stage}{kind}{m}" in text.strip("()").split("+")
        )
        rows[rank][forward], rows[rank][backward] = rows[rank][backward], rows[rank][forward]
    with pytest.raises(ScheduleError) as refusal:
        schedule.with_actions(rows).check()
    assert refusal.value.stage is not None


@settings(max_examples=2 * settings.default.max_examples)
@given(schedules(ranks=5, microbatches=10), st.randoms(use_true_random=False))
def test_any_order_that_respects_the_needs_is_accepted(schedule, random):
    """Run the actions in a random order that their needs allow: each rank's part of it is a legal list."""
    lists = schedule._lists
    left = {action for cells in lists.cells for cell in cells for action in cell}
    done, rows = set(), [[] for _ in range(schedule.ranks)]
    while left:
        ready = sorted(a for a in left if all(any(n in done for n in each) for each in lists.needs(a)))
        action = random.choice(ready)
        left.remove(action)
        done.add(action)
        rows[schedule.rank_of(action.stage)].append(str(action))
    schedule.with_actions(rows).check()


def test_ranks_that_wait_for_each_other_are_named():
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with refused(ScheduleError) as refusal:
        Schedule("mine", 2, 2, 1, "loop", rows).check()
    assert refusal.value.cell in (1, 2)


def test_refusals():
    for arguments in (("2f2b",), ("1f1b", 0), ("1f1b", 4, 0), ("1f1b", 4, 8, 2), ("interleaved_1f1b", 4, 9)):
        with refused(InputError):
            sp.pipeline_schedule(*arguments)
    for arguments in (("dualpipe_v", 4, 7), ("dualpipe", 3, 8), ("dualpipe", 4, 9), ("chimera", 4, 6)):
        with refused(InputError):
            sp.pipeline_schedule(*arguments)
    schedule = sp.pipeline_schedule("1f1b", 2, 2)
    with refused(ScheduleError):
        schedule.check(memory=1)
    with refused(ScheduleError):
        schedule.check(depth=0)
    with refused(ScheduleError):
        schedule.with_actions([["0F0", "forward"], []])
    for rows in ([["0F0", "2F0"], []], [["1F0"], []], [["0F2"], []], [["0F0", "0F1", "0B0"], []]):
        with refused(ScheduleError):
            schedule.with_actions(rows).check()
    with refused(InputError):
        Schedule("mine", 2, 2, 1, "ring", ((), ()))
    with refused(InputError):
        Schedule("mine", 2, 2, 1, "loop", ((),))
    with refused(InputError):
        schedule.cost(forward=[1, 2, 3])
    with refused(InputError):
        schedule.cost(message=-1)
    with refused(InputError):
        Schedule.from_csv("")
    with refused(InputError):
        Schedule.from_csv("0F0,1F0,2F0\n0F1\n")
    # Stages that two ranks do are priced, too, if no rank waits for ever.
    assert Schedule.from_csv("0F0,1B0,0B0\n1F0").cost().makespan == 6
    with refused(ScheduleError):
        Schedule.from_csv("0F0,0B0,1B0\n1F0").cost()


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_names_of_other_frameworks(name):
    assert sp.pipeline_schedule(name.upper()) == sp.pipeline_schedule(ALIASES[name])


def test_mailboxes():
    """Depths that receives just before use and sends just after it need; P = 4, M = 8."""
    depths = {name: sp.pipeline_schedule(name).mailbox_depth for name in RULES if name != "chimera"}
    assert depths["gpipe"] == 0
    assert {depths[n] for n in ("1f1b", "eager_1f1b", "zb_h1", "zb_h2", "interleaved_1f1b")} == {1}
    assert {depths[n] for n in ("interleaved_zb", "looped_bfs", "zbv", "dualpipe_v", "dualpipe")} == {2}
    assert sp.pipeline_schedule("interleaved_1f1b", 2, 8).mailbox_depth == 2


def test_weight_versions():
    schedule = sp.pipeline_schedule("pipedream")
    versions = [[schedule.weight_version(r, k) for k in range(8)] for r in range(4)]
    assert versions == [[max(0, k - 3 + r) for k in range(8)] for r in range(4)]
    assert [sp.pipeline_schedule("pipedream_2bw").weight_version(0, 0, step) for step in range(4)] == [0, 0, 1, 2]
    assert {sp.pipeline_schedule("1f1b").weight_version(r, k, 2) for r, k in product(range(4), range(8))} == {2}


def test_text():
    schedule = sp.pipeline_schedule("1f1b", 2, 3)
    lines = str(schedule).splitlines()
    assert lines[0] == "1f1b: 2 ranks, 3 micro-batches; makespan 12, bubble 3, span bubble 3, live 2 1"
    assert [line[:2] for line in lines[1:]] == ["r0", "r1"]
    # A full backward takes two units of time, and dots are idle.
    assert lines[1].split()[1:] == ["F0", "F1", ".", ".", "B0", "B0", "F2", "B1", "B1", ".", "B2", "B2"]
    assert lines[2].split()[1:] == [".", "F0", "B0", "B0", "F1", "B1", "B1", "F2", "B2", "B2"]
    assert repr(schedule) == "<Schedule 1f1b: 2 ranks, 3 micro-batches>"
