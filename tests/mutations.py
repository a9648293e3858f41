"""Mutated files: valid ones with some bytes replaced, left out, repeated, or put in."""

from __future__ import annotations

import random

ODD = [
    '"', "{", "}", "[", "]", ",", ":", "\n", "\\", "*", "-", "0", "9" * 40, "null", "true", "//", "\ufeff", "\ud7ff",
    "1e999", "NaN", "\0", '"\\ud800"', "[" * 2000, "9" * 5000, "x" * 150_000,
]  # fmt: skip


def mutated(content: bytes, rng: random.Random, count: int) -> bytes:
    """Return the content with `count` changes."""
    data = bytearray(content)
    for _ in range(count):
        at, length = rng.randrange(len(data) + 1), rng.choice((0, 1, 3, 40))
        piece = rng.choice((rng.choice(ODD).encode(), bytes([rng.randrange(256)]), bytes(data[at : at + 60]), b""))
        data[at : at + length] = piece
    return bytes(data)
