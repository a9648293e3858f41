"""The error for a memory limit that no choice meets, in one wording for all solvers."""

from __future__ import annotations

from simparallel.errors import SearchError


def nothing_fits(who: str, least_bytes: int, limit_bytes: int, is_proven: bool = True) -> SearchError:
    """Return the error; `is_proven` is False if a choice may fit, but the solver found none."""
    found = "every choice needs more" if is_proven else f"{who} found no choice that fits"
    least = "the least reachable is" if is_proven else "the least found is"
    return SearchError(
        f"{who}: memory_limit_bytes={limit_bytes}: {found}; {least} {least_bytes} bytes. Raise the limit, or give the "
        "nodes candidates that are cut over more devices.",
        least_bytes=least_bytes,
        limit_bytes=limit_bytes,
    )
