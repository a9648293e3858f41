"""Semi-automatic parallelism: a program for one device, and strategies for some of its ops.

    with no_init_parameters():
        net = Network()                                  # ops with .shard(...)
    parallel_step = AutoParallel(train_step, parallel_mode="semi_auto")
    loss = parallel_step(images, labels)

The first op that uses a parameter determines its layout. An op without a strategy follows its inputs if they are cut;
if none is, as with the arguments of a "full_batch", it cuts the first dim (`strategy.default`), which is data
parallelism. Layouts that do not fit together are redistributed, and these redistributions can be listed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import zip_longest
from math import prod
from operator import itemgetter
from typing import Any

from simparallel.autograd import Tensor
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.tape import Node, Reversible
from simparallel.autograd.tensor import as_tensor
from simparallel.autograd.tree_map import change_each
from simparallel.backend import is_array
from simparallel.base.attributes import setting
from simparallel.base.checks import check_choice
from simparallel.base.units import format_bytes, format_type_of
from simparallel.clock.memory import parse_bytes
from simparallel.comm import current
from simparallel.comm.blocks import exchange_objects
from simparallel.errors import CollectiveMismatchError, InputError, LayoutError, StrategyError
from simparallel.layout.layout import Layout
from simparallel.layout.sharding import Placement, placement
from simparallel.layout.strategy import layout_of_cuts
from simparallel.parallel.operator.interpreter import SHARDED
from simparallel.parallel.operator.op_call import Implicit, mode
from simparallel.world import context

# Below this, a redistribution costs mostly the latency of a message: it is listed, without a warning.
WARN_FROM_BYTES = 1 << 12
MODES = ("semi_auto", "auto", "sharding_propagation", "recursive_programming")


class AutoParallel:
    """A function or module whose ops run sharded over the devices, by their strategies.

    Args:
        network: module, or a function such as a whole training step. Arrays and Tensors among its arguments get the
            layout of `dataset_strategy`; Tensors among its results are gathered.
        parallel_mode: "semi_auto": the program gives strategies, and other ops follow their inputs. "auto": ops
            without a strategy get the strategies with which a step takes the least simulated time on the
            described cluster, see `simparallel.search`. "sharding_propagation" and "recursive_programming" search as
            MindSpore does. All of these capture the program before it first runs with arguments of new shapes: its
            code runs once more, on tensors without data, up to its first backward.
        dataset_strategy: layout of the arguments. "full_batch": every rank passes the whole. "data_parallel": every
            rank passes its slice of dim 0 (scalars are replicated). A tuple with a tuple of cuts or a Layout for
            each argument: every rank passes its slice.
        strict: an implicit redistribution that moves data is an error.
        plan: a `Plan`, or the file of one, to execute in place of a search, in the modes that search.
        memory_limit: of each device in the model of the search, in bytes or as "32GB"; by default the device's.
        gather_results: False leaves Tensors among the results sharded, as for gradients that an optimizer takes.

    Attributes:
        plan: the plan of the last call; None before, and in semi-automatic mode.

    Raises:
        InputError: unknown mode or dataset strategy, or a plan in semi-automatic mode; (when called) the ranks call
            different ops.
        PlanError: (also when called) the plan cannot be read, or does not fit the program.
        SearchError: (when called) no plan fits into the memory.
        UnknownValueError: (when called, modes that search) the program branches on a value.
        StrategyError, LayoutError: (when called) a strategy is not legal for these shapes.
        LayoutError: (when called) the ranks' slices of an argument differ in shape.

    Warns:
        UserWarning: (the first call with arguments of new shapes, rank 0) ops without a strategy move 4 KiB or more.

    Collective: yes, every rank makes the same calls. The first call with arguments of new shapes also compares these
    shapes, and the calls of ops, between the ranks.

    Example:
        >>> relu = sp.AutoParallel(sp.ops.ReLU().shard(((1, 1),)))
        >>> relu(np.array([[-1.0, 2.0]])).numpy().tolist()
        [[0.0, 2.0]]
    """

    def __init__(
        self,
        network: Callable[..., Any],
        parallel_mode: str = "semi_auto",
        *,
        dataset_strategy: Any = "full_batch",
        strict: bool = False,
        plan: Any = None,
        memory_limit: str | int | None = None,
        gather_results: bool = True,
    ) -> None:
        if not callable(network):
            raise InputError(f"AutoParallel: network is {format_type_of(network)}, expected a Module or a function.")
        check_choice("AutoParallel", "parallel_mode", parallel_mode, MODES)
        if parallel_mode == "semi_auto" and plan is not None:
            raise InputError("AutoParallel: a plan is for the modes that search; pass parallel_mode='auto' with it.")
        self.network, self.parallel_mode, self.strict = network, parallel_mode, strict
        self._gathers = gather_results
        self.redistributions: list[Implicit] = []
        self._memory_limit = None if memory_limit is None else parse_bytes(memory_limit)
        self.plan: Any = None
        if plan is not None:
            from simparallel.search.planner import read_plan

            self.plan = read_plan(plan)
        self._given_plan = self.plan
        # Key (see `_by_plan`) -> interpreter of a plan.
        self._planned: dict[Any, Any] = {}
        # Shapes that were found equal on all ranks.
        self._known: set[tuple[tuple[int, ...], ...]] = set()
        self.dataset_strategy(dataset_strategy)

    def dataset_strategy(self, config: Any) -> None:
        """Set the layout of the arguments, see the class. Raises InputError."""
        known = isinstance(config, str) and config in ("full_batch", "data_parallel")
        listed = isinstance(config, tuple) and all(isinstance(entry, (tuple, Layout)) for entry in config)
        if not known and not listed:
            raise InputError(
                f"AutoParallel: dataset_strategy={config!r} must be 'full_batch', 'data_parallel', or a tuple with a "
                "tuple of cuts or a Layout for each argument."
            )
        self._dataset = config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._dataset, tuple) and len(self._dataset) != len(args):
            raise InputError(
                f"AutoParallel: dataset_strategy has {len(self._dataset)} entries, the call {len(args)} arguments."
            )
        entries = self._dataset if isinstance(self._dataset, tuple) else (self._dataset,) * len(args)
        # The shapes of all arrays among the arguments, to compare them between the ranks.
        shapes: list[tuple[int, ...]] = []
        laid = [change_each(arg, partial(_as_input, entry, shapes)) for arg, entry in zip(args, entries, strict=True)]
        # A tuple has entries for positional arguments only; named ones then count as full batches.
        rest = self._dataset if isinstance(self._dataset, str) else "full_batch"
        named = {name: change_each(arg, partial(_as_input, rest, shapes)) for name, arg in kwargs.items()}
        # `redistributions` lists the last call only. The mode belongs to this thread, and calls may be nested.
        self.redistributions = []
        before = mode.automatic, mode.strict, mode.noted, mode.calls, grad_mode.interpreter
        mode.automatic, mode.strict, mode.noted = True, self.strict or mode.strict, self.redistributions
        grad_mode.interpreter = SHARDED
        try:
            # Before any op: later, unequal slices would show up as a mismatch in some collective.
            is_new = self._check_equal(tuple(shapes))
            if self.parallel_mode != "semi_auto":
                grad_mode.interpreter = self._by_plan(tuple(shapes), laid, named)
            mode.calls = [] if is_new else None
            result = self.network(*laid, **named)
            if self._gathers:
                result = change_each(result, _whole)
            if mode.calls is not None:
                check_same_calls(mode.calls)
                self._warn_of_movement()
            return result
        # Only shapes that are new to a rank are compared. If they are new to some of the ranks alone, these start the
        # comparison while the others start the first collective of an op, which does not match.
        except CollectiveMismatchError as error:
            error.add_note(
                f"AutoParallel: the arguments of rank {current().rank} have shapes {', '.join(map(str, shapes))}. If "
                "those of the other ranks differ, as in a last batch, drop it (drop_last=True), or pad."
            )
            raise
        finally:
            mode.automatic, mode.strict, mode.noted, mode.calls, grad_mode.interpreter = before

    def _by_plan(self, shapes: tuple[tuple[int, ...], ...], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the interpreter of the plan for such a call. Collective: yes, if a plan is searched."""
        # A module may run other ops in evaluation mode, and has other costs without gradients.
        key = shapes, grad_mode.enabled, getattr(self.network, "training", None)
        found = self._planned.get(key)
        if found is None:
            from simparallel.search.planner import interpreter

            found = self._planned[key] = interpreter(self, args, kwargs, self._given_plan)
        found.position = 0
        self.plan = found.plan
        return found

    def _warn_of_movement(self) -> None:
        """Warn on rank 0 of redistributions due to ops without a strategy.

        Redistributions between strategies are the user's choice.
        """
        moving = [(r.size_bytes, r) for r in self.redistributions if r.op.in_strategy is None and r.size_bytes]
        total_bytes = sum(size for size, _ in moving)
        if total_bytes >= WARN_FROM_BYTES and current().rank == 0:
            size_bytes, largest = max(moving, key=itemgetter(0))
            warnings.warn(
                f"AutoParallel: ops without a strategy redistribute {len(moving)} inputs in a step, "
                f"{format_bytes(total_bytes)} to a rank in forward and as much in backward; the "
                f"largest is {format_bytes(size_bytes)}, {largest}. Call .shard(...) on these ops or on those "
                "before them; `redistributions` lists all, strict=True makes them errors.",
                stacklevel=3,
            )

    def _check_equal(self, shapes: tuple[tuple[int, ...], ...]) -> bool:
        """Check that all ranks have arguments of these shapes; return False if an earlier call has checked them."""
        # Comparing is a collective, so compare each list of shapes once, not in every step.
        if shapes in self._known:
            return False
        communicator = current()
        with communicator.for_purpose("AutoParallel: shapes of arguments"):
            each = communicator.all_gather_object(shapes) if communicator.world_size > 1 else [shapes]
        for rank, others in enumerate(each):
            if others != each[0]:
                which = [i for i, (a, b) in enumerate(zip(each[0], others, strict=False)) if a != b][:1]
                differing = f"{_sizes(each[0], which)} on rank 0, {_sizes(others, which)} on rank {rank}"
                raise LayoutError(
                    f"AutoParallel: the arguments differ in shape: {differing}. Every rank passes an equal slice, or "
                    "the whole batch (dataset_strategy='full_batch'): drop the last samples (drop_last=True), or pad."
                )
        self._known.add(shapes)
        return True

    def __repr__(self) -> str:
        return f"AutoParallel({self.network!r}, {self.parallel_mode!r}, dataset_strategy={self._dataset!r})"


