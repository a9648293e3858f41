"""Tensors inside of tuples, lists and dicts, as modules take and return them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any


def change_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Build `value` again with `change(item)` in place of each item, at any depth of tuples, lists and dicts."""
    if isinstance(value, dict):
        # Copy instead of calling the constructor, whose arguments are unknown.
        changed = copy(value)
        for key, item in value.items():
            changed[key] = change_each(item, change)
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change_each(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(change_each(item, change) for item in value)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the items of tuples, lists and dicts, at any depth, in the order of `change_each`."""
    if not isinstance(value, (dict, tuple, list)):
        yield value
        return
    for item in value.values() if isinstance(value, dict) else value:
        yield from leaves(item)
