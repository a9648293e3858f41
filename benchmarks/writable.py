"""A check before long measurements that their results can be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from simparallel.base.files import write_atomically


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written later, and create its directory.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    # Try it: permissions do not tell everything, such as a read-only or a full disk.
    trial = target.with_name(f".{target.name}.{os.getpid()}.try")
    try:
        write_atomically(trial, b"")
        trial.unlink()
    except OSError as error:
        if error.filename == str(trial):
            error.filename = str(target)
        raise
