"""Plan a strategy before anything runs: slices, groups, collectives, bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from simparallel.algorithms import price
from simparallel.arrays.seam import kernels_of
from simparallel.autograd import Context, Op, Plan, Spec
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.backend import Array
from simparallel.base.checks import check_integer, is_integer
from simparallel.base.html import table
from simparallel.base.text_table import aligned
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Group, groups_text
from simparallel.layout.redistribution import Redistribution
from simparallel.layout.sharding import Sharding
from simparallel.layout.strategy import axis_name
from simparallel.parallel.operator.op_call import OpCall, plan_way

SUM_OF_GRADIENT = "sum of the gradient"


class OpCollective(NamedTuple):
    """One collective of an op."""

    # "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "messages".
    collective: str
    # "sum", "max" or "min"; None if nothing is reduced.
    reduce_op: str | None
    # Each in the order of its chunks.
    groups: tuple[Group, ...]
    # Bytes that each rank receives, with reductions priced as on a ring; the maximum over the ranks.
    bytes_per_rank: int
    why: str

    def __str__(self) -> str:
        op = f"({self.reduce_op})" if self.reduce_op else ""
        return f"{self.collective}{op} over {groups_text(self.groups)}: {self.bytes_per_rank} B/rank, {self.why}"


class OpCollectives(tuple[OpCollective, ...]):
    """Collectives in their order. With exactly one entry, the tuple has the attributes of that entry."""

    def __getattr__(self, name: str) -> Any:
        if name in OpCollective._fields and len(self) == 1:
            return getattr(self[0], name)
        raise AttributeError(f"{len(self)} exchanges have no single {name!r}; look at each of them.")

    @property
    def total_bytes(self) -> int:
        """Bytes per rank of all collectives."""
        return sum(exchange.bytes_per_rank for exchange in self)

    def __str__(self) -> str:
        return "; ".join(map(str, self)) or "nothing"


@dataclass(frozen=True, repr=False)
class OpPlan:
    """An op, cut by its strategy, on inputs of given shapes.

    Attributes:
        op: description of the op and its settings.
        device_matrix: sizes of the axes of devices; with a tuple strategy one axis for each named dim of the op, and
            one for the devices that repeat.
        tensor_maps: {"inputs": [...], "output": ...}; for each dim the axis that cuts it, counted from the right;
            a tuple for several axes, -1 for none.
        slice_shapes: {"inputs": [...], "output": ...}; shapes of the slices; the first rank's if they differ.
        layouts: {"inputs": [...], "output": ...}; the output's layout after the call.
        forward: collectives of the forward pass, in their order.
        backward: for each input the collectives that finish its gradient.
        backward_inside: collectives inside the op's backward, such as those of a softmax along a cut dim.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    sharding: Sharding
    tensor_maps: dict[str, Any]
    slice_shapes: dict[str, Any]
    layouts: dict[str, Any]
    forward: OpCollectives
    backward: tuple[OpCollectives, ...]
    backward_inside: OpCollectives

    @property
    def device_matrix(self) -> tuple[int, ...]:
        return self.sharding.mesh.shape

    @property
    def axis_names(self) -> tuple[str, ...]:
        """A name for each axis of the device matrix."""
        return self.sharding.mesh.axis_names

    def slices(self, rank: int) -> dict[str, Any]:
        """Return {"inputs": [...], "output": ...}: per tensor the rank's tuple of Python slices. Raises LayoutError."""
        inputs = [layout.slices(rank, shape) for layout, shape in zip(self.layouts["inputs"], self.shapes, strict=True)]
        return {"inputs": inputs, "output": self.layouts["output"].slices(rank, self.output_shape)}

    @property
    def total_bytes(self) -> int:
        """Bytes per rank of forward and backward together."""
        return self.forward.total_bytes + self.backward_inside.total_bytes + sum(b.total_bytes for b in self.backward)

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        rows = (
            (name, str(shape), str(tensor_map), str(layout.cuts), str(local))
            for name, layout, shape, tensor_map, local in self._tensors()
        )
        return [("tensor", "shape", "tensor map", "cuts", "slice"), *rows]

    def _tensors(self) -> list[tuple[Any, ...]]:
        """Return (name, layout, shape, tensor map, shape of the slice) of each input and of the output."""
        names = (*(f"input {i}" for i in range(len(self.shapes))), "output")
        layouts, maps, slices = (
            (*of["inputs"], of["output"]) for of in (self.layouts, self.tensor_maps, self.slice_shapes)
        )
        return list(zip(names, layouts, (*self.shapes, self.output_shape), maps, slices, strict=True))

    def _exchanges(self) -> list[tuple[str, str]]:
        lines = [("forward", str(exchange)) for exchange in self.forward] or [("forward", "nothing")]
        lines += [("inside backward", str(exchange)) for exchange in self.backward_inside]
        for i, exchanges in enumerate(self.backward):
            lines.append((f"gradient {i}", str(exchanges)))
        return lines

    # Shows the table in a terminal, as `_repr_html_` does in a notebook.
    def __repr__(self) -> str:
        exchanges = [f"{what + ':':<16} {text}" for what, text in self._exchanges()]
        return "\n  ".join([self._title(), *aligned(self._rows()), *exchanges])

    def _title(self) -> str:
        axes = " x ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.device_matrix, strict=True))
        return f"{self.op} on {self.sharding.mesh.size} devices, device matrix {self.device_matrix} ({axes})"

    def _repr_html_(self) -> str:
        exchanges = [("when", "what is communicated"), *self._exchanges()]
        return table(self._rows(), title=self._title(), left=True) + table(exchanges, left=True)

    def draw(self, ax: Any = None) -> Any:
        """Draw the slice of every tensor that each rank holds; replicated slices share a colour.

        Returns:
            The matplotlib Axes.
        """
        # Imported here, so that matplotlib is loaded only when it is needed.
        from simparallel.view import plot_slices

        return plot_slices([tensor[:3] for tensor in self._tensors()], title=self._title(), ax=ax)


