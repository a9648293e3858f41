"""`python -m benchmarks shard`: the tutorial's network cut over 8 devices, compared with hand-written slicing.

All do the same arithmetic and make the same calls of the same collectives. They differ in the origin of these
calls: the sharding layer derives them from the strategies; by hand they are worked out on paper, once with our ops
and autograd (for the cost of the sharding layer itself) and once in bare NumPy (for the cost of the whole engine).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.contest import Result, table
from simparallel.autograd.tape import Node, Reversible
from simparallel.nn.init import initializer
from simparallel.parallel import AutoParallel

DEVICES = 8
# The turns of each contender in a launch, in alternating order.
TURNS = 4
SIZES = (784, 512, 512, 10)
RATE = 1e-2
OURS, BY_HAND, IN_NUMPY = "by strategies", "by hand", "by hand in NumPy"

Step = Callable[[np.ndarray, np.ndarray], float]


class Network(sp.nn.Module):
    """The network of the tutorial on operator-level parallelism, with its strategies."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight = initializer("normal", SIZES[:2])
        self.fc2_weight = initializer("normal", SIZES[1:3])
        self.fc3_weight = initializer("normal", SIZES[2:])
        # The inner dim is cut by 4: a partial sum over 4 ranks, and a redistribution to the rows of relu1.
        self.matmul1 = sp.ops.MatMul().shard(((2, 4), (4, 1)))
        self.relu1 = sp.ops.ReLU().shard(((4, 1),))
        # The inner dim is cut by 8: all ranks hold addends of the whole product.
        self.matmul2 = sp.ops.MatMul().shard(((1, 8), (8, 1)))
        self.relu2 = sp.ops.ReLU().shard(((8, 1),))
        self.matmul3 = sp.ops.MatMul()

    def forward(self, x: Any) -> Any:
        x = x.reshape(x.shape[0], -1)
        x = self.relu1(self.matmul1(x, self.fc1_weight))
        x = self.relu2(self.matmul2(x, self.fc2_weight))
        return self.matmul3(x, self.fc3_weight)


def by_strategies() -> Step:
    """Return a training step that uses the sharding layer."""
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


