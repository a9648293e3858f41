"""The manifest: the index of a checkpoint. JSON under its own checksum.

    {"sha256": "…",            of all bytes after this line
    "format": "simparallel checkpoint", "version": 1, "step": 300, "world_size": 2,
    "files": {"rank_0.safetensors": 1864},
    "tensors": {"model.fc1.weight": [{"ranks": null, "dtype": "F32", "shape": [8, 4], "blocks": [
        {"start": [0, 0], "shape": [8, 4], "file": "rank_0.safetensors", "offset": 360, "sha256": "…"}]}]},
    "parts": {"optimizer": [{"ranks": null, "tree": …}]}, "extra": {}}

Data equal on all ranks appear once, with `"ranks": null`; otherwise there is an entry for each
value, with the ranks that held it. The content is not trusted: `from_bytes` checks every number
against the others and against the sizes of the files before any memory is allocated.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from simparallel.base.files import no_constant
from simparallel.errors import CheckpointError
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import DTYPES

MANIFEST = "manifest.json"
FORMAT = {"format": "simparallel checkpoint", "version": 1}
# The largest manifest; parsed, it takes about twenty times as much memory.
MAX_BYTES = 32 << 20
MAX_DIMS = 32
_FRONT = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FILE_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.safetensors")


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the file of a manifest, given what follows its version."""
    rest = json.dumps({**FORMAT, **content}, allow_nan=False).encode()[1:] + b"\n"
    # The checksum is the first entry and covers all bytes after its line, so it can be checked before JSON is parsed.
    return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest


def from_bytes(content: bytes) -> dict[str, Any]:
    """Read and check a manifest.

    Raises:
        CheckpointError: names the broken rule; the caller adds the path.
    """
    front = _FRONT.match(content)
    if front is None:
        raise CheckpointError("it does not begin with a checksum; it is not a manifest of this library.")
    stated, found = front[1].decode(), hashlib.sha256(memoryview(content)[front.end() :]).hexdigest()
    if found != stated:
        raise CheckpointError(
            f"its {len(content)} bytes have sha256 {found[:12]}…, but it states {stated[:12]}…: damaged."
        )
    try:
        data = json.loads(content, parse_constant=no_constant)
        _check(data)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"it is malformed: {type(error).__name__}: {str(error)[:200]}.") from None
    return data


def _check(data: Any) -> None:
    """Check parsed JSON. Raises LookupError, TypeError, ValueError, AttributeError, CheckpointError."""
    found = {key: data[key] for key in FORMAT}
    if found != FORMAT:
        raise CheckpointError(f"it has {str(found):.99}; this library reads {FORMAT}.")
    files, tensors, parts = data["files"], data["tensors"], data["parts"]
    _check_integers("step, world_size and the files' sizes", [data["step"], data["world_size"], *files.values()])
    if not data["world_size"]:
        raise ValueError("no rank saved it")
    for name in files:
        # No paths, so nothing outside of the directory is read.
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is not a file name of a checkpoint")
    size_bytes = sum(_check_copy(name, copy, files) for name, copies in tensors.items() for copy in copies)
    # A small file must not expand into large tensors.
    if size_bytes > sum(files.values()):
        raise ValueError(f"the tensors have {size_bytes} bytes, the files {sum(files.values())}")
    for name, variants in [*tensors.items(), *parts.items()]:
        _check_ranks(name, [variant["ranks"] for variant in variants], data["world_size"])
    # Decoding here also checks the trees' structure and references, before any object is touched.
    for variant in (variant for variants in parts.values() for variant in variants):
        trees.decode(variant["tree"], tensors.__getitem__)
    trees.decode(data["extra"], trees.no_array)


def _check_integers(what: str, values: Iterable[Any]) -> None:
    # isinstance would accept True. NumPy's sizes are below 2**63.
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{what} must be integers of 0 or more")


def _check_ranks(name: str, ranks: Sequence[Any], world_size: int) -> None:
    """Check that a rank has at most one value; None stands for all ranks."""
    if ranks == [None]:
        return
    owners = [rank for some in ranks for rank in some]
    _check_integers(f"the ranks of {name}", owners)
    if not owners or max(owners) >= world_size or len(set(owners)) != len(owners):
        raise ValueError(f"{name} has {len(ranks)} values, but needs one for each of {world_size} ranks")


def _check_copy(name: str, copy: Any, files: Mapping[str, int]) -> int:
    """Check a tensor as held by some of the ranks; return its size [bytes]."""
    shape, itemsize = copy["shape"], DTYPES[copy["dtype"]].itemsize
    _check_integers(f"the sizes of {name}", shape)
    # Zero sizes are left out: NumPy bounds the others even if the tensor is empty.
    if len(shape) > MAX_DIMS or prod(size for size in shape if size) * itemsize >= 2**63:
        raise ValueError(f"{name} has shape {shape}, as no array can have")
    count = 0
    for block in copy["blocks"]:
        start, sizes, offset, file = block["start"], block["shape"], block["offset"], block["file"]
        _check_integers(f"the numbers of a block of {name}", [*start, *sizes, offset])
        if any(low + size > whole for low, size, whole in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"{name} of shape {shape} has a block outside of it, {sizes} from {start} on")
        end = offset + prod(sizes) * itemsize
        if end > files[file]:
            raise ValueError(f"{name} needs bytes {offset} … {end} of {file}, which has {files[file]}")
        if len(block["sha256"]) != 64:
            raise ValueError(f"{name} has a block without a checksum")
        count += prod(sizes)
    if count != prod(shape):
        raise ValueError(f"{name} of shape {shape} has {prod(shape)} elements, its blocks {count}")
    return count * itemsize
