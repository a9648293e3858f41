"""The stand-in for `cupy.cuda.nccl`: collectives between ranks that are threads or processes of one machine.

A rank's operation ends once all ranks have started theirs; until then its stream is busy, and so are streams that wait
for it.
As with NCCL, the operations of a communicator have to come in the same order on all ranks, and a rank that does not
take part keeps the others waiting until they abort.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from stand_in import strict_cuda

available = True
_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
(NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64) = (
    range(len(_TYPES))
)
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
# As NVIDIA's code: a maximum leaves NaN out.
_UFUNCS = (np.add, np.multiply, np.fmax, np.fmin, np.add)
_PREFIX = "strict-nccl-"
CONNECT_S = 60.0


class NcclError(RuntimeError):
    """An error of the library."""


def get_unique_id() -> bytes:
    """Return the identifier of a new communicator: here the name of a folder."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    return folder.encode().ljust(128, b"\0")


def get_version() -> int:
    return 22501


# Operations between groupStart and groupEnd start together, once their streams have ended earlier operations.
_Begin = Callable[[strict_cuda.Stream], None]
_grouped: list[tuple[_Begin, strict_cuda.Stream]] | None = None


def groupStart() -> None:
    global _grouped
    _grouped = []


def groupEnd() -> None:
    global _grouped
    started, _grouped = _grouped or [], None
    for _, queue in started:
        strict_cuda.catch_up(queue)
    for begin, queue in started:
        begin(queue)


