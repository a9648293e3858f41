"""What a rank saves and restores: objects with state dicts, and the tensors and plain data taken from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simparallel.backend import random_state
from simparallel.errors import CheckpointError, LayoutError
from simparallel.layout.layout import Layout
from simparallel.nn import Module
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import CODES, Region, TensorSlice, blocks, host_array
from simparallel.train.checkpoint.plan import Claim
from simparallel.train.checkpoint.reader import CheckpointReader
from simparallel.train.ddp_wrappers import bare
from simparallel.world.rank import get_rank

# The prefix of parts that belong to one rank.
OWN = "own."
# States that may be refused are loaded first, the model last. The optimizer follows the scheduler, so that its
# learning rates win.
_ORDER = ("random", "sampler", OWN, "scaler", "scheduler", "optimizer", "model")
# The layout of a tensor, if it is cut, and its global shape, if known.
_Place = tuple[Layout | None, tuple[int, ...] | None]


class Parts:
    """The stateful objects of a training run, by name, in the order of loading.

    Args:
        objects: name -> object with `state_dict()` and `load_state_dict()`, or None.
        random: include the random state.
        layouts: name of a parameter -> layout over the ranks, for parameters without a layout of their own.
        own: name -> object as above; other ranks need not have it.

    Raises:
        CheckpointError: an object without these methods, or a layout for an unknown parameter.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        random: bool,
        layouts: Mapping[str, Layout] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self._rank = get_rank()
        given = {**objects, "random": random_state if random else None}
        self.objects: dict[str, Any] = {}
        for name in _ORDER:
            if name == OWN:
                self.objects |= {f"{OWN}{key}": value for key, value in (own or {}).items()}
            elif given.get(name) is not None:
                # Without its wrapper: names then do not depend on the number of devices.
                self.objects[name] = bare(given[name])
        for name, value in self.objects.items():
            if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
                raise CheckpointError(
                    f"{name}={type(value).__name__} has no state_dict() and load_state_dict(); put other data into "
                    "extra or tensors."
                )
        self._places = self._by_tensor(layouts or {})

    def read(self, reader: CheckpointReader, name: str) -> np.ndarray:
        """Read this rank's slice of a tensor. Raises CheckpointError."""
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

    def _by_tensor(self, layouts: Mapping[str, Layout]) -> dict[str, _Place]:
        """Map tensor names (for an optimizer, name prefixes) to layout and, if known, global shape."""
        model, optimizer = self.objects.get("model"), self.objects.get("optimizer")
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
        for number, parameter in enumerate(getattr(optimizer, "parameters", ())):
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

    def __init__(self, parts: Parts, tensors: Mapping[str, Any], extra: Any) -> None:
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
        self.arrays: dict[str, np.ndarray] = {}
        self.claims: dict[str, Claim] = {}
        for name, value in given.items():
            sliced = isinstance(value, TensorSlice)
            array = host_array(name, value.array if sliced else value)
            shape = tuple(value.global_shape) if sliced else array.shape
            region = Region.of(name, shape, value.slices if sliced else None)
            if region.shape != array.shape:
                raise CheckpointError(f"{name}: the slice has shape {region.shape}, the array {array.shape}.")
            self.arrays[name] = array
            self.claims[name] = Claim(CODES[array.dtype], shape, sliced, region, blocks(region, array))
