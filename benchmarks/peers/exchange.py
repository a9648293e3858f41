"""One call of a collective: its buffers, its expected result, and its time.

All contenders are measured by this code: the ranks of simparallel import it, the peers' scripts
find it in their own folder. It needs only NumPy.

The size of an exchange is the size of its longest vector: a rank's array in all_reduce, broadcast,
reduce, reduce_scatter and all_to_all; the ranks' arrays together in all_gather, gather and
scatter. Rank 0 is the root.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

# These work in place, on vectors that are not cut.
WHOLE = ("all_reduce", "broadcast", "reduce")
# Adasum is measured by its own command, `benchmarks adasum`.
IN_PLACE = (*WHOLE, "adasum")
CUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
OPS = (*WHOLE, *CUT, "barrier")
ITEM_BYTES = 4  # float32

Call = Callable[[], Any]


def num_elements(op: str, size_bytes: int, ranks: int) -> int:
    """Return the elements of the longest vector: if it is cut, a multiple of the ranks, at least one for each."""
    if op == "barrier":
        return 0
    count = max(1, size_bytes // ITEM_BYTES)
    return count if op in WHOLE else max(1, count // ranks) * ranks


class Exchange:
    """One rank's part of a collective of float32.

    Attributes:
        sent: this rank's input, or None; in place, also its output.
        received: array for this rank's output, or None.
        chunk: this rank's part of a vector that is cut.
    """

    def __init__(self, op: str, rank: int, ranks: int, elements: int, empty: Callable[[int], np.ndarray]) -> None:
        self.op, self.rank, self.ranks, self.elements = op, rank, ranks, elements
        part = elements // ranks
        self.chunk = slice(part * rank, part * (rank + 1))
        at_root = rank == 0
        # Ops that are not listed send the whole vector.
        sent = {"all_gather": part, "gather": part, "scatter": elements if at_root else 0}
        received = {
            "all_gather": elements,
            "reduce_scatter": part,
            "all_to_all": elements,
            "gather": elements if at_root else 0,
            "scatter": part,
        }
        self.sent = _room(sent.get(op, elements), empty)
        # Arrays are made here, before any timing.
        self.received = self.sent if op in IN_PLACE else _room(received.get(op, 0), empty)

    def fill(self) -> None:
        """Fill the input with contents that let `is_right` identify each rank's part."""
        if self.sent is not None:
            self.sent[...] = _pattern(self.rank, self.sent.size)

    def clear(self) -> None:
        """Reset the arrays: zeros can be summed any number of times without overflow or denormal numbers."""
        for array in (self.sent, self.received):
            if array is not None:
                # Adasum treats zeros as a special case, but keeps equal vectors unchanged, so use ones.
                array[...] = self.op == "adasum"

    def is_right(self, result: Any) -> bool:
        """Return whether `result` is this rank's result of one call, after `fill` on every rank."""
        wanted = self._wanted()
        if wanted is not None and self.op == "adasum":
            # Adasum divides, so its results are rounded.
            return bool(np.allclose(result, wanted, rtol=1e-4, atol=1e-4))
        return wanted is None or np.array_equal(np.concatenate(np.atleast_2d(result)), wanted)

    def _wanted(self) -> np.ndarray | None:
        op, n, everyone = self.op, self.elements, range(self.ranks)
        if op == "barrier" or (self.rank and op in ("reduce", "gather")):
            return None
        if op in ("all_reduce", "reduce", "reduce_scatter"):
            total = sum(_pattern(r, n) for r in everyone)
            return np.asarray(total)[self.chunk if op == "reduce_scatter" else slice(None)]
        if op == "adasum":
            return _adasum([_pattern(r, n).astype(np.float64) for r in everyone])
        if op == "broadcast":
            return _pattern(0, n)
        if op == "scatter":
            return _pattern(0, n)[self.chunk]
        if op == "all_to_all":
            return np.concatenate([_pattern(r, n)[self.chunk] for r in everyone])
        return np.concatenate([_pattern(r, n // self.ranks) for r in everyone])


def _adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Combine vectors by Adasum's tree; their number is a power of two, and none is 0."""
    while len(vectors) > 1:
        vectors = [
            (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _room(size: int, empty: Callable[[int], np.ndarray]) -> np.ndarray | None:
    return empty(size) if size else None


def _pattern(rank: int, size: int) -> np.ndarray:
    # Small integers: sums are exact, so results are compared for equality.
    return (rank + np.arange(size) % 5).astype(np.float32)


def images(batch_size: int, *shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random images and labels of 10 classes: float32 (batch_size, *shape), int64 (batch_size,)."""
    generator = np.random.Generator(np.random.Philox(seed))
    pixels = generator.standard_normal((batch_size, *shape), dtype=np.float32)
    return pixels, generator.integers(0, 10, batch_size)


def private(size: int) -> np.ndarray:
    """Return an ordinary array."""
    return np.empty(size, np.float32)


def turn(exchange: Exchange, call: Call, barrier: Call, count: int, check: bool) -> tuple[float, bool]:
    """Run one rank's turn: (seconds of `count` calls, whether the checked call was right)."""
    right = True
    if check:
        exchange.fill()
        right = exchange.is_right(call())
    exchange.clear()
    return timed(call, barrier, count), right


def timed(call: Call, barrier: Call, count: int) -> float:
    """Return the seconds that `count` calls take on this rank.

    A few untimed calls before the barrier warm the caches and wake sleeping threads.
    """
    for _ in range(min(50, max(2, count // 5))):
        call()
    # All ranks start the clock together.
    barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start
