"""Jitter: random factors on the times of operations, the same on every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import exp

from simparallel.backend import random_normal, random_uniform
from simparallel.base.checks import is_integer
from simparallel.errors import ClusterError
from simparallel.machine.numbers import check_known, check_number

KINDS = ("lognormal", "uniform")
# Factors drawn at a time.
_BATCH = 256


@dataclass(frozen=True)
class Jitter:
    """A random factor on the time of every operation, a pure function of (seed, rank, number of the operation).

    Args:
        amount: "lognormal": standard deviation of the factor's logarithm, whose median is 1; "uniform": the factor is
            between 1 - amount and 1 + amount. From 0 to 1.
        seed: an integer of 0 or more.
        kind: "lognormal" or "uniform".

    Raises:
        ClusterError: a number out of range or an unknown kind. Fact: `key`, the argument.
    """

    amount: float
    seed: int = 0
    kind: str = "lognormal"

    def __post_init__(self) -> None:
        check_number("jitter", "amount", self.amount, 0.0, 1.0)
        if not is_integer(self.seed) or self.seed < 0:
            raise ClusterError(f"jitter: seed={self.seed!r} must be an integer of 0 or more.", key="seed")
        check_known("jitter", "kind", self.kind, KINDS)

    def factors(self, rank: int, device: int = 0) -> Iterator[float]:
        """Yield the factors of all operations of a device of a rank, in order."""
        stream = f"jitter/{rank}/{device}"
        for start in count(0, _BATCH):
            if self.kind == "uniform":
                yield from (1 + self.amount * (2 * random_uniform(self.seed, stream, start, _BATCH) - 1)).tolist()
            else:
                yield from map(exp, (self.amount * random_normal(self.seed, stream, start, _BATCH)).tolist())
