"""Messages between the launcher and a device: the length, then the bytes.

The functions work like `Connection.send_bytes` and `recv_bytes`, except that either side may set a limit
(`limit_waits`) after which an `idle` callback runs. The launcher needs it: a stopped process would never answer.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection

# Eleven days: poll accepts at most about twice that, and not math.inf.
LONGEST_WAIT_S = 1e6
_HEAD = struct.Struct("!Q")
_TIMEVAL = struct.Struct("ll")


def limit_waits(connection: Connection, limit_s: float) -> None:
    """Limit how long this end waits for bytes, or for space to write them, before `idle` is called."""
    # The option belongs to the socket, so a duplicate descriptor can set it and be closed.
    limit = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


def _nothing() -> None:
    pass


def send(connection: Connection, data: bytes, idle: Callable[[], None] = _nothing) -> None:
    """Send a message; call `idle` each time nothing could be written within the limit of `limit_waits`.

    Raises:
        OSError: the other side is gone.
    """
    # Two writes instead of one copy of a large message; each may write less than it was given.
    for part in (_HEAD.pack(len(data)), data):
        rest = memoryview(part)
        while rest:
            try:
                rest = rest[os.write(connection.fileno(), rest) :]
            except BlockingIOError:
                idle()


def receive(connection: Connection, idle: Callable[[], None] = _nothing) -> bytearray:
    """Return the next message; call `idle` each time nothing arrives within the limit of `limit_waits`.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    (size,) = _HEAD.unpack(_read(connection, _HEAD.size, idle))
    return _read(connection, size, idle)


def _read(connection: Connection, size: int, idle: Callable[[], None]) -> bytearray:
    # Read into the final memory: a message may be as large as the user's arguments.
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = os.readv(connection.fileno(), [rest])
        except BlockingIOError:
            idle()
            continue
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return data
