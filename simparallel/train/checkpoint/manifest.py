"""The manifest: the index of a checkpoint. JSON under its own checksum.

    {"sha256": "…",            of all bytes after this line
    "format": "simparallel checkpoint", "version": 1, "step": 300, "world_size": 2,
    "files": {"rank_0.safetensors": 1864},
    "tensors": {"model.fc1.weight": [{"ranks": null, "dtype": "F32", "shape": [8, 4], "blocks": [
        {"start": [0, 0], "shape": [8, 4], "file": "rank_0.safetensors", "offset": 360, "sha256": "…"}]}]},
    "parts": {"optimizer": [{"ranks": null, "tree": …}]}, "extra": {}}

Data equal on all ranks appear once, with `"ranks": null`; otherwise there is an entry for each
value, with the ranks that held it. The content is not trusted: the reader checks every number
against the others and against the sizes of the files before it allocates memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.base.files import no_constant
from simparallel.errors import CheckpointError
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import CODES, DTYPES, Block, Region

FORMAT = "simparallel checkpoint"
VERSION = 1
# The largest manifest; parsed, it takes about twenty times as much memory.
MAX_BYTES = 32 << 20
MAX_DIMS = 32
_FRONT = '{"sha256": "%s",\n'
_FRONT_PATTERN = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_FILE_PATTERN = re.compile(r"rank_(0|[1-9][0-9]{0,8})\.safetensors")
_HASH_PATTERN = re.compile(r"[0-9a-f]{64}")


class Copy(NamedTuple):
    """A tensor as held by some of the ranks."""

    # None stands for all ranks.
    ranks: tuple[int, ...] | None
    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


class Part(NamedTuple):
    """The plain data of a state dict, as held by some of the ranks."""

    ranks: tuple[int, ...] | None
    tree: Any


@dataclass
class Manifest:
    """The parsed index of a checkpoint."""

    step: int
    world_size: int
    # Name of a file -> its size in bytes.
    files: dict[str, int]
    tensors: dict[str, list[Copy]]
    parts: dict[str, list[Part]]
    # A tree without tensors.
    extra: Any = None
    # SHA-256 of the manifest itself, if it was read from a file.
    sha256: str = ""

    def to_bytes(self) -> bytes:
        tensors = {
            name: [
                {
                    "ranks": copy.ranks,
                    "dtype": CODES[copy.dtype],
                    "shape": copy.shape,
                    "blocks": [
                        {**region._asdict(), "file": file, "offset": offset, "sha256": sha256}
                        for region, file, offset, sha256 in copy.blocks
                    ],
                }
                for copy in copies
            ]
            for name, copies in self.tensors.items()
        }
        parts = {name: [part._asdict() for part in variants] for name, variants in self.parts.items()}
        content = {
            "format": FORMAT, "version": VERSION, "step": self.step,
            "world_size": self.world_size, "files": self.files, "tensors": tensors, "parts": parts,
            "extra": self.extra,
        }  # fmt: skip
        # The checksum is the first entry and covers all bytes after its line, so it can be checked before JSON is
        # parsed.
        rest = json.dumps(content, allow_nan=False).encode()[1:] + b"\n"
        return (_FRONT % hashlib.sha256(rest).hexdigest()).encode() + rest


def no_tensor(name: str) -> Any:
    """Raise ValueError: the `fetch` for plain data, which must not refer to tensors."""
    raise ValueError(f"extra refers to the tensor {name!r}")


def from_bytes(content: bytes) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointError: names the broken rule; the caller adds the path.
    """
    front = _FRONT_PATTERN.match(content)
    if front is None:
        raise CheckpointError("it does not begin with a checksum; it is not a manifest of this library.")
    found = hashlib.sha256(memoryview(content)[front.end() :]).hexdigest()
    if found != front[1].decode():
        raise CheckpointError(
            f"its {len(content)} bytes have sha256 {found[:12]}…, but it states {front[1].decode()[:12]}…: damaged."
        )
    try:
        # Python's parser lets the last of several equal keys win, so another reader could see other data; refuse them.
        data = json.loads(b"{" + content[front.end() :], parse_constant=no_constant, object_pairs_hook=_no_duplicates)
        return replace(_checked(data), sha256=found)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"it is malformed: {type(error).__name__}: {str(error)[:200]}.") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key appears twice")
    return content


def _checked(data: Any) -> Manifest:
    """Check parsed JSON. Raises KeyError, TypeError, ValueError, CheckpointError."""
    if data["format"] != FORMAT or data["version"] != VERSION:
        raise CheckpointError(
            f"it has format {data['format']!r:.60}, version {data['version']!r:.20}; this library "
            f"reads {FORMAT!r}, version {VERSION}."
        )
    world_size = _integer("world_size", data["world_size"], 1)
    files = {_file_name(name): _integer(name, size) for name, size in data["files"].items()}
    tensors = {
        name: [_copy(name, entry, files, world_size) for entry in copies] for name, copies in data["tensors"].items()
    }
    # First overlaps in files, then tilings of tensors: the second check needs sizes that the files bound.
    _check_overlaps(place for copies in tensors.values() for place in _places(copies))
    for name, copies in tensors.items():
        for copy in copies:
            check_tiling(name, copy.shape, [block.region for block in copy.blocks])
    parts = {
        name: [Part(_ranks(name, entry["ranks"], world_size), entry["tree"]) for entry in variants]
        for name, variants in data["parts"].items()
    }
    everything: Mapping[str, list[Any]] = {**tensors, **parts}
    for name, variants in everything.items():
        _check_ranks(name, [variant.ranks for variant in variants])
    for name, part in ((name, part) for name, variants in parts.items() for part in variants):
        # Decoding here also checks the tree's structure, before any object is touched.
        missing = sorted(trees.names(part.tree) - set(tensors))
        if missing:
            raise ValueError(f"{name} refers to {missing[0]!r}, which is not there")
    step = _integer("step", data["step"])
    trees.decode(data["extra"], no_tensor)
    return Manifest(step, world_size, files, tensors, parts, data["extra"])


