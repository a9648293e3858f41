"""The program of a plan: a transformer that is trained as the plan cuts it, in real or in a dry run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from simparallel.autograd import Tensor, functions as F
from simparallel.comm import current
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh
from simparallel.models.decoder import Decoder
from simparallel.nn.deferred import no_init_parameters
from simparallel.optim import AdamW
from simparallel.parallel.operator.distribute import distribute_module
from simparallel.parallel.pipeline.pipeline import Pipeline
from simparallel.parallel.sharded.fully_shard import fully_shard
from simparallel.simulate.transformer import TrainingPlan, TransformerShape
from simparallel.simulate.transformer_memory import FORMULAS

# Where parameters, gradients and states of optimizers are, for each stage of ZeRO, see `fully_shard`.
_LETTERS = ("RPR", "RPS", "RSS", "SSS")


def decoder(shape: TransformerShape, recompute: bool = False, dtype: Any = np.float32) -> Decoder:
    """Return the model of these sizes, which has no experts and no latent attention, and trains without dropout."""
    full = shape.full
    return Decoder(
        shape.vocabulary, shape.num_layers, shape.num_heads, shape.width, num_kv_heads=full.num_kv_heads,
        head_size=full.head_size, mlp_width=full.mlp_width, is_gated=shape.is_gated,
        has_layer_norm=shape.has_layer_norm, has_query_norm=shape.has_query_norm, has_qkv_bias=shape.has_qkv_bias,
        has_bias=shape.has_bias, num_positions=full.num_positions or 0, is_tied=shape.is_tied, recompute=recompute,
        dtype=dtype,
    )  # fmt: skip


def runnable(plan: TrainingPlan, schedule: str = "1f1b") -> TrainingPlan | None:
    """Return the plan as `train` runs it, or None if it cannot; the schedule as for `predict_transformer`.

    Whole gradients are exchanged after the last backward pass, slices beside compute; messages are sent while stages
    compute, and nothing is cut along the sequence.
    """
    shape = plan.shape.full
    # A group gathers a table for one child, and the gradients of its weights do not come later than those of inputs.
    is_sharded = plan.zero_stage and not shape.is_tied and schedule in FORMULAS
    is_known = not (shape.num_experts or shape.kv_rank) and plan.context == 1 and (is_sharded or not plan.zero_stage)
    # Each device has whole heads of keys, and as many rows of the table as the others.
    if (
        not is_known
        or plan.recompute == "selective"
        or shape.num_kv_heads % plan.tensor
        or shape.vocabulary % plan.tensor
    ):
        return None
    return replace(plan, sequence_parallel=False, overlap_data=plan.zero_stage > 0, overlap_messages=True)


def train(plan: TrainingPlan, schedule: str = "1f1b", tokens: np.ndarray | None = None, steps: int = 1) -> list[Any]:
    """Train a plan's model on the ranks of this run, and return the losses; each rank makes the same call.

    Args:
        plan: one that is `runnable`.
        schedule: see `predict_transformer`.
        tokens: (global batch, length + 1); None for zeros.
        steps: their number.
    """
    mesh = Mesh((plan.pipeline, plan.data, plan.tensor), ("pp", "dp", "tp"))
    with no_init_parameters():
        model = decoder(plan.shape, plan.recompute == "full", np.dtype(f"f{plan.item_bytes}"))
    stages, rank = _stages(plan), current().rank
    if plan.tensor > 1:
        layout, cuts = Layout((plan.tensor,), ("tp",), mesh.group("tp", rank)), model.cuts("tp")
        stage = mesh.coordinate(rank)[0]
        # Of other stages a rank has no slices of a tensor group.
        for child in {name.removesuffix(".weight") for names in stages[stage :: plan.pipeline] for name in names}:
            own = {name.removeprefix(f"{child}."): cut for name, cut in cuts.items() if name.startswith(f"{child}.")}
            distribute_module(model.get_submodule(child), layout, own)
    for child in (name for names in stages for name in names) if plan.zero_stage else ():
        # A group of the last norm alone would cost more time than it saves memory.
        if child != "norm":
            fully_shard(model.get_submodule(child), mesh, "dp", *_LETTERS[plan.zero_stage])
    name = "interleaved_1f1b" if plan.chunks > 1 and schedule == "1f1b" else schedule
    pipeline = Pipeline(
        model, _loss, plan.num_micro_batches, name, stages, plan.chunks if plan.chunks > 1 else None, mesh
    )
    optimizer, losses = AdamW(pipeline.parameters()), []
    count = plan.micro_batch * plan.num_micro_batches
    if tokens is None:
        batch = np.zeros((count, plan.shape.length + 1), np.int64)
    else:
        batch = tokens[count * pipeline.replica :][:count]
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch[:, :-1], batch[:, 1:]).item())
        optimizer.step()
    return losses


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(logits if logits.dtype == np.float32 else logits.astype(np.float32), labels.reshape(-1))


def _stages(plan: TrainingPlan) -> list[list[str]]:
    """Return the names of the children of each stage."""
    count = plan.pipeline * plan.chunks
    each, more = divmod(plan.shape.num_layers, count)
    ends = [stage * each + min(stage, more) for stage in range(count + 1)]
    stages = [[f"blocks.{i}" for i in range(*ends[stage : stage + 2])] for stage in range(count)]
    stages[0][:0] = ["tokens", "positions"] if plan.shape.full.num_positions else ["tokens"]
    stages[-1] += ["norm", "tokens.weight" if plan.shape.is_tied else "head"]
    if count == 1 and plan.shape.is_tied:
        stages[-1].pop()
    return stages
