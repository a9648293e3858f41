"""Pipelines whose batch is held only where it is used: the inputs on the first rank, the labels on the last one.

A model is a `Chain`, of which each rank has its own stages only, or a `WholeModel`, which every rank has whole.
A value of another rank has a placeholder here: an array of the same shape and dtype, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import get_namespace, random_state
from simparallel.base.dry_arrays import empty
from simparallel.base.units import format_type_of
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.nn import Identity, Module
from simparallel.parallel.pipeline.pipeline import Pipeline
from simparallel.parallel.pipeline.schedule import Schedule
from simparallel.parallel.pipeline.stage_forward import ForwardCache, StageForward, Switch
from simparallel.parallel.pipeline.stages import NO_STAGE, find

# Shape and name of the dtype of each value that a stage gives.
Specs = tuple[tuple[tuple[int, ...], str], ...]
# Arguments of the model: positional ones by number, others by name.
Arguments = Mapping[int | str, Tensor]
# A run without data sends nothing.
_NO_MESSAGES: Any = None


class StageModule(Module):
    """The children and parameters of one stage, under their names in the model, for an optimizer or a file."""

    _is_wrapper = True

    def __init__(self, model: Module, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            *above, last = name.split(".")
            place: Any = self
            for each in above:
                place = place._modules.setdefault(each, StageModule(model, ()))
            found = find(model, name)
            # Not by attribute: the members keep the names that they have in the model.
            (place._modules if isinstance(found, Module) else place._parameters)[last] = found

    def forward(self, *inputs: Any) -> Any:
        raise InputError(
            "pipeline: a stage cannot be called: it holds parameters; the schedule runs the code of the model."
        )


class _Absent(Module):
    """The module in place of a stage of another rank: its results have the shapes and dtypes `results`, and no data."""

    results: Specs = ()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(Tensor(empty(shape, dtype)) for shape, dtype in self.results)


class Chain(Module):
    """Consecutive stages, of which this rank has some: the results of each are the arguments of the next.

    Args:
        parts: stage -> its module, of this rank.
        count: number of stages.
    """

    _is_wrapper = True

    def __init__(self, parts: Mapping[int, Module], count: int) -> None:
        super().__init__()
        self._parts = [parts[stage] if stage in parts else _Absent() for stage in range(count)]
        for stage, part in enumerate(self._parts):
            self.add_module(str(stage), part)
        self.stages = [[str(stage)] for stage in range(count)]
        # Specs of a micro-batch -> specs of the results of each stage.
        self._known: dict[Specs, list[Specs]] = {}

    def prepare(self, arguments: Arguments, own: Sequence[int | str], rank_of: Callable[[int], int]) -> None:
        """Find the shapes of the stages' results for such a micro-batch. Collective: yes, if they are new.

        Args:
            arguments: a micro-batch.
            own: names of the arguments that this rank's program gave; its stages get them by name.
            rank_of: gives the rank of a stage.
        """
        self._keys, self._own = list(arguments), own
        specs = key = self._key(list(arguments.values()))
        if key in self._known:
            return
        found = []
        for stage, part in enumerate(self._parts):
            is_own = not isinstance(part, _Absent)
            own_specs = _results(part, specs, self._named(arguments)) if is_own else None
            specs = collectives.broadcast_object(own_specs, rank_of(stage))
            found.append(specs)
        self._known[key] = found

    def _key(self, inputs: Sequence[Tensor]) -> Specs:
        return tuple(_spec(x) for key, x in zip(self._keys, inputs, strict=True) if isinstance(key, int))

    def _named(self, arguments: Arguments) -> dict[str, Tensor]:
        return {key: x for key, x in arguments.items() if isinstance(key, str) and key in self._own}

    def forward(self, *inputs: Tensor) -> Any:
        arguments = dict(zip(self._keys, inputs, strict=True))
        x: Any = tuple(x for key, x in arguments.items() if isinstance(key, int))
        for part, results in zip(self._parts, self._known[self._key(inputs)], strict=True):
            if isinstance(part, _Absent):
                part.results = results
                x = part(*x)
            else:
                x = part(*x, **self._named(arguments))
            x = x if isinstance(x, (tuple, list)) else (x,)
        return x[0] if len(x) == 1 else x


class WholeModel(Module):
    """A whole model whose inputs are values of its first stage, so that later stages get them from there.

    Args:
        model: the same on every rank.
        stages: for each stage the names of its children, as for `Pipeline`.
    """

    _is_wrapper = True

    def __init__(self, model: Module, stages: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.entry, self.model = Identity(), model
        self.stages = [[f"model.{name}".removesuffix(".") for name in stage] for stage in stages]
        self.stages[0].insert(0, "entry")

    def prepare(self, arguments: Arguments, own: Sequence[int | str], rank_of: Callable[[int], int]) -> None:
        """See `Chain.prepare`; the shapes follow from the model."""
        self._keys = list(arguments)

    def forward(self, *inputs: Tensor) -> Any:
        arguments = {key: self.entry(x) for key, x in zip(self._keys, inputs, strict=True)}
        named = {key: x for key, x in arguments.items() if isinstance(key, str)}
        return self.model(*(x for key, x in arguments.items() if isinstance(key, int)), **named)


class PlacedPipeline:
    """A `Pipeline` that takes each value of a batch from the rank that uses it, and gives outputs on the last one.

    Args:
        model: a `Chain` or a `WholeModel`.
        loss_fn: of the output and the labels of a micro-batch; a mean over the samples. None for forward only.
        schedule: for all ranks of the run.
        is_sum: differentiate the sum of the micro-batches' losses, not their mean.

    Raises:
        InputError, ScheduleError: as `Pipeline`.

    Collective: yes, all calls.
    """

    def __init__(
        self, model: Chain | WholeModel, loss_fn: Callable[..., Any] | None, schedule: Schedule, is_sum: bool = False
    ) -> None:
        self.model, self.loss_fn, self.is_sum = model, loss_fn, is_sum
        self.pipeline = Pipeline(model, self._loss, schedule=schedule, stages=model.stages)
        self.last_rank = schedule.rank_of(schedule.num_stages - 1)
        self._outputs: list[Any] = []
        self.losses: list[Tensor] = []

    def step(self, arguments: Mapping[int | str, Any], labels: Any) -> Tensor | None:
        """Run forward and backward of a batch, as `Pipeline.step`.

        Args:
            arguments: of the model, on the first rank; for a `Chain`, named ones on each rank whose stages take them.
            labels: on the last rank.

        Returns:
            On the last rank the model's output of the batch, detached; `losses` has the micro-batches' losses.

        Raises:
            InputError: the first rank has no arguments, the last one no labels, or the output is not a Tensor.
        """
        values, labels = self._placed(arguments, labels)
        if labels is None:
            raise InputError(f"step: rank {self.last_rank} runs the last stage and must pass the target, got None.")
        count = self.pipeline.schedule.microbatches
        self._prepare(values, arguments, count)
        self._outputs, self.losses = [], []
        self.pipeline.step(tuple(values.values()), labels)
        outputs, self._outputs = self._outputs, []
        return Tensor(get_namespace(*outputs).concatenate(outputs)) if outputs else None

    def predict(self, arguments: Mapping[int | str, Any], labels: Any = None) -> Tensor | None:
        """Run forward without gradients; arguments and result as for `step`. With labels, compute `losses`, too."""
        values, labels = self._placed(arguments, labels)
        self._prepare(values, arguments, 1)
        y = self.pipeline.predict(*values.values())
        self.losses = []
        if current().rank != self.last_rank:
            return None
        if labels is not None and self.loss_fn is not None:
            with no_grad():
                for part in _spans(len(labels), self.pipeline.schedule.microbatches):
                    self.losses.append(self.loss_fn(y[part], as_tensor(labels.data[part])))
        return y

    def _loss(self, y: Any, labels: Tensor) -> Tensor:
        if not isinstance(y, Tensor):
            raise InputError(f"step: the last stage returned {format_type_of(y)}, expected one Tensor.")
        assert self.loss_fn is not None
        loss = self.loss_fn(y, labels)
        # On ranks without the last stage, the output has no data.
        if y.interpreter is None:
            self._outputs.append(y.data)
            self.losses.append(loss.detach())
        return loss * self.pipeline.schedule.microbatches if self.is_sum else loss

    def _placed(self, arguments: Mapping[int | str, Any], labels: Any) -> tuple[dict[int | str, Tensor], Tensor | None]:
        """Return arguments and labels, with placeholders for values of other ranks."""
        own = {key: as_tensor(x) for key, x in arguments.items()}
        labels = None if labels is None else as_tensor(labels)
        gathered = collectives.all_gather_object(
            ([(key, *_spec(x)) for key, x in own.items()], None if labels is None else _spec(labels))
        )
        given, label_spec = gathered[0][0], gathered[self.last_rank][1]
        if not given:
            raise InputError("step: rank 0 runs the first stage and must pass the inputs, got none.")
        values = {key: _placeholder(shape, dtype) for key, shape, dtype in given} | own
        if labels is None and label_spec is not None:
            labels = _placeholder(*label_spec)
        return values, labels

    def _prepare(self, values: Arguments, own: Mapping[int | str, Any], count: int) -> None:
        samples = max((x.shape[0] for x in values.values() if x.shape), default=0)
        for part in {part.stop - part.start: part for part in _spans(samples, count)}.values():
            micro_batch = {key: as_tensor(x.data[part]) if x.shape else x for key, x in values.items()}
            self.model.prepare(micro_batch, list(own), self.pipeline.schedule.rank_of)


def _results(part: Module, specs: Specs, named: Mapping[str, Tensor]) -> Specs:
    """Run a stage without data; return the specs of its results."""
    switch, drawn = Switch({part: (0,)}), random_state.snapshot()
    inputs = [Tensor(empty(shape, dtype)) for shape, dtype in specs]
    with switch.installed(), no_grad():
        found = StageForward(NO_STAGE, switch, _NO_MESSAGES, ForwardCache()).run_model(partial(part, **named), *inputs)
    random_state.restore(drawn)
    return tuple(map(_spec, found if isinstance(found, (tuple, list)) else (found,)))


def _spec(x: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(x.shape), x.dtype.str


def _placeholder(shape: Sequence[int], dtype: str) -> Tensor:
    return as_tensor(np.broadcast_to(np.zeros((), dtype), shape))


def _spans(samples: int, count: int) -> list[slice]:
    """Return the samples of each micro-batch, as `Pipeline` splits a batch."""
    return [slice(samples * m // count, samples * (m + 1) // count) for m in range(count)]
