"""Mistakes with stages, micro-batches and schedules."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import LABELS, X, Y
from simparallel.errors import DeadlockError, ScheduleError


@wrong(lesson=11, says="result")
def no_weight_fn():
    """A loss is a mean over some labels, but micro-batches are weighed by samples.

    The loss depends on the number of micro-batches.

    Elsewhere: Transformers had this mistake in gradient accumulation (huggingface/transformers#34191).
    """
    labels = np.where(np.arange(24) % 5 < 2, -100, LABELS)  # -100 stands for no label

    def loss_fn(logits, labels):
        return sp.functions.cross_entropy(logits, labels, ignore_index=-100)

    model = sp.nn.Sequential(sp.nn.Linear(4, 5), sp.nn.Linear(5, 3))
    weight_fn = None  # -
    # + weight_fn = lambda labels: float((labels.data != -100).sum())
    pipeline = sp.parallel.Pipeline(model, loss_fn, 4 * sp.get_world_size(), weight_fn=weight_fn)
    return sp.broadcast_object(pipeline.step(X, labels).item(), src=sp.get_world_size() - 1)


@wrong(lesson=11, raises=ScheduleError, says="1B1 waits for 1F1")
def backward_before_forward():
    """A stage runs a backward before its forward.

    A hang, or an error about a missing activation.

    Elsewhere: In a loop of messages that is written by hand, it is a hang.
    """
    actions = ["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B1", "1F1", "1B0"]  # -
    # + actions = ["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]
    schedule = sp.pipeline_schedule("1f1b", 2, 2).with_actions(actions)
    model = sp.nn.Sequential(sp.nn.Linear(4, 5), sp.nn.Linear(5, 1))
    pipeline = sp.parallel.Pipeline(model, sp.functions.mse_loss, 2, schedule=schedule)
    pipeline.step(X, Y)
    return [parameter.grad for parameter in pipeline.parameters()]


@wrong(lesson=11, raises=DeadlockError, says="recv(")
def two_schedules():
    """Two stages follow different schedules.

    A hang: one stage waits for a gradient, the other for an activation.

    Elsewhere: The pipelines of PyTorch and MindSpore take one schedule for all stages. By hand it is a hang.
    """
    value = np.empty_like(X[:6])
    if sp.get_rank() == 0:
        for part in np.split(X, 4):
            sp.send(part, 1)
            sp.recv(value, 1)
    else:
        forwards = 4  # -
        # + forwards = 1
        for _ in range(4 // forwards):
            for _ in range(forwards):
                sp.recv(value, 0)
            for _ in range(forwards):
                sp.send(value, 0)
    return value
