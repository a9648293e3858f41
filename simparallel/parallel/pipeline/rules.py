"""The rules of the known schedules: for each rank its list of actions.

Sources: GPipe: Huang et al. 2019; 1F1B: PipeDream-flush, Narayanan et al. 2021 (memory-efficient pipelines), and
DAPPLE, Fan et al. 2021; interleaved: Narayanan et al. 2021 (Megatron-LM); breadth-first: Lamy-Poirier 2022, arXiv
2211.05953; ZB-H1, ZB-H2: Qi et al. 2023, arXiv 2401.10241; ZBV, V-Half, V-Min: Qi et al. 2024, arXiv 2405.15362;
DualPipe, DualPipeV: the DeepSeek-V3 report, 2024; Chimera: Li and Hoefler 2021; PipeDream: Narayanan et al. 2019.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from itertools import chain, cycle, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from simparallel.errors import InputError
from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Cell
from simparallel.parallel.pipeline.timing import PipelineOrder

# For each rank its cells.
Rows = list[list[Cell]]
Make = TypeVar("Make", bound=Callable[..., Rows])

# Where the stages are: rank s mod P, back and forth, or two replicas in opposite directions.
LOOP, ZIGZAG, BIDIRECTIONAL = "loop", "v", "bidirectional"


class ScheduleRule(NamedTuple):
    """A known schedule.

    Attributes:
        make: returns the cells of each rank, from ranks, micro-batches and chunks.
        bubble: returns the bubble of a step (the makespan minus the busiest rank's work) in closed form, from ranks
            and micro-batches; None if no closed form is known. It holds if a forward, an input gradient and a weight
            gradient take one unit of time each, for 2 x ranks micro-batches or more. The papers named above have the
            formulas. Chimera's holds for one unit of `ranks` micro-batches; we add ranks - 2 for each further unit,
            which the tests confirm.
        placement: where the stages are.
        chunks: stages of a rank; None for any number.
    """

    make: Callable[..., Rows]
    bubble: Callable[[int, int], int] | None
    placement: str = LOOP
    chunks: int | None = 1


RULES: dict[str, ScheduleRule] = {}


def schedule(
    name: str,
    bubble: Callable[[int, int], int] | None = None,
    placement: str = LOOP,
    chunks: int | None = 1,
    **settings: Any,
) -> Callable[[Make], Make]:
    """Register the decorated function, with these settings, as the schedule `name`. For the rest see `ScheduleRule`."""

    def register(make: Make) -> Make:
        RULES[name] = ScheduleRule(partial(make, **settings), bubble, placement, chunks)
        return make

    return register


def each_rank(row: Callable[..., list[Cell]]) -> Callable[..., Rows]:
    """Make the function that returns the cells of rank r a rule, which returns those of all ranks."""

    @wraps(row)
    def rows(ranks: int, *counts: int, **settings: Any) -> Rows:
        return [row(r, ranks, *counts, **settings) for r in range(ranks)]

    return rows


def _full(ranks: int, microbatches: int) -> int:
    """Return the bubble of full backwards: a forward and a backward for each other rank."""
    return 3 * (ranks - 1)


def _split(ranks: int, microbatches: int) -> int:
    """Return the bubble that is left if weight gradients fill the rest: the forwards before the last rank's first."""
    return ranks - 1


class StageCursor:
    """The micro-batches of one stage, in order: each kind of action has its own next one.

    Args:
        stage: the stage.
        microbatches: how many; actions beyond them are left out.
    """

    def __init__(self, stage: int, microbatches: int) -> None:
        self.stage = stage
        self._next = {kind: iter(range(microbatches)) for kind in (FORWARD, "gradient", WEIGHT_GRADIENT)}
        self.forwards_left = microbatches

    def next(self, kind: str) -> Action | None:
        """Return the next action of a kind; None if all are done."""
        # A full backward is the next input gradient and the weight gradient with it.
        number = next(self._next["gradient" if kind in (INPUT_GRADIENT, BACKWARD) else kind], None)
        if number is None:
            return None
        if kind == FORWARD:
            self.forwards_left -= 1
        if kind == BACKWARD:
            next(self._next[WEIGHT_GRADIENT], None)
        return Action(self.stage, kind, number)


@schedule("gpipe_reversed", _full, is_reversed=True)
@schedule("gpipe", _full)
@each_rank
def gpipe(r: int, ranks: int, microbatches: int, chunks: int, is_reversed: bool = False) -> list[Cell]:
    """Return all forwards, then all backwards; with `is_reversed` from the last micro-batch, as in GPipe's paper."""
    backwards = _all(r, BACKWARD, microbatches)[:: -1 if is_reversed else 1]
    return _by_turns(_all(r, FORWARD, microbatches), backwards, microbatches)


# Without a flush, the PipeDreams have the bubble in their first and last steps only.
@schedule("pipedream_2bw", _full)
@schedule("pipedream", _full)
@schedule("eager_1f1b", _full, warmup=2)
@schedule("1f1b", _full)
@each_rank
def one_forward_one_backward(r: int, ranks: int, microbatches: int, chunks: int, warmup: int = 1) -> list[Cell]:
    """Return for rank r of P `warmup` (P - 1 - r) forwards, then one forward, one backward by turns, then the rest."""
    first = min(microbatches, warmup * (ranks - 1 - r))
    return _by_turns(_all(r, FORWARD, microbatches), _all(r, BACKWARD, microbatches), first)


@schedule("interleaved_1f1b", _full, chunks=None)
@each_rank
def interleaved(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return 1F1B over the chunks of a rank, in groups of about as many micro-batches as there are ranks."""
    group = _group_of(ranks, microbatches)
    forwards, backwards = _table(r, ranks, microbatches, chunks, group)
    first = min(len(forwards), 2 * (ranks - 1 - r) + (chunks - 1) * group)
    return _by_turns(forwards, [Action(s, BACKWARD, m) for s, _, m in backwards], first)


@schedule("looped_bfs", _full, chunks=None)
@each_rank
def looped_bfs(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return all micro-batches through one chunk after the other, and back in the opposite order."""
    forwards = [Action(v * ranks + r, FORWARD, m) for v in range(chunks) for m in range(microbatches)]
    return _by_turns(forwards, [action._replace(kind=BACKWARD) for action in reversed(forwards)], len(forwards))


@schedule("zb_h2", _split, warmup=2)
@schedule("zb_h1", _split)
@each_rank
def zero_bubble(r: int, ranks: int, microbatches: int, chunks: int, warmup: int = 1) -> list[Cell]:
    """Return 1F1B with split backwards; on rank r, weight gradients come r (ZB-H2: 2 r) input gradients later."""
    forwards, gradients = _all(r, FORWARD, microbatches), _all(r, INPUT_GRADIENT, microbatches)
    first = min(microbatches, warmup * (ranks - 1 - r))
    return _delayed(forwards, gradients, first, warmup * r)


@schedule("interleaved_zb", _split, chunks=None)
@each_rank
def interleaved_zero_bubble(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return the interleaved order with split backwards; on rank r, weight gradients come r input gradients later."""
    group = _group_of(ranks, microbatches)
    forwards, gradients = _table(r, ranks, microbatches, chunks, group)
    first = min(len(forwards), (ranks - 1 - r) + (chunks - 1) * group)
    return _delayed(forwards, gradients, first, r)


@schedule("zbv", _split, ZIGZAG, 2)
@each_rank
def zbv(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return the cells of rank r, which has two chunks on a V: the rank with the first stage has the last one, too."""
    # With fewer micro-batches, the list is that of 2P - 1 without the actions of the others.
    most = max(microbatches, 2 * ranks - 1)
    a, b = StageCursor(r, most), StageCursor(2 * ranks - 1 - r, most)
    cells = _next(2 * (ranks - r) - 1, (a, FORWARD))
    cells += _next(r, (b, FORWARD), (a, FORWARD))
    cells += _next(ranks - r, (b, FORWARD), (b, INPUT_GRADIENT), (b, WEIGHT_GRADIENT))
    while a.forwards_left or b.forwards_left:
        cells += _next(1, (a, FORWARD), (a, INPUT_GRADIENT), (a, WEIGHT_GRADIENT))
        cells += _next(1, (b, FORWARD), (b, INPUT_GRADIENT), (b, WEIGHT_GRADIENT))
    cells += _next(r, (a, INPUT_GRADIENT), (b, INPUT_GRADIENT))
    cells += _next(ranks - r, (a, INPUT_GRADIENT), (a, WEIGHT_GRADIENT))
    cells += _next(most, (b, WEIGHT_GRADIENT))
    cells += _next(most, (a, WEIGHT_GRADIENT))
    return [cell for cell in cells if cell[0].microbatch < microbatches]


@schedule("v_half", None, ZIGZAG, 2)
def v_half(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Return the cells of ranks with two chunks on a V: a pattern of six slots, about half of the memory of 1F1B."""
    delay = 3 if ranks % 2 == 0 else 0
    return _squeezed(
        ranks, microbatches, 2 * ((ranks + 2) // 2),
        lambda r: (2 * r, 3 * ranks - 2 - r, 3 * ranks + delay + 2 * r - 1, 6 * ranks + delay - r - 2),
    )  # fmt: skip


@schedule("v_min", None, ZIGZAG, 2)
def v_min(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Return the cells of ranks with two chunks on a V: a pattern of six slots, about a third of the memory of 1F1B."""
    delay = 2 if ranks % 3 == 0 else 0
    return _squeezed(
        ranks, microbatches, 2 * ((ranks + 4) // 3),
        lambda r: (r, 2 * ranks - 1 - r, 2 * ranks + delay + r, 4 * ranks + delay - 1 - r),
    )  # fmt: skip


@schedule("dualpipe_v", lambda p, m: 2 * (p - 1), ZIGZAG, 2)
@each_rank
def dualpipe_v(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return the cells of rank r, which has two chunks on a V: forwards and backwards in pairs that may overlap."""
    _need(microbatches >= 2 * ranks, "microbatches", microbatches, f"dualpipe_v needs 2 x ranks = {2 * ranks} or more")
    return _dual(r, ranks, microbatches, r, 2 * ranks - 1 - r)


@schedule("dualpipe", lambda p, m: p - 2, BIDIRECTIONAL, 2)
@each_rank
def dualpipe(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return the cells of rank r, which has a stage of each of two replicas: they run in opposite directions.

    Each replica takes half of the micro-batches.
    """
    _need(ranks % 2 == 0, "ranks", ranks, "dualpipe needs an even number")
    _need(microbatches % 2 == 0, "microbatches", microbatches, "dualpipe needs an even number")
    _need(microbatches >= 2 * ranks, "microbatches", microbatches, f"dualpipe needs 2 x ranks = {2 * ranks} or more")
    near, far = r, 2 * ranks - 1 - r
    if r >= ranks // 2:
        near, far = far, near
    return _dual(min(r, ranks - 1 - r), ranks // 2, microbatches // 2, near, far)


@schedule("chimera", lambda p, m: (p - 2) * (1 + m // p), BIDIRECTIONAL, 2)
@each_rank
def chimera(r: int, ranks: int, microbatches: int, chunks: int) -> list[Cell]:
    """Return the cells of rank r, which has a stage of each of two replicas: they run in opposite directions.

    The micro-batches come in units of as many as there are ranks.
    """
    _need(ranks % 2 == 0, "ranks", ranks, "chimera needs an even number")
    _need(microbatches % ranks == 0, "microbatches", microbatches, f"chimera needs a multiple of ranks = {ranks}")
    slots = []
    for m in range(microbatches // 2):
        unit, k = divmod(m, ranks // 2)
        for stage, place in ((r, r), (2 * ranks - 1 - r, ranks - 1 - r)):
            start = 2 * ranks * unit + 2 * k
            slots.append((start + place, Action(stage, FORWARD, m)))
            slots.append((start + 2 * ranks - 1 - place, Action(stage, BACKWARD, m)))
    return [(action,) for _, action in sorted(slots)]


# --- pieces ---------------------------------------------------------------------------------------


def _next(times: int, *steps: tuple[StageCursor, str]) -> list[Cell]:
    """Return the next actions of these streams, `times` times; those that do not exist are left out."""
    actions = [stream.next(kind) for _ in range(times) for stream, kind in steps]
    return [(action,) for action in actions if action is not None]


def _all(stage: int, kind: str, microbatches: int) -> list[Action]:
    return [Action(stage, kind, m) for m in range(microbatches)]


def _by_turns(forwards: list[Action], backwards: list[Action], first: int) -> list[Cell]:
    """Return `first` forwards, then a forward and a backward by turns, then the rest of the backwards."""
    rest = len(forwards) - first
    turns = chain.from_iterable(zip(forwards[first:], backwards[:rest], strict=True))
    return [(action,) for action in (*forwards[:first], *turns, *backwards[rest:])]


def _delayed(forwards: list[Action], gradients: list[Action], first: int, delay: int) -> list[Cell]:
    """Return `first` forwards, then forwards and input gradients by turns, with weight gradients `delay` later."""
    actions, left = forwards[:first], iter(forwards[first:])
    for k, gradient in enumerate(gradients):
        actions += [*islice(left, 1), gradient]
        if k >= delay:
            actions.append(gradients[k - delay]._replace(kind=WEIGHT_GRADIENT))
    late = gradients[max(len(gradients) - delay, 0) :]
    return [(action,) for action in (*actions, *(each._replace(kind=WEIGHT_GRADIENT) for each in late))]


def _group_of(ranks: int, microbatches: int) -> int:
    rounds = max(1, microbatches // ranks)
    _need(
        microbatches % rounds == 0, "microbatches", microbatches,
        f"interleaved schedules go in {rounds} equal rounds on {ranks} ranks: a multiple of {rounds} is needed",
    )  # fmt: skip
    return microbatches // rounds


def _table(r: int, ranks: int, microbatches: int, chunks: int, group: int) -> tuple[list[Action], list[Action]]:
    """Return the forwards and the input gradients of a rank: a group of micro-batches, chunk by chunk."""
    order = [
        (m, v)
        for start in range(0, microbatches, group)
        for v in range(chunks)
        for m in range(start, min(start + group, microbatches))
    ]
    forwards = [Action(v * ranks + r, FORWARD, m) for m, v in order]
    return forwards, [Action((chunks - 1 - v) * ranks + r, INPUT_GRADIENT, m) for m, v in order]


def _squeezed(ranks: int, microbatches: int, limit: int, offsets: Callable[[int], tuple[int, int, int, int]]) -> Rows:
    """Return a pattern that repeats every six slots, run as early as possible with `limit` live activations at most.

    A rank takes the next action of its pattern if it can run; or else the one after it, if the lists get shorter that
    way. Weight gradients fill the gaps.
    """
    found = [_run_early(ranks, microbatches, limit, offsets, ahead) for ahead in (1, 2)]
    rows, _ = min(found, key=itemgetter(1))
    return rows


def _run_early(
    ranks: int, microbatches: int, limit: int, offsets: Callable[[int], tuple[int, int, int, int]], ahead: int
) -> tuple[Rows, int]:
    """Return the lists, and their length, if a rank picks the first of its next `ahead` actions that can run."""
    # Slots choose an order, in which all actions last equally long; the times of the schedule are those of the clock.
    lists, waiting = PipelineOrder((), (range(2 * ranks),)), []
    for r in range(ranks):
        a, b = r, 2 * ranks - 1 - r
        kinds = (a, FORWARD), (b, FORWARD), (b, INPUT_GRADIENT), (a, INPUT_GRADIENT)
        starts = zip(offsets(r), kinds, strict=True)
        slots = sorted((start + 6 * m, Action(*kind, m)) for start, kind in starts for m in range(microbatches))
        waiting.append([action for _, action in slots])
    done: set[Action] = set()
    rows: Rows = [[] for _ in range(ranks)]
    late: list[deque[Action]] = [deque() for _ in range(ranks)]
    live, time = [0] * ranks, 0
    while any(waiting) or any(late):
        now = []
        for r, row in enumerate(rows):
            action = next((each for each in waiting[r][:ahead] if _can_run(lists, each, done, live[r] < limit)), None)
            if action is not None:
                waiting[r].remove(action)
                now.append(action)
                if action.kind == FORWARD:
                    live[r] += 1
                else:
                    late[r].append(action._replace(kind=WEIGHT_GRADIENT))
            elif late[r]:
                action = late[r].popleft()
                live[r] -= 1
            if action is not None:
                row.append((action,))
        # Results are available once the slot has ended.
        done.update(now)
        time += 1
    return rows, time


def _can_run(lists: PipelineOrder, action: Action, done: set[Action], has_room: bool) -> bool:
    is_ready = all(any(other in done for other in each) for each in lists.needs(action))
    return is_ready and (has_room or action.kind != FORWARD)


def _dual(r: int, ranks: int, microbatches: int, near: int, far: int) -> list[Cell]:
    """Return the list of a rank with one stage of each direction, or of each arm of the V."""
    a, b = StageCursor(near, microbatches), StageCursor(far, microbatches)
    cells: list[Cell] = []
    pending: deque[Action] = deque()

    def do(stream: StageCursor, kind: str) -> Action:
        action = stream.next(kind)
        assert action is not None
        if kind == INPUT_GRADIENT:
            pending.append(action._replace(kind=WEIGHT_GRADIENT))
        return action

    def add(*steps: tuple[StageCursor, str]) -> None:
        cells.extend((do(*step),) for step in steps)

    def weight() -> None:
        cells.append((pending.popleft(),))

    for _ in range(2 * (ranks - 1 - r)):
        add((a, FORWARD))
    for _ in range(r + 1):
        add((a, FORWARD), (b, FORWARD))
    for _ in range(ranks - 1 - r):
        add((b, INPUT_GRADIENT))
        weight()
        add((b, FORWARD))
    for number in range(microbatches - 2 * ranks + r + 1):
        if number == 0 and r == ranks - 1:
            add((a, FORWARD), (b, BACKWARD))
        else:
            cells.append((do(a, FORWARD), do(b, BACKWARD)))
        cells.append((do(b, FORWARD), do(a, BACKWARD)))
    for _ in range(ranks - 1 - r):
        add((b, BACKWARD))
        cells.append((do(b, FORWARD), do(a, BACKWARD)))
    for number, stream in zip(range(2 * (r + 1)), cycle((b, a)), strict=False):
        add((stream, BACKWARD if number <= r else INPUT_GRADIENT))
    for _ in range(ranks - 1 - r):
        weight()
        add((a, INPUT_GRADIENT))
    while pending:
        weight()
    return cells


def _need(is_met: bool, name: str, value: int, text: str) -> None:
    if not is_met:
        raise InputError(f"pipeline_schedule: {name}={value}: {text}.", field=name)
