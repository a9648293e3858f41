"""Read a checkpoint: the manifest first, then only the blocks that are needed.

The manifest is the index, JSON under its own checksum:

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
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, BinaryIO, Self

import numpy as np

from simparallel.base.files import expanded, no_constant, open_file, read_into, read_limited
from simparallel.errors import CheckpointError
from simparallel.layout.boxes import Box, intersection, shape_of, size_of, within
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import DTYPES, box_of, listed, on_disk, raw

MANIFEST = "manifest.json"
FORMAT = {"format": "simparallel checkpoint", "version": 1}
# The largest manifest; parsed, it takes about twenty times as much memory.
MAX_BYTES = 32 << 20
MAX_DIMS = 32
_FRONT = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FILE_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.safetensors")


class CheckpointReader:
    """An open checkpoint that can read any slice of its tensors. Close it, or use it in a `with`.

    Opening reads the manifest and checks the sizes of all files.

    Args:
        path: the directory of the checkpoint.
        rank, world_size: the reading rank; matters only for values that differed between the saving ranks.
        verify: compare the SHA-256 of every block that is read.

    Attributes:
        step: number of the step.
        world_size: number of ranks that saved it.
        extra: the value given to `save` as `extra`.
        digest: equal checkpoints have equal ones.
        stood_in: names whose values differed between the saving ranks, and for which this rank uses another
            rank's, because the number of ranks has changed or it saved none.

    Raises:
        CheckpointError: files are missing, truncated, malformed or of another format; in `read` also a block
            with wrong bytes.

    Collective: no.
    Cost: each block (up to 8 MiB) that the slice touches is read once; without `verify` only
        its rows from the first to the last needed one.

    Example:
        >>> with CheckpointReader(path) as checkpoint:  # doctest: +SKIP
        ...     half = checkpoint.read("model.fc1.weight", (slice(0, 64), slice(None)))
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, world_size: int = 1, verify: bool = True) -> None:
        self.path = expanded(path)
        self.rank, self._own_size, self.verify = rank, world_size, verify
        self.stood_in: list[str] = []
        with on_disk(self.path / MANIFEST):
            self._manifest = from_bytes(read_limited(self.path / MANIFEST, MAX_BYTES, links=False))
        self.digest: str = self._manifest["sha256"]
        self.step, self.world_size = self._manifest["step"], self._manifest["world_size"]
        self.extra = trees.decode(self._manifest["extra"], trees.no_array)
        self._files: dict[str, BinaryIO] = {}
        # Open and check all files now: a missing or truncated one is found before anything is restored from the others.
        with ExitStack() as opened:
            for name, size_bytes in self._manifest["files"].items():
                with on_disk(self.path / name):
                    self._files[name] = opened.enter_context(open_file(self.path / name, links=False))
                    found = os.fstat(self._files[name].fileno()).st_size
                    if found != size_bytes:
                        text = f"it has {found} bytes, the manifest states {size_bytes}; it was truncated or replaced."
                        raise CheckpointError(text)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- tensors -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List the tensors."""
        return list(self._manifest["tensors"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return tuple(self._own("tensors", name)["shape"])

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self._own("tensors", name)["dtype"]]

    def read(self, name: str, slices: Sequence[slice] | None = None) -> np.ndarray:
        """Read a slice of a tensor, independent of how the saving ranks had cut it.

        Args:
            name: as in `names()`.
            slices: a `slice` per dim, as from `Layout.slices`; None for the whole tensor.

        Returns:
            A new array of the slice's shape.

        Raises:
            CheckpointError: no such tensor, a slice outside of it, or a damaged file.
        """
        with on_disk(self.path):
            tensor = self._own("tensors", name)
            wanted = box_of(name, tensor["shape"], slices)
            out = np.empty(shape_of(wanted), DTYPES[tensor["dtype"]])
            for block in tensor["blocks"]:
                held = tuple((low, low + size) for low, size in zip(block["start"], block["shape"], strict=True))
                common = intersection(held, wanted)
                if size_of(common):
                    self._fill(_view(out, common, wanted), common, held, name, block)
        # Files are little-endian on every machine.
        return out.astype(out.dtype.newbyteorder("="), copy=False)

    # --- plain data ----------------------------------------------------------------------------------

    def parts(self) -> list[str]:
        """List the parts: "model", "optimizer", …"""
        return list(self._manifest["parts"])

    def tree(self, part: str) -> Any:
        """Return the JSON data of a part, with references to its tensors.

        Raises:
            CheckpointError: there is no such part.
        """
        return self._own("parts", part)["tree"]

    def state(self, part: str, fetch: Callable[[str], Any] | None = None) -> Any:
        """Return the state dict of a part; `fetch` maps names to tensors, by default to whole ones.

        Raises:
            CheckpointError: there is no such part, or a file is damaged.
        """
        with on_disk(self.path):
            return trees.decode(self.tree(part), fetch or self.read)

    # --- internals -----------------------------------------------------------------------------------

    def _own(self, kind: str, name: str) -> dict[str, Any]:
        """Return the value of this rank. On another number of ranks, or without an own one, it is the first rank's."""
        if name not in self._manifest[kind]:
            there = listed(self._manifest[kind]) or "nothing"
            text = (
                f"{self.path} has no {name!r} among its {kind}, only {there}; leave it out, or use another checkpoint."
            )
            raise CheckpointError(text, path=str(self.path))
        values = self._manifest[kind][name]
        if len(values) == 1:
            return values[0]
        for value in values:
            if self.rank in value["ranks"] and self._own_size == self.world_size:
                return value
        if name not in self.stood_in:
            self.stood_in.append(name)
        # Every rank takes the same one, so replicated values are equal again.
        return min(values, key=lambda value: value["ranks"])

    def _fill(self, target: np.ndarray, common: Box, held: Box, name: str, block: dict[str, Any]) -> None:
        """Copy the box `common` of a block, which holds the box `held`, into `target`."""
        offset = block["offset"]
        # A checksum needs the whole block; without verification read only its needed rows.
        if not self.verify and held:
            offset += (common[0][0] - held[0][0]) * size_of(held[1:]) * target.itemsize
            held = (common[0], *held[1:])
        # Read straight into the result if the needed bytes are contiguous in it.
        in_place = common == held and target.flags.c_contiguous
        data = target if in_place else np.empty(shape_of(held), target.dtype)
        with on_disk(self.path / block["file"]):
            place = f"bytes {offset} … {offset + data.nbytes} of {name}"
            count = read_into(self._files[block["file"]].fileno(), offset, raw(data))
            if count != data.nbytes:
                raise CheckpointError(f"{place}: only {count} could be read; it was truncated.")
            stated = block["sha256"]
            found = hashlib.sha256(raw(data)).hexdigest() if self.verify else stated
            if found != stated:
                raise CheckpointError(f"{place} have sha256 {found:.12}…, but {stated!s:.12}… was written: damaged.")
        if not in_place:
            target[...] = _view(data, common, held)


