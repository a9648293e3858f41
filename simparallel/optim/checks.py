"""Checks of settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from simparallel.errors import InputError


def check_number(who: str, name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise InputError unless `value` is a real number with low <= value < below."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not low <= value < below:
        limit = "finite" if below == math.inf else f"below {below:g}"
        raise InputError(f"{who}: {name}={value!r} must be a number of {low:g} or more and {limit}.")
