"""`Op`: one class that says everything about an operation once.

    class MatMul(Op):
        rule = "... m k, ... k n -> ... m n"       how its loop nest touches its tensors
        def infer(self, x, w): ...                 shape and dtype of y, no data
        def forward(self, ctx, x, w): ...          arrays in, array out
        def backward(self, ctx, dy): ...           arrays in, arrays out, one per input
        def work(self, x, w): ...                  flops and bytes

The tape, the simulated clock, the strategies and the plans follow from these. Everything that depends on shapes only
(checks, output shape, work) is computed once per shape and kept in a `Plan`; a step repeats none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.host.windows import Windows
from simparallel.arrays.seam import device_of, kernels_of
from simparallel.autograd.dims import as_dims, as_int, normalize_dims, reduced_dims  # noqa: F401 (for the ops)
from simparallel.autograd.exchanges import Exchanges
from simparallel.autograd.shardable import Shardable
from simparallel.autograd.tape import Node, Reversible, grad_mode
from simparallel.autograd.tensor import Tensor, as_tensor, common_device, device_mismatch
from simparallel.backend import Array, get_namespace
from simparallel.clock.notes import note_once
from simparallel.clock.recorder import observer_of
from simparallel.errors import DTypeError, InputError, ShapeError, SimParallelError
from simparallel.layout.rule import bind, output_shape
from simparallel.machine.device import DTYPES, DeviceWork
from simparallel.machine.devices import FIRST, Device, current_device
from simparallel.machine.products import MatrixProduct


class Spec(NamedTuple):
    """Shape and dtype of a tensor, without data.

    Attributes:
        shape: size of each dim.
        dtype: NumPy's dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def check_float(**specs: Spec) -> None:
    """Raise DTypeError unless all of these inputs, by their names, are floating point."""
    for name, spec in specs.items():
        if spec.dtype.kind != "f":
            raise DTypeError(f"{name} has dtype {spec.dtype}, expected floating point.")


class Work(NamedTuple):
    """The cost of an operation: floating-point operations, and bytes moved in memory.

    Attributes:
        flops: floating-point operations; a multiplication and an addition are two.
        size_bytes: bytes read and written.
    """

    flops: int
    size_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The plan of an op for given input shapes and dtypes: computed by the first such call, looked up afterwards.

    Made by calling the op.

    Attributes:
        inputs: shape and dtype of each input.
        output: shape and dtype of the output.
        sizes: the size of each dim that the rule names.
        work: the cost of forward.
        windows: positions of the sliding windows; None for an op without them.
        whole: the plan of the whole call, if this is the one of a rank's slices.
    """

    inputs: tuple[Spec, ...]
    output: Spec
    sizes: dict[str, int]
    work: Work
    # Only for an op that reads through sliding windows.
    windows: Windows | None = None
    # Only on slices.
    whole: Plan | None = None

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all inputs and of the output."""
        return sum(spec.size_bytes for spec in (*self.inputs, self.output))


