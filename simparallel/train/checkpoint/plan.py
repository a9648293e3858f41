"""Assign writers: each value is written once, the bytes balanced over the ranks that hold it. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from simparallel.errors import CheckpointError
from simparallel.train.checkpoint.arrays import DTYPES, Block, FilePlan, Region, cut, plan_file
from simparallel.train.checkpoint.manifest import Copy, Part, check_tiling


class Claim(NamedTuple):
    """A rank's description of the tensor, or slice of one, that it holds."""

    # The dtype, as safetensors spells it.
    code: str
    # The global shape.
    shape: tuple[int, ...]
    # The slice that this rank holds.
    region: Region
    # False: a whole tensor of this rank, which may differ from other ranks' tensors.
    sliced: bool
    # SHA-256 of its blocks: ranks compare values without sending them.
    digests: tuple[str, ...]


class Plan(NamedTuple):
    """The writers and offsets of all tensors; every rank computes the same plan."""

    tensors: dict[str, list[Copy]]
    # The writing rank -> its file.
    files: dict[int, FilePlan]

    def file_sizes(self) -> dict[str, int]:
        return {file_name(rank): plan.size_bytes for rank, plan in sorted(self.files.items())}


def file_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def make_plan(claims_by_rank: Sequence[Mapping[str, Claim]]) -> Plan:
    """Decide which rank writes which slice.

    Raises:
        CheckpointError: slices of one tensor that do not fit together, or equal slices that differ.
    """
    # Name -> value -> the ranks that hold it. Equal values have equal claims, digests included, so they share an entry.
    values_of: dict[str, dict[Claim, list[int]]] = {}
    for rank, claims in enumerate(claims_by_rank):
        for name, claim in claims.items():
            values_of.setdefault(name, {}).setdefault(claim, []).append(rank)
    pieces = []
    for name, values in values_of.items():
        if any(claim.sliced for claim in values):
            _check_slices(name, values)
        pieces += [(name, claim, ranks) for claim, ranks in values.items()]
    entries: dict[int, dict[str, Any]] = {}
    written_bytes = [0] * len(claims_by_rank)
    writers: dict[tuple[str, Claim], int] = {}
    # Greedy balance: the largest pieces first, each to the holder that has written the fewest bytes so far.
    for name, claim, ranks in sorted(pieces, key=lambda piece: -_size_bytes(piece[1])):
        writer = min(ranks, key=lambda rank: (written_bytes[rank], rank))
        written_bytes[writer] += _size_bytes(claim)
        entries.setdefault(writer, {})[name] = DTYPES[claim.code], claim.region.shape
        writers[name, claim] = writer
    files = {rank: plan_file(arrays, {"format": "np"}) for rank, arrays in entries.items()}

    def blocks(name: str, claim: Claim) -> list[Block]:
        writer = writers[name, claim]
        offset = files[writer].offsets[name]
        parts = cut(claim.region, DTYPES[claim.code].itemsize)
        return [
            Block(region, file_name(writer), offset + start, digest)
            for (region, start, _), digest in zip(parts, claim.digests, strict=True)
        ]

    tensors: dict[str, list[Copy]] = {}
    for name, values in values_of.items():
        first = next(iter(values))
        # Slices together are one tensor; whole tensors that differ are one copy for each value.
        if first.sliced:
            found = tuple(block for claim in values for block in blocks(name, claim))
            tensors[name] = [Copy(None, DTYPES[first.code], first.shape, found)]
            continue
        tensors[name] = [
            Copy(_owners(ranks, len(claims_by_rank)), DTYPES[claim.code], claim.shape, tuple(blocks(name, claim)))
            for claim, ranks in values.items()
        ]
    return Plan(tensors, files)


def merge_parts(trees_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, list[Part]]:
    """Merge the ranks' plain data: one entry if all ranks agree, else one for each value with its ranks."""
    values_of: dict[str, dict[str, tuple[Any, list[int]]]] = {}
    for rank, trees in enumerate(trees_by_rank):
        for name, tree in trees.items():
            # Unlike ==, it distinguishes 1, 1.0 and True.
            text = json.dumps(tree, sort_keys=True)
            values_of.setdefault(name, {}).setdefault(text, (tree, []))[1].append(rank)
    return {
        name: [Part(_owners(ranks, len(trees_by_rank)), tree) for tree, ranks in values.values()]
        for name, values in values_of.items()
    }


def choose(variants: Sequence[Any], rank: int, world_size: int, saved_size: int) -> tuple[Any, bool]:
    """Return the `Copy` or `Part` for this rank, and whether it stands in for a missing one.

    On the same number of ranks each rank gets its own. On another number, or without one of its own, it gets the
    first rank's.
    """
    if len(variants) == 1:
        return variants[0], False
    for variant in variants:
        if rank in variant.ranks and world_size == saved_size:
            return variant, False
    # Every rank takes the same one, so replicated values are equal again.
    return min(variants, key=lambda variant: variant.ranks), True


def _owners(ranks: list[int], world_size: int) -> tuple[int, ...] | None:
    # None stands for all ranks, the common case.
    return None if len(ranks) == world_size else tuple(ranks)


def _size_bytes(claim: Claim) -> int:
    return prod(claim.region.shape) * DTYPES[claim.code].itemsize


def _check_slices(name: str, values: Mapping[Claim, list[int]]) -> None:
    """Check that the ranks' slices belong to one tensor and tile it. Raises CheckpointError."""
    # One rank of each kind is enough for the message.
    kinds = {(claim.sliced, claim.code, claim.shape): ranks[0] for claim, ranks in values.items()}
    if len(kinds) > 1:
        texts = [
            f"rank {rank}: {code} {shape}{'' if sliced else ', not sliced'}"
            for (sliced, code, shape), rank in kinds.items()
        ]
        raise CheckpointError(f"{name} differs between these ranks: {'; '.join(texts)}.")
    seen: dict[Region, int] = {}
    for claim, ranks in values.items():
        if claim.region in seen:
            raise CheckpointError(
                f"{name}: ranks {seen[claim.region]} and {ranks[0]} hold the same slice, {claim.region}, with "
                "different values."
            )
        seen[claim.region] = ranks[0]
    ((_, _, shape),) = kinds
    try:
        check_tiling(name, shape, list(seen))
    except ValueError as error:
        raise CheckpointError(f"{error}: the slices that the ranks hold do not make up the tensor.") from None