def _view(array: np.ndarray, box: Box, outer: Box) -> np.ndarray:
    """Return the part `box` of an array that holds `outer`: a view, even of an array without dims."""
    index: Any = (*within(box, outer), ...)
    return array[index]


def to_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the file of a manifest, given what follows its version. Raises CheckpointError if it is too large."""
    rest = json.dumps({**FORMAT, **content}, allow_nan=False).encode()[1:] + b"\n"
    # The checksum is the first entry and covers all bytes after its line, so it can be checked before JSON is parsed.
    data = b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"it would have {len(data)} bytes, the limit is {MAX_BYTES}. Put large data into tensors instead of lists."
        )
    return data


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
        raise CheckpointError(f"it has sha256 {found[:12]}…, but states {stated[:12]}…; it is damaged.")
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
    # At least one rank saved it.
    counts = [data["step"], data["world_size"] - 1, *files.values()]
    _check_integers("step, world_size and the files' sizes", counts)
    # No paths, so nothing outside of the directory is read.
    if not all(map(_FILE_NAME.fullmatch, files)):
        raise ValueError(f"{list(files)!r:.99} are not file names of a checkpoint")
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
        start, sizes, offset, file, _ = (block[key] for key in ("start", "shape", "offset", "file", "sha256"))
        _check_integers(f"the numbers of a block of {name}", [*start, *sizes, offset])
        if any(low + size > whole for low, size, whole in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"{name} of shape {shape} has a block outside of it, {sizes} from {start} on")
        end = offset + prod(sizes) * itemsize
        if end > files[file]:
            raise ValueError(f"{name} needs bytes {offset} … {end} of {file}, which has {files[file]}")
        count += prod(sizes)
    if count != prod(shape):
        raise ValueError(f"{name} of shape {shape} has {prod(shape)} elements, its blocks {count}")
    return count * itemsize
