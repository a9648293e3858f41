"""Training steps of a model, on one device or cut over ranks, with a record of all numbers that they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from simparallel.autograd import Tensor, no_grad
from simparallel.autograd.op import Op
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import has_data, is_array, manual_seed, random_normal, to_host
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.nn import Module
from simparallel.optim import SGD, Optimizer
from simparallel.parallel import AutoParallel, DistributedDataParallel, Pipeline, from_local, implicit_replication
from simparallel.parallel.operator.auto import MODES
from simparallel.search import planner
from simparallel.search.plan import Plan
from simparallel.testing.compare import Key, Mismatch, Record, Slices, expected_parts

OUTPUT, LOSS, GRADIENT, PARAMETER, STATE, BUFFER = (
    "output", "loss", "gradient", "parameter", "optimizer state", "buffer",
)  # fmt: skip
# Of the first step: name of a layer -> its output, where it has no Layout.
LAYERS: Key = (None, "outputs of layers", "")
INITIAL, INPUT_GRADIENT, EVALUATION = "initial value", "gradient of input", "output in evaluation"
# Not always recorded: parameters may have no data at first, a pipeline step returns no output, and `AutoParallel` lays
# out the inputs itself.
OPTIONAL = (INITIAL, OUTPUT, INPUT_GRADIENT)


def momentum(params: Iterable[Tensor]) -> Optimizer:
    """Return the default optimizer of a comparison: its state and its step are linear in the gradients."""
    return SGD(params, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class TrainingRun:
    """A training run, on one device or on a rank.

    Attributes:
        make_model: returns the model of one device.
        inputs: its arguments; with a loss function the last one is the labels.
        loss_fn: (output, labels) -> loss; None for the mean of (output + 1)².
        optimizer: parameters -> optimizer.
        steps: number of training steps.
        seed: of the initial weights and the masks.
        strategy: see `assert_equivalent`; None on one device.
        parallel: returns the parallel model that has the weights of `initial`; None to cut that of `make_model`.
        slices: see `compare.first_difference`.
        initial: weights and buffers of one device before the first step, by name.
        output_size: number of elements of the output of one device.
    """

    make_model: Callable[[], Module]
    inputs: tuple[Any, ...]
    loss_fn: Callable[..., Tensor] | None = None
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = momentum
    steps: int = 2
    seed: int = 0
    strategy: Any = None
    parallel: Callable[[], Module] | None = None
    slices: Slices | None = None
    initial: Mapping[str, np.ndarray] = field(default_factory=dict)
    output_size: int = 0

    def __call__(self) -> Record:
        """Run the steps on this rank, and return their record. Collective: as the strategy."""
        manual_seed(self.seed)
        model = (self.parallel or self.make_model)()
        if self.parallel is not None:
            self._load(model)
        runner = _runner_for(self, model)
        tensors = {**runner.parameters(), **dict(runner.model.named_buffers())}
        record: Record = {(None, INITIAL, name): _whole(x) for name, x in tensors.items() if has_data(x.data)}
        optimizer = self.optimizer(runner.parameters().values())
        for step in range(self.steps):
            optimizer.zero_grad()
            record |= {(step, phase, name): value for (phase, name), value in runner.step().items()}
            record |= {(step, GRADIENT, name): _whole(p.grad) for name, p in runner.parameters().items()}
            optimizer.step()
            record |= {(step, PARAMETER, name): _whole(p) for name, p in runner.parameters().items()}
            record |= _state(step, optimizer, runner.parameters())
            record |= {(step, BUFFER, name): _whole(x) for name, x in runner.model.named_buffers()}
        record[LAYERS] = runner.layers
        runner.model.eval()
        with no_grad():
            record[None, EVALUATION, ""] = _whole(runner.predict())
        return record

    def after(self, one: Record) -> TrainingRun:
        """Return the training of the ranks, which starts with the weights in `one`, the record of one device."""
        initial = {name: value for (_, phase, name), value in one.items() if phase == INITIAL}
        return replace(self, initial=initial, output_size=one[None, EVALUATION, ""].size)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the model."""
        return self.inputs if self.loss_fn is None else self.inputs[:-1]

    def loss(self, output: Tensor, labels: Any) -> Tensor:
        """Return the loss of an output; of a slice of the output, its part of the mean."""
        if self.loss_fn is not None:
            return self.loss_fn(output, labels)
        # No two elements of the output weigh the same, so an exchange of two shows in the gradients.
        squares = (output + 1.0) ** 2
        return squares.mean() if not self.output_size else squares.sum() / float(self.output_size)

    def _load(self, model: Module) -> None:
        """Give the parallel model the weights of one device, cut as its own are."""
        tensors, communicator = {**dict(model.named_parameters()), **dict(model.named_buffers())}, current()
        shapes = {name: x.shape for name, x in tensors.items()}
        everyones = communicator.all_gather_object(shapes) if communicator.world_size > 1 else [shapes]
        for name, x in tensors.items():
            whole, key = self.initial.get(name), (None, INITIAL, name)
            held = {rank: theirs[name] for rank, theirs in enumerate(everyones) if name in theirs}
            if whole is None:
                names = ", ".join(self.initial) or "none"
                raise _error(Mismatch(key, min(held), None, "a tensor", "none", f" One device has {names}."))
            parts = expected_parts(key, whole, held, communicator.world_size, self.slices)
            if isinstance(parts, Mismatch):
                raise _error(parts)
            part = parts[communicator.rank]
            x.data[...] = as_tensor(
                part if x.layout is None else part[x.layout.slices(communicator.rank, x.shape)]
            ).data


