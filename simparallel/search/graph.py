"""The graph of a program: its ops up to the first backward, recorded in a run without data.

The program runs once more than the user asked for: on arrays that have shapes and no elements, and for the whole batch.
Every op is noted with the ops, parameters and arguments that it reads. When the program calls `backward`, the graph is
complete, since the tape follows from it, and the run ends there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from simparallel.arrays.seam import arrays_of
from simparallel.autograd import Context, Op, Plan, Tensor
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.interpreter import AbstractInterpreter
from simparallel.autograd.tape import Node, Reversible
from simparallel.autograd.tree_map import leaves
from simparallel.backend import Array, random_state
from simparallel.base.attributes import setting
from simparallel.base.callsite import user_line
from simparallel.base.dry_arrays import DryArray, without_data
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.comm import current
from simparallel.layout.rule import Shape
from simparallel.layout.sharding import Placement, placement
from simparallel.machine.cluster import describe
from simparallel.nn.deferred import placeholder

# Kinds of inputs of an op: the result of an op, a trained leaf, an argument of the program, or any other value, which
# every rank holds whole.
NODE, PARAMETER, ARGUMENT, CONSTANT = "node", "parameter", "argument", "constant"


_MICRO_BATCHES = 2, 4, 8, 16
# Larger ops are not run: even arrays without data reserve address space.
LARGE_BYTES = 1 << 32


class InputSource(NamedTuple):
    """Where an input of an op comes from: its kind, and its index within the kind."""

    kind: str
    number: int


@dataclass(eq=False)
class OpNode:
    """A call of an op.

    Attributes:
        op: with its settings, and the strategy of the user if it has one.
        name: the module of its first named parameter, then the name of the op, numbered from its second call on.
        inputs: the source of each input.
        plan: shapes, dtypes and work of the whole call.
        rule: text of the op's rule for these shapes.
        needs: for each input whether backward wants its gradient.
        line: of the user's program.
        last: number of the op after which the program drops the result; None if it keeps it to the end.
    """

    op: Op
    name: str
    inputs: tuple[InputSource, ...]
    plan: Plan
    rule: str
    needs: tuple[bool, ...]
    line: str
    has_backward: bool = False
    last: int | None = None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Global shapes of the inputs."""
        return tuple(spec.shape for spec in self.plan.inputs)


@dataclass(eq=False)
class Leaf:
    """A parameter: a trained leaf of the tape.

    Attributes:
        tensor: the leaf.
        placement: of its elements if they are cut already; else None.
    """

    tensor: Tensor
    placement: Placement | None

    @property
    def shape(self) -> Shape:
        return self.tensor.shape if self.placement is None else self.placement.shape


class RecomputeSegment(NamedTuple):
    """Ops `begin` to `end` - 1, which backward runs again (`nn.checkpoint`); if it is optional, the plan decides."""

    begin: int
    end: int
    is_optional: bool


@dataclass(eq=False)
class Graph:
    """The ops of a program in order: those of one micro-batch.

    Attributes:
        nodes: the ops.
        parameters: the trained leaves, by first use.
        arguments: placements of the arguments, and of their micro-batches.
        whole: number of a micro-batch among `arguments` -> number of the argument that it is a part of.
        results: the ops whose results the program returns; each rank gets them whole.
        roots: the ops at whose results backward begins.
        parts: the parts that are recomputed, or may be.
        num_micro_batches: number of parts into which `parallel.micro_batches` has split the batch.
        rows: samples of each rank for it to split (their gcd if they differ); 0 if the program does not call it.
        keeps_gradients: the gradients of the last step are freed between forward and backward, not before.
    """

    nodes: list[OpNode] = field(default_factory=list)
    parameters: list[Leaf] = field(default_factory=list)
    arguments: list[Placement] = field(default_factory=list)
    whole: dict[int, int] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    parts: list[RecomputeSegment] = field(default_factory=list)
    num_micro_batches: int = 1
    rows: int = 0
    keeps_gradients: bool = False

    @property
    def has_gradients(self) -> bool:
        """Whether the parameters have gradients already while forward runs."""
        return self.keeps_gradients or self.num_micro_batches > 1

    @property
    def readers(self) -> dict[InputSource, list[tuple[int, int]]]:
        """Input source -> (op, input) of each reader, in order."""
        found: dict[InputSource, list[tuple[int, int]]] = {}
        for number, node in enumerate(self.nodes):
            for i, source in enumerate(node.inputs):
                found.setdefault(source, []).append((number, i))
        return found

    def mark_backward(self) -> None:
        """Mark the ops that a backward from the roots passes."""
        stack = list(self.roots)
        while stack:
            node = self.nodes[stack.pop()]
            if node.has_backward or not any(node.needs):
                continue
            node.has_backward = True
            sources = zip(node.inputs, node.needs, strict=True)
            stack += [source.number for source, needed in sources if needed and source.kind == NODE]


