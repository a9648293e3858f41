"""Collectives that gradients pass through: the collective in forward, its adjoint in backward.

A collective is a linear map from the inputs of all ranks to the outputs of all ranks, so its backward is the
transposed map, which is a collective, too:

    all_reduce <-> itself   all_gather <-> reduce_scatter   all_to_all <-> itself, the other way round
    broadcast <-> reduce    scatter_from <-> gather_to

Every rank of the group makes the call, and every rank runs backward through its result, because the adjoint is
collective as well. Ranks that disagree about whether a gradient is needed make different calls, and all of them raise.

gather and scatter are called `gather_to` and `scatter_from` here, because `functions.gather` and `functions.scatter`
are indexing, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.functions import getitem, stack
from simparallel.autograd.tape import Node, Reversible, grad_mode
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array, get_namespace
from simparallel.clock.memory import ACTIVATIONS
from simparallel.clock.recorder import current_recorder
from simparallel.collectives import api
from simparallel.collectives.host_copy import go_on, wait_for
from simparallel.comm import Group, current
from simparallel.errors import InputError, LayoutError
from simparallel.machine.devices import FIRST

# Reductions whose adjoint does not depend on values.
LINEAR = ("sum", "mean")
Move = Callable[[Array], Array]


class _Collective(Reversible):
    """The op of a collective in the autograd graph; also its own `ctx`."""

    def __init__(self, name: str, adjoint: Move, device: Any, needs: tuple[bool, ...]) -> None:
        self._name, self._adjoint, self._device, self.needs = name, adjoint, device, needs

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        # Ranks compare the name: a backward that a rank does not run is found as a mismatch.
        dx = _communicate(f"backward of functions.{self._name}", self._adjoint, dy, self._device)
        return (dx,) if self.needs else ()

    def __repr__(self) -> str:
        return self._name


def _communicate(purpose: str, move: Move, x: Array, device: Any) -> Array:
    """Run `move(x)` under the name `purpose`, which ranks compare; it begins and ends on this device's clock."""
    wait_for(device)
    with current().for_purpose(purpose):
        y = move(get_namespace(x).asarray(x))  # NumPy turns 0-D arrays into scalars
    go_on(device)
    return y


def _call(name: str, x: Any, forward: Move, adjoint: Move) -> Tensor:
    """Run `forward(x)`, and record it in the autograd graph if x needs a gradient."""
    x = _plain(name, x)
    return _run(name, (x,), grad_mode.enabled and x.requires_grad, forward, adjoint)


def _run(name: str, inputs: tuple[Tensor, ...], is_recorded: bool, forward: Move, adjoint: Move) -> Tensor:
    """Run `forward` on the data of the input, if this rank has one; only a floating-point result gets a node."""
    device = inputs[0]._device if inputs else None
    # With and without a gradient are different calls, because only one of them has a backward to match.
    purpose = f"functions.{name} {'with' if is_recorded else 'without'} a gradient"
    y = _communicate(purpose, forward, inputs[0].data if inputs else np.empty(0), device or FIRST)
    recorder, node = current_recorder(), None
    if recorder is not None:
        recorder.memory.hold(y, ACTIVATIONS)
    if is_recorded and y.dtype.kind == "f":
        op: Any = _Collective(name, adjoint, device or FIRST, tuple(x.requires_grad for x in inputs))
        node = Node(op, op, inputs)
    return Tensor._result(y, node, device)


def _plain(name: str, x: Any) -> Tensor:
    x = as_tensor(x)
    if x.placement is not None:
        raise LayoutError(
            f"{name}: this tensor is sharded as {x.layout!r}, and its ops communicate by themselves. Use "
            "redistribute(layout), or full_tensor() for a plain one."
        )
    return x


def _check_linear(name: str, x: Any, op: str) -> None:
    if op not in LINEAR and grad_mode.enabled and as_tensor(x).requires_grad:
        raise InputError(
            f"functions.{name}: op={op!r} has no gradient; only 'sum' and 'mean' have one. Use functions.all_gather "
            "and a reduction of its result, or detach() for no gradient."
        )


def all_reduce(x: Any, op: str = "sum", group: Group | None = None, algorithm: str | None = None) -> Tensor:
    """Reduce the ranks' x on every rank, into a new Tensor; the gradient is all-reduced by the same op.

    Args:
        x: Tensor or array, with the same shape and dtype on every rank; unchanged.
        op: "sum" or "mean"; without a gradient every op of `sp.all_reduce`.
        group, algorithm: as in `sp.all_reduce`.

    Collective: yes, and so is backward. Cost: 2 (P-1)/P * x.nbytes [bytes] per rank, and again in backward.

    Raises:
        InputError: x needs a gradient and `op` is not linear; besides the errors of `sp.all_reduce`.
        CollectiveMismatchError: also if x needs a gradient on some ranks only.
        LayoutError: x is sharded.
    """
    _check_linear("all_reduce", x, op)

    def both(a: Array) -> Array:
        # The collective works in place, and x must stay as it is.
        return api.all_reduce(a.copy(), op, group, algorithm=algorithm)

    return _call("all_reduce", x, both, both)