class Hand:
    """The common part of the hand-written programs: this rank's groups and slices of the weights."""

    def __init__(self) -> None:
        sp.manual_seed(1)
        net = Network()
        self.rank = r = sp.get_rank()
        # new_group is collective: every rank creates all groups of a kind and keeps its own.
        self.four = [sp.new_group(ranks) for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))][r // 4]
        self.even = [sp.new_group(ranks) for ranks in ((0, 2, 4, 6), (1, 3, 5, 7))][r % 2]
        self.pair = [sp.new_group((i, i + 2)) for i in (0, 1, 4, 5)][(r // 4) * 2 + r % 2]
        self.half = [sp.new_group((i, i + 4)) for i in range(4)][r % 4]
        k, n = SIZES[0] // 4, SIZES[1] // 8
        self.width = n
        self.w1 = net.fc1_weight.data[r % 4 * k :][:k].copy()
        self.w2 = net.fc2_weight.data[r * n :][:n].copy()
        self.w3 = net.fc3_weight.data.copy()

    def columns_of_all(self, x: np.ndarray) -> np.ndarray:
        """Convert rows by 4, on two ranks each, to columns by 8."""
        n = self.width
        parts = np.stack([x[:, m * n : (m + 1) * n].reshape(-1) for m in self.even.ranks])
        return sp.all_to_all(parts, 0, 0, self.even).reshape(4 * len(x), n)

    def rows_of_all(self, x: np.ndarray) -> np.ndarray:
        """Convert back: columns by 8 to rows by 4, on two ranks each."""
        quarter, n = len(x) // 4, self.width
        parts = np.stack([x[m // 2 * quarter :][:quarter].reshape(-1) for m in range(8)])
        parts = sp.all_to_all(parts, 0, 0).reshape(8, quarter, n)
        return parts.transpose(1, 0, 2).reshape(quarter, 8 * n)


class _CommStep(Reversible):
    """A communicating step of the hand-written program, with its backward."""

    needs = (True,)

    def __init__(self, back: Callable[[np.ndarray], np.ndarray]) -> None:
        self.back = back

    def run_backward(self, ctx: Any, dy: np.ndarray) -> tuple[np.ndarray]:
        return (self.back(dy),)


def by_hand() -> Step:
    """Return the same step with our ops and our autograd, all slices and groups written out."""
    hand = Hand()
    r, tensor = hand.rank, sp.Tensor
    weights = [tensor(w, requires_grad=True) for w in (hand.w1, hand.w2, hand.w3)]
    optimizer = sp.optim.SGD(weights, lr=RATE)
    matmul, relu = sp.ops.MatMul(), sp.ops.ReLU()

    def cross(x: Any, y: np.ndarray, back: Callable[[np.ndarray], np.ndarray]) -> Any:
        crossing = _CommStep(back)
        return tensor._result(y, Node(crossing, crossing, (x,)))  # type: ignore[arg-type]

    def step(images: np.ndarray, labels: np.ndarray) -> float:
        batch = len(images)
        eighth, quarter = batch // 8, batch // 4
        # Rows cut by 8 become rows cut by 2 and columns cut by 4.
        x1 = sp.all_to_all(images.reshape(batch, -1)[r * eighth :][:eighth], 1, 0, hand.four)
        h1 = matmul(tensor(x1), weights[0])
        # The columns of x1 are cut by 4, so the product is a partial sum.
        # Outside of the graph: its backward is the identity, since all members have the whole gradient.
        h1.data = sp.all_reduce(h1.data, "sum", hand.four)
        mine = h1.data[r // 2 % 2 * quarter :][:quarter]
        a1 = relu(cross(h1, mine, lambda dy: sp.all_gather(dy, 0, hand.pair)))
        x2 = cross(a1, hand.columns_of_all(a1.data), hand.rows_of_all)
        h2 = matmul(x2, weights[1])
        h2.data = sp.all_reduce(h2.data, "sum")
        a2 = relu(cross(h2, h2.data[r * eighth :][:eighth], lambda dy: sp.all_gather(dy, 0)))
        target = tensor(labels[r * eighth :][:eighth])
        loss = sp.functions.cross_entropy(matmul(a2, weights[2]), target, reduction="sum") / batch
        # Each rank has the loss of its eighth.
        total = sp.all_reduce(np.array(loss.data), "sum")
        optimizer.zero_grad()
        loss.backward()
        # Every rank has the whole third weight, and only the gradient of its part of the batch.
        sp.all_reduce(weights[2].grad, "sum")
        # Two ranks hold each slice of the first weight, for different rows of the batch.
        sp.all_reduce(weights[0].grad, "sum", hand.half)
        optimizer.step()
        return float(total)

    return step


def by_hand_in_numpy() -> Step:
    """Return the same step in bare NumPy and collectives."""
    hand = Hand()
    r, w1, w2, w3 = hand.rank, hand.w1, hand.w2, hand.w3

    def step(images: np.ndarray, labels: np.ndarray) -> float:
        batch = len(images)
        eighth, quarter = batch // 8, batch // 4
        x1 = sp.all_to_all(images.reshape(batch, -1)[r * eighth :][:eighth], 1, 0, hand.four)
        h1 = sp.all_reduce(x1 @ w1, "sum", hand.four)[r // 2 % 2 * quarter :][:quarter]
        x2 = hand.columns_of_all(np.maximum(h1, 0))
        h2 = sp.all_reduce(x2 @ w2, "sum")[r * eighth :][:eighth]
        a2 = np.maximum(h2, 0)
        logits = a2 @ w3
        target = labels[r * eighth :][:eighth]
        # Cross-entropy over this rank's eighth of the batch.
        logits -= logits.max(axis=1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(axis=1, keepdims=True)
        rows = np.arange(eighth)
        loss = np.array((np.log(total[:, 0]) - logits[rows, target]).sum() / batch)
        sp.all_reduce(loss, "sum")

        # Backward, from the gradient of the logits to the weights; the same collectives in reverse.
        p /= total
        p[rows, target] -= 1
        p /= batch
        dw3 = sp.all_reduce(a2.T @ p, "sum")
        dh2 = sp.all_gather((p @ w3.T) * (h2 > 0), 0)
        dw2 = x2.T @ dh2
        da1 = hand.rows_of_all(dh2 @ w2.T)
        dh1 = sp.all_gather(da1 * (h1 > 0), 0, hand.pair)
        dw1 = sp.all_reduce(x1.T @ dh1, "sum", hand.half)
        for w, dw in ((w1, dw1), (w2, dw2), (w3, dw3)):
            dw *= RATE
            w -= dw
        return float(loss)

    return step


def measure(batch: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """Measure on each rank: times per step [s] of all contenders, and the largest difference of their last losses."""
    generator = np.random.Generator(np.random.Philox(0))
    images = generator.standard_normal((batch, 28, 28), dtype=np.float32)
    labels = generator.integers(0, 10, batch)
    # All in one launch, so that they share the placement on cores, and differ in nothing else.
    contenders = {OURS: by_strategies(), BY_HAND: by_hand(), IN_NUMPY: by_hand_in_numpy()}
    losses = dict.fromkeys(contenders, 0.0)
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(TURNS + 1):
        for name in list(contenders)[:: 1 if i % 2 else -1]:
            sp.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                losses[name] = contenders[name](images, labels)
            sp.barrier()
            if i:
                # The first round only warms up.
                times_s[name].append((time.perf_counter() - start) / steps)
    return times_s, max(abs(losses[OURS] - loss) for loss in losses.values())


def main(*, rounds: int = 7, batches: tuple[int, ...] = (32, 256), steps: int = 10, as_json: bool = False) -> None:
    """Measure and print. The sharding layer should cost at most 10 % more than slicing by hand at batch 256.

    Each round is a launch of its own: the placement of devices on cores and memory stays fixed within one.
    """
    results = []
    for batch in batches:
        title = f"MLP {'-'.join(map(str, SIZES))} on {DEVICES} devices, batch {batch}"
        all_times_s: dict[str, list[float]] = {OURS: [], BY_HAND: [], IN_NUMPY: []}
        differences = []
        for _ in range(rounds):
            times_s, difference = sp.launch(measure, (batch, steps), world_size=DEVICES)[0]
            for name, times in times_s.items():
                all_times_s[name] += times
            differences.append(difference)
        results.append(Result(title, all_times_s, {"difference_of_losses": max(differences)}))
    if as_json:
        print(
            json.dumps(
                [{"title": r.title, "times_s": r.times_s, "ratio": r.ratio(OURS, BY_HAND), **r.extra} for r in results]
            )
        )
        return
    print(table(results, OURS))
    worst = max(float(str(result.extra["difference_of_losses"])) for result in results)
    print(f"largest difference of the losses at the end: {worst:.1e}")
