"""What eager software holds while it runs a stage of a transformer: stretches of work, in closed form.

Forward holds what kernels keep (`Op.eager_keeps`). Backward makes the gradient of a weight before it adds it to the sum
so far, and frees an activation after the gradient that needs it; what an op has read is freed before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT
from simparallel.simulate.transformer import TrainingPlan


class Stretch(NamedTuple):
    """A stretch of work: what it holds more at its end than before, and at its peak [bytes]."""

    net: Fraction | int
    peak: Fraction | int


# A stretch, or bytes that are held from here on, or freed.
Part = Stretch | Fraction | int


def joined(*parts: Part) -> Stretch:
    """Return the stretch of these parts, one after the other."""
    net: Fraction | int = 0
    peak: Fraction | int = 0
    for part in parts:
        change, most = part if isinstance(part, Stretch) else (part, part)
        peak = max(peak, net + most)
        net += change
    return Stretch(net, peak)


def repeated(stretch: Stretch, count: int) -> Stretch:
    """Return the stretch of so many equal ones, of which there may be none."""
    net, peak = stretch
    return Stretch(net * count, (peak + max(0, (count - 1) * net)) * (count > 0))


class EagerBlock:
    """A block of a plan on a device: what its passes hold for one micro-batch.

    Args:
        plan: the model, and how it is cut.
        kept: bytes that the block stores for the backward pass.
        is_sparse: whether the block has experts, whose matrix products run one after the other.
    """

    def __init__(self, plan: TrainingPlan, kept: int, is_sparse: bool) -> None:
        shape, t, item = plan.shape, plan.tensor, plan.item_bytes
        full, tokens = shape.full, plan.tokens
        heads, kv_heads = shape.num_heads // t, shape.kv_heads(t)
        # Rows of the residual stream.
        self.row = row = item * tokens * shape.width // (t if plan.sequence_parallel else 1)
        self.kept = kept
        inner = full.mlp_width // t
        if is_sparse:
            inner = (shape.active_experts * shape.expert_width + shape.shared_width) // t
        self.inner = item * tokens * inner
        self.is_gated, self.is_cut, self.is_again = shape.is_gated, t > 1, plan.recompute == "full"
        # Groups of sharded parameters take each gradient as soon as it is there.
        self.is_together = self.is_again and not plan.zero_stage
        self.result = item * tokens * heads * full.value_size
        self.products = item * tokens * (heads * full.head_size + kv_heads * (full.head_size + full.value_size))
        # Norms of heads keep the products, and for the gradients of their weights those of their results.
        self.normed = item * tokens * (heads + kv_heads) * full.head_size * shape.has_query_norm
        self.attention = self.kept - 4 * row - self.result - (2 + 2 * self.is_gated) * self.inner
        *first, out = (item * weight.inner * weight.columns for weight in shape.attention_weights(t))
        self.up, self.down = (
            item * weight.inner * weight.columns
            for weight in shape.mlp_weights((is_sparse and shape.expert_width) or full.mlp_width, t)
        )
        self.out, self.qkv = out, sum(first)
        whole = plan.sparse_parameters + plan.layer_experts if is_sparse else plan.layer_parameters
        self.weights = int(item * whole)

    def forward(self) -> Stretch:
        """Return the forward pass; a block that is recomputed keeps its input alone."""
        return joined(self.kept + self.row, -self.row, (self.row - self.kept) * self.is_again)

    def backward(self, has_sum: int, flat: int = 0, buffer: int = 0) -> Stretch:
        """Return the backward pass, from the gradient of the result to that of the input.

        A recomputed block delivers the gradients of whole weights together, so these are held at its end.

        Args:
            has_sum: whether there are gradients of the weights already; 2 if these are freed, too.
            flat: bytes of the gathered weights, until the last matrix product has read them.
            buffer: bytes of an array that collects the gradients of the weights, from the first one on.
        """
        row, again = self.row, self.row * self.is_again
        added = has_sum * (not self.is_together)
        turned = (self.products, -self.products) if self.is_cut else ()
        return joined(
            *(self.kept + row, -row) * self.is_again,
            *_into(self.down, buffer, added), *self._activation(), self.up, -(1 + self.is_gated) * self.inner,
            -self.up * added, 2 * again - 2 * row, *_added(self.out, added),
            -self.attention, self.products, -self.result, self.products, *turned, -self.products,
            -flat, *_added(self.qkv, added), -self.products, (self.weights - self._matrices) * (1 - added),
            -2 * row - 3 * again,
        )  # fmt: skip

    def input_gradient(self) -> Stretch:
        """Return the part of backward that makes the gradient of the input, and keeps all for those of the weights.

        A recomputed block runs again first. Its input is a leaf of that run, whose gradient is a copy from the start.
        """
        row, again, kept = self.row, self.row * self.is_again, self.products * bool(self.normed)
        turned = (self.products, -self.products) if self.is_cut else ()
        return joined(
            *(self.kept + row, -row) * self.is_again, self.inner, *self._activation(), 2 * row + again + self.result,
            kept - self.attention, self.products, self.normed - self.result, self.products, *turned,
            row - self.products, row, -2 * again,
        )  # fmt: skip

    def weight_gradients(self, has_sum: bool) -> Stretch:
        """Return the part of backward that makes the gradients of the weights; `late` is freed after it."""
        kept = self.products * bool(self.normed)
        return joined(
            -self.inner, *_added(self.down, has_sum), -self.row, *_added(self.up, has_sum), -self.row - self.result,
            *_added(self.out, has_sum), -kept - self.row, *_added(self.qkv, has_sum),
            (self.weights - self._matrices) * (not has_sum), -self.row,
        )  # fmt: skip

    @property
    def late(self) -> int:
        """The gradients that those of the weights need."""
        return 4 * self.row + (1 + self.is_gated) * self.inner + self.products + self.normed

    @property
    def _matrices(self) -> int:
        return self.down + self.up + self.out + self.qkv

    def _activation(self) -> tuple[int, ...]:
        """Return what the backward of the activation function holds and frees, after the gradient of its result.

        The gradients of a gate and of its value go into one array, on slices each into an own one.
        """
        inner, cut = self.inner, 2 * self.inner * self.is_cut
        return (inner, -inner, 2 * inner, -3 * inner, cut, -cut, -inner) if self.is_gated else (-inner,)


def _added(size: int, has_sum: int) -> tuple[int, int]:
    """Return what the gradient of a weight holds: it stays, or is added to the sum so far and freed; 2: with it."""
    return size, -size * has_sum


def _into(size: int, buffer: int, has_sum: int) -> tuple[int, ...]:
    """Return what the gradient of a weight holds that goes into a new buffer, after it is added to the sum so far."""
    return size, -size * (has_sum // 2), buffer, -size * (has_sum - has_sum // 2)


class EagerStage:
    """The passes of a plan's devices over one micro-batch, on eager software.

    Args:
        plan: the model, and how it is cut.
        kept: bytes that a dense and a sparse block store for the backward pass, without recomputation.
        keeps_gradients: see `activation_bytes`.
    """

    def __init__(self, plan: TrainingPlan, kept: Sequence[int], keeps_gradients: bool) -> None:
        shape, item, self.keeps = plan.shape, plan.item_bytes, keeps_gradients
        self.plan, self.blocks = plan, [EagerBlock(plan, size, bool(number)) for number, size in enumerate(kept)]
        self.row = self.blocks[0].row
        vocabulary = -(-shape.vocabulary // plan.tensor)
        logits = item * plan.tokens * vocabulary
        # The loss is computed in float32.
        scores = 4 * plan.tokens * vocabulary
        # What the forward and the backward of a cast hold, and free.
        casts = ((scores, -logits), (logits, -scores)) if item < 4 else ((), ())
        self.of_logits = logits if item < 4 else scores
        # The loss keeps logarithms.
        self.head, self.cast = (self.row, logits, *casts[0], scores, -scores), casts[1]
        self.table, self.norm = item * vocabulary * shape.width, item * shape.norm_parameters
        self.positions = item * (shape.full.num_positions or 0) * shape.width
        # The gradient of the positions is a sum over the sequences.
        self.summed = item * shape.length // plan.context * shape.width * bool(self.positions)

    def work(self, part: int, kind: str, seen: bool, is_final: bool) -> Stretch:
        """Return an action of a schedule.

        Args:
            part: number of a part of the model.
            kind: of the action, see `Schedule`.
            seen, is_final: whether it is not the first one of its kind and part, and whether it is the last one.
        """
        plan, row, has_sum = self.plan, self.row, seen or self.keeps
        if plan.zero_stage == 3 and kind == FORWARD:
            return self._gathered_forward(part)
        if kind == BACKWARD and (plan.zero_stage > 1 or (plan.zero_stage and is_final)):
            return self._reduced_backward(part, seen)
        is_first, is_last = part == 0, part == plan.pipeline * plan.chunks - 1
        blocks = [(block, n) for block, n in zip(self.blocks, plan.part_layers(part), strict=True) if n]
        if kind == FORWARD:
            return joined(row, *[repeated(block.forward(), n) for block, n in blocks], *self.head * is_last)
        blocks.reverse()
        if kind == INPUT_GRADIENT:
            passes = [repeated(block.input_gradient(), n) for block, n in blocks]
            # What is sent back is a copy of its own.
            end = (self.summed,) if is_first else (row, -row)
            return joined(*self.cast * is_last, row * (1 + is_last), *passes, *end)
        # Of a table that is the output layer, too, there is one gradient, until the end.
        is_tied = is_first and is_last and plan.shape.is_tied
        table, added = _added(self.table, has_sum)
        ends = [
            *_added(self.positions * is_first, has_sum),
            *_added(self.table * (is_first and not is_tied), has_sum),
            added * is_tied,
        ]
        added, norm = added * (not is_tied), self.norm * (not has_sum) - row
        if kind == BACKWARD:
            steps: list[Part] = [*self.cast, table, -self.of_logits, added, norm] if is_last else [row]
            # What the next stage has sent is held to the end.
            sent = 0 if is_last else row
            for number, (block, n) in enumerate(blocks):
                # Gradients that are delivered together are held by the next block, too.
                once, freed = block.backward(has_sum), -block.weights * (has_sum and block.is_together)
                steps += [once, sent * (number == 0), repeated(joined(once, freed), n - 1), freed]
            summed = self.summed * is_first
            return joined(*steps, summed, ends[0], -summed, *ends[1:], -row - 2 * sent)
        # What the stage sends, too, is held so long.
        late = sum(block.late * n for block, n in blocks) + 2 * row + self.of_logits * is_last + self.summed * is_first
        delayed: list[Part] = [repeated(block.weight_gradients(has_sum), n) for block, n in blocks]
        head: list[Part] = [-row, table, added, norm] * is_last
        # The newest ops go first: those of blocks that have run again, the first block last.
        order = [*delayed[::-1], *head] if plan.recompute == "full" else [*head, *delayed]
        return joined(*order, *ends, -late)

    def _groups(self, part: int) -> list[tuple[int, EagerBlock | None]]:
        """Return the groups of parameters that replicas share: bytes, and the block; None for a table."""
        found: list[tuple[int, EagerBlock | None]] = [(self.table + self.positions, None)] * (part == 0)
        for block, count in zip(self.blocks, self.plan.part_layers(part), strict=True):
            found += [(block.weights, block)] * count
        return found + [(self.table, None)] * (part == self.plan.pipeline * self.plan.chunks - 1)

    def _gathered_forward(self, part: int) -> Stretch:
        """Return a forward pass whose parameters are gathered: those of a group, while the one before computes."""
        groups = self._groups(part)
        steps: list[Part] = [self.row, groups[0][0]]
        for number, ((size, block), (after, _)) in enumerate(pairwise([*groups, (0, None)])):
            is_head = block is None and part + number > 0
            if not block or not number or block is not groups[number - 1][1]:
                body = [block.forward()] if block else self.head[: 2 * is_head]
            steps += [size, -size, after, *body, -size, *self.head[2:] * is_head]
        return joined(*steps)

    def _reduced_backward(self, part: int, seen: bool) -> Stretch:
        """Return a backward pass that reduces gradients to slices: those of a group, while the next one computes."""
        plan, row, groups = self.plan, self.row, self._groups(part)[::-1]
        is_last, is_again = groups[0][1] is None, plan.zero_stage == 3
        added, replicas = 1 + (plan.zero_stage == 1 and (seen or self.keeps)), plan.data * plan.context
        # Of gradients that were reduced a new slice stays.
        is_new = not self.keeps and (not seen or plan.zero_stage == 1)
        sent, held = row * (not is_last), 0
        steps: list[Part] = [*(self.cast if is_last else (row,)), groups[0][0] * is_again]
        for number, ((size, block), (after, next_block)) in enumerate(pairwise([*groups, (0, None)])):
            is_lookup = part == 0 and number == len(groups) - 1
            flat, ahead = size * (is_again and not is_lookup), after * (is_again and next_block is not None)
            gradient = _into(size, size, added)
            if is_lookup:
                body: list[Part] = [self.summed, *gradient, -self.summed]
            elif block is None:
                body = [size - flat, -self.of_logits - size, *gradient, -row]
            elif not number or block is not groups[number - 1][1]:
                body = [block.backward(added, flat, size)]
            steps += [flat, -flat, ahead, *body, sent * (number == 0), held // replicas * is_new - held]
            held = size
        return joined(*steps, held // replicas * is_new - held, -row - 2 * sent)
