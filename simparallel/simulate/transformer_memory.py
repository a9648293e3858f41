"""The memory of each device that trains a GPT, in closed form and exact.

Model states: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models"
(arXiv 1910.02054), section 5. Activations: Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from simparallel.base.checks import check_integer
from simparallel.errors import InputError
from simparallel.parallel.pipeline.action import FORWARD, INPUT_GRADIENT, read_cell
from simparallel.parallel.pipeline.rules import LOOP
from simparallel.parallel.pipeline.schedule import Schedule, pipeline_schedule
from simparallel.simulate.eager_memory import EagerStage, Part, joined
from simparallel.simulate.transformer import TrainingPlan, check_zero_stage

# The schedules whose time and memory are formulas.
FORMULAS = ("gpipe", "1f1b")


@dataclass(frozen=True)
class ModelStates:
    """Bytes of each parameter for itself, its gradient, and the optimizer."""

    parameter: int
    gradient: int
    optimizer: int

    def bytes_per_parameter(self, zero_stage: int = 0, data: int = 1) -> Fraction:
        """Return the bytes of a parameter on each of `data` replicas under a stage of ZeRO.

        With float16 parameters and Adam: 16, 4 + 12/d, 2 + 14/d, 16/d for stages 0 to 3. Megatron's distributed
        optimizer is stage 1, with float32 gradients: 6 + 12/d.

        Raises:
            InputError: `zero_stage` is not 0, 1, 2 or 3, or `data` is below 1.
        """
        check_zero_stage("bytes_per_parameter", zero_stage)
        check_integer("bytes_per_parameter", "data", data, low=1)
        parts = (self.parameter, self.gradient, self.optimizer)
        # Stage 1 divides the last part, stage 2 the last two, stage 3 all.
        whole = len(parts) - zero_stage
        return sum(parts[:whole]) + Fraction(sum(parts[whole:]), data)


# float16 parameters and gradients; float32 weights and two moments.
MIXED_ADAM = ModelStates(2, 2, 12)
# Megatron-LM accumulates gradients in float32 (theoretical_memory_usage.py).
MEGATRON_ADAM = ModelStates(2, 4, 12)
FLOAT32_ADAM = ModelStates(4, 4, 8)


def layers_in_flight(plan: TrainingPlan, stage: int = 0, schedule: str = "1f1b") -> Fraction:
    """Return how many blocks' activations a stage holds at once, counted for one micro-batch each.

    GPipe holds all m micro-batches. 1F1B holds min(m, p - stage). The interleaved schedule warms up with
    2(p - stage - 1) + (v - 1)p chunks and holds one more: on the first stage L(1 + (p - 1)/pv) blocks (Korthikanti et
    al. 2022, section 4.2.3; Narayanan et al. 2021, section 2.2).

    Args:
        plan: shape of the model, and how it is cut.
        stage: number of the stage, from 0.
        schedule: a looped schedule of `pipeline_schedule`; "1f1b" is interleaved if the plan has several chunks a
            device.

    Raises:
        InputError: no such stage or schedule.
    """
    return _peak(plan, stage, schedule, lambda part, kind, *_: _kept(kind, sum(plan.part_layers(part))))


def _peak(plan: TrainingPlan, stage: int, schedule: str, work: Callable[[int, str, bool, bool], Part]) -> Fraction:
    """Return the most that a stage holds of what its actions hold and free.

    Args:
        plan, stage, schedule: see `activation_bytes`.
        work: returns it, from a part of the model, the kind of an action, and whether it is not the first one, and the
            last one.
    """
    _check_stage(plan, stage)
    p, v, count = plan.pipeline, plan.chunks, plan.num_micro_batches
    if schedule == "1f1b":
        # The interleaved schedule has equal rounds; of more than three, all are alike.
        count += -count % p if v > 1 and count % max(1, count // p) else 0
        count = count if v > 1 and count % p else min(count, 3 * p)
    actions = _stage_actions(schedule, p, count, v, stage)
    made = {action: work(*action) for action in dict.fromkeys(actions)}
    return Fraction(joined(*[made[action] for action in actions]).peak)


@lru_cache(maxsize=1024)
def _stage_actions(
    name: str, ranks: int, microbatches: int, chunks: int, stage: int
) -> list[tuple[int, str, bool, bool]]:
    """Return the actions of a stage: part of the model, kind, whether it is not the first of these, and the last."""
    found = [
        action for cell in looped_schedule(name, ranks, microbatches, chunks).actions[stage]
        for action in read_cell(cell, name)
    ]  # fmt: skip
    return [(part, kind, number > 0, number == microbatches - 1) for part, kind, number in found]


def _kept(kind: str, size: Fraction | int) -> Fraction | int:
    """Return what an action holds or frees, if all is kept from the forward pass to the end of the backward pass."""
    return {FORWARD: size, INPUT_GRADIENT: 0}.get(kind, -size)


@lru_cache(maxsize=64)
def looped_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return a schedule whose stages are on rank `stage` mod `ranks`, as `TrainingPlan` has them.

    Args:
        name, ranks, microbatches, chunks: see `pipeline_schedule`; "1f1b" and "gpipe" take several chunks, too.

    Raises:
        InputError: an unknown schedule, one with another placement of the stages, or not for these numbers.
    """
    interleaved = {"1f1b": "interleaved_1f1b", "gpipe": "looped_bfs"} if chunks > 1 else {}
    made = pipeline_schedule(interleaved.get(name, name), ranks, microbatches, chunks)
    if made.placement != LOOP:
        raise InputError(
            f"schedule={name!r} has a placement {made.placement!r} of its stages; a transformer is predicted with "
            "stage s on rank s mod ranks: 1f1b, gpipe, zb_h1, zb_h2, or with chunks looped_bfs or interleaved_zb."
        )
    return made