class Input:
    """A stand-in for a plain tensor: only its shape and dtype."""

    placement = layout = None

    def __init__(self, spec: Spec) -> None:
        self.shape, self.dtype = spec.shape, spec.dtype


def explain_op(op: Op, shapes: Sequence[Sequence[int]], device_num: int | None, dtype: Any) -> OpPlan:
    """See `Op.plan`."""
    who = f"{op.name}.plan"
    specs = input_specs(who, shapes, dtype)
    # Layouts contain the number of devices; tuples of cuts do not.
    first = op.in_strategy[0] if op.in_strategy else None
    of_layouts = first.mesh.size if isinstance(first, Layout) else current().world_size
    return explain_call(OpCall(op, [Input(spec) for spec in specs], num_devices(who, device_num, of_layouts)))


def explain_call(call: OpCall) -> OpPlan:
    """Plan one call, without the redistributions of its inputs."""
    op, sharding, local = call.op, call.sharding, call.local
    target, shape = call.output.layout, call.made.shape
    finish = exchanges_of(
        plan_way(call.made, call.output, local.output.dtype.itemsize), local.output.dtype, "finish the sum"
    )
    # The first rank stands for all: no rank has larger slices.
    inside, inside_backward = _inside(op, call.plan_of(sharding.mesh.ranks[0]), sharding)
    fetch, give_back = _halo(call)
    gradients = []
    for i, spec in enumerate(local.inputs):
        # Integers have no gradient.
        if not _is_float(spec):
            gradients.append(OpCollectives())
            continue
        axes = sharding.gradient_axes(i)
        own = _reduction("sum", sharding.groups(axes), spec.size_bytes, SUM_OF_GRADIENT)
        # A gradient is complete only once the rows fetched by other ranks have returned, so they return before its sum.
        is_image = call.window_cut is not None and call.window_cut.input == i
        gradients.append(OpCollectives((*give_back, *own)) if is_image else own)
    if op.in_strategy and isinstance(op.in_strategy[0], Layout):
        maps = [layout.tensor_map for layout in sharding.input_layouts], target.tensor_map
    else:
        maps = [_map(sharding, tensor) for tensor in sharding.inputs], _output_map(sharding, target)
    return OpPlan(
        op=op.described,
        shapes=sharding.shapes,
        output_shape=shape,
        sharding=sharding,
        tensor_maps={"inputs": maps[0], "output": maps[1]},
        slice_shapes={"inputs": [spec.shape for spec in local.inputs], "output": target.local_shape(shape)},
        layouts={"inputs": list(sharding.input_layouts), "output": target},
        forward=OpCollectives((*fetch, *inside, *finish)),
        backward=tuple(gradients),
        backward_inside=inside_backward,
    )