def _integer(name: str, value: Any, low: int = 0) -> int:
    # isinstance would accept True. Below 2**63, because `check_tiling` puts starts and sizes into int64 arrays.
    if type(value) is not int or not low <= value < 2**63:
        raise ValueError(f"{name}={value!r:.40} must be an integer of {low} or more")
    return value


def _file_name(name: str) -> str:
    """Accept only the file names that this library writes: no paths, so nothing outside of the directory is read."""
    if not _FILE_PATTERN.fullmatch(name):
        raise ValueError(f"{name!r:.80} is not a file name of a checkpoint")
    return name


def _ranks(name: str, ranks: Any, world_size: int) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    found = tuple(_integer(f"a rank of {name}", rank) for rank in ranks)
    if any(rank >= world_size for rank in found):
        raise ValueError(f"{name} belongs to rank {max(found)}, world_size={world_size}")
    return found


def _check_ranks(name: str, variants: list[tuple[int, ...] | None]) -> None:
    """Check that each rank has at most one value."""
    owners = [rank for ranks in variants for rank in (ranks or ())]
    if not variants or (None in variants and len(variants) > 1) or len(set(owners)) != len(owners):
        raise ValueError(f"{name} has {len(variants)} values, but needs one for each rank")


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    found = tuple(_integer(f"a size of {name}", size) for size in shape)
    if len(found) > MAX_DIMS:
        raise ValueError(f"{name} has {len(found)} dims, the limit is {MAX_DIMS}")
    return found


def _copy(name: str, entry: Any, files: Mapping[str, int], world_size: int) -> Copy:
    dtype = DTYPES[entry["dtype"]]
    shape = _shape(name, entry["shape"])
    # Zero sizes are left out: the others must be bounded even if the tensor is empty.
    if prod(size for size in shape if size) * dtype.itemsize >= 2**63:
        raise ValueError(f"{name} of shape {shape} has more bytes than can be counted")
    blocks = []
    for block in entry["blocks"]:
        region = Region(_shape(name, block["start"]), _shape(name, block["shape"]))
        stops = [a + n for a, n in zip(*region, strict=True)]
        if len(stops) != len(shape) or any(stop > size for stop, size in zip(stops, shape, strict=True)):
            raise ValueError(f"{name} of shape {shape} has a block outside of it, {region.start} … {stops}")
        file, offset = block["file"], _integer("offset", block["offset"])
        # Python's integers do not overflow, whatever the file says.
        end = offset + prod(region.shape) * dtype.itemsize
        if end > files[file]:
            raise ValueError(f"{name} needs bytes {offset} … {end} of {file}, which has {files[file]}")
        if not _HASH_PATTERN.fullmatch(block["sha256"]):
            raise ValueError(f"{name} has a block without a checksum")
        blocks.append(Block(region, file, offset, block["sha256"]))
    return Copy(_ranks(name, entry["ranks"], world_size), dtype, shape, tuple(blocks))


def check_tiling(name: str, shape: tuple[int, ...], regions: list[Region]) -> None:
    """Check that every element is in exactly one region. Raises ValueError."""
    filled = [region for region in regions if prod(region.shape)]
    # Count first: this is cheap and bounds the work below.
    covered = sum(prod(region.shape) for region in filled)
    if covered != prod(shape):
        raise ValueError(f"{name} of shape {shape} has {prod(shape)} elements, its blocks {covered}")
    if len(filled) <= 1:
        return
    # Equal counts leave overlaps to exclude. Compress the coordinates: between neighbouring ends of boxes one element
    # stands for all, so `seen` is never larger than the tensor.
    starts = np.array([region.start for region in filled])
    stops = starts + np.array([region.shape for region in filled])
    ends = [np.unique(np.concatenate(pair)) for pair in zip(starts.T, stops.T, strict=True)]
    seen = np.zeros([len(found) - 1 for found in ends], bool)
    lows = np.stack([np.searchsorted(found, column) for found, column in zip(ends, starts.T, strict=True)], 1)
    highs = np.stack([np.searchsorted(found, column) for found, column in zip(ends, stops.T, strict=True)], 1)
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        if seen[box].any():
            raise ValueError(f"{name} of shape {shape} has blocks that overlap")
        seen[box] = True


def _places(copies: Iterable[Copy]) -> Iterable[tuple[str, int, int]]:
    """Yield the file, first byte and end byte of every block."""
    for copy in copies:
        for block in copy.blocks:
            yield block.file, block.offset, block.offset + prod(block.region.shape) * copy.dtype.itemsize


def _check_overlaps(places: Iterable[tuple[str, int, int]]) -> None:
    """Check that no byte is used twice: a small file must not expand into large tensors. Raises ValueError."""
    before = ("", 0, 0)
    # In sorted order only neighbours can overlap; empty blocks cannot.
    for place in sorted(place for place in places if place[1] < place[2]):
        if place[0] == before[0] and place[1] < before[2]:
            raise ValueError(f"{place[0]}: bytes {place[1]} … {before[2]} belong to two tensors")
        before = place
