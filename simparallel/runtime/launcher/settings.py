"""Check the arguments of `launch` and `Cluster` before anything is started."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from simparallel.backend import ARRAYS, check_gpu_library
from simparallel.base.checks import check_choice
from simparallel.base.names import did_you_mean
from simparallel.base.units import format_type_of
from simparallel.clock.memory import parse_bytes
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec
from simparallel.machine.ranktable import RankTable


class Described(TypedDict, total=False):
    """The settings of `Cluster` that describe its hardware, for type checkers."""

    device: str | DeviceSpec | ClusterSpec | None
    link: LinkSpec | None
    nodes: int | Sequence[Sequence[int]]
    node_link: LinkSpec | None
    devices_per_rank: int | None
    dtype: str | None


class ClusterSettings(Described, total=False):
    """The settings of `Cluster`, for type checkers: they find `worldsize=4`."""

    rank_table: RankTable | str | Path | None
    environment: Mapping[str, str] | None
    log_links: str
    log_files: Sequence[str]
    start_timeout_s: float
    transport: str | None
    log_dir: str | Path | None
    device_memory: str | int | None
    timeout_s: float
    algorithm: str
    check: str
    arena_bytes: int | str
    blas_threads: int | None
    record: bool | str
    array: str
    echo: bool | Collection[int]


def arena_size(value: int | str) -> int:
    """Return the size [bytes] of an arena, given as a number or a string such as "1GB"; 0 for the default.

    Raises:
        InputError: not a size.
    """
    if value == 0 and not isinstance(value, str):
        return 0
    return parse_bytes(value, "arena_bytes")


def array(value: str) -> str:
    """Return the library of a rank's arrays.

    Raises:
        InputError: neither "numpy" nor "cupy", or there is no GPU that CuPy can use.
    """
    check_choice("Cluster", "array", value, ARRAYS)
    if value == "cupy":
        check_gpu_library()
    return value


def environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return variables for `os.environ`, checked to be valid on every operating system.

    Raises:
        InputError: not a mapping of names to strings.
    """
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"environment={given!r} is {format_type_of(given)}, expected a dict of names and strings.")
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InputError(f"environment: {name!r} cannot be the name of a variable.")
        # The message must not show the value, which may be a secret.
        if not isinstance(value, str) or "\0" in value:
            raise InputError(f"environment: {name} is {format_type_of(value)}, expected a str without null characters.")
    return dict(given or {})


def folder(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of a folder.

    Raises:
        InputError: not a path, or one with a null character.
    """
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or "\0" in os.fspath(value):
        raise InputError(f"{name}={value!r} is not the path of a folder.")
    return Path(value)


def text(name: str, value: str) -> str:
    """Return a string.

    Raises:
        InputError: not a string.
    """
    if not isinstance(value, str):
        raise InputError(f"{name}={value!r} is {format_type_of(value)}, expected a str.")
    return value


def names(name: str, value: Iterable[str]) -> tuple[str, ...]:
    """Return several strings as a tuple.

    Raises:
        InputError: not an iterable of strings, or a single string.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InputError(f"{name}={value!r} is {format_type_of(value)}, expected a list of strings.")
    return tuple(text(name, one) for one in value)


def arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the function that `launch` calls.

    Raises:
        InputError: `args` is neither a tuple nor a similar iterable, or `kwargs` is not a dict.
    """
    # Strings, dicts and arrays can be iterated, too, but are more likely a single argument without its tuple.
    if isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Iterable) or hasattr(args, "ndim"):
        count = isinstance(args, int) and not isinstance(args, bool)
        way_out = f"for {args!r} devices write world_size={args!r}" if count else "for one argument write args=(x,)"
        raise InputError(
            f"launch: args, the arguments of the function, must be a tuple, not {_short(args)}; {way_out}."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"launch: kwargs must be a dict of arguments by name, not {_short(kwargs)}.")
    return tuple(args), dict(kwargs or {})


def _short(value: object) -> str:
    """Return the repr of a number or a string, and "a TYPE" for other objects."""
    return repr(value) if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def check_function(who: str, function: object) -> None:
    """Refuse an object that cannot be called.

    Raises:
        InputError: not a function.
    """
    if callable(function):
        return
    # The usual mistakes: launch(train()) passes the result, and launch("train.py") a script.
    way_out = "pass it without calling it"
    if isinstance(function, (str, os.PathLike)) and (script := os.fsdecode(function)).endswith(".py"):
        way_out = f"a script is started with: simparallel run -n N {script}"
    raise InputError(f"{who} needs a function, got {type(function).__name__}; {way_out}.")


def check_keywords(function: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Refuse keyword arguments that `function` does not have, and suggest a similar name.

    Raises:
        TypeError: unknown name, as in a Python call.
    """
    known = inspect.signature(function).parameters
    for name in given:
        if name not in known:
            raise TypeError(f"{function.__name__}() has no argument {name!r}.{did_you_mean(name, known)}")
