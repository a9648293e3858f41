"""The memory of one simulated device: live bytes by category, and the capacity.

Nothing is estimated: an array is counted from the moment it is held until Python frees it. Views
cost nothing; only the array that owns the memory counts. Tensors that neither an op nor a module made, such
as a batch that was just loaded, are counted only if the device has a limit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from simparallel.backend import DRY_TYPES
from simparallel.base.units import format_bytes
from simparallel.errors import DeviceOutOfMemoryError, InputError

# Traces have them by position: new ones come last. Parameters that are stored in slices are "gathered" for their uses.
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, TENSORS, GATHERED = CATEGORIES = (
    "parameters", "gradients", "optimizer state", "activations", "buffers", "tensors", "gathered",
)  # fmt: skip
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str | int, name: str = "device_memory") -> int:
    """Parse a size: a number of bytes, or text such as "64MB" (10⁶) or "64MiB" (2²⁰).

    Args:
        text: the size.
        name: name of the argument, for the error.

    Raises:
        InputError: not a positive size.
    """
    number, unit = str(text).strip(), "B"
    # Longest first: "B" ends all of them.
    for suffix in sorted(_UNITS, key=len, reverse=True):
        if number.upper().endswith(suffix):
            number, unit = number[: -len(suffix)].strip(), suffix
            break
    try:
        size = round(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise InputError(f"{name}={text!r} is not a size; write 64000000, '64MB' or '64MiB'.")
    return size


def owner_of(array: Any) -> Any:
    """Return the array that owns the memory: the array itself unless it is a view."""
    base = array.base
    # Stop at a base of another type: memory of another owner, such as shared memory, belongs to the last array. But an
    # array without data may be a view of an earlier one with data.
    while base is not None and (type(base) is type(array) or type(array) in DRY_TYPES):
        array, base = base, base.base
    return array


class _Held(weakref.ref):
    """A weak reference to a counted array; it calls the account when the array is freed."""

    __slots__ = ("category", "key", "num_keepers", "size_bytes")
    category: str
    num_keepers: int  # see `keep`
    # id of the array, because the reference no longer gives the array once it is freed.
    key: int
    size_bytes: int


class MemoryAccount:
    """The memory account of one device.

    Args:
        limit_bytes: capacity; None for no limit.
        who: the device, for messages.

    Attributes:
        live: category -> live bytes.
        total: sum of the live bytes.
        peak: the largest `total` so far.
        at_peak: category -> live bytes at the peak.
        scratch: work arrays of ops, reused from call to call; counted as buffers.
    """

    # The bytes of an array on the device.
    size_of: Callable[[Any], int] = attrgetter("nbytes")

    def __init__(self, limit_bytes: int | None = None, who: str = "device") -> None:
        self.limit_bytes = limit_bytes
        self.who = who
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak = 0
        self.at_peak = dict(self.live)
        self.scratch: dict[Any, Any] = {}
        self._held: dict[int, _Held] = {}

    def make_room(self, size_bytes: int, what: str) -> None:
        """Check before an allocation that `size_bytes` fit; `what` names the allocation in the error.

        Raises:
            DeviceOutOfMemoryError: they do not fit; the error lists the live bytes by category.
        """
        if self.limit_bytes is not None and self.total + size_bytes > self.limit_bytes:
            limit, held = format_bytes(self.limit_bytes), self._held_text()
            if size_bytes > self.limit_bytes:
                why = f"more than the whole {limit} of the device" + (f"; taken: {held}" if held else "")
            else:
                why = f"but {format_bytes(self.total)} of {limit} are taken: {held}"
            raise self._out_of_memory(
                size_bytes,
                self.limit_bytes,
                f"{what} needs {format_bytes(size_bytes)}, {why}. Use a smaller batch or model, checkpoint "
                "activations, or give the devices more memory (device_memory=).",
            )

    def limit_to(self, limit_bytes: int) -> None:
        """Set the capacity.

        Raises:
            DeviceOutOfMemoryError: more is in use already; the limit stays unchanged.
        """
        if self.total > limit_bytes:
            raise self._out_of_memory(
                self.total,
                limit_bytes,
                f"a limit of {format_bytes(limit_bytes)} is less than the {format_bytes(self.total)} already "
                f"allocated: {self._held_text()}. Set the limit before the model is created, or raise it.",
            )
        self.limit_bytes = limit_bytes

    def hold(
        self,
        array: Any,
        category: str,
        *,
        move: bool = False,
        what: str = "",
        is_copied: bool = False,
        is_limited: bool = True,
    ) -> None:
        """Count the memory behind `array` until it is freed.

        Memory that is counted already stays in its category, unless `move` is set. With `is_copied`, the real device
        would have a copy of the array, so a view counts with its own elements only. With `is_limited=False` the array
        is counted even beyond the limit: a caller that has worked with it cannot give it back.

        Raises:
            DeviceOutOfMemoryError: the array does not fit, and is not counted; `what` names it in the error.
        """
        # All views of an owner share one entry.
        owner = array if array.base is None else owner_of(array)
        # An array without data may be a view of the whole array that it stands for.
        is_whole = type(array) in DRY_TYPES and array.nbytes == owner.nbytes
        if not is_copied or is_whole or id(owner) in self._held:
            array = owner
        key = id(array)
        held = self._held.get(key)
        if held is not None:
            # The total does not change, so neither does the peak.
            if move and held.category != category:
                self.live[held.category] -= held.size_bytes
                self.live[category] += held.size_bytes
                held.category = category
            return
        if self.limit_bytes is not None and is_limited:
            self.make_room(array.nbytes, what or f"an array of {category}")
        held = _Held(array, self._release)
        held.key, held.size_bytes, held.category, held.num_keepers = key, self.size_of(array), category, 0
        self._held[key] = held
        self.live[category] += held.size_bytes
        self.total += held.size_bytes
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak.update(self.live)

    def hold_scratch(self, array: Any) -> None:
        """Count a work array that this package's kernels use from call to call."""
        self.hold(array, BUFFERS)

    def keep(self, owner: Any, arrays: Iterable[Any]) -> None:
        """Note that `owner` needs these arrays; here they count as long as they exist."""

    def follow(self, before: Any, after: Any) -> None:
        """Count `after`, which replaces `before`, in the same category; if `before` is not counted, do nothing."""
        held = self._held.get(id(owner_of(before)))
        if held is not None:
            self.hold(after, held.category, move=True)

    def _release(self, held: _Held) -> None:
        # Any thread may free an array, and no lock is needed: each number changes by one `-=` on integers, and CPython
        # does not switch threads between the read and the write.
        del self._held[held.key]
        self.live[held.category] -= held.size_bytes
        self.total -= held.size_bytes

    def summary(self) -> dict[str, Any]:
        """Return plain numbers: `{"peak_bytes": …, "at_peak": {category: bytes}, "live": {…}, "limit_bytes": …}`."""
        return {
            "peak_bytes": self.peak,
            "at_peak": dict(self.at_peak),
            "live": dict(self.live),
            "limit_bytes": self.limit_bytes,
        }

    def _held_text(self) -> str:
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in self.live.items() if size)

    def _out_of_memory(self, needed_bytes: int, limit_bytes: int, text: str) -> DeviceOutOfMemoryError:
        facts = {"needed_bytes": needed_bytes, "limit_bytes": limit_bytes, "live": dict(self.live), "layer": ""}
        return DeviceOutOfMemoryError(f"{self.who}: {text}", **facts)


class NullAccount(MemoryAccount):
    """The account outside of a run: it has no limit, and counts nothing."""

    def hold(self, array: Any, category: str, **settings: Any) -> None:
        pass
