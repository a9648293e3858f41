"""The work of a transformer that is trained on many devices, in closed form: parameters, flops, shares of each device.

All counts are exact integers or fractions. Formulas: Narayanan et al. 2021, "Efficient large-scale language model
training on GPU clusters using Megatron-LM" (arXiv 2104.04473); Korthikanti et al. 2022, "Reducing activation
recomputation in large transformer models" (arXiv 2205.05198). Latent attention: DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from simparallel.base.checks import check_choice, check_integer
from simparallel.errors import InputError

Recompute = Literal["none", "selective", "full"]


class Weight(NamedTuple):
    """A weight of a block, as a device of a tensor group holds it.

    Attributes:
        inner, columns: its shape.
        biases: elements of its bias.
        is_whole: whether each device of the tensor group has all of it.
    """

    inner: int
    columns: int
    biases: int = 0
    is_whole: bool = False

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.inner * self.columns + self.biases


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of a decoder-only transformer. The first five alone make a GPT, as `models.GPT` builds it.

    Args:
        num_layers: number of blocks L.
        width: features of a token h.
        num_heads: attention heads a.
        length: tokens of a sequence s.
        vocabulary: tokens V.
        num_kv_heads: heads of keys and values; 0 for as many as queries have.
        head_size: features of a query and a key of one head; 0 for `width` / `num_heads`.
        value_size: features of a value of one head; 0 for `head_size`.
        mlp_width: features inside of the feed-forward part; 0 for 4 `width`.
        is_gated: whether that part multiplies two linear layers' results (SwiGLU) where a GPT has one and a GELU.
        has_layer_norm: whether norms subtract the mean and add a bias, as LayerNorm; otherwise RMSNorm.
        has_query_norm: whether queries and keys are normalised head by head.
        has_qkv_bias, has_bias: whether the linear layers of queries, keys and values, and the other ones, have a bias.
        has_dropout: whether attention, and both branches of a block, end with a dropout.
        num_positions: rows of the learned table of positions; None for `length`, 0 for rotary positions.
        is_tied: whether the table of tokens is the output layer, too.
        query_rank, kv_rank, rotary_size: latent attention: features of the compressed queries (0: not compressed), of
            the compressed keys and values, and of the rotary key that all heads share, a part of `head_size`.
        num_experts, active_experts, expert_width: experts of a sparse block, how many a token visits, and the features
            inside of each. 0 for dense blocks alone.
        shared_width: features inside of the expert that all tokens visit.
        num_dense: blocks without experts, the first ones.

    Raises:
        InputError: a size out of range, `width` not divisible by `num_heads` where that gives the size of a head, or
            `num_heads` by `num_kv_heads`.
    """

    num_layers: int
    width: int
    num_heads: int
    length: int
    vocabulary: int
    num_kv_heads: int = 0
    head_size: int = 0
    value_size: int = 0
    mlp_width: int = 0
    is_gated: bool = False
    has_layer_norm: bool = True
    has_query_norm: bool = False
    has_qkv_bias: bool = True
    has_bias: bool = True
    has_dropout: bool = True
    num_positions: int | None = None
    is_tied: bool = True
    query_rank: int = 0
    kv_rank: int = 0
    rotary_size: int = 0
    num_experts: int = 0
    active_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    num_dense: int = 0

    def __post_init__(self) -> None:
        who = type(self).__name__
        for number, field in enumerate(fields(self)):
            if field.type == "int":
                check_integer(who, field.name, getattr(self, field.name), low=int(number < 5))
        if not self.head_size and self.width % self.num_heads:
            raise InputError(f"{who}: width={self.width} is not divisible by num_heads={self.num_heads}.")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise InputError(f"{who}: num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}.")
        if self.num_experts and not 1 <= self.active_experts <= self.num_experts:
            raise InputError(
                f"{who}: active_experts={self.active_experts} of num_experts={self.num_experts}: a token visits at "
                "least one expert, and at most all."
            )

    @cached_property
    def full(self) -> TransformerShape:
        """The same sizes, with those filled in that follow from others."""
        head_size = self.head_size or self.width // self.num_heads
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_size=head_size,
            value_size=self.value_size or head_size,
            mlp_width=self.mlp_width or 4 * self.width,
            num_positions=self.length if self.num_positions is None else self.num_positions,
        )

    def attention_weights(self, tensor: int = 1) -> list[Weight]:
        """Return the weights of the attention of a block, on each device of a tensor group.

        Heads are divided; if there are fewer heads of keys and values than devices, several have the same.
        """
        h, heads, d, value_size = self.width, self.num_heads // tensor, self.full.head_size, self.full.value_size
        out = Weight(heads * value_size, h, h * self.has_bias)
        if self.kv_rank:
            queries = [Weight(self.query_rank or h, heads * d)]
            if self.query_rank:
                queries.insert(0, Weight(h, self.query_rank, is_whole=True))
            latent = Weight(h, self.kv_rank + self.rotary_size, is_whole=True)
            return [*queries, latent, Weight(self.kv_rank, heads * (d - self.rotary_size + value_size)), out]
        columns = heads * d + self.kv_heads(tensor) * (d + value_size)
        return [Weight(h, columns, columns * self.has_qkv_bias), out]

    def kv_heads(self, tensor: int) -> int:
        """Return the heads of keys and values on each device of a tensor group; with latent attention, of queries."""
        return max(1, (self.num_heads if self.kv_rank else self.full.num_kv_heads) // tensor)

    def mlp_weights(self, mlp_width: int, tensor: int = 1) -> list[Weight]:
        """Return the weights of a feed-forward part, on each device of a tensor group."""
        h, inner = self.width, mlp_width // tensor
        columns = inner * (1 + self.is_gated)
        return [Weight(h, columns, columns * self.has_bias), Weight(inner, h, h * self.has_bias)]

    def router(self) -> Weight:
        """Return the weight that chooses the experts of a token."""
        return Weight(self.width, self.num_experts, is_whole=True)

    @property
    def norm_parameters(self) -> int:
        """The parameters of a norm."""
        return self.width * (1 + self.has_layer_norm)

    @property
    def block_norm_parameters(self) -> int:
        """The parameters of the norms of a block."""
        within = 2 * self.full.head_size * self.has_query_norm + self.query_rank + self.kv_rank
        return 2 * self.norm_parameters + within

    @property
    def num_parameters(self) -> int:
        """The parameters; of a GPT 12Lh² + 13Lh of the blocks, 2h of the last norm, (V + s)h of the tables.

        Narayanan et al. 2021, equation 2, which leaves out the last norm.
        """
        plan = TrainingPlan(self)
        return int(plan.stage_parameters(0) + plan.stage_experts(0))

    def flops(self, batch: int, recompute: Recompute = "none") -> int:
        """Return the flops of the matrix products of one step on `batch` sequences, recomputation included.

        Attention is counted in full, as if no position were masked: for a GPT 72BLsh²(1 + s/6h + V/12Lh) without
        recomputation (Korthikanti et al. 2022, equation 7), and 96BLsh²(1 + s/6h + V/16Lh) with full recomputation
        (Narayanan et al. 2021, equation 3). With selective recomputation it is 72BLsh²(1 + s/3h + V/12Lh), as in
        equation 8 of Korthikanti et al., which counts the repeated core three times; published utilisations of hardware
        are made with it. Of a sparse block the experts count that a token visits.
        """
        check_choice("TransformerShape.flops", "recompute", recompute, get_args(Recompute))
        dense = self.attention_weights() + self.mlp_weights(self.full.mlp_width)
        sparse = self.attention_weights() + [self.router()]
        if self.num_experts:
            sparse += self.mlp_weights(self.expert_width) * self.active_experts + self.mlp_weights(self.shared_width)
        num_dense, num_sparse = TrainingPlan(self).count_layers(0)
        products = num_dense * sum(2 * weight.inner * weight.columns for weight in dense)
        products += num_sparse * sum(2 * weight.inner * weight.columns for weight in sparse)
        attention = 2 * self.length * self.num_heads * (self.full.head_size + self.full.value_size) * self.num_layers
        head = 2 * self.width * self.vocabulary
        # The backward pass takes twice the flops of the forward pass.
        extra = {"none": 0, "selective": 3 * attention, "full": products + attention}[recompute]
        return batch * self.length * (3 * (products + attention) + extra + 3 * head)


# The defaults are those of a GPT.
GPTShape = TransformerShape


@dataclass(frozen=True)
class TrainingPlan:
    """How a transformer is trained on tensor × context × data × pipeline devices.

    Ranks are in Megatron-LM's order: the devices of a tensor group are neighbours, then those of a context, then
    replicas, then stages.

    Args:
        shape: the sizes of the model.
        tensor: devices that share each block.
        pipeline: stages, of equally many blocks; with one chunk on each device, the first ones may have one more.
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
        overlap_messages: whether the interleaved schedule computes while it sends; others always do.
        context: devices that share each sequence; keys and values go round (ring attention).
        expert: devices that share the experts; it divides `data` × `context`.
        item_bytes: bytes of an activation.

    Raises:
        InputError: a size below 1, an unknown option, or sizes that cannot be divided evenly.
    """

    shape: TransformerShape
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
    overlap_messages: bool = False
    context: int = 1
    expert: int = 1
    item_bytes: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int" and field.name != "zero_stage":
                check_integer("TrainingPlan", field.name, getattr(self, field.name), low=1)
        check_zero_stage("TrainingPlan", self.zero_stage)
        check_choice("TrainingPlan", "recompute", self.recompute, get_args(Recompute))
        shape, stages = self.shape.full, self.pipeline * self.chunks
        along = self.context * (self.tensor if self.sequence_parallel else 1)
        for what, size, parts in (
            ("num_layers", shape.num_layers if self.chunks > 1 else stages, ("pipeline * chunks", stages)),
            ("num_heads", shape.num_heads, ("tensor", self.tensor)),
            ("mlp_width", shape.mlp_width, ("tensor", self.tensor)),
            ("expert_width", shape.expert_width, ("tensor", self.tensor)),
            ("shared_width", shape.shared_width, ("tensor", self.tensor)),
            ("num_experts", shape.num_experts or self.expert, ("expert", self.expert)),
            ("data * context", self.data * self.context, ("expert", self.expert)),
            ("length", shape.length, ("context * tensor" if self.sequence_parallel else "context", along)),
        ):
            if size % parts[1]:
                raise InputError(
                    f"TrainingPlan: {what}={size} is not divisible by {parts[0]}={parts[1]}; choose a divisor."
                )
        if shape.num_kv_heads % self.tensor and self.tensor % shape.num_kv_heads:
            raise InputError(
                f"TrainingPlan: num_kv_heads={shape.num_kv_heads} and tensor={self.tensor}: one of them has to divide "
                "the other."
            )
        if self.expert > 1 and not shape.num_experts:
            raise InputError(f"TrainingPlan: expert={self.expert}, and the model has no experts; leave it at 1.")
        if shape.num_layers < stages:
            raise InputError(
                f"TrainingPlan: num_layers={shape.num_layers} are fewer than pipeline * chunks={stages}; each stage "
                "needs a block."
            )

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def global_batch(self) -> int:
        """The sequences of a step."""
        return self.micro_batch * self.num_micro_batches * self.data

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on a device."""
        return self.shape.length * self.micro_batch // self.context

    def count_layers(self, stage: int) -> tuple[int, int]:
        """Return the number of dense and of sparse blocks of a device."""
        parts = [self.part_layers(part) for part in range(stage, self.pipeline * self.chunks, self.pipeline)]
        return sum(dense for dense, _ in parts), sum(sparse for _, sparse in parts)

    def part_layers(self, part: int) -> tuple[int, int]:
        """Return the number of dense and of sparse blocks of a part of the model, for one chunk of a device."""
        each, more = divmod(self.shape.num_layers, self.pipeline * self.chunks)
        first, count = part * each + min(part, more), each + (part < more)
        dense = min(max(0, self.shape.num_dense - first), count) if self.shape.num_experts else count
        return dense, count - dense

    @cached_property
    def like_stages(self) -> dict[int, list[int]]:
        """The first of each kind of stages -> all like it: as many blocks, and not the first nor the last."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for stage in range(self.pipeline):
            kinds.setdefault((*self.count_layers(stage), stage == 0, stage == self.pipeline - 1), []).append(stage)
        return {stages[0]: stages for stages in kinds.values()}

    @property
    def layers_per_stage(self) -> int:
        """The blocks of the first device, which has the most."""
        return sum(self.count_layers(0))

    @property
    def layer_parameters(self) -> Fraction:
        """The parameters of a dense block on a device: norms and biases that are added after the sum are whole."""
        shape, t = self.shape, self.tensor
        weights = shape.attention_weights(t) + shape.mlp_weights(shape.full.mlp_width, t)
        return Fraction(sum(weight.size for weight in weights) + shape.block_norm_parameters)

    @property
    def sparse_parameters(self) -> Fraction:
        """The parameters of a sparse block on a device, without those of its experts."""
        shape, t = self.shape, self.tensor
        weights = [*shape.attention_weights(t), shape.router()]
        if shape.shared_width:
            weights += shape.mlp_weights(shape.shared_width, t)
        return Fraction(sum(weight.size for weight in weights) + shape.block_norm_parameters)

    @property
    def layer_experts(self) -> Fraction:
        """The parameters of the experts of a sparse block on a device."""
        shape = self.shape
        one = sum(weight.size for weight in shape.mlp_weights(shape.expert_width, self.tensor))
        return Fraction(one * shape.num_experts, self.expert)

    def table_parameters(self, stage: int) -> Fraction:
        """Return the parameters of a stage beside its blocks: tables, and the last norm.

        The first stage has both tables. The last one has the norm and the output layer; if that is the token table, its
        own copy of it, unless the last stage is also the first.
        """
        shape, first, last = self.shape, stage == 0, stage == self.pipeline - 1
        tokens = Fraction(shape.vocabulary, self.tensor) * (max(first, last) if shape.is_tied else first + last)
        return (tokens + first * (shape.full.num_positions or 0)) * shape.width + last * shape.norm_parameters

    def stage_parameters(self, stage: int) -> Fraction:
        """Return the parameters on a device of a stage, without experts.

        They may be a fraction, as tables are padded in practice.
        """
        dense, sparse = self.count_layers(stage)
        return dense * self.layer_parameters + sparse * self.sparse_parameters + self.table_parameters(stage)

    def stage_experts(self, stage: int) -> Fraction:
        """Return the parameters of experts on a device of a stage."""
        return self.count_layers(stage)[1] * self.layer_experts


def check_zero_stage(who: str, value: object) -> None:
    """Raise InputError unless `value` is a stage of ZeRO.

    Args:
        who: name of the caller in errors.
        value: 0, 1, 2 or 3.
    """
    if check_integer(who, "zero_stage", value) > 3:
        raise InputError(f"{who}: zero_stage={value!r} must be 0, 1, 2 or 3.")