def cut_by_context(searches: bool = False) -> partial[AutoParallel] | None:
    """Return `AutoParallel` with the settings of the auto-parallel context; None in modes without sharded operators.

    Args:
        searches: whether it searches for strategies in automatic mode, as training does; evaluation takes the cuts that
            training gave to the parameters.
    """
    parallel_mode = context.get_auto_parallel_context("parallel_mode")
    if parallel_mode not in context.SHARDED_MODES:
        return None
    how = "semi_auto"
    if searches and parallel_mode == context.ParallelMode.AUTO_PARALLEL:
        how = context.SEARCHES[context.get_auto_parallel_context("search_mode")]
    return partial(
        AutoParallel, parallel_mode=how, dataset_strategy=context.get_auto_parallel_context("dataset_strategy")
    )


def check_same_calls(calls: list[tuple[Any, ...]]) -> None:
    """Raise InputError if ranks call different ops: each call is a name, a line, and its arguments.

    Collective: yes.
    """
    # Not recorded as an event: it is not part of the step.
    exchange = partial(exchange_objects, current().world, purpose="AutoParallel: calls of ops")
    digests = exchange(blake2b(repr(calls).encode(), digest_size=16).digest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    each = exchange(calls)
    pairs = zip_longest(each[0], each[other], fillvalue=("nothing", "the end"))
    number, ends = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    described = (f"{name} at {line}{f' with {given}' if given else ''}" for name, line, *given in ends)
    raise InputError(
        f"AutoParallel: ranks run different programs: call {number} of an op is {next(described)} on rank 0, "
        f"and {next(described)} on rank {other}. Each rank holds slices of the same tensors, so all ranks "
        "have to make the same calls: let nothing inside of the step depend on the rank, or use "
        "DistributedDataParallel."
    )


def micro_batches(*inputs: Any) -> list[tuple[Any, ...]]:
    """Return the parts of a batch whose gradients a step accumulates: as many as the plan of `AutoParallel` says.

    A step that can do so needs less memory for activations. Without a plan there is one part, the whole batch:

        parts = micro_batches(images, labels)
        for x, y in parts:
            (loss_fn(net(x), y) / len(parts)).backward()
        optimizer.step()

    Args:
        inputs: arguments of the step; every rank splits its own rows. Other values are in every part.

    Returns:
        The parts, each with a value for each input.
    """
    interpreter = grad_mode.interpreter
    return [inputs] if interpreter is None else interpreter.micro_batches(inputs)


def explicit_redistribution() -> AbstractContextManager[None]:
    """Make implicit redistributions errors inside the block: an op raises StrategyError instead of moving an input."""
    return setting(mode, strict=True)


def quick_redistribution() -> AbstractContextManager[None]:
    """Redistribute small tensors inside the block by the plan that takes the least time, not the fewest bytes.

    Such a plan uses one collective in place of several messages, for at most 64 KiB per rank; `layout.fewest_waits` has
    the estimate that chooses it. Backward uses the setting that is active when it runs. All ranks must enter the block.
    It pays off in real time, between processes; in simulated time the plan of the fewest bytes is usually best.
    """
    return setting(mode, quick=True)


@contextmanager
def implicit_redistributions() -> Iterator[list[Implicit]]:
    """Collect the implicit redistributions of the block in a list."""
    noted: list[Implicit] = []
    with setting(mode, noted=noted):
        yield noted


def _sizes(shapes: tuple[tuple[int, ...], ...], which: list[int]) -> str:
    return f"argument {which[0]} is {shapes[which[0]]}" if which else f"{len(shapes)} arrays"


def _as_input(entry: Any, shapes: list[tuple[int, ...]], x: Any) -> Any:
    """Return an array or a plain Tensor as a sharded one, and append the shape of its slice to `shapes`.

    Sharded tensors and other values are returned unchanged.
    """
    if not isinstance(x, Tensor) and not is_array(x):
        return x
    x = as_tensor(x)
    if x.placement is not None:
        return x
    # The result shares the memory of x: nothing is copied or sent.
    shapes.append(x.shape)
    place = _input_place(x.shape, entry, current().world_size)
    return Tensor._result(x.data, placement=place, interpreter=SHARDED)


@lru_cache(maxsize=1024)
def _input_place(shape: tuple[int, ...], entry: Any, device_num: int) -> Placement:
    layout = input_layout(shape, entry, device_num)
    return placement(layout, tuple(size * cut for size, cut in zip(shape, layout.cuts, strict=True)))


def input_layout(shape: tuple[int, ...], entry: Any, device_num: int) -> Layout:
    """Return the layout of an argument, given the shape of a rank's slice."""
    if isinstance(entry, Layout):
        if entry.mesh.size != device_num:
            raise StrategyError(
                f"dataset_strategy: {entry!r} has {entry.mesh.size} devices, but there are {device_num}."
            )
        layout = entry
    elif isinstance(entry, tuple):
        layout = layout_of_cuts(entry, device_num, "left")
    else:
        axes = ("batch",) if entry == "data_parallel" and shape else ()
        layout = Layout((device_num,), ("batch",))(*axes, *["None"] * (len(shape) - len(axes)))
    if len(layout.cuts) != len(shape):
        raise LayoutError(f"dataset_strategy: {entry!r} does not fit an argument of shape {shape}.")
    assert prod(layout.cuts) <= device_num
    return layout


def _whole(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    whole = x.full_tensor()
    if x._node is not None and x._node.ctx is None:
        whole = Tensor._result(whole.data, Node(_STEPPED, None, ()))  # type: ignore[arg-type]
    return whole


class _ConsumedGraph(Reversible):
    """The graph node of a result whose graph the backward of the step has consumed."""

    consumed = (
        "this result of AutoParallel is detached: the step that AutoParallel ran has computed the gradients itself, "
        "by backward or value_and_grad. Leave this call out, or let the step return the loss without computing them."
    )


_STEPPED = _ConsumedGraph()