def _error(difference: Mismatch) -> Exception:
    return difference.error(current().world_size, {})


def _whole(x: Any) -> Any:
    """Return the whole array of a Tensor with a Layout, else the array of this rank. Collective: yes."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        with no_grad():
            x = x.detach().full_tensor().data if x.layout is not None else x.data
    return np.array(to_host(x)) if is_array(x) else np.asarray(x)


def _state(step: int, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Record:
    found: Record = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if is_array(value) and parameter.layout is not None and value.shape == parameter.data.shape:
                value = from_local(value, parameter.layout, parameter.shape)
            key: Key = step, f"{STATE} {kind}", name
            found[key] = _whole(value) if is_array(value) or isinstance(value, Tensor) else value
    return found


# --- runners of a step ---------------------------------------------------------------------------------


class _Plain:
    """A step of a model that is called with the whole batch."""

    def __init__(self, training: TrainingRun, model: Module) -> None:
        self.training, self.model = training, model
        self.callable: Callable[..., Any] = model
        self.labels = training.inputs[-1] if training.loss_fn is not None else None
        self.inputs = [_leaf(x) for x in training.arguments]
        self.layers: dict[str, np.ndarray] = {}

    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def step(self) -> dict[tuple[str, str], Any]:
        """Run forward and backward; return (phase, name) -> value."""
        for x in self.inputs:
            if isinstance(x, Tensor):
                x.grad = None
        hooks = [
            layer.register_forward_hook(partial(self._keep, name))
            for name, layer in self.model.named_modules()
            if name and not self.layers
        ]
        with implicit_replication():  # of the batch, beside weights that are cut
            output = self.callable(*self.inputs)
            for hook in hooks:
                hook.remove()
            loss = self.training.loss(output, self.labels)
            loss.backward()
        total, is_slice = _whole(loss), self.training.loss_fn is None and output.shape != ()
        if is_slice and self.training.output_size > output.size:
            total = current().all_reduce(np.array(total), "sum")
        found = {(OUTPUT, ""): _whole(output), (LOSS, ""): total}
        return found | {
            (INPUT_GRADIENT, str(i)): self.input_gradient(x)
            for i, x in enumerate(self.inputs)
            if isinstance(x, Tensor) and x.requires_grad
        }

    def _keep(self, name: str, module: Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.layout is None:
            self.layers.setdefault(name, _whole(output))

    def input_gradient(self, x: Tensor) -> Any:
        return _whole(x.grad)

    def predict(self) -> Any:
        with implicit_replication():
            return self.callable(*self.inputs)


class _DataParallel(_Plain):
    """A step of DDP: each rank has an equal part of the batch."""

    def __init__(self, training: TrainingRun, model: Module) -> None:
        cut = replace(training, inputs=tuple(map(_own_rows, training.inputs)), output_size=0)
        wrapped = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel(model)
        super().__init__(cut, wrapped.module)
        self.callable, self.world_size = wrapped, current().world_size

    def step(self) -> dict[tuple[str, str], Any]:
        found = super().step()
        found[LOSS, ""] = current().all_reduce(np.array(found[LOSS, ""]), "mean")
        return found

    def input_gradient(self, x: Tensor) -> Any:
        # The loss of a rank is the mean over its own rows.
        return _whole(x.grad) / self.world_size


class _Automatic(_Plain):
    """A step under `AutoParallel`, which cuts the inputs itself; gradients of inputs are not compared."""

    def __init__(self, training: TrainingRun, model: Module) -> None:
        super().__init__(replace(training, output_size=0), model)
        self.inputs = [to_host(x.data) if isinstance(x, Tensor) else x for x in self.inputs]
        self.run = self._parallel(training.strategy)

    def _parallel(self, strategy: Any) -> AutoParallel:
        if isinstance(strategy, AutoParallel):
            return AutoParallel(self._one, strategy.parallel_mode, strict=strategy.strict, plan=strategy.plan)
        if isinstance(strategy, str):
            return AutoParallel(self._one, strategy)
        if isinstance(strategy, Plan):
            return AutoParallel(self._one, "auto", plan=strategy)
        rest = _shard_ops(self.model, strategy)
        if not rest:
            return AutoParallel(self._one)
        found = planner.interpreter(AutoParallel(self._one, "auto"), [*self.inputs, self.labels], {}, None).plan
        return AutoParallel(self._one, "auto", plan=_restricted(found, rest))

    def _one(self, *args: Any) -> Any:
        output = self.model(*args[:-1])
        if not self.model.training:
            return output
        loss = self.training.loss(output, args[-1])
        loss.backward()
        return output, loss

    def step(self) -> dict[tuple[str, str], Any]:
        output, loss = self.run(*self.inputs, self.labels)
        return {(OUTPUT, ""): _whole(output), (LOSS, ""): _whole(loss)}

    def predict(self) -> Any:
        # The strategies are those of training; ops in evaluation follow their inputs.
        return AutoParallel(self.model)(*self.inputs)


class _Pipelined(_Plain):
    """A step of a Pipeline."""

    def __init__(self, training: TrainingRun, pipeline: Pipeline) -> None:
        super().__init__(training, pipeline.model)
        self.pipeline = pipeline
        if self.labels is None:
            self.labels = np.zeros(len(training.inputs[0]), np.int64)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.pipeline.named_parameters() if p.requires_grad}

    def step(self) -> dict[tuple[str, str], Any]:
        return {(LOSS, ""): _whole(self.pipeline.step(self.training.arguments, self.labels))}

    def predict(self) -> Any:
        return self.pipeline.predict(*self.training.arguments)


def _runner_for(training: TrainingRun, model: Module) -> _Plain:
    """Return the runner of the model's steps under the strategy."""
    strategy = training.strategy
    if strategy == "ddp":
        return _DataParallel(training, model)
    if isinstance(strategy, (Plan, Mapping)) or strategy in MODES:
        return _Automatic(training, model)
    if strategy == "pipeline":
        strategy = partial(Pipeline, microbatches=min(len(training.inputs[0]), current().world_size))
    if isinstance(strategy, partial) and strategy.func is Pipeline or strategy is Pipeline:
        return _Pipelined(training, strategy(model, replace(training, output_size=0).loss))
    parallel = model if strategy is None else strategy(model)
    if isinstance(parallel, Pipeline):
        return _Pipelined(training, parallel)
    if isinstance(parallel, AutoParallel):
        return _Automatic(replace(training, strategy=parallel), model)
    if isinstance(parallel, DistributedDataParallel):
        return _DataParallel(training, parallel)
    runner = _Plain(training, parallel if isinstance(parallel, Module) else model)
    runner.callable = parallel
    return runner