class Context:
    """Answers the questions of a running op, and keeps its values for backward.

    On whole tensors the exchanges are the identity. Where a strategy cuts a dim, they are collectives, and the context
    knows the slice and the global size.

    Made by calling the op.

    Attributes:
        xp: numpy or cupy.
        arrays: the kernels that depend on where the arrays are, such as products, see `arrays.host.arrays`.
        needs: for each input, whether backward wants its gradient.
        accumulate_into: in the backward of an op that `accumulates`, the sum of the contributions of other uses of its
            input, to add to and return; None if there are none yet: return a new array.
        grad_buffers: in the backward of an op that `fills_grad_buffers`, for each input an array to write its gradient
            to, or None; see `gradient`.
        device: the device of the inputs.
        layer: path of the module that called the op.
        plan: shapes, sizes and work of this call.
    """

    # Values for backward are in `__dict__`, and nothing else.
    __slots__ = ("__dict__", "__weakref__", "arrays", "needs", "plan", "xp")

    accumulate_into: Array | None = None
    grad_buffers: Sequence[Array | None] = ()
    # A class attribute, because it is nearly always FIRST.
    device: Device = FIRST
    layer = ""

    def __init__(self, arrays: HostArrays, needs: tuple[bool, ...], plan: Plan) -> None:
        self.arrays, self.xp = arrays, arrays.xp
        self.needs = needs
        self.plan = plan

    # An op keeps values for its backward under any name.
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def windows(self) -> Windows:
        """Positions of the windows in this image, for ops with sliding windows."""
        assert self.plan.windows is not None
        return self.plan.windows

    def gradient(self, i: int, dtype: np.dtype) -> Array:
        """Return an array with arbitrary content for the gradient of input `i`: fill it, and return it from backward.

        It is the gradient buffer of the input if there is one of this dtype, which saves a copy; else a new array.
        """
        buffer = self.grad_buffers[i] if self.grad_buffers else None
        if buffer is not None and buffer.dtype == dtype:
            return buffer
        return self.xp.empty(self.plan.inputs[i].shape, dtype)

    def sum_over(self, dims: str, x: Array, group_size: int | None = None) -> Array:
        """Sum `x` over the ranks among which any of `dims` is cut, or over runs of `group_size` of these ranks."""
        return x

    def max_over(self, dims: str, x: Array) -> Array:
        """Return the elementwise maximum of `x` over the ranks among which any of `dims` is cut."""
        return x

    def min_over(self, dims: str, x: Array) -> Array:
        """Return the elementwise minimum of `x` over the ranks among which any of `dims` is cut."""
        return x

    def offset(self, dim: str) -> int:
        """Return the offset of this rank's slice of `dim`."""
        return 0

    def size(self, dim: str) -> int:
        """Return the global size of `dim`."""
        return self.plan.sizes[dim]

    def part(self, dim: str) -> tuple[int, int]:
        """Return (number of this rank's slice of `dim`, number of slices); slices may be unequal, and empty."""
        return 0, 1

    def sizes(self, dims: str, group_size: int | None = None) -> int:
        """Return the product of the global sizes of `dims`: the number of elements that `sum_over` adds up."""
        return prod(self.size(dim) for dim in dims.split())


