"""The time of a training step of a transformer, by algebra: rooflines of kernels, prices of collectives, formulas.

Nothing is measured here, and nothing is fitted to the time of a step. Flops and bytes of the kernels are divided by
what devices and links achieve (`Efficiency`). An interpreter starts kernels and collectives one by one, and the device
runs behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from simparallel.errors import ClusterError, InputError
from simparallel.machine import achieved
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, picoseconds
from simparallel.machine.device import ISSUE, DeviceWork
from simparallel.machine.products import MatrixUnits
from simparallel.parallel.pipeline.action import Action
from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import FORMULAS, MIXED_ADAM, ModelStates, looped_schedule
from simparallel.simulate.transformer_work import attention, of_bytes, runs_by_op, stage_work

# A pipeline has a steady state after so many times as many micro-batches as stages.
_ROUNDS = 2
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
        host_ps: waiting for the interpreter, which starts kernels and collectives one by one.
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
    host_ps: int
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
    price = _Prices(plan, efficiency.achieved(cluster), states)
    # A formula, which no clock runs: tests compare it with the clock of the schedule, and with published steps.
    p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
    alike = plan.like_stages
    is_split = schedule not in FORMULAS and any(
        "W" in cell for cells in looped_schedule(schedule, p, m, v).actions for cell in cells
    )
    stages = {stage: price.stage(stage, is_split) for stage in alike}
    slowest = max(stages, key=lambda stage: stages[stage].sum_ps)
    own = stages[slowest]
    all_ps = sum(len(alike[stage]) * stages[stage].sum_ps for stage in alike)
    messages_ps = m * own.messages_ps
    if p > 1 and v == 1 and schedule in FORMULAS:
        each = [0] * p
        for first, like in alike.items():
            for stage in like:
                each[stage] = stages[first].sum_ps - stages[first].messages_ps
        waiting_ps = _pipelined(each, own.messages_ps, m, schedule == "1f1b")
        bubble = Fraction(_pipelined(each, 0, m, schedule == "1f1b") - m * max(each))
        messages_ps = waiting_ps - round(bubble) - m * max(each)
    elif p == 1 or schedule in FORMULAS:
        bubble = Fraction(all_ps - own.sum_ps, v) + Fraction((v - 1) * (-m % p) * own.sum_ps, v)
    else:
        ideal_ps = m * (own.sum_ps - own.messages_ps)
        bubble = Fraction(_clocked(plan, schedule, stages, 0) - ideal_ps)
        messages_ps = _clocked(plan, schedule, stages, own.messages_ps) - ideal_ps - round(bubble)
    data_ps, optimizer_ps = max((price.update(stage, stages[stage]) for stage in stages), key=sum)
    device_ps = m * (own.sum_ps - own.messages_ps) + messages_ps + bubble + optimizer_ps
    host_ps = max(0, round(_hosted(plan, schedule, stages, _Work.of(optimizer_ps, 2 * price.issue_ps), device_ps)))
    seconds = (device_ps + host_ps + data_ps) / PS_PER_S
    peaks = plan.world_size * cluster.device.peak(plan.item_bytes)
    mfu, hfu = (
        float(plan.shape.flops(plan.global_batch, recompute) / (seconds * Fraction(peaks)))
        # A fused kernel stores no scores, so that there is nothing to repeat selectively.
        for recompute in ("none", "none" if plan.recompute == "selective" and plan.fused_attention else plan.recompute)
    )
    return StepTime(
        m * own.compute_ps,
        host_ps,
        m * own.tensor_ps,
        m * own.context_ps,
        m * own.expert_ps,
        messages_ps,
        round(bubble),
        m * own.data_ps + data_ps,
        optimizer_ps,
        mfu,
        hfu,
    )


class _Work(NamedTuple):
    """Work that an interpreter starts op by op, while the device runs behind it.

    Attributes:
        device_ps, host_ps: the time that each takes alone.
        late_ps: from the start of the interpreter to the end of the device, if this had nothing else to do.
    """

    device_ps: int = 0
    host_ps: int = 0
    late_ps: int = 0

    @classmethod
    def of(cls, device_ps: int, host_ps: int) -> _Work:
        """Return that of one operation."""
        return cls(device_ps, host_ps, device_ps)

    def then(self, other: _Work) -> _Work:
        late_ps = max(self.late_ps + other.device_ps, self.host_ps + other.late_ps)
        return _Work(self.device_ps + other.device_ps, self.host_ps + other.host_ps, late_ps)

    def repeated(self, count: int) -> _Work:
        device_ps, host_ps, late_ps = self
        return _Work(count * device_ps, count * host_ps, late_ps + (count - 1) * max(device_ps, host_ps))


class _Stage(NamedTuple):
    """The time of a stage for one micro-batch [ps].

    Attributes:
        backward_ps: a part of `compute_ps`.
        passes: forward, gradients of inputs, and those of weights if they are computed apart.
    """

    compute_ps: int
    tensor_ps: int
    context_ps: int
    expert_ps: int
    messages_ps: int
    data_ps: int
    backward_ps: int
    passes: tuple[_Work, _Work, _Work]

    @property
    def sum_ps(self) -> int:
        return sum(self[:-2])


def _pipelined(each_ps: Sequence[int], message_ps: int, count: int, has_window: bool) -> int:
    """Return the time of a pipeline with one stage a device [ps].

    The longest of these chains: all micro-batches on one stage, between the way of the first one to it and of the last
    one back; and under 1F1B, where stage s of p begins a micro-batch after the backward of the one p - s before, the
    rounds of such a window from that stage to the last one and back.

    Args:
        each_ps: forward and backward of each stage [ps].
        message_ps: a message and its reply [ps].
        count: number of micro-batches.
        has_window: whether the schedule is 1F1B, not GPipe.
    """
    all_ps, p = sum(each_ps) + message_ps * (len(each_ps) - 1), len(each_ps)
    chains = [all_ps + (count - 1) * max(each_ps)]
    for stage in range(p if has_window else 0):
        around_ps = sum(each_ps[stage:]) + message_ps * (p - 1 - stage)
        rounds, rest = divmod(count - 1, p - stage)
        chains.append(all_ps + rounds * around_ps + rest * max(each_ps[stage:]))
    return max(chains)


def _clocked(
    plan: TrainingPlan, schedule: str, stages: dict[int, _Stage], messages_ps: int, optimizer: _Work | None = None,
    count: int | None = None,
) -> int:  # fmt: skip
    """Return the time of a schedule by its own clock [ps].

    Args:
        plan, schedule, stages: of the step.
        messages_ps: messages of a micro-batch.
        optimizer: what devices and their interpreters begin with; None for devices alone.
        count: number of micro-batches; None for all.
    """
    made = looped_schedule(schedule, plan.pipeline, count or plan.num_micro_batches, plan.chunks)
    # Stage -> kind of an action -> its work.
    own: dict[int, dict[str, _Work]] = {}
    for first, alike in plan.like_stages.items():
        forward, inputs, weights = stages[first].passes
        kinds = {"F": forward, "I": inputs, "W": weights, "B": inputs.then(weights)}
        own |= dict.fromkeys(alike, {k: _Work(*(ps // plan.chunks for ps in each)) for k, each in kinds.items()})

    def work(action: Action) -> _Work:
        return own[action.stage % plan.pipeline][action.kind]

    graph = made.graph(lambda action: work(action).device_ps, messages_ps // (2 * plan.chunks))
    if optimizer is not None:
        device, *hosts = (graph.add(ps, []) for ps in (optimizer.device_ps, *[optimizer.host_ps] * plan.pipeline))
        for task, (rank, _, action) in enumerate(graph.each):
            each = work(action)
            # The device ends no earlier than `late_ps` after the interpreter began.
            graph.before[task] += [device, graph.add(each.late_ps - each.device_ps, [hosts[rank]])]
            hosts[rank] = graph.add(each.host_ps, [hosts[rank]])
    return max(graph.times.ends)


def _hosted(plan: TrainingPlan, schedule: str, stages: dict[int, _Stage], optimizer: _Work, device_ps: Any) -> Any:
    """Return how much longer than on the devices alone a step takes with interpreters [ps]; see `StepTime.host_ps`.

    The interpreter reads the loss at the end of a step, so that it begins the next one together with the device. It
    starts the optimizer, all micro-batches, and the sum of the loss over replicas.
    """
    p, m, first = plan.pipeline, plan.num_micro_batches, stages[0]
    if p == 1:
        forward, backward, weights = first.passes
        return max(optimizer.then(forward.then(backward).then(weights).repeated(m))) - device_ps
    if all(work.host_ps <= work.device_ps for stage in stages.values() for work in stage.passes):
        # After the first pass, the interpreters are ahead.
        begin = optimizer.then(first.passes[0])
        return begin.late_ps - begin.device_ps
    clock = partial(_clocked, plan, schedule, stages, first.messages_ps, optimizer)
    # After some rounds of the stages, each further one takes the same time.
    more = max(0, m // p - _ROUNDS)
    end_ps = clock(m - more * p)
    return end_ps + (more and more * (end_ps - clock(m - (more + 1) * p))) - device_ps


class _Prices:
    """The prices of a plan's parts on one cluster."""

    def __init__(self, plan: TrainingPlan, cluster: ClusterSpec, states: ModelStates) -> None:
        self.plan, self.cluster, self.states = plan, cluster, states
        # The time in which an interpreter starts a kernel, or a collective.
        self.issue_ps = picoseconds(cluster.device.host_s(ISSUE))
        stride = plan.tensor * plan.context * plan.data
        self.tensor_group = tuple(range(plan.tensor))
        # Gradients are summed over the devices of a context, too, as each has other tokens.
        self.data_group = tuple(range(0, stride, plan.tensor))
        self.expert_group = tuple(range(0, plan.tensor * plan.expert, plan.tensor))
        self.expert_data_group = tuple(range(0, stride, plan.tensor * plan.expert))
        self.next_stage, self.last_stage = stride, stride * (plan.pipeline - 1)
        self.micro_batch_bytes = plan.item_bytes * plan.tokens * plan.shape.width

    def kernels(self, kernels: Iterable[DeviceWork]) -> _Work:
        device_ps = host_ps = late_ps = 0
        for kernel in kernels:
            ps = picoseconds(self.cluster.device.device_s(kernel))
            device_ps, late_ps, host_ps = device_ps + ps, max(late_ps, host_ps) + ps, host_ps + self.issue_ps
        return _Work(device_ps, host_ps, late_ps)

    def collective(self, op: str, size_bytes: Fraction | int, group: Sequence[int]) -> int:
        return self.cluster.collective(op, round(size_bytes), tuple(group)).time_ps if len(group) > 1 else 0

    def stage(self, stage: int, is_split: bool = False) -> _Stage:
        """Price one micro-batch on a stage; `is_split`: gradients of inputs and of weights are computed apart."""
        plan, device = self.plan, self.cluster.device
        # All gradients of a product, or of a norm, are one operation, which starts once.
        joined_ps = picoseconds(device.launch_s) if runs_by_op(plan, device.software) and not is_split else 0
        # Under sequence parallelism, a reduce-scatter and an all-gather take its place, with the same volume.
        reduce_ps = self.collective("all_reduce", self.micro_batch_bytes, self.tensor_group)
        messages_ps = 0
        if plan.pipeline > 1:
            # Each device sends its part to the next stage, whose tensor group puts it together.
            message_ps = self.cluster.message(self.micro_batch_bytes // plan.tensor, 0, self.next_stage).time_ps
            if not plan.sequence_parallel:
                message_ps += self.collective("all_gather", self.micro_batch_bytes, self.tensor_group)
            messages_ps = 2 * plan.chunks * message_ps
        exchange_ps, round_ps, is_end = self.exchange_ps(), self.round_ps(), stage in (0, plan.pipeline - 1)

        def others(reduces: int, rounds: int, exchanges: int, more: int = 0, more_ps: int = 0) -> _Work:
            """Return the collectives and messages between the kernels of a pass; `more`: the number of further ones."""
            starts = reduces * (plan.tensor > 1) + rounds * (plan.context - 1) + exchanges * (plan.expert > 1)
            device_ps = reduces * reduce_ps + rounds * round_ps + exchanges * exchange_ps + more_ps
            return _Work.of(device_ps, (starts + more) * self.issue_ps)

        tensor_ps = forward_ps = backward_ps = rounds = exchanges = 0
        messages = (2 - (is_end and plan.chunks == 1)) * (plan.pipeline > 1)
        forward, inputs, weights = others(0, 0, 0, messages), others(0, 0, 0, messages), _Work()
        for count, work in stage_work(plan, stage, self.states.gradient, device.software):
            first, then, later = map(self.kernels, (work.forward, work.backward[::-1], work.weights))
            later_ps = later.device_ps - joined_ps * len(work.weights)
            hidden_ps = work.hidden * reduce_ps
            if plan.overlap_tensor:
                hidden_ps = max(0, hidden_ps - later_ps)
            sums_ps = sum(self.collective("all_reduce", size, self.tensor_group) for size in work.sums)
            forward_ps += count * first.device_ps
            backward_ps += count * (then.device_ps + later_ps)
            tensor_ps += count * (work.shown * reduce_ps + hidden_ps + sums_ps)
            rounds += count * work.rounds
            exchanges += count * work.exchanges
            # The forward pass of a block has two all-reduces, one round of keys and values, and two exchanges.
            shown, once, twice = min(work.shown, 2), min(work.rounds, 1), min(work.exchanges, 2)
            forward = forward.then(first.then(others(shown, once, twice)).repeated(count))
            more = (work.hidden + len(work.sums)) * (plan.tensor > 1), hidden_ps + sums_ps
            between = others(work.shown - shown, work.rounds - once, work.exchanges - twice, *more)
            if is_split:
                # A bias has no flops; its gradient starts with that of its weight.
                starts = sum(kernel.flops > 0 for kernel in work.weights)
                weights = _Work.of(later_ps, starts * self.issue_ps).repeated(count).then(weights)
            else:
                # The gradients of an op start together.
                between = _Work.of(later_ps, 0).then(between)
            inputs = between.then(then).repeated(count).then(inputs)
        data_ps = self.zero3(stage, forward_ps, backward_ps) if plan.zero_stage == 3 else 0
        inputs = inputs.then(_Work.of(data_ps, 0))
        times = tensor_ps, rounds * round_ps, exchanges * exchange_ps, messages_ps, data_ps
        return _Stage(forward_ps + backward_ps, *times, backward_ps, (forward, inputs, weights))

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
        beside_ps = self.kernels(attention(plan)[0]).device_ps // plan.context
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

    def update(self, stage: int, times: _Stage) -> tuple[int, int]:
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
        # The update reads and writes the optimizer's states, reads gradients twice, once for their norm, and writes
        # parameters.
        moved = 2 * states.optimizer + 2 * states.gradient + states.parameter
        return exchange_ps, self.kernels([of_bytes(round(owned * moved))]).device_ps
