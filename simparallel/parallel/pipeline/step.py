"""A step of a pipeline on one rank, which runs its list of actions, with real gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad, run_backward
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array, get_namespace, has_data, random_state
from simparallel.base.attributes import setting
from simparallel.base.units import format_type_of
from simparallel.clock.memory import GRADIENTS
from simparallel.clock.recorder import observer_of
from simparallel.comm import Work
from simparallel.errors import InputError, ShapeError
from simparallel.parallel.operator.interpreter import SHARDED
from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from simparallel.parallel.pipeline.rules import BIDIRECTIONAL
from simparallel.parallel.pipeline.split_backward import input_gradient, joined
from simparallel.parallel.pipeline.stage_forward import ForwardCache, StageForward, StageValue
from simparallel.parallel.sharded.group import is_reduced_already
from simparallel.parallel.sharded.order import order

if TYPE_CHECKING:
    from simparallel.parallel.pipeline.pipeline import Pipeline

FORWARDS, BACKWARDS = 0, 1
# Tags name the last so many calls of a pipeline, and so many pipelines.
CALLS, PIPELINES = 1 << 16, 1 << 8
_KIND_NAMES = {
    FORWARD: "forward", BACKWARD: "backward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradients"
}  # fmt: skip


class _PendingForward(NamedTuple):
    """A forward that awaits its backward: the values that came from other stages, and those that went there."""

    received: list[tuple[StageValue, Tensor]]
    sent: list[tuple[StageValue, Tensor]]
    loss: Tensor | None


class PipelineStep:
    """The state of one step on this rank."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Any], labels: Any, optimizer: Any = None) -> None:
        schedule, self._optimizer = pipeline.schedule, optimizer
        # Prediction runs the batch in one part.
        count = 1 if labels is None else schedule.microbatches
        self._inputs, self._labels = tensors(inputs), None if labels is None else as_tensor(labels)
        if any(x.requires_grad for x in self._inputs):
            raise InputError("Pipeline: an input requires a gradient, which it would not get; pass x.detach().")
        self._samples = _samples([*self._inputs, *([] if self._labels is None else [self._labels])], count)
        self._pipeline, self._schedule = pipeline, schedule
        modes = tuple(module.training for module in pipeline.model.modules())
        self._known = pipeline._known.setdefault(modes, ForwardCache())
        # In a dry run nothing has data.
        self._has_data = any(has_data(p.data) for p in pipeline.parameters())
        self._length, self._rank, self._ranks = pipeline._length, pipeline._rank, pipeline.ranks
        self._xp = get_namespace(*(x.data for x in self._inputs))
        # Unequal parts differ by one sample.
        self._ends = [self._samples * m // count for m in range(count + 1)]
        self._weights = self._weights_of_parts(count)
        # The places of the micro-batches in the batch of all pipelines, see `RandomState.part`.
        start, total = pipeline.replica * self._samples, pipeline.replicas * self._samples
        self._parts = {
            (first, last): (Fraction(start + first, last - first), Fraction(total, last - first))
            for first, last in pairwise(self._ends)
        }
        self._loss = self._xp.zeros((), np.float64)
        self._losses: list[tuple[int, Array]] = []
        # (stage, micro-batch) -> its forward; direction, stage value, micro-batch -> a value for this rank itself.
        self._live: dict[tuple[int, int], _PendingForward] = {}
        self._local: dict[tuple[int, StageValue, int], Array] = {}
        self._late: dict[tuple[int, int], Callable[[], None]] = {}
        self._works: list[Work] = []
        # Random numbers at the start; calls of each stream of masks in a pass.
        self._drawn = random_state.snapshot()
        self._masks: dict[str, int] = {}
        # This step's gradients of parameters that other ranks have, too.
        self._shared: dict[int, Array | None] = {id(p): None for _, parameters in pipeline._shared for p in parameters}
        # A call that was refused above has sent nothing, and does not count.
        pipeline.calls += 1
        self._call = pipeline.calls % CALLS * PIPELINES + pipeline.number % PIPELINES

    def run(self) -> Tensor:
        act = {FORWARD: self._forward, BACKWARD: self._backward, INPUT_GRADIENT: self._backward_first,
               WEIGHT_GRADIENT: self._backward_later}  # fmt: skip
        pipeline = self._pipeline
        # Gradients of earlier steps have been summed over the owners already: groups may not add new ones to them.
        shared = [p for _, parameters in pipeline._shared for p in parameters if is_reduced_already(p)]
        with pipeline._switch.installed(), pipeline.running(), setting(*shared, grad=None):
            for cell in pipeline._cells:
                for action in cell:
                    # Gradients "P" of groups are reduced in the last backward; a part that runs again decides anew.
                    waits = self._optimizer is None and action.microbatch != pipeline._last_backward[action.stage]
                    try:
                        with order().no_sync() if waits else nullcontext():
                            act[action.kind](action)
                    except BaseException as error:
                        error.add_note(self._describe_place(action, str(error)))
                        raise
            if waiting := [p.name for p in shared if p.grad is not None]:
                raise InputError(
                    f"Pipeline: ranks share {waiting[0]}, and have summed its gradient of an earlier step; that of "
                    "this one waits. Call set_requires_gradient_sync(True) before the step, or zero_grad()."
                )
        self.end_masks()
        for work in self._works:
            work.wait()
        self._sum_shared()
        self._pipeline.losses = [as_tensor(loss) for _, loss in sorted(self._losses, key=itemgetter(0))]
        with no_grad():
            # The ranks of a stage have the same loss.
            return as_tensor(collectives.all_reduce(self._loss) / len(self._pipeline._stage_ranks))

    def _describe_place(self, action: Action, text: str) -> str:
        """Return the place of an error in the pipeline, and the values that its message names only by tag."""
        names = ", ".join(self._pipeline.stages[action.stage % self._length])
        note = f"In the pipeline: {action}, {_KIND_NAMES[action.kind]} of micro-batch {action.microbatch} in stage "
        note += f"{action.stage} ({names}), rank {self._ranks[self._rank]}."
        for tag in dict.fromkeys(map(int, re.findall(r"\btag[= ](\d+)", text))):
            direction, (source, target, number), m, call = self._of_tag(tag)
            value = f"value {number} of stage {source} for stage {target}, micro-batch {m}"
            note += f" Tag {tag} is {'the gradient of ' * (direction == BACKWARDS)}{value}"
            if call != self._call:
                note += f", of call {call // PIPELINES} of pipeline {call % PIPELINES}; this is call "
                note += f"{self._call // PIPELINES} of pipeline {self._call % PIPELINES}"
            note += "."
        return note

    def _sum_shared(self) -> None:
        """Sum the gradients of parameters that other ranks have, too: one collective for each group."""
        for group, parameters in self._pipeline._shared:
            trained = [p for p in parameters if p.requires_grad]
            if not trained:
                continue
            found = [self._shared[id(p)] for p in trained]
            xp = get_namespace(trained[0].data)
            sums = [xp.zeros_like(p.data) if x is None else x for p, x in zip(trained, found, strict=True)]
            # A parameter that no rank has used keeps its gradient, usually None.
            uses = xp.asarray([x is not None for x in found], trained[0].dtype)
            *sums, uses = collectives.all_reduce([*sums, uses], "sum", group)
            for parameter, total, count in zip(trained, sums, uses, strict=True):
                if not has_data(uses) or count:
                    _add(parameter, total)

    # --- actions --------------------------------------------------------------------------------------

    def run_stage(self, stage: int, m: int) -> tuple[Any, StageForward]:
        """Run the forward of a stage; return the result of the model's code, and the pass."""
        first, last = self._span(stage, m)
        start = stage - stage % self._length
        forward = StageForward(stage - start, self._pipeline._switch, _Mail(self, m), self._known, start)
        inputs = [as_tensor(x.data[first:last]) for x in self._inputs]
        labels = None if self._labels is None else as_tensor(self._labels.data[first:last])
        # The same masks as on one device: those of the samples' places in the whole batch.
        random_state.restore(self._drawn)
        before = random_state.given_part, random_state.sharded_part
        random_state.given_part = random_state.sharded_part = self._parts[first, last]
        try:
            return forward.run_model(self._pipeline.run, labels, *inputs), forward
        finally:
            random_state.given_part, random_state.sharded_part = before
            self._masks = forward.masks
            order().end_pass("forward")

    def end_masks(self) -> None:
        """Count the masks of this step: those of one pass, whatever the number and order of the micro-batches."""
        random_state.restore(self._drawn)
        for stream, count in self._masks.items():
            random_state.calls[stream] = random_state.calls.get(stream, 0) + count

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        loss, forward = self.run_stage(stage, m)
        if forward.is_first:
            self._check(loss, forward)
        is_last = stage % self._length == self._length - 1
        if is_last:
            self.check_data("the loss", loss)
            self._loss += self._weights[self._number(stage, m)] * loss.data
            self._losses.append((self._number(stage, m), loss.data))
        self._live[stage, m] = _PendingForward(forward.received, forward.sent, loss if is_last else None)

    def check_data(self, what: str, x: Tensor) -> None:
        """Raise InputError for a value of this stage that has no data."""
        if self._has_data and not has_data(x.data):
            raise InputError(
                f"Pipeline: {what} has no data: code between the children read `.data` of a value of another stage, or "
                "wrote into a tensor of its own. Compute with Tensors there, or inside of a child."
            )

    def _check(self, loss: Any, forward: StageForward) -> None:
        self._pipeline.check_used(forward.used)
        end = self._length - 1
        source = forward.stage_of(loss)
        if not isinstance(loss, Tensor) or source != end or loss.shape:
            where = f" of shape {loss.shape} from stage {source}" if isinstance(loss, Tensor) else ""
            raise InputError(
                f"Pipeline: loss_fn returned {format_type_of(loss)}{where}, expected a Tensor of shape () from stage "
                f"{end}, the last one."
            )

    def _backward(self, action: Action) -> None:
        live, root, seed = self._root_of(action)
        found: dict[int, Array] = {}
        if root.requires_grad:
            run_backward(root, seed, partial(self._deliver, live, found))
        self._send_back(action, live, found)
        if self._optimizer is not None:
            for parameter in self._pipeline.parameters():
                # Forwards that await their backward keep the version that they read.
                parameter.data = parameter.data.copy()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _backward_first(self, action: Action) -> None:
        live, root, seed = self._root_of(action)
        found: dict[int, Array] = {}
        if root.requires_grad:
            leaves = [x for _, x in live.received]
            deliver = partial(self._deliver, live, found)
            self._late[action.stage, action.microbatch] = input_gradient(root, seed, leaves, deliver)
        self._send_back(action, live, found)

    def _backward_later(self, action: Action) -> None:
        finish = self._late.pop((action.stage, action.microbatch), None)
        if finish is not None:
            finish()

    def _root_of(self, action: Action) -> tuple[_PendingForward, Tensor, Array]:
        """Return the forward of a stage, the tensor from which its backward starts, and the gradient of that tensor."""
        stage, m = action.stage, action.microbatch
        live = self._live.pop((stage, m))
        ends = [(x, self.receive(BACKWARDS, stage_value, m, x)) for stage_value, x in live.sent if x.dtype.kind == "f"]
        if live.loss is not None:
            seed = get_namespace(live.loss.data).full((), self._share(stage, m), live.loss.dtype)
            ends.append((live.loss, seed))
        return live, *joined([(x, gradient) for x, gradient in ends if x.requires_grad], self._xp)

    def _send_back(self, action: Action, live: _PendingForward, found: dict[int, Array]) -> None:
        for stage_value, x in live.received:
            if x.requires_grad:
                gradient = found.get(id(x))
                if gradient is None:
                    gradient = get_namespace(x.data).zeros_like(x.data)
                self.send(BACKWARDS, stage_value, action.microbatch, gradient)

    def _deliver(self, live: _PendingForward, found: dict[int, Array], leaf: Tensor, gradient: Array) -> None:
        if any(leaf is x for _, x in live.received):
            found[id(leaf)] = gradient
        elif self._rank not in self._pipeline._owners.get(id(leaf), ()):
            raise InputError(
                f"Pipeline: {leaf.name or 'a tensor'} of shape {leaf.shape} gets a gradient here, and is no parameter "
                f"of rank {self._ranks[self._rank]}'s stages. Name it in each stage that uses it; make parameters of "
                "the loss a child of the model."
            )
        elif id(leaf) not in self._shared:
            _add(leaf, gradient)
        # Gradients of earlier steps have been summed over the owners already.
        elif (sum_so_far := self._shared[id(leaf)]) is None:
            observer_of(leaf._device).memory.hold(gradient, GRADIENTS)
            self._shared[id(leaf)] = gradient
        else:
            sum_so_far += gradient

    # --- parts of the batch ---------------------------------------------------------------------------

    def _number(self, stage: int, m: int) -> int:
        """Return the index of a micro-batch in the batch; each of two replicas has every other one."""
        return m if self._schedule.placement != BIDIRECTIONAL else 2 * m + (stage >= self._length)

    def _span(self, stage: int, m: int) -> tuple[int, int]:
        """Return the range of the samples of a micro-batch."""
        number = self._number(stage, m)
        return self._ends[number], self._ends[number + 1]

    def _share(self, stage: int, m: int) -> float:
        """Return the weight of the loss of a micro-batch in its gradients."""
        return 1.0 if self._optimizer is not None else self._weights[self._number(stage, m)]

    def _weights_of_parts(self, count: int) -> list[float]:
        """Return the share of each micro-batch in the mean loss over all pipelines."""
        spans, pipeline = list(pairwise(self._ends)), self._pipeline
        if pipeline._weight_fn is None or self._labels is None:
            return [(last - first) / self._samples / pipeline.replicas for first, last in spans]
        weights = [float(pipeline._weight_fn(as_tensor(self._labels.data[first:last]))) for first, last in spans]
        total = np.asarray(sum(weights), np.float64)
        if pipeline.replicas > 1:
            total = pipeline._communicator.all_reduce(total) / len(pipeline.ranks) / len(pipeline._stage_ranks)
        if not 0 < total.item() < np.inf:
            raise InputError(
                f"Pipeline.step: the weights of all micro-batches add up to {total.item()}, so their losses have no "
                "mean: weight_fn returns a number above 0 for labels that count. Skip batches without any."
            )
        return [weight / total.item() for weight in weights]

    # --- messages -------------------------------------------------------------------------------------

    def send(self, direction: int, stage_value: StageValue, m: int, x: Array) -> None:
        """Send a value to a later stage, or its gradient back; by reference, if that stage is on this rank."""
        rank = self._schedule.rank_of(stage_value.target if direction == FORWARDS else stage_value.source)
        if rank == self._rank:
            self._local[direction, stage_value, m] = x
        else:
            self._works.append(collectives.isend(x, self._ranks[rank], self._tag(direction, stage_value, m)))

    def receive(self, direction: int, stage_value: StageValue, m: int, like: Tensor) -> Array:
        """Return the value that another stage sends. Errors as `recv`: another shape or dtype."""
        rank = self._schedule.rank_of(stage_value.source if direction == FORWARDS else stage_value.target)
        if rank == self._rank:
            return self._local.pop((direction, stage_value, m))
        # Of a cut value, this rank's slice.
        buffer = self._xp.empty(like.data.shape, like.dtype)
        return collectives.recv(buffer, self._ranks[rank], self._tag(direction, stage_value, m))

    def _tag(self, direction: int, stage_value: StageValue, m: int) -> int:
        source, target, number = stage_value
        num_stages = self._schedule.num_stages
        value = ((number * self._schedule.microbatches + m) * num_stages + source) * num_stages + target
        return (value * 2 + direction) * (CALLS * PIPELINES) + self._call

    def _of_tag(self, tag: int) -> tuple[int, StageValue, int, int]:
        """Return direction, stage value, micro-batch and call of a tag."""
        num_stages = self._schedule.num_stages
        rest, call = divmod(tag, CALLS * PIPELINES)
        rest, direction = divmod(rest, 2)
        rest, target = divmod(rest, num_stages)
        rest, source = divmod(rest, num_stages)
        number, m = divmod(rest, self._schedule.microbatches)
        return direction, StageValue(source, target, number), m, call

    def from_last(self, x: Array | None) -> Array:
        """Return a value of the last stage on every rank of the pipeline."""
        last = self._schedule.rank_of(self._length - 1)
        # No stage sends a value to itself by message.
        tag = self._tag(FORWARDS, StageValue(self._length - 1, self._length - 1, 0), 0)
        if self._rank != last:
            return _received(self._xp, self._ranks[last], tag)
        if x is None:
            raise InputError("Pipeline: the model does not return one Tensor of its last stage.")
        for rank in range(self._schedule.ranks):
            if rank != last:
                collectives.send(x, self._ranks[rank], tag)
        return x


class _Mail(NamedTuple):
    """The messages of one forward."""

    step: PipelineStep
    microbatch: int

    def send(self, stage_value: StageValue, x: Tensor) -> None:
        self.step.check_data(f"a value of stage {stage_value.source} for stage {stage_value.target}", x)
        self.step.send(FORWARDS, stage_value, self.microbatch, x.data)

    def receive(self, stage_value: StageValue, like: Tensor) -> Tensor:
        data = self.step.receive(FORWARDS, stage_value, self.microbatch, like)
        x = Tensor._result(data, None, None, like.placement, None if like.placement is None else SHARDED)
        x.requires_grad = x.dtype.kind == "f"
        return x


def tensors(inputs: Any) -> list[Tensor]:
    return [as_tensor(x) for x in (inputs if isinstance(inputs, tuple) else (inputs,))]


def _samples(tensors: Sequence[Tensor], count: int) -> int:
    """Return the number of samples. Raise ShapeError unless all tensors have as many, and enough for `count` parts."""
    shapes = [x.shape for x in tensors]
    samples = {shape[0] if shape else 0 for shape in shapes}
    if len(samples) != 1 or min(samples) < count:
        raise ShapeError(
            f"Pipeline: inputs and labels of shapes {', '.join(map(str, shapes))} cannot be split into {count} "
            f"micro-batches: all need as many samples, {count} or more."
        )
    return samples.pop()


def _add(leaf: Tensor, gradient: Array) -> None:
    if leaf.grad is None:
        leaf.grad = leaf._gradient(gradient)
    else:
        leaf.grad.data += gradient


def _received(xp: Any, rank: int, tag: int) -> Array:
    """Return the next message of this tag, in the shape and dtype that its header gives."""
    header = collectives.probe(rank, tag)
    return collectives.recv(xp.empty(header.shape, header.dtype), rank, tag)
