"""Checks of settings: one wording for the whole package."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from simparallel.errors import InputError, SimParallelError, StateDictError


def is_integer(value: Any) -> bool:
    """Return whether `value` is an integer of Python or NumPy; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_integer(
    who: str, name: str, value: Any, low: int = 0, error: type[SimParallelError] = InputError, *, high: float = math.inf
) -> int:
    """Return `value` as an int. Raise `error` unless it is an integer of `low` to `high`. Fact: `field`."""
    if not is_integer(value) or not low <= value <= high:
        bounds = f"of {low} or more" if high == math.inf else f"in {low} … {high}"
        raise error(f"{who}: {name}={value!r} must be an integer {bounds}.", field=name)
    return int(value)


def check_count(who: str, name: str, value: Any) -> int:
    """Return `value` as an int. Raise InputError unless it is an integer of 1 or more."""
    return check_integer(who, name, value, 1)


def check_number(
    who: str, name: str, value: Any, low: float = 0.0, below: float = math.inf, *, above: float = -math.inf,
    high: float = math.inf,
) -> float:  # fmt: skip
    """Return `value` as a float. Raise InputError unless it is a real number in [low, below) and (above, high]."""
    # The fast path: optimizers check in every step.
    if type(value) is float and low <= value < below and above < value <= high:
        return value
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not (low <= value < below and above < value <= high):
        most = f"a number below {below:g}" if below < math.inf else f"a number of at most {high:g}"
        least = f" and above {above:g}" if above > -math.inf else f" and at least {low:g}" if low > -math.inf else ""
        kind = f"{'a finite number' if below == high == math.inf else most}{least}"
        hint = "" if is_number or not hasattr(value, "item") else "; use item()"
        raise InputError(f"{who}: {name}={value!r} must be {kind}{hint}.")
    return float(value)


def check_state(who: str, state: Collection[str], names: Collection[str]) -> None:
    """Raise StateDictError unless a saved state has exactly these names."""
    if set(state) != set(names):
        has, wanted = (", ".join(map(repr, sorted(each))) or "nothing" for each in (state, names))
        raise StateDictError(f"{who}: the state has {has}, expected {wanted}; give what {who}.state_dict() returned.")


def check_seconds(who: str, name: str, value: Any) -> float:
    """Return a time limit [s] as a float. Raise InputError unless it is a number above 0; `math.inf` is one."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or not value > 0:
        raise InputError(f"{who}: {name}={value!r} must be more than 0: a number of seconds, or math.inf for no limit.")
    # No float holds an integer of hundreds of digits.
    return math.inf if isinstance(value, int) and value > sys.float_info.max else float(value)


def check_choice(who: str, name: str, value: Any, known: Collection[str]) -> None:
    """Raise InputError unless `value` is one of the known names."""
    if value not in known:
        raise InputError(f"{who}: {name}={value!r} is not one of {', '.join(known)}.", field=name)


def check_flags(who: str, group: Any, names: Iterable[str]) -> None:
    """Raise InputError unless all settings of these names are True or False."""
    for name in names:
        if not isinstance(group[name], bool):
            raise InputError(f"{who}: {name}={group[name]!r} must be True or False.")
