"""Names of devices: "sim:1" is the second simulated device of a rank, "cuda:0" its first real GPU.

A rank starts with "sim:0"; "cpu" and "sim" are other names for it. The `Recorder` of the run has the
memory and the clock of a device. This file has the names only, and the device on which each thread
creates new tensors.
"""

from __future__ import annotations

from typing import Any, ClassVar

from simparallel.errors import InputError
from simparallel.rank_local import RankLocal, per_rank

SIM, CUDA = KINDS = ("sim", "cuda")
_ALSO = {"cpu": "sim:0", "sim": "sim:0", "cuda": "cuda:0"}


class Device(str):
    """A device, as a string with its name: `device("sim:1") == "sim:1"`. Equal names give the same object.

    As a context it sets where this thread creates new tensors: `with device("sim:1"): Linear(3, 2)`.

    Args:
        name: "sim:k" or "cuda:k"; "cpu" and "sim" mean "sim:0", "cuda" means "cuda:0", and an integer k
            "sim:k".
        index: k, if `name` is "sim" or "cuda" alone.

    Attributes:
        type: "sim" or "cuda".
        index: its number in this rank, from 0.

    Raises:
        InputError: not the name of a device; or, on entering the context, a real GPU.
    """

    type: str
    # PyTorch's name; it hides the method of str.
    index: int  # type: ignore[assignment]
    _known: ClassVar[dict[Any, Device]] = {}

    def __new__(cls, name: Any = "sim:0", index: int | None = None) -> Device:
        if index is None and type(name) is Device:
            return name
        text = str(name) if index is None else f"{name}:{index}"
        if isinstance(name, int) and not isinstance(name, bool):
            text = f"sim:{name}"
        text = _ALSO.get(text, text)
        kind, _, number = text.partition(":")
        if kind not in KINDS or not (number.isascii() and number.isdigit()):
            raise InputError(
                f"device {text!r}: write 'sim:0', 'sim:1', … for the simulated devices of this rank ('cpu' is "
                "'sim:0'), 'cuda:0' for a real GPU."
            )
        # "sim:01" is "sim:1". Equal names are one object, so devices are compared with `is`.
        text = f"{kind}:{int(number)}"
        made = str.__new__(cls, text)
        made.type, made.index = kind, int(number)
        return cls._known.setdefault(text, made)

    def __reduce__(self) -> tuple[Any, ...]:
        return Device, (str(self),)

    def __repr__(self) -> str:
        return f"device({str(self)!r})"

    def __enter__(self) -> Device:
        if self.type != SIM:
            raise InputError(f"with {self!r}: only simulated devices can be entered; use cupy.cuda.Device.")
        _current.outer.append(_current.device)
        _current.device = self
        return self

    def __exit__(self, *exc: object) -> None:
        _current.device = _current.outer.pop()


FIRST = Device("sim:0")


class _CurrentDevice(RankLocal):
    device = FIRST
    # The devices of the enclosing `with` blocks.
    outer: list[Device] = per_rank(list)


_current = _CurrentDevice()


def current_device() -> Device:
    """Return the device of the innermost `with device(...)`, where this thread creates new tensors; else sim:0."""
    return _current.device


def is_device(value: Any) -> bool:
    """Return whether `value` can only mean a device: an integer, or a text that starts like a device's name.

    Functions such as `Tensor.to` use it to distinguish a device from a dtype.
    """
    if isinstance(value, str):
        return value.partition(":")[0] in (*KINDS, "cpu")
    return isinstance(value, int) and not isinstance(value, bool)
