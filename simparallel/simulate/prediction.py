"""`predict_transformer`: the time and the memory of a training step of a transformer, by its name or its config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from simparallel.base.checks import check_choice, check_integer
from simparallel.base.names import did_you_mean
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_number_of, format_seconds
from simparallel.errors import InputError
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, load_cluster
from simparallel.simulate.config import read_config
from simparallel.simulate.transformer import Recompute, TrainingPlan
from simparallel.simulate.transformer_memory import (
    FLOAT32_ADAM,
    MEGATRON_ADAM,
    ModelStates,
    activation_bytes,
    gathered_bytes,
    state_bytes,
)
from simparallel.simulate.transformer_time import Efficiency, PricedStep, StepTime

Sharded = Literal["none", "state", "gradient", "parameter"]
Verdict = Literal["fits", "close", "does not fit"]
_GIB = 1 << 30
# Bytes of an activation, and of the states of a parameter.
DTYPES: Mapping[str, tuple[int, ModelStates]] = {
    "bfloat16": (2, MEGATRON_ADAM),
    "float16": (2, MEGATRON_ADAM),
    "float32": (4, FLOAT32_ADAM),
    "float8": (2, MEGATRON_ADAM),
    "tf32": (4, FLOAT32_ADAM),
}
# What a device holds beside the allocated tensors, least and most: the context of its driver with workspaces of
# libraries (0.8 GiB on an H100 with PyTorch 2.11), the buffers of each communicator, and the share of what comes and
# goes that fragments leave unused (6 to 21% in eleven of twelve steps there).
_CONTEXT_BYTES = 0.3 * _GIB, 1.5 * _GIB
# NCCL has buffers for each channel and neighbour: 512 KiB for LL, 4800 KiB for LL128, and 4 MiB for Simple
# (NVIDIA/nccl @5067397, src/init.cc); at least a ring of 4 channels, at most 24 channels of a ring and of a tree, which
# has two more neighbours inside a node. Later versions connect an algorithm when it is first used.
_NEIGHBOUR_BYTES = (512 + 4800 + 4096) << 10
_COMMUNICATOR_BYTES = 4 * _NEIGHBOUR_BYTES, 24 * 3 * _NEIGHBOUR_BYTES
_FRAGMENTS = 0.05, 0.25


@dataclass(frozen=True)
class TransformerPrediction:
    """The predicted training step of a transformer. Made by `predict_transformer`; all times are modelled.

    Attributes:
        plan: the model, and how it is cut.
        cluster: the described hardware.
        schedule, dtype: as given.
        time: the parts of the step [ps], of the slowest device.
        memory: bytes by kind on the device that holds most: "states" (parameters, gradients, optimizer),
            "activations", and "gathered" (whole parameters of ZeRO-3).
    """

    plan: TrainingPlan
    cluster: ClusterSpec
    schedule: str
    dtype: str
    time: StepTime
    memory: Mapping[str, int]

    @property
    def step_time_s(self) -> float:
        """The time of a step [s]."""
        return self.time.step_s

    @property
    def tokens_per_s(self) -> float:
        """The tokens of all devices in a second."""
        return self.plan.global_batch * self.plan.shape.length / self.step_time_s

    @property
    def mfu(self) -> float:
        """The flops of the model over the peaks of all devices, from 0 to 1; attention counts as if not masked."""
        return self.time.mfu

    @property
    def hfu(self) -> float:
        """As `mfu`, with the flops of recomputation."""
        return self.time.hfu

    @property
    def memory_bytes(self) -> int:
        """The bytes that the fullest device allocates."""
        return sum(self.memory.values())

    @property
    def memory_range_bytes(self) -> tuple[int, int]:
        """What the fullest device needs at least and at most, with context, communicators and fragments (assumed)."""
        return range_bytes(self.plan, self.memory)

    @property
    def verdict(self) -> Verdict:
        """Return whether a step fits into the memory: "close" if that depends on what is not allocated by tensors."""
        least, most = self.memory_range_bytes
        capacity = self.cluster.device.memory_bytes
        return "fits" if most <= capacity else "close" if least <= capacity else "does not fit"

    @property
    def fits(self) -> bool:
        """Whether a step can fit: the verdict is not "does not fit"."""
        return self.verdict != "does not fit"

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step by cause; they add up to `step_time_s`."""
        return {
            name.replace("messages", "pipeline"): getattr(self.time, f"{name}_ps") / PS_PER_S
            for name in (field.name.removesuffix("_ps") for field in fields(self.time) if field.name.endswith("_ps"))
        }

    def table(self) -> str:
        """Return the prediction as text."""
        plan, capacity = self.plan, self.cluster.device.memory_bytes
        least, most = self.memory_range_bytes
        parts = sorted(self.breakdown.items(), key=lambda part: -part[1])
        rows = [(name, format_seconds(each), f"{each / self.step_time_s:.1%}") for name, each in parts if each]
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.items() if size)
        return "\n".join(
            (
                f"{plan.shape.num_parameters / 1e9:,.2f} billion parameters on {self.cluster.name}: "
                f"tensor {plan.tensor} x context {plan.context} x data {plan.data} x pipeline {plan.pipeline}"
                + (f", expert {plan.expert}" if plan.expert > 1 else ""),
                f"{format_seconds(self.step_time_s)} a step of {format_number_of(plan.global_batch, 'sequence')}, "
                f"{self.tokens_per_s:,.0f} tokens/s, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}; all times are modelled",
                *aligned(rows, "<>>"),
                f"{self.verdict}: {format_bytes(self.memory_bytes)} allocated ({held}), "
                f"{format_bytes(least)} to {format_bytes(most)} with context, communicators and fragments (assumed), "
                f"a device has {format_bytes(capacity)}",
            )
        )

    def __str__(self) -> str:
        return self.table()


