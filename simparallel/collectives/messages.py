"""Messages between two ranks under their public names: for Tensors, NumPy and CuPy arrays."""

from __future__ import annotations

from typing import Any

from simparallel.backend import to_host
from simparallel.collectives.carry import array_of, device_of, in_place, wait_for
from simparallel.comm import Work, current


def send(x: Any, dst: int, tag: int = 0) -> None:
    """Send x to rank `dst`. It may be changed when this returns, which need not be after `recv`. Collective: no.

    Args:
        x: array or Tensor, any shape and numeric dtype.
        dst: a global rank.
        tag: an integer of 0 or more; a `recv` of the same tag gets it, in the order in which they were sent.

    Cost: x.nbytes [bytes].

    Raises:
        InputError, DTypeError: bad arguments; nothing was sent.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    wait_for(device_of(x))
    current().send(to_host(array_of("send", x)), dst, tag)


def recv(x: Any, src: int, tag: int = 0) -> Any:
    """Fill x with the next message of this tag from rank `src`. Returns x. Collective: no.

    Args:
        x: array or Tensor of the shape and dtype that were sent; written.
        src: a global rank.
        tag: that of `send`.

    Raises:
        InputError, DTypeError: bad arguments, or x is read-only; no message was taken.
        CollectiveMismatchError: what was sent has another shape or dtype; x was not changed.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    return in_place("recv", x, lambda a: current().recv(a, src, tag))


def isend(x: Any, dst: int, tag: int = 0) -> Work:
    """`send` as a `Work`; x must not change before `wait()`. Collective: no."""
    wait_for(device_of(x))
    return current().isend(to_host(array_of("isend", x)), dst, tag)


def irecv(x: Any, src: int, tag: int = 0) -> Any:
    """`recv` as a `Work`; x is filled when `wait()` returns. Collective: no."""
    return in_place("irecv", x, lambda a: current().irecv(a, src, tag))
