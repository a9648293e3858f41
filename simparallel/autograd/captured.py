"""`captured`: a step that repeats is captured as a CUDA graph, and launched with one call of the driver.

A graph repeats the operations that the step started on the GPU, on the same memory. Other effects of the step are
repeated here: the events and clocks of the recorder, the counters of random numbers, the gradients of the leaves, and
the versions of changed memory. `arrays.cuda.capture` refuses effects that cannot be repeated.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import update_wrapper
from time import perf_counter_ns
from typing import Any

from simparallel.arrays.captures import captured_step, refuse, running
from simparallel.arrays.host.windows import scratch
from simparallel.arrays.seam import device_of
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.interpreter import AbstractInterpreter
from simparallel.autograd.op import Op
from simparallel.autograd.tape import mark_changed, written_since
from simparallel.autograd.tensor import Tensor
from simparallel.autograd.tree_map import change_each
from simparallel.backend import Array, is_array, random_state
from simparallel.base.attributes import setting
from simparallel.base.checks import check_integer
from simparallel.clock.recorder import Recorder, current_recorder
from simparallel.errors import CaptureError, InputError
from simparallel.rank_local import RankLocal, per_rank

# Types of the constants that a step reads from global and enclosing scopes, and that its graphs depend on.
_CONSTANTS = (bool, int, float, str, type(None))
# The most kinds of calls to remember. Their number has no bound if the step gets new constants in each call.
_MAX_KINDS = 256
COPIED = "a graph works on a copy of its arguments"


def captured(step: Callable[..., Any] | None = None, *, warmups: int = 2, max_graphs: int = 8) -> Any:
    """Capture a step as a CUDA graph, and repeat it by launching the graph, which starts all its kernels at once.

        step = sp.captured(lambda x, y: loss_of(x, y))   # forward, and backward if it trains

    The first calls run the step itself, and compile its kernels. The next one is captured. Later calls copy the
    arguments into the memory of the graph and launch it; gradients are then in `.grad`, as after the step itself.
    A change of any of these needs another graph, and first runs the step again: shapes and dtypes of arguments,
    constants among the arguments or the variables that the step's own code names, the random seed, `eval()`, and the
    memory of parameters and gradients. In host memory, on simulated devices and in dry runs every call runs the step
    itself, with the same values, results and refusals. In simulated time its operations are started together, as by a
    graph, from the same call on, if the described device has an interpreter.

    The step must do the same in each call. A graph does not see what else changes on the host, such as an attribute
    that is a number; pass such numbers as arguments. It may not read values, run collectives, hooks or steps of
    optimizers, or call `zero_grad`: these belong before or after it. Masks of dropout are drawn on the host for each
    launch. Labels and the loss are checked after a launch, with one host synchronization, as in the step itself.

    Named after CUDA's captures; PyTorch has `torch.cuda.make_graphed_callables`.

    Args:
        step: a function of Tensors, arrays and hashable constants; arrays in host memory are copied to the
            GPU. It returns Tensors, arrays and constants, in tuples, lists or dicts; Tensors are detached.
        warmups: number of calls that run the step itself before a capture.
        max_graphs: number of graphs to keep; beyond it, the one that was used least recently is freed.

    Returns:
        The captured step. Results are new arrays in each call; gradients are the same arrays after each launch.
        Its attribute `num_graphs` is the number of graphs. Without a step, a decorator.

    Raises:
        InputError: `step` is not callable, `warmups` is below 0, or `max_graphs` is below 1.
        CaptureError: in a call: a graph cannot repeat the step.

    Example:
        >>> model = sp.nn.Linear(3, 2)
        >>> optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
        >>> @sp.captured
        ... def forward_backward(x, y):
        ...     loss = sp.functions.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     loss = forward_backward(np.ones((4, 3), "float32"), np.array([0, 1, 0, 1]))
        ...     optimizer.step()
        >>> forward_backward.num_graphs  # in host memory
        0
    """
    if step is None:
        return lambda function: _Captured(function, warmups, max_graphs)
    return _Captured(step, warmups, max_graphs)


class _Graphs(RankLocal):
    """The graphs of a captured step on this rank, the least recently used first, and the kinds of its calls."""

    outlasts_runs = True
    graphs: OrderedDict[Any, _Graph] = per_rank(OrderedDict)
    kinds: dict[Any, _Kind] = per_rank(dict)


class _Captured:
    """See `captured`."""

    def __init__(self, step: Callable[..., Any], warmups: int, max_graphs: int) -> None:
        if not callable(step):
            raise InputError(f"captured: {step!r:.100} is not a function.")
        self.step = step
        self.warmups = check_integer("captured", "warmups", warmups)
        self.max_graphs = check_integer("captured", "max_graphs", max_graphs, 1)
        # Names and docstring only: a step may be an object with attributes of its own.
        update_wrapper(self, step, updated=())
        # Functions of NumPy 2.0 have no qualified name.
        self.name = getattr(step, "__qualname__", getattr(step, "__name__", type(step).__name__))
        # Ranks that are threads call one object, and each has its own graphs.
        self._mine = _Graphs()

    def __reduce__(self) -> Any:
        return type(self), (self.step, self.warmups, self.max_graphs)

    @property
    def num_graphs(self) -> int:
        """The number of graphs of this rank."""
        return len(self._mine.graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gpu, arguments, is_part = running.device, (args, kwargs), bool(running.step)
        with captured_step(self.name):
            # A captured step that another one calls becomes part of the other's graph.
            if gpu is None or is_part:
                self._check_host(arguments)
                with nullcontext() if is_part else self._priced(arguments):
                    return _detached(self.step(*args, **kwargs))
            inputs: list[Array] = []
            change_each(arguments, lambda item: _add_input(item, inputs))
            # The program may have another current stream, whose operations would not be part of the graph.
            with gpu.compute:
                return self._run(gpu, self._key(arguments), arguments, inputs)

    def _priced(self, arguments: Any) -> AbstractContextManager[None]:
        """Start the operations of a call at once, in simulated time, where a GPU would launch a graph."""
        recorder = current_recorder()
        if recorder is None or recorder.launcher is None:
            return nullcontext()
        kind = self._mine.kinds.setdefault(self._key(arguments), _Kind())
        is_launch = kind.calls.get(None, 0) > self.warmups
        kind.calls[None] = kind.calls.get(None, 0) + 1
        return recorder.at_once() if is_launch else nullcontext()

    def _run(self, gpu: Any, key: Any, arguments: Any, inputs: list[Array]) -> Any:
        """Launch the graph that fits, or run the step itself, or capture it."""
        graphs, kinds = self._mine.graphs, self._mine.kinds
        kind = kinds.setdefault(key, _Kind())
        if len(kinds) > _MAX_KINDS:
            del kinds[next(iter(kinds))]
        state = kind.state()
        graph = graphs.get((key, state))
        if graph is not None and graph.fits():
            graphs.move_to_end((key, state))
            return graph.launch(inputs)
        on_gpu = [gpu.home(array, False) for array in inputs]
        seen = _Observer()
        if kind.calls.get(state, 0) < self.warmups:
            args, kwargs = _with_arrays(arguments, on_gpu)
            with seen.watching():
                result = self.step(*args, **kwargs)
            kind.note(seen)
            return _detached(result)
        graph = _Graph(gpu, seen)
        result = graph.capture(self.step, arguments, on_gpu)
        # This replaces a graph whose memory no longer fits.
        state = kind.note(seen)
        graphs[key, state], kind.calls[state] = graph, 0
        if len(graphs) > self.max_graphs:
            graphs.popitem(last=False)
        return result

    def _check_host(self, arguments: Any) -> None:
        """Refuse GPU arrays outside a run: their stream cannot be captured."""
        inputs: list[Array] = []
        change_each(arguments, lambda item: _add_input(item, inputs))
        if running.device is None and any(map(device_of, inputs)):
            raise CaptureError(
                f"{self.name}: the arrays are on a GPU, but no rank runs here whose stream could be captured. Run "
                "the program with sp.launch(..., array='cupy') or simparallel run --array cupy.",
                step=self.name,
            )

    def _key(self, arguments: Any) -> Any:
        """Return a hashable key of the outside state that the step's operations are known to depend on."""
        described: list[Any] = []
        shape = change_each(arguments, lambda item: described.append(_described(item)))
        key = repr(shape), tuple(described), grad_mode.enabled, random_state.seed, random_state.given_part
        try:
            hash(key)
        except TypeError:
            why = "each constant needs a graph of its own"
            refuse("has an argument that cannot be hashed", "Pass Tensors, arrays and constants.", why)
        return (*key, tuple(_constants_of(self.step)))


