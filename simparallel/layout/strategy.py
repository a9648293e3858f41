"""Strategies: cuts of the named dims of an op, from a user's statement or from the layouts of its inputs.

There are three forms; each becomes a `Sharding`:

    ((2, 4), (4, 1))                    cuts per dim of every input; the devices form a matrix with an
                                        axis for each named dim of the op, in the order of its rule,
                                        and one axis for left-over devices, which repeat slices
    (layout("mp", "sp"), layout(...))   axes of a mesh per dim of every input
    nothing                             follow the layouts of the inputs, or cut the first dim

The order of checks and the position of the repeat axis are MindSpore's: last, so that neighbours
hold the same slices; first for the look-up of table rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import gcd, prod
from typing import Any

from simparallel.errors import LayoutError, StrategyError
from simparallel.layout import suggest
from simparallel.layout.layout import Layout, divides
from simparallel.layout.mesh import is_int, plain_cuts, shared_mesh
from simparallel.layout.rule import Place, Shape, input_names, places
from simparallel.layout.sharding import Sharding, spread

REPEAT = "repeat"
# For each input a tuple of cuts, or a called Layout.
Strategy = tuple[Any, ...]


def from_strategy(
    rule: str,
    shapes: tuple[Shape, ...],
    strategy: Strategy,
    device_num: int,
    repeat: str = "right",
    order: tuple[str, ...] = (),
    out_strategy: Any = None,
) -> Sharding:
    """Return the Sharding for a user's strategy.

    Args:
        rule: text of the op's rule for these shapes.
        shapes: global shapes of the inputs.
        strategy: for each input a tuple with one cut per dim, or a called Layout.
        device_num: number of devices.
        repeat: position of the repeat axis: "right" (neighbours hold the same slices) or "left".
        order: named dims that come last in the device matrix, in this order; others keep the order of the rule.
        out_strategy: tuple of cuts or Layout of the output; only its entries for dims that no input has are used.

    Raises:
        StrategyError: it is malformed or not legal; the error states the broken rule and the nearest legal strategies.
    """
    if not isinstance(strategy, tuple):
        raise StrategyError(f"a strategy is a tuple with an entry for each input, got {strategy!r}.")
    if len(strategy) != len(shapes):
        raise StrategyError(
            f"one strategy per input: got {len(strategy)}, the op has {len(shapes)} input{'s' * (len(shapes) > 1)}."
        )
    is_layouts = all(isinstance(entry, Layout) for entry in strategy)
    if not is_layouts and any(isinstance(entry, Layout) for entry in strategy):
        raise StrategyError("all entries of a strategy are tuples of cuts, or all are Layouts; do not mix them.")

    # Suggestions are tested by reading them, so that an error never names a strategy that is refused in turn.
    def read(entries: Strategy) -> Sharding:
        if is_layouts:
            return _from_layouts(rule, shapes, entries, out_entry(out_strategy))
        return from_tuples(rule, shapes, entries, device_num, repeat, order, out_entry(out_strategy))

    def is_legal(entries: Strategy) -> bool:
        try:
            read(entries)
        except StrategyError:
            return False
        return True

    if is_layouts:
        _check_layouts(strategy, shapes, device_num)
    else:
        _check_lengths(strategy, shapes)
    try:
        return read(strategy)
    except StrategyError as error:
        legal = (
            suggest.layouts(places(rule, shapes)[0], strategy, is_legal)
            if is_layouts
            else suggest.tuples(rule, shapes, strategy, device_num, is_legal)
        )
        raise StrategyError(str(error), nearest=legal) from None


def from_tuples(
    rule: str,
    shapes: tuple[Shape, ...],
    strategy: Sequence[tuple[int, ...]],
    device_num: int,
    repeat: str,
    order: tuple[str, ...],
    out: Any,
) -> Sharding:
    """Return the Sharding for tuples of cuts, as `from_strategy`, but without suggestions in errors."""
    _check_tuples(strategy, shapes, device_num)
    cuts, problem = _cuts_by_name(rule, shapes, strategy)
    if problem:
        raise StrategyError(problem)
    # A stable sort: names that `order` lacks come first and stay in the order of the rule.
    names = [name for name in input_names(rule, shapes) if name in cuts]
    names.sort(key=lambda name: order.index(name) if name in order else -1)
    new = _new_dims(rule, shapes)
    if isinstance(out, tuple) and len(out) == len(new) and all(is_int(cut) and cut > 0 for cut in out):
        made = {
            n: part
            for cut, (place, own) in zip(out, new, strict=True)
            for n, part in _factors(place, cut).items()
            if n in own
        }
        # With new dims, the axes follow the order of the output.
        if made:
            cuts |= made
            all_names = [n for place, _ in new for n in place.names]
            names = sorted([*names, *made], key=lambda name: all_names.index(name) if name in all_names else -1)
    # The order of this dict is the order of the device matrix.
    cuts = {name: cuts[name] for name in names}
    count = prod(cuts.values())
    if count > device_num or device_num % count:
        raise StrategyError(
            f"needs {count} devices (cuts {_listed(cuts)}), but there are {device_num}; the product must divide that "
            "number."
        )
    sizes, axes = tuple(cuts.values()), tuple(map(axis_name, cuts))
    if count < device_num:
        rest = device_num // count
        right = repeat == "right"
        sizes = (*sizes, rest) if right else (rest, *sizes)
        axes = (*axes, REPEAT) if right else (REPEAT, *axes)
    # An uncut dim still has an axis, of size 1, as in MindSpore's device matrix; it owns no cut.
    owners = {name: (axis_name(name),) for name, cut in cuts.items() if cut > 1}
    return Sharding(rule, shapes, shared_mesh(sizes, axes), owners)


def layout_of_cuts(
    cuts: tuple[int, ...], device_num: int, repeat: str = "right", *, shape: Shape | None = None
) -> Layout:
    """Return the layout of a tensor by a tuple of cuts: axis "d0" cuts dim 0, …; left-over devices repeat slices.

    Args:
        cuts: number of slices of each dim.
        device_num: number of devices.
        repeat: position of the axis "repeat": "right" (neighbours hold the same slice) or "left".
        shape: global shape to check the cuts against.

    Raises:
        StrategyError: a cut is below 1, does not divide its dim, or is not a power of 2 though `device_num` is one; the
            numbers of cuts and dims differ; or the product of the cuts does not divide `device_num`.

    Example:
        >>> from simparallel.layout.strategy import layout_of_cuts
        >>> layout_of_cuts((2, 4), 16)
        Layout((2, 4, 2), ('d0', 'd1', 'repeat'))('d0', 'd1')
    """
    cuts = plain_cuts(cuts)
    names, shapes = " ".join(f"d{i}" for i in range(len(cuts))), (cuts if shape is None else shape,)
    try:
        _check_lengths((cuts,), shapes)
        return from_tuples(f"{names} -> {names}", shapes, (cuts,), device_num, repeat, (), None).output_layout
    except StrategyError as error:
        raise StrategyError(f"strategy {cuts!r} on {device_num} devices: {error}") from None


def out_entry(out_strategy: Any) -> Any:
    """Return the tuple of cuts or the Layout of the output, unpacked from a tuple of one."""
    is_nested = isinstance(out_strategy, tuple) and len(out_strategy) == 1 and not is_int(out_strategy[0])
    return out_strategy[0] if is_nested else out_strategy


def _new_dims(rule: str, shapes: tuple[Shape, ...]) -> list[tuple[Place, set[str]]]:
    """Return each dim of the output with the set of its names that no input has."""
    inputs, output = places(rule, shapes)
    known = {name for tensor in inputs for place in tensor for name in place.names}
    return [(place, set(place.names) - known) for place in output]


def check_form(op: str, in_strategy: Any, out_strategy: Any) -> tuple[Strategy, Any]:
    """Return both with cuts as plain integers. Raise StrategyError unless they are tuples or Layouts."""
    if not isinstance(in_strategy, tuple) or not all(isinstance(entry, (tuple, Layout)) for entry in in_strategy):
        raise StrategyError(
            f"{op}.shard: in_strategy={in_strategy!r} must be a tuple with an entry for each input, each a tuple of "
            "cuts or a Layout, such as ((2, 4), (4, 1)); for one input ((4, 1),)."
        )
    if out_strategy is not None and not isinstance(out_strategy, (tuple, Layout)):
        raise StrategyError(f"{op}.shard: out_strategy={out_strategy!r} must be a tuple of cuts or a Layout.")
    return plain_cuts(in_strategy), plain_cuts(out_strategy)


def out_layout(out_strategy: Any, made: Layout, shape: Shape, who: str) -> Layout:
    """Return the layout of the finished output: the slices of `made`, or one dim cut further by axes of its sum.

    Args:
        out_strategy: a tuple of cuts, a Layout, or a tuple with one of these.
        made: layout of the output after forward.
        shape: global shape of the output.
        who: the op, for messages.

    Raises:
        StrategyError: `out_strategy` is none of these layouts, or does not divide the shape.
    """
    given = out_entry(out_strategy)
    whole = made.with_partial(())
    # All legal layouts: the present slices, or any axes of the sum, in any order, cutting one dim further.
    choices = [whole]
    for count in range(1, len(made.partial) + 1):
        for axes in permutations(made.partial, count):
            for dim in range(len(shape)):
                dims = [(*own, *axes) if d == dim else own for d, own in enumerate(made.axes_by_dim)]
                choices.append(whole(*(own or "None" for own in dims)))
    for layout in choices:
        if isinstance(given, Layout):
            fits = given.mesh == layout.mesh and given.axes_by_dim == layout.axes_by_dim
        else:
            fits = layout.cuts == given
        if fits:
            try:
                layout.check_divides(shape)
            except LayoutError as error:
                raise StrategyError(f"{who}: out_strategy {given!r}: {error}") from None
            return layout
    choices = [layout for layout in choices if divides(layout.cuts, shape)]
    if isinstance(given, Layout):
        legal = f"legal: {suggest.format_strategies((layout,) for layout in choices)}"
    else:
        legal = f"legal cuts: {', '.join(dict.fromkeys(str(layout.cuts) for layout in choices))}"
    raise StrategyError(
        f"{who}: out_strategy {given!r} cannot complete this output, which is laid out as {made!r}; {legal}."
    )


def axis_name(dim: str) -> str:
    """Return the name of the axis that a tuple strategy makes for a named dim."""
    # Leading dims, such as "...0", are mostly batch dims: axis "b0".
    return dim.replace("...", "b")


def default(rule: str, shapes: tuple[Shape, ...], device_num: int) -> Sharding:
    """Return the default strategy of an op in semi-automatic mode: cut the first dim as often as it divides.

    The dim is dim 0 of the first input where a cut is legal, preferably one that stays in the output. It is cut into
    gcd(size, devices) slices, and so are all other inputs with the same named dim. Left-over devices repeat slices.
    """
    inputs, output = places(rule, shapes)
    kept = {name for place in output for name in place.names}
    firsts = [tensor for tensor in inputs if tensor and tensor[0].names]
    # A dim that stays in the output needs no sum after it, so try these dims first.
    for tensor in sorted(firsts, key=lambda tensor: tensor[0].names[0] not in kept):
        # The largest cut that divides both.
        cut = gcd(tensor[0].sizes[0], device_num)
        if cut == 1:
            continue
        name, rest = tensor[0].names[0], device_num // cut
        axis = axis_name(name)
        mesh = shared_mesh((cut, rest), (axis, REPEAT)) if rest > 1 else shared_mesh((cut,), (axis,))
        try:
            return Sharding(rule, shapes, mesh, {name: (axis,)})
        except StrategyError:
            continue
    return whole(rule, shapes, device_num)


def whole(rule: str, shapes: tuple[Shape, ...], device_num: int) -> Sharding:
    """Return a Sharding without cuts: every device computes everything."""
    return Sharding(rule, shapes, shared_mesh((device_num,), (REPEAT,)), {})


def follow(rule: str, shapes: tuple[Shape, ...], layouts: Sequence[Layout | None]) -> Sharding:
    """Return a Sharding that keeps the layouts of the inputs as far as the rule allows.

    The largest cut input determines the mesh, and its cuts come first; then the cuts of the next largest,
    for dims and axes that are still free. None stands for an input that is whole on every device.
    """
    order = sorted(range(len(shapes)), key=lambda i: -prod(shapes[i]))
    cut_inputs = [i for i in order if (layout := layouts[i]) is not None and any(cut > 1 for cut in layout.cuts)]
    # A cut input gives the mesh; if there is none, any sharded one.
    first = next((layouts[i] for i in (*cut_inputs, *order) if layouts[i] is not None), None)
    assert first is not None
    mesh = first.mesh
    # Inputs on another mesh, and dims whose cut conflicts with an earlier one, are redistributed before the op runs.
    cuts: dict[str, tuple[str, ...]] = {}
    tensors = places(rule, shapes)[0]
    for i in cut_inputs:
        layout = layouts[i]
        assert layout is not None
        if layout.mesh != mesh:
            continue
        for place, axes in zip(tensors[i], layout.axes_by_dim, strict=True):
            wanted = spread(place, axes, mesh) if axes and place.names else None
            if not wanted or any(name in cuts for name in wanted):
                continue
            if any(axis in taken for axis in axes for taken in cuts.values()):
                continue
            try:
                Sharding(rule, shapes, mesh, cuts | wanted)
            except StrategyError:
                # This dim may not be cut: the input will be gathered along it.
                continue
            cuts |= wanted
    return Sharding(rule, shapes, mesh, cuts)


# --- tuples of cuts -------------------------------------------------------------------------------------


def _check_lengths(strategy: Strategy, shapes: tuple[Shape, ...]) -> None:
    for i, (cuts, shape) in enumerate(zip(strategy, shapes, strict=True)):
        if not isinstance(cuts, tuple):
            raise StrategyError(f"the strategy of input {i} is a tuple with one cut per dim, got {cuts!r}.")
        if len(cuts) != len(shape):
            raise StrategyError(f"strategy {cuts!r} has {len(cuts)} entries, input {i} has {len(shape)} dims.")
        for dim, cut in enumerate(cuts):
            if not is_int(cut) or cut < 1:
                raise StrategyError(f"cut {cut!r} of dim {dim} of input {i} must be an integer of 1 or more.")


def _check_tuples(strategy: Sequence[Sequence[int]], shapes: tuple[Shape, ...], device_num: int) -> None:
    """Run the checks that need no rule, in MindSpore's order."""
    for i, (cuts, shape) in enumerate(zip(strategy, shapes, strict=True)):
        for dim, (cut, size) in enumerate(zip(cuts, shape, strict=True)):
            # 0 % cut is 0, so an empty dim needs a test of its own.
            if size % cut or (cut > 1 and not size):
                raise StrategyError(f"dim {dim} of input {i} is {size}, not divisible by {cut}.")
            # On a power of 2 of devices every cut is one; n & (n - 1) is 0 for powers of 2 alone.
            if device_num & (device_num - 1) == 0 and cut & (cut - 1):
                raise StrategyError(f"cut {cut} of dim {dim} of input {i} is not a power of 2 on {device_num} devices.")


