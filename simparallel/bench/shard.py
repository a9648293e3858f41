"""`simparallel bench shard`: the tutorial's network cut over 8 devices, beside the same slicing written by hand.

Both do the same arithmetic and make the same calls of the same collectives; what differs is who works
them out: the sharding layer from the strategies, or the author of this file on paper.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import simparallel as sp
from simparallel.bench.contest import Result, table
from simparallel.nn.init import initializer
from simparallel.parallel import AutoParallel

DEVICES = 8
SIZES = (784, 512, 512, 10)
RATE = 1e-2
OURS, BY_HAND = "simparallel", "by hand"
GOAL = 1.10

Step = Callable[[np.ndarray, np.ndarray], float]


class Network(sp.nn.Module):
    """The network of the tutorial on operator-level parallelism, with its strategies."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight = initializer("normal", SIZES[:2])
        self.fc2_weight = initializer("normal", SIZES[1:3])
        self.fc3_weight = initializer("normal", SIZES[2:])
        self.matmul1 = sp.ops.MatMul().shard(((2, 4), (4, 1)))
        self.relu1 = sp.ops.ReLU().shard(((4, 1),))
        self.matmul2 = sp.ops.MatMul().shard(((1, 8), (8, 1)))
        self.relu2 = sp.ops.ReLU().shard(((8, 1),))
        self.matmul3 = sp.ops.MatMul()

    def forward(self, x: Any) -> Any:
        x = x.reshape(x.shape[0], -1)
        x = self.relu1(self.matmul1(x, self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return self.matmul3(x, self.fc3_weight)


def by_strategies() -> Step:
    """A training step by the sharding layer."""
    sp.manual_seed(1)
    net = Network()
    optimizer = sp.optim.SGD(net.parameters(), lr=RATE)
    grad_fn = sp.value_and_grad(lambda x, t: sp.functions.cross_entropy(net(x), t), optimizer.parameters)

    def step(x: Any, t: Any) -> Any:
        loss, grads = grad_fn(x, t)
        optimizer(grads)
        return loss

    parallel_step = AutoParallel(step)
    return lambda x, t: float(parallel_step(x, t))


def by_hand() -> Step:
    """The same step in NumPy and collectives: every slice and every group is written down."""
    sp.manual_seed(1)
    net, r = Network(), sp.get_rank()
    fours = [sp.new_group(ranks) for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))][r // 4]
    evens = [sp.new_group(ranks) for ranks in ((0, 2, 4, 6), (1, 3, 5, 7))][r % 2]
    pairs = [sp.new_group((i, i + 2)) for i in (0, 1, 4, 5)][(r // 4) * 2 + r % 2]
    halves = [sp.new_group((i, i + 4)) for i in range(4)][r % 4]
    k, n = SIZES[0] // 4, SIZES[1] // 8
    w1 = net.fc1_weight.data[r % 4 * k :][:k].copy()
    w2 = net.fc2_weight.data[r * n :][:n].copy()
    w3 = net.fc3_weight.data.copy()

    def step(images: np.ndarray, labels: np.ndarray) -> float:
        batch = len(images)
        eighth, quarter = batch // 8, batch // 4
        x1 = sp.all_to_all(images.reshape(batch, -1)[r * eighth :][:eighth], 1, 0, fours)
        h1 = sp.all_reduce(x1 @ w1, "sum", fours)[r // 2 % 2 * quarter :][:quarter]
        a1 = np.maximum(h1, 0)
        parts = np.stack([a1[:, m * n : (m + 1) * n].reshape(-1) for m in evens.ranks])
        x2 = sp.all_to_all(parts, 0, 0, evens).reshape(batch, n)
        h2 = sp.all_reduce(x2 @ w2, "sum")[r * eighth :][:eighth]
        a2 = np.maximum(h2, 0)
        logits = a2 @ w3
        target = labels[r * eighth :][:eighth]
        logits -= logits.max(axis=1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(axis=1, keepdims=True)
        rows = np.arange(eighth)
        loss = np.array((np.log(total[:, 0]) - logits[rows, target]).sum() / batch)
        sp.all_reduce(loss, "sum")

        p /= total
        p[rows, target] -= 1
        p /= batch
        dw3 = sp.all_reduce(a2.T @ p, "sum")
        dh2 = sp.all_gather((p @ w3.T) * (h2 > 0), 0)
        dw2 = x2.T @ dh2
        dx2 = dh2 @ w2.T
        back = np.stack([dx2[m // 2 * quarter :][:quarter].reshape(-1) for m in range(8)])
        back = sp.all_to_all(back, 0, 0).reshape(8, quarter, n)
        da1 = back.transpose(1, 0, 2).reshape(quarter, 8 * n)
        dh1 = sp.all_gather(da1 * (h1 > 0), 0, pairs)
        dw1 = sp.all_reduce(x1.T @ dh1, "sum", halves)
        for w, dw in ((w1, dw1), (w2, dw2), (w3, dw3)):
            dw *= RATE
            w -= dw
        return float(loss)

    return step


def measure(batch: int, rounds: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """On each rank: times per step [s] of both, in turns, and how far their losses are apart at the end."""
    generator = np.random.Generator(np.random.Philox(0))
    images = generator.standard_normal((batch, 28, 28), dtype=np.float32)
    labels = generator.integers(0, 10, batch)
    contenders = {OURS: by_strategies(), BY_HAND: by_hand()}
    losses = dict.fromkeys(contenders, 0.0)
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name in list(contenders)[:: 1 if i % 2 else -1]:
            sp.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                losses[name] = contenders[name](images, labels)
            sp.barrier()
            if i:  # the first round warms up
                times_s[name].append((time.perf_counter() - start) / steps)
    return times_s, abs(losses[OURS] - losses[BY_HAND])


def main(
    *, rounds: int = 9, batches: tuple[int, ...] = (32, 256), steps: int = 10, as_json: bool = False
) -> None:
    """Measure and print. The goal is an overhead of 10 % at most at batch 256."""
    results = []
    for batch in batches:
        times_s, difference = sp.launch(measure, (batch, rounds, steps), world_size=DEVICES)[0]
        title = f"MLP {'-'.join(map(str, SIZES))} on {DEVICES} devices, batch {batch}"
        results.append(Result(title, times_s, {"difference_of_losses": difference}))
    if as_json:
        print(
            json.dumps(
                [
                    {"title": r.title, "times_s": r.times_s, "ratio": r.ratio(OURS, BY_HAND), **r.extra}
                    for r in results
                ]
            )
        )
        return
    print(table(results, OURS))
    worst = max(float(str(result.extra["difference_of_losses"])) for result in results)
    print(f"largest difference of the losses at the end: {worst:.1e}")
