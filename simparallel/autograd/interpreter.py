"""Interpreters run the ops on tensors that are more than one array on one device, such as sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simparallel.backend import Array

if TYPE_CHECKING:
    from simparallel.autograd.op import Op
    from simparallel.autograd.tensor import Tensor
    from simparallel.layout.layout import Layout
    from simparallel.layout.mesh import Mesh
    from simparallel.layout.sharding import Placement


class AbstractInterpreter:
    """An object that runs ops instead of `Op.__call__`.

    A tensor carries its interpreter (`Tensor.interpreter`), and so do the results. Inside of a block such as
    `AutoParallel`, one interpreter runs all ops of the thread (`grad_mode.interpreter`).

    Attributes:
        writes_in_place: `x += y` and `x[i] = y` may write into the memory of x.
        along: the mesh and its axes along which a group sums the gradients of its parameters; see `nn.hooks`.
        is_elsewhere: the code under way computes shapes alone, of a part that another rank runs.
        position: number of calls so far, for an interpreter that identifies calls by it; recomputing a part resets
            it to its value at the start of that part.
    """

    is_elsewhere = False
    position = 0
    writes_in_place = True
    along: tuple[Mesh, tuple[str, ...]] | None = None

    def data_of(self, x: Tensor) -> Array:
        """Return the array of a parameter, to read and to write."""
        return x._data

    def note_detached(self, x: Tensor, detached: Tensor) -> None:
        """Note that `detached` is a leaf with the values of x."""

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Return the op's result; None to let the op compute with the arrays of the inputs."""
        raise TypeError(f"{type(self).__name__} does not define run")

    def run_part(self, part: Callable[..., Tensor], inputs: tuple[Any, ...], is_optional: bool) -> Tensor | None:
        """Return the result of a part that `nn.checkpoint` would recompute in backward; None to let it do so."""
        return part(*inputs) if is_optional else None

    def micro_batches(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the parts of a batch whose gradients are accumulated, see `parallel.micro_batches`."""
        return [inputs]

    def slice_of(self, x: Array, target: Placement) -> Array:
        """Return a copy of this rank's slice of an array that every rank holds whole. Collective: no."""
        raise TypeError(f"{type(self).__name__} does not define slice_of")

    def slice_group(self, x: Tensor) -> Any:
        """Return the ranks that have all slices of x, each once, this one among them; None if x is not cut.

        Collective: yes, over the ranks of its layout, the first time.
        """
        return None

    def to_local(self, x: Tensor, grad_layout: Layout | None = None) -> Tensor:
        """See `Tensor.to_local`. A tensor that is not cut is its own slice."""
        return x


class NamedInterpreter(AbstractInterpreter):
    """An interpreter without state: a constant of its module, copied and pickled by name.

    Args:
        name: of the constant.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return self._name
