"""The work of a GPT that is trained on many devices, in closed form: parameters, flops, and shares of each device.

All counts are exact integers or fractions. Formulas: Narayanan et al. 2021, "Efficient large-scale language model
training on GPU clusters using Megatron-LM" (arXiv 2104.04473); Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models" (arXiv 2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Literal, get_args

from simparallel.base.checks import check_integer
from simparallel.errors import InputError

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT as `models.GPT` builds it: learned positions, biases, and the token table as output layer.

    Args:
        num_layers: number of blocks L.
        width: features of a token h.
        num_heads: attention heads a.
        length: tokens of a sequence s.
        vocabulary: tokens V.

    Raises:
        InputError: a size below 1, or `width` not divisible by `num_heads`.
    """

    num_layers: int
    width: int
    num_heads: int
    length: int
    vocabulary: int

    def __post_init__(self) -> None:
        for field in fields(self):
            check_integer("GPTShape", field.name, getattr(self, field.name), low=1)
        if self.width % self.num_heads:
            raise InputError(f"GPTShape: width={self.width} is not divisible by num_heads={self.num_heads}.")

    @property
    def num_parameters(self) -> int:
        """The parameters: 12Lh² + 13Lh of the blocks, 2h of the last norm, (V + s)h of the tables.

        Narayanan et al. 2021, equation 2, which leaves out the last norm.
        """
        h = self.width
        return self.num_layers * (12 * h * h + 13 * h) + 2 * h + (self.vocabulary + self.length) * h

    def flops(self, batch: int, recompute: Recompute = "none") -> int:
        """Return the flops of the matrix products of one step on `batch` sequences, recomputation included.

        Attention is counted in full, as if no position were masked: 72BLsh²(1 + s/6h + V/12Lh) without recomputation
        (Korthikanti et al. 2022, equation 7), and 96BLsh²(1 + s/6h + V/16Lh) with full recomputation (Narayanan et al.
        2021, equation 3). With selective recomputation it is 72BLsh²(1 + s/3h + V/12Lh), as in equation 8 of
        Korthikanti et al., which counts the repeated core three times; published utilisations of hardware are made with
        it.
        """
        _check_recompute("GPTShape.flops", recompute)
        h, s = self.width, self.length
        products, attention, head = 24 * h * h, 4 * s * h, 2 * h * self.vocabulary
        # The backward pass takes twice the flops of the forward pass.
        extra = {"none": 0, "selective": 3 * attention, "full": products + attention}[recompute]
        return batch * s * (self.num_layers * (3 * (products + attention) + extra) + 3 * head)


@dataclass(frozen=True)
class TrainingPlan:
    """How a GPT is trained on tensor × data × pipeline devices, in Megatron-LM's order: tensor ranks are neighbours.

    Args:
        shape: the sizes of the model.
        tensor: devices that share each block.
        pipeline: stages, of equally many blocks.
        data: replicas.
        micro_batch: sequences of a micro-batch.
        num_micro_batches: micro-batches of a replica and step.
        chunks: model chunks of a device; more than 1 is the interleaved schedule.
        sequence_parallel: whether the tensor group shares norms and dropouts along the sequence, too.
        recompute: "none"; "selective", the attention core alone; "full", all of a block but its input.
        fused_attention: whether attention is one kernel that stores no scores (FlashAttention).
        zero_stage: what replicas share: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters.
        overlap_tensor: whether all-reduces of the backward pass run beside the gradients of weights.
        overlap_data: whether the exchange of parameters and gradients runs beside compute.

    Raises:
        InputError: a size below 1, an unknown option, or sizes that cannot be divided evenly.
    """

    shape: GPTShape
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    num_micro_batches: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    fused_attention: bool = False
    zero_stage: int = 0
    overlap_tensor: bool = False
    overlap_data: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "micro_batch", "num_micro_batches", "chunks"):
            check_integer("TrainingPlan", name, getattr(self, name), low=1)
        check_zero_stage("TrainingPlan", self.zero_stage)
        _check_recompute("TrainingPlan", self.recompute)
        shape, stages = self.shape, self.pipeline * self.chunks
        for what, size, parts in (
            ("num_layers", shape.num_layers, ("pipeline * chunks", stages)),
            ("num_heads", shape.num_heads, ("tensor", self.tensor)),
            ("length", shape.length if self.sequence_parallel else self.tensor, ("tensor", self.tensor)),
        ):
            if size % parts[1]:
                raise InputError(
                    f"TrainingPlan: {what}={size} is not divisible by {parts[0]}={parts[1]}; choose a divisor."
                )

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return self.tensor * self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        """The sequences of a step."""
        return self.micro_batch * self.num_micro_batches * self.data

    @property
    def layers_per_stage(self) -> int:
        """The blocks of a device."""
        return self.shape.num_layers // self.pipeline

    @property
    def layer_parameters(self) -> Fraction:
        """The parameters of a block on a device: norms and the biases that are added after the sum are not divided."""
        h = self.shape.width
        return Fraction(12 * h * h + 7 * h, self.tensor) + 6 * h

    def table_parameters(self, stage: int) -> Fraction:
        """Return the parameters of a stage beside its blocks: tables, and the last norm.

        The first stage has both tables. The last one has the norm and, unless it is also the first, its own copy of the
        token table.
        """
        shape, first, last = self.shape, stage == 0, stage == self.pipeline - 1
        tokens = Fraction(shape.vocabulary, self.tensor) if first or last else Fraction(0)
        return (tokens + first * shape.length + last * 2) * shape.width

    def stage_parameters(self, stage: int) -> Fraction:
        """Return the parameters on a device of a stage; they may be a fraction, as tables are padded in practice."""
        return self.layers_per_stage * self.layer_parameters + self.table_parameters(stage)


def check_zero_stage(who: str, value: object) -> None:
    """Raise InputError unless `value` is a stage of ZeRO.

    Args:
        who: name of the caller in errors.
        value: 0, 1, 2 or 3.
    """
    if check_integer(who, "zero_stage", value) > 3:
        raise InputError(f"{who}: zero_stage={value!r} must be 0, 1, 2 or 3.")


def _check_recompute(who: str, value: str) -> None:
    if value not in get_args(Recompute):
        raise InputError(f"{who}: recompute={value!r} must be one of {', '.join(get_args(Recompute))}.")
