"""Download one file: https only, verified while it streams, complete or not at all.

Called only if a user passes `download=True`.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import OpenerDirector

from simparallel.base.files import FILES
from simparallel.base.system import try_lock
from simparallel.errors import DataError, InputError

CHUNK = 1 << 16
LARGEST_BYTES = 512 << 20
POLL_S = 0.05
# For the connection, and for each wait for data.
TIMEOUT_S = 30.0


def download(
    urls: Sequence[str],
    path: str | os.PathLike[str],
    *,
    md5: str,
    size_bytes: int | None = None,
    deadline_s: float = 3600.0,
    opener: OpenerDirector | None = None,
) -> Path:
    """Download a file to `path`, unless it exists with the right checksum.

    The bytes go to a `.part` file in the same folder, which is renamed after all of it
    is synced to disk and verified. A lock file in the same folder lets one process download
    while others wait; the operating system releases the lock if that process dies.

    Args:
        urls: mirrors, tried in order; https only, also after a redirect.
        path: destination; its folder is created.
        md5: checksum of the file, hexadecimal: the one that its publishers state.
        size_bytes: the exact size, if known.
        deadline_s: limit for the whole call, including the wait for another process.
        opener: opens URLs; replaced in tests.

    Returns:
        `path`.

    Raises:
        InputError: a URL that is not https.
        DataError: no mirror delivered the right file; lists each failure and how to get the file by hand.
    """
    path = Path(path)
    for url in urls:
        if urlsplit(url).scheme != "https" or not urlsplit(url).netloc:
            raise InputError(f"download: {url!r} is not an https URL; other URLs are not allowed.")
    until = time.monotonic() + deadline_s
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _error(path, urls, [f"{path.parent} cannot be created: {error.strerror}"]) from None
    with _lock(path, until, urls):
        # Checked inside the lock: another process may have fetched it while this one waited.
        if path.is_file():
            with path.open("rb") as file:
                if hashlib.file_digest(file, "md5").hexdigest() == md5:
                    return path
        opener = opener or urllib.request.build_opener(HttpsOnly())
        reasons = []
        for url in urls:
            part = path.with_name(path.name + ".part")
            try:
                _stream(opener, url, part, md5, size_bytes, until)
                # `_stream` has synced the bytes; rename the file, then sync its directory.
                os.replace(part, path)
                FILES.sync_directory(path.parent)
                return path
            except (OSError, ValueError, http.client.HTTPException) as error:
                # URLError is an OSError.
                reasons.append(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
            finally:
                # After a failure the next mirror starts anew; after success there is none left.
                part.unlink(missing_ok=True)
    raise _error(path, urls, reasons)


class HttpsOnly(urllib.request.HTTPRedirectHandler):
    """A redirect handler that follows redirects only to https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        # urllib would follow a redirect to http, where anyone on the way could change the file.
        if urlsplit(newurl).scheme != "https":
            raise urllib.error.URLError(f"redirected to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _stream(opener: OpenerDirector, url: str, part: Path, md5: str, size_bytes: int | None, until: float) -> None:
    """Stream one mirror's bytes into `part`, verify and sync them. Raises OSError or ValueError."""
    limit = LARGEST_BYTES if size_bytes is None else size_bytes
    digest, received = hashlib.md5(), 0
    with opener.open(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:
        # Refuse a too large declared length early; the loop below enforces the limit whatever the server declares.
        stated = response.headers.get("Content-Length")
        if stated is not None and stated.isdigit() and int(stated) > limit:
            raise ValueError(f"it has {stated} bytes, at most {limit} were expected")
        while chunk := response.read(CHUNK):
            received += len(chunk)
            if received > limit:
                raise ValueError(f"more than the expected {limit} bytes were received")
            if time.monotonic() > until:
                raise ValueError(f"not finished in time; {received} bytes were received")
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if size_bytes is not None and received != size_bytes:
        raise ValueError(f"{received} bytes were received, {size_bytes} were expected")
    if digest.hexdigest() != md5:
        raise ValueError(f"md5 is {digest.hexdigest()}, expected {md5}: the file is different or damaged")


@contextmanager
def _lock(path: Path, until: float, urls: Sequence[str]) -> Iterator[None]:
    """Hold the lock of a path: one process, and one thread of it, at a time."""
    name = path.with_name(path.name + ".lock")
    try:
        file = name.open("ab")
    except OSError as error:
        raise _error(path, urls, [f"{name} cannot be created: {error.strerror}"]) from None
    with file:
        while True:
            try:
                try_lock(file)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise _error(path, urls, ["another process held its lock until the time limit"]) from None
                # Polls instead of waiting in the lock, so that the deadline holds.
                time.sleep(POLL_S)
        # Closing the file releases the lock. The file must stay: another process could otherwise lock a new one
        # while a waiting process gets the deleted one.
        yield


def _error(path: Path, urls: Sequence[str], reasons: Sequence[str]) -> DataError:
    why = "\n  ".join(reasons)
    return DataError(
        f"{path} could not be downloaded:\n  {why}\nOffline, or behind a proxy? Get it where there is a "
        f"connection, and put it there:\n  curl -fL --create-dirs -o '{path}' '{urls[0]}'",
        path=str(path),
        offset=None,
    )
