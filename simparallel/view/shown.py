"""Where figures go that a rank shows: it has no screen, so the launcher gets them."""

from __future__ import annotations

from collections.abc import Callable

BACKEND = "module://simparallel.view.rank_backend"
deliver: Callable[[bytes], None] | None = None  # takes a figure as a PNG file; None drops it


def backend_for_ranks(named: str | None) -> str:
    """Choose the backend (MPLBACKEND) of a rank: `named` by the user, unless that is a notebook's, or none."""
    return BACKEND if not named or named.startswith("module://") else named
