"""Gradients as values, reduced over the ranks: MindSpore's `DistributedGradReducer`.

The gradients of one dtype are flattened into one array in shared memory and reduced by one collective. The results are
views of this array, which is new at each call, so nothing is copied twice. DistributedDataParallel reduces while
backward still runs; this reducer waits for all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.backend import Array, has_data, is_array, to_host
from simparallel.base.checks import check_number
from simparallel.base.units import format_type_of
from simparallel.clock.memory import GRADIENTS
from simparallel.clock.recorder import observer_of
from simparallel.comm import Group, current
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.parallel.ddp.buckets import by_dtype, empty_like
from simparallel.world.context import SettingsRead, check_world, get_auto_parallel_context
from simparallel.world.rank import get_world_size

WHO = "DistributedGradReducer"


class DistributedGradReducer:
    """A sum or mean of gradients over the ranks: `grads = reducer(grads)`, then `optimizer(grads)`.

    Args:
        parameters: the parameters of the gradients, in their order.
        mean: divide the sums by `degree`; None takes `gradients_mean` of the auto-parallel context.
        degree: the divisor, above 0; None takes the number of ranks.
        group: ranks that share the work; by default all.

    Raises:
        InputError: no parameters, a parameter listed twice, a bad setting, or `device_num` of the context differs from
            the size of the run.

    Example:
        >>> weight = sp.Tensor([1.0, 2.0], requires_grad=True)
        >>> reducer = sp.parallel.DistributedGradReducer([weight], mean=True)
        >>> [grad.numpy().tolist() for grad in reducer([np.array([4.0, 6.0], np.float32)])]
        [[4.0, 6.0]]
    """

    def __repr__(self) -> str:
        group = "" if self.group is None else f", group={self.group!r}"
        count = len(self.parameters)
        return f"DistributedGradReducer({count} parameters, mean={self.mean}, degree={self.degree:g}{group})"

    def __init__(
        self,
        parameters: Iterable[Tensor],
        mean: bool | None = None,
        degree: float | None = None,
        group: Group | None = None,
    ) -> None:
        self.parameters = list(parameters)
        if not self.parameters or not all(isinstance(parameter, Tensor) for parameter in self.parameters):
            raise InputError(f"{WHO}: needs a list of parameters, as in {WHO}(optimizer.parameters).")
        check_world(WHO)
        self.group = group
        size = get_world_size(group)
        if mean not in (None, True, False):
            raise InputError(f"{WHO}: mean={mean!r} must be True, False or None.")
        self.mean = bool(get_auto_parallel_context("gradients_mean") if mean is None else mean)
        self._read = SettingsRead("gradients_mean") if mean is None else None
        self.degree = check_number(WHO, "degree", size if degree is None else degree, above=0.0)
        # The collective can divide only by the number of ranks; any other degree divides afterwards.
        self._op = "mean" if self.mean and self.degree == size else "sum"
        numbers = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        # A dict by identity, so equal entries collapse.
        if len(numbers) < len(self.parameters):
            raise InputError(f"{WHO}: a parameter is listed twice; its gradient would be reduced twice.")
        self._parts = [_FlatPart(part, [numbers[id(p)] for p in part]) for part in by_dtype(self.parameters)]

    def __call__(self, grads: Sequence[Tensor | Array | None]) -> list[Tensor | None]:
        """Return the reduced gradients as new arrays, bit for bit the same on all ranks.

        Args:
            grads: the gradient of each parameter, in its shape and dtype. None counts as zeros, and stays None if no
                rank has a gradient.

        Raises:
            InputError, ShapeError, DTypeError: gradients that do not fit; or `gradients_mean` was set after the reducer
                was made. Nothing was sent.

        Collective: yes, one all-reduce per dtype.
        Cost: 2 (P-1)/P of the gradients' bytes per rank.
        """
        if self._read is not None:
            self._read.check(WHO)
        arrays = self._checked(grads)
        reduced: list[Tensor | None] = [None] * len(arrays)
        # Start all reductions before waiting for the first.
        flats = [(part, self._send(part, arrays)) for part in self._parts]
        for part, (flat, work) in flats:
            work.wait()
            if self.mean and self._op == "sum":
                # In place: `flat` is new at each call, and the results are views of it.
                flat /= self.degree
            flags = flat[part.size :]
            present = to_host(flags) > 0 if has_data(flags) else [arrays[i] is not None for i in part.numbers]
            for k, i in enumerate(part.numbers):
                # A flag above 0: some rank has this gradient.
                if present[k]:
                    view = flat[part.starts[k] : part.starts[k + 1]].reshape(self.parameters[i].shape)
                    reduced[i] = Tensor._result(view, None, self.parameters[i]._device)
        return reduced

    def _checked(self, grads: Sequence[Tensor | Array | None]) -> list[Array | None]:
        grads = list(grads)
        if len(grads) != len(self.parameters):
            raise InputError(f"{WHO}: {len(grads)} gradients for {len(self.parameters)} parameters.")
        arrays = [grad.data if isinstance(grad, Tensor) else grad for grad in grads]
        for i, (array, parameter) in enumerate(zip(arrays, self.parameters, strict=True)):
            if array is None:
                continue
            if not is_array(array):
                raise InputError(f"{WHO}: gradient {i} is {format_type_of(array)}, expected a Tensor or array.")
            if array.shape != parameter.shape and parameter.data.shape != parameter.shape:
                raise InputError(
                    f"{WHO}: parameter {i} of shape {parameter.shape} is sharded as {parameter.layout!r}; ops on "
                    "sharded tensors sum its gradients themselves: give them to the optimizer as they are."
                )
            if array.shape != parameter.shape:
                raise ShapeError(f"{WHO}: gradient {i} has shape {array.shape}, expected {parameter.shape}.")
            if array.dtype != parameter.dtype:
                raise DTypeError(f"{WHO}: gradient {i} has dtype {array.dtype}, expected {parameter.dtype}.")
        return arrays

    def _send(self, part: _FlatPart, arrays: list[Array | None]) -> tuple[Array, Any]:
        size = part.size + len(part.numbers)
        flat = empty_like(self.parameters[part.numbers[0]].data, size, current())
        observer_of(None).memory.hold(flat, GRADIENTS)
        for k, i in enumerate(part.numbers):
            gradient, place = arrays[i], flat[part.starts[k] : part.starts[k + 1]]
            place.reshape(self.parameters[i].shape)[...] = 0 if gradient is None else gradient
            # The flags share the gradients' message.
            flat[part.size + k] = gradient is not None
        # In a dry run the flags have no data, so the ranks compare by this text which gradients they have.
        same = "" if has_data(flat) else f": {[arrays[i] is not None for i in part.numbers]}"
        with current().for_purpose(part.purpose + same):
            return flat, collectives.all_reduce(flat, self._op, self.group, async_op=True)


class _FlatPart:
    """The parameters of one dtype, their indices, and the offsets of their gradients in the flat array.

    After the gradients the array has one element per parameter, which is above 0 after the reduction if any rank has
    its gradient.
    """

    def __init__(self, parameters: list[Tensor], numbers: list[int]) -> None:
        self.numbers = numbers
        self.starts = [0, *accumulate(parameter.size for parameter in parameters)]
        self.size = self.starts[-1]
        shapes = ", ".join(str(parameter.shape) for parameter in parameters)
        self.purpose = f"{WHO} of {shapes}"