def _add_input(item: Any, inputs: list[Array]) -> None:
    if isinstance(item, Tensor):
        if item.requires_grad:
            refuse(
                "has an argument that requires a gradient", "Use it as a variable of the step, or detach it.", COPIED
            )
        inputs.append(item.data)
    elif is_array(item):
        inputs.append(item)


def _with_arrays(arguments: Any, arrays: list[Array]) -> Any:
    """Return the arguments with these arrays in place of their own."""
    remaining = iter(arrays)

    def change(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item._like(next(remaining))
        return next(remaining) if is_array(item) else item

    return change_each(arguments, change)


def _described(item: Any) -> Any:
    if isinstance(item, Tensor) or is_array(item):
        return isinstance(item, Tensor), item.shape, str(item.dtype)
    # True and 1 are equal, but different constants.
    return type(item), item


def _constants_of(step: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, (type, value)) of the constants of global and enclosing scopes that a function names."""
    function = getattr(step, "__func__", step)
    if not inspect.isfunction(function):
        return
    code = function.__code__
    for name in code.co_names:
        if isinstance(value := function.__globals__.get(name), _CONSTANTS):
            yield name, (type(value), value)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, _CONSTANTS):
            yield name, (type(value), value)


def _detached(result: Any) -> Any:
    """Return the result of a step with its Tensors detached; refuse a Tensor whose graph was kept for backward."""

    def change(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if item._node is not None and item._node.ctx is not None:
            refuse(
                "returns a Tensor whose graph is kept for a later backward",
                "Call backward inside the step, without retain_graph, or return detach() of it.",
            )
        return item.detach()

    return change_each(result, change)


class _Kind:
    """Calls with equal keys: the leaves and modules that their operations depend on.

    Attributes:
        calls: state -> number of calls that began in it and ran the step itself since the last capture.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, Tensor] = {}
        self._modules: list[Any] = []
        self.calls: dict[Any, int] = {}

    def state(self, before: _Observer | None = None) -> Any:
        """Return which leaves have gradients, and which modules train: now, or as an observer first saw them."""
        gradients = {} if before is None else {id(leaf): gradient for leaf, gradient in before.leaves()}
        modules = {} if before is None else before.modules
        return (
            tuple(gradients.get(i, leaf._grad) is None for i, leaf in self._leaves.items()),
            tuple(modules.get(module, module.training) for module in self._modules),
        )

    def note(self, seen: _Observer) -> Any:
        """Count a call, and return the state in which it began."""
        self._leaves |= {id(leaf): leaf for leaf, _ in seen.leaves()}
        self._modules += [module for module in seen.modules if module not in self._modules]
        state = self.state(seen)
        self.calls[state] = self.calls.get(state, 0) + 1
        return state


