"""The numbers of a hardware description: the ranges they must lie in, and the source of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from simparallel.errors import ClusterError

# How a number is known. A source is one of these words, or "word: text".
KINDS = ("data sheet", "measured", "assumed")
# Wide enough for any hardware, and narrow enough that no price overflows. The unit at the end of a name has a range.
_RANGES = {"_per_s": (1.0, 1e24), "_s": (0.0, 1e6), "_bytes": (1, 10**18), "oversubscription": (1.0, 1e6)}


def check_number(
    owner: str, name: str, value: Any, low: float | None = None, high: float | None = None, key: str = ""
) -> None:
    """Check that a number lies in a range, by default the one of the unit at the end of its name.

    Args:
        owner: the thing that it describes, for the error.
        name: its name, such as "latency_s" or "peak_flops_per_s[2]".
        value: the number.
        low, high: ends of the range.
        key: fact of the error, by default the name.

    Raises:
        ClusterError: it is not a number in the range. Fact: `key`, the name.
    """
    field = name.partition("[")[0]
    if low is None or high is None:
        low, high = next(ends for unit, ends in _RANGES.items() if field.endswith(unit))
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    # A comparison with NaN is false.
    if not is_number or not low <= value <= high:
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:30]}..."
        raise ClusterError(f"{owner}: {name}={shown} must be a number from {low:g} to {high:g}.", key=key or field)


def check_known(owner: str, key: str, value: Any, known: Sequence[str]) -> None:
    """Raise ClusterError unless `value` is one of the known names. Fact: `key`."""
    if value not in known:
        raise ClusterError(f"{owner}: {key}={value!r} must be one of {', '.join(known)}.", key=key)


def check_sources(owner: str, sources: Mapping[str, str], names: Iterable[str]) -> None:
    """Check that `sources` maps some of `names` to one of `KINDS`, or to one of them and a text.

    Raises:
        ClusterError: an unknown name or kind. Fact: `key`.
    """
    names = tuple(names)
    for name, source in sources.items():
        if name not in names or not isinstance(source, str) or source.partition(":")[0] not in KINDS:
            raise ClusterError(
                f"{owner}: sources[{name!r}]={source!r} must map one of {', '.join(names)} to a source that begins "
                f'with one of {", ".join(KINDS)}, such as "data sheet: NVIDIA A100".',
                key="sources",
            )