def predict_transformer(
    config: Mapping[str, Any] | str | os.PathLike[str],
    cluster: str | os.PathLike[str] | ClusterSpec = "dgx-h100",
    world_size: int = 64,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    sharded: Sharded = "none",
    micro_batch: int = 1,
    global_batch: int | None = None,
    length: int | None = None,
    chunks: int = 1,
    schedule: str = "1f1b",
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
    dtype: str = "bfloat16",
) -> TransformerPrediction:
    """Predict a training step of a transformer with AdamW, in closed form: nothing runs, in milliseconds.

    The number of replicas is what remains: `world_size` / (`tensor` × `pipeline` × `context`). Attention is one kernel
    that stores no scores. Exchanges between replicas run beside the backward pass. What the runtime cannot run yet
    (contexts, experts) is priced all the same.

        >>> step = sp.predict_transformer("llama-3.1-8b", "dgx-h100", 64, tensor=2, sharded="state", global_batch=128)
        >>> step.verdict
        'fits'

    Args:
        config: keys of a Hugging Face `config.json`, the path of one, or a shipped name, such as "llama-3.1-8b"; see
            `simulate.config.read_config`.
        cluster: name of a preset, path of a .json file, or a `ClusterSpec`.
        world_size: number of devices.
        tensor, pipeline, context, expert: devices that share each block, the blocks, each sequence, the experts; see
            `TrainingPlan`. `expert` divides replicas × `context`.
        sharded: what replicas share of a parameter: "none"; "state", of the optimizer (ZeRO-1); "gradient", that and
            gradients (ZeRO-2); "parameter", all (ZeRO-3, FSDP).
        micro_batch: sequences of a micro-batch.
        global_batch: sequences of a step; None for one micro-batch for each replica and stage.
        length: tokens of a sequence; None for the longest that the model allows, at most 4,096.
        chunks: model chunks of a device; more than 1 is the interleaved schedule.
        schedule: a looped schedule of `pipeline_schedule`, such as "1f1b", "gpipe" or "zb_h1".
        recompute: "none", "selective" or "full".
        sequence_parallel: whether the tensor group shares norms along the sequence, too.
        dtype: "bfloat16", "float16", "float32", "tf32", or "float8" for products in FP8 with bfloat16 activations: see
            `ClusterSpec`, but gradients and states of optimizers are those of mixed precision.

    Raises:
        InputError: an unknown model, option or type, or sizes that cannot be divided; facts as `TrainingPlan` has them.
        ClusterError: the cluster cannot be described.
    """
    who = "predict_transformer"
    check_choice(who, "sharded", sharded, get_args(Sharded))
    if dtype not in DTYPES:
        raise InputError(f"{who}: dtype={dtype!r} is not one of {', '.join(DTYPES)}." + did_you_mean(dtype, DTYPES))
    for name, size in (("world_size", world_size), ("tensor", tensor), ("pipeline", pipeline), ("context", context)):
        check_integer(who, name, size, 1)
    check_integer(who, "micro_batch", micro_batch, 1)
    shape = read_config(config, length)
    if world_size % (tensor * pipeline * context):
        raise InputError(
            f"{who}: world_size={world_size} is not divisible by tensor * pipeline * context = {tensor} * {pipeline} * "
            f"{context} = {tensor * pipeline * context}; the rest are replicas."
        )
    data = world_size // (tensor * pipeline * context)
    if global_batch is None:
        global_batch = micro_batch * data * pipeline
    check_integer(who, "global_batch", global_batch, 1)
    if global_batch % (micro_batch * data):
        raise InputError(
            f"{who}: global_batch={global_batch} is not divisible by micro_batch * replicas = {micro_batch} * {data}."
        )
    described = cluster if isinstance(cluster, ClusterSpec) else load_cluster(cluster, world_size)
    plan = TrainingPlan(
        shape,
        tensor,
        pipeline,
        data,
        micro_batch,
        global_batch // (micro_batch * data),
        chunks,
        sequence_parallel,
        recompute,
        fused_attention=True,
        zero_stage=get_args(Sharded).index(sharded),
        overlap_data=True,
        context=context,
        expert=expert,
        item_bytes=DTYPES[dtype][0],
    )
    return predict_plan(plan, described, schedule, dtype)