class Op(Shardable, Reversible):
    """An operation; instances hold its settings and are called with Tensors.

    To write one, declare how its loop nest touches its tensors (`rule`), and compute with arrays (`forward`,
    `backward`). Gradients, clocks, memory, strategies (`shard`), plans and prices follow:

        >>> class Scale(sp.ops.Op):
        ...     rule = "... -> ..."
        ...     def __init__(self, factor):
        ...         self.factor = factor
        ...     def forward(self, ctx, x):
        ...         return x * self.factor
        ...     def backward(self, ctx, dy):
        ...         return (dy * self.factor,)
        >>> x = sp.Tensor([1.0, 2.0], requires_grad=True)
        >>> Scale(3.0)(x).sum().backward()
        >>> x.grad.tolist()
        [3.0, 3.0]
        >>> sp.testing.check_gradients(Scale(3.0), [np.ones((2, 2))])

    - `rule` names the dims of every input and of the output: "m k, k n -> m n". A dim that the output lacks is summed.
      "..." are leading dims that broadcast; {h} may not be cut; [v] may be cut, and the op completes it itself by
      `ctx.sum_over("v", x)`, `ctx.max_over`, `ctx.offset` and `ctx.size`; a number is a dim of that size.
      `simparallel.layout.rule` describes the whole language. Where the rule depends on settings or shapes, define
      `rule_for(*shapes)`.
    - `forward(ctx, *arrays)` returns an array. It stores values for backward on `ctx`, under any name. Call `ctx.xp`
      instead of `np`, so that it also runs on GPUs, and `ctx.arrays.matmul` and `ctx.arrays.einsum` for products, which
      a captured step can then include.
    - `backward(ctx, dy)` returns the gradients of all inputs, in order, None where `ctx.needs[i]` is False.
    - `infer(*specs)` returns shape and dtype of the output where these do not follow from the rule and NumPy's
      promotion; it raises ShapeError or DTypeError for inputs that do not fit. `flops_per_element` is the number
      of flops for an element of the output, if not 1; `work(*specs)` returns flops and bytes where they follow from
      more than that; `misfit(*shapes)` explains refused shapes.
    - Settings are arguments of `__init__`, kept under their names.
    - An op that is constant between its jumps derives from `AbstractConstant` instead of Op, and needs no backward.

    A subclass is registered under its class name, unless that begins with "Abstract", and found in `simparallel.ops`.
    For a function with a gradient of your own and no strategies, see `simparallel.Function`.
    """

    rule: ClassVar[str]
    flops_per_element: ClassVar[int] = 1  # of the output, unless `work` says otherwise
    linear: ClassVar[bool] = False  # op(a) + op(b) = op(a + b), all inputs together: an unfinished sum may pass
    stays: ClassVar[bool] = False  # y has the layout of the sharded x, in every mode and over any ranks
    registry: ClassVar[dict[str, type[Op]]] = {}
    # Called like Context. SyncBatchNorm sets a context that communicates.
    context_type: Callable[..., Context] = Context
    name: ClassVar[str]
    backward_name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__name__
        cls.backward_name = f"{cls.__name__}.backward"
        if not cls.__name__.startswith("Abstract"):
            Op.registry[cls.__name__] = cls

    @property
    def is_matrix_product(self) -> bool:
        """Whether its flops run at a device's peak for matrix products."""
        return False

    # --- for subclasses to define -----------------------------------------------------------

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        """Return the rule for these input shapes; override it where it depends on settings or dims."""
        try:
            return self.rule
        except AttributeError:
            raise InputError(
                "the class has no `rule`, such as '... -> ...' (elementwise) or 'm k, k n -> m n', and "
                "no `rule_for(*shapes)`; see help(simparallel.ops.Op)."
            ) from None

    def windows(self, *shapes: tuple[int, ...]) -> Windows | None:
        """Return the positions of the windows for these input shapes; None unless the rule has dims `<h> <w>`.

        `forward` and `backward` ask `ctx.windows`: on a slice of an image the positions differ.
        """
        return None

    def infer(self, *inputs: Spec) -> Spec:
        """Return shape and dtype of the output, by default those of `rule` and of NumPy's promotion.

        Raises:
            ShapeError, DTypeError: the inputs do not fit.
        """
        shapes = tuple(spec.shape for spec in inputs)
        shape = output_shape(self.rule_for(*shapes), shapes)
        return Spec(shape, np.result_type(*(spec.dtype for spec in inputs)))

    def misfit(self, *shapes: tuple[int, ...]) -> str | None:
        """Say why these input shapes do not fit, and what to do; None if the error of the rule says enough."""
        return None

    def forward(self, ctx: Context, *arrays: Array) -> Array:
        raise TypeError(f"{self.name} does not define forward")

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        """Return the gradients of the inputs, in order; None where `ctx.needs` is False.

        It may return `dy` itself or views of it. It must not return the same new array twice, nor an array that the op
        keeps: the tape adds the contributions of other uses of an input to new arrays in place.
        """
        raise TypeError(f"{self.name} does not define backward")

    def work(self, *inputs: Spec) -> Work:
        """Return the cost of forward: by default `flops_per_element` of the output, and every tensor moved once."""
        output = self.infer(*inputs)
        moved = output.size_bytes + sum(spec.size_bytes for spec in inputs)
        return Work(self.flops_per_element * prod(output.shape), moved)

    def exchanges(self, plan: Plan) -> Exchanges | None:
        """Return the exchanges that the op asks of `ctx` on slices; None to find them by a run on zeros."""
        return None

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        """Return the cost of backward: by default the cost of forward for each gradient wanted."""
        return Work(work.flops * sum(needs), work.size_bytes * sum(needs))

    def eager_work(self, plan: Plan) -> Work:
        """Return the cost of forward in kernels of software "eager", see `DeviceSpec`: by default that of `work`."""
        return plan.work

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        """Return the cost of backward in the same kernels: by default `work_backward` of the cost of forward."""
        return self.work_backward(needs, self.eager_work(plan))

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int] | None:
        """Return what those kernels keep for backward: the numbers of the inputs, and the bytes of everything else.

        None if they keep the same as `forward`.
        """
        return None

    def products(self, plan: Plan, needs: tuple[bool, ...] | None = None) -> tuple[MatrixProduct, ...]:
        """Return the matrix products of forward, or with `needs` of backward; none if their shapes are not known."""
        return ()

    def in_dtype(self, plan: Plan, dtype: str) -> Plan:
        """Return the plan with tensors of a described type in place of float32, see `ClusterSpec.dtype`."""
        if DTYPES[dtype][0] == 4:
            return plan
        # Types of 16 bits have the size of float16.
        *inputs, output = (
            spec._replace(dtype=np.dtype(np.float16)) if spec.dtype == np.float32 else spec
            for spec in (*plan.inputs, plan.output)
        )
        narrow = replace(plan, inputs=tuple(inputs), output=output)
        if plan.whole is None:
            moved = self.work(*inputs).size_bytes
        else:
            whole = self.in_dtype(plan.whole, dtype)
            moved = whole.work.size_bytes * narrow.tensor_bytes // max(whole.tensor_bytes, 1)
        return replace(narrow, work=plan.work._replace(size_bytes=moved))

    def eager_kernels(
        self, work: DeviceWork, plan: Plan, needs: tuple[bool, ...] | None, memory_format: str
    ) -> DeviceWork:
        """Return the work of the same kernels with what bytes and flops do not say: by default as it is.

        Kernels beside them, which may depend on how images lie in memory, and what they reach, see `DeviceWork`.
        """
        return work

    def cost(
        self,
        plan: Plan,
        software: str,
        needs: tuple[bool, ...] | None = None,
        dtype: str = "float32",
        memory_format: str = "contiguous",
    ) -> DeviceWork:
        """Return what forward, or with `needs` backward, costs a device with this software.

        The only source of prices, for clocks, searches and closed forms.

        Args:
            plan: of the call.
            software, memory_format: see `DeviceSpec`; "fused" is priced as "eager", with a note.
            needs: for each input whether its gradient is wanted.
            dtype: see `ClusterSpec`.

        Returns:
            The work, with the shapes of its matrix products where the kernels of the software are known.
        """
        if software == "fused":
            note_once("a run op by op cannot know what a compiler joins: software='fused' is priced as 'eager'.")
        plan = self.in_dtype(plan, dtype)
        products: tuple[MatrixProduct, ...] = ()
        if software != "plain":
            work = self.eager_work(plan) if needs is None else self.eager_work_backward(needs, plan)
            products = self.products(plan, needs)
        else:
            work = plan.work if needs is None else self.work_backward(needs, plan.work)
        name, output = self.name if needs is None else self.backward_name, plan.output
        found = DeviceWork(name, *work, output.dtype.itemsize, prod(output.shape), self.is_matrix_product, products)
        found = found.with_operands(dtype)
        return found if software == "plain" else self.eager_kernels(found, plan, needs, memory_format)

    # --- a call -------------------------------------------------------------------------------

    def __call__(self, *inputs: Tensor) -> Tensor:
        try:
            device, interpreter = inputs[0]._device, grad_mode.interpreter
            for tensor in inputs:
                if tensor._device is not device:
                    device = common_device(self.name, inputs)
                interpreter = interpreter or tensor.interpreter
        # Reading the attributes is the type check: the common call, Tensors only, pays nothing for it.
        except (AttributeError, IndexError):  # arrays and numbers have no device
            self.check_count(len(inputs))
            return self(*map(as_tensor, inputs))
        if interpreter is not None:
            y = interpreter.run(self, inputs)
            if y is not None:
                return y
        elif self.in_strategy is not None:
            from simparallel.parallel.operator.op_call import refuse_plain

            refuse_plain(self)
        arrays = [tensor._data for tensor in inputs]
        plan = self._plan(arrays)
        recording = grad_mode.enabled
        needs = tuple([recording and tensor._requires_grad for tensor in inputs])
        ctx = self.context_type(kernels_of[get_namespace(*arrays)], needs, plan)
        # The class attribute is FIRST already, so only other devices are stored.
        if device is not FIRST:
            device = ctx.device = device or current_device()
        try:
            y = self.run_forward(ctx, arrays)
        except TypeError:
            _check_one_library(self.name, inputs)  # clearer than CuPy's own error
            raise
        # Without an input that needs a gradient there is nothing to walk back to.
        node = Node(self, ctx, inputs) if True in needs else None
        return Tensor._result(y, node, device)

    def run_forward(self, ctx: Context, arrays: Sequence[Array]) -> Array:
        """Run `forward` on the device of the inputs, whose observer records it."""
        observer = observer_of(ctx.device)
        start_ns = observer.begin(self.name, ctx.plan)
        try:
            y = self.forward(ctx, *arrays)
            observer.end_forward(self, ctx, arrays, y, start_ns)
        except BaseException:
            observer.abandon()
            raise
        return y

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        """Run `backward` on the device of the inputs, whose observer records it."""
        observer = observer_of(ctx.device)
        start_ns = observer.begin(self.backward_name)
        try:
            grads = self.backward(ctx, dy)
            observer.end_backward(self, ctx, start_ns)
        except BaseException:
            observer.abandon()
            raise
        return grads

    def _plan(self, arrays: list[Array]) -> Plan:
        # Shapes and dtypes determine the plan; values never do.
        key = tuple([(array.shape, array.dtype) for array in arrays])
        try:
            plans: dict[Any, Plan] = self.__dict__["_plans"]
        except KeyError:
            plans = self.__dict__["_plans"] = {}
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = self._make_plan(key)
        return plan

    def check_count(self, count: int) -> None:
        """Raise InputError unless `forward` takes `count` inputs."""
        least, most, names = _inputs_of(type(self))  # type: ignore[arg-type]
        if not least <= count <= most:
            raise InputError(f"{self.named} takes the inputs ({names}), got {count}.")

    def twin(self) -> Self:
        """Return a copy that shares the plans, for changing a setting on which plans do not depend."""
        # The copy shares the dict of plans, so it has to exist before.
        self.__dict__.setdefault("_plans", {})
        return copy(self)

    def _make_plan(self, key: tuple[tuple[Any, Any], ...]) -> Plan:
        self.check_count(len(key))
        specs = tuple(Spec(tuple(shape), dtype) for shape, dtype in key)
        shapes = tuple(spec.shape for spec in specs)
        try:
            sizes = bind(self.rule_for(*shapes), shapes)
            return Plan(specs, self.infer(*specs), sizes, self.work(*specs), self.windows(*shapes))
        except SimParallelError as error:  # inner code does not know the op
            why = self.misfit(*shapes) if isinstance(error, ShapeError) else None
            raise type(error)(f"{self.named}: {why or error}", **error.facts) from None

    def __repr__(self) -> str:
        return f"{self.named}{self.strategy_text}"

    @property
    def named(self) -> str:
        """The name and the settings, without the strategy."""
        settings = ", ".join(
            f"{k}={v!r}"
            for k, v in vars(self).items()
            if not k.startswith("_") and k not in ("context_type", "in_strategy", "out_strategy")
        )
        return f"{self.name}({settings})"


