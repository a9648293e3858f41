"""Run one stage of a model by the model's own forward pass, in which the ops of other stages compute nothing.

Every rank runs the same lines of Python. A value belongs to the stage of the child that computed it, and the result of
an op that stands between the children to the latest stage of its inputs; inputs of the model and constants belong to
none, because every rank has them. Ops of the running stage compute. Those of other stages give tensors without data,
which have a shape and a stage. A value that a later stage needs is sent there directly from its own stage, so a model
may be any Module, with skip connections, and with code between the calls of its children.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from simparallel.autograd import Op, Redistribute, Tensor
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.interpreter import AbstractInterpreter
from simparallel.autograd.tape import Node, Source
from simparallel.autograd.tree_map import change_each
from simparallel.backend import random_state
from simparallel.base.callsite import user_level
from simparallel.base.dry_arrays import empty
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.layout.sharding import Placement, placement
from simparallel.nn import Module, checkpoint
from simparallel.nn.hooks import summed_along
from simparallel.parallel.operator.interpreter import SHARDED, move_tensor, relabelled

# The stage of values that every rank has.
EVERYWHERE = -1


class RemoteValue(AbstractInterpreter):
    """The mark of a tensor without data: the value of a stage that this rank is not running now."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        raise InputError(
            f"Pipeline: {op.described} uses a value of stage {self.stage} that did not come through the arguments of "
            "its module; values go from stage to stage as arguments of the model's children."
        )


class StageValue(NamedTuple):
    """A value on its way to a later stage; `number` counts the values from the one stage to the other, from 0."""

    source: int
    target: int
    number: int


class StageTransport(Protocol):
    """The transport of values between stages."""

    def send(self, stage_value: StageValue, x: Tensor) -> None:
        """Send x, a value of the running stage, to the stage that `stage_value` names."""

    def receive(self, stage_value: StageValue, like: Tensor) -> Tensor:
        """Return a value that the running stage needs, as a leaf; it has shape and dtype of `like`."""


class _Done(BaseException):
    """The end of a stage's forward once all its values have been sent: the rest of the model is for others."""


class CompletedPass(NamedTuple):
    """The results of a pass to the end of the model.

    Attributes:
        sends: how many values the stage sends.
        masks: stream -> calls of its layer, see `RandomState.calls`.
    """

    sends: int
    masks: dict[str, int]


class ForwardCache:
    """The results of forward passes, which later ones in the same modes (training, evaluation) reuse.

    Attributes:
        results: (number of a call, the child, shapes and dtypes of its arguments) -> results of a child of another
            stage, and calls of the streams of its masks.
        passes: (stage, shapes of the model's inputs) -> the pass.
    """

    def __init__(self) -> None:
        self.results: dict[Any, tuple[Any, dict[str, int]]] = {}
        self.passes: dict[Any, CompletedPass] = {}


