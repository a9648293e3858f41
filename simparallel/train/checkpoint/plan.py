"""Assign writers: each value is written once, the bytes balanced over the ranks that hold it. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.errors import CheckpointError
from simparallel.train.checkpoint.arrays import DTYPES, FilePlan, Region, plan_file


class Claim(NamedTuple):
    """A rank's description of the tensor, or slice of one, that it holds."""

    # The dtype, as safetensors spells it.
    code: str
    # The global shape.
    shape: tuple[int, ...]
    # False: a whole tensor of this rank, which may differ from other ranks' tensors.
    sliced: bool
    # The slice that this rank holds.
    region: Region
    # Its blocks with their SHA-256: ranks compare values without sending them.
    blocks: tuple[tuple[Region, str], ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.region.shape) * DTYPES[self.code].itemsize


class Plan(NamedTuple):
    """The writers and offsets of all tensors; every rank computes the same plan."""

    # As in the manifest.
    tensors: dict[str, list[dict[str, Any]]]
    # The writing rank -> its file.
    files: dict[int, FilePlan]


def file_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def make_plan(claims_by_rank: Sequence[Mapping[str, Claim]]) -> Plan:
    """Decide which rank writes which slice.

    Raises:
        CheckpointError: slices of one tensor that do not fit together, or equal slices that differ.
    """
    values_of = _by_value(claims_by_rank)
    for name, values in values_of.items():
        if any(claim.sliced for claim, _ in values):
            _check_slices(name, values)
    entries: dict[int, dict[str, Any]] = {}
    written_bytes = [0] * len(claims_by_rank)
    writers: dict[tuple[str, Claim], int] = {}
    # Greedy balance: the largest pieces first, each to the holder that has written the fewest bytes so far.
    pieces = [(name, claim, ranks) for name, values in values_of.items() for claim, ranks in values]
    for name, claim, ranks in sorted(pieces, key=lambda piece: -piece[1].size_bytes):
        writer = min(ranks, key=lambda rank: (written_bytes[rank], rank))
        written_bytes[writer] += claim.size_bytes
        entries.setdefault(writer, {})[name] = claim.code, claim.region.shape
        writers[name, claim] = writer
    files = {rank: plan_file(entries[rank], {"format": "np"}) for rank in sorted(entries)}
    tensors: dict[str, list[dict[str, Any]]] = {}
    for name, values in values_of.items():
        copies = tensors[name] = []
        for claim, ranks in values:
            # Slices together are one tensor; whole tensors that differ are one copy for each value.
            if not (claim.sliced and copies):
                owners = None if claim.sliced else _owners(ranks, len(claims_by_rank))
                copies.append({"ranks": owners, "dtype": claim.code, "shape": claim.shape, "blocks": []})
            writer = writers[name, claim]
            offset = files[writer].offsets[name]
            for region, sha256 in claim.blocks:
                block = {**region._asdict(), "file": file_name(writer), "offset": offset, "sha256": sha256}
                copies[-1]["blocks"].append(block)
                offset += prod(region.shape) * DTYPES[claim.code].itemsize
    return Plan(tensors, files)


def merge_parts(trees_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Merge the ranks' plain data: one entry if all ranks agree, else one for each value with its ranks."""
    # Unlike ==, the text distinguishes 1, 1.0 and True.
    values_of = _by_value(trees_by_rank, lambda tree: json.dumps(tree, sort_keys=True))
    return {
        name: [{"ranks": _owners(ranks, len(trees_by_rank)), "tree": tree} for tree, ranks in values]
        for name, values in values_of.items()
    }


def _by_value(
    values_by_rank: Sequence[Mapping[str, Any]], key: Callable[[Any], Hashable] = lambda value: value
) -> dict[str, list[tuple[Any, list[int]]]]:
    """Return name -> each value under that name, with the ranks that hold it. Equal values have equal keys."""
    found: dict[str, dict[Hashable, tuple[Any, list[int]]]] = {}
    for rank, values in enumerate(values_by_rank):
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(key(value), (value, []))[1].append(rank)
    return {name: list(values.values()) for name, values in found.items()}


def _owners(ranks: list[int], world_size: int) -> list[int] | None:
    # None stands for all ranks, the common case.
    return None if len(ranks) == world_size else ranks


def _check_slices(name: str, values: Sequence[tuple[Claim, list[int]]]) -> None:
    """Check that the ranks' slices belong to one tensor and tile it. Raises CheckpointError."""
    # One rank of each kind is enough for the message.
    kinds = {(claim.code, claim.shape, claim.sliced): ranks[0] for claim, ranks in values}
    if len(kinds) > 1:
        texts = [
            f"rank {rank}: {code} {shape}{'' if sliced else ', not sliced'}"
            for (code, shape, sliced), rank in kinds.items()
        ]
        raise CheckpointError(f"{name} differs between these ranks: {'; '.join(texts)}.")
    regions, shape = [claim.region for claim, _ in values], values[0][0].shape
    starts = np.array([region.start for region in regions])
    stops = starts + [region.shape for region in regions]
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        # Regions share an element if they overlap in every dim.
        shared = (np.maximum(starts[:number], start) < np.minimum(stops[:number], stop)).all(1)
        for other in np.flatnonzero(shared).tolist():
            raise CheckpointError(
                f"{name}: ranks {values[other][1][0]} and {values[number][1][0]} hold slices that overlap, "
                f"{regions[other]} and {regions[number]}; only equal slices with equal values may."
            )
    # Without overlaps, slices of as many elements as the tensor has are all of it.
    covered = sum(prod(region.shape) for region in regions)
    if covered != prod(shape):
        raise CheckpointError(f"{name} of shape {shape} has {prod(shape)} elements, the ranks hold {covered} of them.")
