"""Activation checkpointing: keep the inputs of a part of a network, and recompute its activations in backward.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost". The autograd graph of the first run is
discarded except for its ends: the tensors, older than the part, on which its result depends. Backward runs the part
once more with these tensors as leaves, and continues through the graph that this run records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from simparallel.autograd import Tensor, run_backward
from simparallel.autograd.tape import Node, Reversible, Source, grad_mode, is_written_since, nodes_behind
from simparallel.backend import Array, random_state
from simparallel.base.attributes import setting
from simparallel.clock.recorder import observer_of
from simparallel.errors import AutogradError
from simparallel.machine.devices import current_device
from simparallel.nn.amp import hidden_casts, hiding


def checkpoint(part: Callable[..., Tensor], *inputs: Any, optional: bool = False) -> Tensor:
    """Run `part(*inputs)`, and keep its inputs for backward instead of its activations.

    All tensors on which the result depends get their gradients, as without a checkpoint: inputs, parameters, and
    tensors that `part` captures, as a closure or a method of a Module does. All of these count as inputs below.

    Args:
        part: a Module, or any function of Tensors; it runs twice and must compute the same both times. Random
            numbers drawn from this rank's state are the same in both runs, and so is the device of a surrounding
            `with device(...)`.
        inputs: Tensors, or other values, which are passed on.
        optional: recompute this part only if the plan of `AutoParallel` says so, for example because memory is short;
            without a plan, this is `part(*inputs)`.

    Returns:
        The result of `part`: one Tensor.

    Raises:
        AutogradError: `part` returned another type, or writes in place into one of its inputs. In backward, before any
            gradient of the part is delivered: an input was changed in place since forward, or the second run differed
            from the first.

    Cost: one more forward pass of `part`; memory for its inputs instead of its activations, which exist only while the
    part runs.

    Example:
        >>> layer = sp.nn.Linear(3, 2)
        >>> sp.nn.checkpoint(lambda x: layer(x).tanh(), sp.Tensor([[1.0, 2.0, 3.0]])).sum().backward()
        >>> layer.weight.grad.shape
        (2, 3)
    """
    interpreter = grad_mode.interpreter
    if interpreter is not None:
        found = interpreter.run_part(part, inputs, optional)
        if found is not None:
            return found
    elif optional:
        return part(*inputs)
    drawn, start = random_state.snapshot(), next(grad_mode.numbers)
    position = None if interpreter is None else interpreter.position
    # Weakly: the first run frees what is inside of it.
    read: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
    with setting(grad_mode, read=read):
        y = part(*inputs)
    if not isinstance(y, Tensor):
        raise AutogradError(f"checkpoint: the part returned {type(y).__name__}; it must return one Tensor.")
    if y._node is None or y._node.number < start:
        return y
    by_source = {id(x._node or x): x for x in read.values()}
    needed = {id(x): x for end in _ends(y, start) if (x := by_source.get(id(end))) is not None}
    # Inputs without a gradient are kept as well, because the second run reads their values.
    others = {id(x): x for x in inputs if isinstance(x, Tensor) and id(x) not in needed}
    sources = [*needed.values(), *others.values()]
    for x in sources:
        if is_written_since(x._data, start):
            raise AutogradError(
                f"checkpoint: {_name_of(part)} writes in place into {x.name or 'a tensor'} of shape {x.shape}, which "
                "is its input: the second run would start from other values. Write into a clone()."
            )
    # Arrays are attributes of the context, where backward checks that they are unchanged since forward.
    context = SimpleNamespace(
        needs=(True,) * len(needed) + (False,) * len(others),
        ends=tuple(needed.values()),
        # Called with the result of the second run, before its backward.
        prepare=None,
        inputs=inputs,
        sources=sources,
        result=(y.shape, y.dtype, y.placement),
        drawn=drawn,
        parts=(random_state.part, random_state.sharded_part),
        device=current_device(),
        casts=hidden_casts(),
        position=position,
        **{f"source_{i}": x._data for i, x in enumerate(sources)},
    )
    op = _Recompute(part)
    observer_of(y._device).memory.keep(op, [x.data for x in needed.values()])
    return y._like(y.data, Node(op, context, sources))  # type: ignore[arg-type]


def _ends(y: Tensor, start: int) -> list[Source]:
    """Return what the graph of y begins from: leaves, and nodes with numbers below `start`, of before the part."""
    ends: dict[int, Source] = {}
    nodes_behind([y], start, ends)
    return list(ends.values())


@contextmanager
def _as_leaves(sources: Sequence[Tensor], arrays: Sequence[Array]) -> Iterator[None]:
    """Make the sources leaves with the arrays of the first run, inside the block."""
    before = [(x, x._node, x._data) for x in sources]
    try:
        for x, array in zip(sources, arrays, strict=True):
            x._node, x._data = None, array
        yield
    finally:
        for x, node, array in before:
            x._node, x._data = node, array


class _Recompute(Reversible):
    """The op, in the autograd graph, of a part that backward recomputes."""

    runs_modules = True

    def __init__(self, part: Callable[..., Tensor]) -> None:
        self._part = part

    def run_backward(self, context: Any, dy: Array) -> list[Array | None]:
        sources, found = context.sources, {}
        start = next(grad_mode.numbers)
        with _as_leaves(sources, [getattr(context, f"source_{i}") for i in range(len(sources))]):
            y = self._again(context)
            self._check_same(context, y, start)
            if context.prepare is not None:
                context.prepare(y)
            run_backward(y, dy, lambda leaf, gradient: found.update({id(leaf): gradient}))
        return [found.get(id(x)) for x in sources]

    def _again(self, context: Any) -> Tensor:
        """Run the part again, recording its ops, in the state of the first run: random numbers, device, casts."""
        before, (given_part, sharded_part) = random_state.snapshot(), context.parts
        interpreter = None if context.position is None else grad_mode.interpreter
        random_state.restore(context.drawn)
        try:
            with (
                setting(random_state, given_part=given_part, sharded_part=sharded_part),
                setting(grad_mode, enabled=True, recomputing=True),
                setting(*filter(None, [interpreter]), position=context.position),
                context.device,
                hiding(context.casts),
            ):
                return self._part(*context.inputs)
        finally:
            random_state.restore(before)

    def _check_same(self, context: Any, y: Any, start: int) -> None:
        """Raise AutogradError unless the second run gives the same kind of result from the same tensors."""
        result = (y.shape, y.dtype, y.placement) if isinstance(y, Tensor) else (type(y).__name__,)
        if result != context.result:
            difference = f"its result is {_result_text(result)}, the first one {_result_text(context.result)}"
        else:
            first = {id(x): x for x in context.ends}
            second = {id(x): x for x in _ends(y, start)}
            differing = [(first | second)[key] for key in first.keys() ^ second.keys()]
            if not differing:
                return
            shapes = ", ".join(f"{getattr(x, 'name', '') or 'a tensor'} of shape {x.shape}" for x in differing[:3])
            difference = f"the result depends on {shapes} in one of the two runs only"
        raise AutogradError(
            f"backward: the second run of {self!r} differed from the first: {difference}. Move everything that "
            "changes in between out of the part, and leaves that it creates."
        )

    def __repr__(self) -> str:
        return f"checkpoint({_name_of(self._part)})"


def _name_of(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


def _result_text(result: Sequence[Any]) -> str:
    return " ".join(str(fact) for fact in result if fact is not None)
