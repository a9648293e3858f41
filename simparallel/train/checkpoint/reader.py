"""Read a checkpoint: the manifest first, then only the blocks that are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from simparallel.base.files import expanded, open_file, read_into
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import DTYPES, Region, checkpoint_error, on_disk, raw, read_file
from simparallel.train.checkpoint.manifest import MANIFEST, MAX_BYTES, from_bytes


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
        self._files: dict[str, BinaryIO] = {}
        with on_disk(self.path / MANIFEST):
            self._manifest = from_bytes(read_file(self.path / MANIFEST, MAX_BYTES))
        self.digest: str = self._manifest["sha256"]
        self.step, self.world_size = self._manifest["step"], self._manifest["world_size"]
        self.extra = trees.decode(self._manifest["extra"], trees.no_array)
        # Open and check all files now: a missing or truncated one is found before anything is restored from the others.
        try:
            for name, size_bytes in self._manifest["files"].items():
                self._open(self.path / name, size_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- tensors -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List the tensors."""
        return list(self._manifest["tensors"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return tuple(self._tensor(name)["shape"])

    def dtype(self, name: str) -> np.dtype:
        return DTYPES[self._tensor(name)["dtype"]]

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
        tensor = self._tensor(name)
        wanted = Region.of(f"{self.path}: {name}", tensor["shape"], slices)
        out = np.empty(wanted.shape, DTYPES[tensor["dtype"]])
        for block in tensor["blocks"]:
            held = Region(tuple(block["start"]), tuple(block["shape"]))
            common = held.common(wanted)
            if common is not None:
                self._fill(out[common.inside(wanted)], common, held, name, block)
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
        if part not in self._manifest["parts"]:
            raise checkpoint_error(
                self.path,
                f"{self.path} holds no {part}, only {', '.join(self.parts()) or 'nothing'}; leave it out, or "
                "restore it from another checkpoint.",
            )
        return self._own(part, self._manifest["parts"][part])["tree"]

    def state(self, part: str, fetch: Callable[[str], Any] | None = None) -> Any:
        """Return the state dict of a part; `fetch` maps names to tensors, by default to whole ones.

        Raises:
            CheckpointError: there is no such part, or a file is damaged.
        """
        return trees.decode(self.tree(part), fetch or self.read)

    # --- internals -----------------------------------------------------------------------------------

    def _tensor(self, name: str) -> dict[str, Any]:
        if name not in self._manifest["tensors"]:
            raise checkpoint_error(self.path, f"{self.path} holds no tensor {name!r}.")
        return self._own(name, self._manifest["tensors"][name])

    def _own(self, name: str, values: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the value of this rank. On another number of ranks, or without an own one, it is the first rank's."""
        if len(values) == 1:
            return values[0]
        for value in values:
            if self.rank in value["ranks"] and self._own_size == self.world_size:
                return value
        if name not in self.stood_in:
            self.stood_in.append(name)
        # Every rank takes the same one, so replicated values are equal again.
        return min(values, key=lambda value: value["ranks"])

    def _open(self, path: Path, size_bytes: int) -> None:
        with on_disk(path):
            self._files[path.name] = file = open_file(path, links=False)
        found = os.fstat(file.fileno()).st_size
        if found != size_bytes:
            raise checkpoint_error(
                path, f"{path} has {found} bytes, but the manifest states {size_bytes}; it was truncated or replaced."
            )

    def _fill(self, target: np.ndarray, common: Region, held: Region, name: str, block: dict[str, Any]) -> None:
        """Copy the region `common` of a block, which holds the region `held`, into `target`."""
        offset, path = block["offset"], self.path / block["file"]
        # A checksum needs the whole block; without verification read only its needed rows.
        if not self.verify and held.shape:
            offset += (common.start[0] - held.start[0]) * prod(held.shape[1:]) * target.itemsize
            held = Region((common.start[0], *held.start[1:]), (common.shape[0], *held.shape[1:]))
        # Read straight into the result if the needed bytes are contiguous in it.
        in_place = common == held and target.flags.c_contiguous
        data = target if in_place else np.empty(held.shape, target.dtype)
        with on_disk(path):
            count = read_into(self._files[block["file"]].fileno(), offset, raw(data))
        if count != data.nbytes:
            raise checkpoint_error(
                path,
                f"{path}: {name} needs {data.nbytes} bytes from {offset} on, but {count} were read; it was truncated.",
            )
        found = hashlib.sha256(raw(data)).hexdigest() if self.verify else block["sha256"]
        if found != block["sha256"]:
            raise checkpoint_error(
                path,
                f"{path}: bytes {offset} … {offset + count} of {name} have sha256 {found[:12]}…, "
                f"but {block['sha256'][:12]}… were written; the file is damaged.",
            )
        if not in_place:
            target[...] = data[common.inside(held)]
