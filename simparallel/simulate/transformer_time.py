"""The time of a training step of a transformer, by algebra: rooflines of kernels, prices of collectives, formulas.

Nothing is measured here, and nothing is fitted to the time of a step. A device whose software is "eager" runs a kernel
for each op, without dropouts (`Op.eager_work`). Any other one runs the kernels of Narayanan et al. 2021, section 4.2:
bias and GeLU are one kernel, as are bias, dropout and sum, and scale, mask and softmax; each reads its inputs and
writes its outputs once. Flops and bytes are divided by what devices and links achieve (`Efficiency`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd.op import Op, instance
from simparallel.autograd.ops.activation import GELU, SiLU
from simparallel.autograd.ops.attention import RotaryEmbedding, ScaledDotProductAttention
from simparallel.autograd.ops.cast import Cast
from simparallel.autograd.ops.elementwise import Add, Mul
from simparallel.autograd.ops.embedding import Embedding
from simparallel.autograd.ops.indexing import Slice
from simparallel.autograd.ops.loss import CrossEntropy
from simparallel.autograd.ops.matmul import Linear
from simparallel.autograd.ops.norm import LayerNorm, RMSNorm
from simparallel.autograd.ops.shape import Permute
from simparallel.errors import ClusterError, InputError
from simparallel.machine import achieved
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, picoseconds
from simparallel.machine.products import MatrixProduct, MatrixUnits
from simparallel.simulate.pipeline_time import PartTime, clocked
from simparallel.simulate.transformer import TrainingPlan, Weight
from simparallel.simulate.transformer_memory import FORMULAS, MIXED_ADAM, ModelStates, looped_schedule

# A device of which nothing but its peak is known: products of every shape reach the same share.
ANY_SHAPE = MatrixUnits(*achieved.ANY_SHAPE)


@dataclass(frozen=True)
class Efficiency:
    """The fractions of its data sheet that hardware achieves; the defaults are published figures.

    Args:
        product: of the peak, by matrix products; None for what the device's `MatrixUnits` reach by shape. A device
            without them reaches 0.642 of its peak, from the time of one block of a 22B model, measured on eight A100
            (Korthikanti et al. 2022, table 4, median of five).
        attention: of the peak, by fused attention; None for what the `MatrixUnits` reach, or else 0.325: 25 to 40 %
            for FlashAttention (Dao 2023, arXiv 2307.08691, abstract).
        memory: of the bandwidth, by copies: 2903 of 3350 GB/s on an H100 (Voltage Park, aigatech/vpbenchmarking).
        link: of the bandwidth inside a node: NCCL plans with 20 of 25 GB/s a link (NVIDIA/nccl, src/graph/topo.h).
        node_link: of the bandwidth between nodes: 23.5 of 25 GB/s (aliyun/SimAI, calbusbw.h).

    Raises:
        InputError: a fraction that is not above 0 and at most 1.
    """

    product: float | None = None
    attention: float | None = None
    memory: float = achieved.COPY
    link: float = achieved.LINK
    node_link: float = achieved.NODE_LINK

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise InputError(f"Efficiency: {field.name}={value!r} must be a number above 0 and at most 1.")

    def achieved(self, cluster: ClusterSpec) -> ClusterSpec:
        """Return the cluster with the speeds that it achieves, in place of its device's own curves of efficiency.

        Latencies and launch costs stay.
        """
        device = cluster.device
        units = device.matrix_units or ANY_SHAPE
        units = replace(units, product=self.product or units.product, attention=self.attention or units.attention)
        # The fractions hold for kernels of every size, so curves by size would count the same loss twice.
        device = replace(
            device,
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * self.memory,
            matrix_units=units,
            memory_efficiency=None,
        )
        if cluster.library:
            # NCCL plans with what links achieve.
            return replace(cluster, device=device)
        between = cluster.node_link and cluster.node_link.faster(self.node_link)
        return replace(cluster, device=device, link=cluster.link.faster(self.link), node_link=between)


@dataclass(frozen=True)
class StepTime:
    """The time of a step on the slowest device [ps], by what the device does; the parts add up to `step_ps`.

    Attributes:
        compute_ps: kernels of forward and backward passes, recomputation included.
        tensor_ps: collectives of the tensor group that nothing hides.
        context_ps: keys and values that go round, as far as attention does not hide them.
        expert_ps: exchange of tokens between the devices of the experts.
        messages_ps: messages between stages.
        bubble_ps: waiting for other stages.
        data_ps: exchange of gradients and parameters between replicas that nothing hides.
        optimizer_ps: the update.
        mfu, hfu: flops of the model, and with recomputation (`GPTShape.flops`), over the peaks of all devices.
    """

    compute_ps: int
    tensor_ps: int
    context_ps: int
    expert_ps: int
    messages_ps: int
    bubble_ps: int
    data_ps: int
    optimizer_ps: int
    mfu: float
    hfu: float

    @property
    def step_ps(self) -> int:
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name.endswith("_ps"))

    @property
    def step_s(self) -> float:
        """The whole step [s]."""
        return self.step_ps / PS_PER_S


class Kernel(NamedTuple):
    """One kernel: its flops, and the bytes that it reads and writes.

    Attributes:
        flops: floating-point operations.
        size_bytes: bytes read and written.
        product: the shape of its matrix product; None without one.
        is_product: whether the flops are those of a matrix product, of any shape.
        itemsize: bytes of an item; None for an activation.
    """

    flops: int
    size_bytes: int
    product: MatrixProduct | None = None
    is_product: bool = True
    itemsize: int | None = None


class Pass(NamedTuple):
    """The work of a stage for one micro-batch.

    Attributes:
        forward, backward, weights: kernels of the forward pass, of the backward pass with recomputation, and of the
            gradients of weights.
        shown: number of all-reduces in the tensor group that nothing hides: of the forward pass and of recomputation.
        hidden: number of all-reduces of the backward pass, which the gradients of weights can hide.
        rounds: number of times that keys and values go round the context group: once in each forward pass, and twice in
            the backward pass, with their gradients.
        exchanges: number of all-to-alls of the experts' devices.
        sums: bytes of further all-reduces in the tensor group: of a row's logits, and of gradients.
    """

    forward: list[Kernel]
    backward: list[Kernel]
    weights: list[Kernel]
    shown: int
    hidden: int
    rounds: int = 0
    exchanges: int = 0
    sums: tuple[int, ...] = ()


def step_time(
    plan: TrainingPlan,
    cluster: ClusterSpec,
    efficiency: Efficiency = Efficiency(),
    states: ModelStates = MIXED_ADAM,
    schedule: str = "1f1b",
) -> StepTime:
    """Predict the time of one training step.

    With a pipeline of p stages, v chunks and m micro-batches, a step lasts m times the slowest stage, plus 1/v of
    the sum of the other stages; where p does not divide m, the interleaved schedule waits (v - 1)(p - m mod p) chunks
    more (Narayanan et al. 2021, section 2.2; Calculon's llm.py). Messages between stages are divided by the tensor
    group (section 4.1). Other schedules than GPipe and 1F1B take the time of their own clock.

    Args:
        plan: the model, and how it is cut.
        cluster: the described hardware, with as many ranks as the plan has devices.
        efficiency: what the hardware achieves of its data sheet.
        states: bytes of each parameter; gradients are exchanged in their own size.
        schedule: a looped schedule of `pipeline_schedule`, such as "1f1b" or "zb_h1".

    Raises:
        ClusterError: the cluster has another number of ranks.
        InputError: no such schedule, or not for these numbers.
    """
    if cluster.world_size != plan.world_size:
        raise ClusterError(
            f"step_time: the plan has {plan.tensor} x {plan.context} x {plan.pipeline} x {plan.data} = "
            f"{plan.world_size} devices, the cluster {cluster.world_size} ranks; describe a cluster of "
            f"{plan.world_size}."
        )
    p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
    achieved_cluster = efficiency.achieved(cluster)
    # A part of the model is priced as a stage of its own.
    flat = replace(plan, pipeline=p * v, chunks=1) if p > 1 else plan
    price = _Prices(flat, achieved_cluster, states)
    is_split = schedule not in FORMULAS and any(
        "W" in cell for cells in looped_schedule(schedule, p, m, v).actions for cell in cells
    )
    priced = {part: price.stage(first, is_split) for first, alike in flat.like_stages.items() for part in alike}
    parts = [priced[part] for part in range(flat.pipeline)]
    stages = {stage: PartTime(*map(sum, zip(*parts[stage::p], strict=True))) for stage in range(p)}
    own = max(stages.values(), key=lambda each: each.sum_ps)
    ideal_ps, bubble, messages_ps = m * (own.sum_ps - own.messages_ps), 0, 0
    if p > 1:
        bubble = clocked(plan, schedule, parts, 0) - ideal_ps
        messages_ps = clocked(plan, schedule, parts, own.messages_ps // v) - ideal_ps - bubble
    price = _Prices(plan, achieved_cluster, states)
    data_ps, optimizer_ps = max((price.update(stage, stages[stage]) for stage in plan.like_stages), key=sum)
    seconds = (ideal_ps + messages_ps + bubble + data_ps + optimizer_ps) / PS_PER_S
    peaks = plan.world_size * cluster.device.peak(plan.item_bytes)
    mfu, hfu = (
        float(plan.shape.flops(plan.global_batch, recompute) / (seconds * Fraction(peaks)))
        # A fused kernel stores no scores, so that there is nothing to repeat selectively.
        for recompute in ("none", "none" if plan.recompute == "selective" and plan.fused_attention else plan.recompute)
    )
    return StepTime(
        m * own.compute_ps,
        m * own.tensor_ps,
        m * own.context_ps,
        m * own.expert_ps,
        messages_ps,
        bubble,
        m * own.data_ps + data_ps,
        optimizer_ps,
        mfu,
        hfu,
    )


class _Prices:
    """The prices of a plan's parts on one cluster."""

    def __init__(self, plan: TrainingPlan, cluster: ClusterSpec, states: ModelStates) -> None:
        self.plan, self.cluster, self.states = plan, cluster, states
        stride = plan.tensor * plan.context * plan.data
        self.tensor_group = tuple(range(plan.tensor))
        # Gradients are summed over the devices of a context, too, as each has other tokens.
        self.data_group = tuple(range(0, stride, plan.tensor))
        self.expert_group = tuple(range(0, plan.tensor * plan.expert, plan.tensor))
        self.expert_data_group = tuple(range(0, stride, plan.tensor * plan.expert))
        self.next_stage, self.last_stage = stride, stride * (plan.pipeline - 1)
        self.micro_batch_bytes = plan.item_bytes * plan.tokens * plan.shape.width

    def kernels(self, kernels: Iterable[Kernel]) -> int:
        time_ps, item = self.cluster.device.time_ps, self.plan.item_bytes
        return sum(
            time_ps(flops, size_bytes, itemsize or item, is_product, products=(product,) if product else ())
            for flops, size_bytes, product, is_product, itemsize in kernels
        )

    def collective(self, op: str, size_bytes: Fraction | int, group: Sequence[int]) -> int:
        return self.cluster.collective(op, round(size_bytes), tuple(group)).time_ps if len(group) > 1 else 0

    def stage(self, stage: int, is_split: bool = False) -> PartTime:
        """Price one micro-batch on a stage; `is_split`: gradients of inputs and of weights are computed apart."""
        plan, device = self.plan, self.cluster.device
        is_joined = _is_by_op(plan, device.software) and not is_split
        # Under sequence parallelism, a reduce-scatter and an all-gather take its place, with the same volume.
        reduce_ps = self.collective("all_reduce", self.micro_batch_bytes, self.tensor_group)
        forward_ps = backward_ps = weights_ps = sums_ps = first_ps = shown = hidden = rounds = exchanges = 0
        for count, work in _stage_work(plan, stage, self.states.gradient, device.software):
            forward_ps += count * self.kernels(work.forward)
            backward_ps += count * self.kernels(work.backward)
            weights_ps += count * self.kernels(work.weights)
            if is_joined:
                # All gradients of a product, or of a norm, are one operation, which starts once.
                weights_ps -= count * len(work.weights) * picoseconds(device.launch_s)
            shown += count * work.shown
            hidden += count * work.hidden
            rounds += count * work.rounds
            exchanges += count * work.exchanges
            work_ps = sum(self.collective("all_reduce", size, self.tensor_group) for size in work.sums)
            sums_ps += work_ps
            first_ps += work_ps * bool(work.forward)
        hidden_ps = hidden * reduce_ps
        if plan.overlap_tensor:
            hidden_ps = max(0, hidden_ps - weights_ps)
        tensor_ps = shown * reduce_ps + hidden_ps + sums_ps
        messages_ps = 0
        if plan.pipeline > 1:
            # Each device sends its part to the next stage, whose tensor group puts it together; or all, if faster.
            message_ps = self.cluster.message(self.micro_batch_bytes // plan.tensor, 0, self.next_stage).time_ps
            if not plan.sequence_parallel:
                whole_ps = self.cluster.message(self.micro_batch_bytes, 0, self.next_stage).time_ps
                gather_ps = self.collective("all_gather", self.micro_batch_bytes, self.tensor_group)
                message_ps = min(message_ps + gather_ps, whole_ps)
            messages_ps = 2 * plan.chunks * message_ps
        gradients_ps = backward_ps + weights_ps
        data_ps = self.zero3(stage, forward_ps, gradients_ps) if plan.zero_stage == 3 else 0
        expert_ps = exchanges and exchanges * self.exchange_ps()
        context_ps = rounds and rounds * self.round_ps()
        compute_ps = forward_ps + gradients_ps
        # What is recomputed is a part of the backward pass; exchanges of other groups are spread over both.
        again = 2 * sum(plan.count_layers(stage)) * (plan.recompute == "full")
        first_ps += (shown - again) * reduce_ps + forward_ps
        first_ps += (context_ps + expert_ps + data_ps) * forward_ps // compute_ps
        return PartTime(
            compute_ps, tensor_ps, context_ps, expert_ps, messages_ps, data_ps, gradients_ps, weights_ps, first_ps
        )

    def exchange_ps(self) -> int:
        """Price one exchange of the tokens that visit experts of other devices, or return; experts are equally busy."""
        plan = self.plan
        tokens = plan.tokens // plan.tensor if plan.sequence_parallel else plan.tokens
        size_bytes = plan.item_bytes * tokens * plan.shape.active_experts * plan.shape.width
        return self.collective("all_to_all", size_bytes, self.expert_group)

    def round_ps(self) -> int:
        """Price one round of keys and values, less the attention that runs beside it.

        A device attends to one part of the keys while it passes it on to the next one (Liu et al. 2023, "Ring
        attention", arXiv 2310.01889); the parts are equally long with masks, too, if each device has an early and a
        late part of the sequence.
        """
        plan, full = self.plan, self.plan.shape.full
        if plan.context == 1:
            return 0
        features = plan.shape.kv_heads(plan.tensor) * (full.head_size + full.value_size)
        message_ps = self.cluster.message(plan.item_bytes * plan.tokens * features, 0, plan.tensor).time_ps
        beside_ps = self.kernels(_attention(plan)[0]) // plan.context
        return (plan.context - 1) * max(0, message_ps - beside_ps)

    def zero3(self, stage: int, forward_ps: int, backward_ps: int) -> int:
        """Price what ZeRO-3 exchanges for one micro-batch: parameters in both passes, and gradients."""
        plan, states = self.plan, self.states
        dense, sparse = plan.count_layers(stage)
        parts = (
            (dense, plan.layer_parameters, self.data_group),
            (sparse, plan.sparse_parameters, self.data_group),
            (sparse, plan.layer_experts, self.expert_data_group),
            (1, plan.table_parameters(stage), self.data_group),
        )
        there = [part for part in parts if part[0] and part[1]]
        gather_ps, reduce_ps = (
            sum(count * self.collective(op, size * each, group) for count, size, group in there)
            for op, each in (("all_gather", states.parameter), ("reduce_scatter", states.gradient))
        )
        exchanges = ((gather_ps, forward_ps), (gather_ps + reduce_ps, backward_ps))
        return sum(max(0, ps - compute_ps) if plan.overlap_data else ps for ps, compute_ps in exchanges)

    def update(self, stage: int, times: PartTime) -> tuple[int, int]:
        """Price the end of a step: the exchange of gradients and parameters between replicas, and the optimizer."""
        plan, states = self.plan, self.states
        parts = ((plan.stage_parameters(stage), self.data_group), (plan.stage_experts(stage), self.expert_data_group))
        exchange_ps, owned = 0, Fraction(0)
        for parameters, group in parts:
            owned += parameters / (len(group) if plan.zero_stage else 1)
            if plan.zero_stage == 0 and parameters:
                exchange_ps += self.collective("all_reduce", parameters * states.gradient, group)
            elif plan.zero_stage < 3 and parameters:
                exchange_ps += self.collective("reduce_scatter", parameters * states.gradient, group)
                exchange_ps += self.collective("all_gather", parameters * states.parameter, group)
        if plan.overlap_data:
            exchange_ps = max(0, exchange_ps - times.backward_ps)
        if plan.pipeline > 1 and stage in (0, plan.pipeline - 1) and plan.shape.is_tied:
            # The first and the last stage add their gradients of the token table.
            table = Fraction(plan.shape.vocabulary * plan.shape.width, plan.tensor)
            exchange_ps += self.collective("all_reduce", table * states.gradient, (0, self.last_stage))
        # A step ends with the mean of the losses.
        exchange_ps += self.collective("all_reduce", 8, range(plan.world_size))
        # The update reads and writes the optimizer's states, reads gradients twice, once for their norm, and writes
        # parameters.
        moved = 2 * states.optimizer + 2 * states.gradient + states.parameter
        return exchange_ps, self.kernels([Kernel(0, round(owned * moved))])


def _stage_work(plan: TrainingPlan, stage: int, gradient_bytes: int, software: str) -> list[tuple[int, Pass]]:
    """Return the kernels of a stage for one micro-batch: how many equal parts it has, and the work of one."""
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    tokens, h = plan.tokens, shape.width
    # Tokens of norms and dropouts, which the tensor group shares only under sequence parallelism.
    own = tokens // t if plan.sequence_parallel else tokens
    blocks = zip(plan.count_layers(stage), (False, True), strict=True)
    work = [(count, _block_work(plan, gradient_bytes, is_sparse, software)) for count, is_sparse in blocks if count]
    vocabulary = -(-shape.vocabulary // t)
    is_last, is_by_op = stage == plan.pipeline - 1, _is_by_op(plan, software)
    if stage == 0 and is_by_op:
        calls: list[Call] = [(instance(Embedding), (tokens,), (vocabulary, h))]
        if rows := shape.full.num_positions:
            length = shape.length // plan.context
            calls += [
                (instance(Embedding), (length,), (rows, h)),
                (instance(Add), (own // length, length, h), (length, h)),
            ]
        work.append((1, Pass(*_by_op(plan, software, calls), 1, 0)))
    elif stage == 0:
        # The table is divided by tokens: each device looks up its own, and the parts are added.
        lookup, scatter = Kernel(0, 2 * item * tokens * h), Kernel(0, (item + 2 * gradient_bytes) * tokens * h)
        dropout = [Kernel(0, (2 * item + 1) * own * h)] * shape.has_dropout
        work.append((1, Pass([lookup, *dropout], [*dropout, scatter], [], 1, 0)))
    if is_by_op and (shape.has_bias or shape.has_query_norm):
        # One device adds the biases of the products that end a branch, and each has its own heads of a norm. Their
        # gradients travel together, those of a chunk, or of a block that is recomputed.
        each = item * 2 * (h * shape.has_bias + shape.full.head_size * shape.has_query_norm)
        layers = sum(plan.count_layers(stage))
        calls_count = layers if plan.recompute == "full" else plan.chunks
        work.append((1, Pass([], [], [], 0, 0, sums=(each * layers // calls_count,) * calls_count)))
    if is_last and is_by_op:
        # The loss is computed in float32.
        cast = [(instance(Cast, "f4"), (tokens, vocabulary))] * (item < 4)
        loss = (instance(CrossEntropy), (tokens, vocabulary), (tokens,))
        head = [_norm(plan, own, h), (instance(Linear), (tokens, h), (vocabulary, h)), *cast, loss]
        # The largest logit of each row; the sum of the exponentials, and the label's logit.
        work.append((1, Pass(*_by_op(plan, software, head), 0, 1, sums=(4 * tokens, 8 * tokens))))
    elif is_last:
        # Logits are converted to float32 (6 bytes) and become probabilities (8), of which the gradient is made (6).
        logits = tokens * vocabulary
        convert = Kernel(0, (item + 4) * logits)
        norm, norm_backward = Kernel(0, 2 * item * own * h), Kernel(0, 3 * item * own * h)
        forward = [norm, _product(tokens, h, vocabulary, item), convert, Kernel(0, 8 * logits)]
        back = [convert, _product(tokens, vocabulary, h, item), norm_backward]
        weights = [_weight_gradient(tokens, h, vocabulary, item, gradient_bytes)]
        work.append((1, Pass(forward, back, weights, 0, 1)))
    return work


def _block_work(plan: TrainingPlan, gradient_bytes: int, is_sparse: bool, software: str) -> Pass:
    """Return the kernels of a block for one micro-batch."""
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    full, tokens, h = shape.full, plan.tokens, shape.width
    is_by_op = _is_by_op(plan, software)
    # Ops have those of dense parts.
    parts = [] if is_by_op else [(tokens, 1, weight) for weight in shape.attention_weights(t)]
    # The features of activation functions.
    inner = full.mlp_width * tokens // t
    moved = 0
    if is_sparse:
        # Each device has as many tokens for its experts as it sends away.
        copies = tokens * shape.active_experts
        experts = shape.num_experts // plan.expert
        parts += [(tokens, 1, shape.router())]
        parts += [(copies, experts, weight) for weight in shape.mlp_weights(shape.expert_width, t)]
        if shape.shared_width:
            parts += [(tokens, 1, weight) for weight in shape.mlp_weights(shape.shared_width, t)]
        inner = (copies * shape.expert_width + tokens * shape.shared_width) // t
        # Copies are put in the order of the experts, and back.
        moved = 2 * item * copies * h
    elif not is_by_op:
        parts += [(tokens, 1, weight) for weight in shape.mlp_weights(full.mlp_width, t)]
    products = [_product(rows, weight.inner, weight.columns, item, count) for rows, count, weight in parts]
    # The input gradient of a product costs as much as the product.
    of_inputs = [_product(rows, weight.columns, weight.inner, item, count) for rows, count, weight in parts]
    weights = [
        _weight_gradient(rows, weight.inner, weight.columns, item, gradient_bytes, count)
        for rows, count, weight in parts
    ]
    again, exchanged = plan.recompute == "full", [Kernel(0, moved)] * 2 * is_sparse
    if is_by_op:
        between, between_backward, of_weights = _by_op(plan, software, _block_calls(plan, inner, is_sparse))
        forward = [*products, *exchanged, *between]
        backward = [*forward * again, *of_inputs, *exchanged, *between_backward]
        weights += of_weights
        return Pass(forward, backward, weights, 2 + 2 * again, 2, 3 + again, (4 + 2 * again) * is_sparse)
    turned = 2 * item * tokens * (shape.num_heads // t + shape.kv_heads(t)) * full.head_size
    moves = [Kernel(0, turned)] * (not full.num_positions) + exchanged
    core, core_backward = _attention(plan)
    between, between_backward = _between(plan, inner)
    forward = [*products, *moves, *between]
    recomputed = {"none": [], "selective": [] if plan.fused_attention else core, "full": forward + core}[plan.recompute]
    backward = [*recomputed, *of_inputs, *core_backward, *moves, *between_backward]
    return Pass(forward + core, backward, weights, 2 + 2 * again, 2, 3 + again, (4 + 2 * again) * is_sparse)


def _between(plan: TrainingPlan, inner: int) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of a block that are no products and no attention: forward and backward.

    Args:
        plan: the model, and how it is cut.
        inner: elements of an activation function on a device.
    """
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    tokens, h = plan.tokens, shape.width
    own = tokens // t if plan.sequence_parallel else tokens
    mask, gated = shape.has_dropout, shape.is_gated
    forward = [Kernel(0, 2 * item * own * h)] * 2
    forward += [Kernel(0, (3 * item + mask) * own * h)] * 2 + [Kernel(0, (2 + gated) * item * inner)]
    # Norms read the input and the gradient and write a gradient, which is then added to that of the residual; a dropout
    # reads the gradient and the mask.
    backward = [Kernel(0, 3 * item * own * h)] * 4 + [Kernel(0, (2 * item + mask) * own * h)] * 2 * mask
    return forward, backward + [Kernel(0, (3 + 2 * gated) * item * inner)]


# An op, and the shapes of its inputs.
Call = tuple[Any, ...]


def _is_by_op(plan: TrainingPlan, software: str) -> bool:
    """Return whether the kernels are those that ops have on this software, one after the other."""
    return software == "eager" or (software == "plain" and not plan.fused_attention)


def _norm(plan: TrainingPlan, rows: int, size: int) -> Call:
    if plan.shape.has_layer_norm:
        return instance(LayerNorm), (rows, size), (size,), (size,)
    return instance(RMSNorm), (rows, size), (size,)


def _block_calls(plan: TrainingPlan, inner: int, is_sparse: bool) -> list[Call]:
    """Return the ops of a block, as `models.Decoder` calls them; without the products of a sparse feed-forward part.

    Args:
        plan: the model, and how it is cut.
        inner: elements of an activation function on a device.
        is_sparse: whether the block has experts.
    """
    shape, t = plan.shape, plan.tensor
    full, tokens, h = shape.full, plan.tokens, shape.width
    own = tokens // t if plan.sequence_parallel else tokens
    heads, kv_heads, keys, values = shape.num_heads // t, shape.kv_heads(t), full.head_size, full.value_size
    batch, rows = plan.micro_batch, shape.length // plan.context

    def linears(weights: list[Weight]) -> list[Call]:
        return [
            (instance(Linear), (tokens, each.inner), (each.columns, each.inner), *[(each.columns,)] * (each.biases > 0))
            for each in weights
        ]

    *qkv, out = linears(shape.attention_weights(t))
    up, down = ([each] for each in linears(shape.mlp_weights(full.mlp_width, t)))
    if is_sparse:
        up = down = []
    norm, add = _norm(plan, own, h), (instance(Add), (own, h), (own, h))
    calls = [norm, *qkv]
    if not shape.kv_rank:
        sizes = heads * keys, kv_heads * keys, kv_heads * values
        calls += [(instance(Permute, (1, 0)), (tokens, sum(sizes)))]
        calls += [(instance(Slice, ((0, tokens, 1), (0, size, 1))), (tokens, sum(sizes))) for size in sizes]
    if shape.has_query_norm:
        calls += [_norm(plan, tokens * count, keys) for count in (heads, kv_heads)]
    if not full.num_positions:
        calls += [(instance(RotaryEmbedding), (tokens * count, keys)) for count in (heads, kv_heads)]
    calls += [
        (
            instance(ScaledDotProductAttention, True),
            (batch, kv_heads, heads // kv_heads, rows, keys),
            (batch, kv_heads, 1, shape.length, keys),
            (batch, kv_heads, 1, shape.length, values),
        ),
        (instance(Permute, (1, 0)), (tokens, heads * values)),
    ]
    calls += [out, add, norm, *up]
    if shape.is_gated:
        calls += [(instance(Slice, ((0, inner, 1), (0, 1, 1))), (inner, 2))] * 2
        calls += [(instance(SiLU), (inner,)), (instance(Mul), (inner,), (inner,))]
    else:
        calls += [(instance(GELU, "tanh"), (inner,))]
    return [*calls, *down, add]


def _by_op(plan: TrainingPlan, software: str, calls: list[Call]) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
    """Return the kernels of ops: forward, backward, and the gradients of weights."""
    each = [_kernels(plan.item_bytes, software, *call) for call in calls]
    return tuple([kernel for kernels in each for kernel in kernels[part]] for part in range(3))  # type: ignore[return-value]


@lru_cache(maxsize=1 << 14)
def _kernels(itemsize: int, software: str, op: Op, *shapes: tuple[int, ...]) -> tuple[tuple[Kernel, ...], ...]:
    """Return the kernels of an op: forward, backward, and the gradients of weights where these can come later."""
    value = f"f{itemsize}"
    dtypes = {CrossEntropy: ("f4", "i8"), Embedding: ("i8", value)}.get(type(op), (value,) * len(shapes))
    plan = op._make_plan(tuple((shape, np.dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)))

    def kernels(*needs: bool) -> tuple[Kernel, ...]:
        work, products = op.cost(plan, software, needs or None)
        product = products[0] if products else None
        kernel = Kernel(*work, product, op.is_matrix_product, plan.output.dtype.itemsize)
        # A view has no kernel.
        return (kernel,) * any(work)

    floats = tuple(spec.dtype.kind == "f" for spec in plan.inputs)
    if not isinstance(op, (Linear, LayerNorm, RMSNorm)):
        return kernels(), kernels(*floats), ()
    # A kernel of its own sums the gradient of a bias.
    bias = (Kernel(0, plan.output.size_bytes),) * (isinstance(op, Linear) and len(shapes) > 2)
    return kernels(), kernels(True, *[False] * (len(shapes) - 1)), (*kernels(False, True), *bias)


def _attention(plan: TrainingPlan) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels between the query-key-value product and the output product: forward and backward.

    Separate kernels compute all scores: two batched products, softmax with mask, dropout. A fused kernel
    (FlashAttention) leaves out masked blocks, half of all, and computes five products instead of two in the backward
    pass (Dao 2023).
    """
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    full, s, tokens, heads = shape.full, shape.length, plan.tokens, shape.num_heads // t
    # Features of the queries and keys, and of the values and outputs.
    keys, values = full.head_size, full.value_size
    kv_heads = shape.kv_heads(t)
    flops = 2 * tokens * s * heads  # of one product, all scores, and one feature of a head
    batch, rows = plan.micro_batch * heads, s // plan.context
    if plan.fused_attention:
        features = item * tokens * (heads * (keys + values) + kv_heads * (keys + values))
        fused = MatrixProduct(batch, rows, values, s, "attention")
        # Half of all scores are masked.
        forward = Kernel(flops * (keys + values) // 2, features, fused)
        return [forward], [Kernel(flops * (3 * keys + 2 * values) // 2, 2 * features, fused)]
    scores = heads * tokens * s

    def product(size: int, is_out: bool) -> Kernel:
        """Return a product that gives scores, or one that scores go into, of heads with these features."""
        made = MatrixProduct(batch, rows, s, size) if is_out else MatrixProduct(batch, rows, size, s)
        return Kernel(flops * size, item * (tokens * size * (heads + kv_heads) + scores), made)

    softmax, softmax_backward = Kernel(0, 2 * item * scores), Kernel(0, 3 * item * scores)
    dropout = [Kernel(0, (2 * item + 1) * scores)] * shape.has_dropout
    of_values = [product(values, is_out=True), product(values, is_out=False)]
    of_keys = [product(keys, is_out=False)] * 2
    forward_core = [product(keys, is_out=True), softmax, *dropout, product(values, is_out=False)]
    return forward_core, [*of_values, *dropout, softmax_backward, *of_keys]


def _product(rows: int, inner: int, columns: int, item: int, count: int = 1) -> Kernel:
    """Return the kernel of the product of (rows, inner) and (inner, columns); `count` weights share the rows."""
    size_bytes = item * (rows * inner + count * inner * columns + rows * columns)
    return Kernel(2 * rows * inner * columns, size_bytes, MatrixProduct(count, -(-rows // count), columns, inner))


def _weight_gradient(rows: int, inner: int, columns: int, item: int, gradient_bytes: int, count: int = 1) -> Kernel:
    """Return the kernel of the gradient of (inner, columns) weights, which adds to the gradient so far."""
    size_bytes = item * rows * (inner + columns) + 2 * gradient_bytes * count * inner * columns
    return Kernel(2 * rows * inner * columns, size_bytes, MatrixProduct(count, inner, columns, -(-rows // count)))
