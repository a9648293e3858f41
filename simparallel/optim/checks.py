"""Checks of settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from simparallel.errors import InputError


def check_number(who: str, name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise InputError unless `value` is a real number with low <= value < below."""
    if type(value) is float and low <= value < below:
        return  # in every step of an optimizer
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not low <= value < below:
        limit = "finite" if below == math.inf else f"below {below:g}"
        raise InputError(f"{who}: {name}={value!r} must be a number of {low:g} or more and {limit}.")


def check_count(who: str, name: str, value: Any, low: int = 0) -> None:
    """Raise InputError unless `value` is an integer of `low` or more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError(f"{who}: {name}={value!r} must be an integer of {low} or more.")


def check_flags(who: str, group: Any, names: Iterable[str]) -> None:
    """Raise InputError unless the settings of these names are True or False."""
    for name in names:
        if not isinstance(group[name], bool):
            raise InputError(f"{who}: {name}={group[name]!r} must be True or False.")