class NcclCommunicator:
    """One rank's end of a communicator. The constructor waits for the other ranks.

    Args:
        ndev: number of ranks.
        commId: from `get_unique_id`.
        rank: this rank.
    """

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        self._size, self._rank = ndev, rank
        self._folder = Path(commId.rstrip(b"\0").decode())
        device = strict_cuda.runtime.deviceGetPCIBusId(strict_cuda.current_device().id)
        self._put("init", rank, device.encode())
        self._number, self._is_aborted = 0, False
        # (source, target) -> number of messages so far: each pair has an order of its own.
        self._messages: dict[tuple[int, int], int] = {}
        until_s = time.monotonic() + CONNECT_S
        while not self._are_there("init", range(ndev)):
            if time.monotonic() > until_s:
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR: a rank did not connect")
            time.sleep(0.001)
        devices = [self._path("init", other).read_bytes() for other in range(ndev)]
        if len(set(devices)) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")
        if rank == 0:
            weakref.finalize(self, rmtree, self._folder, ignore_errors=True)

    # --- files ----------------------------------------------------------------------------------------

    def _path(self, name: str, rank: int) -> Path:
        return self._folder / f"{name}-{rank}"

    def _put(self, name: str, rank: int, data: bytes) -> None:
        path = self._path(name, rank)
        hidden = path.with_suffix(f".{os.getpid()}")
        hidden.write_bytes(data)
        hidden.rename(path)

    def _are_there(self, name: str, ranks: Any) -> bool:
        return all(self._path(name, rank).exists() for rank in ranks)

    # --- operations -----------------------------------------------------------------------------------

    def _start(self, begin: _Begin, stream: int) -> None:
        if self._is_aborted:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: the communicator was aborted")
        queue = strict_cuda.stream_at(stream)
        if _grouped is None:
            strict_cuda.catch_up(queue)
            begin(queue)
        else:
            _grouped.append((begin, queue))

    def _enqueue(self, queue: strict_cuda.Stream, is_ready: Callable[[], bool], end: Callable[[], None]) -> None:
        """Let a stream wait until the others have started, and then end the operation."""

        def finish() -> bool:
            # An aborted operation ends, and leaves its memory as it is.
            if not (self._is_aborted or is_ready()):
                return False
            if not self._is_aborted:
                end()
            return True

        queue.waits_for.append(strict_cuda.Operation(finish))

    def _collective(
        self, sent: np.ndarray, target: np.ndarray | None, compute: Callable[[list[np.ndarray]], Any], stream: int
    ) -> None:
        """Send `sent` to all ranks; once all have sent theirs, write the result to `target`, if there is one."""

        def begin(queue: strict_cuda.Stream) -> None:
            strict_cuda.use(sent, is_written=False, stream=queue)
            if target is not None:
                strict_cuda.use(target, is_written=True, stream=queue)
            self._number += 1
            name, everyone = str(self._number), range(self._size)
            self._put(name, self._rank, sent.tobytes())

            def end() -> None:
                if target is not None:
                    given = [np.frombuffer(self._path(name, rank).read_bytes(), sent.dtype) for rank in everyone]
                    target[...] = compute(given)

            self._enqueue(queue, lambda: self._are_there(name, everyone), end)

        self._start(begin, stream)

    def _reduced(self, given: list[np.ndarray], op: int) -> np.ndarray:
        # NCCL has another order than the ranks.
        total = given[-1].copy()
        for part in given[-2::-1]:
            total = _UFUNCS[op](total, part)
        return (total / self._size).astype(total.dtype) if op == NCCL_AVG else total

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        sent, target = _arrays(datatype, (sendbuf, count), (recvbuf, count))
        self._collective(sent, target, lambda given: self._reduced(given, op), stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        sent, target = _arrays(datatype, (sendbuf, count), (recvbuf, count))
        self._collective(sent, target if root == self._rank else None, lambda given: self._reduced(given, op), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        sent, target = _arrays(datatype, (sendbuff, count), (recvbuff, count))
        self._collective(sent, target, lambda given: given[root], stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        sent, target = _arrays(datatype, (sendbuf, count), (recvbuf, self._size * count))
        self._collective(sent, target, np.concatenate, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        sent, target = _arrays(datatype, (sendbuf, self._size * recvcount), (recvbuf, recvcount))
        own = slice(self._rank * recvcount, (self._rank + 1) * recvcount)
        self._collective(sent, target, lambda given: self._reduced([part[own] for part in given], op), stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        (sent,) = _arrays(datatype, (sendbuf, count))

        def begin(queue: strict_cuda.Stream) -> None:
            strict_cuda.use(sent, is_written=False, stream=queue)
            name = self._message(self._rank, peer)
            self._put(name, self._rank, sent.tobytes())
            # A send ends when its receive has.
            self._enqueue(queue, lambda: peer == self._rank or self._are_there(f"{name}-taken", [peer]), lambda: None)

        self._start(begin, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        (target,) = _arrays(datatype, (recvbuf, count))

        def begin(queue: strict_cuda.Stream) -> None:
            strict_cuda.use(target, is_written=True, stream=queue)
            name = self._message(peer, self._rank) if peer != self._rank else self._last(peer)

            def end() -> None:
                target[...] = np.frombuffer(self._path(name, peer).read_bytes(), target.dtype)
                self._put(f"{name}-taken", self._rank, b"")

            self._enqueue(queue, lambda: self._are_there(name, [peer]), end)

        self._start(begin, stream)

    def _message(self, source: int, target: int) -> str:
        number = self._messages[source, target] = self._messages.get((source, target), 0) + 1
        return f"from-{source}-to-{target}-{number}"

    def _last(self, peer: int) -> str:
        return f"from-{peer}-to-{peer}-{self._messages[peer, peer]}"

    # --- the end --------------------------------------------------------------------------------------

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        """End all operations, also those that wait for other ranks."""
        self._is_aborted = True

    def destroy(self) -> None:
        self._is_aborted = True

    def device_id(self) -> int:
        return strict_cuda.current_device().id

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _arrays(datatype: int, *places: tuple[int, int]) -> list[np.ndarray]:
    dtype = np.dtype(_TYPES[datatype])
    return [strict_cuda.bytes_at(address, count * dtype.itemsize).view(dtype) for address, count in places]
