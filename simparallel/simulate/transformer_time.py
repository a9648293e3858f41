"""The time of a training step of a transformer, by algebra: rooflines of kernels, prices of collectives, formulas.

Nothing is measured here, and nothing is fitted to the time of a step. Flops and bytes of the kernels are divided by
what devices and links achieve (`Efficiency`). An interpreter starts kernels and collectives one by one, and the device
runs behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from simparallel.errors import ClusterError, InputError
from simparallel.machine import achieved
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, picoseconds
from simparallel.machine.device import ISSUE, DeviceWork
from simparallel.machine.products import MatrixUnits
from simparallel.simulate.pipeline_time import Passes, PassTime, clocked
from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import FORMULAS, MIXED_ADAM, ModelStates, looped_schedule
from simparallel.simulate.transformer_work import attention, of_bytes, runs_by_op, stage_work

# A device of which nothing but its peak is known: matrix products of every shape reach the same share.
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

    A pipeline takes the time of its schedule's clock (`clocked`). Messages between stages are divided by the tensor
    group (Narayanan et al. 2021, section 4.1), or whole if that is faster.

    Args:
        plan: the model, and how it is cut.
        cluster: the described hardware, with as many ranks as the plan has devices, in the dtype of matrix products.
        efficiency: what the hardware achieves of its data sheet.
        states: bytes of each parameter; gradients are exchanged in their own size.
        schedule: a looped schedule of `pipeline_schedule`, such as "1f1b" or "zb_h1".

    Raises:
        ClusterError: the cluster has another number of ranks.
        InputError: no such schedule, or not for these numbers.
    """
    return PricedStep(plan, efficiency.achieved(cluster), states, schedule).time()


class PricedStep:
    """A step of which all parts have a time, before they are put on the clock of a schedule.

    Args:
        plan, states, schedule: see `step_time`.
        cluster: the hardware with the speeds that it achieves, see `Efficiency`.

    Attributes:
        least_ps: no less than this is the time of the step [ps]: the busiest stage without a bubble, and the update.
    """

    def __init__(self, plan: TrainingPlan, cluster: ClusterSpec, states: ModelStates, schedule: str) -> None:
        if cluster.world_size != plan.world_size:
            raise ClusterError(
                f"step_time: the plan has {plan.tensor} x {plan.context} x {plan.pipeline} x {plan.data} = "
                f"{plan.world_size} devices, the cluster {cluster.world_size} ranks; describe a cluster of "
                f"{plan.world_size}."
            )
        p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
        self.plan, self.cluster, self.schedule = plan, cluster, schedule
        # A part of the model is priced as a stage of its own.
        flat = replace(plan, pipeline=p * v, chunks=1) if p > 1 else plan
        price = _Prices(flat, cluster, states)
        is_split = schedule not in FORMULAS and any(
            "W" in cell for cells in looped_schedule(schedule, p, m, v).actions for cell in cells
        )
        priced: dict[int, tuple[PartTime, Passes]] = {}
        for first, alike in flat.like_stages.items():
            priced |= dict.fromkeys(alike, price.stage(first, is_split))
        parts, self.passes = zip(*[priced[part] for part in range(flat.pipeline)], strict=True)
        stages = [PartTime(*map(sum, zip(*parts[stage::p], strict=True))) for stage in range(p)]
        self.own = max(stages, key=lambda each: each.sum_ps)
        price = _Prices(plan, cluster, states)
        self.issue_ps = price.issue_ps
        self.data_ps, self.optimizer_ps = max(
            (price.update(stage, stages[stage]) for stage in plan.like_stages), key=sum
        )
        # What each device does for a micro-batch, and once a step.
        each_ps = [sum(work.device_ps for part in self.passes[stage::p] for work in part.each) for stage in range(p)]
        once_ps = [
            sum(part.first.device_ps + part.last.device_ps for part in self.passes[stage::p]) for stage in range(p)
        ]
        self.once_ps = once_ps[stages.index(self.own)]
        busiest_ps = max(m * each + once for each, once in zip(each_ps, once_ps, strict=True))
        self.least_ps = busiest_ps + self.data_ps + self.optimizer_ps

    def time(self) -> StepTime:
        """Run the schedule."""
        plan, own, passes, optimizer_ps = self.plan, self.own, self.passes, self.optimizer_ps
        m, message_ps = plan.num_micro_batches, own.messages_ps // plan.chunks
        alone_ps, device_ps = (clocked(plan, self.schedule, passes, ps) for ps in (0, message_ps))
        # The interpreter reads the loss at the end of a step, so that it begins the next one together with the device.
        # It starts the optimizer, all micro-batches, and the sum of the loss over replicas.
        begin = PassTime.of(optimizer_ps, self.issue_ps)
        host_ps = max(0, clocked(plan, self.schedule, passes, message_ps, begin) - device_ps - optimizer_ps)
        seconds = (device_ps + host_ps + self.data_ps + optimizer_ps) / PS_PER_S
        peaks = plan.world_size * self.cluster.device.peak(plan.item_bytes)
        # A fused kernel stores no scores, so that there is nothing to repeat selectively.
        again = "none" if plan.recompute == "selective" and plan.fused_attention else plan.recompute
        mfu, hfu = (
            float(plan.shape.flops(plan.global_batch, recompute) / (seconds * Fraction(peaks)))
            for recompute in ("none", again)
        )
        return StepTime(
            m * own.compute_ps,
            host_ps,
            m * own.tensor_ps,
            m * own.context_ps,
            m * own.expert_ps,
            device_ps - alone_ps,
            alone_ps - m * (own.sum_ps - own.messages_ps) - self.once_ps,
            m * own.data_ps + self.once_ps + self.data_ps,
            optimizer_ps,
            mfu,
            hfu,
        )