def predict_plan(plan: TrainingPlan, cluster: ClusterSpec, schedule: str, dtype: str) -> TransformerPrediction:
    """Predict a step of a plan; see `predict_transformer`."""
    return predict_priced(PricedStep(plan, achieved_by(cluster, dtype), DTYPES[dtype][1], schedule), cluster, dtype)


def achieved_by(cluster: ClusterSpec, dtype: str) -> ClusterSpec:
    """Return a cluster with the speeds that it achieves with matrix products in `dtype`, see `predict_transformer`."""
    return Efficiency().achieved(with_products(cluster, dtype))


def with_products(cluster: ClusterSpec, dtype: str) -> ClusterSpec:
    """Return the cluster with `dtype` for a plan's matrix products, where it is not the dtype of all items."""
    return replace(cluster, dtype=dtype if dtype in ("float8", "tf32") else "float32")


def predict_priced(priced: PricedStep, cluster: ClusterSpec, dtype: str) -> TransformerPrediction:
    """Predict a step from the times of its parts, `priced`, on this cluster; `dtype` says what its states take."""
    memory = worst_memory(priced.plan, priced.schedule, DTYPES[dtype][1], cluster.device.software)
    return TransformerPrediction(priced.plan, cluster, priced.schedule, dtype, priced.time(), memory)


def worst_memory(
    plan: TrainingPlan, schedule: str, states: ModelStates, software: str, keeps_gradients: bool = True
) -> dict[str, int]:
    """Return the bytes by kind of the device that holds most.

    Args:
        plan: the model, and how it is cut.
        schedule: see `predict_transformer`.
        states: bytes of each parameter.
        software: of the device.
        keeps_gradients: whether gradients have memory between the steps; otherwise each chunk makes its own in its
            first backward pass.
    """
    kept, kinds = states if keeps_gradients else replace(states, gradient=0), []
    # Replicas share no activations.
    alone = replace(plan, zero_stage=0)
    # Of equal stages the first holds most: more of its micro-batches are in flight.
    for stage in plan.like_stages:
        activations = round(activation_bytes(alone, stage, schedule, software, keeps_gradients))
        gathered = gathered_bytes(plan, stage, states)
        if software == "eager":
            gathered = activation_bytes(plan, stage, schedule, software, keeps_gradients) - activations
        states_bytes = round(state_bytes(plan, stage, kept))
        kinds.append({"states": states_bytes, "activations": activations, "gathered": round(gathered)})
    return max(kinds, key=lambda kind: sum(kind.values()))


def range_bytes(plan: TrainingPlan, memory: Mapping[str, int]) -> tuple[int, int]:
    """Return the least and the most bytes that a device needs: tensors, context, communicators and fragments.

    Args:
        plan: tells which communicators there are.
        memory: the allocated bytes by kind.
    """
    sizes = (plan.tensor, plan.context, plan.expert, plan.data * plan.context, plan.pipeline)
    communicators = sum(size > 1 for size in sizes)
    allocated = sum(memory.values())
    # States are allocated once, and never freed.
    fragmented = allocated - memory["states"]
    least, most = (
        round(allocated + context + communicators * each + share * fragmented)
        for context, each, share in zip(_CONTEXT_BYTES, _COMMUNICATOR_BYTES, _FRAGMENTS, strict=True)
    )
    return least, most