def layer_activation_bytes(plan: TrainingPlan, is_sparse: bool = False, software: str = "fused") -> Fraction:
    """Return the bytes that one block stores for the backward pass of one micro-batch.

    With 16-bit activations a GPT stores sbh(10 + 24/t + 5as/ht), with 10/t under sequence parallelism (Korthikanti et
    al. 2022, table 2). Selective recomputation and fused attention store no scores, the last term; a fused kernel keeps
    4 bytes a row of them instead. Full recomputation stores the input alone, 2sbh. Others store the same for their own
    sizes; without dropout there are no masks, of which each element takes a byte. Eager software has no dropouts; it
    keeps the turned copies of queries and keys, what goes into each step of a gated activation, and the statistics of
    norms.

    Args:
        plan: shape of the model, and how it is cut.
        is_sparse: whether the block has experts. A token's copies are stored for each expert that it visits.
        software: of the device, see `DeviceSpec`.
    """
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    full, tokens, h = shape.full, plan.tokens, plan.shape.width
    whole = t if plan.sequence_parallel else 1
    if plan.recompute == "full":
        return Fraction(item * tokens * h, whole)
    # The inputs of both norms and of the first linear layer of each branch, and the masks of both branches.
    is_eager = software == "eager"
    shared = 4 * item * h + (16 if is_eager else 2 * h * shape.has_dropout)
    heads, kv_heads = shape.num_heads // t, shape.kv_heads(t)
    cut = (heads * (full.head_size + full.value_size) + kv_heads * (full.head_size + full.value_size)) * item
    shared += item * (shape.query_rank + shape.kv_rank + shape.rotary_size)
    if is_sparse:
        # The outputs of experts are kept until they are weighted.
        copies = shape.active_experts
        shared += item * copies * 2 * h
        inner = (copies * shape.expert_width + shape.shared_width) // t
    else:
        inner = full.mlp_width // t
    cut += item * (2 + shape.is_gated * (1 + is_eager)) * inner
    if is_eager:
        cut += item * (not full.num_positions) * (heads + kv_heads) * full.head_size
        cut += 8 * shape.has_query_norm * (heads + kv_heads)
    scores = (2 * item + shape.has_dropout) * heads * shape.length if plan.recompute == "none" else 0
    if plan.fused_attention:
        scores = 4 * heads
    return Fraction(shared * tokens, whole) + (cut + scores) * tokens


