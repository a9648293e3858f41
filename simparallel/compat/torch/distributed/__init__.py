"""`torch.distributed`: collectives that fill lists, and the start and identity of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import simparallel as sp
from simparallel import Group, Tensor, Work, get_local_world_size as _node_size
from simparallel.compat.front import unused
from simparallel.compat.torch.distributed import algorithms
from simparallel.world import rank as world

BACKENDS = ("nccl", "gloo", "mpi", "tcp", "ucc")


class ReduceOp:
    """Reduction ops."""

    SUM, PRODUCT, MIN, MAX, AVG = "sum", "prod", "min", "max", "mean"
    BAND, BOR, BXOR = "band", "bor", "bxor"
    LAND, LOR, LXOR = "land", "lor", "lxor"


reduce_op = ReduceOp


class group:
    """The world group."""

    WORLD = None


class Finished:
    """The `Work` of a call that was complete when it returned."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    device_id: Any = None,
) -> None:
    """Join as a rank, see `sp.init`. The environment says where the processes meet.

    Raises:
        InputError: PyTorch has no such backend, or the rank or world size is not the run's.
    """
    # Also the form "cpu:gloo,cuda:nccl".
    if backend is not None and backend.split(":")[0] not in (*BACKENDS, "cpu", "cuda"):
        raise sp.errors.InputError(
            f"init_process_group: there is no backend {backend!r}; choose from {', '.join(BACKENDS)}."
        )
    unused("init_process_group", backend=backend, store=store)
    if init_method not in (None, "env://"):
        unused("init_process_group", init_method=init_method)
    sp.init()
    for name, given, real in (("rank", rank, get_rank()), ("world_size", world_size, get_world_size())):
        if given not in (-1, real):
            raise sp.errors.InputError(f"init_process_group: {name}={given}, but it is {real} in this run.")


def get_rank(group: Group | None = None) -> int:
    """Return this rank, or its position in a group; -1 if it is not a member."""
    return world.get_rank(group) if _is_member(group) else -1


def get_world_size(group: Group | None = None) -> int:
    """Return the number of ranks of the run, or of a group; -1 if this rank is not a member."""
    return world.get_world_size(group) if _is_member(group) else -1


def destroy_process_group(group: Group | None = None) -> None:
    """End communication: a no-op, because communication ends with the process."""


def is_available() -> bool:
    """Return True: collectives are always available."""
    return True


def is_initialized() -> bool:
    """Return whether this process is a rank of a run."""
    return sp.comm.is_running()


def get_backend(group: Group | None = None) -> str:
    """Return the transport: "shm", "inline" or "mpi"."""
    return type(sp.comm.current().transport).__name__.removesuffix("Transport").lower()


def get_default_backend_for_device(device: Any) -> str:
    """Return the backend that PyTorch would use: "nccl"."""
    return "nccl"


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Any = None,
    backend: str | None = None,
    use_local_synchronization: bool = False,
    **more: Any,
) -> Group:
    """Create a group of these ranks in ascending order, see `sp.new_group`.

    Collective: over all ranks, or with `use_local_synchronization` over its members.
    """
    unused("new_group", timeout=timeout, backend=backend, **more)
    # Our groups keep the given order, PyTorch sorts.
    chosen = range(get_world_size()) if ranks is None else sorted(ranks)
    return sp.new_group(chosen, use_local_synchronization=use_local_synchronization)


def barrier(group: Group | None = None, async_op: bool = False, device_ids: Any = None) -> Finished | None:
    """Wait for all ranks of the group."""
    sp.barrier(group)
    return _finished("barrier", async_op)


