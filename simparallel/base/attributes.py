"""Set attributes of objects temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def setting(*things: Any, **values: Any) -> Iterator[None]:
    """Set attributes of these objects inside the block, and restore them afterwards."""
    before = [(thing, name, getattr(thing, name)) for thing in things for name in values]
    try:
        for thing, name, _ in before:
            setattr(thing, name, values[name])
        yield
    finally:
        for thing, name, old in reversed(before):
            setattr(thing, name, old)