def all_gather(
    x: Any, dim: int = 0, group: Group | None = None, algorithm: str | None = None, *, uneven: bool = False
) -> Tensor:
    """Concatenate the ranks' x along `dim`; the gradients of all ranks are summed and scattered back.

    Args:
        x: Tensor or array, at least 1-D, with the same shape and dtype on every rank; unchanged.
        dim: x of shape (..., d, ...) gives (..., P d, ...) for P ranks.
        group, algorithm: as in `sp.all_gather`.
        uneven: the ranks' x may have different sizes along `dim`; another small all_gather exchanges the sizes.

    Collective: yes, and so is backward. Cost: (P-1) * x.nbytes [bytes] per rank, and again in backward.

    Raises: as `functions.all_reduce`.
    """

    def adjoint(dy: Array) -> Array:
        splits = sizes if uneven else None
        return api.reduce_scatter(dy, dim, "sum", group, algorithm=algorithm, input_splits=splits)

    def forward(a: Array) -> Array:
        if uneven:
            sizes.extend(api.all_gather(np.array([a.shape[dim]]), 0, group).tolist())
        return api.all_gather(a, dim, group, algorithm=algorithm, uneven=uneven)

    # Sizes are known after forward only; the adjoint reads them here.
    sizes: list[int] = []
    return _call("all_gather", x, forward, adjoint)


def reduce_scatter(
    x: Any,
    dim: int = 0,
    op: str = "sum",
    group: Group | None = None,
    algorithm: str | None = None,
    *,
    input_splits: Sequence[int] | None = None,
) -> Tensor:
    """Reduce the ranks' x and return this rank's part along `dim`; the gradients are all-gathered.

    Args:
        x: Tensor or array, with the same shape and dtype on every rank; unchanged.
        dim: x of shape (..., P d, ...) gives (..., d, ...) for P ranks.
        op: "sum" or "mean"; without a gradient every op of `sp.reduce_scatter`.
        group, algorithm, input_splits: as in `sp.reduce_scatter`.

    Collective: yes, and so is backward. Cost: (P-1)/P * x.nbytes [bytes] per rank, and again in backward.

    Raises: as `functions.all_reduce`.
    """
    _check_linear("reduce_scatter", x, op)

    def adjoint(dy: Array) -> Array:
        uneven = input_splits is not None
        return _mean_share(op, group, api.all_gather(dy, dim, group, algorithm=algorithm, uneven=uneven))

    def forward(a: Array) -> Array:
        return api.reduce_scatter(a, dim, op, group, algorithm=algorithm, input_splits=input_splits)

    return _call("reduce_scatter", x, forward, adjoint)


