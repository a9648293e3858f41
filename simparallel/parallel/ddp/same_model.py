"""Check that ranks that share work have the same tensors, and hold the same parts of them."""

from __future__ import annotations

from collections.abc import Iterable

from simparallel.autograd import Tensor
from simparallel.comm import Communicator, Group
from simparallel.errors import CollectiveMismatchError, InputError
from simparallel.layout.sharding import Placement
from simparallel.nn.hooks import is_reduced

Held = tuple[tuple[tuple[int, int], ...], ...] | None


def check_same_tensors(
    who: str,
    tensors: Iterable[tuple[str, Tensor, str]],
    communicator: Communicator,
    group: Group | None,
    setting: str,
    number: int = 0,
) -> int:
    """Compare the ranks' tensors, so that averages and broadcasts pair the right ones.

    Args:
        who: name of the caller, for messages.
        tensors: name, tensor and role ("trained", …) of each.
        communicator: of this rank.
        group: ranks that share the work; None for all.
        setting: name of the argument of `who` that chooses these ranks.
        number: an integer of this rank, such as a count of its models.

    Returns:
        The largest `number` among these ranks.

    Raises:
        CollectiveMismatchError: names, shapes, dtypes or roles differ.
        InputError: the ranks hold different slices of a sharded tensor.

    Collective: yes.
    """
    listed = list(tensors)
    own = tuple((name, x.shape, str(x.dtype), role) for name, x, role in listed)
    parts = tuple(_held(x, communicator.rank) for _, x, _ in listed)
    # One exchange compares everything. Every rank gets all lists, so all ranks raise the same error.
    gathered = communicator.all_gather_object((own, parts, number), group)
    share = group or communicator.world
    first, first_parts, _ = gathered[0]
    # Ranks may have made different numbers of models before; no rank has used a number above the largest.
    largest: int = max(number for _, _, number in gathered)
    for rank, (other, _, _) in zip(share.ranks, gathered, strict=True):
        if other != first:
            differing = [f"{a} vs {b}" for a, b in zip(first, other, strict=False) if a != b][:3]
            counts = f"{len(first)} and {len(other)} parameters and buffers"
            raise CollectiveMismatchError(
                f"{who}: the models of rank {share.ranks[0]} and rank {rank} differ: {counts}; first differences: "
                f"{'; '.join(differing) or 'only the count'}. Build the same model on every rank.",
                group=share.name,
                seq=0,
                calls={},
            )
    # Held slices -> the ranks that hold them.
    equal: dict[tuple[Held, ...], list[int]] = {}
    for rank, (_, held, _) in zip(share.ranks, gathered, strict=True):
        equal.setdefault(held, []).append(rank)
    if len(equal) == 1:
        return largest
    other = next(held for held in equal if held != first_parts)
    number = next(i for i, (a, b) in enumerate(zip(first_parts, other, strict=True)) if a != b)
    groups = [ranks for ranks in equal.values() if len(ranks) > 1]
    # A group can help only if at least two ranks hold equal slices.
    advice = (
        f"Give {setting}= a group of ranks that hold equal slices: {' or '.join(map(str, groups))}."
        if groups
        else "No two ranks hold equal slices, so there is nothing to share: use the model as it is."
    )
    raise InputError(
        f"{who}: {first[number][0]} of shape {first[number][1]} is sharded: rank {share.ranks[0]} holds "
        f"{_text(first_parts[number])}, rank {equal[other][0]} {_text(other[number])}. The weights or gradients of "
        f"one rank say nothing about the other's, and ops on sharded tensors sum their gradients themselves. {advice}"
    )


def check_may_be_cut(x: Tensor, target: Placement, world_size: int) -> None:
    """Check that no wrapper reduces the whole gradient of a parameter that is about to be sharded.

    Raises:
        InputError: it belongs to a DistributedDataParallel, and `target` does not keep it whole on every rank.
    """
    if is_reduced(x) and not (target.is_whole and target.layout.mesh.size == world_size):
        raise InputError(
            f"a parameter of shape {x.shape} would be sharded as {target.layout!r}, but a DistributedDataParallel "
            "reduces its gradient whole. Ops on sharded tensors (as in AutoParallel) sum their gradients themselves: "
            "give them the bare model."
        )


def _held(x: Tensor, rank: int) -> Held:
    """Return the part of x that this rank holds: (start, stop) of each dim, of each piece; None for all of it."""
    if x._is_whole:
        return None
    layout = x.layout
    if layout is None or not x.data.size:
        return ()
    return tuple(tuple((s.start, s.stop) for s in piece) for piece in layout.pieces(rank, x.shape))


def _text(held: Held) -> str:
    if held is None:
        return "all of it"
    pieces = [f"[{', '.join(f'{start}:{stop}' for start, stop in piece)}]" for piece in held]
    return " and ".join(pieces) or "nothing of it"
