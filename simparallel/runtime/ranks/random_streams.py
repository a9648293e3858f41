"""Python's and NumPy's global random numbers: all ranks start with the same seed, each with a stream of its own."""
# ruff: noqa: NPY002 (NumPy's global state is the point)

from __future__ import annotations

import ctypes
import random
from functools import cache
from typing import Any

import numpy as np

from simparallel.world.process import seed_globals

# NumPy's state: 624 words, and the position among them.
_MT19937_BYTES = 4 * 625


@cache
def _seeded() -> Any:
    """Return NumPy's state after `seed_globals`, cached: it is always the same, and reading it costs 30 µs."""
    return np.random.get_state(legacy=False)


class Draws:
    """Random streams of ranks that are threads: each rank draws from its own, as a process would.

    Cost: 10 µs a turn; 60 µs if the rank drew from `np.random`.
    """

    def __init__(self, world_size: int) -> None:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy exports it at run time
        self._before = random.getstate(), generator, np.random.get_state(legacy=False)
        # `np.random.seed` works only with MT19937.
        if not isinstance(generator, np.random.MT19937):
            generator = np.random.MT19937()
            np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        self._generator = generator
        seed_globals()
        # `_loaded` is NumPy's state when it was last read or set, `_mark` its raw words at that time.
        self._loaded = _seeded()
        self._mark = self._bits()
        self._kept: list[tuple[Any, Any]] = [(random.getstate(), self._loaded)] * world_size

    def leave(self, rank: int) -> None:
        """Save the streams of `rank` before it yields its turn."""
        # Reading NumPy's state costs 30 µs, so first compare the raw words. They miss one case: `np.random.randn`
        # makes two normal numbers and caches one (has_gauss).
        if self._loaded["has_gauss"] or self._bits() != self._mark:
            self._loaded, self._mark = np.random.get_state(legacy=False), self._bits()
        self._kept[rank] = random.getstate(), self._loaded

    def enter(self, rank: int) -> None:
        """Load the streams of `rank` when it gets the turn."""
        python, numpy = self._kept[rank]
        random.setstate(python)
        if numpy is not self._loaded:
            np.random.set_state(numpy)
            self._loaded, self._mark = numpy, self._bits()

    def close(self) -> None:
        """Restore the caller's own streams."""
        python, generator, numpy = self._before
        random.setstate(python)
        np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        np.random.set_state(numpy)

    def _bits(self) -> bytes:
        return ctypes.string_at(self._generator.ctypes.state_address, _MT19937_BYTES)
