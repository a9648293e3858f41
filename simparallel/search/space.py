"""The space of a search: the candidates of every op of a graph, and what each choice costs.

The cost of a choice is the time that a rank computes and waits in one step, plus `exposed` times that of the sums of
gradients, which overlap with backward. A cost is of one op, or of two: a redistribution between the op that makes a
tensor and an op that reads it, or between two ops that read one parameter, whose first reader determines where it is.
Every reader redistributes by itself, as in a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd import Op, Redistribute
from simparallel.errors import ClusterError
from simparallel.layout.candidates import Candidate, candidates
from simparallel.layout.mesh import Mesh
from simparallel.layout.movement import digits_of
from simparallel.layout.rule import Shape
from simparallel.layout.sharding import Placement, Sharding, placement, unfinished
from simparallel.machine.cluster import ClusterSpec
from simparallel.optim.optimizer import optimizers_of
from simparallel.parallel.operator.explain import Input
from simparallel.parallel.operator.op_call import OpCall, uncut
from simparallel.search.graph import ARGUMENT, CONSTANT, NODE, PARAMETER, Graph, InputSource, OpNode
from simparallel.search.memory import add, held_bytes, local_size
from simparallel.search.prices import MOST_DEVICES, Events, GradientSum, Prices
from simparallel.search.problem import Problem
from simparallel.search.rehearsal import StepRehearsal

# Price of an excluded redistribution: above the time of any step, but so that sums of it fit into an int64.
FORBIDDEN_PS = 1 << 47
_ELEMENTWISE = ("... -> ...", "..., ... -> ...")
# With more devices, redistributions by messages are priced only if one end has a single placement.
FEW = 4
# Beyond MOST_DEVICES, an op's candidates cut at most this many dims, use all devices, and need no halos.
MOST_DIMS = 2


class Choice(NamedTuple):
    """A strategy of one op, and what follows from it.

    Attributes:
        call: the op with this strategy.
        forward, backward: its events; backward is empty for an op that no gradient passes.
        inputs: placement that it needs for each input; None for a scalar, which is used unchanged.
        output: placement of its result.
    """

    call: OpCall
    forward: Events
    backward: Events
    inputs: tuple[Placement | None, ...]
    output: Placement

    @property
    def strategy(self) -> tuple[object, object]:
        """The arguments of `shard`; (None, None) for none."""
        return self.call.op.in_strategy, self.call.op.out_strategy


class Space:
    """All choices for a graph on a cluster.

    Args:
        graph: the program.
        cluster: the described hardware, with as many ranks as devices.
        fully: only candidates cut over all devices, or not at all (MindSpore's `fully_use_devices`).
        follow: elementwise ops do not redistribute their first input (`elementwise_op_strategy_follow`).
        alpha, beta: weights of computing and of communication.
        recomputed: numbers of the optional parts of the graph that backward runs again.

    Attributes:
        recomputed, again: all parts that backward runs again, and their ops.
        choices: for each op its choices.
        optimizers: those that update the parameters.
        is_whole: whether the choices include all legal strategies of the ops.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: ClusterSpec,
        *,
        fully: bool = False,
        follow: bool = False,
        alpha: float = 1.0,
        beta: float = 1.0,
        recomputed: Collection[int] = (),
    ) -> None:
        self.graph, self.prices, self.device_num = graph, Prices(cluster, alpha, beta), cluster.world_size
        self.is_whole = self.device_num <= MOST_DEVICES and not fully
        self._fully = fully or self.device_num > MOST_DEVICES
        self._follow = follow
        self.recomputed = [p for i, p in enumerate(graph.parts) if not p.is_optional or i in recomputed]
        # Without a gradient in a part, nothing runs it again.
        self.again = {
            number
            for part in self.recomputed
            if any(node.has_backward for node in graph.nodes[part.begin : part.end])
            for number in range(part.begin, part.end)
        }
        self.optimizers = optimizers_of(leaf.tensor for leaf in graph.parameters)
        self._mesh = Mesh((self.device_num,), ("rank",))
        self._readers = graph.readers
        # Calls of equal ops on equal shapes share their choices.
        self._known: dict[object, list[Choice]] = {}
        self.choices = [self._choices_of(node) for node in graph.nodes]
        self._tables: dict[object, np.ndarray] = {}
        self._peaks: dict[tuple[int, ...], int] = {}

    # --- choices --------------------------------------------------------------------------------------

    def _choices_of(self, node: OpNode) -> list[Choice]:
        leaves = self._leaves_of(node)
        key = (
            node.op.named,
            node.rule,
            node.op.in_strategy,
            node.op.out_strategy,
            node.plan.inputs,
            node.needs,
            leaves,
            (node.has_backward),
        )
        if key not in self._known:
            self._known[key] = self._made(node, leaves)
        return self._known[key]

    def _leaves_of(self, node: OpNode) -> tuple[bool, ...]:
        return tuple(self._is_alone(node, i) for i in range(len(node.inputs)))

    def _is_alone(self, node: OpNode, i: int) -> bool:
        """Return whether an input is a parameter that no other op reads."""
        source = node.inputs[i]
        if source.kind != PARAMETER:
            return False
        return self.graph.parameters[source.number].placement is None and len(self._readers[source]) == 1

    def _made(self, node: OpNode, leaves: tuple[bool, ...]) -> list[Choice]:
        if isinstance(node.op, Redistribute):
            return [self._given(node)]
        found = []
        inputs = [Input(spec) for spec in node.plan.inputs]
        for op, sharding in self._cut(node):
            try:
                call = OpCall(op, inputs, self.device_num, sharding=sharding)
                forward = self.prices.forward(call)
                backward = self.prices.backward(call, node.needs, leaves) if node.has_backward else ()
            # The cluster's rules forbid one of its groups.
            except ClusterError:
                continue
            found.append(Choice(call, forward, backward, tuple(call.inputs), call.output))
        return found

    def _cut(self, node: OpNode) -> list[tuple[Op, Sharding | None]]:
        """Return the op with each of its strategies, or with that of the user."""
        if node.op.in_strategy is not None:
            return [(node.op, None)]
        every = candidates(
            node.rule, node.shapes, self.device_num, node.op.repeat, node.op.axis_order,
            None if self.device_num <= MOST_DEVICES else MOST_DIMS, self._fully,
        )  # fmt: skip
        found: list[tuple[Op, Sharding | None]] = []
        for each in filter(self._fits, every):
            op = with_strategy(node.op, each.in_strategy, each.out_strategy)
            # Some strategies of an embedding move the repeat axis: then the sharding is not this one.
            found.append((op, each.sharding if op.repeat == node.op.repeat else None))
        return found

    def _fits(self, candidate: Candidate) -> bool:
        # Halos are planned rank by rank, which takes too long for many devices.
        sharding = candidate.sharding
        slides = (n for tensor in sharding.inputs for place in tensor if place.kind == "window" for n in place.names)
        return self.device_num <= MOST_DEVICES or all(sharding.cut(name) == 1 for name in slides)

    def _given(self, node: OpNode) -> Choice:
        """Return the only choice of `redistribute`: its layout."""
        layout, shape = node.op.layout, node.plan.output.shape  # type: ignore[attr-defined]
        output = placement(uncut(self._mesh, shape) if layout is None else layout, shape)
        call = OpCall.__new__(OpCall)
        call.op, call.output, call.made = node.op, output, output
        return Choice(call, (), (), (output,), output)

    # --- costs ----------------------------------------------------------------------------------------

    def problem(self, exposed: float = 1.0, with_memory: bool = True) -> Problem:
        """Return the costs of all choices.

        Args:
            exposed: the share of the sums of gradients that is not hidden behind backward, 0 to 1.
            with_memory: also the bytes that they hold, which a search without a limit does not need.
        """
        blocking, sums, edges = self._costs
        known: dict[tuple[int, int], np.ndarray] = {}
        nodes = []
        for own, each in zip(blocking, sums, strict=True):
            key = id(own), id(each)
            if key not in known:
                known[key] = own + np.rint(exposed * each).astype(np.int64)
            nodes.append(known[key])
        return Problem(tuple(nodes), edges, *(self._held if with_memory else ()))

    @cached_property
    def _held(self) -> Any:
        """Bytes that nodes and edges hold from forward to backward."""
        return held_bytes(self)

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """Return the peak [bytes] of a rank's memory in a step with these choices."""
        key = tuple(choice)
        if key not in self._peaks:
            self._peaks[key] = StepRehearsal(self, key).peak_bytes
        return self._peaks[key]

    @cached_property
    def _costs(self) -> Any:
        """Costs of nodes without sums of gradients, of these sums, and of edges."""
        # Equal blocks of a network share their arrays, which solvers then work on only once.
        known: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        nodes, sums = [], []
        for number, choices in enumerate(self.choices):
            leaves = [(i, self._updates[leaf]) for leaf, i in self._first_readers.get(number, ())]
            key = id(choices), number in self.again, repr(leaves)
            if key not in known:
                own = np.array([self.cost_ps(number, choice) for choice in choices], np.int64)
                known[key] = own, np.array([self.own_sums_ps(choice) for choice in choices], np.int64)
            nodes.append(known[key][0])
            sums.append(known[key][1])
        for number in self.graph.results:
            nodes[number] = nodes[number] + self._gathering_ps(number)
        edges: dict[tuple[int, int], np.ndarray] = {}
        for reader, node in enumerate(self.graph.nodes):
            for i in range(len(node.inputs)):
                maker, table = self.table(reader, i)
                if table is None:
                    continue
                if self._follow and maker is not None and i == 0 and node.rule in _ELEMENTWISE:
                    table = np.where(table > 0, FORBIDDEN_PS, 0)
                if maker is not None:
                    add(edges, (maker, reader), table)
                elif table.any():
                    nodes[reader] = nodes[reader] + table[0]
        return nodes, sums, edges

    def cost_ps(self, number: int, choice: Choice, kind: type | tuple[type, ...] = object) -> int:
        """Return the cost [ps] of an op: its events of this kind, and the optimizers' work for its parameters."""
        forward_ps, backward_ps = (
            self.prices.cost_ps(tuple(event for event in events if isinstance(event, kind)))
            for events in (choice.forward, choice.backward)
        )
        # The time of the optimizers' kernels without the launch, which all parameters share.
        updates = 0
        for leaf, i in self._first_readers.get(number, ()):
            count = local_size(choice.inputs[i], self.graph.parameters[leaf].tensor.shape)
            for optimizer, (flops, size_bytes, itemsize, _) in self._updates[leaf]:
                name = type(self.optimizers[optimizer]).__name__
                step, launch = (self.prices.optimizer(name, n * flops, n * size_bytes, itemsize, 1) for n in (count, 0))
                updates += max(step.longest_ps - launch.longest_ps, 0)
        times = 2 if number in self.again else 1
        return (times * forward_ps + backward_ps) * self.graph.num_micro_batches + updates

    @cached_property
    def _first_readers(self) -> dict[int, list[tuple[int, int]]]:
        """Op -> the parameters that it reads first, each with the number of the input."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number in range(len(self.graph.parameters)):
            reader, i = self._readers[InputSource(PARAMETER, number)][0]
            found.setdefault(reader, []).append((number, i))
        return found

    @cached_property
    def _updates(self) -> list[list[tuple[int, tuple[int, int, int, int]]]]:
        """For each parameter the optimizers that update it: number, and cost of an element (`element_work`)."""
        found = []
        for leaf in self.graph.parameters:
            works = ((number, each.element_work(leaf.tensor)) for number, each in enumerate(self.optimizers))
            found.append([(number, work) for number, work in works if work is not None])
        return found

    def leaves_of(self, number: int) -> list[tuple[Shape, int, int]]:
        """Return the parameters that an op reads first: shape, number of the input, and bytes per element.

        The bytes are those that forward holds: the parameter, the state of its optimizers, and perhaps its gradient.
        """
        found, times = [], 1 + self.graph.has_gradients
        for leaf, i in self._first_readers.get(number, ()):
            tensor = self.graph.parameters[leaf].tensor
            state = sum(state_bytes for _, (_, _, _, state_bytes) in self._updates[leaf])
            found.append((self.graph.parameters[leaf].shape, i, times * tensor.dtype.itemsize + state))
        return found

    def own_sums_ps(self, choice: Choice) -> int:
        """Return the time [ps] of the sums of an op's gradients."""
        sums = [event.exchange for event in choice.backward if isinstance(event, GradientSum)]
        return sum(max(each.ps) for each in sums) * self.graph.num_micro_batches

    def sums_ps(self, choice: Sequence[int]) -> int:
        """Return the time [ps] of all sums of gradients."""
        return sum(self.own_sums_ps(choices[number]) for choices, number in zip(self.choices, choice, strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the strategies and redistributions that the space leaves out."""
        left = []
        if not self.is_whole:
            kinds = "use all devices" + (
                "" if self.device_num <= MOST_DEVICES else f" and cut at most {MOST_DIMS} dims"
            )
            left.append(f"Only strategies that {kinds}.")
        if self.device_num > FEW:
            left.append("No redistributions by messages between some of the ranks.")
        return tuple(left)

    def table(self, reader: int, i: int) -> tuple[int | None, np.ndarray | None]:
        """Return the cost of the redistribution of an input.

        Returns:
            The op that determines the input's placement, None if it is fixed, and the cost [ps] of each pair of its
            choices and the reader's; None if there is never a redistribution.
        """
        node = self.graph.nodes[reader]
        source, spec = node.inputs[i], node.plan.inputs[i]
        targets = [choice.inputs[i] for choice in self.choices[reader]]
        if not spec.shape or targets[0] is None:
            return None, None
        maker, sources = self.origin(reader, i)
        if not sources:
            return None, None
        is_again = reader in self.again
        has_backward = node.needs[i] and node.has_backward and source.kind in (NODE, PARAMETER)
        key = tuple(map(id, sources)), tuple(map(id, targets)), spec.dtype, has_backward, is_again
        if key not in self._tables:
            itemsize = self.prices.cluster.itemsize(spec.dtype)
            self._tables[key] = self._move_costs(sources, targets, itemsize, has_backward, 1 + is_again)  # type: ignore[arg-type]
        return maker, self._tables[key]

    def origin(self, reader: int, i: int) -> tuple[int | None, list[Placement]]:
        """Return the op that determines the placement of an input, and the placement for each choice of this op.

        The op is None if the placement is fixed. The list is empty if the reader itself determines it.
        """
        node = self.graph.nodes[reader]
        source, shape = node.inputs[i], node.plan.inputs[i].shape
        if source.kind == NODE:
            return source.number, [choice.output for choice in self.choices[source.number]]
        if source.kind == ARGUMENT:
            return None, [self.graph.arguments[source.number]]
        if source.kind == CONSTANT:
            return None, [placement(uncut(self._mesh, shape), shape)]
        place = self.graph.parameters[source.number].placement
        if place is not None:
            return None, [place]
        first, j = self._readers[source][0]
        if first == reader and j == i:
            return None, []
        # An op that reads a parameter twice has cut it for the first of the two inputs.
        return first, [choice.inputs[j] or place for choice in self.choices[first]]  # type: ignore[misc]

    def _move_costs(
        self, sources: list[Placement], targets: list[Placement], itemsize: int, has_backward: bool, times: int
    ) -> np.ndarray:
        """Return the time [ps] of each redistribution; few placements are distinct, so each pair is priced once."""
        starts, rows = _distinct(sources)
        ends, columns = _distinct(targets)
        # With a single placement at one end, every redistribution may need messages: price these, too.
        messages = self.device_num <= MOST_DEVICES and (min(len(starts), len(ends)) == 1 or self.device_num <= FEW)
        price = self.prices.redistribution_ps

        def both(a: Placement, b: Placement) -> int:
            there = price(a, b, itemsize, messages)
            back = price(b, a, itemsize, messages) if has_backward else 0
            return FORBIDDEN_PS if there is None or back is None else times * there + back

        most = FORBIDDEN_PS // self.graph.num_micro_batches
        costs = np.array([[min(both(a, b), most) for b in ends] for a in starts], np.int64)
        costs *= self.graph.num_micro_batches
        return costs[np.ix_(rows, columns)]

    def moves(self, choice: Sequence[int], reader: int, i: int) -> tuple[Events, Events]:
        """Return the events of an input's redistribution, forward and backward."""
        node, ends = self.graph.nodes[reader], self._moved(choice, reader, i)
        if ends is None:
            return (), ()
        source, target = ends
        itemsize = self.prices.cluster.itemsize(node.plan.inputs[i].dtype)
        there = self.prices.redistribution(source, target, itemsize)
        if not (node.needs[i] and node.has_backward and node.inputs[i].kind in (NODE, PARAMETER)):
            return there, ()
        return there, self.prices.redistribution(
            unfinished(target, self._left_axes(choice, reader, i)), source, itemsize
        )

    def backward(self, choice: Sequence[int], number: int) -> Events:
        """Return the events of an op's backward, without sums that the backward of a redistribution makes."""
        node, own = self.graph.nodes[number], self.choices[number][choice[number]]
        left = [i for i in range(len(node.inputs)) if self.is_left(choice, number, i)]
        if not own.backward or not left:
            return own.backward
        return self.prices.backward(own.call, node.needs, self._leaves_of(node), left)

    def _moved(self, choice: Sequence[int], reader: int, i: int) -> tuple[Placement, Placement] | None:
        """Return the placements between which an input is redistributed; None if it is not."""
        target, (maker, sources) = self.choices[reader][choice[reader]].inputs[i], self.origin(reader, i)
        source = sources[0 if maker is None else choice[maker]] if sources else target
        return None if source is None or target is None or source is target else (source, target)

    def is_left(self, choice: Sequence[int], reader: int, i: int) -> bool:
        """Return whether an input is redistributed for this op alone: that redistribution then sums its gradient."""
        if self._moved(choice, reader, i):
            return True
        source = self.graph.nodes[reader].inputs[i]
        is_given = source.kind == NODE and isinstance(self.graph.nodes[source.number].op, Redistribute)
        if not is_given or len(self._readers[source]) > 1 or source.number in self.graph.roots:
            return False
        return self._moved(choice, source.number, 0) is not None

    def _left_axes(self, choice: Sequence[int], reader: int, i: int) -> tuple[str, ...]:
        """Return the axes over which the gradient of a redistributed input is still to be summed."""
        if isinstance(self.graph.nodes[reader].op, Redistribute):
            readers = self._readers[InputSource(NODE, reader)]
            if len(readers) != 1 or not self.is_left(choice, *readers[0]) or self._moved(choice, *readers[0]):
                return ()
            reader, i = readers[0]
        return self.choices[reader][choice[reader]].call.sharding.gradient_axes(i)

    # --- the rest of a step ---------------------------------------------------------------------------

    def gathering(self, node: int, number: int) -> Events:
        """Return the events that give every rank the whole result of an op, as for the results of a program."""
        output = self.choices[node][number].output
        itemsize = self.prices.cluster.itemsize(self.graph.nodes[node].plan.output.dtype)
        return self.prices.redistribution(output, self._whole(output), itemsize)

    def _gathering_ps(self, node: int) -> np.ndarray:
        """Return the cost [ps] of `gathering` for each choice."""
        outputs, is_small = [c.output for c in self.choices[node]], self.device_num <= MOST_DEVICES
        itemsize = self.prices.cluster.itemsize(self.graph.nodes[node].plan.output.dtype)
        costs = [self.prices.redistribution_ps(output, self._whole(output), itemsize, is_small) for output in outputs]
        return np.array([FORBIDDEN_PS if cost is None else cost for cost in costs], np.int64)

    def _whole(self, place: Placement) -> Placement:
        return placement(uncut(self._mesh, place.shape), place.shape)

    def placements(self, choice: Sequence[int]) -> list[Placement]:
        """Return the placement of each parameter: as before the program, or else as its first reader needs it."""
        found = []
        for number, leaf in enumerate(self.graph.parameters):
            reader, i = self._readers[InputSource(PARAMETER, number)][0]
            wanted = leaf.placement or self.choices[reader][choice[reader]].inputs[i]
            found.append(wanted or placement(uncut(self._mesh, leaf.shape), leaf.shape))
        return found

    def steps(self, choice: Sequence[int]) -> Events:
        """Return the events of the optimizers' steps, on the slices of the parameters."""
        totals = [[0, 0, 0, 0] for _ in self.optimizers]
        for works, place in zip(self._updates, self.placements(choice), strict=True):
            for optimizer, (flops, size_bytes, itemsize, _) in works:
                count, total = prod(place.local_shape), totals[optimizer]
                total[0] += count * flops
                total[1] += count * size_bytes
                total[2] = max(total[2], itemsize)
                total[3] += 1
        names = (type(optimizer).__name__ for optimizer in self.optimizers)
        return tuple(self.prices.optimizer(name, *total) for name, total in zip(names, totals, strict=True))

    # --- known strategies -----------------------------------------------------------------------------

    def nearest(self, node: int, sharding: Sharding) -> int:
        """Return the choice with the cuts of a Sharding; if there is none, the choice without cuts."""
        cuts = {name: sharding.cut(name) for name in sharding.cuts if sharding.cut(name) > 1}
        for number, choice in enumerate(self.choices[node]):
            own = getattr(choice.call, "sharding", None)
            if own is None or choice.strategy[1] is not None:
                continue
            if {name: own.cut(name) for name in own.cuts if own.cut(name) > 1} == cuts:
                return number
        return 0


def _distinct(places: list[Placement]) -> tuple[list[Placement], list[int]]:
    """Return one placement of each distinct slicing, and for each of `places` the number of its own."""
    found: dict[object, int] = {}
    kept: list[Placement] = []
    numbers = []
    for place in places:
        key = digits_of(place.layout) or place
        if key not in found:
            found[key] = len(kept)
            kept.append(place)
        numbers.append(found[key])
    return kept, numbers


def with_strategy(op: Op, in_strategy: object, out_strategy: object) -> Op:
    """Return a copy of an op with a strategy."""
    copy = op.twin()
    copy.in_strategy, copy.out_strategy = in_strategy, out_strategy  # type: ignore[assignment]
    return copy


def fixed(space: Space) -> Sequence[int]:
    """Return the numbers of the ops that have a strategy of the user."""
    return [number for number, node in enumerate(space.graph.nodes) if node.op.in_strategy is not None]
