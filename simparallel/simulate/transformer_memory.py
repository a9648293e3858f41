"""The memory of each device that trains a GPT, in closed form and exact.

Model states: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models"
(arXiv 1910.02054), section 5. Activations: Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from simparallel.base.checks import check_integer
from simparallel.errors import InputError
from simparallel.parallel.pipeline.action import read_cell
from simparallel.parallel.pipeline.rules import LOOP
from simparallel.parallel.pipeline.schedule import Schedule, pipeline_schedule
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
FLOAT32_MOMENTUM = ModelStates(4, 4, 4)


def layers_in_flight(plan: TrainingPlan, stage: int = 0, schedule: str = "1f1b") -> Fraction:
    """Return how many blocks' activations a stage holds at once, counted for one micro-batch each.

    GPipe holds all m micro-batches. 1F1B holds min(m, p - stage). The interleaved schedule warms up with
    2(p - stage - 1) + (v - 1)p chunks and holds one more: on the first stage L(1 + (p - 1)/pv) blocks (Korthikanti et
    al. 2022, section 4.2.3; Narayanan et al. 2021, section 2.2).

    Args:
        plan: shape of the model, and how it is cut.
        stage: number of the stage, from 0.
        schedule: "gpipe"; "1f1b", interleaved if the plan has several chunks a device; or another looped schedule of
            `pipeline_schedule`, which holds what its own list says.

    Raises:
        InputError: no such stage or schedule.
    """
    _check_stage(plan, stage)
    p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
    if schedule == "1f1b":
        chunks = min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1 if v > 1 else p - stage)
    else:
        chunks = sum(_chunks_in_flight(plan, chunk * p + stage, schedule) for chunk in range(v))
    return Fraction(chunks * sum(plan.count_layers(stage)), v)


def _chunks_in_flight(plan: TrainingPlan, chunk: int, schedule: str) -> int:
    """Return how many micro-batches' activations one chunk of the model holds at once; the last one under 1F1B one."""
    if schedule in FORMULAS:
        return plan.num_micro_batches if schedule == "gpipe" else 1
    return looped_schedule(schedule, plan.pipeline, plan.num_micro_batches, plan.chunks).live_of(chunk)