def _leaf(x: Any) -> Any:
    """Return an input as a Tensor of its own, with a gradient if it is floating point; other values as they are."""
    if not isinstance(x, Tensor) and not is_array(x):
        return x
    tensor = as_tensor(deepcopy(x.data if isinstance(x, Tensor) else x))
    return tensor.detach().requires_grad_(tensor.dtype.kind == "f")


def _own_rows(x: Any) -> Any:
    data = x.data if isinstance(x, Tensor) else x
    if not is_array(data) or data.ndim == 0:
        return x
    world_size, rank = current().world_size, current().rank
    size = len(data) // world_size
    return data[rank * size : (rank + 1) * size]


def _shard_ops(model: Module, strategies: Mapping[str, Any]) -> dict[str, Any]:
    """Give strategies to the ops that are attributes of modules; return those for other names."""
    rest = {}
    for name, strategy in strategies.items():
        path, _, last = name.rpartition(".")
        owner = dict(model.named_modules()).get(path)
        op = getattr(owner, last, None) if owner is not None else None
        if isinstance(op, Op):
            setattr(owner, last, op.shard(strategy))
        else:
            rest[name] = strategy
    return rest


def _restricted(plan: Plan, strategies: Mapping[str, Any]) -> Plan:
    """Return the plan with these strategies alone; calls without one follow their inputs.

    Raises:
        InputError: a name is neither a call nor a layer with one call.
    """
    free = Plan(plan.device_num, tuple(op._replace(in_strategy=None, out_strategy=None) for op in plan.ops))
    for name, strategy in strategies.items():
        calls = [op.name for op in plan.ops if op.name == name or op.name.rpartition(".")[0] == name]
        if len(calls) != 1:
            names = ", ".join(op.name for op in plan.ops)
            raise InputError(
                f"assert_equivalent: strategy has the name {name!r}, which stands for {len(calls)} calls of ops; "
                f"the program's calls are {names}."
            )
        free = free.with_(calls[0], strategy)
    return free


def is_shape(value: Any) -> bool:
    """Return whether a value is a shape, which stands for an array."""
    return isinstance(value, tuple) and all(isinstance(n, (int, np.integer)) for n in value)


def arrays_of(inputs: Any, seed: int = 0) -> tuple[Any, ...]:
    """Return the arguments of a model: a shape stands for a float32 array of normal numbers."""
    items = inputs if isinstance(inputs, (tuple, list)) and not is_shape(inputs) else (inputs,)
    return tuple(
        random_normal(seed, f"assert_equivalent/{i}", 0, int(np.prod(x))).reshape(x).astype(np.float32)
        if is_shape(x)
        else x
        for i, x in enumerate(items)
    )
