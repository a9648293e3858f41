"""Messages between two ranks under their public names: for Tensors, NumPy and CuPy arrays."""

from __future__ import annotations

from typing import Any, TypeVar

from simparallel.backend import to_host
from simparallel.collectives.host_copy import array_of, device_of, in_place, wait_for
from simparallel.comm import Work, current
from simparallel.comm.p2p import Message

T = TypeVar("T")


def send(x: Any, dst: int, tag: int = 0) -> None:
    """Send x to rank `dst`; x may be changed once this returns, possibly before the `recv`. Collective: no.

    Args:
        x: array or Tensor, any shape and numeric dtype.
        dst: a global rank, possibly this one.
        tag: an integer of 0 or more; each `recv` with the same tag gets the next such message, in the order sent.

    Cost: x.nbytes [bytes].

    Raises:
        InputError, DTypeError: bad arguments; nothing was sent.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    wait_for(device_of(x))
    current().send(to_host(array_of("send", x)), dst, tag)


def recv(x: T, src: int | None = None, tag: int | None = 0) -> T:
    """Fill x with the next message of this tag from rank `src`. Returns x. Collective: no.

    Args:
        x: array or Tensor with the shape and dtype of the message; written.
        src: a global rank, possibly this one; None for the first rank to send: `irecv(...).source_rank()` returns it.
        tag: tag of the `send`; None for any.

    Raises:
        InputError, DTypeError: bad arguments, or x is read-only; no message was taken.
        CollectiveMismatchError: the message has another shape or dtype; x was not changed.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    return in_place("recv", x, lambda a: current().recv(a, src, tag))


def isend(x: Any, dst: int, tag: int = 0) -> Work:
    """Start a `send` and return its `Work`; x must not change before `wait()`. Collective: no."""
    wait_for(device_of(x))
    return current().isend(to_host(array_of("isend", x)), dst, tag)


def irecv(x: Any, src: int | None = None, tag: int | None = 0) -> Work:
    """Start a `recv` and return its `Work`: `wait()` fills x, `source_rank()` is the sender. Collective: no."""
    return in_place("irecv", x, lambda a: current().irecv(a, src, tag))


def ssend(x: Any, dst: int, tag: int = 0) -> None:
    """Send x, and return once the other side has received it. Collective: no.

    Args, Raises: as `send`; two ranks that do this to each other before they receive raise DeadlockError.
    Cost: x.nbytes [bytes]; the reply is not priced.
    """
    issend(x, dst, tag).wait()


def issend(x: Any, dst: int, tag: int = 0) -> Work:
    """Start an `ssend` and return its `Work`; x must not change before `wait()`. Collective: no."""
    wait_for(device_of(x))
    return current().issend(to_host(array_of("issend", x)), dst, tag)


def sendrecv(x: Any, dst: int, out: T, src: int | None = None, send_tag: int = 0, recv_tag: int | None = 0) -> T:
    """Send x to rank `dst` while receiving `out` from `src`, in either order. Returns out. Collective: no.

    Ranks can pass data round a circle with it. `out` may be x: the old contents of x are sent.

    Args:
        x: array or Tensor, any shape and numeric dtype.
        dst: a global rank, possibly this one.
        out: array or Tensor with the shape and dtype of the received message; written.
        src: a global rank; None for the first rank to send.
        send_tag, recv_tag: as in `send` and `recv`.

    Cost: x.nbytes [bytes], overlapped with the receive.

    Raises:
        InputError, DTypeError: bad arguments; nothing was sent.
        CollectiveMismatchError: the message has another shape or dtype than out, which was not changed.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    return isendrecv(x, dst, out, src, send_tag, recv_tag).wait()


def isendrecv(x: Any, dst: int, out: Any, src: int | None = None, send_tag: int = 0, recv_tag: int | None = 0) -> Work:
    """Start a `sendrecv` and return its `Work`; x must not change before `wait()`. Collective: no."""
    wait_for(device_of(x))
    host = to_host(array_of("sendrecv", x))
    return in_place("sendrecv: out", out, lambda a: current().isendrecv(host, dst, a, src, send_tag, recv_tag))


def probe(src: int | None = None, tag: int | None = None) -> Message:
    """Wait for a message without receiving it. Collective: no.

    Args:
        src: a global rank; None for any.
        tag: tag of the message; None for any.

    Returns:
        `src`, `tag`, `shape`, `dtype` and `size_bytes` of the first message; a `recv` takes it.

    Raises:
        InputError: bad arguments.
        RankFailedError, DeadlineError, DeadlockError: no message can arrive.
    """
    return current().probe(src, tag)


def iprobe(src: int | None = None, tag: int | None = None) -> Message | None:
    """Return the result of `probe` if a message has arrived, else None at once. Collective: no."""
    return current().iprobe(src, tag)
