"""The time of one training step of a GPT, by algebra: rooflines of kernels, prices of collectives, pipeline formulas.

Nothing is measured here, and nothing is fitted to the time of a step. A device whose software is "eager" runs a kernel
for each op, without dropouts (`Op.eager_work`). Any other one runs the kernels of Narayanan et al. 2021, section 4.2:
bias and GeLU are one kernel, as are bias, dropout and sum, and scale, mask and softmax; each reads its inputs and
writes its outputs once. Flops and bytes are divided by what devices and links achieve (`Efficiency`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache, partial
from operator import add
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd.ops.activation import GELU
from simparallel.autograd.ops.cast import Cast
from simparallel.autograd.ops.elementwise import Add
from simparallel.autograd.ops.indexing import Slice
from simparallel.autograd.ops.loss import CrossEntropy
from simparallel.autograd.ops.norm import LayerNorm
from simparallel.errors import ClusterError, InputError
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, LinkSpec
from simparallel.machine.products import MatrixProduct, MatrixUnits
from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import MIXED_ADAM, ModelStates

ITEM_BYTES = 2  # activations and products are float16 or bfloat16
# A device of which nothing but its peak is known: products of every shape reach the same share.
ANY_SHAPE = MatrixUnits(0, 0.642, 0.642, 0.325, 0.642)


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
    memory: float = 2903 / 3350
    link: float = 20 / 25
    node_link: float = 23.5 / 25

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
        between = cluster.node_link and _scaled(cluster.node_link, self.node_link)
        return replace(cluster, device=device, link=_scaled(cluster.link, self.link), node_link=between)


def _scaled(link: LinkSpec, fraction: float) -> LinkSpec:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * fraction)


@dataclass(frozen=True)
class StepTime:
    """The time of a step on the slowest device [ps], by what the device does; the parts add up to `step_ps`.

    Attributes:
        compute_ps: kernels of forward and backward passes, recomputation included.
        tensor_ps: collectives of the tensor group that nothing hides.
        messages_ps: messages between stages.
        bubble_ps: waiting for other stages.
        data_ps: exchange of gradients and parameters between replicas that nothing hides.
        optimizer_ps: the update.
        mfu, hfu: flops of the model, and with recomputation (`GPTShape.flops`), over the peaks of all devices.
    """

    compute_ps: int
    tensor_ps: int
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
    """

    flops: int
    size_bytes: int
    product: MatrixProduct | None = None


class Pass(NamedTuple):
    """The work of a stage for one micro-batch.

    Attributes:
        forward, backward, weights: kernels of the forward pass, of the backward pass with recomputation, and of the
            gradients of weights.
        shown: number of all-reduces in the tensor group that nothing hides: of the forward pass and of recomputation.
        hidden: number of all-reduces of the backward pass, which the gradients of weights can hide.
    """

    forward: list[Kernel]
    backward: list[Kernel]
    weights: list[Kernel]
    shown: int
    hidden: int


def step_time(
    plan: TrainingPlan, cluster: ClusterSpec, efficiency: Efficiency = Efficiency(), states: ModelStates = MIXED_ADAM
) -> StepTime:
    """Predict the time of one training step.

    With a pipeline of p stages, v chunks and m micro-batches, a step lasts m times the slowest stage, plus 1/v of
    the sum of the other stages; where p does not divide m, the interleaved schedule waits (v - 1)(p - m mod p) chunks
    more (Narayanan et al. 2021, section 2.2; Calculon's llm.py). Messages between stages are divided by the tensor
    group (section 4.1).

    Args:
        plan: the model, and how it is cut.
        cluster: the described hardware, with as many ranks as the plan has devices.
        efficiency: what the hardware achieves of its data sheet.
        states: bytes of each parameter; gradients are exchanged in their own size.

    Raises:
        ClusterError: the cluster has another number of ranks.
    """
    if cluster.world_size != plan.world_size:
        raise ClusterError(
            f"step_time: the plan has {plan.tensor} x {plan.pipeline} x {plan.data} = {plan.world_size} devices, the "
            f"cluster {cluster.world_size} ranks; describe a cluster of {plan.world_size}."
        )
    price = _Prices(plan, efficiency.achieved(cluster), states)
    # A formula, which no clock runs: tests compare it with the clock of the schedule, and with published steps.
    p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
    # Stages between the first and the last are alike.
    stages = {stage: price.stage(stage) for stage in {0, min(1, p - 1), p - 1}}
    slowest = max(stages, key=lambda stage: stages[stage].sum_ps)
    own = stages[slowest]
    all_ps = sum(stages[min(stage, 1) if stage < p - 1 else stage].sum_ps for stage in range(p))
    bubble = Fraction(all_ps - own.sum_ps, v) + Fraction((v - 1) * (-m % p) * own.sum_ps, v)
    data_ps, optimizer_ps = max((price.update(stage, stages[stage]) for stage in stages), key=sum)
    seconds = (m * own.sum_ps + bubble + data_ps + optimizer_ps) / PS_PER_S
    peaks = plan.world_size * cluster.device.peak(ITEM_BYTES)
    mfu, hfu = (
        float(plan.shape.flops(plan.global_batch, recompute) / (seconds * Fraction(peaks)))
        for recompute in ("none", plan.recompute)
    )
    return StepTime(
        m * own.compute_ps,
        m * own.tensor_ps,
        m * own.messages_ps,
        round(bubble),
        m * own.data_ps + data_ps,
        optimizer_ps,
        mfu,
        hfu,
    )