def _cuts_by_name(
    rule: str, shapes: tuple[Shape, ...], strategy: Sequence[Sequence[int]]
) -> tuple[dict[str, int], str]:
    """Return the cut of each named dim of the inputs, in order; and the message of the first error, "" for none."""
    # Only the first problem is reported, in the order of inputs and dims.
    cuts: dict[str, int] = {}
    seen: dict[str, tuple[int, int]] = {}
    problem = ""
    for i, (tensor, entry) in enumerate(zip(places(rule, shapes)[0], strategy, strict=True)):
        for d, (place, cut) in enumerate(zip(tensor, entry, strict=True)):
            if not place.names and cut > 1:
                problem = (
                    problem or f"dim {d} of input {i} is broadcast or of a fixed size and may not be cut, got {cut}."
                )
            # The first tensor that has a dim decides; `seen` remembers it for the message.
            for name, part in _factors(place, cut).items():
                if name not in cuts:
                    cuts[name], seen[name] = part, (i, d)
                elif cuts[name] != part and not problem:
                    other, at = seen[name]
                    problem = (
                        f"dim {name!r} is cut {cuts[name]} in input {other} (strategy {tuple(strategy[other])}, "
                        f"dim {at}) but {part} in input {i} (strategy {tuple(entry)}, dim {d}). Make them equal."
                    )
            if place.names and prod(_factors(place, cut).values()) != cut:
                problem = problem or (
                    f"dim {d} of input {i} merges dims of sizes {place.sizes}; cut {cut} does not cut them "
                    "one after the other, the first being outermost."
                )
    return cuts, problem


