"""What a Tensor has under PyTorch's names, beside its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.autograd import operators
from simparallel.cuda import cuda_device
from simparallel.devices import FIRST
from simparallel.errors import ShapeError

if TYPE_CHECKING:
    from simparallel.autograd.tensor import Tensor


class Size(int):
    """The number of elements; called as PyTorch's `size()`, the shape, or with a dim the size of that."""

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        """Raises ShapeError where there is no such dim."""
        if dim is None:
            return self.shape
        try:
            return self.shape[dim]
        except IndexError:
            raise ShapeError(f"size({dim}): a tensor of shape {self.shape} has no such dim.") from None


class TensorAliases:
    """Mixed into Tensor."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def size(self) -> Size: ...

    def numel(self) -> int:
        """The number of elements."""
        return int(self.size)

    def view(self, *shape: Any) -> Tensor:
        """`reshape`: in the memory of this tensor where NumPy can do so, else a copy."""
        return operators._functions.reshape(self, *shape)

    def clamp(self, min: Any = None, max: Any = None) -> Tensor:
        """`clip`."""
        return operators._functions.clip(self, min, max)

    def softmax(self, dim: int = -1) -> Tensor:
        """e ** x over its sum along `dim`."""
        return operators._functions.softmax(self, dim)

    def log_softmax(self, dim: int = -1) -> Tensor:
        """The logarithm of `softmax`."""
        return operators._functions.log_softmax(self, dim)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Tensor:
        """Move to the device that PyTorch calls cuda, or cuda:`device`; see `simparallel.cuda.cuda_device`."""
        return operators._functions.to(self, cuda_device(device))

    def cpu(self) -> Tensor:
        """Move to the device that this rank begins with, sim:0."""
        return operators._functions.to(self, FIRST)

    def half(self) -> Tensor:
        """In float16; itself where it is so already."""
        return operators._functions.cast(self, np.float16)

    def float(self) -> Tensor:
        """In float32; itself where it is so already."""
        return operators._functions.cast(self, np.float32)

    def double(self) -> Tensor:
        """In float64; itself where it is so already."""
        return operators._functions.cast(self, np.float64)
