"""Ranks that succeed or fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simparallel.comm import Group, current
from simparallel.errors import CheckpointError, CommError


class RankBarrier:
    """The ranks of a group during a job in which any of them may fail.

    Each rank works in `attempt()`, which records an error instead of raising it; `agree` then exchanges the errors
    and raises on all ranks if there was one. So no rank waits for a rank that has given up.

    Attributes:
        rank: this rank's position in the group.
        size: number of ranks.
    """

    def __init__(self, group: Group | None) -> None:
        self.communicator = current()
        self.group = group or self.communicator.world
        if self.group.rank is None:
            raise CheckpointError(
                f"rank {self.communicator.rank} is not in the group of ranks {self.group.ranks}; only these ranks "
                "may save or restore its checkpoints."
            )
        self.rank: int = self.group.rank
        self.size: int = self.group.size
        self._error: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Record an error instead of raising it; the rest of the block is skipped."""
        try:
            yield
        except CommError:
            # Another rank died: every rank gets this error by itself, and `agree` would wait for the dead one.
            raise
        except Exception as error:
            self._error = self._error or error

    def agree(self, value: Any = None) -> list[Any]:
        """Gather every rank's value. Collective: yes.

        Raises:
            CheckpointError: a rank has failed; the same text on all ranks.
        """
        # Cleared first, so that a failure is reported by one agreement only.
        error, self._error = self._error, None
        failure = None
        if error is not None:
            prefix = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            value, failure = None, (f"{prefix}{error}", getattr(error, "path", None))
        gathered = self.communicator.all_gather_object((failure, value), self.group)
        ranks = [rank for rank, (failed, _) in zip(self.group.ranks, gathered, strict=True) if failed]
        if not ranks:
            return [given for _, given in gathered]
        # Every rank reports the error of the first failed rank, so the text is the same.
        text, path = next(failed for failed, _ in gathered if failed)
        if self.size > 1:
            text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        raise CheckpointError(text, path=path, ranks=tuple(ranks)) from error