def _factors(place: Place, cut: int) -> dict[str, int]:
    """Split the cut of a dim into cuts of its factors; the outermost takes as much as it can."""
    found, left, whole = {}, cut, True
    # An inner factor may be cut only where the outer ones are cut into single elements (see `Sharding`).
    for name, size in zip(place.names, place.sizes, strict=True):
        part = gcd(size, left) if whole else 1
        found[name], left, whole = part, left // part, whole and part == size
    return found


def _listed(cuts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {cut}" for name, cut in cuts.items() if cut > 1)


# --- layouts ----------------------------------------------------------------------------------------------


def _check_layouts(layouts: Sequence[Layout], shapes: tuple[Shape, ...], device_num: int) -> None:
    """Run the checks that need no rule, for errors that no choice of axes would repair."""
    first = layouts[0]
    for i, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
        if (layout.device_matrix, layout.alias_name, layout.rank_list) != (
            first.device_matrix,
            first.alias_name,
            first.rank_list,
        ):
            raise StrategyError(
                f"all inputs of an op use one device matrix: input 0 has {first!r}, input {i} has {layout!r}."
            )
        if layout.tensor_map is None:
            raise StrategyError(f"input {i}: {layout!r} has no dims yet: call it with an alias or 'None' for each dim.")
        if len(layout.tensor_map) != len(shape):
            raise StrategyError(
                f"input {i}: {layout!r} lays out {len(layout.tensor_map)} dims, the tensor has shape {shape}."
            )
    if first.mesh.size != device_num:
        raise StrategyError(f"{first!r} has {first.mesh.size} devices, but there are {device_num}.")


def _from_layouts(rule: str, shapes: tuple[Shape, ...], layouts: Sequence[Layout], out: Any) -> Sharding:
    """Return the Sharding for Layouts of one device matrix: axes per dim of every input."""
    for i, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
        if layout.partial:
            raise StrategyError(f"input {i}: {layout!r} is an unfinished sum; an op takes whole values.")
        try:
            layout.check_divides(shape)
        except LayoutError as error:
            raise StrategyError(f"input {i}: {error}") from None
    mesh = layouts[0].mesh
    cuts: dict[str, tuple[str, ...]] = {}
    seen: dict[str, tuple[int, int]] = {}
    for i, (tensor, layout) in enumerate(zip(places(rule, shapes)[0], layouts, strict=True)):
        for d, (place, names) in enumerate(zip(tensor, layout.axes_by_dim, strict=True)):
            axes = tuple(axis for axis in names if axis in mesh.axis_names)
            wanted = spread(place, axes, mesh)
            if wanted is None:
                raise StrategyError(
                    f"dim {d} of input {i} (sizes {place.sizes or (place.size,)}) cannot be cut by {axes!r}: it is "
                    "broadcast, of a fixed size, or merges dims that these axes do not cut one after the other."
                )
            # An input that leaves the dim whole counts as well: it contradicts one that cuts it.
            for name in place.names:
                own = wanted.get(name, ())
                if name in seen and cuts.get(name, ()) != own:
                    other, at = seen[name]
                    raise StrategyError(
                        f"dim {name!r} is cut by {cuts.get(name, ())!r} in input {other} (dim {at}) but by {own!r} in "
                        f"input {i} (dim {d}); both need the same axes in the same order."
                    )
                seen.setdefault(name, (i, d))
                if own:
                    cuts[name] = own
    new = _new_dims(rule, shapes)
    if isinstance(out, Layout) and out.tensor_map is not None and len(out.tensor_map) == len(new):
        for (place, own_names), axes in zip(new, out.axes_by_dim, strict=True):
            wanted = spread(place, axes, mesh) if own_names and out.mesh == mesh else None
            cuts |= {name: own for name, own in (wanted or {}).items() if name in own_names}
    return Sharding(rule, shapes, mesh, cuts)
