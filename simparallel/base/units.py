"""Numbers as text with SI prefixes, factors of 1000: "12.3 µs", "4.19 MB", "1.5 G"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_SHORT = (bool, int, float, str, tuple, type(None))
_PREFIXES = {-12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}


def si_scale(values: Iterable[float], *, smallest: int = -12, largest: int = 18, digits: int = 3) -> tuple[float, str]:
    """Return one SI prefix for all of `values`, chosen by the largest magnitude.

    Args:
        values: numbers in the base unit; values that are not finite are ignored.
        smallest: lowest power of ten allowed; 0 for counts.
        largest: highest power of ten allowed; 0 for seconds, since kiloseconds are uncommon.
        digits: significant digits that will be shown. A value that would be rounded up to
            1000 takes the next prefix.

    Returns:
        (factor, prefix): print `value / factor` in front of prefix and unit.
    """
    peak = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if peak == 0:
        return 1.0, ""
    # "%e" rounds before it determines the exponent, so 999.9996 counts as 1e+03.
    exponent = int(f"{peak:.{digits - 1}e}".partition("e")[2])
    power = min(max(exponent // 3 * 3, smallest), largest)
    return 10.0**power, _PREFIXES[power]


def _format(value: float, unit: str, smallest: int, largest: int) -> str:
    factor, prefix = si_scale([value], smallest=smallest, largest=largest)
    scaled = value / factor
    # "%.3g" switches to exponents at 1000, which values reach only beyond the last prefix.
    number = f"{scaled:.3g}" if abs(scaled) < 999.5 or not math.isfinite(scaled) else f"{scaled:.0f}"
    return f"{number} {prefix}{unit}".rstrip()


def format_seconds(seconds: float) -> str:
    """Format a time [s] with three significant digits: `format_seconds(1.23e-5) == "12.3 µs"`."""
    return _format(seconds, "s", smallest=-12, largest=0)


def format_bytes(size_bytes: float) -> str:
    """Format a size [byte] with three significant digits: `format_bytes(4_194_304) == "4.19 MB"`.

    Prefixes are SI (1 kB = 1000 B), like those of bandwidths.
    """
    return _format(size_bytes, "B", smallest=0, largest=18)


def format_count(count: float, unit: str = "") -> str:
    """Format a count with three significant digits: `format_count(1.5e9, "flop") == "1.5 Gflop"`."""
    return _format(count, unit, smallest=0, largest=18)


def format_numbers(ranks: Sequence[int]) -> str:
    """Abbreviate ascending numbers, such as ranks: "3", "0, 4", "0–7", "0, 2, … 6"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    return ", ".join(map(str, ranks))


def format_object(thing: object) -> str:
    """Format an object by its public attributes: "Shuffled(buffer_size=8)". Long values are shown by their type.

    Classes use it as their `__repr__`.
    """
    shown = []
    for name, value in vars(thing).items():
        if not name.startswith("_"):
            text = repr(value) if isinstance(value, _SHORT) and len(repr(value)) <= 60 else type(value).__name__
            shown.append(f"{name}={text}")
    return f"{type(thing).__name__}({', '.join(shown)})"


def format_type_of(value: object) -> str:
    """Return the type of a value with its article: "a list", "an int", "an ndarray"."""
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiouAEIO" or kind.startswith("nd") else f"a {kind}"


def format_number_of(count: int, thing: str) -> str:
    """Return a number of things with singular or plural: "1 device", "4 devices"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks with singular or plural: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