class _Observer(AbstractInterpreter):
    """An observer of the tensors and modules that a call of the step uses; the ops run as usual.

    Attributes:
        modules: the modules that were called, with the value of `training` of each.
        others: weak references to used tensors that require no gradient.
        arrays: weak references to the arrays of all used tensors.
    """

    def __init__(self) -> None:
        # The leaves that require a gradient, by id, and their gradients when an op first read them.
        self._leaves: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        self.modules: dict[Any, bool] = {}
        self.others: list[weakref.ref[Tensor]] = []
        self.arrays: list[weakref.ref[Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the calls inside the block, and then the parameters and buffers of the called modules."""
        with setting(grad_mode, interpreter=self), setting(running, modules=self.modules):
            yield
        for module in self.modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        if tensor._requires_grad:
            if id(tensor) not in self._leaves or self._leaves[id(tensor)][0]() is None:
                self._leaves[id(tensor)] = weakref.ref(tensor), tensor._grad
        else:
            self.others.append(weakref.ref(tensor))
        self.arrays.append(weakref.ref(tensor._data))

    def leaves(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the leaves that exist after the call, with their gradients before it."""
        found = [(ref(), gradient) for ref, gradient in self._leaves.values()]
        # A recomputed part of the tape begins with temporary leaves.
        return [(leaf, gradient) for leaf, gradient in found if leaf is not None and leaf._node is None]

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        for tensor in inputs:
            if tensor._node is None:
                self.note(tensor)
        interpreter = next((tensor.interpreter for tensor in inputs if tensor.interpreter is not None), None)
        return None if interpreter is None else interpreter.run(op, inputs)


class _Graph:
    """A captured step: its graph, the memory that it uses, and its effects on the host.

    Args:
        gpu: the GPU of the rank, see `captures`.
        seen: the observer of the capture.
    """

    def __init__(self, gpu: Any, seen: _Observer) -> None:
        self._seen = seen
        self._gpu, self._capture = gpu, gpu.new_capture()
        self._recorder = current_recorder()
        self._notes: list[Callable[[], None]] = []

    def capture(self, step: Callable[..., Any], arguments: Any, arrays: list[Array]) -> Any:
        """Capture the step with arguments in the graph's memory, launch it, and return the result."""
        self._inputs = [array.copy() for array in arrays]
        args, kwargs = _with_arrays(arguments, self._inputs)
        state, began = random_state.snapshot(), next(grad_mode.numbers)
        try:
            with self._capture.recording(), scratch.apart(), self._seen.watching(), self._noted_events():
                result = step(*args, **kwargs)
            self._result = _detached(result)
            self._keep(began)
            after = random_state.snapshot()
            self._drawn = after[1] - state[1], after[2] - state[2]
            self._calls = {name: count - state[3].get(name, 0) for name, count in after[3].items()}
            # The launch draws the masks of this call: restore the counters.
            random_state.restore(state)
            self._capture.launch()
            self._count_draws()
            self._check()
        except BaseException:
            random_state.restore(state)
            for leaf, gradient in self._seen.leaves():
                leaf._grad = gradient
            raise
        return self._results()

    def _keep(self, began: int) -> None:
        """Keep the arrays that the graph reads and writes, so that they are not freed; find the changed ones."""
        arrays = [array for ref in self._seen.arrays if (array := ref()) is not None]
        self._leaves = [
            (leaf, leaf._data, _data_of(before), _data_of(leaf._grad)) for leaf, before in self._seen.leaves()
        ]
        self._tensors = [(tensor, tensor._data) for ref in self._seen.others if (tensor := ref()) is not None]
        if written_since(self._inputs, began):
            refuse("writes into an argument", "Write into a copy of it.", COPIED)
        changed = {id(array): array for array in written_since(arrays, began)}
        given = [gradient for _, _, before, gradient in self._leaves if before is None and gradient is not None]
        self._changed = [Tensor._result(array) for array in (*changed.values(), *given)]

    def fits(self) -> bool:
        """Return whether tensors and gradients still have the memory that was captured."""
        return (
            self._recorder is current_recorder()
            and all(tensor._data is array for tensor, array in self._tensors)
            and all(
                leaf._data is data and leaf._requires_grad and not leaf._hooks and _data_of(leaf._grad) is before
                for leaf, data, before, _ in self._leaves
            )
        )

    def launch(self, arrays: list[Array]) -> Any:
        """Launch the graph with these arguments, repeat the step's effects on the host, and return the result."""
        for own, array in zip(self._inputs, arrays, strict=True):
            own[...] = self._gpu.home(array, False)
        self._capture.launch()
        self._count_draws()
        self._check()
        with nullcontext() if self._recorder is None else self._recorder.at_once():
            for note in self._notes:
                note()
        for leaf, _, before, gradient in self._leaves:
            if gradient is not before and gradient is not None:
                leaf._grad = leaf._gradient(gradient)
        mark_changed(self._changed)
        return self._results()

    def _count_draws(self) -> None:
        random_state.drawn += self._drawn[0]
        random_state.masks += self._drawn[1]
        for stream, count in self._calls.items():
            random_state.calls[stream] = random_state.calls.get(stream, 0) + count

    def _check(self) -> None:
        for check in self._capture.checks:
            check()

    def _results(self) -> Any:
        """Return copies of the results: the next launch overwrites the graph's own."""

        def change(item: Any) -> Any:
            if isinstance(item, Tensor):
                return item._like(item._data.copy())
            return item.copy() if is_array(item) else item

        return change_each(self._result, change)

    @contextmanager
    def _noted_events(self) -> Iterator[None]:
        """Note the recorder's events inside the block, so that each launch can record them again."""
        if self._recorder is None:
            yield
            return
        recorders = list(self._recorder.devices.values())
        for recorder in recorders:
            self._note_events(recorder)
        try:
            yield
        finally:
            for recorder in recorders:
                del recorder.compute, recorder.mark

    def _note_events(self, recorder: Recorder) -> None:
        times_ps: list[int] = []
        compute, mark = recorder.compute, recorder.mark

        def note_compute(name: str, kind: str, start_ns: int, end_ns: int, price: Any, layer: str = "") -> None:
            def again() -> None:
                now_ns = perf_counter_ns()
                again_ps.append(recorder.now_ps)
                compute(name, kind, now_ns, now_ns, price, layer)

            times_ps.append(recorder.now_ps)
            self._notes.append(again)
            compute(name, kind, start_ns, end_ns, price, layer)

        def note_mark(name: str, depth: int, step: int, start_ns: int, start_ps: int) -> None:
            # A mark begins before the first operation that starts at its time or later.
            first = next((i for i, time_ps in enumerate(times_ps) if time_ps >= start_ps), len(times_ps))

            def again() -> None:
                begin_ps = again_ps[first] if first < len(again_ps) else recorder.now_ps
                mark(name, depth, recorder.step, perf_counter_ns(), begin_ps)

            self._notes.append(again)
            mark(name, depth, step, start_ns, start_ps)

        again_ps: list[int] = []
        self._notes.append(again_ps.clear)
        recorder.compute, recorder.mark = note_compute, note_mark  # type: ignore[assignment, method-assign]


def _data_of(gradient: Tensor | None) -> Array | None:
    return None if gradient is None else gradient._data
