"""Make sharded tensors and modules from whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_tensor
from simparallel.comm import current
from simparallel.errors import LayoutError, StrategyError
from simparallel.layout.layout import Layout
from simparallel.layout.sharding import placement
from simparallel.layout.strategy import layout_of_cuts, out_entry
from simparallel.nn import Module
from simparallel.parallel.ddp.same_model import check_may_be_cut
from simparallel.parallel.operator.interpreter import SHARDED, move_tensor, relabelled, shard_parameter, sharder


def distribute_tensor(x: Any, layout: Layout, requires_grad: bool | None = None) -> Tensor:
    """Make a sharded tensor from one that every rank holds whole: a new leaf with a copy of this rank's slice.

    Args:
        x: array or plain Tensor, the same on every rank.
        layout: a called Layout; ranks that it leaves out hold nothing. If a cut does not divide a size,
            the last slices are shorter or empty, see `Layout.local_shape`.
        requires_grad: collect a gradient for it; None copies the setting of x.

    Raises:
        LayoutError: the layout does not fit, has ranks that are not in the run, or x is sharded already.

    Collective: no.

    Example:
        >>> x = sp.distribute_tensor([[1.0, 2.0]], sp.Layout((1,), ("dp",))("dp", "None"))
        >>> x.shape, x.layout
        ((1, 2), Layout((1,), ('dp',))('None', 'None'))
    """
    whole = as_tensor(x)
    if whole.placement is not None:
        raise LayoutError(f"distribute_tensor: x is sharded as {whole.layout!r}; use x.redistribute(layout).")
    if layout.partial:
        raise LayoutError(f"distribute_tensor: {layout!r} is partial; a complete value is never split into addends.")
    target = placement(layout, whole.shape)
    # A copy, so that the whole array can be freed.
    data = SHARDED.slice_of(whole.data, target)
    y = Tensor._result(data, placement=target, interpreter=SHARDED)
    return y.requires_grad_(whole.requires_grad if requires_grad is None else requires_grad)


def from_local(x: Any, layout: Layout, shape: Sequence[int] | None = None) -> Tensor:
    """Make a sharded tensor from the slices that the ranks pass: the differentiable inverse of `Tensor.to_local`.

    Args:
        x: array or plain Tensor; its memory is used.
        layout: a called Layout over all ranks of the run. Along an axis that cuts no dim the ranks must pass equal
            slices (this is not checked); along a partial axis they pass addends.
        shape: the global shape; by default the sizes of x times the layout's cuts, which is right for slices of equal
            size. Give it for uneven slices: rank r then passes a slice of shape `layout.local_shape(shape, r)`.

    Returns:
        A Tensor of the global shape. Its gradient flows back to x slice by slice: ranks that pass equal slices each
        get the whole gradient of the slice.

    Raises:
        LayoutError: the layout has another number of dims or other ranks, x is sharded already, or it is not this
            rank's slice of a tensor of `shape`.

    Collective: no.

    Example:
        >>> x = sp.from_local([[1.0, 2.0]], sp.Layout((1,), ("dp",))("dp", "None"))
        >>> (x * 2).to_local().numpy().tolist()
        [[2.0, 4.0]]
    """
    local, own = as_tensor(x), sharder()
    if local.placement is not None:
        raise LayoutError(f"from_local: x is sharded as {local.layout!r}; use x.redistribute(layout).")
    if len(layout.cuts) != local.ndim:
        raise LayoutError(f"from_local: {layout!r} lays out {len(layout.cuts)} dims, x has shape {local.shape}.")
    if set(layout.mesh.ranks) != set(range(own.world_size)):
        raise LayoutError(
            f"from_local: {layout!r} has ranks {list(layout.mesh.ranks)}, the run has 0 … {own.world_size - 1}; every "
            "rank gives a slice. Give a layout over all ranks, then move the result by redistribute() to this one."
        )
    if shape is None:
        shape = [size * cut for size, cut in zip(local.shape, layout.cuts, strict=True)]
    place = placement(layout, tuple(shape))
    # Each rank checks its own slice: a comparison between the ranks would be a collective.
    if local.shape != place.local_shapes[own.rank]:
        raise LayoutError(
            f"from_local: of shape {place.shape} rank {own.rank} holds a slice of shape {place.local_shapes[own.rank]} "
            f"by {layout!r}, x has shape {local.shape}."
        )
    return relabelled(local, place, None)


def shard(
    fn: Callable[..., Any], in_strategy: tuple[Any, ...], out_strategy: tuple[Any, ...] | Layout | None = None
) -> Callable[..., Any]:
    """Wrap a function so that its arguments get the layouts of a strategy; the ops inside follow them.

    Args:
        fn: takes Tensors, returns a Tensor or a tuple of Tensors.
        in_strategy: for each positional argument a tuple of cuts, a called Layout, or None to leave the argument
            unchanged. Plain tensors and arrays are sharded, sharded tensors are redistributed.
        out_strategy: a tuple of cuts or a Layout for the result, or a tuple with one for each result. By default the
            result keeps its layout.

    Raises:
        StrategyError: (when called) a strategy does not fit its argument.

    Collective: yes, if data moves.

    Example:
        >>> square = sp.shard(lambda x: x * x, ((1,),))
        >>> square([3.0]).full_tensor().numpy().tolist()
        [9.0]
    """

    def sharded(*args: Any, **kwargs: Any) -> Any:
        if len(args) != len(in_strategy):
            raise StrategyError(f"shard: in_strategy has {len(in_strategy)} entries, the call {len(args)} arguments.")
        # Nothing else is needed: without a strategy, an op follows the layouts of its inputs.
        laid = [_lay(arg, entry, f"argument {i}") for i, (arg, entry) in enumerate(zip(args, in_strategy, strict=True))]
        result = fn(*laid, **kwargs)
        if out_strategy is None:
            return result
        if isinstance(result, tuple):
            entries = out_strategy if isinstance(out_strategy, tuple) else (out_strategy,) * len(result)
            return tuple(
                _lay(x, entry, f"result {i}") for i, (x, entry) in enumerate(zip(result, entries, strict=True))
            )
        # ((2, 1),) holds one entry, for the single result; (2, 1) is the entry itself.
        return _lay(result, out_entry(out_strategy), "the result")

    return sharded


def _lay(x: Any, entry: Any, what: str) -> Any:
    """Return x in the layout that an entry of a strategy gives."""
    if entry is None:
        return x
    value = as_tensor(x)
    try:
        layout = entry if isinstance(entry, Layout) else layout_of_cuts(entry, current().world_size, shape=value.shape)
    except LayoutError as error:
        raise StrategyError(f"shard: {what}: {error}") from None
    if value.placement is not None:
        return value.redistribute(layout)
    # A constant becomes a new leaf, a parameter keeps its identity, any other tensor is redistributed.
    if not value.requires_grad:
        return distribute_tensor(value, layout)
    place = placement(layout, value.shape)
    return shard_parameter(value, place) if value.is_leaf else move_tensor(value, place, place.uncut)


def distribute_module(
    module: Module, layout: Layout, cuts: Mapping[str, tuple[Any, ...]] | Callable[[str, Tensor], Any] | None = None
) -> Module:
    """Shard the parameters and buffers of a module, in place.

    Parameters that were created inside `no_init_parameters()` are drawn slice by slice.

    Args:
        module: the model, the same on every rank.
        layout: the axes of the devices, not yet called.
        cuts: for each name (wildcards as in file names) the arguments of the layout, such as
            {"*.up.weight": ("tp", "None")}; the first match counts. Or a function of name and tensor that returns
            these arguments, or None. Tensors without a match are replicated.

    Returns:
        The module.

    Raises:
        LayoutError: a cut does not fit, or a name matches no parameter or buffer; nothing is changed then.
        InputError: a DistributedDataParallel reduces the gradient of a parameter that is to be sharded.

    Collective: no.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    patterns = {} if cuts is None or callable(cuts) else dict(cuts)
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name, _ in tensors)]
    if unmatched:
        names = ", ".join(name for name, _ in tensors)
        raise LayoutError(
            f"distribute_module: {unmatched[0]!r} matches no parameter or buffer; the module has {names}."
        )
    # Compute and check all placements first, so that an error changes nothing.
    places = []
    for name, x in tensors:
        if callable(cuts):
            dims = cuts(name, x)
        else:
            dims = next((dims for pattern, dims in patterns.items() if fnmatchcase(name, pattern)), None)
        places.append(placement(layout(*(dims or ["None"] * x.ndim)), x.shape))
        check_may_be_cut(x, places[-1], current().world_size)
    for (_, x), place in zip(tensors, places, strict=True):
        shard_parameter(x, place)
    return module