class PartTime(NamedTuple):
    """The time of a part of the model, or of all parts of a device, for one micro-batch.

    Attributes:
        compute_ps: kernels, forward and backward.
        tensor_ps, context_ps, expert_ps: exchanges of these groups that nothing hides.
        messages_ps: messages between stages.
        data_ps: exchanges of sharded parameters.
        backward_ps: the backward pass, a part of `compute_ps`.
    """

    compute_ps: int
    tensor_ps: int
    context_ps: int
    expert_ps: int
    messages_ps: int
    data_ps: int
    backward_ps: int

    @property
    def sum_ps(self) -> int:
        return sum(self[:-1])


class _Group(NamedTuple):
    """Equal groups of parameters that replicas share in slices: the times of one over a micro-batch [ps].

    Attributes:
        number: how many.
        gather_ps, again_ps, reduce_ps: its exchanges: before the forward pass, in the backward pass, and of gradients.
        forward_ps, backward_ps: its passes on the device, which hide the exchanges of its neighbours.
        copy: of what was gathered, to its place.
    """

    number: int = 1
    gather_ps: int = 0
    again_ps: int = 0
    reduce_ps: int = 0
    forward_ps: int = 0
    backward_ps: int = 0
    copy: PassTime = PassTime()


class _Prices:
    """The prices of a plan's parts on one cluster."""

    def __init__(self, plan: TrainingPlan, cluster: ClusterSpec, states: ModelStates) -> None:
        self.plan, self.cluster, self.states = plan, cluster, states
        # The time in which an interpreter starts a kernel, or a collective.
        self.issue_ps = picoseconds(cluster.device.host_s(ISSUE))
        self.issued = PassTime.of(0, self.issue_ps)
        stride = plan.tensor * plan.context * plan.data
        self.tensor_group = tuple(range(plan.tensor))
        # Gradients are summed over the devices of a context, too, as each has other tokens.
        data_group = tuple(range(0, stride, plan.tensor))
        self.expert_group = tuple(range(0, plan.tensor * plan.expert, plan.tensor))
        # Of all parameters but those of experts, and of these.
        self.data_groups = data_group, tuple(range(0, stride, plan.tensor * plan.expert))
        self.next_stage, self.last_stage = stride, stride * (plan.pipeline - 1)
        self.micro_batch_bytes = plan.item_bytes * plan.tokens * plan.shape.width

    def kernels(self, kernels: Iterable[DeviceWork]) -> PassTime:
        device_ps = host_ps = late_ps = 0
        for kernel in kernels:
            kernel = kernel.with_operands(self.cluster.dtype)
            ps = picoseconds(self.cluster.device.device_s(kernel))
            device_ps, late_ps = device_ps + ps, max(late_ps, host_ps) + ps
            host_ps += self.issue_ps * (1 + len(kernel.casts))
        return PassTime(device_ps, host_ps, late_ps)

    def collective(self, op: str, size_bytes: Fraction | int, group: Sequence[int]) -> int:
        return self.cluster.collective(op, round(size_bytes), tuple(group)).time_ps if len(group) > 1 else 0

    def stage(self, stage: int, is_split: bool = False) -> tuple[PartTime, Passes]:
        """Price one micro-batch on a stage; `is_split`: gradients of inputs and of weights are computed apart."""
        plan, device = self.plan, self.cluster.device
        # All gradients of a linear layer, or of a norm, are one operation, which starts once; if those of weights are
        # computed later, that of a bias starts with that of its weight. A bias has no flops.
        launch_ps = picoseconds(device.launch_s) if runs_by_op(plan, device.software) else 0
        # Under sequence parallelism, a reduce-scatter and an all-gather take its place, with the same volume.
        reduce_ps = self.collective("all_reduce", self.micro_batch_bytes, self.tensor_group)
        messages_ps = 0
        if plan.pipeline > 1:
            # Each device sends its part to the next stage, whose tensor group puts it together; or all, if faster.
            message_ps = self.cluster.message(self.micro_batch_bytes // plan.tensor, 0, self.next_stage).time_ps
            if not plan.sequence_parallel:
                whole_ps = self.cluster.message(self.micro_batch_bytes, 0, self.next_stage).time_ps
                gather_ps = self.collective("all_gather", self.micro_batch_bytes, self.tensor_group)
                message_ps = min(message_ps + gather_ps, whole_ps)
            messages_ps = 2 * message_ps
        round_ps, exchange_ps = self.round_ps(), self.exchange_ps()

        def reduces(count: int, device_ps: int) -> PassTime:
            """Return so many collectives of the tensor group, which take this time."""
            return PassTime.of(device_ps, count * (plan.tensor > 1) * self.issue_ps)

        def others(rounds: int, exchanges: int) -> PassTime:
            """Return what passes between the devices of a context and of the experts."""
            starts = rounds * (plan.context - 1) + exchanges * (plan.expert > 1)
            return PassTime.of(rounds * round_ps + exchanges * exchange_ps, starts * self.issue_ps)

        tensor_ps = forward_ps = backward_ps = rounds = exchanges = 0
        # Messages from and to the stage before and the next one.
        before, after = (PassTime.of(0, there * self.issue_ps) for there in (stage > 0, stage < plan.pipeline - 1))
        forward, inputs, weights = before, before, PassTime()
        works: list[tuple[int, int, int]] = []
        for count, work in stage_work(plan, stage, self.states.gradient, device.software):
            first, then, later = map(self.kernels, (work.forward, work.backward[::-1], work.weights))
            starts = is_split * sum(kernel.flops > 0 for kernel in work.weights)
            later_ps = later.device_ps - launch_ps * (len(work.weights) - starts)
            hidden_ps = work.hidden * reduce_ps
            if plan.overlap_tensor:
                hidden_ps = max(0, hidden_ps - later_ps)
            sums_ps = sum(self.collective("all_reduce", size, self.tensor_group) for size in work.sums)
            if work.forward:
                works.append((count, first.device_ps, then.device_ps + later_ps))
            forward_ps += count * first.device_ps
            backward_ps += count * (then.device_ps + later_ps)
            tensor_ps += count * (work.shown * reduce_ps + hidden_ps + sums_ps)
            rounds += count * work.rounds
            exchanges += count * work.exchanges
            casts = sum(len(kernel.with_operands(self.cluster.dtype).casts) for kernel in work.weights)
            later, sums = PassTime.of(later_ps, (starts + casts) * self.issue_ps), reduces(len(work.sums), sums_ps)
            # Sums are those of the loss, or of gradients.
            first, later = (first.then(sums), later) if work.forward else (first, later.then(sums))
            # The forward pass of a block has two all-reduces, one round of keys and values, and two exchanges.
            shown, once, twice = min(work.shown, 2), min(work.rounds, 1), min(work.exchanges, 2)
            first = first.then(reduces(shown, shown * reduce_ps)).then(others(once, twice))
            again = work.shown - shown
            then = reduces(again + work.hidden, again * reduce_ps + hidden_ps).then(then)
            then = others(work.rounds - once, work.exchanges - twice).then(then)
            forward = forward.then(first.repeated(count))
            inputs = (then if is_split else later.then(then)).repeated(count).then(inputs)
            weights = later.repeated(count).then(weights) if is_split else weights
        passes = Passes(forward.then(after), after.then(inputs), weights)
        data_ps = 0
        if plan.zero_stage and len(self.data_groups[0]) > 1:
            gather, reduce = self.exchanges(stage, works)
            # ZeRO-1 and 2 gather once a step, and ZeRO-1 reduces once.
            if plan.zero_stage == 3:
                passes = passes._replace(forward=gather.then(passes.forward))
            else:
                passes = passes._replace(first=gather)
            if plan.zero_stage == 1:
                passes = passes._replace(last=reduce)
            else:
                passes = passes._replace(inputs=passes.inputs.then(reduce))
            data_ps = gather.device_ps * (plan.zero_stage == 3) + reduce.device_ps * (plan.zero_stage > 1)
        times = tensor_ps, rounds * round_ps, exchanges * exchange_ps, messages_ps, data_ps
        return PartTime(forward_ps + backward_ps, *times, backward_ps), passes

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

    def exchanges(self, stage: int, works: Sequence[tuple[int, int, int]]) -> tuple[PassTime, PassTime]:
        """Price what replicas that share slices exchange before a forward pass, and in a backward pass.

        Each block is a group, and so are both tables. A group's parameters are gathered while the one before computes,
        and its gradients are reduced while the next one does, on one stream.

        Args:
            stage: number of the stage.
            works: for each kind of groups their number, and the times of a forward and a backward pass on the device.
        """
        plan, states = self.plan, self.states
        (dense, sparse), tables = plan.count_layers(stage), plan.table_parameters(stage)
        is_last, is_tied = stage == plan.pipeline - 1, plan.shape.is_tied
        head = tables if stage else Fraction(plan.shape.vocabulary * plan.shape.width, plan.tensor) * (not is_tied)
        none = Fraction(0)
        sizes = [(tables - head * is_last, none)] * (stage == 0) + [(plan.layer_parameters, none)] * (dense > 0)
        sizes += [(plan.sparse_parameters, plan.layer_experts)] * (sparse > 0) + [(head, none)] * is_last
        row = [_Group()] * 2
        for (count, *hiding), parts in zip(works, sizes, strict=True):
            found = [(part, ranks) for part, ranks in zip(parts, self.data_groups, strict=True) if part]
            gather_ps = sum(self.collective("all_gather", part * states.parameter, ranks) for part, ranks in found)
            reduce_ps = sum(self.collective("reduce_scatter", part * states.gradient, ranks) for part, ranks in found)
            # A lookup needs no table in the backward pass.
            is_again = plan.zero_stage == 3 and (len(row) > 2 or stage > 0 or (is_last and is_tied))
            copied = [of_bytes(round(2 * sum(parts) * states.parameter))]
            copy = self.kernels(copied * runs_by_op(plan, self.cluster.device.software)).then(self.issued)
            forward_ps, backward_ps = (ps * plan.overlap_data for ps in hiding)
            group = _Group(1, gather_ps, gather_ps * is_again, reduce_ps, forward_ps, backward_ps, copy)
            # All between the first and the last one of equal groups have the same neighbours.
            row += [group, group._replace(number=count - 2), group] if count > 2 else [group] * count
        row += [_Group()] * 2
        before_ps = sum(own.number * max(0, own.gather_ps - last.forward_ps) for last, own in pairwise(row))
        after_ps = sum(
            own.number * max(0, before.again_ps + after.reduce_ps - own.backward_ps)
            for before, own, after in zip(row, row[1:], row[2:], strict=False)
        )
        gathers, reduces = PassTime.of(before_ps), PassTime.of(after_ps)
        for own in row[2:-2]:
            gathers = gathers.then(own.copy.repeated(own.number))
            again = own.copy.then(self.issued) if own.again_ps else self.issued
            reduces = reduces.then(again.repeated(own.number))
        return gathers, reduces

    def update(self, stage: int, times: PartTime) -> tuple[int, int]:
        """Price the end of a step: the sum of whole gradients over replicas, and the optimizer."""
        plan, states = self.plan, self.states
        exchange_ps, owned = 0, Fraction(0)
        parts = plan.stage_parameters(stage), plan.stage_experts(stage)
        for parameters, group in zip(parts, self.data_groups, strict=True):
            owned += parameters / (len(group) if plan.zero_stage else 1)
            if plan.zero_stage == 0 and parameters:
                exchange_ps += self.collective("all_reduce", parameters * states.gradient, group)
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
        return exchange_ps, self.kernels([of_bytes(round(owned * moved))]).device_ps