@lru_cache(maxsize=64)
def looped_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return a schedule whose stages are on rank `stage` mod `ranks`, as `TrainingPlan` has them.

    Args:
        name, ranks, microbatches, chunks: see `pipeline_schedule`.

    Raises:
        InputError: an unknown schedule, one with another placement of the stages, or not for these numbers.
    """
    made = pipeline_schedule("interleaved_1f1b" if name == "1f1b" and chunks > 1 else name, ranks, microbatches, chunks)
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
    # The inputs of both norms and of both first products, and the masks of both branches.
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


def activation_bytes(
    plan: TrainingPlan, stage: int = 0, schedule: str = "1f1b", software: str = "fused", done: int | None = None
) -> Fraction:
    """Return the peak activation bytes that a device of a stage keeps for the backward pass.

    Beside the blocks, the first stage stores the mask of the embedding's dropout for each micro-batch in flight, and
    the last one the inputs of norm and output layer and the float32 logits: sbh(4 + 4V/h), divided as in section 4.3 of
    Korthikanti et al. 2022. On eager software it also holds what a backward pass needs for a while,
    and each stage its results until their gradients come.

    Args:
        plan: shape of the model, and how it is cut.
        stage: number of the stage, from 0.
        schedule: "gpipe"; "1f1b", interleaved if the plan has several chunks a device; or another looped schedule of
            `pipeline_schedule`, which holds what its own list says.
        software: of the device, see `DeviceSpec`.
        done: backward passes of chunks that are over, where gradients have no memory before; None where they always
            have.

    Raises:
        InputError: no such stage or schedule.
    """
    held = layers_in_flight(plan, stage, schedule)
    shape, t = plan.shape, plan.tensor
    tokens, h = plan.tokens, shape.width
    whole = t if plan.sequence_parallel else 1
    dense, sparse = plan.count_layers(stage)
    each = dense * layer_activation_bytes(plan, software=software)
    each += sparse and sparse * layer_activation_bytes(plan, True, software)
    in_flight = min(held / (dense + sparse), plan.num_micro_batches - Fraction(done or 0, plan.chunks))
    size = in_flight * each
    if software == "eager":
        return _eager_peak(plan, stage, schedule, Fraction(each, plan.chunks), in_flight * plan.chunks, done)
    if stage == 0 and shape.has_dropout:
        masks = plan.num_micro_batches if schedule == "gpipe" else min(plan.num_micro_batches, plan.pipeline)
        size += Fraction(tokens * h * masks, whole)
    if stage == plan.pipeline - 1:
        size += Fraction(2 * plan.item_bytes * tokens * h, whole) + Fraction(4 * tokens * shape.vocabulary, t)
    return size


def _eager_peak(
    plan: TrainingPlan, stage: int, schedule: str, chunk_bytes: Fraction, held: Fraction, done: int | None
) -> Fraction:
    """Return the peak of activations and gradients beside those of the parameters, on eager software.

    Backward makes the gradient of a weight before it adds it to the sum so far, and frees an activation after the
    gradient that needs it. The last stage has its logits in float32, and keeps their logarithms.

    Args:
        plan, stage, schedule, done: see `activation_bytes`.
        chunk_bytes: what the blocks of a chunk keep of one micro-batch.
        held: number of chunks that are kept.
    """
    shape, t, item, tokens, h = plan.shape, plan.tensor, plan.item_bytes, plan.tokens, plan.shape.width
    stages, inner, wide = plan.pipeline * plan.chunks, shape.full.mlp_width // t, 1 + shape.is_gated
    own = Fraction(item * tokens * h, t if plan.sequence_parallel else 1)
    table = Fraction(item * shape.vocabulary * h, t)
    # The feed-forward part: the gradients of its second weight, of a gate, or of its first weight.
    first_weight = wide * inner * (h - tokens)
    again = plan.recompute == "full"
    if again:
        # A recomputed block delivers the gradients of its weights together. Its input is kept already.
        recomputed = layer_activation_bytes(replace(plan, recompute="none"), software="eager") - own
        block = own + max(
            recomputed + item * (inner * h + max(2 * inner * tokens * int(shape.is_gated), first_weight)),
            item * plan.layer_parameters + 2 * own,
        )
    else:
        block = own + item * max(inner * h, 2 * inner * tokens * int(shape.is_gated), first_weight)
    if not held:
        # The last block in backward; it has no gradients of weights yet, and neither has the table.
        first = plan.layer_parameters * item + table * (stage == 0 and (plan.pipeline > 1 or not shape.is_tied))
        return max(Fraction(0), chunk_bytes * plan.chunks / sum(plan.count_layers(stage)) + block - first)
    is_last = stage == plan.pipeline - 1
    logits = Fraction(4 * tokens * shape.vocabulary, t)
    backward_of_head = item * logits / 4 + table + own - logits
    result = item * tokens * h
    if schedule not in FORMULAS or (plan.chunks > 1 and done is not None):
        # Between the gradients of inputs and of weights: the inputs of all products, the gradients of their results.
        late, size, peaks = _late_bytes(plan, stage), Fraction(0), [Fraction(0)]
        made = looped_schedule(schedule, plan.pipeline, plan.num_micro_batches, plan.chunks)
        weights = item * plan.layer_parameters * sum(plan.count_layers(stage)) / plan.chunks
        chunks = range(stage, stages, plan.pipeline)
        absent: dict[int, Fraction] = dict.fromkeys(chunks, Fraction(weights) if done is not None else Fraction(0))
        for action in chain.from_iterable(read_cell(text, schedule) for text in made.actions[stage]):
            is_end = int(action.stage == stages - 1)
            whole = chunk_bytes + (2 * own + logits if is_end else result)
            kept, before = late + (item * logits / 4 + own) * is_end, size
            size += {"F": whole, "I": kept - whole, "W": -kept, "B": -whole}[action.kind]
            extra = {
                "F": logits * is_end, "I": block + kept - late, "B": block - logits * is_end,
                "W": max(Fraction(item * wide * inner * h), table * is_end),
            }[action.kind]  # fmt: skip
            peaks.append(max(before, size) + extra - sum(absent.values()))
            if action.kind in "WB":
                layer = weights / (layers := Fraction(sum(plan.count_layers(stage)), plan.chunks))
                layer *= absent[action.stage] > 0
                absent[action.stage] = Fraction(0)
                # The first block of the chunk, which goes back last.
                last = size + chunk_bytes / layers + block - layer
                peaks.append(last - sum(absent.values()) if action.kind == "B" else Fraction(0))
        return max(peaks)
    tail = min(int(held), _chunks_in_flight(plan, stages - 1, schedule)) if is_last else 0
    kept = held * chunk_bytes + tail * (2 * own + logits) + (held - tail) * result
    peaks = [kept + block - logits * (tail > 0)]
    if tail:
        peaks.append(kept + max(logits, backward_of_head))
    if stage == 0:
        peaks.append(kept - chunk_bytes + table + own)
    return max(peaks)


def _late_bytes(plan: TrainingPlan, stage: int) -> Fraction:
    """Return the bytes that a chunk keeps of one micro-batch for the gradients of its weights alone."""
    shape, t = plan.shape, plan.tensor
    each, own = shape.attention_weights(t) + shape.mlp_weights(shape.full.mlp_width, t), plan.shape.width
    features = sum(weight.inner + weight.columns for weight in each) + 4 * own
    return Fraction(plan.item_bytes * plan.tokens * features * sum(plan.count_layers(stage)), plan.chunks)


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
