"""A warm pool of ranks for tests: clusters of every size that a test asks for, kept until the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simparallel.runtime.launcher.launch import Cluster, Results, usual_transport


class Ranks:
    """Ranks of one transport, which stay warm between tests.

    The first run of a size starts its ranks; with processes that takes half a second. Later runs take some
    milliseconds. What a function changes in a process lasts until later runs, except in the pytest plugin's ranks.

    Args:
        transport: "shm" (processes) or "inline" (threads, which start anew with each run); None as in `Cluster`.
        settings: of every `Cluster`, such as `timeout_s=` or `device=`.

    Example:
        >>> with sp.testing.Ranks("inline") as world:
        ...     world.run(2, pow, 2, 3)
        [8, 8]
    """

    def __init__(self, transport: str | None = None, **settings: Any) -> None:
        self.transport = transport or usual_transport()
        self._settings = {"timeout_s": 20.0, "echo": False, **settings}
        self._clusters: dict[Any, Cluster] = {}

    def run(self, world_size: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on `world_size` ranks.

        Returns:
            The ranks' return values in order, with `.trace`; see `Cluster.run`, also for the errors.
        """
        __tracebackhide__ = True
        return self.cluster(world_size).run(fn, *args, **kwargs)

    def cluster(self, world_size: int, **settings: Any) -> Cluster:
        """Return the cluster of this size, with these settings in place of the pool's; make it if there is none."""
        key = world_size, repr(sorted(settings.items()))
        if key not in self._clusters:
            made: dict[str, Any] = {"transport": self.transport, **self._settings, **settings}
            self._clusters[key] = Cluster(world_size, **made)
        return self._clusters[key]

    def close(self) -> None:
        """End the ranks. Idempotent."""
        while self._clusters:
            self._clusters.popitem()[1].close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
