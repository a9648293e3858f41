"""What ranks save and restore: their objects, the tensors and plain data of these, and who writes which slice."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, count
from math import prod
from typing import Any

import numpy as np

from simparallel.backend import random_state
from simparallel.errors import CheckpointError, LayoutError
from simparallel.layout.boxes import shape_of, size_of
from simparallel.layout.layout import Layout
from simparallel.nn import Module
from simparallel.optim import Optimizer
from simparallel.parallel import Pipeline
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import DTYPES, FilePlan, HeldTensor, TensorSlice, describe, listed, plan_file
from simparallel.train.checkpoint.reader import CheckpointReader
from simparallel.train.checkpoint.stages import StageModel, StageOptimizer
from simparallel.train.ddp_wrappers import bare
from simparallel.world.rank import get_rank

# The prefix of parts that belong to one rank.
OWN = "own."
# Name -> the entries of a manifest.
Entries = dict[str, list[dict[str, Any]]]
# The layout of a tensor, if it is cut, and its global shape, if known.
_Place = tuple[Layout | None, tuple[int, ...] | None]


class TrainState:
    """The stateful objects of a training run, by name, in the order of loading.

    Args:
        model, optimizer, scheduler, sampler, scaler, random, layouts, own: as for `CheckpointManager.save`.

    Raises:
        CheckpointError: an object without `state_dict()` and `load_state_dict()`, or a layout for an unknown parameter.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        scaler: Any = None,
        random: bool = False,
        layouts: Mapping[str, Layout] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self._rank = get_rank()
        # States that may be refused are loaded first, the model last. The optimizer follows the scheduler, so that its
        # learning rates win.
        given = {"random": random_state if random else None, "sampler": sampler}
        given |= {f"{OWN}{name}": value for name, value in (own or {}).items()}
        # The model without its wrapper: names then do not depend on the number of devices.
        network = model = bare(model)
        if isinstance(model, Pipeline):
            optimizer = StageOptimizer(model, optimizer) if isinstance(optimizer, Optimizer) else optimizer
            network, model = model.model, StageModel(model)
        given |= {"scaler": scaler, "scheduler": scheduler, "optimizer": optimizer, "model": model}
        self.objects = {name: x for name, x in given.items() if x is not None or name.startswith(OWN)}
        # Parts of which each rank has the entries of its own stages.
        self.by_stage = [name for name, value in self.objects.items() if hasattr(value, "others")]
        for name, value in self.objects.items():
            if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
                raise CheckpointError(
                    f"{name}={type(value).__name__} has no state_dict() and load_state_dict(); put other data into "
                    "extra or tensors."
                )
        self._places = self._by_tensor(network, layouts or {})

    def read(self, reader: CheckpointReader, name: str) -> np.ndarray | None:
        """Read this rank's slice of a tensor; None if other stages have it. Raises CheckpointError."""
        part, _, own = name.partition(".")
        if part in self.by_stage and {own, own.rpartition(".")[0] + "."} & self.objects[part].others:
            return None
        layout = self._place(name)[0]
        return reader.read(name, None if layout is None else self._slices(name, layout, reader.shape(name)))

    def slice_of(self, name: str, value: Any) -> Any:
        """Return a tensor of a state as a `TensorSlice` if it is cut, else as it is. Raises CheckpointError."""
        layout, shape = self._place(name)
        if layout is None or isinstance(value, TensorSlice):
            return value
        if layout.partial:
            raise CheckpointError(f"{name} still needs a sum over {layout.partial}: {layout!r}.")
        if len(value.shape) != len(layout.cuts):
            raise CheckpointError(f"{name} has shape {value.shape}, {layout!r} lays out {len(layout.cuts)} dims.")
        # A layout that was given by name does not know the shape, which then follows from equal slices.
        shape = shape or tuple(size * cut for size, cut in zip(value.shape, layout.cuts, strict=True))
        return TensorSlice(shape, self._slices(name, layout, shape), value)

    def _slices(self, name: str, layout: Layout, shape: tuple[int, ...]) -> tuple[slice, ...]:
        try:
            return layout.slices(self._rank, shape)
        except LayoutError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def _place(self, name: str) -> _Place:
        # Names of an optimizer's state share a prefix per parameter: "optimizer.state.3." covers all of its arrays.
        return self._places.get(name) or self._places.get(name.rpartition(".")[0] + ".") or (None, None)

    def _by_tensor(self, model: Any, layouts: Mapping[str, Layout]) -> dict[str, _Place]:
        """Map tensor names (for an optimizer, name prefixes) to layout and, if known, global shape."""
        optimizer = self.objects.get("optimizer")
        if not isinstance(model, Module):
            if layouts:
                raise CheckpointError("layouts name parameters of the model; give the model, too.")
            return {}
        # A tied parameter is listed under each of its names.
        tensors = dict(model._saved_tensors())
        unknown = sorted(set(layouts) - set(tensors))
        if unknown:
            raise CheckpointError(f"layouts: the model has no {', '.join(unknown)}.")
        # By identity, since tied parameters have several names.
        cut: dict[int, _Place] = {id(x): (x.layout, x.shape) for x in tensors.values() if x.layout is not None}
        # Layouts of the caller win over the parameters' own.
        for name, layout in layouts.items():
            cut[id(tensors[name])] = layout, cut.get(id(tensors[name]), (None, None))[1]
        found = {f"model.{name}": cut[id(tensor)] for name, tensor in tensors.items() if id(tensor) in cut}
        for number, parameter in zip(
            getattr(optimizer, "parameter_numbers", count()), getattr(optimizer, "parameters", ()), strict=False
        ):
            if id(parameter) in cut:
                # The state of a parameter (momentum, …) is cut like the parameter.
                found[f"optimizer.state.{number}."] = cut[id(parameter)]
        return found


