"""Messages between the launcher and a device: each is its length, and then its bytes.

As `Connection.send_bytes` and `recv_bytes`, but a side that must not wait for ever, because the other process may
be stopped, is called back now and then: `limit_waits`.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection

LONGEST_WAIT_S = 1e6  # eleven days: poll takes no more than twice that, and nothing like math.inf
_HEAD = struct.Struct("!Q")
_TIMEVAL = struct.Struct("ll")


def limit_waits(connection: Connection, limit_s: float) -> None:
    """From now on this end waits no longer than this for the next bytes, or for room for them, before it is idle."""
    limit = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


def _nothing() -> None:
    pass


def send(connection: Connection, data: bytes, idle: Callable[[], None] = _nothing) -> None:
    """Send a message; `idle` is called whenever there was no room for more of it for the limit of `limit_waits`.

    Raises:
        OSError: the other side is gone.
    """
    for part in (_HEAD.pack(len(data)), data):
        rest = memoryview(part)
        while rest:
            try:
                rest = rest[os.write(connection.fileno(), rest) :]
            except BlockingIOError:
                idle()


def receive(connection: Connection, idle: Callable[[], None] = _nothing) -> bytearray:
    """The next message; `idle` is called whenever nothing came for the limit of `limit_waits`.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    (size,) = _HEAD.unpack(_read(connection, _HEAD.size, idle))
    return _read(connection, size, idle)


def _read(connection: Connection, size: int, idle: Callable[[], None]) -> bytearray:
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
