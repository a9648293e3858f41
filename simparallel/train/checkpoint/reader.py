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
from simparallel.base.system import memory_size_bytes
from simparallel.errors import CheckpointError
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import Block, Region, raw
from simparallel.train.checkpoint.barriers import checkpoint_error
from simparallel.train.checkpoint.manifest import MAX_BYTES, Copy, Manifest, from_bytes, no_tensor
from simparallel.train.checkpoint.plan import choose

MANIFEST = "manifest.json"


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
        self._files: dict[str, BinaryIO] = {}
        self.stood_in: list[str] = []
        self.manifest = read_manifest(self.path / MANIFEST)
        self.step, self.world_size = self.manifest.step, self.manifest.world_size
        self.extra = trees.decode(self.manifest.extra, no_tensor)
        # Open and check all files now: a missing or truncated one is found before anything is restored from the others.
        try:
            for name in self.manifest.files:
                self._open(name)
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
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._copy(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._copy(name).dtype

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
        copy = self._copy(name)
        wanted = Region.of(f"{self.path}: {name}", copy.shape, slices)
        out = np.empty(wanted.shape, copy.dtype)
        for block in copy.blocks:
            common = block.region.common(wanted)
            if common is not None:
                self._fill(out, wanted, common, name, block)
        # Files are little-endian on every machine.
        return out.astype(out.dtype.newbyteorder("="), copy=False)

    # --- plain data ----------------------------------------------------------------------------------

    def parts(self) -> list[str]:
        """List the parts: "model", "optimizer", …"""
        return list(self.manifest.parts)

    def tree(self, part: str) -> Any:
        """Return the JSON data of a part, with references to its tensors.

        Raises:
            CheckpointError: there is no such part.
        """
        if part not in self.manifest.parts:
            raise checkpoint_error(
                self.path,
                f"{self.path} holds no {part}, only {', '.join(self.parts()) or 'nothing'}; leave it out, or "
                "restore it from another checkpoint.",
            )
        return self._choose(part, self.manifest.parts[part]).tree

    def state(self, part: str, fetch: Callable[[str], Any] | None = None) -> Any:
        """Return the state dict of a part; `fetch` maps names to tensors, by default to whole ones.

        Raises:
            CheckpointError: there is no such part, or a file is damaged.
        """
        try:
            return trees.decode(self.tree(part), fetch or self.read)
        except CheckpointError as error:
            raise located(self.path, error) from None

    # --- internals -----------------------------------------------------------------------------------

    def _copy(self, name: str) -> Copy:
        if name not in self.manifest.tensors:
            raise checkpoint_error(self.path, f"{self.path} holds no tensor {name!r}.")
        return self._choose(name, self.manifest.tensors[name])

    def _choose(self, name: str, variants: Sequence[Any]) -> Any:
        chosen, stands_in = choose(variants, self.rank, self._own_size, self.world_size)
        if stands_in and name not in self.stood_in:
            self.stood_in.append(name)
        return chosen

    def _open(self, name: str) -> None:
        path, size = self.path / name, self.manifest.files[name]
        try:
            self._files[name] = file = open_file(path, links=False)
        except OSError as error:
            raise unreadable(path, error) from None
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise checkpoint_error(
                path, f"{path} has {found} bytes, but the manifest states {size}; it was truncated or replaced."
            )

    def _fill(self, out: np.ndarray, wanted: Region, common: Region, name: str, block: Block) -> None:
        """Copy the intersection of `block` and `wanted` into `out`."""
        needed = block.region
        offset = block.offset
        # A checksum needs the whole block; without verification read only its needed rows.
        if not self.verify and needed.shape:
            row_bytes = prod(needed.shape[1:]) * out.itemsize
            offset += (common.start[0] - needed.start[0]) * row_bytes
            needed = Region((common.start[0], *needed.start[1:]), (common.shape[0], *needed.shape[1:]))
        target = out[common.inside(wanted)]
        # Read straight into the result if the needed bytes are contiguous in it.
        in_place = common == needed and target.flags.c_contiguous
        data = target if in_place else np.empty(needed.shape, out.dtype)
        path = self.path / block.file
        try:
            count = read_into(self._files[block.file].fileno(), offset, raw(data))
        except OSError as error:
            raise unreadable(path, error) from None
        if count != data.nbytes:
            raise checkpoint_error(
                path,
                f"{path}: {name} needs {data.nbytes} bytes from {offset} on, but {count} were read; it was truncated.",
            )
        if self.verify:
            found = hashlib.sha256(raw(data)).hexdigest()
            if found != block.sha256:
                raise checkpoint_error(
                    path,
                    f"{path}: bytes {offset} … {offset + count} of {name} have sha256 {found[:12]}…, "
                    f"but {block.sha256[:12]}… were written; the file is damaged.",
                )
        if not in_place:
            target[...] = data[common.inside(needed)]


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises CheckpointError."""
    try:
        return from_bytes(read_whole(path, MAX_BYTES))
    except CheckpointError as error:
        raise located(path, error) from None


def read_whole(path: Path, max_bytes: int | None = None) -> bytes:
    """Read a regular file. Raises CheckpointError, also if it has more than `max_bytes` (None: the memory there is)."""
    try:
        with open_file(path, links=False) as file:
            size = os.fstat(file.fileno()).st_size
            if max_bytes is not None and size > max_bytes:
                raise checkpoint_error(path, f"{path} has {size} bytes, the limit is {max_bytes}.")
            if 0 < memory_size_bytes() < size:
                raise MemoryError
            # The size was checked first, so a huge file is refused without reading it.
            content = file.read(size) if size else b""
    except OSError as error:
        raise unreadable(path, error) from None
    except MemoryError:
        raise checkpoint_error(path, f"{path} has {size} bytes, but the memory is too small for it.") from None
    if len(content) != size:
        raise checkpoint_error(path, f"{path}: {size} bytes were expected, {len(content)} were read.")
    return content


def located(path: Path, error: CheckpointError) -> CheckpointError:
    """Prefix the error with the path, unless it has one."""
    return error if "path" in error.facts else checkpoint_error(path, f"{path}: {error}")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return checkpoint_error(path, f"{path} cannot be read: {error.strerror or error}.")
