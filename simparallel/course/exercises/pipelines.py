"""Exercises of lesson 11: pipelines."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import Any

from simparallel.course.exercises.exercise import Case, Values, by_rank, call_case, exercise, integers
from simparallel.course.exercises.remarks import Remark
from simparallel.errors import InputError, ScheduleError
from simparallel.parallel.pipeline.schedule import pipeline_schedule
from simparallel.view import plot_schedule


@exercise(lesson=11, ranks=range(1, 6), microbatches=range(1, 9))
def lists_of_1f1b(ranks: int, microbatches: int) -> Case:
    """Return the schedule 1F1B: for each rank a list of actions such as "2F0"."""
    schedule = pipeline_schedule("1f1b", ranks, microbatches)

    def judge(expected: Values, found: Values) -> str | None:
        try:
            cost = schedule.with_actions(list(found.values())).check(memory=ranks)
        except (InputError, ScheduleError) as error:
            return str(error)
        right = schedule.cost().makespan
        return None if cost.makespan == right else Remark("makespan {:g}, expected {:g}", cost.makespan, right)

    def draw(found: Values, ax: Any) -> None:
        plot_schedule(schedule.with_actions(list(found.values())), ax)

    lists = by_rank([str(action) for action in row] for row in schedule.actions)
    given = {"ranks": ranks, "micro-batches": microbatches}
    return call_case(given, lists, judge, form=lambda rows: by_rank(list(map(str, row)) for row in rows), draw=draw)


@exercise(lesson=11, ranks=range(1, 7), share=(0.45, 0.22, 0.13, 0.07))
def fewest_microbatches(ranks: int, share: float) -> Case:
    """Return the least number of micro-batches with which GPipe's bubble is at most `share` of the step."""
    count = 1
    while (cost := pipeline_schedule("gpipe", ranks, count).cost()).bubble > share * cost.makespan:
        count += 1
    return call_case({"ranks": ranks, "share": share}, {"micro-batches": count})


@exercise(lesson=11, layers=range(1, 9), ranks=range(1, 9), seed=range(2))
def balanced_stages(layers: int, ranks: int, seed: int) -> Case:
    """Cut a row of layers into stages, so that the slowest stage is as fast as possible."""
    ranks = min(ranks, layers)
    times = [int(time) + 10 for time in integers(layers + seed)[seed:]]
    cuts = [[0, *inner, layers] for inner in combinations(range(1, layers), ranks - 1)]
    best = min(cuts, key=lambda cut: max(sum(times[a:b]) for a, b in pairwise(cut)))
    slowest = max(sum(times[a:b]) for a, b in pairwise(best))

    def judge(expected: Values, found: Values) -> str | None:
        counts = found["layers of each stage"]
        if len(counts) != ranks:
            return Remark("{} stages for {} ranks", len(counts), ranks)
        if min(counts) < 1:
            return Remark("an empty stage in {}", counts)
        if sum(counts) != layers:
            return Remark("{} layers in the stages, there are {}", sum(counts), layers)
        time = max(sum(times[a:b]) for a, b in pairwise([0, *accumulate(counts)]))
        return (
            None if time == slowest else Remark("the slowest of {} takes {}, and {} is possible", counts, time, slowest)
        )

    expected = {"layers of each stage": [b - a for a, b in pairwise(best)]}
    return call_case({"times": times, "ranks": ranks}, expected, judge, form=list)
