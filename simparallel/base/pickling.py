"""Pickle functions for the processes of a run: cloudpickle, but keep the file names of functions.

From version 3.1.3 on, cloudpickle gives all functions that it pickles by value the file "<dynamic-code>", so that equal
functions give equal bytes. Errors and tracebacks of ranks need the file name.
"""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

_NO_FILE = "<dynamic-code>"


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, values, *more = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if value == _NO_FILE else value for value in values), *more


class Pickler(cloudpickle.Pickler):
    """cloudpickle's Pickler, but it keeps the file names of functions."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any) -> bytes:
    """Pickle a value like `cloudpickle.dumps`, but keep the file names of functions; `pickle.loads` reads it."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