class Switch:
    """A switch that directs calls of a model's children to the forward pass that is under way.

    Args:
        stages_of: for each child that stages name, the stages of its calls, in order; further calls have the last one.
    """

    def __init__(self, stages_of: Mapping[Module, Sequence[int]]) -> None:
        self.stages_of = stages_of
        self.now: StageForward | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Direct calls of the children to the forward pass, inside the block."""
        before = {module: module.__dict__.get("forward") for module in self.stages_of}
        for module in before:
            module.__dict__["forward"] = partial(self._call, module, module.forward)
        try:
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward

    def _call(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # In backward, to recompute a part, no pass is under way.
        return forward(*args, **kwargs) if self.now is None else self.now.call(module, forward, args, kwargs)


class StageForward(AbstractInterpreter):
    """One forward pass of one stage.

    Args:
        stage: the stage that computes.
        switch: the children.
        messages: the transport of values.
        known: the results of earlier passes.
        start: number of the model's first stage among those of all replicas, which messages name.

    Attributes:
        received: the values that came from earlier stages, as leaves; `sent`: those that went to later ones.
        used: id of a parameter -> the stages that use it in code between the children.
        is_first: whether no earlier pass had inputs of these shapes; the pass then goes to the end of the model.
        masks: stream -> calls of its layer in a pass to the end.
    """

    is_first = True
    # The memory that code between the children writes to may belong to a value of another stage.
    writes_in_place = False

    def __init__(
        self, stage: int, switch: Switch, messages: StageTransport, known: ForwardCache, start: int = 0
    ) -> None:
        self.stage, self._switch, self._messages, self._known, self._start = stage, switch, messages, known, start
        self.received: list[tuple[StageValue, Tensor]] = []
        self.sent: list[tuple[StageValue, Tensor]] = []
        self.used: dict[int, set[int]] = {}
        # Id of a tensor of this stage -> the tensor; recomputed parts free theirs before the stage ends.
        self._own: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        # References to values that cross, so that no other tensor gets the same id.
        self._kept: list[Tensor] = []
        # (id of a value, target stage) -> the value there.
        self._moved: dict[tuple[int, int], Tensor] = {}
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._calls: Counter[Module] = Counter()
        self._num_calls = 0
        # In a child of another stage: that stage.
        self._around = EVERYWHERE
        self._outer: AbstractInterpreter | None = None
        self._sends: int | None = None

    def run_model(self, model: Callable[..., Any], *inputs: Any) -> Any:
        """Call the model, or a function that computes its loss; return the result, None if the pass ended early."""
        key = self.stage, *[getattr(x, "shape", None) for x in inputs]
        known, calls = self._known.passes.get(key), dict(random_state.calls)
        self.is_first = known is None
        self._outer, grad_mode.interpreter, self._switch.now = grad_mode.interpreter, self, self
        try:
            # Without a value to send, a pass goes to its end: the last stage has the loss.
            self._sends = known.sends if known is not None and known.sends else None
            found = model(*inputs)
            self._known.passes[key] = CompletedPass(len(self.sent), _new_calls(calls))
            return found
        except _Done:
            return None
        finally:
            grad_mode.interpreter, self._switch.now = self._outer, None
            self.masks = self._known.passes[key].masks if key in self._known.passes else {}

    def stage_of(self, x: Any) -> int:
        """Return the stage of a value."""
        mark = getattr(x, "interpreter", None)
        if type(mark) is RemoteValue:
            return mark.stage
        return self.stage if self._own.get(id(x)) is x else EVERYWHERE

    @property
    def is_elsewhere(self) -> bool:  # type: ignore[override]
        return self._around != EVERYWHERE

    # --- ops and children -----------------------------------------------------------------------------

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Run an op between the children, or inside a child of another stage."""
        stage = max(self._around, *map(self.stage_of, inputs))
        if stage == EVERYWHERE:
            return None
        moved = [self._bring(x, stage) for x in inputs]
        if stage != self.stage:
            # A plan reads only shapes, dtypes and layouts.
            output = op._plan(moved).output
            return _remote(output.shape, output.dtype, stage, _placement_of(op, moved))
        return self._own_result(op, moved, {})

    def run_part(self, part: Callable[..., Tensor], inputs: tuple[Any, ...], is_optional: bool) -> Tensor | None:
        """Run a part that is recomputed in backward: on this stage by a separate checkpoint.

        Warns:
            UserWarning: the part is not a child that stages name, so its activations are kept.
        """
        stage = self.next_stage(part)
        if stage == EVERYWHERE and not is_optional:
            warnings.warn(
                "Pipeline: nn.checkpoint keeps the activations of a part that is no child in `stages`, because it may "
                "belong to several stages. Recompute such a child, nn.checkpoint(self.block, x), and name it there.",
                stacklevel=user_level(),
            )
        if is_optional or stage != self.stage:
            return part(*inputs)
        return self._own_result(partial(checkpoint, part), [self._bring(x, stage) for x in inputs], {})

    def note_detached(self, x: Tensor, detached: Tensor) -> None:
        if type(x.interpreter) is RemoteValue:
            detached.interpreter = x.interpreter
        elif self._own.get(id(x)) is x:
            self._mark_own(detached)

    def next_stage(self, module: Any) -> int:
        """Return the stage that runs the next call of a child of the model; EVERYWHERE for anything else."""
        stages = self._switch.stages_of.get(module)
        return EVERYWHERE if stages is None else stages[min(self._calls[module], len(stages) - 1)]

    def call(self, module: Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a child: here, or without data."""
        stage = self.next_stage(module)
        self._calls[module] += 1
        self._num_calls += 1
        bring = partial(self._bring, target=stage, module=module)
        args, kwargs = change_each(args, bring), change_each(kwargs, bring) if kwargs else kwargs
        if stage == self.stage:
            return self._own_result(forward, args, kwargs)
        specs = [_spec(x) for x in args]
        if kwargs or None in specs:
            return self._remote(module, stage, forward, args, kwargs)
        key = self._num_calls, module, *specs
        if key in self._known.results:
            found, masks = self._known.results[key]
            for stream, count in masks.items():
                random_state.calls[stream] = random_state.calls.get(stream, 0) + count
            return found
        calls = dict(random_state.calls)
        found = self._remote(module, stage, forward, args, kwargs)
        self._known.results[key] = found, _new_calls(calls)
        return found

    def _remote(self, module: Module, stage: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a child of another stage: Tensors without data, marked with the stage."""
        around, self._around = self._around, stage
        # Restored afterwards: a norm would write its statistics.
        buffers = [(each, dict(each._buffers)) for each in module.modules()]
        try:
            return change_each(forward(*args, **kwargs), partial(_marked, stage=stage))
        finally:
            self._around = around
            for each, before in buffers:
                each._buffers.update(before)

    def _own_result(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a function of this stage, whose Tensors are marked as the stage's own.

        Its ops run without this interpreter.
        """
        given = {id(x) for x in (*args, *kwargs.values())}

        def mark(x: Any) -> Any:
            # An input of the model, or a parameter, that a child returns: the same object belongs to all stages.
            is_shared = isinstance(x, Tensor) and (id(x) in given or (x.is_leaf and x.requires_grad))
            return self._mark_own(x.clone() if is_shared and self.stage_of(x) == EVERYWHERE else x)

        grad_mode.interpreter = self._outer
        try:
            return change_each(function(*args, **kwargs), mark)
        finally:
            grad_mode.interpreter = self

    def _mark_own(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self._own[id(x)] = x
        return x

    # --- values that cross ----------------------------------------------------------------------------

    def _bring(self, x: Any, target: int, module: Module | None = None) -> Any:
        """Return a value as stage `target` has it, and send or receive it if this is its first use there."""
        source = self.stage_of(x)
        if self.is_first and source == EVERYWHERE and self._around == EVERYWHERE and isinstance(x, Tensor):
            for leaf in _leaves(x._node or x):
                if summed_along(leaf) is not None:
                    raise InputError(
                        f"Pipeline: code of the model uses {leaf.name} between its children, and a group of "
                        "fully_shard has it, which gathers it for its child alone. Read it in that child, which may "
                        "have a name in each stage that calls it; or leave it out of groups: then the Pipeline sums "
                        "its gradient, as for tied weights."
                    )
                self.used.setdefault(id(leaf), set()).add(target)
        if source in (EVERYWHERE, target):
            return x
        if source > target:
            raise InputError(
                f"Pipeline: a {type(module).__name__} of stage {target} is called with a value of stage {source}: "
                "stages follow each other in the order of the calls. Name the children in that order, "
                "stages=[[…], […]], or pass example=(inputs, labels), by which it is found."
            )
        key = id(x), target
        if key not in self._moved:
            stage_value = StageValue(self._start + source, self._start + target, self._numbers[source, target])
            self._numbers[source, target] += 1
            self._kept.append(x)
            self._moved[key] = x
            if target == self.stage:
                leaf = self._messages.receive(stage_value, _remote(x.shape, x.dtype, source, _wire_placement(x)))
                self.received.append((stage_value, leaf))
                # With a graph node, so that a child may write `x += 1`.
                self._moved[key] = self._mark_own(relabelled(leaf, leaf.placement, None))
            elif source == self.stage:
                # A cut value crosses in slices, and a sum that is left unfinished is finished before.
                place = _wire_placement(x)
                if place is not None:
                    x = self._own_result(move_tensor, [x, place], {})
                elif x.placement is not None:
                    x = self._own_result(Tensor.full_tensor, [x], {})
                self._messages.send(stage_value, x)
                self.sent.append((stage_value, x))
                if len(self.sent) == self._sends:
                    raise _Done
        return self._moved[key]


def _new_calls(before: Mapping[str, int]) -> dict[str, int]:
    """Return stream -> calls of its layer since these counts."""
    calls = random_state.calls
    return {name: count - before.get(name, 0) for name, count in calls.items() if count != before.get(name, 0)}


def _leaves(source: Source) -> Iterator[Tensor]:
    """Yield a parameter, or the parameters that a node computes from, as a transposed weight is."""
    if isinstance(source, Node):
        for x in source.inputs:
            yield from _leaves(x)
    elif source.requires_grad:
        yield source


def _spec(x: Any) -> Any:
    """Return shape and dtype of a Tensor; None for anything else."""
    return (x.shape, x.dtype, x.placement) if isinstance(x, Tensor) else None


def _placement_of(op: Op, inputs: Sequence[Tensor]) -> Placement | None:
    """Return the placement of the result: that of the stage that computes it, over the ranks of this one."""
    if all(x.placement is None for x in inputs):
        return None
    if type(op) is Redistribute:
        return None if op.layout is None else placement(op.layout, inputs[0].shape)
    return SHARDED.runner(op, tuple(inputs)).call.output


def _wire_placement(x: Tensor) -> Placement | None:
    """Return the placement in which a value crosses; None if that is whole, on each rank of its stage."""
    place = None if x.placement is None else x.placement.gradient
    return None if place is None or place.is_whole else place


def _remote(shape: tuple[int, ...], dtype: Any, stage: int, place: Placement | None = None) -> Tensor:
    local = shape if place is None else place.local_shapes[current().rank]
    return Tensor._result(empty(local, dtype), None, None, place, RemoteValue(stage))


def _marked(x: Any, stage: int) -> Any:
    """Return a result of a child as a value of its stage."""
    if not isinstance(x, Tensor) or (type(x.interpreter) is RemoteValue and x.interpreter.stage == stage):
        return x
    return _remote(x.shape, x.dtype, stage, x.placement)