def exchanges_of(plan: Redistribution, dtype: np.dtype, why: str) -> list[OpCollective]:
    """Return the collectives of a redistribution."""
    found = []
    for step in plan.steps:
        if step.kind != "slice":
            op = "sum" if step.kind in ("all_reduce", "reduce_scatter") else None
            found.append(OpCollective(step.kind, op, step.groups, max(step.received_bytes(dtype.itemsize)), why))
    return found


def _reduction(op: str, groups: tuple[Group, ...], size_bytes: int, why: str) -> OpCollectives:
    if len(groups[0]) == 1:
        return OpCollectives()
    # A ring receives as many bytes as it sends.
    share = price("direct", "all_reduce", len(groups[0]), 0).sent
    return OpCollectives([OpCollective("all_reduce", op, groups, round(share * size_bytes), why)])


def _halo(call: OpCall) -> tuple[OpCollectives, OpCollectives]:
    """Return the exchanges of slice borders before forward and after backward."""
    cut = call.window_cut
    if cut is None or not cut.halo.groups:
        return OpCollectives(), OpCollectives()
    halo, itemsize = cut.halo, call.local.inputs[cut.input].dtype.itemsize
    # In backward a rank receives as much as it sent in forward.
    fetched, returned = (max(counts.values()) * itemsize for counts in (halo.received, halo.given))
    return (
        OpCollectives([OpCollective("messages", None, halo.groups, fetched, "halo of the windows")]),
        OpCollectives([OpCollective("messages", "sum", halo.groups, returned, "gradient of the halo")]),
    )


def _map(sharding: Sharding, tensor: Iterable[Any]) -> tuple[Any, ...]:
    """Return MindSpore's tensor map of a tuple strategy: for each dim its axis counted from the right, cut or not."""
    names = sharding.mesh.axis_names
    found: list[Any] = []
    for place in tensor:
        # An axis of size 1 is listed, too: MindSpore's map has an axis for every named dim.
        axes = [len(names) - 1 - names.index(axis) for axis in map(axis_name, place.names) if axis in names]
        found.append(-1 if not axes else axes[0] if len(axes) == 1 else tuple(axes))
    return tuple(found)


def _output_map(sharding: Sharding, target: Layout) -> tuple[Any, ...]:
    # The tuple strategy's own map, unless an out_strategy has cut a dim further.
    plain = _map(sharding, sharding.output)
    made = sharding.output_layout.with_partial(())
    return plain if target.axes_by_dim == made.axes_by_dim else target.tensor_map or ()


# --- exchanges inside an op --------------------------------------------------------------------------------


class Rehearsal(Context):
    """A context that records an op's exchanges on zeros; their sizes equal those of a real run."""

    def __init__(self, needs: tuple[bool, ...], plan: Plan, sharding: Sharding) -> None:
        super().__init__(kernels_of[np], needs, plan)
        self.sharding = sharding
        self.noted: list[Asked] = []

    def _note(self, dims: str, x: Array, reduce_op: str, group_size: int | None = None) -> Array:
        self.noted.append(Asked(dims, reduce_op, np.shape(x), x.dtype, group_size))
        return x

    def sum_over(self, dims: str, x: Array, group_size: int | None = None) -> Array:
        return self._note(dims, x, "sum", group_size)

    def max_over(self, dims: str, x: Array) -> Array:
        return self._note(dims, x, "max")

    def min_over(self, dims: str, x: Array) -> Array:
        return self._note(dims, x, "min")

    def size(self, dim: str) -> int:
        return self.sharding.sizes[dim]

    def part(self, dim: str) -> tuple[int, int]:
        return 0, self.sharding.cut(dim)


