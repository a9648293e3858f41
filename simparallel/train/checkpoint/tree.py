"""State dicts as JSON: nested plain data is kept, each array becomes a reference to a tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import is_array
from simparallel.base.units import format_type_of
from simparallel.errors import CheckpointError
from simparallel.train.checkpoint.arrays import TensorSlice

MAX_DEPTH = 64
Path = tuple[Any, ...]
Fetch = Callable[[str], Any]


def no_array(name: str) -> Any:
    """Refuse references: the `fetch` for data without arrays."""
    raise ValueError("a reference to an array")


def encode(value: Any, arrays: dict[str, Any], path: Path = ()) -> Any:
    """Encode `value` as JSON data. Decoding restores all types, floats and scalars bit for bit.

    Args:
        value: None, bool, int, float, str, NumPy scalar, array, Tensor, `TensorSlice`, and lists, tuples
            and dicts of them.
        arrays: receives every array, under the name by which the JSON data refers to it.
        path: of `value` in the state.

    Raises:
        CheckpointError: any other type, or more than 64 levels.
    """
    if isinstance(value, (Tensor, TensorSlice)) or is_array(value):
        name = ".".join(map(str, path)) or "value"
        while name in arrays:
            # Keeps {"a.b": x} and {"a": {"b": x}} distinct.
            name += "'"
        arrays[name] = value
        return {"$tensor": name}
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"{_dotted(path[:4])}…: more than {MAX_DEPTH} levels; does it contain itself?")
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        # As bytes: JSON's decimal numbers would lose the dtype, and bits of NaN.
        return {"$scalar": [value.dtype.newbyteorder("<").str, value.tobytes().hex()]}
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        # Python writes finite floats with enough digits to restore them exactly; JSON has no NaN and infinity.
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(entry, arrays, (*path, key)) for key, entry in value.items()}
        # JSON has only text keys, and "$" marks our own entries: write other dicts as pairs.
        pairs = [(encode(key, arrays, path), encode(entry, arrays, (*path, key))) for key, entry in value.items()]
        return {"$items": pairs}
    if isinstance(value, (list, tuple)):
        entries = [encode(entry, arrays, (*path, i)) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    raise CheckpointError(
        f"{_dotted(path) or 'the state'} is {format_type_of(value)}; a checkpoint holds numbers, text, arrays "
        "and lists, tuples and dicts of them."
    )


def decode(tree: Any, fetch: Fetch, depth: int = 0) -> Any:
    """Return the value given to `encode`; `fetch` maps names to arrays, `depth` counts the levels above.

    Raises:
        CheckpointError: `encode` does not make such a tree.
    """
    # `encode` allows an array one level deeper. The limit is ours: Python's recursion limit differs between versions.
    if depth > MAX_DEPTH + 1:
        raise CheckpointError(f"a saved state has more than {MAX_DEPTH} levels.")
    if isinstance(tree, list):
        return [decode(entry, fetch, depth + 1) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if not any(key.startswith("$") for key in tree):
        return {key: decode(entry, fetch, depth + 1) for key, entry in tree.items()}
    try:
        # Types that JSON lacks are dicts with one "$" key; `encode` writes other dicts with such keys as "$items".
        ((mark, content),) = tree.items()
        if mark == "$tensor":
            return fetch(str(content))
        if mark == "$float":
            return float(content)
        if mark == "$scalar":
            dtype = np.dtype(content[0])
            return np.frombuffer(bytes.fromhex(content[1]), dtype).astype(dtype.newbyteorder("="))[0]
        if mark == "$tuple":
            return tuple(decode(entry, fetch, depth + 1) for entry in content)
        if mark == "$items":
            return {decode(key, fetch, depth): decode(entry, fetch, depth + 1) for key, entry in content}
        raise ValueError("an unknown mark")
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the saved state is damaged: it has a malformed entry {json.dumps(tree)[:80]!r} ({error}). "
            "Restore another checkpoint."
        ) from None


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