def captures(graph_with: Callable[[int], Graph]) -> list[Graph]:
    """Return the graph with one micro-batch and, if the program splits its batch, those with 2, 4, and more.

    Args:
        graph_with: returns the graph with a number of micro-batches.
    """
    first = graph_with(1)
    return [first, *(graph_with(count) for count in _MICRO_BATCHES if first.rows and first.rows % count == 0)]


def capture(
    program: Callable[..., Any],
    arguments: Sequence[tuple[Tensor, Placement]],
    args: Any,
    kwargs: Any,
    num_micro_batches: int = 1,
) -> Graph:
    """Run `program(*args, **kwargs)` without data, and return its graph.

    The run ends where the program calls `backward`. It changes no parameter, buffer or random number; code of the
    user that is not an op, such as a counter or a print, runs once more.

    Args:
        program: a training step, or a part of one.
        arguments: the Tensors among its arguments, each with its placement. They have the global shapes.
        args, kwargs: the arguments.
        num_micro_batches: number of parts into which `parallel.micro_batches` splits the batch.

    Raises:
        UnknownValueError: the program needs a value that is unknown without data.
        Other errors: those of the program.
    """
    graph = Graph(arguments=[place for _, place in arguments], num_micro_batches=num_micro_batches)
    capturing = _Capturing(graph, [x for x, _ in arguments])
    with without_effects(), setting(grad_mode, interpreter=capturing):
        try:
            result = program(*args, **kwargs)
        except _BackwardBegins as begun:
            graph.roots = begun.roots
        else:
            graph.roots = graph.results = [number for x in leaves(result) for number in capturing.made_by(x)]
        finally:
            capturing.end()
    graph.mark_backward()
    return graph


class _BackwardBegins(BaseException):
    """The program has called `backward`. A BaseException, because the program might handle an Exception."""

    def __init__(self, roots: list[int]) -> None:
        super().__init__()
        self.roots = roots


class _CaptureEnd(Reversible):
    """The tape entry of every recorded op: the first that backward reaches ends the capture."""

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        raise _BackwardBegins([ctx.number])

    def __repr__(self) -> str:
        return "an op without data"


_ENDS: Any = _CaptureEnd()


# Marks the parameters whose gradients the program frees after it has begun its forward.
_NO_GRADIENT: Any = Tensor._result(np.empty(0))


