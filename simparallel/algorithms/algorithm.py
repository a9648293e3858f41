"""What an algorithm is: its name, its number in headers, and a function and a price for each of its collectives.

The price model is Hockney's: a step costs latency + bytes / bandwidth of its largest message, every rank has one
full-duplex port, and steps follow each other. Arithmetic on received data (γ) is not priced. Formulas: Chan, Heimlich,
Purkayastha, van de Geijn 2007, "Collective communication: theory, practice, and experience"; Thakur, Rabenseifner,
Gropp 2005, "Optimization of collective communication operations in MPICH".

"Vector" is the whole buffer: the input of all_reduce and reduce_scatter, the output of all_gather and gather, the list
of scatter, one rank's input of all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import NamedTuple

from simparallel.algorithms.point_to_point import Steps
from simparallel.errors import InputError

DIRECT = "direct"


class Price(NamedTuple):
    """The price of one collective for one rank.

    Attributes:
        steps: number of consecutive steps, each with the latency of a message.
        share: the largest message of each step, summed over the steps, in vectors.
        sent: bytes sent by this rank, in vectors.
    """

    steps: int
    share: float
    sent: float


# (number of ranks p, a rank's number) -> the price for that rank. Numbers count from the root on, cyclically; without a
# root from the first rank.
Formula = Callable[[int, int], Price]
Function = Callable[..., Steps]


class CollectiveAlgorithm:
    """A named algorithm; making one registers it.

    Args:
        name: what `algorithm=` takes.
        number: the unique number that stands for it in the headers of calls, from 0 on without a gap.
        prices: formulas of collectives that have no function here.
    """

    def __init__(self, name: str, number: int, prices: Mapping[str, Formula] | None = None) -> None:
        self.name, self.number = name, number
        self.functions: dict[str, Function] = {}
        self.prices = dict(prices or {})
        assert _NAMES.setdefault(number, name) == name, f"{_NAMES[number]} has the number {number}"
        _BY_NAME[name] = self

    def collective(self, *phases: Formula, op: str = "") -> Callable[[Function], Function]:
        """Register the decorated function as the collective `op`, by default the function's name.

        Args:
            phases: the formulas of its price; those of consecutive phases add up.
        """

        def register(function: Function) -> Function:
            name = op or function.__name__
            self.functions[name], self.prices[name] = function, then(*phases)
            return function

        return register


_BY_NAME: dict[str, CollectiveAlgorithm] = {}
_NAMES: dict[int, str] = {}


def names() -> tuple[str, ...]:
    """Return the names of all algorithms, by their numbers."""
    return tuple(_NAMES[number] for number in sorted(_NAMES))


def number_of(name: str) -> int:
    """Return the number that stands for an algorithm in the headers of calls."""
    return _BY_NAME[name].number


def name_of(number: int) -> str:
    """Return the name of the algorithm that a number stands for."""
    return _NAMES[number]


def offers(algorithm: str, op: str) -> bool:
    """Return whether an algorithm implements a collective."""
    return algorithm == DIRECT or op in _BY_NAME[algorithm].functions


def check_algorithm(who: str, algorithm: str, op: str | None = None) -> None:
    """Refuse an unknown algorithm, and one that does not have this collective.

    Raises:
        InputError: lists the available ones.
    """
    if algorithm not in _BY_NAME:
        raise InputError(f"{who}: algorithm={algorithm!r} is not one of {', '.join(names())}.")
    if op is not None and not offers(algorithm, op):
        having = [name for name in names() if offers(name, op)]
        raise InputError(
            f"{who}: algorithm={algorithm!r} has no {op}; choose from {', '.join(having)}. "
            f"{algorithm} has {', '.join(sorted(_BY_NAME[algorithm].functions))}."
        )


def find(algorithm: str, op: str) -> Function:
    """Return the function by which an algorithm runs a collective."""
    return _BY_NAME[algorithm].functions[op]


def priced(algorithm: str) -> Collection[str]:
    """Return the collectives for which this algorithm has a price; none if there is no such algorithm."""
    return _BY_NAME[algorithm].prices.keys() if algorithm in _BY_NAME else ()


@lru_cache(maxsize=4096)
def price(algorithm: str, op: str, num_ranks: int, number: int) -> Price:
    """Return the price of `op` by `algorithm`, cached; zero for one rank."""
    return _BY_NAME[algorithm].prices[op](num_ranks, number) if num_ranks > 1 else Price(0, 0.0, 0.0)


# --- formulas that several algorithms share ------------------------------------------------------


def then(*phases: Formula) -> Formula:
    """Return the formula of phases that follow each other."""
    if len(phases) == 1:
        return phases[0]

    def total(p: int, number: int) -> Price:
        prices = [phase(p, number) for phase in phases]
        return Price(*(sum(values) for values in zip(*prices, strict=True)))

    return total


def one_round(p: int, number: int) -> Price:
    """Price one round of a ring, or a pairwise exchange: each rank sends one chunk in every step."""
    return Price(p - 1, (p - 1) / p, (p - 1) / p)


def one_by_one_gather(p: int, number: int) -> Price:
    """Price a root that receives one part in each step: its port is the bottleneck."""
    return Price(p - 1, (p - 1) / p, 1 / p if number else 0.0)


def one_by_one_scatter(p: int, number: int) -> Price:
    """Price a root that sends one part in each step."""
    return Price(p - 1, (p - 1) / p, 0.0 if number else (p - 1) / p)


def depth(p: int) -> int:
    """Return ceil(log2 p)."""
    return (p - 1).bit_length()