def rehearse(op: Op, local: Plan, sharding: Sharding, zeros: Callable[..., Array] = np.zeros) -> Exchanges:
    """Return the op's exchanges, recorded in a run on a slice of zeros; `zeros` makes arrays of a shape and dtype."""
    ctx = Rehearsal(tuple(map(_is_float, local.inputs)), local, sharding)
    # Many ops divide by zero here; only sizes matter.
    with np.errstate(all="ignore"):
        y = op.forward(ctx, *(zeros(spec.shape, spec.dtype) for spec in local.inputs))
        forward, ctx.noted = tuple(ctx.noted), []
        # The exchanges of forward and backward are listed separately.
        if _has_gradients(local):
            op.backward(ctx, zeros(np.shape(y), local.output.dtype))
    return Exchanges(forward, tuple(ctx.noted))


def asked_inside(op: Op, local: Plan, sharding: Sharding, zeros: Callable[..., Array] = np.zeros) -> Exchanges:
    """Return the exchanges that complete cut dims inside forward and inside backward.

    An op that does not declare them is run on zeros, if its rule has dims that it completes.
    """
    places = [place for tensor in sharding.inputs for place in tensor]
    # An op can exchange only along completed dims and along cut inner parts of merged dims.
    asks = any(place.kind == "completed" for place in places) or any(
        sharding.cut(name) > 1 for place in places for name in place.names[1:]
    )
    if not asks or not sharding.cuts:
        return Exchanges()
    # A rehearsal takes as long as the op, so first ask for declared exchanges.
    asking = op.exchanges(local) or rehearse(op, local, sharding, zeros)
    return asking if _has_gradients(local) else Exchanges(asking.forward)


def _inside(op: Op, local: Plan, sharding: Sharding) -> tuple[OpCollectives, OpCollectives]:
    """Return the collectives of `asked_inside`."""
    asking = asked_inside(op, local, sharding)

    def exchanges(asked: Iterable[Asked]) -> OpCollectives:
        return OpCollectives(
            exchange
            for a in asked
            for exchange in _reduction(
                a.reduce_op, sharding.groups(sharding.axes(a.dims), a.group_size), a.size_bytes, f"complete {a.dims}"
            )
        )

    return exchanges(asking.forward), exchanges(asking.backward)


def _is_float(spec: Spec) -> bool:
    return spec.dtype.kind in "fc"


def _has_gradients(plan: Plan) -> bool:
    return _is_float(plan.output) and any(map(_is_float, plan.inputs))


# --- arguments ------------------------------------------------------------------------------------------


def input_specs(who: str, shapes: Sequence[Any], dtype: Any) -> list[Spec]:
    """Return a Spec for each input.

    Args:
        who: name of the caller, for messages.
        shapes: shapes of the inputs.
        dtype: dtype of all inputs, or a list or tuple with one dtype for each.

    Raises:
        InputError: a shape is not a sequence of sizes, a dtype is invalid, or the numbers of dtypes and shapes differ.
    """
    dtypes = list(dtype) if isinstance(dtype, (list, tuple)) else [dtype] * len(shapes)
    if len(dtypes) != len(shapes):
        raise InputError(f"{who}: dtype={dtype!r} has {len(dtypes)} entries for {len(shapes)} inputs.")
    return [
        Spec(_shape(who, i, shape), _dtype(who, i, d)) for i, (shape, d) in enumerate(zip(shapes, dtypes, strict=True))
    ]


def num_devices(who: str, device_num: Any, default: int) -> int:
    """Return `device_num` as an int; `default` for None. Raises InputError unless it is an integer of 1 or more."""
    return default if device_num is None else check_integer(who, "device_num", device_num, 1)


def _shape(who: str, i: int, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or not all(is_integer(size) and size >= 0 for size in shape):
        raise InputError(f"{who}: the shape of input {i} is {shape!r}, expected a tuple of sizes such as (32, 64).")
    return tuple(map(int, shape))


def _dtype(who: str, i: int, dtype: Any) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise InputError(f"{who}: dtype of input {i} is {dtype!r}, expected a dtype such as 'float32'.") from None
