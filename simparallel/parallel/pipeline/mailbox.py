"""Mailboxes between the ranks of a pipeline: the number of messages that they must hold to avoid a deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from simparallel.parallel.pipeline.action import FORWARD, Action
from simparallel.parallel.pipeline.timing import PipelineOrder


class StageMessage(NamedTuple):
    """A result on its way: the ranks, and its tag (direction, stage of the sender, micro-batch)."""

    source: int
    target: int
    tag: tuple[str, int, int]


class MessageStep(NamedTuple):
    """A step of a rank: it sends or receives a message."""

    sends: bool
    message: StageMessage


def depth_of(lists: PipelineOrder) -> int:
    """Return the least depth of mailboxes with which all ranks finish.

    A rank receives just before it computes, and sends just after. With depth 0 a sender waits for its receiver.
    """
    rank_of = lists.rank_of
    steps = [list(_steps(lists, rank, rank_of)) for rank in range(len(lists.cells))]
    depth = 0
    while not _ends(steps, depth):
        depth += 1
    return depth


def _steps(lists: PipelineOrder, rank: int, rank_of: dict[int, int]) -> Iterator[MessageStep]:
    """Yield the receives and sends of a rank in order."""
    for cell in lists.cells[rank]:
        for action in cell:
            before = lists.before(action)
            if before is not None and rank_of[before] != rank:
                received = StageMessage(rank_of[before], rank, (_direction(action), before, action.microbatch))
                yield MessageStep(False, received)
        for action in cell:
            after = lists.after(action)
            if after is not None and rank_of[after] != rank:
                sent = StageMessage(rank, rank_of[after], (_direction(action), action.stage, action.microbatch))
                yield MessageStep(True, sent)


def _direction(action: Action) -> str:
    return "forward" if action.kind == FORWARD else "backward"


def _ends(steps: list[list[MessageStep]], depth: int) -> bool:
    """Return whether all ranks finish with mailboxes of this depth."""
    at = [0] * len(steps)
    boxes: dict[tuple[int, int], Counter[tuple[str, int, int]]] = {}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, own in enumerate(steps):
            while at[rank] < len(own):
                sends, message = own[at[rank]]
                box = boxes.setdefault(message[:2], Counter())
                if sends and box.total() < depth:
                    box[message.tag] += 1
                elif sends and _waits_for(steps, at, message):
                    # The box is full, but the receiver waits for just this message.
                    at[message.target] += 1
                elif not sends and box[message.tag] > 0:
                    box[message.tag] -= 1
                else:
                    break
                at[rank] += 1
                is_moving = True
    return all(number == len(own) for number, own in zip(at, steps, strict=True))


def _waits_for(steps: list[list[MessageStep]], at: list[int], message: StageMessage) -> bool:
    """Return whether the next step of the message's target is to receive it."""
    own, number = steps[message.target], at[message.target]
    return number < len(own) and own[number] == MessageStep(False, message)