class Contents:
    """The data that this rank would save.

    Args:
        parts: the objects.
        tensors: name -> further array, `TensorSlice`, or tuple with the entries of one.
        extra: plain data.

    Attributes:
        extra: the encoded `extra`.
        trees: name of a part -> its plain data, with references to tensors.
        arrays: name of a tensor -> what this rank holds of it, as saved.
        claims: name of a tensor -> its description.

    Raises:
        CheckpointError: a state that is not plain data, or a slice that does not fit.
    """

    def __init__(self, parts: TrainState, tensors: Mapping[str, Any], extra: Any) -> None:
        given: dict[str, Any] = {}
        self.trees = {name: trees.encode(x.state_dict(), given, (name,)) for name, x in parts.objects.items()}
        given = {name: parts.slice_of(name, value) for name, value in given.items()}
        for name, value in tensors.items():
            if not isinstance(name, str) or name in given:
                raise CheckpointError(
                    f"tensors: {name!r} is not a name, or is used by a tensor of a part; choose another name."
                )
            given[name] = TensorSlice(*value) if isinstance(value, tuple) and len(value) == 3 else value
        in_extra: dict[str, Any] = {}
        self.extra = trees.encode({} if extra is None else extra, in_extra, ("extra",))
        for name in in_extra:
            raise CheckpointError(f"{name} is an array; give it as one of `tensors`.")
        described = {name: describe(name, value) for name, value in given.items()}
        self.arrays = {name: array for name, (array, _) in described.items()}
        self.claims = {name: claim for name, (_, claim) in described.items()}


