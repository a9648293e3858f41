"""A rank's part in a checkpoint: the objects with state dicts, and the tensors and data taken from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from simparallel.backend import random_state
from simparallel.errors import CheckpointError, LayoutError
from simparallel.layout.layout import Layout
from simparallel.nn import Module
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import CODES, FilePlan, Region, TensorSlice, digests, host_array, raw
from simparallel.train.checkpoint.plan import Claim
from simparallel.train.ddp_wrappers import bare

# The prefix of parts that belong to one rank.
OWN = "own."


class Parts:
    """The stateful objects of a training run, by name.

    Args:
        objects: name -> object with `state_dict()` and `load_state_dict()`, or None.
        random: include the random state.
        layouts: name of a parameter -> layout over the ranks, for parameters without a layout of their own.
        own: name -> object as above; other ranks need not have it.

    Raises:
        CheckpointError: an object without these methods, or a layout for an unknown parameter.
    """

    # States that may be refused are loaded first, the model last. The optimizer follows the scheduler, so that its
    # learning rates win.
    order = ("random", "sampler", OWN, "scaler", "scheduler", "optimizer", "model")

    def __init__(
        self,
        objects: Mapping[str, Any],
        random: bool,
        layouts: Mapping[str, Layout] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        given = {**objects, "random": random_state if random else None}
        self.objects: dict[str, Any] = {}
        for name in self.order:
            if name == OWN:
                self.objects |= {f"{OWN}{key}": value for key, value in (own or {}).items()}
            elif given.get(name) is not None:
                # Without its wrapper: names then do not depend on the number of devices.
                self.objects[name] = bare(given[name])
        for name, value in self.objects.items():
            if not callable(getattr(value, "state_dict", None)) or not callable(
                getattr(value, "load_state_dict", None)
            ):
                raise CheckpointError(
                    f"{name}={type(value).__name__} has no state_dict() and load_state_dict(); put other data into "
                    "extra or tensors."
                )
        self._places = self._by_tensor(layouts or {})

    def layout(self, name: str) -> Layout | None:
        """Return the layout of a tensor: of a parameter, or of the optimizer's state of one."""
        return self._place(name)[0]

    def shape(self, name: str, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global shape of a tensor, given the shape `local` of this rank's slice."""
        layout, shape = self._place(name)
        # A layout that was given by name does not know the shape, which then follows from equal slices.
        cuts = (1,) * len(local) if layout is None else layout.cuts
        return shape or tuple(size * cut for size, cut in zip(local, cuts, strict=True))

    def _place(self, name: str) -> tuple[Layout | None, tuple[int, ...] | None]:
        # Names of an optimizer's state share a prefix per parameter: "optimizer.state.3." covers all of its arrays.
        return self._places.get(name) or self._places.get(name.rpartition(".")[0] + ".") or (None, None)

    def _by_tensor(self, layouts: Mapping[str, Layout]) -> dict[str, tuple[Layout | None, tuple[int, ...] | None]]:
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
        cut: dict[int, tuple[Layout | None, tuple[int, ...] | None]] = {
            id(tensor): (tensor.layout, tensor.shape) for tensor in tensors.values() if tensor.layout is not None
        }
        # Layouts of the caller win over the parameters' own.
        cut |= {
            id(tensors[name]): (layout, cut.get(id(tensors[name]), (None, None))[1]) for name, layout in layouts.items()
        }
        found = {f"model.{name}": cut[id(tensor)] for name, tensor in tensors.items() if id(tensor) in cut}
        for number, parameter in enumerate(getattr(optimizer, "parameters", ())):
            if id(parameter) in cut:
                # The state of a parameter (momentum, …) is cut like the parameter.
                found[f"optimizer.state.{number}."] = cut[id(parameter)]
        return found


class Contents:
    """The data that this rank would save.

    Attributes:
        extra: the encoded `extra`.
        claims: name of a tensor -> description of this rank's slice.
        trees: name of a part -> its plain data, with references to tensors.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.claims: dict[str, Claim] = {}
        self.trees: dict[str, Any] = {}
        self.extra: Any = {}
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, parts: Parts, tensors: Mapping[str, Any], extra: Any) -> None:
        """Collect the state of all parts. Raises CheckpointError."""

        def keep(path: trees.Path, value: Any) -> str:
            name = ".".join(map(str, path))
            while name in self.claims:
                # Keeps {"a.b": x} and {"a": {"b": x}} distinct.
                name += "'"
            layout = parts.layout(name)
            if layout is not None and not isinstance(value, TensorSlice):
                value = self._laid_out(name, value, layout, parts)
            self._add_tensor(name, value)
            return name

        for part, value in parts.objects.items():
            self.trees[part] = trees.encode(value.state_dict(), keep, (part,))
        self.extra = trees.encode({} if extra is None else extra, _refuse, ("extra",))
        for name, given in tensors.items():
            if not isinstance(name, str) or name in self.claims:
                raise CheckpointError(
                    f"tensors: {name!r} is not a name, or is used by a tensor of a part; choose another name."
                )
            is_slice = isinstance(given, tuple) and len(given) == 3
            self._add_tensor(name, TensorSlice(*given) if is_slice else given)

    def pieces(self, plan: FilePlan) -> Iterator[Any]:
        """Yield the bytes of this rank's file."""
        yield plan.header
        for name in sorted(plan.offsets, key=lambda name: plan.offsets[name]):
            # Lazily: the file is written array by array, without a copy of the whole.
            yield raw(self._arrays[name])

    def _add_tensor(self, name: str, value: Any) -> None:
        sliced = isinstance(value, TensorSlice)
        array = host_array(name, value.array if sliced else value)
        shape = tuple(value.global_shape) if sliced else array.shape
        region = Region.of(name, shape, value.slices if sliced else None)
        if region.shape != array.shape:
            raise CheckpointError(f"{name}: the slice has shape {region.shape}, the array {array.shape}.")
        self._arrays[name] = array
        self.claims[name] = Claim(CODES[array.dtype], shape, region, sliced, digests(region, array))

    def _laid_out(self, name: str, value: Any, layout: Layout, parts: Parts) -> TensorSlice:
        if layout.partial:
            raise CheckpointError(f"{name} still needs a sum over {layout.partial}: {layout!r}.")
        if len(value.shape) != len(layout.cuts):
            raise CheckpointError(f"{name} has shape {value.shape}, {layout!r} lays out {len(layout.cuts)} dims.")
        shape = parts.shape(name, value.shape)
        try:
            return TensorSlice(shape, layout.slices(self.rank, shape), value)
        except LayoutError as error:
            raise CheckpointError(f"{name}: {error}") from None


def _refuse(path: trees.Path, value: Any) -> str:
    raise CheckpointError(f"{'.'.join(map(str, path))} is an array; give it as one of `tensors`.")
