"""Several tensors in one flat array, each cut into chunks of rows: the geometry of a group, without communication.

A tensor of d rows on n ranks has chunks of ceil(d / n) rows; the last ones are shorter or empty, as in `Layout`. A
collective needs equal parts, so on the wire, and there alone, each chunk is padded:

    by rank      rank 0: a's chunk 0, b's chunk 0, …; rank 1: a's chunk 1, …      what collectives exchange
    by tensor    a's chunks 0, 1, …; b's chunks 0, 1, …                           what ops read: a's rows are contiguous
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

from simparallel.backend import Array
from simparallel.layout.layout import chunk_span

Shape = tuple[int, ...]


class FlatRows:
    """The places of some tensors' chunks in flat arrays.

    Args:
        shapes: of the whole tensors, each of at least one dim.
        ranks: number of chunks.

    Attributes:
        size: number of elements of one rank's chunks, padding included.
    """

    def __init__(self, shapes: Sequence[Shape], ranks: int) -> None:
        self.shapes, self.ranks = list(shapes), ranks
        self._widths = [prod(shape[1:]) for shape in shapes]
        # Elements of a padded chunk of each tensor.
        self._chunks = [-(-shape[0] // ranks) * width for shape, width in zip(shapes, self._widths, strict=True)]
        self._starts = [0, *accumulate(self._chunks)]
        self.size = self._starts[-1]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Return the rows of each tensor that a rank has: first, past the last."""
        return [chunk_span(shape[0], self.ranks, rank) for shape in self.shapes]

    @property
    def uneven_ranks(self) -> list[int]:
        """The ranks next to which another one has another number of rows of a tensor."""
        full = [shape[0] // -(-shape[0] // self.ranks) for shape in self.shapes if shape[0] % self.ranks]
        return sorted({rank for count in full for rank in (count - 1, count, count + 1) if 0 <= rank < self.ranks})

    def own_chunks(self, flat: Array, rank: int, by_tensor: bool = False) -> list[Array]:
        """Return the rank's chunk of each tensor, without padding.

        Views of an array by tensor, or of the rank's part of an array by rank.
        """
        found = []
        for i, (first, last) in enumerate(self.spans(rank)):
            start = self.ranks * self._starts[i] + rank * self._chunks[i] if by_tensor else self._starts[i]
            stop = start + (last - first) * self._widths[i]
            found.append(flat[start:stop].reshape(last - first, *self.shapes[i][1:]))
        return found

    def tensors(self, flat: Array) -> list[Array]:
        """Return the whole tensors as views of an array by tensor."""
        return [
            flat[self.ranks * start : self.ranks * start + prod(shape)].reshape(shape)
            for start, shape in zip(self._starts, self.shapes, strict=False)
        ]

    def to_tensors(self, by_rank: Array, by_tensor: Array) -> None:
        """Copy all chunks of an array by rank to one by tensor."""
        rows = by_rank.reshape(self.ranks, self.size)
        for start, chunk in zip(self._starts, self._chunks, strict=False):
            target = by_tensor[self.ranks * start : self.ranks * (start + chunk)]
            target.reshape(self.ranks, chunk)[...] = rows[:, start : start + chunk]

    def put(self, by_rank: Array, i: int, tensor: Array) -> None:
        """Copy tensor number `i` to its places in an array by rank, with zeros as padding."""
        chunk, flat = self._chunks[i], tensor.reshape(-1)
        rows = by_rank.reshape(self.ranks, self.size)[:, self._starts[i] : self._starts[i] + chunk]
        full = flat.size // chunk if chunk else 0
        rows[:full] = flat[: full * chunk].reshape(full, chunk)
        if full < self.ranks:
            rows[full:] = 0
            rows[full : full + 1, : flat.size - full * chunk] = flat[full * chunk :]


@lru_cache(maxsize=4096)
def flat_rows(shapes: tuple[Shape, ...], ranks: int) -> FlatRows:
    """Return the places of these tensors' chunks."""
    return FlatRows(shapes, ranks)
