"""What collectives cost, by algorithm: latency steps and shares of the vector, no units, no hardware.

The model is Hockney's: a step costs latency + bytes / bandwidth of its largest message, every rank
has one full-duplex port, and steps follow each other. Arithmetic on what arrives (γ) is not
priced. Formulas: Chan, Heimlich, Purkayastha, van de Geijn 2007, "Collective communication:
theory, practice, and experience"; Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH". The algorithms themselves are in `comm/algorithms/`.

"Vector" is the whole buffer: the input of all_reduce and reduce_scatter, the output of all_gather
and gather, the list of scatter, what one rank gives to all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple


class Price(NamedTuple):
    """Of one collective, for one rank."""

    steps: int  # one after the other, each with the latency of a message
    share: float  # largest message of each step, summed over the steps, in vectors
    sent: float  # what this rank sends, in vectors


# (p ranks, number of the asking one) -> price. Numbers count from the root on, round the group; from the
# first rank where there is no root.
Formula = Callable[[int, int], Price]


def _then(first: Formula, second: Formula) -> Formula:
    def both(p: int, number: int) -> Price:
        a, b = first(p, number), second(p, number)
        return Price(a.steps + b.steps, a.share + b.share, a.sent + b.sent)

    return both


def _round(p: int, number: int) -> Price:
    """Once round a ring, or pairwise: everyone sends one chunk in every step."""
    return Price(p - 1, (p - 1) / p, (p - 1) / p)


def _gather(p: int, number: int) -> Price:
    return Price(p - 1, (p - 1) / p, 1 / p if number else 0.0)


def _scatter(p: int, number: int) -> Price:
    return Price(p - 1, (p - 1) / p, 0.0 if number else (p - 1) / p)


def _barrier(p: int, number: int) -> Price:
    """Dissemination."""
    return Price(_depth(p), 0.0, 0.0)


def _endless_broadcast(p: int, number: int) -> Price:
    """A chain, pipelined in the limit of many chunks: the latency of the hops, one passage of the vector."""
    return Price(p - 1, 1.0, 1.0 if number < p - 1 else 0.0)


def _endless_reduce(p: int, number: int) -> Price:
    return Price(p - 1, 1.0, 1.0 if number else 0.0)


def _chain_broadcast(p: int, number: int) -> Price:
    """A chain, pipelined in p chunks."""
    return Price(2 * p - 2, (2 * p - 2) / p, 1.0 if number < p - 1 else 0.0)


def _naive_broadcast(p: int, number: int) -> Price:
    return Price(p - 1, p - 1, 0.0 if number else p - 1)


def _naive_reduce(p: int, number: int) -> Price:
    return Price(p - 1, p - 1, 1.0 if number else 0.0)


def _depth(p: int) -> int:
    return (p - 1).bit_length()


def _tree_broadcast(p: int, number: int) -> Price:
    """A rank tells its number plus each power of two larger than it (the mirror image of those it hears)."""
    told = [i for i in range(_depth(p)) if number % 2 ** (i + 1) == 0 and number + 2**i < p]
    return Price(_depth(p), _depth(p), len(told))


def _tree_reduce(p: int, number: int) -> Price:
    return Price(_depth(p), _depth(p), 1.0 if number else 0.0)


def _scan(p: int, number: int) -> Price:
    """In step i, rank r sends what it has to rank r + 2^i (Hillis and Steele 1986)."""
    return Price(_depth(p), _depth(p), sum(number + 2**i < p for i in range(_depth(p))))


def _core(p: int) -> tuple[int, int]:
    """The power of two q of ranks that halve and double, and how many ranks are folded into it."""
    core = 2 ** (p.bit_length() - 1)
    return core, p - core


def _core_all_reduce(p: int, number: int) -> Price:
    core, extra = _core(p)
    share, folds, pairs = 2 * (core - 1) / core, int(extra > 0), number < 2 * extra
    sent = 1.0 if pairs and number % 2 == 0 else share + pairs
    return Price(2 * _depth(core) + 2 * folds, share + 2 * folds, sent)


def _core_exchange(p: int) -> Price:
    """Steps and share of a reduce_scatter or all_gather; the first `extra` of the core have two parts."""
    core, extra = _core(p)
    folds = int(extra > 0)
    parts = sum(2**i + min(2**i, extra) for i in range(_depth(core)))
    return Price(_depth(core) + 2 * folds, (parts + folds * (p + 1)) / p, 0.0)


def _halving(p: int, number: int) -> Price:
    is_folded = number < 2 * _core(p)[1] and number % 2 == 0
    return _core_exchange(p)._replace(sent=1.0 if is_folded else (p - 1) / p)


def _doubling(p: int, number: int) -> Price:
    core, extra = _core(p)
    pairs = number < 2 * extra
    if pairs and number % 2 == 0:
        return _core_exchange(p)._replace(sent=1 / p)
    own = number // 2 if pairs else number - extra
    blocks = [(own >> i << i, (own >> i << i) + 2**i) for i in range(_depth(core))]
    parts = sum(end + min(end, extra) - start - min(start, extra) for start, end in blocks)
    return _core_exchange(p)._replace(sent=parts / p + pairs)


def _adasum_halving(p: int, number: int) -> Price:
    """Halving and doubling, and at level j a sum of a few numbers over 2^(j+1) ranks, of latency only."""
    levels = _depth(p)
    share = 2 * (p - 1) / p
    return Price(2 * levels + levels * (levels + 1) // 2, share, share)


def _adasum_ring(p: int, number: int) -> Price:
    """Of one layer, which is passed on from rank to rank twice."""
    return Price(2 * (p - 1), 2 * (p - 1), 2 * (p - 1) / p)


PRICES: dict[str, dict[str, Formula]] = {
    # It has no messages. It is priced as a ring, what has a root as a chain in the limit of many chunks;
    # Adasum as it is published.
    "direct": {
        "all_reduce": _then(_round, _round), "reduce_scatter": _round, "all_gather": _round, "all_to_all": _round,
        "gather": _gather, "scatter": _scatter, "broadcast": _endless_broadcast, "reduce": _endless_reduce,
        "barrier": _barrier, "new_group": _barrier, "adasum": _adasum_halving, "scan": _scan, "exscan": _scan,
    },
    "naive": {
        "all_reduce": _then(_naive_reduce, _naive_broadcast), "broadcast": _naive_broadcast,
        "reduce": _naive_reduce, "gather": _gather, "scatter": _scatter, "all_to_all": _round,
        "adasum": _then(_naive_reduce, _naive_broadcast),
    },
    "ring": {
        "all_reduce": _then(_round, _round), "reduce_scatter": _round, "all_gather": _round,
        "broadcast": _chain_broadcast, "adasum": _adasum_ring,
    },
    "tree": {
        "all_reduce": _then(_tree_reduce, _tree_broadcast), "broadcast": _tree_broadcast, "reduce": _tree_reduce,
        "adasum": _then(_tree_reduce, _tree_broadcast),
    },
    "halving_doubling": {
        "all_reduce": _core_all_reduce, "reduce_scatter": _halving, "all_gather": _doubling,
        "adasum": _adasum_halving,
    },
}  # fmt: skip


@lru_cache(maxsize=4096)
def price(algorithm: str, op: str, num_ranks: int, number: int) -> Price:
    """The price of `op` by `algorithm`; for one rank it is nothing."""
    return PRICES[algorithm][op](num_ranks, number) if num_ranks > 1 else Price(0, 0.0, 0.0)
