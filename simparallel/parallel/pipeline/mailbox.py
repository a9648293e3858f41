"""Mailboxes between the ranks of a pipeline: the number of messages that they must hold to avoid a deadlock."""

from __future__ import annotations

from itertools import count

from simparallel.clock.solver import solve
from simparallel.clock.task_graph import TaskGraph
from simparallel.errors import DeadlockError
from simparallel.parallel.pipeline.timing import PipelineOrder, ScheduleGraph


def depth_of(order: PipelineOrder) -> int:
    """Return the least depth of mailboxes with which all ranks finish.

    A rank receives just before it computes, and sends just after. With depth 0 a sender waits for its receiver.

    Raises:
        ScheduleError: the ranks deadlock, with mailboxes of any depth.
    """
    graph = ScheduleGraph(order)
    solve(graph)
    # Action -> the messages that it needs, and action -> the message with its result.
    inputs = {
        action: [(task, needed) for task, needed in each if task >= len(graph.each)]
        for action, each in graph.inputs.items()
    }
    output = {needed: task for each in inputs.values() for task, needed in each}
    # For each rank the messages that it receives and sends, in order.
    steps: list[list[tuple[str, int]]] = []
    for cells in order.cells:
        own: list[tuple[str, int]] = []
        for cell in cells:
            own += [("receive", task) for action in cell for task, _ in inputs[action]]
            own += [("send", output[action]) for action in cell if action in output]
        steps.append(own)
    return next(depth for depth in count() if _ends(steps, depth))


def _ends(steps: list[list[tuple[str, int]]], depth: int) -> bool:
    """Return whether all ranks finish with mailboxes of this depth."""
    graph = TaskGraph()
    task_of: dict[tuple[str, int], int] = {}
    rank_of: dict[tuple[str, int], int] = {}
    for rank, own in enumerate(steps):
        last: list[int] = []
        for step in own:
            task_of[step], rank_of[step] = graph.add(0, last), rank
            last = [task_of[step]]
    # (source, target) -> its messages, in the order in which they are sent, and received.
    boxes: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for what, message in task_of:
        box = boxes.setdefault((rank_of["send", message], rank_of["receive", message]), ([], []))
        box[what == "receive"].append(message)
    for sent, received in boxes.values():
        place = {message: number for number, message in enumerate(received)}
        for number, message in enumerate(sent):
            send, receive = task_of["send", message], task_of["receive", message]
            ahead = number - depth
            if place[message] > ahead >= 0:
                # The box has a free place once this message has been received.
                graph.before[send] = [*graph.before[send], task_of["receive", received[ahead]]]
            elif ahead >= 0:
                # The box is full until the receiver waits for just this message.
                graph.before[send] = [*graph.before[send], *graph.before[receive]]
            graph.before[receive] = [*graph.before[receive], send]
    try:
        solve(graph)
    except DeadlockError:
        return False
    return True