def all_to_all(
    x: Any,
    split_dim: int = 0,
    concat_dim: int = 0,
    group: Group | None = None,
    algorithm: str | None = None,
    *,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Tensor:
    """Return part r of every rank's x on rank r, joined in the order of the group; the gradients travel back.

    Args:
        x: Tensor or array, with the same shape and dtype on every rank; unchanged.
        split_dim: dim along which x is cut; its size is divided by P.
        concat_dim: dim along which the parts are joined; its size is multiplied by P.
        group, algorithm: as in `sp.all_to_all`.
        input_splits, output_splits: as in `sp.all_to_all`; both or none, because backward swaps them.

    Collective: yes, and so is backward. Cost: (P-1)/P * x.nbytes [bytes] per rank, and again in backward.

    Raises: as `functions.all_reduce`.
    """
    if (input_splits is None) != (output_splits is None):
        raise InputError("functions.all_to_all: give both input_splits and output_splits, or neither.")

    def move(a: Array, dims: tuple[int, int], given: Sequence[int] | None, taken: Sequence[int] | None) -> Array:
        splits: dict[str, Any] = {"input_splits": given, "output_splits": taken}
        return api.all_to_all(a, *dims, group, algorithm=algorithm, **splits)

    return _call(
        "all_to_all",
        x,
        lambda a: move(a, (split_dim, concat_dim), input_splits, output_splits),
        # Backward is the same exchange with the dims and the splits swapped.
        lambda dy: move(dy, (concat_dim, split_dim), output_splits, input_splits),
    )


def broadcast(x: Any, src: int = 0, group: Group | None = None, algorithm: str | None = None) -> Tensor:
    """Return x of rank `src` on every rank, as a new Tensor; the gradients of all ranks are summed on `src`.

    Args:
        x: Tensor or array, with the same shape and dtype on every rank, and with requires_grad on every rank or none.
            Only the values of `src` count, so the gradient is 0 elsewhere.
        src: a global rank that is in the group.
        group, algorithm: as in `sp.broadcast`.

    Collective: yes, and so is backward. Cost: x.nbytes [bytes] per rank, and again in backward.

    Raises: as `functions.all_reduce`.
    """

    def adjoint(dy: Array) -> Array:
        # Only the values of `src` were used, so the others' gradient is 0.
        return _only_on(src, api.reduce(dy.copy(), src, "sum", group, algorithm=algorithm))

    return _call("broadcast", x, lambda a: api.broadcast(a.copy(), src, group, algorithm=algorithm), adjoint)


def reduce(x: Any, dst: int = 0, op: str = "sum", group: Group | None = None, algorithm: str | None = None) -> Tensor:
    """Return the reduction of the ranks' x on rank `dst`, zeros elsewhere; the gradient of `dst` is broadcast.

    The loss has to use the result on the other ranks as well, so that every rank runs the collective backward.

    Args:
        x: Tensor or array, with the same shape and dtype on every rank; unchanged.
        dst: a global rank that is in the group.
        op: "sum" or "mean"; without a gradient every op of `sp.reduce`.
        group, algorithm: as in `sp.reduce`.

    Collective: yes, and so is backward. Cost: x.nbytes [bytes] per rank, and again in backward.

    Raises: as `functions.all_reduce`.
    """
    _check_linear("reduce", x, op)

    def adjoint(dy: Array) -> Array:
        return _mean_share(op, group, api.broadcast(dy.copy(), dst, group, algorithm=algorithm))

    return _call(
        "reduce", x, lambda a: _only_on(dst, api.reduce(a.copy(), dst, op, group, algorithm=algorithm)), adjoint
    )


def gather_to(x: Any, dst: int = 0, group: Group | None = None, algorithm: str | None = None) -> list[Tensor]:
    """Return the ranks' x as a list on rank `dst`, zeros elsewhere; each gradient goes back from `dst` to its rank.

    The loss has to use the results on the other ranks as well, so that every rank runs the collective backward.

    Args:
        x: Tensor or array, with the same shape and dtype on every rank; unchanged.
        dst: a global rank that is in the group.
        group, algorithm: as in `sp.gather`.

    Returns:
        A list of P Tensors like x, in the order of the group.

    Collective: yes, and so is backward. Cost: x.nbytes [bytes] per rank, and again in backward; `dst` sends nothing
    in forward and everything in backward.

    Raises: as `functions.all_reduce`.
    """

    is_root = current().rank == dst

    def forward(a: Array) -> Array:
        # Zeros elsewhere: every rank has a result of the same shape for its loss to use.
        rows = get_namespace(a).zeros((_size(group), *a.shape), a.dtype)
        api.gather(a, dst, group, algorithm=algorithm, out=rows if is_root else None)
        return rows

    def adjoint(dy: Array) -> Array:
        return api.scatter(_rows(dy) if is_root else None, dst, group, algorithm=algorithm)

    rows = _call("gather_to", x, forward, adjoint)
    # Rows of one Tensor: a single node, and so a single collective in backward.
    return [getitem(rows, i) for i in range(len(rows.data))]


def scatter_from(
    arrays: Sequence[Any] | None = None, src: int = 0, group: Group | None = None, algorithm: str | None = None
) -> Tensor:
    """Return entry r of the list of rank `src` on the r-th rank of the group; the gradients are gathered on `src`.

    While gradients are recorded, the result requires a gradient on every rank, because only `src` knows which entries
    need one.

    Args:
        arrays: on `src` a list of P Tensors or arrays of one shape and dtype; elsewhere None.
        src: a global rank that is in the group.
        group, algorithm: as in `sp.scatter`.

    Collective: yes, and so is backward. Cost: (P-1) * part.nbytes [bytes] from `src`; in backward each other rank
    sends its part.

    Raises:
        InputError: an empty list; besides the errors of `functions.all_reduce`.
    """
    parts = None if arrays is None else [_plain("scatter_from", part) for part in arrays]
    if parts is not None and not parts:
        raise InputError("scatter_from: the list is empty; give one Tensor for each rank of the group.")
    # One Tensor for all entries, so that backward has one collective and its gradient is cut by `stack`.
    whole = None if parts is None else stack(parts)

    def forward(rows: Array) -> Array:
        return api.scatter(None if whole is None else _rows(rows), src, group, algorithm=algorithm)

    def adjoint(dy: Array) -> Array:
        rows = None if whole is None else get_namespace(dy).empty((_size(group), *dy.shape), dy.dtype)
        api.gather(dy, src, group, algorithm=algorithm, out=rows)
        # The other ranks have no input to give a gradient to.
        return dy if rows is None else rows

    return _run("scatter_from", () if whole is None else (whole,), grad_mode.enabled, forward, adjoint)


def _rows(x: Array) -> list[Array]:
    return [x[i, ...] for i in range(len(x))]


def _mean_share(op: str, group: Group | None, dx: Array) -> Array:
    """Return a rank's share of a mean, or all of a sum; dx is a new array and may be written."""
    if op == "mean":
        dx /= _size(group)
    return dx


def _only_on(rank: int, x: Array) -> Array:
    """Return x on this rank, zeros on others."""
    return x if current().rank == rank else get_namespace(x).zeros_like(x)


def _size(group: Group | None) -> int:
    return (group or current().world).size
