"""Facts of the installed CuPy to compare with, which need no GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed; its names need no GPU")


def own_names(kind: type) -> set[str]:
    """Return the public names of a class."""
    return {name for name in dir(kind) if not name.startswith("_")}
