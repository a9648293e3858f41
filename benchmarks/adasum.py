"""`python -m benchmarks adasum`: the cost of Adasum relative to a sum, and to Horovod's algorithm over MPI.

All contenders are warm and take turns in every round; reported are medians over rounds and of ratios, see `contest`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from benchmarks.collectives import MEMCPY, OURS, SHARED, TURN_S, Contender, checked, contenders_of, format_size
from benchmarks.contest import Result, aligned, measure, tell_bound
from benchmarks.environments import choose_peers
from benchmarks.peers.exchange import ITEM_BYTES
from simparallel.base.argparse_checks import at_least_one
from simparallel.base.units import format_seconds
from simparallel.errors import InputError

SIZES = (1 << 20, 4 << 20, 16 << 20, 32 << 20)  # [byte]
MPI = ("openmpi", "mpich")
SUM, ADASUM = "all_reduce", "adasum"


def main(
    *,
    ranks: Sequence[int] = (4,),
    sizes: Sequence[int] | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 7,
    turn_s: float = TURN_S,
    as_json: bool = False,
) -> dict[int, dict[int, Result]]:
    """Measure, print tables or JSON, return the times by ranks and size [byte], keyed "simparallel adasum" and so on.

    Args:
        ranks: numbers of ranks, one table each; powers of two, as Horovod's algorithm requires.
        sizes: bytes of a float32 vector.
        peers: names from `MPI`; by default those with an environment.
        rounds: turns of each contender.
        turn_s: approximate length of a turn [s].
        as_json: print JSON, and everything else to stderr.

    Raises:
        InputError: a bad number, or a peer without MPI.
        BenchError: a contender failed, or returned a wrong result.
    """
    sizes = list(sizes or SIZES)
    for number in ranks:
        # A power of two has a single bit.
        if number < 2 or number & (number - 1):
            near = 1 << max(1, number.bit_length() - 1) if number > 0 else 2
            use = f"{near} or {2 * near}" if near < number else f"{near}"
            raise InputError(f"-n {number}: Horovod's algorithm needs a power of two; use {use}.")
    at_least_one(rounds=rounds, sizes=min(sizes))
    for name in peers or ():
        if name not in MPI:
            raise InputError(f"peers: {name!r} has no Adasum; choose from {', '.join(MPI)}.")
    names = [peer.name for peer in choose_peers(peers or MPI) if peer.is_ready]
    output = sys.stderr if as_json else sys.stdout
    tell_bound(output)
    found = {}
    for number in ranks:
        with contenders_of(number, names, {}, lambda text: print(text, file=output)) as contenders:
            del contenders[MEMCPY]
            results = found[number] = {size: _measure(size, contenders, rounds, turn_s) for size in sizes}
        if as_json:
            document = {format_size(size): {**result.times_s} for size, result in results.items()}
            print(json.dumps({"ranks": number, "times_s": document}, indent=1))
        else:
            print(table(number, results))
    return found


def _measure(size: int, contenders: dict[str, Contender], rounds: int, turn_s: float) -> Result:
    elements = max(1, size // ITEM_BYTES)
    turns = {
        f"{label} {op}": checked(contender, op, elements)
        for label, contender in contenders.items()
        # The peers' sums are compared by `benchmarks collectives`.
        for op in ((SUM, ADASUM) if label in (OURS, SHARED) else (ADASUM,))
    }
    return measure(format_size(size), turns, rounds=rounds, turn_s=turn_s)


def table(ranks: int, results: dict[int, Result]) -> str:
    """Format a line per size: sum, Adasum and their ratio, for private arrays and in the arena; then the peers."""
    peers = [name.removesuffix(f" {ADASUM}") for name in next(iter(results.values())).times_s]
    peers = [name for name in peers if not name.startswith((OURS, SHARED))]
    head = [f"{ranks} ranks"]
    for label in ("", "in the arena: "):
        head += [f"{label}sum", "Adasum", "/ sum"]
    for peer in peers:
        head += [f"Horovod's, {peer}", "ours / it"]
    lines = [head]
    for size, result in results.items():
        line = [format_size(size)]
        for label in (OURS, SHARED):
            one, other = f"{label} {SUM}", f"{label} {ADASUM}"
            line += [
                *(format_seconds(result.median_s(name)) for name in (one, other)),
                f"{result.ratio(other, one):.2f}",
            ]
        for peer in peers:
            name = f"{peer} {ADASUM}"
            line += [format_seconds(result.median_s(name)), f"{result.ratio(f'{OURS} {ADASUM}', name):.2f}"]
        lines.append(line)
    return aligned(lines)