@lru_cache(maxsize=4096)
def activation_bytes(
    plan: TrainingPlan, stage: int = 0, schedule: str = "1f1b", software: str = "fused", keeps_gradients: bool = True
) -> Fraction:
    """Return the peak activation bytes that a device of a stage keeps for the backward pass.

    Beside the blocks, the first stage stores the mask of the embedding's dropout for each micro-batch in flight, and
    the last one the inputs of norm and output layer and the float32 logits: sbh(4 + 4V/h), divided as in section 4.3 of
    Korthikanti et al. 2022. On eager software it also holds what its passes need for a while (`EagerStage`).

    Args:
        plan: shape of the model, and how it is cut.
        stage: number of the stage, from 0.
        schedule: a looped schedule of `pipeline_schedule`; "1f1b" is interleaved if the plan has several chunks a
            device.
        software: of the device, see `DeviceSpec`.
        keeps_gradients: whether gradients have memory between the steps. Otherwise each part of the model makes its own
            in its first backward pass, and on eager software they are a part of the result.

    Raises:
        InputError: no such stage or schedule.
    """
    if software == "eager":
        whole = replace(plan, recompute="none")
        kept = [int(layer_activation_bytes(whole, sparse, software)) for sparse in (False, True)]
        return _peak(plan, stage, schedule, EagerStage(plan, kept, keeps_gradients).work)
    shape, t = plan.shape, plan.tensor
    row = Fraction(plan.tokens * shape.width, t if plan.sequence_parallel else 1)
    each = [layer_activation_bytes(plan, sparse, software) for sparse in (False, True)]

    def work(part: int, kind: str, *_: bool) -> Fraction | int:
        size = sum(count * bytes_ for count, bytes_ in zip(plan.part_layers(part), each, strict=True))
        if part == 0 and shape.has_dropout:
            size += row
        if part == plan.pipeline * plan.chunks - 1:
            size += 2 * plan.item_bytes * row + Fraction(4 * plan.tokens * shape.vocabulary, t)
        return _kept(kind, size)

    return _peak(plan, stage, schedule, work)


def state_bytes(plan: TrainingPlan, stage: int = 0, states: ModelStates = MIXED_ADAM) -> Fraction:
    """Return the bytes of parameters, gradients and optimizer states on a device of a stage.

    Args:
        plan: shape of the model, and how it is cut.
        stage: number of the stage, from 0.
        states: bytes of each parameter.

    Raises:
        InputError: no such stage.
    """
    _check_stage(plan, stage)
    replicas = plan.data * plan.context
    dense = plan.stage_parameters(stage) * states.bytes_per_parameter(plan.zero_stage, replicas)
    experts = plan.stage_experts(stage)
    return dense + experts * states.bytes_per_parameter(plan.zero_stage, replicas // plan.expert)


def gathered_bytes(plan: TrainingPlan, stage: int = 0, states: ModelStates = MIXED_ADAM) -> Fraction:
    """Return the bytes that ZeRO-3 holds for a while beside its slices; 0 for other stages of ZeRO.

    These are the whole parameters of a block and of the next one, which is gathered meanwhile, and the whole gradients
    of one.

    Args:
        plan: shape of the model, and how it is cut.
        stage: number of the stage, from 0.
        states: bytes of each parameter.

    Raises:
        InputError: no such stage.
    """
    _check_stage(plan, stage)
    if plan.zero_stage < 3:
        return Fraction(0)
    dense, sparse = plan.count_layers(stage)
    largest = max(dense and plan.layer_parameters, sparse and plan.sparse_parameters + plan.layer_experts)
    return Fraction(largest * (2 * states.parameter + states.gradient))


def _check_stage(plan: TrainingPlan, stage: int) -> None:
    if check_integer("TrainingPlan", "stage", stage) >= plan.pipeline:
        raise InputError(f"TrainingPlan: stage={stage} of {plan.pipeline} does not exist; stages count from 0.")