def broadcast(tensor: Tensor, src: int = 0, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Fill `tensor` with rank `src`'s tensor."""
    return _work(sp.broadcast(tensor, src, group, async_op), async_op)


def all_reduce(
    tensor: Tensor,
    op: str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    reduce_op: str | None = None,
) -> Work | None:
    """Replace `tensor` by the reduction; `reduce_op` is the older name of `op`."""
    return _work(sp.all_reduce(tensor, reduce_op or op, group, async_op), async_op)


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    reduce_op: str | None = None,
) -> Work | None:
    """Replace `tensor` of rank `dst` by the reduction; `reduce_op` is the older name of `op`."""
    return _work(sp.reduce(tensor, dst, reduce_op or op, group, async_op), async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Finished | None:
    """Fill `tensor_list` with the ranks' tensors."""
    # With a new first dim, each rank's tensor is one row of the result.
    _fill("all_gather", tensor_list, sp.all_gather(tensor.data[None], group=group))
    return _finished("all_gather", async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    async_op: bool = False,
) -> Finished | None:
    """Fill `gather_list` of rank `dst` with the ranks' tensors."""
    found = sp.gather(tensor.data, dst, group)
    # Only rank `dst` has a result.
    if found is not None:
        _fill("gather", gather_list, found)
    return _finished("gather", async_op)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    async_op: bool = False,
) -> Finished | None:
    """Fill `tensor` with its entry of rank `src`'s list."""
    # Lists on other ranks are ignored, as in PyTorch.
    listed = None if scatter_list is None or get_rank() != src else [entry.data for entry in scatter_list]
    sp.scatter(listed, src, group, out=tensor.data)
    return _finished("scatter", async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Finished | None:
    """Fill `output` with the reduction of the ranks' entries for this rank."""
    rows = sp.functions.stack([entry.detach() for entry in input_list])
    sp.reduce_scatter(rows.data, 0, op, group, out=output.data[None])
    return _finished("reduce_scatter", async_op)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Finished | None:
    """Send entry r to rank r; fill the output list with the entries received from each rank."""
    rows = sp.functions.stack([entry.detach() for entry in input_tensor_list])
    _fill("all_to_all", output_tensor_list, sp.all_to_all(rows.data, group=group))
    return _finished("all_to_all", async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Finished | None:
    """Fill `output_tensor` with the ranks' tensors, concatenated along the first dim."""
    sp.all_gather(input_tensor.data, group=group, out=output_tensor.data)
    return _finished("all_gather_into_tensor", async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Finished | None:
    """Fill `output` with this rank's part of the reduction, along the first dim."""
    sp.reduce_scatter(input.data, 0, op, group, out=output.data)
    return _finished("reduce_scatter_tensor", async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Finished | None:
    """Fill `output` with the parts received from the ranks, along the first dim."""
    output.data[...] = sp.all_to_all(
        input.data, group=group, input_splits=input_split_sizes, output_splits=output_split_sizes
    )
    return _finished("all_to_all_single", async_op)


def monitored_barrier(group: Group | None = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Wait for all ranks, and name the missing ones in the error, see `sp.monitored_barrier`."""
    # PyTorch gives a timedelta.
    sp.monitored_barrier(group, None if timeout is None else timeout.total_seconds())


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None) -> None:
    """Fill `object_list` with the ranks' objects."""
    object_list[:] = sp.all_gather_object(obj, group)


def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group | None = None
) -> None:
    """Fill `object_gather_list` of rank `dst` with the ranks' objects."""
    found = sp.gather_object(obj, dst, group)
    if found is not None and object_gather_list is not None:
        object_gather_list[:] = found


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group | None = None) -> None:
    """Fill `object_list` with rank `src`'s objects."""
    object_list[:] = sp.broadcast_object(list(object_list), src, group)


def send(tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> None:
    """Send `tensor` to rank `dst`, see `sp.send`."""
    # Ranks are global in PyTorch, too, so the group changes nothing.
    sp.send(tensor, dst, tag)


def recv(tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0) -> int:
    """Fill `tensor` with the next message from rank `src` (None: from any rank); return its source."""
    work = sp.irecv(tensor, src, tag)
    work.wait()
    return work.source_rank()


def isend(tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> Work:
    """Start to send `tensor` to rank `dst`, see `sp.isend`."""
    return sp.isend(tensor, dst, tag)


def irecv(tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0) -> Work:
    """Start to fill `tensor` with the next message from rank `src` (None: from any rank); see `sp.irecv`."""
    return sp.irecv(tensor, src, tag)


class P2POp:
    """A message of `batch_isend_irecv`: `op` is `isend` or `irecv`, `peer` the other rank."""

    def __init__(
        self, op: Callable[..., Work], tensor: Tensor, peer: int, group: Group | None = None, tag: int = 0
    ) -> None:
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start the messages, in their order."""
    return [each.op(each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: Group | None = None,
) -> None:
    """Put this rank's entry of rank `src`'s list into the output list; every rank receives the whole list."""
    scatter_object_output_list[0] = sp.broadcast_object(scatter_object_input_list, src, group)[get_rank(group)]


def new_subgroups(group_size: int | None = None, group: Group | None = None, **more: Any) -> tuple[Group, list[Group]]:
    """Return this rank's group and all groups of `group_size` consecutive ranks; by default the ranks of a node.

    Collective: over all ranks.

    Raises:
        InputError: the size does not divide the number of ranks.
    """
    unused("new_subgroups", **more)
    ranks, size = list(range(get_world_size()) if group is None else group.ranks), group_size or _node_size()
    if size < 1 or len(ranks) % size:
        raise sp.errors.InputError(f"new_subgroups: group_size={size} does not divide the {len(ranks)} ranks.")
    groups = [new_group(ranks[i : i + size]) for i in range(0, len(ranks), size)]
    return next(one for one in groups if get_rank() in one.ranks), groups


def _work(result: Any, async_op: bool) -> Work | None:
    return result if async_op else None


def _finished(who: str, async_op: bool) -> Finished | None:
    if not async_op:
        return None
    # The list is filled from a result, so the call has to wait.
    unused(who, async_op=async_op)
    return Finished()


def _is_member(group: Group | None) -> bool:
    return group is None or world.get_rank() in group.ranks


def _fill(who: str, tensors: Sequence[Tensor] | None, rows: Any) -> None:
    """Copy each row into the Tensor of its rank."""
    if tensors is None or len(tensors) != len(rows):
        count = "no list" if tensors is None else f"a list of {len(tensors)} Tensors"
        raise sp.errors.InputError(f"{who}: got {count} for {len(rows)} ranks; give one Tensor for each rank.")
    for tensor, row in zip(tensors, rows, strict=True):
        tensor.data[...] = row
