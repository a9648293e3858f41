"""The kernels of a stage of a transformer for one micro-batch: their flops, bytes and shapes.

A device whose software is "eager" runs a kernel for each op, without dropouts (`Op.eager_work`). Any other one runs the
kernels of Narayanan et al. 2021, section 4.2: bias and GeLU are one kernel, as are bias, dropout and sum, and scale,
mask and softmax; each reads its inputs and writes its outputs once.
"""

from __future__ import annotations

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
from simparallel.machine.achieved import COLUMN_SUM
from simparallel.machine.device import DeviceWork
from simparallel.machine.products import MatrixProduct
from simparallel.simulate.transformer import TrainingPlan, Weight


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

    forward: list[DeviceWork]
    backward: list[DeviceWork]
    weights: list[DeviceWork]
    shown: int
    hidden: int
    rounds: int = 0
    exchanges: int = 0
    sums: tuple[int, ...] = ()


def stage_work(plan: TrainingPlan, stage: int, gradient_bytes: int, software: str) -> list[tuple[int, Pass]]:
    """Return the kernels of a stage for one micro-batch: how many equal parts it has, and the work of one."""
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    tokens, h = plan.tokens, shape.width
    # Tokens of norms and dropouts, which the tensor group shares only under sequence parallelism.
    own = tokens // t if plan.sequence_parallel else tokens
    blocks = zip(plan.count_layers(stage), (False, True), strict=True)
    work = [(count, _block_work(plan, gradient_bytes, is_sparse, software)) for count, is_sparse in blocks if count]
    vocabulary = -(-shape.vocabulary // t)
    is_last, is_by_op = stage == plan.pipeline - 1, runs_by_op(plan, software)
    if stage == 0 and is_by_op:
        calls: list[Call] = [(instance(Embedding), (tokens,), (vocabulary, h))]
        if rows := shape.full.num_positions:
            length = shape.length // plan.context
            calls += [
                (instance(Embedding), (length,), (rows, h)),
                (instance(Add), (own // length, length, h), (length, h)),
            ]
        work.insert(0, (1, Pass(*_by_op(plan, software, calls), 1, 0)))
    elif stage == 0:
        # The table is divided by tokens: each device looks up its own, and the parts are added.
        lookup, scatter = of_bytes(2 * item * tokens * h), of_bytes((item + 2 * gradient_bytes) * tokens * h)
        dropout = [of_bytes((2 * item + 1) * own * h)] * shape.has_dropout
        work.insert(0, (1, Pass([lookup, *dropout], [*dropout, scatter], [], 1, 0)))
    if is_by_op and (shape.has_bias or shape.has_query_norm):
        # One device adds the biases of the linear layers that end a branch, and each has its own heads of a norm. Their
        # gradients travel together, those of a part of the model, or of a block that is recomputed.
        each = item * 2 * (h * shape.has_bias + shape.full.head_size * shape.has_query_norm)
        layers = sum(plan.count_layers(stage))
        calls_count = layers if plan.recompute == "full" or plan.zero_stage else plan.chunks
        # Those that are added to a sum so far, one by one.
        calls_count *= 1 + (plan.zero_stage == 1 and plan.num_micro_batches > 1)
        work.insert(0, (1, Pass([], [], [], 0, 0, sums=(each * layers // calls_count,) * calls_count)))
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
        convert = of_bytes((item + 4) * logits)
        norm, norm_backward = of_bytes(2 * item * own * h), of_bytes(3 * item * own * h)
        forward = [norm, _product(tokens, h, vocabulary, item), convert, of_bytes(8 * logits)]
        back = [convert, _product(tokens, vocabulary, h, item), norm_backward]
        weights = [_weight_gradient(tokens, h, vocabulary, item, gradient_bytes)]
        work.append((1, Pass(forward, back, weights, 0, 1)))
    return work


def _block_work(plan: TrainingPlan, gradient_bytes: int, is_sparse: bool, software: str) -> Pass:
    """Return the kernels of a block for one micro-batch."""
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    full, tokens, h = shape.full, plan.tokens, shape.width
    is_by_op = runs_by_op(plan, software)
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
    # The input gradient of a linear layer costs as much as its forward.
    of_inputs = [_product(rows, weight.columns, weight.inner, item, count) for rows, count, weight in parts]
    weights = [
        _weight_gradient(rows, weight.inner, weight.columns, item, gradient_bytes, count)
        for rows, count, weight in parts
    ]
    again, exchanged = plan.recompute == "full", [of_bytes(moved)] * 2 * is_sparse
    if is_by_op:
        between, between_backward, of_weights = _by_op(plan, software, _block_calls(plan, inner, is_sparse))
        forward = [*products, *exchanged, *between]
        backward = [*forward * again, *of_inputs, *exchanged, *between_backward]
        weights += of_weights
        return Pass(forward, backward, weights, 2 + 2 * again, 2, 3 + again, (4 + 2 * again) * is_sparse)
    turned = 2 * item * tokens * (shape.num_heads // t + shape.kv_heads(t)) * full.head_size
    moves = [of_bytes(turned)] * (not full.num_positions) + exchanged
    core, core_backward = attention(plan)
    between, between_backward = _between(plan, inner)
    forward = [*products, *moves, *between]
    recomputed = {"none": [], "selective": [] if plan.fused_attention else core, "full": forward + core}[plan.recompute]
    backward = [*recomputed, *of_inputs, *core_backward, *moves, *between_backward]
    return Pass(forward + core, backward, weights, 2 + 2 * again, 2, 3 + again, (4 + 2 * again) * is_sparse)


def _between(plan: TrainingPlan, inner: int) -> tuple[list[DeviceWork], list[DeviceWork]]:
    """Return the kernels of a block beside its matrix products and its attention: forward and backward.

    Args:
        plan: the model, and how it is cut.
        inner: number of elements that the activation function gives on a device.
    """
    shape, t, item = plan.shape, plan.tensor, plan.item_bytes
    tokens, h = plan.tokens, shape.width
    own = tokens // t if plan.sequence_parallel else tokens
    mask, gated = shape.has_dropout, shape.is_gated
    forward = [of_bytes(2 * item * own * h)] * 2
    forward += [of_bytes((3 * item + mask) * own * h)] * 2 + [of_bytes((2 + gated) * item * inner)]
    # Norms read the input and the gradient and write a gradient, which is then added to that of the residual; a dropout
    # reads the gradient and the mask.
    backward = [of_bytes(3 * item * own * h)] * 4 + [of_bytes((2 * item + mask) * own * h)] * 2 * mask
    return forward, backward + [of_bytes((3 + 2 * gated) * item * inner)]


# An op, and the shapes of its inputs.
Call = tuple[Any, ...]


def runs_by_op(plan: TrainingPlan, software: str) -> bool:
    """Return whether the kernels are those that ops have on this software, one after the other."""
    return software == "eager" or (software == "plain" and not plan.fused_attention)


def _norm(plan: TrainingPlan, rows: int, size: int) -> Call:
    if plan.shape.has_layer_norm:
        return instance(LayerNorm), (rows, size), (size,), (size,)
    return instance(RMSNorm), (rows, size), (size,)


def _block_calls(plan: TrainingPlan, inner: int, is_sparse: bool) -> list[Call]:
    """Return the ops of a block, as `models.Decoder` calls them; without the linear layers of a sparse MLP.

    Args:
        plan: the model, and how it is cut.
        inner: number of elements that the activation function gives on a device.
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


def _by_op(plan: TrainingPlan, software: str, calls: list[Call]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the kernels of ops: forward, backward, and the gradients of weights."""
    each = [_kernels(plan.item_bytes, software, *call) for call in calls]
    forward, backward, weights = ([kernel for kernels in each for kernel in kernels[part]] for part in range(3))
    return forward, backward, weights


@lru_cache(maxsize=1 << 14)
def _kernels(itemsize: int, software: str, op: Op, *shapes: tuple[int, ...]) -> tuple[tuple[DeviceWork, ...], ...]:
    """Return the kernels of an op: forward, backward, and the gradients of weights where these can come later."""
    value = f"f{itemsize}"
    dtypes = {CrossEntropy: ("f4", "i8"), Embedding: ("i8", value)}.get(type(op), (value,) * len(shapes))
    plan = op._make_plan(tuple((shape, np.dtype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)))

    def kernels(*needs: bool) -> tuple[DeviceWork, ...]:
        # Measured costs are those of a whole backward.
        work = op.cost(plan, software, needs or None)._replace(name="")
        # A view has no kernel.
        return (work,) * bool(work.flops or work.size_bytes)

    floats = tuple(spec.dtype.kind == "f" for spec in plan.inputs)
    if not isinstance(op, (Linear, LayerNorm, RMSNorm)):
        return kernels(), kernels(*floats), ()
    # A kernel of its own sums the gradient of a bias.
    bias = (of_bytes(round(plan.output.size_bytes / COLUMN_SUM)),) * (isinstance(op, Linear) and len(shapes) > 2)
    return kernels(), kernels(True, *[False] * (len(shapes) - 1)), (*kernels(False, True), *bias)


def attention(plan: TrainingPlan) -> tuple[list[DeviceWork], list[DeviceWork]]:
    """Return the kernels between the query-key-value projection and the output projection: forward and backward.

    Separate kernels compute all scores: two batched matrix products, softmax with mask, dropout. A fused kernel
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
        forward = _multiplied(flops * (keys + values) // 2, features, item, fused)
        return [forward], [_multiplied(flops * (3 * keys + 2 * values) // 2, 2 * features, item, fused)]
    scores = heads * tokens * s

    def product(size: int, is_out: bool) -> DeviceWork:
        """Return the matrix product whose result, or else whose input, are the scores of heads with these features."""
        made = MatrixProduct(batch, rows, s, size) if is_out else MatrixProduct(batch, rows, size, s)
        return _multiplied(flops * size, item * (tokens * size * (heads + kv_heads) + scores), item, made)

    softmax, softmax_backward = of_bytes(2 * item * scores), of_bytes(3 * item * scores)
    dropout = [of_bytes((2 * item + 1) * scores)] * shape.has_dropout
    of_values = [product(values, is_out=True), product(values, is_out=False)]
    of_keys = [product(keys, is_out=False)] * 2
    forward_core = [product(keys, is_out=True), softmax, *dropout, product(values, is_out=False)]
    return forward_core, [*of_values, *dropout, softmax_backward, *of_keys]


def of_bytes(size_bytes: int) -> DeviceWork:
    """Return a kernel that only reads and writes bytes."""
    return DeviceWork("", 0, size_bytes)


def _multiplied(flops: int, size_bytes: int, itemsize: int, product: MatrixProduct) -> DeviceWork:
    """Return a kernel of a matrix product."""
    return DeviceWork("", flops, size_bytes, itemsize, 0, True, (product,))


def _product(rows: int, inner: int, columns: int, item: int, count: int = 1) -> DeviceWork:
    """Return the kernel of the product of (rows, inner) and (inner, columns); `count` weights share the rows."""
    size_bytes = item * (rows * inner + count * inner * columns + rows * columns)
    product = MatrixProduct(count, -(-rows // count), columns, inner)
    return _multiplied(2 * rows * inner * columns, size_bytes, item, product)


def _weight_gradient(rows: int, inner: int, columns: int, item: int, gradient_bytes: int, count: int = 1) -> DeviceWork:
    """Return the kernel of the gradient of (inner, columns) weights, which adds to the gradient so far."""
    size_bytes = item * rows * (inner + columns) + 2 * gradient_bytes * count * inner * columns
    product = MatrixProduct(count, inner, columns, -(-rows // count))
    return _multiplied(2 * rows * inner * columns, size_bytes, item, product)