class _Capturing(AbstractInterpreter):
    """Records ops, and computes the shapes of their results."""

    def __init__(self, graph: Graph, arguments: Sequence[Tensor]) -> None:
        self.graph = graph
        # Id of an array -> its source. Not of a Tensor, because `detach` makes a new Tensor of the same array.
        self._sources: dict[int, InputSource] = {}
        # Keeps the arrays alive, so that no id is reused.
        self._alive: list[Any] = []
        self._dry: dict[int, Array] = {}
        self._counts: dict[str, int] = {}
        self._is_in_part = False
        for number, x in enumerate(arguments):
            self._note(x.data, InputSource(ARGUMENT, number))

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor:
        sources = tuple(map(self._source, inputs))
        arrays = [self._array(x) for x in inputs]
        needs = tuple(grad_mode.enabled and x.requires_grad for x in inputs)
        plan = op._plan(arrays)
        ctx = Context(arrays_of(*arrays), needs, plan)
        # The address space of one process is too small for the arrays of many devices.
        is_large = max(plan.work.size_bytes, plan.output.size_bytes) > LARGE_BYTES
        y = placeholder(*plan.output).view(DryArray) if is_large else op.forward(ctx, *arrays)
        number = len(self.graph.nodes)
        self.graph.nodes.append(self._node(op, inputs, sources, ctx))
        tape = Node(_ENDS, SimpleNamespace(needs=needs, number=number), inputs) if True in needs else None  # type: ignore[arg-type]
        found = Tensor._result(y, tape, inputs[0]._device)
        self._note(found.data, InputSource(NODE, number))
        weakref.finalize(found, self._note_end, number).atexit = False
        return found

    def _note_end(self, number: int) -> None:
        self.graph.nodes[number].last = len(self.graph.nodes) - 1

    def run_part(self, part: Callable[..., Tensor], inputs: tuple[Any, ...], is_optional: bool) -> Tensor:
        begin, outer = len(self.graph.nodes), self._is_in_part
        with setting(self, _is_in_part=True):
            y = part(*inputs)
        end = len(self.graph.nodes)
        # Parts inside a part are recomputed with it.
        if not outer and end > begin:
            self.graph.parts.append(RecomputeSegment(begin, end, is_optional))
        return y

    def micro_batches(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        count = self.graph.num_micro_batches
        places = [self.graph.arguments[s.number] for s in map(self._source_of, inputs) if s and s.kind == ARGUMENT]
        rows = {gcd(*(shape[0] for shape in place.local_shapes.values())) if place.shape else 1 for place in places}
        self.graph.rows = gcd(*rows)
        if count == 1:
            return [inputs]
        return [tuple(map(self._part_of, inputs))] * count

    def _part_of(self, x: Any) -> Any:
        """Return the first micro-batch of an argument: a smaller argument in the same layout."""
        source = self._source_of(x)
        if source is None or source.kind != ARGUMENT:
            return x
        place, count = self.graph.arguments[source.number], self.graph.num_micro_batches
        new = Tensor._result(x.data[: x.data.shape[0] // count])
        self.graph.whole[len(self.graph.arguments)] = source.number
        self.graph.arguments.append(placement(place.layout, (place.shape[0] // count, *place.shape[1:])))
        self._note(new.data, InputSource(ARGUMENT, len(self.graph.arguments) - 1))
        return new

    def _source_of(self, x: Any) -> InputSource | None:
        return self._sources.get(id(x._data)) if isinstance(x, Tensor) else None

    def made_by(self, x: Any) -> list[int]:
        """Return a list with the number of the op that made x; an empty list if no recorded op did."""
        source = self._source_of(x)
        return [source.number] if source is not None and source.kind == NODE else []

    def slice_of(self, x: Array, target: Placement) -> Array:
        return x.copy()

    def _node(self, op: Op, inputs: tuple[Tensor, ...], sources: tuple[InputSource, ...], ctx: Context) -> OpNode:
        layer = next((x.name.rpartition(".")[0] for x in inputs if x.is_leaf and "." in x.name), "")
        shapes = tuple(spec.shape for spec in ctx.plan.inputs)
        return OpNode(
            op=op,
            name=self._named(f"{layer}.{op.name}" if layer else op.name),
            inputs=sources,
            plan=ctx.plan,
            rule=op.rule_for(*shapes),
            needs=ctx.needs,
            line=user_line(),
        )

    def _named(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"

    def _source(self, x: Tensor) -> InputSource:
        found = self._sources.get(id(x._data))
        if found is not None:
            return found
        if x.is_leaf and x.requires_grad:
            self.graph.parameters.append(Leaf(x, x.placement))
            if x._grad is None:
                x._grad = _NO_GRADIENT
            return self._note(x._data, InputSource(PARAMETER, len(self.graph.parameters) - 1))
        # A tensor that was sharded before the program keeps its placement.
        if x.placement is not None:
            self.graph.arguments.append(x.placement)
            return self._note(x._data, InputSource(ARGUMENT, len(self.graph.arguments) - 1))
        return InputSource(CONSTANT, 0)

    def end(self) -> None:
        """Note whether the program has freed gradients after forward has begun, and take the marks back."""
        for x in (leaf.tensor for leaf in self.graph.parameters):
            if x._grad is _NO_GRADIENT:
                x._grad = None
            else:
                self.graph.keeps_gradients = True

    def _note(self, array: Array, source: InputSource) -> InputSource:
        self._sources[id(array)] = source
        self._alive.append(array)
        return source

    def _array(self, x: Tensor) -> Array:
        """Return the array to compute shapes with: without elements for parameters, of global shape for slices."""
        if x.placement is not None:
            return self._dry.setdefault(id(x._data), placeholder(x.placement.shape, x._data.dtype).view(DryArray))
        if x.is_leaf and x.requires_grad:
            return self._dry.setdefault(id(x._data), without_data(x._data))
        return x._data


@contextmanager
def without_effects() -> Iterator[None]:
    """Let the block leave nothing behind: no event, running statistic or drawn random number."""
    drawn, communicator = random_state.snapshot(), current()
    # Events, metrics and the scratch memory of kernels belong to a recorder: they end with this one.
    recorder = Recorder(communicator.rank, describe(communicator.world_size), record="off")
    try:
        # As while a part is recomputed, no layer updates its state.
        with setting(grad_mode, recomputing=True), use_recorder(recorder):
            yield
    finally:
        random_state.restore(drawn)