class _Stage(NamedTuple):
    """The time of a stage for one micro-batch [ps]; `backward_ps` is a part of it that can hide an exchange."""

    compute_ps: int
    tensor_ps: int
    messages_ps: int
    data_ps: int
    backward_ps: int

    @property
    def sum_ps(self) -> int:
        return self.compute_ps + self.tensor_ps + self.messages_ps + self.data_ps


class _Prices:
    """The prices of a plan's parts on one cluster."""

    def __init__(self, plan: TrainingPlan, cluster: ClusterSpec, states: ModelStates) -> None:
        self.plan, self.cluster, self.states = plan, cluster, states
        stride = plan.tensor * plan.data
        self.tensor_group = tuple(range(plan.tensor))
        self.data_group = tuple(range(0, stride, plan.tensor))
        self.next_stage, self.last_stage = stride, stride * (plan.pipeline - 1)
        self.micro_batch_bytes = ITEM_BYTES * plan.shape.length * plan.micro_batch * plan.shape.width

    def kernels(self, kernels: Iterable[Kernel]) -> int:
        # Only products and attention have flops; all other kernels take as long as their bytes.
        time_ps = cache(partial(self.cluster.device.time_ps, itemsize=ITEM_BYTES, is_product=True))
        return sum(
            time_ps(flops, size_bytes, products=(product,) if product else ()) for flops, size_bytes, product in kernels
        )

    def collective(self, op: str, size_bytes: Fraction | int, group: Sequence[int]) -> int:
        return self.cluster.collective(op, round(size_bytes), tuple(group)).time_ps if len(group) > 1 else 0

    def stage(self, stage: int) -> _Stage:
        """Price one micro-batch on a stage."""
        plan = self.plan
        work = _stage_work(plan, stage, self.states.gradient, self.cluster.device.software)
        forward_ps, backward_ps, weights_ps = map(self.kernels, (work.forward, work.backward, work.weights))
        # Under sequence parallelism, a reduce-scatter and an all-gather take its place, with the same volume.
        reduce_ps = self.collective("all_reduce", self.micro_batch_bytes, self.tensor_group)
        hidden_ps = work.hidden * reduce_ps
        if plan.overlap_tensor:
            hidden_ps = max(0, hidden_ps - weights_ps)
        tensor_ps = work.shown * reduce_ps + hidden_ps
        messages_ps = 0
        if plan.pipeline > 1:
            # Each device sends its part to the next stage, whose tensor group puts it together.
            message_ps = self.cluster.message(self.micro_batch_bytes // plan.tensor, 0, self.next_stage).time_ps
            if not plan.sequence_parallel:
                message_ps += self.collective("all_gather", self.micro_batch_bytes, self.tensor_group)
            messages_ps = 2 * plan.chunks * message_ps
        gradients_ps = backward_ps + weights_ps
        data_ps = self.zero3(stage, forward_ps, gradients_ps) if plan.zero_stage == 3 else 0
        return _Stage(forward_ps + gradients_ps, tensor_ps, messages_ps, data_ps, gradients_ps)

    def zero3(self, stage: int, forward_ps: int, backward_ps: int) -> int:
        """Price what ZeRO-3 exchanges for one micro-batch: parameters in both passes, and gradients."""
        plan, group = self.plan, self.data_group
        parts = [plan.layer_parameters] * plan.layers_per_stage
        if tables := plan.table_parameters(stage):
            parts.append(tables)
        gather = {size: self.collective("all_gather", size * self.states.parameter, group) for size in set(parts)}
        reduce = {size: self.collective("reduce_scatter", size * self.states.gradient, group) for size in set(parts)}
        gather_ps, reduce_ps = (sum(prices[size] for size in parts) for prices in (gather, reduce))
        exchanges = ((gather_ps, forward_ps), (gather_ps + reduce_ps, backward_ps))
        return sum(max(0, ps - compute_ps) if plan.overlap_data else ps for ps, compute_ps in exchanges)

    def update(self, stage: int, times: _Stage) -> tuple[int, int]:
        """Price the end of a step: the exchange of gradients and parameters between replicas, and the optimizer."""
        plan, states, group = self.plan, self.states, self.data_group
        parameters = plan.stage_parameters(stage)
        exchange_ps = 0
        if plan.zero_stage == 0:
            exchange_ps = self.collective("all_reduce", parameters * states.gradient, group)
        elif plan.zero_stage < 3:
            exchange_ps = self.collective("reduce_scatter", parameters * states.gradient, group)
            exchange_ps += self.collective("all_gather", parameters * states.parameter, group)
        if plan.overlap_data:
            exchange_ps = max(0, exchange_ps - times.backward_ps)
        if plan.pipeline > 1 and stage in (0, plan.pipeline - 1):
            # The first and the last stage add their gradients of the token table.
            table = Fraction(plan.shape.vocabulary * plan.shape.width, plan.tensor)
            exchange_ps += self.collective("all_reduce", table * states.gradient, (0, self.last_stage))
        # The update reads and writes the optimizer's states, reads gradients twice, once for their norm, and writes
        # parameters.
        owned = parameters / (plan.data if plan.zero_stage else 1)
        moved = 2 * states.optimizer + 2 * states.gradient + states.parameter
        return exchange_ps, self.kernels([Kernel(0, round(owned * moved))])


def _stage_work(plan: TrainingPlan, stage: int, gradient_bytes: int, software: str) -> Pass:
    """Return the kernels of a stage for one micro-batch."""
    shape, t = plan.shape, plan.tensor
    tokens, h = shape.length * plan.micro_batch, shape.width
    # Tokens of norms and dropouts, which the tensor group shares only under sequence parallelism.
    own = tokens // t if plan.sequence_parallel else tokens
    matrices = [(h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)]
    vocabulary = -(-shape.vocabulary // t)
    logits = tokens * vocabulary
    if software == "eager":
        part = Slice(((0, tokens, 1), (0, h // t, 1)))
        between, between_backward = _kernels(
            *[(LayerNorm(), (own, h), (h,), (h,)), (Add(), (own, h), (own, h))] * 2,
            (GELU(), (tokens, 4 * h // t)),
            *[(part, (tokens, 3 * h // t))] * 3,
        )
        # Gradients of biases are sums by kernels of their own.
        between_backward += [Kernel(0, ITEM_BYTES * tokens * columns) for _, columns in matrices]
        dropout: list[Kernel] = []
        # The loss is computed in float32.
        loss, loss_backward = _kernels(
            (Cast("f4"), (tokens, vocabulary)), (CrossEntropy(), (tokens, vocabulary), (tokens,))
        )
    else:
        between = [Kernel(0, 4 * own * h)] * 2 + [Kernel(0, 7 * own * h)] * 2 + [Kernel(0, 16 * tokens * h // t)]
        # Norms read the input and the gradient and write a gradient, which is then added to that of the residual; a
        # dropout reads the gradient and the mask.
        between_backward = [Kernel(0, 6 * own * h)] * 4 + [Kernel(0, 5 * own * h)] * 2
        between_backward += [Kernel(0, 24 * tokens * h // t)]
        dropout = [Kernel(0, 5 * own * h)]
        # Logits are converted to float32 (6 bytes) and become probabilities (8), of which the gradient is made (6).
        loss, loss_backward = [Kernel(0, 6 * logits), Kernel(0, 8 * logits)], [Kernel(0, 6 * logits)]
    core, core_backward = _attention(plan)
    forward = [*(_product(tokens, *matrix) for matrix in matrices), *between]
    recomputed = {"none": [], "selective": [] if plan.fused_attention else core, "full": forward + core}[plan.recompute]
    # The input gradient of a product costs as much as the product.
    backward = [*recomputed, *(_product(tokens, *reversed(matrix)) for matrix in matrices), *core_backward]
    backward += between_backward
    weights = [_weight_gradient(tokens, *matrix, gradient_bytes) for matrix in matrices]
    layers = plan.layers_per_stage
    work = Pass(
        (forward + core) * layers,
        backward * layers,
        weights * layers,
        (2 + 2 * (plan.recompute == "full")) * layers,
        2 * layers,
    )
    if stage == 0:
        # The table is divided by tokens: each device looks up its own, and the parts are added.
        lookup, scatter = Kernel(0, 4 * tokens * h), Kernel(0, (2 + 2 * gradient_bytes) * tokens * h)
        ends = Pass([lookup, *dropout], [*dropout, scatter], [], 1, 0)
        work = Pass(*map(add, work, ends))
    if stage == plan.pipeline - 1:
        head = [Kernel(0, 4 * own * h), _product(tokens, h, vocabulary), *loss]
        back = [*loss_backward, _product(tokens, vocabulary, h), Kernel(0, 6 * own * h)]
        ends = Pass(head, back, [_weight_gradient(tokens, h, vocabulary, gradient_bytes)], 0, 1)
        work = Pass(*map(add, work, ends))
    return work


def _kernels(*calls: tuple[Any, ...]) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of ops without products, forward and backward, as today's frameworks run them.

    Args:
        calls: an op, and the shapes of its inputs; those of one dim are indices in a loss, and weights elsewhere.
    """
    forward, backward = [], []
    for op, *shapes in calls:
        is_loss = isinstance(op, CrossEntropy)
        dtypes = ("f4", "i8") if is_loss else ("f2",) * len(shapes)
        plan = op._make_plan(tuple((shape, np.dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)))
        needs = (True, *[not is_loss] * (len(shapes) - 1))
        forward.append(Kernel(0, op.cost(plan, "eager")[0].size_bytes))
        backward.append(Kernel(0, op.cost(plan, "eager", needs)[0].size_bytes))
    return forward, backward


def _attention(plan: TrainingPlan) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels between the query-key-value product and the output product: forward and backward.

    Separate kernels compute all scores: two batched products, softmax with mask, dropout. A fused kernel
    (FlashAttention) leaves out masked blocks, half of all, and computes five products instead of two in the backward
    pass (Dao 2023).
    """
    shape, t = plan.shape, plan.tensor
    s, h = shape.length, shape.width
    heads, d = plan.micro_batch * (shape.num_heads // t), h // shape.num_heads
    features = ITEM_BYTES * s * plan.micro_batch * h // t  # bytes of the queries, keys, values or outputs
    flops = 2 * plan.micro_batch * s * s * h // t  # of one product, all scores
    if plan.fused_attention:
        fused = MatrixProduct(heads, s, d, s, "attention")
        return [Kernel(flops, 4 * features, fused)], [Kernel(5 * flops // 2, 8 * features, fused)]
    scores, size_bytes = heads * s * s, 2 * features + ITEM_BYTES * heads * s * s
    # Products that give scores, and products that scores go into.
    out = Kernel(flops, size_bytes, MatrixProduct(heads, s, s, d))
    into = Kernel(flops, size_bytes, MatrixProduct(heads, s, d, s))
    return [out, Kernel(0, 4 * scores), Kernel(0, 5 * scores), into], [
        out, into, Kernel(0, 5 * scores), Kernel(0, 6 * scores), into, into,
    ]  # fmt: skip


def _product(rows: int, inner: int, columns: int) -> Kernel:
    """Return the kernel of the product of (rows, inner) and (inner, columns)."""
    size_bytes = ITEM_BYTES * (rows * inner + inner * columns + rows * columns)
    return Kernel(2 * rows * inner * columns, size_bytes, MatrixProduct(1, rows, columns, inner))


def _weight_gradient(rows: int, inner: int, columns: int, gradient_bytes: int) -> Kernel:
    """Return the kernel of the gradient of (inner, columns) weights, which adds to the gradient so far."""
    size_bytes = ITEM_BYTES * rows * (inner + columns) + 2 * gradient_bytes * inner * columns
    return Kernel(2 * rows * inner * columns, size_bytes, MatrixProduct(1, inner, columns, rows))
