"""Follow one data-parallel training step, from `loss.backward()` to the bytes in shared memory.

    python tutorials/one_step.py

Two device processes train a small network, and rank 0 traces its calls. The first steps plan; the shortest one is
shown. A table counts the functions of the package that each phase runs through. Below it are two paths: one to the
function that copies this rank's gradients into shared memory, one to the function that adds the gradients of all ranks.
Each line of a path has the source of the call that leads to the next line. To read the code, open these files in this
order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import simparallel as sp
from simparallel.trace import CallTrace

# The last function of each path, and the line of it that moves or adds the bytes.
ENDS = {
    "the copy into shared memory": ("comm/views.py:show", "own[...] = x"),
    "the sum over the ranks": ("algorithms/reduction.py:reduce_into", "rule.ufunc(parts[0][start:stop]"),
}


def train(num_steps: int = 20) -> CallTrace | None:
    """Train; rank 0 returns the step that called the fewest functions, in which it did not have to wait."""
    sp.manual_seed(0)
    net = sp.nn.Sequential(sp.nn.Linear(64, 1024), sp.nn.ReLU(), sp.nn.Linear(1024, 10))
    ddp = sp.parallel.DistributedDataParallel(net)
    optimizer = sp.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loss_of = sp.functions.cross_entropy
    images = sp.Tensor(np.random.default_rng(sp.get_rank()).normal(size=(32, 64)).astype(np.float32))
    labels = sp.Tensor(np.arange(32) % 10)
    steps = [CallTrace(ENDS) for _ in range(num_steps)]
    for step in steps:
        with step.phase("forward"):
            y = ddp(images)
        with step.phase("loss"):
            loss = loss_of(y, labels)
        with step.phase("zero_grad"):
            optimizer.zero_grad()
        with step.phase("backward"):
            loss.backward()
        with step.phase("optimizer"):
            optimizer.step()
    return min(steps, key=lambda step: step.total()) if sp.get_rank() == 0 else None


def show(step: CallTrace, print: Callable[[str], None] = print) -> None:
    print(step.table())
    for name in step.paths:
        print(f"\nFrom loss.backward() to {name}:")
        print(step.path(name))


if __name__ == "__main__":
    show(sp.launch(train, world_size=2)[0])
