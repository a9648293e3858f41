"""Sharded tensors: made from whole ones, made whole again."""

from __future__ import annotations

from typing import Any

from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_tensor
from simparallel.errors import LayoutError
from simparallel.layout import Layout
from simparallel.parallel.call import uncut
from simparallel.parallel.sharded import carry
from simparallel.sharding import placement


def distribute_tensor(x: Any, layout: Layout, requires_grad: bool | None = None) -> Tensor:
    """A sharded tensor from one that every rank holds whole; a new leaf with a copy of this rank's slice.

    Args:
        x: array or plain Tensor, the same on every rank.
        layout: a called Layout over all ranks of the run.
        requires_grad: collect a gradient for it; None takes that of x.

    Raises:
        LayoutError: the layout does not fit, has other ranks, or x is sharded already.

    Collective: no.

    Example:
        >>> x = distribute_tensor([[1.0, 2.0]], Layout((1,), ("dp",))("dp", "None"))
        >>> x.shape, x.layout
        ((1, 2), Layout((1,), ('dp',))('None', 'None'))
    """
    whole = as_tensor(x)
    if whole.placement is not None:
        raise LayoutError(f"distribute_tensor: x is sharded as {whole.layout!r}; use x.redistribute(layout).")
    if layout.partial:
        raise LayoutError(
            f"distribute_tensor: {layout!r} is an unfinished sum; a whole value is not split into addends."
        )
    target = placement(layout, whole.shape)
    y = Tensor._slice(
        carry(whole.data, placement(uncut(layout.mesh, whole.shape), whole.shape), target).copy(), target
    )
    return y.requires_grad_(whole.requires_grad if requires_grad is None else requires_grad)