@lru_cache(maxsize=1024)
def _inputs_of(op: type[Op]) -> tuple[int, float, str]:
    """Return the least and the largest number of inputs that `forward` takes, and their names."""
    parameters = signature(op.forward).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]  # without self and ctx
    more = [f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL]
    least = sum(p.default is p.empty for p in named)
    return max(least, 1), inf if more else len(named), ", ".join([*(p.name for p in named), *more])


def _check_one_library(who: str, inputs: Sequence[Tensor]) -> None:
    """Raise DeviceMismatchError if some inputs are in host memory and others on a GPU."""
    devices = [device_of(tensor._data) for tensor in inputs]
    on_gpu = next(filter(None, devices), None)
    if None in devices and on_gpu is not None:
        raise device_mismatch(who, inputs, [device or "host" for device in devices], on_gpu)


class AbstractConstant(Op):
    """An op whose result is constant under small changes of its inputs; it is never recorded in the graph."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        # With detached inputs the op is not recorded, in any mode of gradients.
        return super().__call__(*(x.detach() if getattr(x, "_requires_grad", False) else x for x in inputs))


@lru_cache(maxsize=4096, typed=True)  # typed: to an integer tensor, 2 and 2.0 are not the same
def instance(op: type[Op], *settings: Any) -> Op:
    """Return the op with these settings: the same object each time, so that its plans are reused."""
    return op(*settings)
