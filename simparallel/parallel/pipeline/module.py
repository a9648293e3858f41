"""`PipelineModule`, a pipeline as a Module: a call runs a step; backward of its loss delivers the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from simparallel.autograd import Function, Tensor
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array
from simparallel.errors import InputError
from simparallel.nn import Module
from simparallel.parallel.pipeline.pipeline import Pipeline
from simparallel.parallel.pipeline.schedule import Schedule
from simparallel.parallel.pipeline.stages import PartCost, Stages, stages_by, traced


class PipelineModule(Module):
    """A network that returns its loss, cut into stages.

    A call runs forward and backward of all micro-batches, and returns the loss on every rank. Backward of this loss
    sets the gradients of this rank's stages; parameters of other stages get none. Under `no_grad`, a call runs forward
    only, on the whole batch. Every rank passes the whole batch.

    Args:
        network: takes all fields of a batch, and returns their mean loss.
        schedule: returns the schedule; called at the first step.
        stage_of: returns the stage of a child for a schedule, or None if the child has none of its own. Children
            inside it may override it. Code and children without a stage belong to the latest stage of their inputs.
        is_sum: the loss is the sum over the micro-batches, not the mean.

    Raises:
        InputError: (when called) a stage without children, or a network that does not return one number.

    Collective: yes, all calls.
    """

    _is_wrapper = True

    def __init__(
        self,
        network: Module,
        schedule: Callable[[], Schedule],
        stage_of: Callable[[Schedule, Module], int | None],
        is_sum: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self._schedule, self._stage_of, self._is_sum = schedule, stage_of, is_sum
        self._pipeline: Pipeline | None = None

    def forward(self, *inputs: Any) -> Tensor:
        fields = tuple(map(as_tensor, inputs))
        pipeline = self._pipeline = self._pipeline or self._built(fields)
        factor = pipeline.schedule.microbatches if self._is_sum else 1
        return (_differentiable_step(pipeline, fields) if grad_mode.enabled else pipeline.predict(*fields)) * factor

    def collect(self) -> None:
        """Copy the parameters and buffers of each stage to all ranks, which then have the trained network.

        Collective: yes, after the first step.
        """
        if self._pipeline is not None:
            self._pipeline.collect()

    def state_dict(self) -> Any:
        """Refuse: a rank trains its own stages only. Raises InputError."""
        raise InputError(
            f"{type(self).__name__}: a rank has trained the parameters of its own stages only. Call "
            "collect() on all ranks, and save the network that is inside."
        )

    def _built(self, fields: tuple[Tensor, ...]) -> Pipeline:
        schedule = self._schedule()
        marks = stages_by(self.network, partial(self._stage_of, schedule))
        if not marks and schedule.num_stages == 1:
            marks = {"": 0}

        def run() -> None:
            loss = self.network(*fields)
            if not isinstance(loss, Tensor) or loss.shape:
                raise InputError(
                    f"{type(self).__name__}: the network must return its loss, a Tensor of shape (), as a cell of the "
                    "model and its loss function does."
                )

        stages = traced(self.network, run, partial(_grouped, schedule.num_stages, marks), marks)
        return Pipeline(self.network, lambda loss, labels: loss, schedule=schedule, stages=stages)


def _grouped(count: int, marks: Mapping[str, int], prices: Mapping[str, PartCost]) -> Stages:
    """Return the stages that `marks` gives to the parts, each in the order of the parts in `prices`.

    Raises:
        InputError: one of the `count` stages has no part.
    """
    stages = tuple(tuple(name for name in prices if marks[name] == stage) for stage in range(count))
    if () in stages:
        raise InputError(
            f"pipeline: stage {stages.index(())} of {count} has no child; children with a stage are "
            f"{', '.join(f'{name}: {stage}' for name, stage in marks.items()) or 'none'}."
        )
    return stages


def _differentiable_step(pipeline: Pipeline, fields: tuple[Tensor, ...]) -> Tensor:
    """Run a step; return its loss with a graph node that delivers the gradients. `.grad` does not change."""
    parameters = pipeline.parameters()
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        # The network returns its loss; the labels are among its inputs.
        loss = pipeline.step(fields, fields[-1])
        found = {id(p): p.grad.data for p in parameters if p.grad is not None}
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    used = [parameter for parameter in parameters if id(parameter) in found]
    return _StepLoss.apply(loss, [found[id(parameter)] for parameter in used], *used)


class _StepLoss(Function):
    """The loss of a step whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Array], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, None, *(gradient * dy.data.astype(gradient.dtype) for gradient in ctx.gradients)