def file_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def make_plan(claims_by_rank: Sequence[Mapping[str, HeldTensor]]) -> tuple[Entries, dict[int, FilePlan]]:
    """Assign writers: each value is written once, the bytes balanced over the ranks that hold it.

    Returns:
        The tensors, as in the manifest, and the file of each rank that writes. Every rank computes the same.

    Raises:
        CheckpointError: slices of one tensor that do not fit together, or equal slices that differ.
    """
    values_of = _by_value(claims_by_rank)
    for name, values in values_of.items():
        if any(claim.sliced for claim, _ in values):
            _check_slices(name, values)
    entries: dict[int, dict[str, Any]] = {}
    written_bytes = [0] * len(claims_by_rank)
    # Greedy balance: the largest pieces first, each to the holder that has written the fewest bytes so far.
    pieces = [(name, claim, ranks, claim.size_bytes) for name, values in values_of.items() for claim, ranks in values]
    for name, claim, ranks, size_bytes in sorted(pieces, key=lambda piece: -piece[3]):
        writer = min(ranks, key=lambda rank: (written_bytes[rank], rank))
        written_bytes[writer] += size_bytes
        entries.setdefault(writer, {})[name] = claim.code, shape_of(claim.box)
    files = {rank: plan_file(entries[rank], {"format": "np"}) for rank in sorted(entries)}
    tensors: Entries = {name: [] for name in values_of}
    for name, claim, ranks, _ in pieces:
        # Slices together are one tensor; whole tensors that differ are one copy for each value.
        if not (claim.sliced and tensors[name]):
            owners = None if claim.sliced else _owners(ranks, len(claims_by_rank))
            tensors[name].append({"ranks": owners, "dtype": claim.code, "shape": claim.shape, "blocks": []})
        # A rank holds one value of a name.
        writer = next(rank for rank in ranks if name in entries.get(rank, ()))
        offset = files[writer].offsets[name]
        for start, shape, sha256 in claim.blocks:
            block = {"start": start, "shape": shape, "file": file_name(writer), "offset": offset, "sha256": sha256}
            tensors[name][-1]["blocks"].append(block)
            offset += prod(shape) * DTYPES[claim.code].itemsize
    return tensors, files


def merge_parts(trees_by_rank: Sequence[Mapping[str, Any]], by_stage: Iterable[str] = ()) -> Entries:
    """Merge the ranks' plain data: one entry if all ranks agree, else one for each value with its ranks.

    Parts in `by_stage` get the entries of all ranks.
    """
    whole = {name: _merged([tree[name] for tree in trees_by_rank]) for name in by_stage}
    trees_by_rank = [{**tree, **whole} for tree in trees_by_rank]
    # Unlike ==, the text distinguishes 1, 1.0 and True.
    values_of = _by_value(trees_by_rank, lambda tree: json.dumps(tree, sort_keys=True))
    return {
        name: [{"ranks": _owners(ranks, len(trees_by_rank)), "tree": tree} for tree, ranks in values]
        for name, values in values_of.items()
    }


def _merged(trees_: Sequence[Any]) -> Any:
    """Merge trees: dicts get the entries of all, and of anything else the first tree's value is taken."""
    dicts = [tree for tree in trees_ if isinstance(tree, dict)]
    keys = dict.fromkeys(chain(*dicts))
    return {key: _merged([tree[key] for tree in dicts if key in tree]) for key in keys} if dicts else trees_[0]


def _by_value(
    values_by_rank: Sequence[Mapping[str, Any]], key: Callable[[Any], Hashable] = lambda value: value
) -> dict[str, list[tuple[Any, list[int]]]]:
    """Return name -> [(value, the ranks that have it)], a pair for each distinct value; `key` tells values apart."""
    found: dict[str, dict[Hashable, tuple[Any, list[int]]]] = {}
    for rank, values in enumerate(values_by_rank):
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(key(value), (value, []))[1].append(rank)
    return {name: list(values.values()) for name, values in found.items()}


def _owners(ranks: list[int], world_size: int) -> list[int] | None:
    # None stands for all ranks, the common case.
    return None if len(ranks) == world_size else ranks


def _check_slices(name: str, values: Sequence[tuple[HeldTensor, list[int]]]) -> None:
    """Check that the ranks' slices belong to one tensor and tile it. Raises CheckpointError."""
    fits = len({(claim.code, claim.shape, claim.sliced) for claim, _ in values}) == 1
    if fits:
        starts, stops = np.moveaxis(np.array([claim.box for claim, _ in values]).reshape(len(values), -1, 2), 2, 0)
        # Boxes share an element if they overlap in every dim.
        shared = (np.maximum(starts, starts[:, None]) < np.minimum(stops, stops[:, None])).all(2)
        # Without overlaps, slices of as many elements as the tensor has are all of it.
        covered = sum(size_of(claim.box) for claim, _ in values)
        fits = not np.triu(shared, 1).any() and covered == prod(values[0][0].shape)
    if not fits:
        held = [
            f"rank {ranks[0]} [{', '.join(f'{low}:{high}' for low, high in claim.box)}] of {claim.code} {claim.shape}"
            for claim, ranks in values
        ]
        raise CheckpointError(
            f"{name}: the slices must be of one tensor and cover each element once, but are {listed(held)}."
        )
